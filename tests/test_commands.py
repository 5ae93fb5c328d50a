"""The commands as a user meets them: output, exit codes, signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fragscope.cli import main, parser
from tests.paths import REPOSITORY, VLLM_032
from tests.servers import answering, never_answering, page, serving
from tests.sources.test_bad_input import GOOD, HTML
from tests.sources.test_sysfs import add_card

COMMANDS = ("serve", "check", "replay", "record", "demo")
RUN = (sys.executable, "-m", "fragscope")


@pytest.fixture(autouse=True)
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "sys"
    add_card(root, 1, "0000:c1:00.0")
    monkeypatch.setenv("FRAGSCOPE_SYSFS_ROOT", str(root))
    return root


def run(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=60, check=False, **more)  # type: ignore[call-overload, no-any-return]


def recording(name: str) -> str:
    return str(VLLM_032 / f"{name}.jsonl.gz")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    example = shown[shown.index("example:") :].splitlines()[1].strip()
    parser().parse_args(example.split()[1:])


@pytest.mark.parametrize(
    ("name", "code"), [("healthy", 0), ("kv_exhausted", 0), ("oom_crash_restart", 1), ("oom_crash_restart_log", 1)]
)
def test_replay_exits_with_what_it_found(name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", recording(name)]) == code
    assert "final" in capsys.readouterr().out


def test_replay_prints_changes_and_a_final_object(capsys: pytest.CaptureFixture[str]) -> None:
    main(["replay", recording("oom_crash_restart_log"), "--format", "json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["event"] for row in rows] == ["change"] * (len(rows) - 1) + ["final"]
    final = rows[-1]
    assert final["phase"] == "confirmed"
    assert final["cause"] == "fragmentation"
    first_at, last_at = final["causes_seen"]["fragmentation"]
    assert first_at < last_at
    assert "none" not in final["causes_seen"]


def test_replay_prints_what_spoke_for_and_against_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["replay", recording("oom_crash_restart_log")])
    told, final = capsys.readouterr().out.split("\nfinal")
    for words in (
        "+6.0  the allocator failed to get 2.50 GiB",
        "-2.0  the engine survived",
        "-1.0  how often it is memory",
    ):
        assert words in told
    assert told.count("12 requests were in flight and lost") == 1, "not again where nothing has changed"
    assert "+0.5  12 requests were in flight and lost" in final


def test_replay_of_something_else_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("hello\n")
    assert main(["replay", str(other)]) == 2
    assert "holds nothing to replay" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_replay_without_enough_evidence_ends_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"kind": "exposition", "at": 1, "text": GOOD, "health": 200}) + "\n")
    assert main(["replay", str(path)]) == 3
    assert "unknown" in capsys.readouterr().out


def test_replay_scores_against_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = tmp_path / "label.jsonl"
    label.write_text('{"kind":"label","at":1796050818,"until":1796050820,"cause":"fragmentation"}\n')
    main(["replay", recording("oom_crash_restart_log"), str(label), "--labels"])
    assert "1 of 1 labelled memory episodes found" in capsys.readouterr().out


def test_replay_reads_standard_input() -> None:
    with (VLLM_032 / "healthy.jsonl.gz").open("rb") as stream:
        done = subprocess.run([*RUN, "replay", "-"], stdin=stream, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0


def test_check_says_what_each_source_sees(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})) as url:
        code = main(["check", "--target", url])
    shown = capsys.readouterr().out
    assert code == 0
    assert "KV 25.0 %" in shown
    assert "0000:c1:00.0" in shown
    assert "only_card" in shown


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (page(HTML, "text/html"), "not an exposition"),
        (page(b"", status="500 Oops"), "HTTP 500"),
        (page(b"", status="401 No"), "denied: HTTP 401"),
        (page(b"node_load1 1\n"), "no vLLM metric"),
        (page(b""), "empty"),
    ],
)
def test_check_says_why_an_engine_cannot_be_read(answer: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answering({"/metrics": answer})) as url:
        code = main(["check", "--target", url])
    assert code == 3
    assert words in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_check_with_time_shows_a_trend_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})) as url:
        code = main(["check", "--target", url, "--for", "1s", "--interval", "0.3"])
    shown = capsys.readouterr().out
    assert code == 0
    assert "VRAM peak" in shown
    assert "+0 s" in shown
    assert "clear" in shown


def test_record_writes_what_replay_reads(tmp_path: Path) -> None:
    with serving(answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})) as url:
        for raw, name in (([], "samples.jsonl.gz"), (["--raw"], "raw.jsonl")):
            out = str(tmp_path / name)
            done = run("record", "--target", url, "--interval", "0.3", "--for", "2", "--out", out, *raw)
            assert done.returncode == 0, done.stderr
            again = run("replay", out, "--format", "json")
            final = json.loads(again.stdout.splitlines()[-1])
            assert (again.returncode, final["phase"], final["engine"]) == (0, "clear", "0")


def test_record_of_a_dead_target_replays_as_dead(tmp_path: Path) -> None:
    with serving(never_answering) as url:
        pass
    out = str(tmp_path / "dead.jsonl")
    run("record", "--target", url, "--interval", "0.3", "--for", "1", "--out", out, "--raw")
    lines = [json.loads(line) for line in Path(out).read_text().splitlines()]
    errors = [line["error"] for line in lines if line["kind"] == "exposition"]
    assert errors
    assert all("refused" in error for error in errors)


def test_record_into_a_closed_pipe_ends() -> None:
    with serving(answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})) as url:
        done = subprocess.run(
            f"{sys.executable} -m fragscope record --target {url} --interval 0.2 | head -1",
            shell=True,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert json.loads(done.stdout)["kind"] == "sample"
    assert "Traceback" not in done.stderr


def test_record_to_a_full_disk_is_a_sentence() -> None:
    with serving(answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})) as url:
        done = run("record", "--target", url, "--interval", "0.2", "--for", "10", "--out", "/dev/full")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_does_not_hang_on_a_hung_read(sysfs: Path) -> None:
    used = sysfs / "devices" / "pci" / "0000:c1:00.0" / "mem_info_vram_used"
    used.unlink()
    os.mkfifo(used)
    with serving(answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})) as url:
        done = run("check", "--target", url)
    assert done.returncode == 3
    assert "has not been read in time" in re.sub(r"\s+", " ", done.stdout)


def test_a_flag_that_is_none_gets_the_commands_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", "--taget", "http://x"])
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: fragscope check" in shown
    assert "there is no --taget http://x here" in shown


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "refused: connection refused: nothing listens there"),
        ("http://nowhere.invalid:8000", "cannot be resolved"),
    ],
)
def test_check_says_in_words_why_nobody_answers(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--target", url, "--format", "json"]) == 3
    assert words in capsys.readouterr().out


def test_check_says_that_an_http_server_speaks_no_tls(capsys: pytest.CaptureFixture[str]) -> None:
    def plain(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with serving(plain) as url:
        assert main(["check", "--target", url.replace("http://", "https://"), "--format", "json"]) == 3
    assert "is it an http:// address?" in capsys.readouterr().out


def test_print_config_shows_values_and_where_they_came_from() -> None:
    done = run("serve", "--print-config", "--web.listen-address", ":1234", env={**os.environ, "FRAGSCOPE_HISTORY": "9"})
    assert "web_listen_address = ':1234'  # flag" in done.stdout
    assert "history = 9  # environment (FRAGSCOPE_HISTORY)" in done.stdout
    assert "interval_s = 5.0  # default" in done.stdout


def test_bad_configuration_stops_the_start_with_2_and_names_the_key() -> None:
    done = run("serve", env={**os.environ, "FRAGSCOPE_INTERVAL": "3"})
    assert done.returncode == 2
    assert "FRAGSCOPE_INTERVAL is no setting" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_stops_the_start_with_2_and_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--web.listen-address", f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert "already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_within_five_seconds_with_a_hung_target(number: signal.Signals) -> None:
    with serving(never_answering) as url:
        daemon = subprocess.Popen(
            [*RUN, "serve", "--target", url, "--web.listen-address", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
        )
        assert daemon.stderr is not None
        first = json.loads(daemon.stderr.readline())
        assert first["event"] == "fragscope serves"
        time.sleep(1.0)
        began = time.monotonic()
        daemon.send_signal(number)
        assert daemon.wait(10) == 0
        daemon.stderr.close()
    assert time.monotonic() - began < 5


def test_a_phase_change_is_one_line_with_sentence_cause_and_numbers() -> None:
    with serving(answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})) as url:
        daemon = subprocess.Popen(
            [*RUN, "serve", "--target", url, "--interval", "0.3", "--web.listen-address", "127.0.0.1:0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert daemon.stderr is not None
        verdicts = []
        for line in daemon.stderr:
            row = json.loads(line)
            verdicts += [row] if row["event"] == "verdict" else []
            if verdicts and verdicts[-1]["phase"] == "clear":
                break
        daemon.terminate()
        daemon.communicate(timeout=10)
    assert [row["phase"] for row in verdicts] == ["unknown", "clear"]
    assert {"sentence", "cause", "conditions", "numbers", "probability", "remedy"} <= set(verdicts[-1])


def test_the_demo_reaches_suspected_within_a_minute() -> None:
    began = time.monotonic()
    daemon = subprocess.Popen(
        [*RUN, "demo", "--web.listen-address", "127.0.0.1:0", "--format", "json", "--duration", "60"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert daemon.stdout is not None
    phases = []
    for line in daemon.stdout:
        phases.append(json.loads(line)["phase"])
        if phases[-1] == "suspected":
            break
    daemon.terminate()
    daemon.communicate(timeout=10)
    assert phases[-1] == "suspected"
    assert "clear" in phases
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [("healthy", "none"), ("kv-exhausted", "kv_exhausted"), ("admission-limit", "admission_limit")],
)
def test_the_other_demos_page_nobody_about_memory(scenario: str, cause: str) -> None:
    done = run("demo", "--scenario", scenario, "--duration", "8", "--speed", "40", "--format", "json",
               "--web.listen-address", "127.0.0.1:0")  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert {row["phase"] for row in rows} <= {"unknown", "clear"}
    assert rows[-1]["cause"] == cause


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m fragscope replay {recording('healthy')} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.stderr == ""
