"""`check`: what each source sees or why not, and with time to look, a trend and a verdict."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from fragscope import report
from fragscope.app import access, build_core, gpus_wanted
from fragscope.check_gpus import COLUMNS, Probe, advice, look_at_gpus
from fragscope.detect.detector import Detector
from fragscope.explain.witness import LineReader
from fragscope.model import Assessment, Gap, GpuReading, Outcome, Phase, Sample, Verdict
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EnginePoll, Visitor
from fragscope.serve.gpu_feed import GpuSnapshot
from fragscope.serve.gpus import Gpus, gpus_of
from fragscope.settings import Settings, Target
from fragscope.sources.gpu.assignment import Claimed
from fragscope.sources.gpu.choice import VENDORS, Registry
from fragscope.sources.logs import follow as logs
from fragscope.sources.scrape import Client
from fragscope.wire import encode, verdict_object

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Seen:
    """What one source said."""

    target: str
    source: str
    ok: bool
    words: str


@dataclass(frozen=True, slots=True)
class Look:
    """One pass over everything: a row a target and witness, one a GPU source, and what to grant next."""

    seen: list[Seen]
    probes: list[Probe]
    advice: str


def look(settings: Settings, vendors: Registry = VENDORS) -> Look:
    """One pass over every configured source."""
    clock = Clock()
    wanted = gpus_wanted(settings)
    gpus = Gpus(wanted, clock, threading.Event(), vendors)
    snapshot, probes = look_at_gpus(gpus, wanted, vendors, settings.total_timeout_s)
    gpus.close()
    found: list[Seen] = []
    missing: list[Gap] = []
    for target in settings.targets:
        visitor = Visitor(target.name, Client(target.url, access(settings, target)), clock, None)
        found.append(_engine(target, visitor.poll()))
        row, gaps = _gpus(target, snapshot)
        found.append(row)
        missing += gaps
        if target.log is not None:
            found.append(_log(settings, target, target.log))
    return Look(found, probes, advice(missing, probes))


def _log(settings: Settings, target: Target, where: str) -> Seen:
    source = f"log {where}"
    follower = logs.Follower(where, time.time() - settings.log_lookback_s)
    looks: list[logs.Look] = []
    reader = threading.Thread(target=lambda: looks.append(follower.look()), daemon=True)
    reader.start()
    reader.join(settings.total_timeout_s)
    if not looks:
        return Seen(target.name, source, ok=False, words="stale: it has not been read in time")
    follower.close()
    if looks[0].gap is not None:
        return Seen(target.name, source, ok=False, words=f"{looks[0].gap.reason}: {looks[0].gap.detail}")
    lines = [line for stretch in looks[0].stretches for line in stretch.lines]
    lately = f"in the last {settings.log_lookback_s:.0f} s"
    if not lines:
        return Seen(target.name, source, ok=True, words=f"follows {looks[0].following}; no line {lately}")
    reading = LineReader(target.name)
    facts = [fact for line in lines for fact in reading.feed(line.wall or 0.0, line.text)]
    said = Counter(fact.what for fact in (*facts, *reading.flush()))
    told = ", ".join(f"{count} x {what}" for what, count in said.items()) or "nothing about a failure"
    words = f"follows {looks[0].following} ({lines[-1].form}); {len(lines)} lines {lately}, which say {told}"
    return Seen(target.name, source, ok=True, words=words)


def _engine(target: Target, poll: EnginePoll) -> Seen:
    source = f"vLLM {target.url}"
    if poll.gap is not None:
        return Seen(target.name, source, ok=False, words=f"{poll.gap.reason}: {poll.gap.detail}")
    parts = []
    for engine in poll.engines:
        usage = "unknown" if engine.kv_usage_ratio is None else f"{100 * engine.kv_usage_ratio:.1f} %"
        model = engine.model_name or "unnamed model"
        version = engine.version or "of unknown version"
        load = f"KV {usage}, {_count(engine.running)} running, {_count(engine.waiting)} waiting"
        parts.append(f"engine {engine.engine} ({model}, vLLM {version}): {load}")
    health = f"/health {poll.health}" if poll.health else "/health does not answer"
    bad = f", {len(poll.malformed)} unusable values" if poll.malformed else ""
    return Seen(target.name, source, ok=poll.health in (None, 200), words="; ".join(parts) + f"; {health}{bad}")


def _count(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f}"


def _gpus(target: Target, snapshot: GpuSnapshot) -> tuple[Seen, list[Gap]]:
    claimed = Claimed(target.gpus, target.expected_gpus)
    assigned, gpus, gaps = gpus_of(snapshot, target.name, claimed, float("-inf"))
    if gaps:
        return Seen(target.name, "GPU", ok=False, words=f"{gaps[0].reason}: {gaps[0].detail}"), gaps
    words = "; ".join(_gpu_words(gpu) for gpu in gpus)
    return Seen(target.name, f"GPU {gpus[0].source}", ok=True, words=f"{words} (rule: {assigned.rule})"), []


def _gpu_words(gpu: GpuReading) -> str:
    own = "" if gpu.own_bytes is None else f", {gpu.own_bytes / GIB:.1f} by the engine"
    return f"{gpu.gpu} {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB used{own}"


@dataclass(slots=True)
class Trend:
    """What was seen of one target, step by step."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    outcomes: dict[Outcome, float] = field(default_factory=dict)
    last: Assessment | None = None
    alarmed: bool = False


