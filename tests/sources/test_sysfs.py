"""VRAM from a tree of files like /sys, and whose GPUs they are."""

from dataclasses import replace
from pathlib import Path

import pytest

from fragscope.model import Gap, Reason
from fragscope.sources.gpu.assignment import Claimed, assign, normal
from fragscope.sources.gpu.sysfs import Card, Glance, enumerate_cards, read_gtt_used_bytes, read_used_bytes

TOTAL = 206141652992
USED = 297771008


def add_card(root: Path, number: int, gpu: str, **files: str) -> Path:
    """A card as the kernel shows it; a file of None is left out."""
    device = root / "devices" / "pci" / gpu
    (device / "drm" / f"renderD{127 + number}").mkdir(parents=True)
    shown = {
        "vendor": "0x1002",
        "device": "0x74a1",
        "unique_id": f"{number:016x}",
        "mem_info_vram_total": str(TOTAL),
        "mem_info_vram_used": str(USED),
        "mem_info_gtt_used": "14229504",
        **files,
    }
    for name, text in shown.items():
        (device / name).write_text(text + "\n")
    card = root / "class" / "drm" / f"card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)
    return device


def add_pci(root: Path, address: str, vendor: str, kind: str) -> None:
    """A device of another driver, as the PCI bus lists it."""
    device = root / "bus" / "pci" / "devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add_card(tmp_path, 1, "0000:c1:00.0")
    (tmp_path / "class" / "drm" / "card1-DP-1").mkdir()
    (tmp_path / "class" / "drm" / "renderD128").mkdir()
    return tmp_path


def only(root: Path) -> Card:
    (card,) = enumerate_cards(root).cards
    return card


def test_a_card_is_known_by_its_pci_address(root: Path) -> None:
    card = only(root)
    assert (card.gpu, card.card, card.render) == ("0000:c1:00.0", "card1", "renderD128")
    assert card.unique_id == f"{1:016x}"
    assert card.total_bytes == TOTAL
    assert read_used_bytes(card) == USED
    assert read_gtt_used_bytes(card) == 14229504


def test_other_vendors_and_partitions_are_not_ours(root: Path) -> None:
    add_card(root, 0, "0000:03:00.0", vendor="0x1a03")
    partition = add_card(root, 2, "amdgpu_xcp_1")
    (partition / "mem_info_vram_total").unlink()
    assert [card.gpu for card in enumerate_cards(root).cards] == ["0000:c1:00.0"]
    assert enumerate_cards(root).gaps == ()


def test_gpus_of_nvidia_are_told_from_its_other_devices_and_from_a_management_display(root: Path) -> None:
    add_pci(root, "0000:01:00.0", "0x10de", "0x030200")
    add_pci(root, "0000:01:00.1", "0x10de", "0x040300")
    add_pci(root, "0000:03:00.0", "0x1a03", "0x030000")
    assert enumerate_cards(root).others == ("0000:01:00.0",)


@pytest.mark.parametrize(("size", "beside"), [(str(512 << 20), True), (str(TOTAL), False)])
def test_a_desktop_processors_gpu_beside_nvidias_is_beside_the_point(tmp_path: Path, size: str, beside: bool) -> None:
    add_card(tmp_path, 1, "0000:0e:00.0", mem_info_vram_total=size)
    assert not enumerate_cards(tmp_path).beside_the_point
    add_pci(tmp_path, "0000:01:00.0", "0x10de", "0x030000")
    assert enumerate_cards(tmp_path).beside_the_point == beside


def test_zero_bytes_in_use_is_blindness(root: Path) -> None:
    Path(only(root).used_file).write_text("0\n")
    gap = read_used_bytes(only(root))
    assert isinstance(gap, Gap)
    assert gap.reason is Reason.BLIND


def test_a_total_of_zero_is_blindness_and_no_card(root: Path) -> None:
    add_card(root, 2, "0000:c6:00.0", mem_info_vram_total="0", mem_info_vram_used="0")
    found = enumerate_cards(root)
    assert [card.gpu for card in found.cards] == ["0000:c1:00.0"]
    assert [gap.reason for gap in found.gaps] == [Reason.BLIND]


@pytest.mark.parametrize("failing", ["missing", "a folder", "not a number"])
def test_an_amd_card_without_a_readable_total_is_a_gap_and_the_other_is_not_the_only_one(
    root: Path, failing: str
) -> None:
    total = add_card(root, 2, "0000:c6:00.0", mem_info_vram_total="N/A") / "mem_info_vram_total"
    if failing != "not a number":
        total.unlink()
    if failing == "a folder":
        total.mkdir()  # any error that is neither ENOENT nor a denial
    found = enumerate_cards(root)
    assert len(found.gaps) == 1
    assigned = assign(found.cards, Claimed(), unreadable=len(found.gaps))
    assert (assigned.cards, assigned.rule) == ((), "none")


