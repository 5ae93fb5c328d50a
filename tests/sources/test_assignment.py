"""Whose GPUs they are, beyond the setting and the only card; and which source speaks."""

import pytest

from fragscope.model import Gap, Part, Reason
from fragscope.serve.gpus import Wanted, why_not
from fragscope.settings import load
from fragscope.sources.gpu.assignment import Claimed, Identity, Named, assign
from fragscope.sources.gpu.choice import AUTOMATIC, NAMES, Choice, Role, choose, role, speaker
from fragscope.sources.gpu.crosscheck import difference_bytes, located
from fragscope.sources.gpu.device import Device
from fragscope.sources.gpu.holdings import Held, Owned

GIB = 2**30
FIRST, SECOND, THIRD = (f"0000:{bus}:00.0" for bus in ("05", "26", "46"))
CARDS: tuple[Identity, ...] = tuple(
    Named(gpu, f"{i:016x}", f"card{i}", f"renderD{128 + i}") for i, gpu in enumerate((FIRST, SECOND, THIRD))
)
ABSENT = Gap(Part.GPU, Reason.ABSENT, "no AMD GPU")
APU = Gap(Part.GPU, Reason.UNSUPPORTED, "an APU")


def holding(*gpus: str, opened: tuple[str, ...] = (), source: str = "fdinfo") -> Owned:
    held = Held(source, dict.fromkeys(gpus, 100 * GIB), frozenset((*gpus, *opened)))
    return Owned(0.0, held, held)


def listed(*nodes: str) -> Owned:
    return Owned(0.0, render_nodes=frozenset(nodes))


def gpus(cards: tuple[Identity, ...]) -> list[str]:
    return [card.gpu for card in cards]


def test_the_setting_comes_before_what_the_processes_hold() -> None:
    assigned = assign(CARDS, Claimed((FIRST,)), holding(SECOND))
    assert (gpus(assigned.cards), assigned.rule) == ([FIRST], "configured")


@pytest.mark.parametrize("source", ["fdinfo", "kfd", "nvml"])
def test_what_the_processes_hold_comes_before_the_file(source: str) -> None:
    owned = Owned(0.0, None, holding(SECOND, source=source).holding, None, frozenset({"renderD128"}))
    assigned = assign(CARDS, Claimed(), owned)
    assert (gpus(assigned.cards), assigned.rule) == ([SECOND], source)


def test_a_gpu_that_the_engine_holds_and_nobody_can_read_is_missing_evidence() -> None:
    assigned = assign(CARDS[:2], Claimed(), holding(FIRST, THIRD))
    assert assigned.cards == ()
    assert assigned.gap is not None
    assert THIRD in assigned.gap.detail


def test_opened_gpus_count_only_where_that_leaves_no_choice() -> None:
    both = holding(opened=(FIRST, SECOND))
    assert assign(CARDS, Claimed(), both).rule == "none"
    assert gpus(assign(CARDS, Claimed(expected=2), both).cards) == [FIRST, SECOND]
    assert gpus(assign(CARDS, Claimed(), holding(opened=(FIRST,))).cards) == [FIRST]


def test_where_compute_memory_is_left_out_a_little_of_it_excludes_no_gpu() -> None:
    def undercounted(**held_mib: int) -> Owned:
        sizes = {gpu: held_mib.get(name, 0) << 20 for gpu, name in ((FIRST, "first"), (SECOND, "second"))}
        held = Held("fdinfo", sizes, frozenset(sizes), complete=False)
        return Owned(0.0, held, held)

    both = undercounted(first=300, second=60)
    assert assign(CARDS, Claimed(), both).rule == "none", "a group of two, or one GPU and another only opened"
    assert gpus(assign(CARDS, Claimed(expected=2), both).cards) == [FIRST, SECOND]
    assert gpus(assign(CARDS, Claimed(expected=1), both).cards) == [FIRST]
    assert gpus(assign(CARDS, Claimed(), undercounted(second=60)).cards) == [SECOND]
    assert gpus(assign(CARDS, Claimed(), undercounted(first=300, second=400)).cards) == [FIRST, SECOND]


def test_the_file_names_render_nodes() -> None:
    assigned = assign(CARDS, Claimed(), listed("renderD129", "renderD130"))
    assert (gpus(assigned.cards), assigned.rule) == ([SECOND, THIRD], "render_nodes")


def test_a_container_that_sees_more_gpus_than_its_engine_spans_says_nothing() -> None:
    two, all_three = listed("renderD128", "renderD129"), listed("renderD128", "renderD129", "renderD130")
    for claimed, owned in ((Claimed(expected=1), two), (Claimed(expected=2), all_three), (Claimed(), all_three)):
        assigned = assign(CARDS, claimed, owned)
        assert assigned.cards == ()
        assert assigned.gap is not None
        assert assigned.gap.reason is Reason.UNASSIGNED
    assert len(assign(CARDS, Claimed(expected=3), all_three).cards) == 3
    assert len(assign(CARDS[:1], Claimed(), listed("renderD128")).cards) == 1


def test_a_render_node_of_a_part_leads_to_its_gpu_or_nowhere() -> None:
    assigned = assign(CARDS, Claimed(), listed("renderD140"))
    assert assigned.gap is not None
    assert (assigned.gap.reason, assigned.rule) == (Reason.UNASSIGNED, "render_nodes")
    assert gpus(assign(CARDS, Claimed(), listed("renderD140"), {"renderD140": SECOND}).cards) == [SECOND]


