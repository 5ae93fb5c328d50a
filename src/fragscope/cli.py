"""The command line: serve, check, replay, explain, record, demo."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fragscope import __version__
from fragscope.detect.parameters import Parameters
from fragscope.settings import ConfigError, Settings, Target, load, origins

EXIT_CLEAR, EXIT_USAGE = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code (docs/commands.md)."""
    arguments, strange = parser().parse_known_args(argv)
    if strange:
        # argparse would answer with the usage of the whole program instead of the command's.
        arguments.command.error(f"there is no {' '.join(strange)} here; see --help")
    try:
        code: int = arguments.run(arguments)
    except ConfigError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        sys.stderr.close()
        return EXIT_CLEAR
    return code


def _refuse(sentence: str) -> int:
    for line in sentence.splitlines():
        print(f"fragscope: {line}", file=sys.stderr)
    return EXIT_USAGE


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    top = argparse.ArgumentParser(
        prog="fragscope",
        description="Names the cause when vLLM on AMD Instinct fails although memory looks free.",
    )
    top.add_argument("--version", action="version", version=f"fragscope {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _serve_parser(commands)
    _check_parser(commands)
    _replay_parser(commands)
    _explain_parser(commands)
    _record_parser(commands)
    _demo_parser(commands)
    return top


def _command(commands: Any, name: str, what: str, example: str, run: Callable[[argparse.Namespace], int]) -> Any:
    made = commands.add_parser(
        name,
        help=what,
        description=what[:1].upper() + what[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(run=run, command=made)
    return made


def _live_options(made: Any) -> None:
    made.add_argument("--config", type=Path, metavar="FILE", help="TOML file (default: $FRAGSCOPE_CONFIG)")
    made.add_argument(
        "--target",
        action="append",
        metavar="[NAME=]URL",
        help="server to watch, without /metrics; may be repeated (default: http://127.0.0.1:8000)",
    )
    made.add_argument("--interval", type=_seconds, metavar="TIME", help="between polls (default: 5)")


def _serve_parser(commands: Any) -> None:
    made = _command(
        commands,
        "serve",
        "the daemon: polls, detects, exports",
        "fragscope serve --target http://127.0.0.1:8000",
        _serve,
    )
    _live_options(made)
    made.add_argument("--web.listen-address", dest="listen", metavar="ADDRESS", help="host:port (default: :23724)")
    made.add_argument(
        "--web.telemetry-path", dest="path", metavar="PATH", help="path of the exposition (default: /metrics)"
    )
    made.add_argument(
        "--print-config", action="store_true", help="show every setting, its value and where it came from"
    )


def _check_parser(commands: Any) -> None:
    made = _command(
        commands,
        "check",
        "what each source sees, or why not; with --for, a trend and a verdict",
        "fragscope check --for 60s --interval 10s",
        _check,
    )
    _live_options(made)
    made.add_argument("--for", dest="seconds", type=_seconds, metavar="TIME", help="watch this long, e.g. 60s or 10m")
    _format_option(made)


def _replay_parser(commands: Any) -> None:
    made = _command(
        commands,
        "replay",
        "recordings through the same detector: the timeline, then the final verdict",
        "fragscope replay incident.jsonl.gz --format json",
        _replay,
    )
    made.add_argument("files", nargs="+", metavar="FILE", help="recordings, plain or gzipped; - is standard input")
    made.add_argument("--config", type=Path, metavar="FILE", help="TOML file with detector settings")
    made.add_argument("--labels", action="store_true", help="score against the recording's label lines")
    _format_option(made)


def _explain_parser(commands: Any) -> None:
    made = _command(
        commands,
        "explain",
        "post-mortem of logs: each failure, its arithmetic, cause, how sure, remedy",
        "kubectl logs --previous vllm-0 | fragscope explain -",
        _explain,
    )
    made.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="logs, recordings or incident files, plain or gzipped; - is standard input",
    )
    made.add_argument("--config", type=Path, metavar="FILE", help="TOML file with detector settings")
    _format_option(made)


def _record_parser(commands: Any) -> None:
    made = _command(
        commands,
        "record",
        "write a recording from live sources",
        "fragscope record --for 10m --out incident.jsonl.gz",
        _record,
    )
    _live_options(made)
    made.add_argument("--out", default="-", metavar="FILE", help=".gz compresses; - is standard output (default)")
    made.add_argument(
        "--for",
        dest="seconds",
        type=_seconds,
        metavar="TIME",
        help="stop after this long (default: on Ctrl-C)",
    )
    made.add_argument("--raw", action="store_true", help="pages and GPU figures as read, instead of joined samples")


def _demo_parser(commands: Any) -> None:
    made = _command(
        commands,
        "demo",
        "the daemon over a simulated vLLM and GPU",
        "fragscope demo --scenario pseudo-oom --speed 20",
        _demo,
    )
    scenarios = ("healthy", "kv-exhausted", "admission-limit", "pseudo-oom")
    made.add_argument("--scenario", choices=scenarios, default="pseudo-oom", help="what happens (default: pseudo-oom)")
    made.add_argument(
        "--speed",
        type=_positive,
        default=20.0,
        metavar="TIMES",
        help="how much faster time runs (default: 20)",
    )
    made.add_argument(
        "--duration", type=_seconds, metavar="TIME", help="real time after which it ends (default: on Ctrl-C)"
    )
    made.add_argument("--seed", type=int, default=1, help="another seed, another run (default: 1)")
    made.add_argument(
        "--web.listen-address",
        dest="listen",
        default=":23724",
        metavar="ADDRESS",
        help="host:port (default: :23724)",
    )
    _format_option(made)


def _format_option(made: Any) -> None:
    made.add_argument("--format", choices=("text", "json"), default="text", help="how to print results (default: text)")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def _seconds(text: str) -> float:
    """A number of seconds, or one with s, m or h behind it."""
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        return _positive(text[:-1]) * factor if factor else _positive(text)
    except argparse.ArgumentTypeError:
        words = f"{text!r} is no duration above 0; write 30, 30s, 10m or 1h"
        raise argparse.ArgumentTypeError(words) from None


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    flags: dict[str, Any] = {"interval_s": getattr(arguments, "interval", None)}
    if getattr(arguments, "target", None):
        flags["targets"] = _targets(arguments.target)
    flags["web_listen_address"] = getattr(arguments, "listen", None)
    flags["web_telemetry_path"] = getattr(arguments, "path", None)
    return {name: value for name, value in flags.items() if value is not None}


def _targets(texts: list[str]) -> dict[str, dict[str, str]]:
    """By index, so that a variable or the file can say more of the same target."""
    targets = {}
    for i, text in enumerate(texts):
        name, found, url = text.partition("=")
        if not found or "/" in name:
            name, url = ("vllm" if len(texts) == 1 else f"vllm-{i}"), text
            targets[str(i)] = {"url": url} if len(texts) == 1 else {"name": name, "url": url}
        else:
            targets[str(i)] = {"name": name, "url": url}
    return targets


def _settings(arguments: argparse.Namespace) -> Settings:
    return load(arguments.config, _flags(arguments))


def _serve(arguments: argparse.Namespace) -> int:
    from fragscope import app  # noqa: PLC0415 - each command loads only what it needs
    from fragscope.serve.http import ListenError  # noqa: PLC0415

    settings = _settings(arguments)
    if arguments.print_config:
        for key, value, origin in origins(settings, arguments.config, _flags(arguments)):
            print(f"{key} = {value!r}  # {origin}")
        return EXIT_CLEAR
    app.configure_logging(settings.log_level, settings.log_format)
    try:
        app.serve(settings)
    except ListenError as error:
        return _refuse(str(error))
    return EXIT_CLEAR


def _quiet() -> None:
    """A command that prints a result logs nothing below an error."""
    from fragscope.app import configure_logging  # noqa: PLC0415

    configure_logging("error", "auto")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)


def _check(arguments: argparse.Namespace) -> int:
    from fragscope.check import check  # noqa: PLC0415
    from fragscope.report import console  # noqa: PLC0415

    _quiet()
    return check(_settings(arguments), arguments.seconds, console(), as_json=arguments.format == "json")


def _replay(arguments: argparse.Namespace) -> int:
    from fragscope.replaying import replay_files  # noqa: PLC0415
    from fragscope.report import console  # noqa: PLC0415

    settings = load(arguments.config)
    named = {target.name: target for target in settings.targets}

    def parameters_of(target: str) -> Parameters:
        return settings.parameters(named.get(target, Target()))

    as_json = arguments.format == "json"
    try:
        return replay_files(arguments.files, parameters_of, console(), as_json=as_json, scored=arguments.labels)
    except OSError as error:
        return _refuse(f"{error.filename or 'the recording'} cannot be read: {error.strerror or error}")


def _explain(arguments: argparse.Namespace) -> int:
    from fragscope.explaining import explain_files  # noqa: PLC0415
    from fragscope.report import console  # noqa: PLC0415

    parameters = load(arguments.config).parameters(Target())
    try:
        return explain_files(arguments.files, parameters, console(), as_json=arguments.format == "json")
    except OSError as error:
        return _refuse(f"{error.filename or 'the log'} cannot be read: {error.strerror or error}")


def _record(arguments: argparse.Namespace) -> int:
    from fragscope.record import record  # noqa: PLC0415

    settings = _settings(arguments)
    _quiet()
    try:
        written = record(settings, arguments.out, arguments.seconds, raw=arguments.raw)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _refuse(f"{arguments.out} cannot be written: {error.strerror or error}")
    print(f"fragscope: {written} samples written to {arguments.out}", file=sys.stderr)
    return EXIT_CLEAR


def _demo(arguments: argparse.Namespace) -> int:
    from fragscope import demo  # noqa: PLC0415
    from fragscope.report import console  # noqa: PLC0415
    from fragscope.serve.http import ListenError  # noqa: PLC0415

    _quiet()
    try:
        demo.run(
            arguments.scenario,
            speed=arguments.speed,
            seed=arguments.seed,
            seconds=arguments.duration,
            listen_address=arguments.listen,
            out=console(),
            as_json=arguments.format == "json",
        )
    except ListenError as error:
        return _refuse(str(error))
    return EXIT_CLEAR
