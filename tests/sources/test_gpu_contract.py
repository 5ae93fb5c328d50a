"""What every source of GPU memory promises, whatever it asks: walked over all of them, with real and hostile input."""

import importlib
import inspect
import json
import math
import pkgutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fragscope.sources.gpu
from fragscope.model import Gap, Reason
from fragscope.sources.gpu.amd_smi_cli import AmdSmiCli
from fragscope.sources.gpu.amdsmi import AmdSmi
from fragscope.sources.gpu.child import Child
from fragscope.sources.gpu.device import Listing, Source
from fragscope.sources.gpu.nvml import Nvml
from fragscope.sources.gpu.plausible import MAX_BYTES
from fragscope.sources.gpu.pyrsmi import PyRsmi
from fragscope.sources.gpu.rocm_smi_cli import RocmSmiCli
from fragscope.sources.gpu.sysfs import Sysfs
from tests.paths import REPOSITORY
from tests.sources.fake_sys import FakeCard, build

MIB = 1 << 20
FIELDS = (
    "devices", "gpu_data", "gpu", "mem_usage", "total_vram", "used_vram", "value", "unit", "total", "used", "bdf",
    "uuid", "card0", "PCI Bus", "VRAM Total Memory (B)", "VRAM Total Used Memory (B)", "processes", "pci_id",
)  # fmt: skip
TOTAL = 196592 * MIB
PACKAGE = fragscope.sources.gpu


def modules() -> Iterator[Any]:
    for found in pkgutil.iter_modules(PACKAGE.__path__):
        yield importlib.import_module(f"{PACKAGE.__name__}.{found.name}")


def source_classes() -> list[type[Any]]:
    """Every class of the package that has the methods of a Source."""
    wanted = ("name", "why_not", "read", "close")
    return [
        kind
        for module in modules()
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and kind is not Source
        if all(hasattr(kind, word) for word in wanted)
    ]


SOURCES = source_classes()
every_source = pytest.mark.parametrize("kind", SOURCES, ids=lambda kind: kind.name)


@dataclass(frozen=True, slots=True)
class Entry:
    """One GPU as a tool might list it; `total` and `used` in the tool's own unit and type, None left out."""

    gpu: str
    total: Any
    used: Any


Tell = Callable[[list[Entry]], Listing]


