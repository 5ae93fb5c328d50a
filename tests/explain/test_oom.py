"""The allocator's message in all its variants, and in every condition that logs leave it in."""

import html
import json
import random

import pytest

from fragscope.explain.findings import Kind
from fragscope.explain.oom import read_messages
from tests.explain.readings import findings, message

GIB, MIB = 2**30, 2**20
WHOLE = message("2.50 GiB", "830.00 MiB", "181.29 GiB", "9.87 GiB", "191.98 GiB", private="1.50 GiB")
FIGURES = {
    "tried": 2.5 * GIB,
    "total": round(191.98 * GIB),
    "free": 830 * MIB,
    "allocated": round(181.29 * GIB),
    "private_pools": 1.5 * GIB,
    "reserved_unallocated": round(9.87 * GIB),
}

VARIANTS: dict[str, tuple[str, dict[str, float]]] = {
    "1.0 to 1.3, cached": (
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; "
        "8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)",
        {"tried": 12.5 * MIB, "free": round(9.28 * GIB), "reserved_unallocated": round(4.68 * MIB)},
    ),
    "1.4 to 2.0, allowed": (
        "CUDA out of memory. Tried to allocate 4.00 GiB (GPU 3; 11.93 GiB total capacity; 10.67 GiB already allocated; "
        "515.38 MiB free; 11.93 GiB allowed; 10.92 GiB reserved in total by PyTorch) If reserved memory is >> allocated",
        {"allowed": round(11.93 * GIB), "reserved_total": round(10.92 * GIB), "allocated": round(10.67 * GIB)},
    ),
    "torch_npu": (
        "NPU out of memory. Tried to allocate 1.00 GiB (NPU 0; 60.97 GiB total capacity; 58.00 GiB already allocated; "
        "57.50 GiB current active; 500.00 MiB free; 59.00 GiB reserved in total by PyTorch) If reserved memory is >>",
        {"free": 500 * MIB, "allocated": 58 * GIB, "reserved_unallocated": 1 * GIB},
    ),
    "2.1, capacty": (
        "CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacty of 79.11 GiB of which 391.12 MiB is "
        "free. Process 9 has 50.52 GiB memory in use. Process 8 has 28.19 GiB memory in use. Of the allocated memory "
        "27.48 GiB is allocated by PyTorch, and 1.98 MiB is reserved by PyTorch but unallocated.",
        {"total": round(79.11 * GIB), "others_in_use": round(50.52 * GIB)},
    ),
    "2.3, no index": (
        "CUDA out of memory. Tried to allocate 32.00 MiB. GPU  has a total capacity of 23.68 GiB of which 29.81 MiB is free.",
        {"total": round(23.68 * GIB), "free": round(29.81 * MIB)},
    ),
    "2.12, raw bytes over two lines": (
        "[rank5]:[W611 09:46:02.758148359 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 5\n"
        "  while trying to allocate 671088640 bytes (free: 513736704, total: 85095874560).",
        {"tried": 671088640, "free": 513736704, "total": 85095874560},
    ),
    "XPU": (
        "XPU out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 48.00 GiB of which 0 bytes is free. Of "
        "the allocated memory 40.00 GiB is allocated by PyTorch, and 2.00 GiB is reserved by PyTorch but unallocated. "
        "Please use `empty_cache` to release all unoccupied cached memory.",
        {"free": 0, "allocated": 40 * GIB, "reserved_unallocated": 2 * GIB},
    ),
    "rewritten by hand": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB.\nGPU has 19.53 GiB total, 329.87 MiB "
        "free.\nPyTorch allocated: 18.40 GiB\nReserved but unallocated: 402.27 MiB",
        {"total": round(19.53 * GIB), "allocated": round(18.4 * GIB), "reserved_unallocated": round(402.27 * MIB)},
    ),
    "title only": ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 192.00 GiB.", {"tried": 192 * GIB}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_its_figures_in_bytes(name: str) -> None:
    text, wanted = VARIANTS[name]
    (found,) = [each for each in findings(text) if each.kind is Kind.OOM]
    assert {key: found.facts.get(key) for key in wanted} == wanted


def lined(text: str, width: int, prefix: str = "", padding: int = 0) -> str:
    return "\n".join(prefix + text[i : i + width] + " " * padding for i in range(0, len(text), width))


