"""What `check` and `record` make of a target's log."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fragscope.cli import main
from tests.explain.test_lines import OOM as HIP
from tests.servers import answering, page, serving
from tests.sources.logs import append
from tests.sources.test_bad_input import GOOD
from tests.sources.test_sysfs import add_card

RUN = (sys.executable, "-m", "fragscope")
ANSWERS = {"/metrics": page(GOOD.encode()), "/health": page(b"")}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    add_card(tmp_path / "sys", 1, "0000:c1:00.0")
    monkeypatch.setenv("FRAGSCOPE_SYSFS_ROOT", str(tmp_path / "sys"))
    monkeypatch.setenv("FRAGSCOPE_TARGETS__0__LOG", str(tmp_path / "vllm.log"))
    return tmp_path / "vllm.log"


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_check_says_what_it_sees_of_the_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(log, f"INFO 11-30 15:00:00 [core.py:1] serving\n{HIP}\n")
    with serving(answering(ANSWERS)) as url:
        assert main(["check", "--target", url, "--format", "json"]) == 0
    words = json.loads(capsys.readouterr().out)["sources"][-1]
    assert words["ok"] is True
    assert words["source"] == f"log {log}"
    assert "(plain text); 2 lines in the last 900 s, which say 1 x oom" in words["what"]


def test_check_says_of_a_silent_log_that_it_is_followed(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(log, "long ago\n")
    os.utime(log, (time.time() - 5000,) * 2)
    with serving(answering(ANSWERS)) as url:
        assert main(["check", "--target", url]) == 0
    assert "no line in the last 900 s" in shown(capsys)


def test_check_says_why_a_log_cannot_be_read(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answering(ANSWERS)) as url:
        assert main(["check", "--target", url]) == 3
    assert "absent:" in shown(capsys)


@pytest.mark.parametrize("raw", [[], ["--raw"]])
def test_a_recording_with_the_log_replays_to_what_the_log_said(log: Path, tmp_path: Path, raw: list[str]) -> None:
    append(log, "INFO 11-30 15:00:00 [core.py:1] serving\n")
    out = tmp_path / "recording.jsonl"
    with serving(answering(ANSWERS)) as url:
        writer = threading.Timer(2.5, append, (log, HIP + "\n"))
        writer.start()
        command = [*RUN, "record", "--target", url, "--interval", "0.3", "--for", "4", "--out", str(out), *raw]
        subprocess.run(command, check=True, timeout=60)
        writer.join()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    if raw:
        assert [row["line"] for row in rows if row["kind"] == "log"] == [
            "INFO 11-30 15:00:00 [core.py:1] serving",
            HIP,
        ]
    else:
        assert [fact["what"] for row in rows for fact in row.get("log_facts", [])] == ["oom"]
    done = subprocess.run([*RUN, "replay", str(out), "--format", "json"], capture_output=True, text=True, check=False)
    final = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, final["phase"], final["cause"]) == (1, "confirmed", "fragmentation")


def test_a_raw_recording_of_a_silent_log_says_once_that_it_was_there(log: Path, tmp_path: Path) -> None:
    append(log, "")
    out = tmp_path / "recording.jsonl"
    with serving(answering(ANSWERS)) as url:
        command = [*RUN, "record", "--target", url, "--interval", "0.3", "--for", "2", "--out", str(out), "--raw"]
        subprocess.run(command, check=True, timeout=60)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["line"] for row in rows if row["kind"] == "log"] == [""]
    done = subprocess.run([*RUN, "replay", str(out), "--format", "json"], capture_output=True, text=True, check=False)
    assert "log" not in json.loads(done.stdout.splitlines()[-1])["missing"]
