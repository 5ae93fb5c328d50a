"""Evidence to phase: when a pseudo-OOM is suspected, and when that is over."""

from collections.abc import Mapping
from dataclasses import dataclass

from fragscope.detect.attribution import MEMORY
from fragscope.detect.episodes import Correction, Docket, Episode
from fragscope.detect.forecast import Forecast
from fragscope.detect.parameters import Parameters
from fragscope.detect.signals import Finding
from fragscope.detect.statistics import Spacing
from fragscope.detect.vram import Headroom
from fragscope.detect.words import REMEDIES, SENTENCES
from fragscope.model import Cause, Evidence, Phase

_POLLS_NEEDED = 2


class Presence:
    """Which witnesses can be heard now, and whether enough of them to judge."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._spoke_at: dict[str, float] = {}
        self._spacing = Spacing()
        self._fresh_s = parameters.stale_after_s
        self._polls = 0

    def observe(self, at: float, spoke: set[str]) -> None:
        """`spoke`: the evidence kinds heard in this sample."""
        self._spacing.observe(at)
        self._fresh_s = self._spacing.fresh_s(self._p.stale_after_s)
        for kind in spoke:
            self._spoke_at[kind] = at
        if "engine" in spoke and self._others_present(at):
            self._polls += 1

    def has(self, kind: str, at: float) -> bool:
        """Whether this kind of evidence is fresh."""
        spoke_at = self._spoke_at.get(kind)
        return spoke_at is not None and at - spoke_at <= self._fresh_s

    def silence(self, kind: str) -> None:
        """This kind of evidence says itself that it is not there."""
        self._spoke_at.pop(kind, None)

    def enough(self, at: float, *, engine_gone: bool) -> bool:
        """An engine reading, and a GPU, allocator or log reading, twice; a gone engine keeps its phase."""
        engine = engine_gone or self.has("engine", at)
        return engine and self._others_present(at) and self._polls >= _POLLS_NEEDED

    def forget(self) -> None:
        """The target was forgotten: what was heard of it no longer counts."""
        self._spoke_at.clear()
        self._polls = 0

    def _others_present(self, at: float) -> bool:
        return self.has("gpu", at) or self.has("log", at) or self.has("allocator", at)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where the phase stands, with the episode it rests on."""

    phase: Phase
    since: float
    leading: Episode | None
    watch: Forecast | None


class PhaseMachine:
    """Moves up at once and down with patience: a hold, an engine that is up, and headroom that is back."""

    def __init__(self, parameters: Parameters) -> None:
        self._p = parameters
        self._phase = Phase.UNKNOWN
        self._since: float | None = None
        self._headroom_since: float | None = None

    def update(
        self,
        at: float,
        docket: Docket,
        headroom: Headroom | None,
        watch: Forecast | None,
        *,
        enough: bool,
        engine_up: bool,
        blind: bool,
    ) -> Stand:
        """The phase after this sample; `headroom` is None where no GPU is heard now, `blind`: but once was."""
        self._follow_headroom(at, headroom)
        newest = docket.newest_held()
        if newest is not None and not blind and self._over(at, newest, headroom, engine_up=engine_up):
            docket.end_held()
        leading = docket.leading() if newest is not None else None
        phase = _phase_of(leading, watch, enough=enough)
        if phase is not self._phase or self._since is None:
            self._phase, self._since = phase, at
        return Stand(phase, self._since, leading, watch)

    def _over(self, at: float, newest: Episode, headroom: Headroom | None, *, engine_up: bool) -> bool:
        if not newest.closed or at - newest.last_at < self._p.hold_s or not engine_up:
            return False
        if headroom is None:
            return True
        return self._headroom_since is not None and at - self._headroom_since >= self._p.headroom_back_s

    def _follow_headroom(self, at: float, headroom: Headroom | None) -> None:
        if headroom is None or headroom.ratio < self._p.headroom_back:
            self._headroom_since = None
        elif self._headroom_since is None:
            self._headroom_since = at


def _phase_of(leading: Episode | None, watch: Forecast | None, *, enough: bool) -> Phase:
    if leading is not None:
        return Phase.CONFIRMED if leading.judgement.confirmed else Phase.SUSPECTED
    if not enough:
        return Phase.UNKNOWN
    return Phase.WATCH if watch is not None else Phase.CLEAR


