"""`check`: what each source sees or why not, and with time to look, a trend and a verdict."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from fragscope import report
from fragscope.app import access, build_core
from fragscope.detect.detector import Detector
from fragscope.explain.witness import LineReader
from fragscope.model import Assessment, Outcome, Phase, Sample, Verdict
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EnginePoll, GpuFeed, GpuSnapshot, Visitor
from fragscope.serve.poller import gpus_of
from fragscope.settings import Settings, Target
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


def look(settings: Settings) -> list[Seen]:
    """One pass over every configured source."""
    clock = Clock()
    feed = GpuFeed(settings.sysfs_root, settings.gpu_sample_hz, clock, threading.Event())
    # A read that hangs must not hang the check: its thread is left behind.
    reader = threading.Thread(target=feed.step, daemon=True)
    reader.start()
    reader.join(settings.total_timeout_s)
    snapshot = feed.take()
    found: list[Seen] = []
    for target in settings.targets:
        visitor = Visitor(target.name, Client(target.url, access(settings, target)), clock, None)
        found.append(_engine(target, visitor.poll()))
        found.append(_gpus(target, snapshot))
        if target.log is not None:
            found.append(_log(settings, target, target.log))
    return found


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


def _gpus(target: Target, snapshot: GpuSnapshot) -> Seen:
    assigned, gpus, gaps = gpus_of(snapshot, target.gpus, target.expected_gpus, float("-inf"))
    if gaps:
        return Seen(target.name, "GPU sysfs", ok=False, words=f"{gaps[0].reason}: {gaps[0].detail}")
    words = "; ".join(f"{g.gpu} {g.used_bytes / GIB:.1f} of {g.total_bytes / GIB:.1f} GiB used" for g in gpus)
    return Seen(target.name, "GPU sysfs", ok=True, words=f"{words} (rule: {assigned.rule})")


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
    seen = look(settings)
    if not as_json:
        rows = [[s.target, s.source, "ok" if s.ok else "MISSING", s.words] for s in seen]
        report.table(out, "What each source sees", ("target", "source", "", "what"), rows)
    if seconds is None:
        if as_json:
            out.print(encode({"sources": [_seen_object(s) for s in seen]}), markup=False)
        return 0 if all(s.ok for s in seen) else 3
    follower = _follow(settings, seconds)
    verdicts = [v for t in follower.trends.values() if t.last is not None for v in t.last.verdicts]
    if as_json:
        trends = {name: trend.rows for name, trend in follower.trends.items()}
        found = {
            "sources": [_seen_object(s) for s in seen],
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


def _seen_object(seen: Seen) -> dict[str, Any]:
    return {"target": seen.target, "source": seen.source, "ok": seen.ok, "what": seen.words}
