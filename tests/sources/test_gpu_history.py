"""VRAM in a Prometheus: figures in bytes, and a GPU goes to a target only where nothing else is possible."""

from array import array
from collections.abc import Mapping

import pytest

from fragscope.model import Gap, GpuReading, Reason
from fragscope.sources.gpu.history import Card, Place, Placement, cards, place_of

A = {"job": "vllm", "instance": "10.0.0.1:8000", "namespace": "llm", "pod": "a-0", "container": "vllm"}
B = {"job": "vllm", "instance": "10.0.0.2:8000", "namespace": "llm", "pod": "b-0", "container": "vllm"}
BARE_A = {"job": "vllm", "instance": "10.0.0.1:8000"}
BARE_A2 = {"job": "vllm", "instance": "10.0.0.1:8001"}
BARE_B = {"job": "vllm", "instance": "10.0.0.2:8000"}
OURS = {"job": "fragscope", "target": "llama", "gpu": "0000:0c:00.0"}
THEIRS = {"job": "amd", "instance": "10.0.0.1:5000", "serial_number": "S1", "gpu_partition_id": "0"}


Rows = list[tuple[dict[str, str], "array[float]"]]


def figures(
    labels: Mapping[str, str], source: str, size: float = 100.0, used: float = 10.0, peak: float | None = None
) -> tuple[Rows, Rows]:
    names = (
        ("fragscope_gpu_vram_size_bytes", "fragscope_gpu_vram_used_bytes")
        if source == "fragscope"
        else ("gpu_total_vram", "gpu_used_vram")
    )
    rows = [
        ({**labels, "__name__": name}, array("d", [value])) for name, value in zip(names, (size, used), strict=True)
    ]
    return rows, [] if peak is None else [(dict(labels), array("d", [peak]))]


def card(labels: Mapping[str, str], source: str = "fragscope", **values: float) -> Card:
    (found,) = cards(*figures(labels, source, **values))
    return found


def placed(targets: list[Mapping[str, str]], *seen: Card) -> Place | None:
    """Where the first card goes, once all were seen."""
    placement = Placement()
    for labels in targets:
        placement.meet_target(place_of(labels))
    for each in seen:
        placement.meet_card(each)
    return placement.target_of(seen[0])


@pytest.mark.parametrize(
    ("labels", "targets", "owner"),
    [
        pytest.param(OURS | {"instance": "10.0.0.1:23724", "namespace": "llm", "pod": "a-0"}, [A, B], A, id="its pod"),
        pytest.param(OURS | {"instance": "x:1", "pod": "a-0"}, [A, B], A, id="its pod, namespace unsaid"),
        pytest.param(OURS | {"instance": "x:1", "namespace": "else", "pod": "a-0"}, [A, B], None, id="its double"),
        pytest.param(
            OURS | {"instance": "x:1", "pod": "fs", "exported_namespace": "llm", "exported_pod": "b-0"},
            [A, B], B, id="the pod it watches",
        ),
        pytest.param(OURS | {"instance": "10.0.0.1:23724"}, [BARE_A, BARE_B], BARE_A, id="its host"),
        pytest.param(OURS | {"instance": "10.0.0.1:23724"}, [BARE_A, BARE_A2], None, id="two servers on its host"),
        pytest.param(OURS | {"instance": "fragscope:23724"}, [BARE_A], BARE_A, id="a pair on two hosts"),
        pytest.param(OURS | {"instance": "fragscope:23724"}, [BARE_A, BARE_B], None, id="two servers elsewhere"),
        pytest.param(OURS | {"instance": "fragscope:23724"}, [], None, id="no server at all"),
    ],
)  # fmt: skip
def test_fragscopes_gpus_go_to_the_only_server_possible(
    labels: dict[str, str], targets: list[Mapping[str, str]], owner: Mapping[str, str] | None
) -> None:
    assert placed(targets, card(labels)) == (None if owner is None else place_of(owner))


def test_two_fragscopes_on_hosts_of_their_own_cannot_be_told_apart() -> None:
    first, second = (card(OURS | {"instance": f"{name}:23724"}) for name in ("f1", "f2"))
    assert placed([BARE_A], first) == place_of(BARE_A)
    assert placed([BARE_A], first, second) is None


def test_one_fragscope_with_two_targets_is_not_one_servers() -> None:
    first, second = (card(OURS | {"instance": "10.0.0.1:23724", "target": name}) for name in ("x", "y"))
    assert placed([BARE_A], first, second) is None


@pytest.mark.parametrize(
    ("labels", "targets", "owner"),
    [
        pytest.param(THEIRS | {"namespace": "llm", "pod": "b-0"}, [A, B], B, id="the pod that uses it"),
        pytest.param(THEIRS | {"namespace": "llm", "pod": "training"}, [A], None, id="another pod uses it"),
        pytest.param(THEIRS, [BARE_A, BARE_B], BARE_A, id="the only card of the host"),
        pytest.param(THEIRS, [BARE_B], None, id="never by being the only one"),
    ],
)
def test_the_exporters_gpus_are_given_with_more_care(
    labels: dict[str, str], targets: list[Mapping[str, str]], owner: Mapping[str, str] | None
) -> None:
    assert placed(targets, card(labels, "exporter")) == (None if owner is None else place_of(owner))


def test_eight_cards_of_a_host_are_never_all_one_servers() -> None:
    all_eight = [card(THEIRS | {"serial_number": f"S{i}"}, "exporter") for i in range(8)]
    assert placed([BARE_A], *all_eight) is None


def test_what_becomes_ambiguous_is_not_given_any_more() -> None:
    placement = Placement()
    ours = card(OURS | {"instance": "10.0.0.1:23724"})
    placement.meet_target(place_of(BARE_A))
    placement.meet_card(ours)
    assert placement.target_of(ours) == place_of(BARE_A)
    placement.meet_target(place_of(BARE_A2))
    assert placement.target_of(ours) is None


def test_the_exporters_mib_become_bytes_and_peaks_are_never_below_use() -> None:
    reading = card(THEIRS, "exporter", size=196592, used=1273, peak=1200).reading(0, 5.0)
    assert reading == GpuReading(
        5.0, "S1", 196592 * 2**20, 1273 * 2**20, 1273 * 2**20, source="prometheus:device-metrics-exporter"
    )


@pytest.mark.parametrize(("size", "used", "reason"), [(100.0, 0.0, Reason.BLIND), (100.0, float("nan"), Reason.ABSENT)])
def test_nothing_used_is_blindness_and_half_a_reading_none(size: float, used: float, reason: Reason) -> None:
    gap = card(THEIRS, "exporter", size=size, used=used).reading(0, 5.0)
    assert isinstance(gap, Gap)
    assert gap.reason is reason


def test_partitions_are_cards_of_their_own() -> None:
    rows = [row for i in ("0", "1") for row in figures(THEIRS | {"gpu_partition_id": i}, "exporter")[0]]
    assert [each.gpu for each in cards(rows, [])] == ["S1", "S1/1"]


def test_a_series_that_names_no_gpu_is_left_out() -> None:
    assert cards(*figures({"instance": "x:1"}, "exporter")) == []
    assert cards([({"__name__": "gpu_other", "gpu_id": "0"}, array("d", [1.0]))], []) == []
