"""`fragscope explain` as a user meets it: exit codes, JSON, files of every wrapping, a large log."""

import gzip
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fragscope.cli import main
from fragscope.explain.accounting import Part, bar
from fragscope.model import Fact, LogFact, Sample
from fragscope.recording import encode_sample
from tests.explain.readings import message
from tests.paths import VLLM_032

OOM = message("4.00 GiB", "1.00 GiB", "70.00 GiB", "8.00 GiB")
ACCESS = 'INFO:     127.0.0.1:50000 - "POST /v1/completions HTTP/1.1" 200 OK'
MIB = 2**20


def explained(path: Path | str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["explain", str(path), "--format", "json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, told


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_incident_has_the_fields_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = explained(write(tmp_path / "a.log", ACCESS, OOM, ACCESS), capsys)
    assert code == 1
    assert (told["lines_read"], told["lines_unreadable"]) == (3, 0)
    (incident,) = told["incidents"]
    assert {
        "first_line",
        "lines",
        "stage",
        "cause",
        "probabilities",
        "facts",
        "sentence",
        "remedy",
        "evidence",
    } <= incident.keys()
    assert (incident["first_line"], incident["lines"], incident["cause"]) == (2, 1, "fragmentation")
    assert incident["facts"]["tried"] == 4 * 2**30
    assert sum(incident["probabilities"].values()) == pytest.approx(1, abs=0.001)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (ACCESS, 0),
        (OOM, 1),
        ("No available memory for the cache blocks.", 1),
        ("Out of memory: Killed process 9 (VLLM::Worker_TP) total-vm:9kB", 1),
        ("RuntimeError: NCCL error: unhandled cuda error", 0),
        ("This model's maximum context length is 8192 tokens. However, you requested 9000 tokens", 0),
    ],
)
def test_the_exit_code_says_whether_memory_is_to_blame(text: str, code: int, tmp_path: Path) -> None:
    assert main(["explain", str(write(tmp_path / "a.log", text))]) == code


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "none.log")]) == 2
    assert "none.log cannot be read" in capsys.readouterr().err


def test_standard_input_is_read_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fragscope", "explain", "-"],
        input=OOM,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "perfect compaction would have served the request" in done.stdout


def test_a_gzipped_log_that_is_cut_off_is_read_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log.gz"
    noise = "\n".join(random.Random(1).randbytes(60).hex() for _ in range(2000))
    path.write_bytes(gzip.compress(f"{OOM}\n{noise}".encode())[:-20])
    code, told = explained(path, capsys)
    assert code == 1
    assert told["lines_unreadable"] == 1


def test_bytes_that_are_no_text_are_counted_and_cost_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"\xff\xfe\x00 junk\n" + OOM.encode() + b"\n")
    code, told = explained(path, capsys)
    assert (code, told["lines_unreadable"]) == (1, 1)


def test_a_recordings_log_lines_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = explained(VLLM_032 / "oom_crash_restart_log.jsonl.gz", capsys)
    assert code == 1
    (incident,) = told["incidents"]
    assert (incident["cause"], incident["stage"]) == ("fragmentation", "serving")
    assert incident["at"] == 1796050817.5


def test_an_incident_file_is_explained_from_its_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"tried": 4e9, "free": 1e9, "total": 8e10, "allocated": 7e10, "reserved_unallocated": 8e9}
    sample = Sample(5.0, "vllm", log_facts=(LogFact(5.0, "vllm", Fact.OOM, facts, "words"),))
    path = tmp_path / "incident.jsonl.gz"
    path.write_bytes(gzip.compress(encode_sample(sample) + b"\n"))
    code, told = explained(path, capsys)
    assert (code, told["incidents"][0]["cause"]) == (1, "fragmentation")


@pytest.mark.parametrize("form", ["cri", "docker"])
def test_a_container_runtimes_log_gives_each_line_its_time(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stamp = "2026-11-30T15:00:17.5Z"
    cri = [f"{stamp} stdout F {ACCESS}", f"{stamp} stderr P {OOM[:200]}", f"{stamp} stderr F {OOM[200:]}"]
    docker = [json.dumps({"log": f"{line}\n", "stream": "stderr", "time": stamp}) for line in (ACCESS, OOM)]
    code, told = explained(write(tmp_path / "0.log", *(cri if form == "cri" else docker)), capsys)
    assert (code, told["incidents"][0]["at"]) == (1, 1796050817.5)
    assert told["incidents"][0]["facts"]["reserved_unallocated"] == 8 * 2**30


def test_several_files_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write(tmp_path / name, OOM)) for name in ("a.log", "b.log")]
    main(["explain", *paths, "--format", "json"])
    told = json.loads(capsys.readouterr().out)
    assert [each["file"] for each in told["incidents"]] == paths


def test_a_setting_moves_the_judgement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path / "f.toml", "[thresholds]", "mixed_low_ratio = 0.5", "mixed_high_ratio = 0.6")
    main(["explain", str(write(tmp_path / "a.log", OOM)), "--config", str(config), "--format", "json"])
    assert json.loads(capsys.readouterr().out)["incidents"][0]["cause"] != "fragmentation"


def test_the_bar_shows_every_part_and_has_its_width() -> None:
    parts = (Part("live", "#", 79e9), Part("stranded", "!", 1e6), Part("free", ".", 1e9))
    drawn = bar(parts, 60)
    assert len(drawn) == 60
    assert set(drawn) == {"#", "!", "."}


def large_log(path: Path, size_mib: int) -> None:
    """Mostly requests that went well, statistics every few hundred lines, a crash now and then."""
    stats = "INFO 01-01 00:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, "
    block = [ACCESS] * 300 + [stats + "GPU KV cache usage: 41.7%"]
    crash = ["Traceback (most recent call last):"] + ['  File "x.py", line 1, in execute_model'] * 40 + [OOM]
    text = "\n".join(block * 40 + crash) + "\n"
    with path.open("w") as stream:
        written = 0
        while written < size_mib * MIB:
            written += stream.write(text)


def test_a_large_log_is_read_at_constant_memory_and_speed(tmp_path: Path, soak_s: float) -> None:
    size_mib = 200 if soak_s > 60 else 40
    large_log(tmp_path / "big.log", size_mib)
    command = [sys.executable, "-m", "fragscope", "explain", str(tmp_path / "big.log"), "--format", "json"]
    with (tmp_path / "out.json").open("wb") as out:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(command, stdout=out, timeout=300, check=False)
        user_s, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, time.monotonic() - began
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(
        f"{size_mib} MiB in {wall_s:.1f} s, {user_s:.1f} s of CPU: {size_mib / user_s:.1f} MiB/s, {peak_mib:.0f} MiB at most"
    )
    assert size_mib / user_s > 10
    assert peak_mib < 100 or soak_s <= 60