def cause_of(stand: Stand, latest: Episode | None, findings: list[Finding]) -> str:
    """The one cause on top: leading episode, else the last one within the hold, else a condition."""
    if stand.leading is not None:
        return str(stand.leading.cause)
    if latest is not None:
        return str(latest.cause)
    return str(findings[0].condition) if findings else str(Cause.NONE)


_NOTHING_LIKELY: Mapping[str, float] = {str(cause): 0.0 for cause in Cause}
_NOTHING_OPEN: Mapping[str, float] = {**_NOTHING_LIKELY, str(Cause.NONE): 1.0}


def probabilities_of(episode: Episode | None) -> Mapping[str, float]:
    """Over every cause and `none`; they sum to 1."""
    if episode is None:
        return _NOTHING_OPEN
    if episode.retracted:
        return {**_NOTHING_LIKELY, str(Cause.UNEXPLAINED): 1.0}
    return {**_NOTHING_LIKELY, **{str(cause): p for cause, p in episode.judgement.probabilities.items()}}


def evidence_of(episode: Episode | None, findings: list[Finding], stand: Stand) -> tuple[Evidence, ...]:
    """What spoke, strongest first, what was corrected, then the conditions that hold and what is to come."""
    rows = episode.judgement.evidence if episode is not None else ()
    if episode is not None and episode.correction is not None:
        rows += (_correction(episode, episode.correction),)
    rows += tuple(finding.evidence for finding in findings)
    return rows if stand.watch is None else (*rows, stand.watch.evidence)


def _correction(episode: Episode, correction: Correction) -> Evidence:
    late_s = correction.at - episode.judged_at
    sentence = (
        f"corrected {late_s:.0f} s after it was first said: {correction.was} "
        f"({100 * correction.was_probability:.0f} % sure that it was memory) until {correction.why}"
    )
    return Evidence("correction", late_s, "s", 0.0, "correction", sentence)


def sentence_of(
    cause: str,
    stand: Stand,
    episode: Episode | None,
    evidence: tuple[Evidence, ...],
    missing: tuple[str, ...],
) -> str:
    """One sentence that a person can act on, with the deciding numbers."""
    if stand.phase is Phase.UNKNOWN and cause == Cause.NONE:
        needed = [kind for kind in missing if kind == "engine"]
        seen = {"gpu", "allocator", "log"} - set(missing)
        words = ", ".join(needed + ([] if seen else ["gpu, allocator or log"]))
        return f"{SENTENCES['unknown']} Missing: {words or 'a second poll'}."
    if stand.phase is Phase.WATCH and cause == Cause.NONE:
        return f"{SENTENCES[_outlook(stand)]} {_capital(evidence[-1].sentence)}."
    sentence = SENTENCES[_words_of(cause, episode)]
    if episode is not None and stand.leading is episode:
        sure = min(99.0, 100 * episode.judgement.memory_probability)
        sentence = f"{sentence[:-1]} ({sure:.0f} % sure that it was memory)."
    ahead = stand.watch.evidence if stand.watch is not None else None
    because = [row.sentence for row in evidence if row.cause == cause and row is not ahead]
    because = [*because, *(row.sentence for row in evidence if _supports(row, cause, episode))][:3]
    if because:
        sentence = f"{sentence} {_capital('; '.join(because))}."
    if episode is not None and episode.correction is not None and cause == episode.cause:
        sentence = f"{sentence} {_capital(_correction(episode, episode.correction).sentence)}."
    return sentence


def _outlook(stand: Stand) -> str:
    return stand.watch.words if stand.watch is not None else str(Phase.WATCH)


def _words_of(cause: str, episode: Episode | None) -> str:
    """Which words fit; where nobody looked at the GPUs, 'unexplained' must not sound like 'not memory'."""
    if cause != Cause.UNEXPLAINED or episode is None or episode.told is not None:
        return cause
    return "blind" if episode.circumstances.headroom is None else cause


def remedy_of(cause: str, stand: Stand, episode: Episode | None) -> str:
    """What to do about it."""
    if cause == Cause.NONE and stand.phase is Phase.UNKNOWN:
        return REMEDIES["unknown"]
    if cause == Cause.NONE and stand.phase is Phase.WATCH:
        return REMEDIES[_outlook(stand)]
    return REMEDIES[_words_of(cause, episode)]


def _supports(row: Evidence, cause: str, episode: Episode | None) -> bool:
    if episode is None or row.cause != MEMORY or row.signal == "prior" or cause != episode.cause:
        return False
    return row.weight > 0 if episode.memory else row.weight < 0


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
