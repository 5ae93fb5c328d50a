"""`advise` as a user meets it: inputs, text, JSON, pictures, refusals."""

import gzip
import importlib.util
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fragscope.cli import main
from fragscope.recording import encode_sample
from fragscope.sources.lengths import LengthsError, LengthsTally, read_lengths
from tests.advise.configs import LLAMA_70B
from tests.advise.past import CARD, DAY, HOUR, Life, samples
from tests.paths import DATA, VLLM_032
from tests.servers import answering, page, serving
from tests.sources.test_bad_input import GOOD
from tests.sources.test_sysfs import add_card

AZURE = str(DATA / "traces" / "azure_conv.csv.gz")


@pytest.fixture(autouse=True)
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "sys"
    add_card(root, 1, "0000:c1:00.0")
    monkeypatch.setenv("FRAGSCOPE_SYSFS_ROOT", str(root))


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the command with JSON output and gives the object."""

    def ask(*arguments: str) -> dict[str, Any]:
        assert main(["advise", *arguments, "--format", "json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return ask


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    return str(file)


@pytest.fixture
def days(tmp_path: Path) -> str:
    """Two days of an engine with room to spare, as a recording."""
    file = tmp_path / "days.jsonl"
    life = Life(used=lambda _: 0.90 * CARD, running=lambda t: 5.0 + t % DAY / HOUR)
    file.write_bytes(b"\n".join(encode_sample(sample) for sample in samples(life, 2 * DAY, 300)) + b"\n")
    return str(file)


def about(engine: dict[str, Any], topic: str) -> dict[str, Any]:
    found: dict[str, Any] = next(advice for advice in engine["advice"] if advice["topic"] == topic)
    return found


def test_a_list_of_lengths_is_enough_for_block_size(asked: Callable[..., dict[str, Any]]) -> None:
    (engine,) = asked("--lengths", AZURE)["engines"]
    now = next(row for row in engine["waste"] if row["current"])
    assert now["block_size"] == 16
    assert 100 * now["point"] == pytest.approx(0.588, abs=0.001)
    assert now["low"] <= now["point"] <= now["high"] <= now["ceiling"]
    assert about(engine, "block_size")["change"] is False


def test_a_model_and_a_card_add_fp8(asked: Callable[..., dict[str, Any]], model: str) -> None:
    told = ("--weights-bytes", "131.4GiB", "--gpu-memory-bytes", "192GiB", "--gpu-memory-utilization", "0.9")
    (engine,) = asked("--lengths", AZURE, "--model-config", model, *told)["engines"]
    assert [row["name"] for row in engine["fp8"]] == ["now", "fp8 weights", "fp8 KV", "fp8 weights and KV"]
    assert engine["pool_tokens"] == pytest.approx(112_700, rel=0.001)
    assert "worth 5.6 % of the pool" in about(engine, "block_size")["sentence"]


def test_a_recording_of_a_real_engine_gets_all_topics(asked: Callable[..., dict[str, Any]]) -> None:
    answer = asked("--recording", str(VLLM_032 / "kv_exhausted.jsonl.gz"), "--backend", "ROCM_ATTN")
    (engine,) = answer["engines"]
    assert (engine["target"], engine["engine"], engine["block_size"]) == ("vllm", "0", 32)
    assert [advice["topic"] for advice in engine["advice"]] == [
        "block_size",
        "gpu_memory_utilization",
        "split",
        "fp8",
        "rolling_restart",
    ]
    assert about(engine, "gpu_memory_utilization")["missing"] == ["gpu"]
    live = next(words for words in about(engine, "block_size")["caveats"] if "running sequences" in words)
    assert "which fits" in live


def test_days_with_room_move_the_ratio_and_show_hours(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--recording", days]) == 0
    shown = capsys.readouterr().out
    assert "set: --gpu-memory-utilization 0.92" in shown
    assert "never raised above 0.92" in shown
    assert "least free VRAM by hour of the day (UTC)" in shown
    assert "  23 h ####" in shown
    assert "about" in shown


def test_several_engines_are_compared_with_each_other(
    tmp_path: Path, days: str, asked: Callable[..., dict[str, Any]]
) -> None:
    other = tmp_path / "other.jsonl"
    life = Life(target="b", version="0.31.0")
    other.write_bytes(b"\n".join(encode_sample(sample) for sample in samples(life, HOUR, 60, 2 * DAY)) + b"\n")
    answer = asked("--recording", days, "--recording", str(other))
    assert len(answer["engines"]) == 2
    assert answer["fleet"][0]["change"] is True
    assert "differ in version" in answer["fleet"][0]["sentence"]


def test_a_live_target_is_scraped_twice(asked: Callable[..., dict[str, Any]]) -> None:
    scraped: list[str] = []

    def counting(connection: object) -> None:
        scraped.append("connection")
        answering({"/metrics": page(GOOD.encode()), "/health": page(b"")})(connection)  # type: ignore[arg-type]

    with serving(counting) as url:
        answer = asked("--target", url, "--interval", "0.3")
    assert answer["engines"][0]["target"] == "vllm"
    assert scraped


def test_nobody_at_home_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--target", "http://127.0.0.1:1", "--interval", "0.2"]) == 2
    assert "fragscope check" in capsys.readouterr().err


def test_before_and_after_names_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(VLLM_032 / f"{name}.jsonl.gz") for name in ("healthy", "kv_exhausted")]
    assert main(["advise", "--compare", *files, "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    verdicts = {row["name"]: row["verdict"] for row in result["compare"]}
    assert verdicts["time to first token, p95"] == "worse"
    assert verdicts["VRAM free at peaks"] == "not known"
    assert "num_gpu_blocks_override: 2000 -> 48" in result["changed"]
    assert main(["advise", "--compare", *files]) == 0
    assert "the load differed too" in capsys.readouterr().out


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_drawn(tmp_path: Path, days: str, suffix: str, begins: bytes) -> None:
    file = tmp_path / f"advice.{suffix}"
    assert main(["advise", "--recording", days, "--lengths", AZURE, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(begins)


def test_a_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["advise", "--lengths", AZURE, "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'fragscope[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lengths", "/nowhere.csv"), "/nowhere.csv cannot be read"),
        (("--recording", "/nowhere.jsonl"), "/nowhere.jsonl cannot be read"),
        (("--recording", AZURE), "holds no reading of an engine"),
        (("--lengths", AZURE, "--model-config", AZURE), "is no JSON"),
        (("--lengths", AZURE, "--plot", "a.txt"), "must be one of"),
        (("--lengths", AZURE, "--plot", "/nowhere/a.png"), "no folder"),
    ],
)
def test_unreadable_input_is_refused_with_a_sentence(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--weights-bytes", "many"),
        ("--weights-bytes", "1.2.3GiB"),
        ("--gpu-memory-utilization", "92"),
        ("--tensor-parallel-size", "0"),
        ("--compare", "a", "b", "--lengths", "c"),
        ("--recording", "a", "--target", "http://x"),
    ],
)
def test_bad_flags_are_usage_errors(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["advise", *arguments])
    assert left.value.code == 2


def test_a_config_that_describes_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    assert main(["advise", "--lengths", AZURE, "--model-config", str(tmp_path)]) == 2
    assert "num_hidden_layers is None" in capsys.readouterr().err


def test_an_unknown_backend_is_noted(asked: Callable[..., dict[str, Any]]) -> None:
    answer = asked("--lengths", AZURE, "--backend", "MY_ATTN")
    assert "MY_ATTN is not in the table" in answer["notes"][0]


@pytest.mark.parametrize(
    "header",
    [
        "arrival_s,prompt_tokens,output_tokens",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "timestamp,input_length,output_length",
        "Timestamp,Request tokens,Response tokens",
    ],
)
def test_columns_are_found_by_the_names_that_public_traces_use(tmp_path: Path, header: str) -> None:
    file = tmp_path / "x.csv"
    file.write_text(f"{header}\n0,100,20\n1,200,30\n")
    assert list(read_lengths(str(file), LengthsTally())) == [(100, 20), (200, 30)]


def test_two_columns_need_no_header_and_bad_rows_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("100,20\nx,3\n\n-1,2\n7\n200,30\n1e400,2\n")
    tally = LengthsTally()
    assert list(read_lengths(str(file), tally)) == [(100, 20), (200, 30)]
    assert tally.sentence() == "4 of 6 rows held no two lengths and were skipped"


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("hello world\n")
    with pytest.raises(LengthsError, match="no columns prompt_tokens and output_tokens"):
        list(read_lengths(str(file), LengthsTally()))


def test_a_torn_gzip_gives_what_came_before(tmp_path: Path) -> None:
    whole = gzip.compress(b"prompt_tokens,output_tokens\n" + b"".join(b"%d,7\n" % i for i in range(1, 20000)))
    file = tmp_path / "x.csv.gz"
    file.write_bytes(whole[: len(whole) // 2])
    tally = LengthsTally()
    assert sum(1 for _ in read_lengths(str(file), tally)) > 100
    assert tally.truncated


def test_a_long_list_streams_in_memory_that_does_not_grow_with_it(
    tmp_path: Path, asked: Callable[..., dict[str, Any]]
) -> None:
    file = tmp_path / "long.csv"
    with file.open("w") as stream:
        stream.write("prompt_tokens,output_tokens\n")
        for i in range(50_000):
            stream.write(f"{i % 2000 + 1},{i % 100}\n")
    tracemalloc.start()
    answer = asked("--lengths", str(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer["engines"][0]["lengths"]["count"] == 50_000
    assert peak < 4 * 2**20


def test_a_model_whose_windows_nobody_knows_is_said_and_the_rest_is_answered(
    tmp_path: Path, asked: Callable[..., dict[str, Any]]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B | {"model_type": "my_model", "sliding_window": 4096}))
    answer = asked("--lengths", AZURE, "--model-config", str(file))
    assert any("KV bytes per token are not known" in note for note in answer["notes"])
    assert about(answer["engines"][0], "block_size")["change"] is False


@pytest.mark.parametrize("option", [("--match", '{a="b"}'), ("--query-range", "1d"), ("--gpu-match", '{a="b"}')])
def test_options_of_prometheus_without_one_are_refused(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "--lengths", AZURE, *option]) == 2
    assert f"{option[0]} asks a Prometheus" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"num_key_value_heads": [4, 8]}, {"hidden_size": 8}, {"layer_types": ["x"]}])
def test_a_model_config_with_fields_of_the_wrong_kind_is_refused_in_a_sentence(
    wrong: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B | wrong))
    assert main(["advise", "--lengths", AZURE, "--model-config", str(file)]) == 2
    assert "Traceback" not in capsys.readouterr().err
