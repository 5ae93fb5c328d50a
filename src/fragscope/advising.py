"""`advise`: gathers what is to be seen, asks for advice, and prints it."""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fragscope import advice_report, gathering
from fragscope.advise.answers import (
    DEFAULT_BLOCK_SIZE,
    EngineAnswer,
    Question,
    engine_answer,
    fleet_answer,
    lengths_answer,
)
from fragscope.advise.backends import COMMON_SIZES, RULES
from fragscope.advise.compare import compare
from fragscope.advise.kv import footprint
from fragscope.advise.layers import UnknownWindowsError
from fragscope.advise.lengths import LengthCounter, Lengths
from fragscope.advise.shape import ModelShape, shape_of, special_load
from fragscope.advise_options import stray_options
from fragscope.detect.parameters import Parameters
from fragscope.gathering import Gathered
from fragscope.plotting import PlotError, check_plot, draw
from fragscope.remembering import HistoryError, MatchError, duration_s, remembered, window
from fragscope.settings import Settings, Target
from fragscope.sources.lengths import LengthsError, LengthsTally, read_lengths
from fragscope.sources.prometheus import Span
from fragscope.wire import decode

_HYBRID_SIZES = (528, 544, 672, 784, 800, 1056)
"""What vLLM is known to have raised the block of a hybrid to: lengths are counted once, for these too."""


_QUERY_RANGE = "7d"
_QUERY_STEP = "60s"


class AdviseError(Exception):
    """No advice can be given; the message says why and what to do."""


def advise(settings: Settings, arguments: argparse.Namespace, out: Console) -> int:
    """Prints advice; returns 0.

    Raises AdviseError for input that is unreadable or tells nothing, PlotError for a picture that cannot be made.
    """
    stray = stray_options(arguments)
    if stray:
        raise AdviseError(f"{' and '.join(stray)} asks a Prometheus, but there is none; add --prometheus URL")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    as_json = arguments.format == "json"
    if arguments.compare:
        _compare(settings, arguments, out, as_json=as_json)
        return 0
    notes: list[str] = []
    question = _question(settings, arguments, notes)
    if arguments.lengths is not None and not (arguments.recording or arguments.target or arguments.prometheus):
        answers, fleet = [lengths_answer(question, settings.advice)], None
    else:
        gathered = _gathered(settings, arguments)
        answers = _answers(gathered, question, settings)
        fleet = fleet_answer(gathered.observed) if len(answers) > 1 else None
        notes += gathered.notes
    if arguments.plot is not None:
        draw(arguments.plot, answers)
    advice_report.show(out, answers, fleet, notes, as_json=as_json)
    return 0


def _answers(gathered: Gathered, question: Question, settings: Settings) -> list[EngineAnswer]:
    engines = gathered.observed.engines.values()
    if not engines:
        raise AdviseError("no engine answered, so there is nothing to advise on; `fragscope check` says why")
    found = []
    for past in engines:
        cause = gathered.cause_of(past.target, past.engine)
        found.append(engine_answer(past, gathered.observed, question, cause, settings.advice))
    return found


def _gathered(settings: Settings, arguments: argparse.Namespace) -> Gathered:
    if arguments.prometheus is not None:
        now = time.time()
        return _remembered(settings, arguments, f"{arguments.query_range or _QUERY_RANGE}/now", now)
    if not arguments.recording:
        # Two scrapes: the second falls due an interval after the first.
        return gathering.from_targets(settings, arguments.seconds or settings.interval_s)
    return _recorded(settings, arguments.recording)


def _remembered(settings: Settings, arguments: argparse.Namespace, text: str, now: float) -> Gathered:
    try:
        start, end = window(text, now)
        step_s = duration_s(arguments.query_step or _QUERY_STEP)
        span = Span(start, end, step_s=step_s, match=arguments.match or "", gpu_match=arguments.gpu_match)
        parameters_of, full_ratio = _parameters_of(settings), settings.advice.full_ratio
        gathered = remembered(arguments.prometheus, span, parameters_of, full_ratio)
    except (ValueError, HistoryError, MatchError) as error:
        raise AdviseError(str(error)) from error
    if not gathered.observed.engines:
        raise AdviseError("; ".join(gathered.notes) or "no engine was found in this time")
    return gathered


