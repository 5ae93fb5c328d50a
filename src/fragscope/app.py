"""The only place where parts meet: settings to a running daemon."""

import logging
import signal
import sys
import threading
import time
from dataclasses import dataclass

import structlog

from fragscope import __version__
from fragscope.detect.detector import Detector
from fragscope.detect.snapshot import SnapshotError, load
from fragscope.serve.board import Board, TargetView, View
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import EngineFeed, GpuFeed, Visitor
from fragscope.serve.flight import FlightRecorder
from fragscope.serve.http import Web, WebServer, application, listen, tick_limit_s
from fragscope.serve.keeper import Keeper, Limits, read_state
from fragscope.serve.logfeed import LogFeed
from fragscope.serve.poller import LogTap, Memory, Poller, Tap, Watch
from fragscope.settings import Settings, Target
from fragscope.sources.logs.follow import Follower
from fragscope.sources.scrape import Access, Client

log = structlog.get_logger("fragscope")

_PAUSE_S = 300.0
"""After a longer pause what the counters did meanwhile is not laid on the first poll."""


def configure_logging(level: str, how: str) -> None:
    """Every log line, ours and the libraries', to stderr: JSON unless a person is watching."""
    json_wanted = how == "json" or (how == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer = structlog.processors.JSONRenderer() if json_wanted else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("fragscope").setLevel(level.upper())


@dataclass(frozen=True, slots=True)
class Core:
    """Feeds, tick and board: everything but HTTP."""

    clock: Clock
    board: Board
    poller: Poller
    engine_feeds: tuple[EngineFeed, ...]
    gpu_feed: GpuFeed
    log_feeds: tuple[LogFeed, ...]
    keeper: Keeper | None
    stop: threading.Event

    def start(self) -> None:
        """Starts the threads; all are daemons, so that a hung one cannot hold the process."""
        if self.keeper is not None:
            self.keeper.start()
        self.gpu_feed.start()
        for feed in (*self.log_feeds, *self.engine_feeds):
            feed.start()
        self.poller.start()


def build_core(
    settings: Settings, clock: Clock, stop: threading.Event, tap: Tap | None = None, log_tap: LogTap | None = None
) -> Core:
    """The feeds, detectors and the tick for these settings; nothing runs yet."""
    gpu_feed = GpuFeed(settings.sysfs_root, settings.gpu_sample_hz, clock, stop)
    watches = [_watch(settings, target, clock, stop, log_tap=log_tap) for target in settings.targets]
    waiting = tuple(TargetView(watch.name, watch.url, watch.labels) for watch in watches)
    board = Board(View(clock.now(), waiting))
    keeper = _keeper(settings, stop)
    poller = Poller(
        watches,
        gpu_feed,
        board,
        clock,
        stop,
        interval_s=settings.interval_s,
        history=settings.history,
        tap=tap,
        memory=Memory(keeper, FlightRecorder(settings.incident_history_s)) if keeper is not None else None,
    )
    log_feeds = tuple(watch.log for watch in watches if watch.log is not None)
    return Core(clock, board, poller, tuple(watch.feed for watch in watches), gpu_feed, log_feeds, keeper, stop)


def _keeper(settings: Settings, stop: threading.Event) -> Keeper | None:
    if settings.state_dir is None:
        return None
    return Keeper(settings.state_dir, Limits(settings.incidents_max_files, settings.incidents_max_bytes), stop)


def detector_of(settings: Settings, target: Target) -> tuple[Detector, float | None]:
    """The target's detector as the last run left it and how long ago that was, or a new one and None."""
    parameters = settings.parameters(target)
    found = read_state(settings.state_dir, target.name, settings.state_max_age_s) if settings.state_dir else None
    if found is None:
        return Detector(target.name, parameters), None
    plain, age_s = found
    try:
        detector = load(plain, target.name, parameters)
    except SnapshotError as error:
        log.warning("state is not used", target=target.name, why=str(error))
        return Detector(target.name, parameters), None
    if age_s > _PAUSE_S:
        detector.resume()
    log.info("state is used", target=target.name, age_s=round(age_s, 1))
    return detector, age_s


def _watch(settings: Settings, target: Target, clock: Clock, stop: threading.Event, *, log_tap: LogTap | None) -> Watch:
    parameters = settings.parameters(target)
    client = Client(target.url, access(settings, target))
    visitor = Visitor(target.name, client, clock, target.planned_stop_file)
    detector, age_s = detector_of(settings, target)
    log_feed = None
    if target.log is not None:
        # What was heard before the restart is not heard twice.
        lookback_s = settings.log_lookback_s if age_s is None else min(age_s, settings.log_lookback_s)
        follower = Follower(target.log, time.time() - lookback_s)
        log_feed = LogFeed(
            target.name, follower, clock, stop, interval_s=settings.interval_s, keep_lines=log_tap is not None
        )
    return Watch(
        name=target.name,
        url=target.url,
        labels=target.labels,
        feed=EngineFeed(target.name, visitor, settings.interval_s, clock, stop),
        detector=detector,
        stale_after_s=parameters.stale_after_s,
        anew=lambda: Detector(target.name, parameters),
        wanted_gpus=target.gpus,
        expected_gpus=target.expected_gpus,
        log=log_feed,
        log_tap=log_tap,
    )


def access(settings: Settings, target: Target) -> Access:
    """How to reach a target."""
    return Access(settings.connect_timeout_s, settings.total_timeout_s, target.token_file, target.ca_file)


def build_web(settings: Settings, core: Core) -> WebServer:
    """The HTTP server over the board, its address already taken. Raises ListenError."""
    web = Web(
        settings.web_listen_address,
        settings.web_telemetry_path,
        settings.web_cert_file,
        settings.web_key_file,
    )
    clock = core.clock

    def tick_age_s() -> float:
        return (clock.now() - core.board.view.at) / clock.speed

    app = application(core.board, web, tick_age_s=tick_age_s, tick_limit_s=tick_limit_s(settings.interval_s))
    return WebServer(app, listen(web.listen_address), web)


def serve(settings: Settings) -> None:
    """Runs the daemon until SIGTERM or SIGINT. Raises ListenError before anything runs."""
    stop = threading.Event()
    core = build_core(settings, Clock(), stop)
    web = build_web(settings, core)
    hold_signals()
    core.start()
    web.start()
    host, port = web.address
    log.info(
        "fragscope serves",
        version=__version__,
        address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        targets={target.name: target.url for target in settings.targets},
    )
    wait_for_signal()
    log.info("fragscope stops")
    stop.set()
    web.stop()
    if core.keeper is not None:
        core.keeper.join(1)


_ENDING = (signal.SIGTERM, signal.SIGINT)


def hold_signals() -> None:
    """Keeps SIGTERM and SIGINT for `wait_for_signal`; to be called before any thread starts.

    A handler that sets an Event could meet the main thread inside the Event's lock; and without either,
    Python as PID 1 ignores SIGTERM.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def wait_for_signal(seconds: float | None = None) -> bool:
    """Waits until the process is asked to end, or for so long; True if it was asked."""
    if seconds is None:
        signal.sigwait(_ENDING)
        return True
    return signal.sigtimedwait(_ENDING, seconds) is not None