@pytest.mark.parametrize("text", ["", "N/A", "-1", "1e9", "12 MB", "\x00"])
def test_what_is_no_number_is_malformed(root: Path, text: str) -> None:
    Path(only(root).used_file).write_text(text)
    gap = read_used_bytes(only(root))
    assert isinstance(gap, Gap)
    assert gap.reason is Reason.MALFORMED


def test_more_in_use_than_there_is_is_malformed(root: Path) -> None:
    Path(only(root).used_file).write_text(str(2 * TOTAL))
    gap = read_used_bytes(only(root))
    assert isinstance(gap, Gap)
    assert gap.reason is Reason.MALFORMED


def test_a_card_that_vanished_is_absent(root: Path) -> None:
    card = only(root)
    Path(card.used_file).unlink()
    gap = read_used_bytes(card)
    assert isinstance(gap, Gap)
    assert gap.reason is Reason.ABSENT


def test_a_glance_sees_what_a_read_sees_and_nothing_implausible(root: Path) -> None:
    card = only(root)
    glance = Glance(card)
    used = Path(card.used_file)
    assert glance.used_bytes() == USED
    used.write_text(f"{USED + 5}\n")
    assert glance.used_bytes() == USED + 5
    for text in ("0", "", "N/A", "-1", str(2 * TOTAL)):
        used.write_text(text)
        assert glance.used_bytes() is None
    used.unlink()
    assert glance.used_bytes() is None
    used.write_text(str(USED))
    glance.close()
    glance.close()
    assert glance.used_bytes() is None
    assert Glance(replace(card, used_file="/nowhere/mem_info_vram_used")).used_bytes() is None


def test_an_apu_is_not_read(root: Path) -> None:
    add_card(root, 2, "0000:c6:00.0", device="0x74a0")
    found = enumerate_cards(root)
    assert [card.gpu for card in found.cards] == ["0000:c1:00.0"]
    assert [gap.reason for gap in found.gaps] == [Reason.UNSUPPORTED]


def test_a_machine_without_gpus_is_absent(tmp_path: Path) -> None:
    assert [gap.reason for gap in enumerate_cards(tmp_path).gaps] == [Reason.ABSENT]


def test_the_only_card_belongs_to_the_engine(root: Path) -> None:
    assigned = assign(enumerate_cards(root).cards, Claimed())
    assert assigned.rule == "only_card"
    assert len(assigned.cards) == 1


def test_one_of_two_cards_is_nobodys(root: Path) -> None:
    add_card(root, 2, "0000:c6:00.0")
    assigned = assign(enumerate_cards(root).cards, Claimed())
    assert assigned.cards == ()
    assert assigned.gap is not None
    assert assigned.gap.reason is Reason.UNASSIGNED
    assert "0000:c6:00.0" in assigned.gap.detail


def test_a_card_beside_one_that_cannot_be_read_is_not_the_only_one(root: Path) -> None:
    assigned = assign(enumerate_cards(root).cards, Claimed(), unreadable=1)
    assert assigned.gap is not None
    assert assigned.gap.reason is Reason.UNASSIGNED


@pytest.mark.parametrize(
    "name", ["0000:c6:00.0", "C6:00.0", "00000000:C6:00.0", f"{2:016x}", f"0x{2:016X}", f"GPU-{2:016x}"]
)
def test_cards_are_configured_by_address_or_unique_id(root: Path, name: str) -> None:
    add_card(root, 2, "0000:c6:00.0")
    assigned = assign(enumerate_cards(root).cards, Claimed((name,)))
    assert [card.gpu for card in assigned.cards] == ["0000:c6:00.0"]
    assert assigned.rule == "configured"


def test_a_gpu_configured_in_two_forms_counts_once(root: Path) -> None:
    add_card(root, 2, "0000:c6:00.0")
    twice = Claimed(("C6:00.0", "00000000:C6:00.0", f"0x{2:016X}"))
    assert [card.gpu for card in assign(enumerate_cards(root).cards, twice).cards] == ["0000:c6:00.0"]


def test_a_configured_card_that_is_not_there_is_missing_evidence(root: Path) -> None:
    assigned = assign(enumerate_cards(root).cards, Claimed(("0000:c1:00.0", "0000:ff:00.0")))
    assert assigned.cards == ()
    assert assigned.gap is not None
    assert "0000:ff:00.0" in assigned.gap.detail


def test_fewer_gpus_than_the_engine_spans_exonerate_nobody(root: Path) -> None:
    assigned = assign(enumerate_cards(root).cards, Claimed(expected=8))
    assert assigned.cards == ()
    assert assigned.gap is not None
    assert "1 of the engine's 8 GPUs" in assigned.gap.detail


def test_names_are_compared_in_one_form() -> None:
    assert normal("C6:00.0") == normal("0000:c6:00.0")