def _recorded(settings: Settings, files: list[str]) -> Gathered:
    try:
        gathered = gathering.from_recordings(files, _parameters_of(settings), settings.advice.full_ratio)
    except OSError as error:
        raise AdviseError(f"{error.filename or files[0]} cannot be read: {error.strerror or error}") from error
    if not gathered.observed.engines:
        raise AdviseError(f"{', '.join(files)} holds no reading of an engine: no exposition and no sample line")
    return gathered


def _parameters_of(settings: Settings) -> Callable[[str], Parameters]:
    named = {target.name: target for target in settings.targets}
    return lambda target: settings.parameters(named.get(target, Target()))


def _compare(settings: Settings, arguments: argparse.Namespace, out: Console, *, as_json: bool) -> None:
    if arguments.prometheus is not None:
        now = time.time()
        a, b = (_remembered(settings, arguments, text, now) for text in arguments.compare)
    else:
        a, b = (_recorded(settings, [file]) for file in arguments.compare)
    notes = [f"{side}: {note}" for side, gathered in (("A", a), ("B", b)) for note in gathered.notes]
    advice_report.show_comparison(out, compare(a.observed, b.observed), notes, as_json=as_json)


def _question(settings: Settings, arguments: argparse.Namespace, notes: list[str]) -> Question:
    """What the flags tell; what cannot be told apart from a mistake is refused."""
    config = _model_config(arguments.model_config) if arguments.model_config is not None else None
    if arguments.backend is not None and not any(rule.backend == arguments.backend.upper() for rule in RULES):
        known = ", ".join(sorted({rule.backend for rule in RULES}))
        notes.append(f"--backend {arguments.backend} is not in the table; known are {known}")
    shape = _shape(config, arguments, notes) if config is not None else None
    lengths = None
    if arguments.lengths is not None:
        lengths = _lengths(settings, arguments.lengths, arguments.block_size or DEFAULT_BLOCK_SIZE, notes)
    return Question(
        shape=shape,
        special=special_load(config) if config is not None else None,
        backend=arguments.backend,
        weights_bytes=arguments.weights_bytes,
        gpu_memory_bytes=arguments.gpu_memory_bytes,
        utilization=arguments.gpu_memory_utilization,
        block_size=arguments.block_size,
        tensor_parallel=arguments.tensor_parallel_size,
        cache_dtype=arguments.kv_cache_dtype,
        lengths=lengths,
    )


def _shape(config: Mapping[str, Any], arguments: argparse.Namespace, notes: list[str]) -> ModelShape | None:
    """What decides the size of the KV; None, with a note, where nobody can say."""
    try:
        shape = shape_of(config)
        footprint(shape, arguments.kv_cache_dtype, arguments.tensor_parallel_size or 1)
    except UnknownWindowsError as error:
        notes.append(str(error))
        return None
    except ValueError as error:
        raise AdviseError(str(error)) from error
    return shape


def _model_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = decode(file.read_bytes())
    except OSError as error:
        raise AdviseError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise AdviseError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise AdviseError(f"{file} is no config.json of a model: it holds no object")
    return config


def _lengths(settings: Settings, path: str, block_size: int, notes: list[str]) -> Lengths:
    tally, counter = LengthsTally(), LengthCounter()
    try:
        for prompt, output in read_lengths(path, tally):
            counter.add(prompt, output)
    except OSError as error:
        raise AdviseError(f"{path} cannot be read: {error.strerror or error}") from error
    except LengthsError as error:
        raise AdviseError(f"{path}: {error}") from error
    note = tally.sentence()
    if note is not None:
        notes.append(note)
    lengths = counter.lengths(sorted({*COMMON_SIZES, *_HYBRID_SIZES, block_size}), settings.advice)
    if lengths is None:
        raise AdviseError(f"{path} holds no request")
    return lengths


__all__ = ["AdviseError", "PlotError", "advise"]