PREFIX = "(EngineCore_DP0 pid=71) ERROR 05-08 10:00:01 [core.py:1136] "
DAMAGE = {
    "prefixed": PREFIX + WHOLE,
    "prefix doubled": f"2025-05-08T10:00:01.123456789Z [Error] (Process) {PREFIX}{WHOLE}",
    "nested processes": f"(EngineCore_0 pid=1) (VllmWorker TP0 pid=2) ERROR 05-08 10:00:01 [x.py:1] {WHOLE}",
    "rank": "[rank0]: " + WHOLE,
    "wrapped in mid-word": lined(WHOLE, 71, padding=9),
    "wrapped with a prefix on every line": lined(WHOLE, 97, prefix=PREFIX),
    "wrapped at 40 columns": lined(WHOLE, 80),
    "coloured": f"\x1b[0;36m(EngineCore pid=7)\x1b[0;0m \x1b[31mERROR\x1b[0m {WHOLE.replace('HIP', chr(27) + '[1mHIP')}",
    "coloured, pasted": f"^[[0;36m(EngineCore pid=7)^[[0;0m {WHOLE}",
    "in JSON": json.dumps({"log": WHOLE + "\n", "stream": "stderr", "time": "2025-05-08T10:00:01Z"}),
    "in JSON in JSON": json.dumps({"message": json.dumps({"m": WHOLE})}),
    "in a repr": f"Engine loop is not running. Inspect the stacktrace to find the original error: OutOfMemoryError({WHOLE!r}).",
    "HTML": html.escape(WHOLE),
    "bold": f"**{WHOLE[:60]}**{WHOLE[60:]}",
    "CR LF": WHOLE.replace(". ", ".\r\n") + "\r\n",
    "kubernetes": f"2025-10-15T00:02:38.756689123Z stderr F {WHOLE}",
    "compose": f"qwen3-1  | {WHOLE}",
    "vLLM's own wrapping": f"Failed to load model - not enough GPU memory. (original error: {WHOLE})",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_no_damage_changes_a_figure(name: str) -> None:
    (found,) = [each for each in findings(DAMAGE[name]) if each.kind is Kind.OOM]
    assert found.facts == FIGURES


def test_wrapping_anywhere_at_any_width_changes_no_figure() -> None:
    rng = random.Random(7)
    for _ in range(200):
        width = rng.randint(60, 160)
        text = lined(WHOLE, width, prefix=rng.choice(["", "  ", PREFIX]), padding=rng.randint(0, 12))
        found = [each.facts for each in findings(text) if each.kind is Kind.OOM]
        assert found == [FIGURES], text


def test_a_cut_message_says_what_is_missing() -> None:
    (found,) = findings(WHOLE[: WHOLE.index("Of the allocated")])
    assert found.missing == ("allocated", "reserved_unallocated")


def test_a_figure_knows_how_exact_it_is() -> None:
    (told,) = read_messages(WHOLE)
    assert told.figures["total"].uncertainty_bytes == round(0.005 * GIB)
    assert told.figures["free"].uncertainty_bytes == round(0.005 * MIB)


def test_it_says_where_in_the_input_it_stood() -> None:
    (found,) = findings("hello\n\n" + lined(WHOLE, 120) + "\nbye")
    assert (found.first_line, found.last_line) == (3, 3 + (WHOLE.index("unallocated.") + 11) // 120)


def test_two_messages_on_one_line_are_two() -> None:
    assert len(read_messages(f"{WHOLE} {WHOLE}")) == 2


def test_the_lines_after_a_cut_message_are_read_for_themselves() -> None:
    text = "HIP out of memory. Tried to allocate 2.00 GiB.\n(APIServer pid=1) ERROR EngineDeadError"
    assert {each.first_line: each.kind for each in findings(text)} == {1: Kind.OOM, 2: Kind.ENGINE_DEATH}


def test_a_message_without_figures_has_none() -> None:
    assert [each.facts for each in read_messages("RuntimeError: HIP out of memory.")] == [{}]


def test_text_about_memory_is_no_message() -> None:
    assert read_messages("we never ran out of memory") == ()


def test_the_opening_words_may_be_cut_anywhere() -> None:
    opening = WHOLE.index("HIP out of memory.")
    for cut in range(opening, opening + len("HIP out of memory.")):
        text = f"{WHOLE[:cut]}\n{WHOLE[cut:]}"
        assert [each.facts for each in findings(text) if each.kind is Kind.OOM] == [FIGURES], text[:cut]