def _kept(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def by_amdsmi(entries: list[Entry]) -> Listing:
    devices = [_kept(bdf=entry.gpu, uuid="a1", total=entry.total, used=entry.used) for entry in entries]
    return importlib.import_module(AmdSmi.__module__).parse({"devices": devices})  # type: ignore[no-any-return]


def by_pyrsmi(entries: list[Entry]) -> Listing:
    def number(gpu: str) -> int:
        return int(gpu[5:7], 16) << 8 | int(gpu[8:10], 16) << 3 | int(gpu[-1])

    devices = [_kept(pci_id=number(entry.gpu), total=entry.total, used=entry.used) for entry in entries]
    return importlib.import_module(PyRsmi.__module__).parse({"devices": devices})  # type: ignore[no-any-return]


def by_nvml(entries: list[Entry]) -> Listing:
    devices = [_kept(bus=f"0000{entry.gpu.upper()}", total=entry.total, used=entry.used) for entry in entries]
    return importlib.import_module(Nvml.__module__).parse({"devices": devices})  # type: ignore[no-any-return]


def by_amd_smi(entries: list[Entry]) -> Listing:
    """Whole numbers of bytes become MiB, as amd-smi prints them; anything else is printed as it is."""

    def figure(value: Any) -> Any:
        return {"value": value // MIB if type(value) is int else value, "unit": "MB"}

    figures = [
        {
            "gpu": number,
            "mem_usage": _kept(
                total_vram=None if entry.total is None else figure(entry.total),
                used_vram=None if entry.used is None else figure(entry.used),
            ),
        }
        for number, entry in enumerate(entries)
    ]
    names = [{"gpu": number, "bdf": entry.gpu} for number, entry in enumerate(entries)]
    texts = {"metric": json.dumps({"gpu_data": figures}), "list": json.dumps(names)}
    return importlib.import_module(AmdSmiCli.__module__).parse(texts)  # type: ignore[no-any-return]


def by_rocm_smi(entries: list[Entry]) -> Listing:
    cards: dict[str, Any] = {"system": {"Driver version": "6.12.12"}}
    for number, entry in enumerate(entries):
        words = {"PCI Bus": entry.gpu}
        for key, value in (("VRAM Total Memory (B)", entry.total), ("VRAM Total Used Memory (B)", entry.used)):
            if value is not None:
                words[key] = str(value)
        cards[f"card{number}"] = words
    return importlib.import_module(RocmSmiCli.__module__).parse(json.dumps(cards))  # type: ignore[no-any-return]


def by_sysfs(entries: list[Entry], root: Path) -> Listing:
    unique = {entry.gpu: entry for entry in entries}  # the kernel has no two devices at one address
    cards = [
        FakeCard(entry.gpu, "" if entry.used is None else str(entry.used), number, total=str(entry.total))
        for number, entry in enumerate(unique.values())
    ]
    return Sysfs(build(root, cards)).read()


TELLS: dict[str, Tell] = {
    "amdsmi": by_amdsmi,
    "pyrsmi": by_pyrsmi,
    "nvml": by_nvml,
    "amd_smi_cli": by_amd_smi,
    "rocm_smi_cli": by_rocm_smi,
}
LISTS = ("amdsmi", "pyrsmi", "nvml", "amd_smi_cli", "rocm_smi_cli")


@pytest.fixture
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Tell:
    name: str = request.param
    return (lambda entries: by_sysfs(entries, tmp_path / "sys")) if name == "sysfs" else TELLS[name]


through_every_source = pytest.mark.parametrize("tell", ["sysfs", *LISTS], indirect=True)


def test_every_source_is_walked() -> None:
    assert {kind.name for kind in SOURCES} == {"sysfs", *TELLS}, "give the new source its form in this file"


@every_source
def test_a_source_can_be_made_without_words_and_looks_cheaply(kind: type[Any]) -> None:
    source: Source = kind()
    begun = time.process_time()
    why_not = source.why_not()
    assert time.process_time() - begun < 0.1
    assert why_not is None or len(why_not.detail.split()) > 4, "a sentence says what is missing"
    source.close()


@every_source
def test_a_read_says_something_and_never_a_wrong_number(kind: type[Any]) -> None:
    source: Source = kind()
    listing = source.read()
    source.close()
    source.close()
    assert listing.devices or listing.gaps
    must_be_plausible(listing)
    assert all(gap.detail for gap in source.read().gaps), "reading after the end is a gap, not a crash"


@through_every_source
def test_two_gpus_are_two_devices(tell: Tell) -> None:
    listing = tell([Entry("0000:05:00.0", TOTAL, 283 * MIB), Entry("0000:15:00.0", TOTAL, 1283 * MIB)])
    assert listing.gaps == ()
    assert [(device.gpu, device.total_bytes, device.used_bytes) for device in listing.devices] == [
        ("0000:05:00.0", TOTAL, 283 * MIB),
        ("0000:15:00.0", TOTAL, 1283 * MIB),
    ]


HOSTILE_USED: dict[str, Any] = {
    "missing": None,
    "negative": -1 * MIB,
    "more than there is": 2 * TOTAL,
    "a marker of 64 bits": (1 << 64) - 1,
    "a marker of 32 bits, in MiB": ((1 << 32) - 1) * MIB,
    "text": "twelve",
    "N/A": "N/A",
    "another unit": "283 MB",
    "a fraction": 0.3,
    "not a number": math.nan,
    "endless": math.inf,
    "true": True,
    "a list": [283],
    "thousands of digits": "9" * 5000,
}


@through_every_source
@pytest.mark.parametrize("used", HOSTILE_USED.values(), ids=HOSTILE_USED.keys())
def test_an_absurd_figure_is_a_gap_and_leaves_the_other_gpu_alone(tell: Tell, used: Any) -> None:
    listing = tell([Entry("0000:05:00.0", TOTAL, used), Entry("0000:15:00.0", TOTAL, 1283 * MIB)])
    assert [device.gpu for device in listing.devices] == ["0000:15:00.0"]
    assert len(listing.gaps) == 1
    assert len(listing.gaps[0].detail) < 300


@through_every_source
@pytest.mark.parametrize("total", [0, -1 * MIB, "N/A", (1 << 64) - 1, True])
def test_an_absurd_total_is_a_gap(tell: Tell, total: Any) -> None:
    listing = tell([Entry("0000:05:00.0", total, 283 * MIB)])
    assert listing.devices == ()
    assert len(listing.gaps) == 1


@pytest.mark.parametrize("tell", ["sysfs", *(name for name in LISTS if name != "nvml")], indirect=True)
def test_zero_bytes_in_use_is_blindness_on_amd(tell: Tell) -> None:
    listing = tell([Entry("0000:05:00.0", TOTAL, 0)])
    assert listing.devices == ()
    assert [gap.reason for gap in listing.gaps] == [Reason.BLIND]


def test_an_idle_nvidia_gpu_may_have_nothing_in_use() -> None:
    assert [device.used_bytes for device in by_nvml([Entry("0000:05:00.0", TOTAL, 0)]).devices] == [0]


def test_what_nvidias_driver_reserves_is_no_headroom() -> None:
    full = {"bus": "00000000:65:00.0", "total": 143771 * MIB, "used": 143155 * MIB, "reserved": 615 * MIB}
    (device,) = parse_of(Nvml)({"devices": [full]}).devices
    assert device.total_bytes - device.used_bytes == 1 * MIB


@pytest.mark.parametrize("reserved", [-1, 143772 * MIB, "615", True, None])
def test_a_reserve_that_is_none_leaves_no_total(reserved: object) -> None:
    odd = {"bus": "00000000:65:00.0", "total": 143771 * MIB, "used": 5 * MIB, "reserved": reserved}
    assert parse_of(Nvml)({"devices": [odd]}).devices == ()


@pytest.mark.parametrize("tell", LISTS, indirect=True)
def test_no_gpu_at_all_is_blindness(tell: Tell) -> None:
    assert [gap.reason for gap in tell([]).gaps] == [Reason.BLIND]


@pytest.mark.parametrize("tell", LISTS, indirect=True)
def test_a_gpu_listed_twice_is_one(tell: Tell) -> None:
    listing = tell([Entry("0000:05:00.0", TOTAL, 283 * MIB)] * 2)
    assert [device.used_bytes for device in listing.devices] == [283 * MIB]


@pytest.mark.parametrize("tell", LISTS, indirect=True)
def test_a_gpu_listed_twice_with_two_figures_has_none(tell: Tell) -> None:
    listing = tell([Entry("0000:05:00.0", TOTAL, 283 * MIB), Entry("0000:05:00.0", TOTAL, 100000 * MIB)])
    assert listing.devices == ()
    assert [gap.reason for gap in listing.gaps] == [Reason.MALFORMED]


@pytest.mark.parametrize("tell", LISTS, indirect=True)
def test_partitions_are_inside_their_gpu_and_never_beside_it(tell: Tell) -> None:
    parts = [Entry(f"0000:05:00.{number}", 24576 * MIB, None) for number in range(1, 7)]
    parts.append(Entry("0000:05:00.7", 24576 * MIB, 512 * MIB))
    listing = tell([Entry("0000:05:00.0", TOTAL, 4000 * MIB), *parts])
    assert listing.gaps == ()
    (device,) = listing.devices
    assert (device.total_bytes, device.used_bytes) == (TOTAL, 4000 * MIB)
    assert [part.number for part in device.partitions] == [1, 2, 3, 4, 5, 6, 7]
    assert [part.used_bytes for part in device.partitions] == [None] * 6 + [512 * MIB]


@pytest.mark.parametrize("tell", LISTS, indirect=True)
def test_a_gpu_repeated_as_its_own_partitions_is_one_gpu(tell: Tell) -> None:
    listing = tell([Entry(f"0000:05:00.{number}", TOTAL, 283 * MIB) for number in range(8)])
    (device,) = listing.devices
    assert (device.gpu, device.used_bytes, device.partitions) == ("0000:05:00.0", 283 * MIB, ())


with_parse = pytest.mark.parametrize(
    "kind", [kind for kind in SOURCES if kind.name in TELLS], ids=lambda kind: kind.name
)


def parse_of(kind: type[Any]) -> Callable[[object], Listing]:
    parse: Callable[[object], Listing] = importlib.import_module(kind.__module__).parse
    return parse


@with_parse
@pytest.mark.parametrize(
    "raw",
    [
        None, "", "\n\n", "not JSON at all", "{", "[" * 100000, b"bytes", 7, [], {},
        {"devices": None}, {"devices": [None]}, {"devices": [[]]}, "[7]",
        {"metric": 7, "list": "[["}, {"metric": '{"gpu_data": 7}'}, {"metric": "[7]"},
        '{"card0": 7}', "NaN", '{"gpu_data": [{"gpu": "x", "mem_usage": {"total_vram": NaN, "used_vram": Infinity}}]}',
    ],
    ids=lambda raw: repr(raw)[:40],
)  # fmt: skip
def test_nonsense_is_a_gap_and_never_an_exception(kind: type[Any], raw: object) -> None:
    listing = parse_of(kind)(raw)
    assert listing.devices == ()
    assert listing.gaps
    assert all(len(gap.detail) < 300 for gap in listing.gaps)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("N/A")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=20,
)


@with_parse
@given(value=VALUES)
def test_any_value_at_all_is_survived(kind: type[Any], value: object) -> None:
    text = json.dumps(value)
    for raw in (value, {"devices": value}, {"devices": [value]}, text, {"metric": text, "list": text}):
        must_be_plausible(parse_of(kind)(raw))


FIGURES = st.integers(0, 1 << 66) | SCALARS


@pytest.mark.parametrize("name", TELLS)
@given(total=FIGURES, used=FIGURES, second=FIGURES)
def test_any_figures_at_all_give_plausible_devices(name: str, total: Any, used: Any, second: Any) -> None:
    entries = [Entry("0000:05:00.0", total, used), Entry("0000:05:00.0", total, second), Entry("nowhere", total, used)]
    if name == "pyrsmi":
        entries.pop()  # its addresses are numbers
    must_be_plausible(TELLS[name](entries))


def must_be_plausible(listing: Listing) -> None:
    for device in listing.devices:
        assert 0 < device.total_bytes <= MAX_BYTES
        assert 0 <= device.used_bytes <= 1.05 * device.total_bytes
        assert all(0 < part.total_bytes < device.total_bytes for part in device.partitions)


# Tools that hang, crash and babble, through each source that starts one.

IN_A_CHILD: tuple[type[Any], ...] = (AmdSmi, PyRsmi, Nvml)
ON_A_COMMAND_LINE: tuple[type[Any], ...] = (AmdSmiCli, RocmSmiCli)
SCRIPTS = {
    "sleeps": "exec sleep 3600",
    "crashes": "kill -SEGV $$",
    "answers_without_end": "exec yes",
}


@pytest.mark.parametrize("behaviour", SCRIPTS)
@pytest.mark.parametrize("kind", [*IN_A_CHILD, *ON_A_COMMAND_LINE], ids=lambda kind: kind.name)
def test_a_tool_that_misbehaves_is_a_gap(
    kind: type[Any], behaviour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_s = 1.0 if behaviour == "sleeps" else 10.0
    if kind in IN_A_CHILD:
        monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY / 'src'}:{REPOSITORY}")
        source = kind(Child(kind.name, f"tests.sources.gpu_readers:{behaviour}", deadline_s=deadline_s))
    else:
        program = tmp_path / "tool"
        program.write_text(f"#!/bin/sh\n{SCRIPTS[behaviour]}\n")
        program.chmod(0o755)
        source = kind(str(program), deadline_s=deadline_s)
    begun = time.monotonic()
    listing = source.read()
    source.close()
    assert time.monotonic() - begun < deadline_s + 3
    assert listing.devices == ()
    (gap,) = listing.gaps
    assert isinstance(gap, Gap)
    if behaviour == "sleeps":
        assert gap.reason is Reason.TIMEOUT