class Follower:
    """Judges samples as they come and keeps a row of each."""

    def __init__(self, settings: Settings) -> None:
        self.trends = {target.name: Trend() for target in settings.targets}
        self._detectors = {t.name: Detector(t.name, settings.parameters(t)) for t in settings.targets}

    def tap(self, sample: Sample, poll: EnginePoll | None) -> None:
        """Takes one sample."""
        if poll is None and not sample.log_facts:
            return
        trend = self.trends[sample.target]
        trend.last = self._detectors[sample.target].observe(sample)
        phases = {verdict.phase for verdict in trend.last.verdicts}
        trend.alarmed |= bool(phases & {Phase.SUSPECTED, Phase.CONFIRMED})
        if poll is not None:
            trend.rows.append(_row(sample, trend))


def _row(sample: Sample, trend: Trend) -> dict[str, Any]:
    assert trend.last is not None  # noqa: S101 - set by the only caller, for mypy
    totals: dict[Outcome, float] = {}
    for (_, outcome), value in trend.last.measures.outcomes.items():
        totals[outcome] = totals.get(outcome, 0.0) + value
    failed = (Outcome.SERVER_ERROR, Outcome.ADMISSION_REJECTED, Outcome.LOST)
    step = {str(o): totals.get(o, 0.0) - trend.outcomes.get(o, 0.0) for o in failed}
    trend.outcomes = totals
    usages = [e.kv_usage_ratio for e in sample.engines if e.kv_usage_ratio is not None]
    return {
        "at": sample.at,
        "kv_usage_ratio": max(usages, default=None),
        "vram_used_bytes": max((g.used_bytes for g in sample.gpus), default=None),
        "vram_peak_bytes": max((g.peak_used_bytes or g.used_bytes for g in sample.gpus), default=None),
        "waiting": sum(e.waiting or 0 for e in sample.engines) if sample.engines else None,
        "failures": step,
        "phase": str(trend.last.verdicts[0].phase),
    }


def check(settings: Settings, seconds: float | None, out: Console, *, as_json: bool) -> int:
    """Prints what is seen; returns the exit code (docs/commands.md)."""
    looked = look(settings)
    if not as_json:
        _print_look(out, looked)
    if seconds is None:
        if as_json:
            out.print(encode(_look_object(looked)), markup=False)
        return 0 if all(s.ok for s in looked.seen) else 3
    follower = _follow(settings, seconds)
    verdicts = [v for t in follower.trends.values() if t.last is not None for v in t.last.verdicts]
    if as_json:
        trends = {name: trend.rows for name, trend in follower.trends.items()}
        found = {
            **_look_object(looked),
            "trend": trends,
            "verdicts": [verdict_object(v) for v in verdicts],
        }
        out.print(encode(found), markup=False)
    else:
        _print_trends(out, follower)
        for verdict in verdicts:
            report.final_block(out, verdict, {})
    if any(trend.alarmed for trend in follower.trends.values()):
        return 1
    return 3 if not verdicts or any(_unknown(v) for v in verdicts) else 0


def _unknown(verdict: Verdict) -> bool:
    return verdict.phase is Phase.UNKNOWN


def _follow(settings: Settings, seconds: float) -> Follower:
    stop = threading.Event()
    follower = Follower(settings)
    core = build_core(settings, Clock(), stop, follower.tap)
    core.start()
    # The last step's poll falls due as the time ends; a little longer lets it in.
    stop.wait(seconds + min(1.0, settings.interval_s))
    stop.set()
    core.poller.join(2)
    core.gpus.close()
    return follower


def _print_trends(out: Console, follower: Follower) -> None:
    columns = ("step", "KV usage", "VRAM now", "VRAM peak", "waiting", "failures", "phase")
    for name, trend in follower.trends.items():
        rows = [_cells(row, trend.rows[0]["at"]) for row in trend.rows]
        report.table(out, f"\nTrend of {name}", columns, rows)


def _cells(row: dict[str, Any], first_at: float) -> list[str]:
    failures = ", ".join(f"{n:.0f} {name}" for name, n in row["failures"].items() if n) or "0"
    if row["kv_usage_ratio"] is None and row["waiting"] is None:
        failures = "no answer"
    return [
        f"+{row['at'] - first_at:.0f} s",
        "-" if row["kv_usage_ratio"] is None else f"{100 * row['kv_usage_ratio']:.1f} %",
        "-" if row["vram_used_bytes"] is None else f"{row['vram_used_bytes'] / GIB:.2f} GiB",
        "-" if row["vram_peak_bytes"] is None else f"{row['vram_peak_bytes'] / GIB:.2f} GiB",
        "-" if row["waiting"] is None else f"{row['waiting']:.0f}",
        failures,
        str(row["phase"]),
    ]


def _print_look(out: Console, looked: Look) -> None:
    rows = [[s.target, s.source, "ok" if s.ok else "MISSING", s.words] for s in looked.seen]
    report.table(out, "What each source sees", ("target", "source", "", "what"), rows)
    report.table(out, "\nGPU sources", COLUMNS, [probe.cells() for probe in looked.probes])
    report.say(out, f"\nadvice: {looked.advice}")


def _look_object(looked: Look) -> dict[str, Any]:
    return {
        "sources": [_seen_object(s) for s in looked.seen],
        "gpu_sources": [probe.as_object() for probe in looked.probes],
        "advice": looked.advice,
    }


def _seen_object(seen: Seen) -> dict[str, Any]:
    return {"target": seen.target, "source": seen.source, "ok": seen.ok, "what": seen.words}
