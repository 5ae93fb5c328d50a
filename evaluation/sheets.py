"""Figures as tables of text: the same for the terminal and for the page."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evaluation import reliability
from evaluation.aims import AIMS
from evaluation.bounds import Rate, Share
from evaluation.figures import Figures, figures, grouped
from evaluation.naive import NAIVE_WORDS
from evaluation.scoring import RunScore
from evaluation.tiers import TIERS
from evaluation.watched import EpisodeRow

NOTHING = "-"
"""A cell about which these runs say nothing."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table under its title."""
        lines = [f"### {self.title}", "", _line(self.columns), _line("---" for _ in self.columns)]
        return "\n".join([*lines, *(_line(row) for row in self.rows)])


def sheets(scores: Sequence[RunScore]) -> list[Sheet]:
    """Every table: all scenarios together, the aims, probabilities, then a table of scenarios per observer."""
    observers = grouped(scores, lambda score: score.run.observer)
    tiers = {name: of for name, of in observers.items() if name not in NAIVE_WORDS}
    found = [_overall(observers)]
    if tiers:
        found += [_aims(tiers), _speech(tiers), _reliability(tiers), _points(tiers)]
    return found + [_scenarios(name, of) for name, of in observers.items() if name in tiers or name in _DETAILED]


def share(value: Share) -> str:
    """'0.91 (0.82-0.96), 31/34'."""
    if value.ratio is None:
        return NOTHING
    low, high = value.bounds
    return f"{value.ratio:.2f} ({low:.2f}-{high:.2f}), {value.hits}/{value.of}"


def rate(value: Rate) -> str:
    """'0.17 (0.05-0.44), 3'."""
    if value.per_day is None:
        return NOTHING
    low, high = value.bounds
    return f"{value.per_day:.2f} ({low:.2f}-{high:.2f}), {value.events}"


def percent(value: float | None) -> str:
    """'3.3 %'."""
    return NOTHING if value is None else f"{100 * value:.1f} %"


def seconds(median: float | None, p90: float | None) -> str:
    """'94 / 254'."""
    return NOTHING if median is None or p90 is None else f"{median:.0f} / {p90:.0f}"


_DETAILED = ("N2",)
"""The naive rules that get a table of scenarios: the one that people write first."""
_WORDS = {**NAIVE_WORDS, **{tier.name: tier.words for tier in TIERS}}

_OVERALL: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("alarm precision", lambda f: share(f.alarm_precision)),
    ("run precision", lambda f: share(f.run_precision)),
    ("run recall", lambda f: share(f.run_recall)),
    ("failure recall", lambda f: share(f.failure_recall)),
    ("false alarms a day", lambda f: rate(f.false_alarms)),
    ("on hard negatives", lambda f: rate(f.hard_false_alarms)),
    ("negative time in alarm", lambda f: percent(f.negative_alarm_share)),
    ("cause right", lambda f: share(f.cause_right)),
    ("first failure to verdict, median / p90 s", lambda f: seconds(f.delay_median_s, f.delay_p90_s)),
)

_SCENARIO: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("runs", lambda f: str(f.runs)),
    ("positive", lambda f: str(f.positive_runs)),
    ("hard", lambda f: str(f.hard_runs)),
    *_OVERALL[:1],
    *_OVERALL[2:5],
    *_OVERALL[6:],
    ("other labels named", lambda f: share(f.others_named)),
)

_SPEECH: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("in alarm by the second poll after a death", lambda f: share(f.in_time)),
    ("runs in which fragmentation led", lambda f: str(f.fragmentation_led_runs)),
    ("cause left undetermined", lambda f: share(f.cause_undetermined)),
    ("other labels named", lambda f: share(f.others_named)),
    ("positive runs with watch before", lambda f: f"{len(f.watch_leads_s)}/{f.positive_runs}"),
    ("negative time in watch", lambda f: percent(f.negative_watch_share)),
)


def _overall(observers: dict[str, list[RunScore]]) -> Sheet:
    rows = tuple((name, _WORDS.get(name, ""), *_cells(figures(of), _OVERALL)) for name, of in observers.items())
    return Sheet("All scenarios", ("who", "what it sees", *(title for title, _ in _OVERALL)), rows)


def _aims(tiers: dict[str, list[RunScore]]) -> Sheet:
    rows = (aim.cells(tiers) for aim in AIMS)
    columns = ("who", "what", "measured", "aim", "met", "prototype")
    return Sheet("Aims", columns, tuple(row for row in rows if row is not None))


def _speech(tiers: dict[str, list[RunScore]]) -> Sheet:
    rows = tuple((name, *_cells(figures(of), _SPEECH)) for name, of in tiers.items())
    return Sheet("What fragscope says, and when", ("who", *(title for title, _ in _SPEECH)), rows)


def _scenarios(observer: str, scores: list[RunScore]) -> Sheet:
    by_scenario = grouped(scores, lambda score: score.run.scenario)
    rows = tuple((name, *_cells(figures(of), _SCENARIO)) for name, of in sorted(by_scenario.items()))
    title = f"{observer}: {_WORDS[observer]}" if observer in _WORDS else observer
    return Sheet(title, ("scenario", *(title for title, _ in _SCENARIO)), rows)


def _reliability(tiers: dict[str, list[RunScore]]) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for name, scores in tiers.items():
        episodes = [row for score in scores for row in score.episodes]
        rows += _bin_rows(name, "at first", episodes, lambda row: row.said_first)
        rows += _bin_rows(name, "in the end", episodes, lambda row: row.said_last)
    columns = ("who", "when", "said between", "said on average", "was memory", "calibration error")
    return Sheet("Probability of the memory causes together, per episode", columns, tuple(rows))


def _bin_rows(
    name: str, when: str, episodes: list[EpisodeRow], said: Callable[[EpisodeRow], float]
) -> list[tuple[str, ...]]:
    found = reliability.bins(episodes, said)
    error = reliability.calibration_error(found)
    rows = [(name, when, f"{b.low:g}-{b.high:g}", f"{b.said_mean:.3f}", share(b.true), "") for b in found]
    whole = share(Share(sum(row.memory for row in episodes), len(episodes)))
    mean = f"{sum(map(said, episodes)) / len(episodes):.3f}" if episodes else NOTHING
    return [*rows, (name, when, "all", mean, whole, NOTHING if error is None else f"{error:.3f}")]


def _points(tiers: dict[str, list[RunScore]]) -> Sheet:
    rows = tuple(
        (name, f"{p.probability:g}", share(p.precision), share(p.recall), rate(p.false_a_day))
        for name, scores in tiers.items()
        for p in reliability.points(scores)
    )
    columns = ("who", "alarm from", "precision", "share of memory episodes", "false a day, negatives")
    return Sheet("If the alarm began at another probability, per episode", columns, rows)


def _cells(of: Figures, columns: Iterable[tuple[str, Callable[[Figures], str]]]) -> tuple[str, ...]:
    return tuple(cell(of) for _, cell in columns)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