def test_an_unreadable_file_leaves_the_only_card() -> None:
    owned = Owned(0.0, render_nodes=Gap(Part.GPU, Reason.ABSENT, "nodes cannot be read"))
    assert assign(CARDS[:1], Claimed(), owned).rule == "only_card"
    assigned = assign(CARDS, Claimed(), owned)
    assert assigned.gap is not None
    assert "nodes cannot be read" in assigned.gap.detail


def test_fewer_gpus_than_the_engine_spans_exonerate_nobody_by_any_rule() -> None:
    for owned in (holding(FIRST), listed("renderD128")):
        assigned = assign(CARDS, Claimed(expected=2), owned)
        assert assigned.cards == ()
        assert assigned.gap is not None
        assert "1 of the engine's 2 GPUs" in assigned.gap.detail


# Choice.


def test_the_setting_knows_every_source_by_its_name() -> None:
    for name in NAMES:
        figures = name if name not in ("kfd", "fdinfo") else f"sysfs,{name}"
        assert name in load(flags={"gpu_sources": figures}).gpu_names


def test_sysfs_is_first_and_tools_never_come_by_themselves() -> None:
    choice = choose((), lambda _: True)
    assert choice.figures == AUTOMATIC
    assert choice.figures[0] == "sysfs"
    assert {"pyrsmi", "amd_smi_cli", "rocm_smi_cli"}.isdisjoint(choice.figures)
    assert choice.attribution == ("kfd", "fdinfo")


def test_what_cannot_be_tried_is_not_chosen() -> None:
    assert choose((), lambda _: False) == Choice(("sysfs",), ())


def test_a_list_is_obeyed_in_its_order() -> None:
    choice = choose(("rocm_smi_cli", "fdinfo", "sysfs"), lambda _: False)
    assert choice == Choice(("rocm_smi_cli", "sysfs"), ("fdinfo",), automatic=False)
    assert speaker(choice, {"sysfs"}) == "sysfs"
    assert speaker(choice, {"sysfs", "rocm_smi_cli"}) == "rocm_smi_cli"
    assert role(choice, "rocm_smi_cli", "sysfs", ()) is Role.FIGURES


AUTO = choose((), lambda _: True)


def test_beside_sysfs_one_library_checks_and_the_other_vendors_sleeps() -> None:
    assert role(AUTO, "amdsmi", "sysfs", ()) is Role.CHECK
    assert role(AUTO, "nvml", "sysfs", ()) is Role.IDLE


def test_without_amd_gpus_both_libraries_are_asked_until_one_sees_something() -> None:
    assert role(AUTO, "amdsmi", None, (ABSENT,)) is Role.FIGURES
    assert role(AUTO, "nvml", None, (ABSENT,)) is Role.FIGURES
    assert role(AUTO, "amdsmi", "nvml", (ABSENT,)) is Role.FIGURES
    assert role(AUTO, "nvml", "amdsmi", (ABSENT,)) is Role.IDLE


def test_a_gpu_that_is_not_safe_to_read_is_left_alone_by_libraries_too() -> None:
    assert role(AUTO, "amdsmi", None, (APU,)) is Role.IDLE
    assert role(AUTO, "amdsmi", "sysfs", (APU,)) is Role.IDLE


def test_a_library_that_is_not_installed_is_not_usable() -> None:
    class Missing:
        name = "amdsmi"
        closed = 0

        def why_not(self) -> Gap | None:
            return ABSENT

        def close(self) -> None:
            Missing.closed += 1

    assert why_not("amdsmi", Wanted(), {"amdsmi": Missing}) == ABSENT  # type: ignore[dict-item]
    assert Missing.closed == 1


# Holding one source against another.


@pytest.mark.parametrize(
    ("used", "apart"), [(100, 0), (110, 0), (105, 0), (95, -5), (120, 10)], ids=["low", "high", "between", "-", "+"]
)
def test_a_difference_is_what_lies_outside_of_before_and_after(used: int, apart: int) -> None:
    assert difference_bytes(Device(FIRST, 1000, used), 100, 110) == apart
    assert difference_bytes(Device(FIRST, 1000, used), 110, 100) == apart


def test_devices_count_only_with_an_address_that_sysfs_knows() -> None:
    strange = Device("6372:61:1e.7", 10, 5)
    hidden = Device(None, 10, 5, unique_id="00000000000000aa")
    nameless = Device(None, 10, 5)
    twice = Device(FIRST, 10, 5), Device(FIRST, 10, 6)
    found, gaps = located([strange, hidden, nameless, *twice], {FIRST, SECOND}, {"00000000000000aa": SECOND})
    assert [(device.gpu, device.used_bytes) for device in found] == [(SECOND, 5), (FIRST, 5)]
    assert [gap.reason for gap in gaps] == [Reason.MALFORMED, Reason.BLIND, Reason.MALFORMED]


def test_without_sysfs_an_address_is_believed() -> None:
    found, gaps = located([Device(FIRST, 10, 5)], frozenset(), {})
    assert ([device.gpu for device in found], gaps) == ([FIRST], ())
