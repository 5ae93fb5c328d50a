"""The catalogue against the contract in docs/metrics.md, and what a scrape may and may not show."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from fragscope.model import Cause, Fact, Gap, Part, Reason
from fragscope.serve import collector
from fragscope.serve.board import Board, GpuInfo, TargetView, View
from fragscope.serve.collector import CATALOGUE, BoardCollector, Family, registry
from fragscope.serve.feeds import SourceStatus
from fragscope.sources.gpu.crosscheck import Difference
from fragscope.sources.gpu.device import Partition
from tests.paths import REPOSITORY
from tests.stories import CARD, GIB, GPU, Story, crash_without_room

SOURCES = (SourceStatus("vllm").succeeded(1.0, 0.01), SourceStatus("sysfs").failed(Reason.BLIND, 0.1))
DAEMON_WIDE = (
    *tuple(
        f"{name}_"
        for name in ("process", "fragscope_build", "fragscope_collect", "fragscope_exposition", "fragscope_state")
    ),
    "fragscope_incidents_",
)
LABELS = {"namespace": "prod", "pod": "llama-0", "container": "vllm"}


def view_of(story: Story) -> View:
    info = GpuInfo(GPU, "0123456789abcdef", "card1", "renderD128", "only_card")
    target = TargetView("llama-70b", "http://127.0.0.1:8000", LABELS, story.last, SOURCES, (info,), advice=story.advice)
    return View(story.at, (target,), (), 1)


def richer(view: View) -> View:
    """As a privileged daemon sees it: whose memory it is, a partitioned card, every automatic source."""
    (target,) = view.targets
    assert target.assessment is not None
    measures = target.assessment.measures
    own = tuple(replace(gpu, own_bytes=GIB) for gpu in measures.gpus)
    parts, differences = (Partition(0, 24 * GIB, GIB),), (Difference(GPU, "amdsmi", "sysfs", 0),)
    more = tuple(SourceStatus(name).succeeded(1.0, 0.01) for name in ("kfd", "fdinfo", "amdsmi"))
    seen = replace(
        target,
        assessment=replace(target.assessment, measures=replace(measures, gpus=own)),
        gpus=tuple(replace(gpu, partitions=parts, differences=differences) for gpu in target.gpus),
        sources=(*target.sources, *more),
    )
    return replace(view, targets=(seen,))


def page_of(view: View) -> str:
    return generate_latest(registry(Board(view))).decode()


def series(page: str) -> dict[str, float]:
    rows = [line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#")]
    return {head: float(value) for head, _, value in rows}


def value(page: str, name: str, **labels: str) -> float | None:
    for head, number in series(page).items():
        shown = dict(re.findall(r'(\w+)="([^"]*)"', head))
        if head.split("{", 1)[0] == name and labels.items() <= shown.items():
            return number
    return None


def busy_story() -> Story:
    """Every family that this version has evidence for has something to say."""
    story = Story(interval_s=15)
    story.serve(usage=0.97, waiting=5, preempted=2, ok=20, server_errors=1, ticks=8)
    for minute in range(40):
        story.serve(usage=0.4, used=int(0.905 * CARD) + minute * 100 * 2**20, ticks=4)
    return story


def test_the_catalogue_is_the_one_in_the_documentation() -> None:
    rows = re.findall(
        r"^\| `(fragscope_[a-z_]+)` \| ([^|]*) \|", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
    documented = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    assert documented == {family.name: family.labels for family in CATALOGUE}


def test_every_family_can_have_samples() -> None:
    shown = {head.split("{", 1)[0] for head in series(page_of(richer(view_of(busy_story()))))}
    assert {family.name for family in CATALOGUE} - shown == set()


def test_every_series_carries_the_targets_name_and_labels() -> None:
    for head in series(page_of(view_of(busy_story()))):
        if head.startswith(DAEMON_WIDE):
            continue
        for part in ('target="llama-70b"', 'namespace="prod"', 'pod="llama-0"', 'container="vllm"'):
            assert part in head


def test_one_target_one_engine_one_gpu_stay_within_the_budget() -> None:
    assert len(series(page_of(view_of(busy_story())))) <= 150
    assert len(series(page_of(richer(view_of(busy_story()))))) <= 150, "with every automatic source"


def test_the_alert_is_up_while_suspected_and_absent_while_unknown() -> None:
    story = Story()
    story.serve()
    assert value(page_of(view_of(story)), "fragscope_pseudo_oom_suspected") is None
    story.serve()
    assert value(page_of(view_of(story)), "fragscope_pseudo_oom_suspected") == 0
    suspected = Story()
    crash_without_room(suspected)
    page = page_of(view_of(suspected))
    assert value(page, "fragscope_requests_lost_total") == 0, "not before it is sure that the process is gone"
    assert value(page, "fragscope_pseudo_oom_suspected") == 1
    assert value(page, "fragscope_fragmentation_suspected") == 1
    assert value(page, "fragscope_fragmentation_confirmed") == 0
    assert value(page, "fragscope_verdict_phase", phase="suspected") == 1
    assert value(page, "fragscope_verdict_cause", cause="memory_undetermined") == 1
    assert value(page, "fragscope_verdict_cause", cause="none") == 0
    assert value(page, "fragscope_engine_up") == 0
    suspected.refuse(ticks=13)
    assert value(page_of(view_of(suspected)), "fragscope_requests_lost_total") == 12


def test_an_exhausted_card_is_no_fragmentation() -> None:
    story = Story(with_log=True)
    story.serve(ticks=5)
    story.say(Fact.OOM, tried=2.5 * GIB, free=0.5 * GIB, total=CARD, reserved_unallocated=0.0)
    story.serve()
    page = page_of(view_of(story))
    assert value(page, "fragscope_pseudo_oom_suspected") == 1
    assert value(page, "fragscope_fragmentation_suspected") == 0


def test_one_hot_families_are_one_hot() -> None:
    page = page_of(view_of(busy_story()))
    for family in ("fragscope_verdict_phase", "fragscope_verdict_cause"):
        assert sum(n for head, n in series(page).items() if head.startswith(family + "{")) == 1


def test_evidence_that_is_missing_is_not_exposed_as_zero() -> None:
    story = Story(with_gpu=False)
    story.serve(usage=None, ticks=3)
    page = page_of(view_of(story))
    for name in (
        "fragscope_gpu_vram_used_bytes",
        "fragscope_kv_usage_ratio",
        "fragscope_kv_usage_failure_log_odds",
        "fragscope_pseudo_oom_suspected",
        "fragscope_cause_probability",
    ):
        assert value(page, name) is None, name
    assert value(page, "fragscope_evidence_available", evidence="gpu") == 0


def test_a_silent_engine_shows_no_condition_as_false() -> None:
    story = Story()
    story.serve(ticks=5)
    story.time_out(ticks=10)
    assert value(page_of(view_of(story)), "fragscope_condition_active") is None


def test_memory_failures_are_there_from_the_start_for_every_cause() -> None:
    story = Story()
    story.serve()
    counted = [head for head in series(page_of(view_of(story))) if head.startswith("fragscope_memory_failures_total")]
    assert len(counted) == 6


def test_a_family_that_raises_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: View) -> list[collector.Sampled]:
        raise RuntimeError("a bug")

    bad = Family("fragscope_bad", "gauge", "Raises.", (), broken)
    monkeypatch.setattr(collector, "CATALOGUE", (bad, *CATALOGUE))
    page = page_of(view_of(busy_story()))
    assert value(page, "fragscope_exposition_failures_total") == 1
    assert value(page, "fragscope_engine_up") == 1


def test_registering_does_not_collect() -> None:
    class Unread(Board):
        @property
        def view(self) -> View:
            raise AssertionError("a scrape before anybody scraped")

        @view.setter
        def view(self, _: View) -> None:
            return

    names = [metric.name for metric in BoardCollector(Unread(View(0.0))).describe()]
    assert len(names) == len(CATALOGUE)


def test_an_image_tells_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_REVISION", "abc1234")
    assert value(page_of(View(0.0)), "fragscope_build_info", revision="abc1234") == 1


def test_before_the_first_sample_the_page_is_there() -> None:
    waiting = TargetView("llama-70b", "http://x", {})
    page = page_of(View(0.0, (waiting,)))
    assert value(page, "fragscope_build_info") == 1


def test_the_page_is_valid_openmetrics() -> None:
    text = generate_openmetrics(registry(Board(view_of(busy_story())))).decode()  # type: ignore[no-untyped-call]
    names = {family.name for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert "fragscope_pseudo_oom_suspected" in names


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")
def test_promtool_accepts_the_page_without_complaint() -> None:
    page = page_of(view_of(busy_story()))
    found = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_a_gap_needs_no_series_of_its_own() -> None:
    story = busy_story()
    view = view_of(story)
    gapped = replace(view.targets[0], gaps=(Gap(Part.LOG, Reason.ABSENT),))
    assert len(series(page_of(View(view.at, (gapped,))))) == len(series(page_of(view)))


def test_probabilities_are_exposed_for_the_memory_causes() -> None:
    story = Story()
    crash_without_room(story)
    page = page_of(view_of(story))
    undetermined = value(page, "fragscope_cause_probability", cause=str(Cause.MEMORY_UNDETERMINED))
    assert undetermined is not None
    assert undetermined >= 0.9
