"""A slow source of GPU figures in a thread of its own: it speaks where sysfs cannot, else it is held against it."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fragscope.model import Gap, GpuReading, Reason
from fragscope.serve.clock import Clock
from fragscope.serve.feeds import Feed, SourceStatus
from fragscope.sources.gpu.choice import TOOLS, Role
from fragscope.sources.gpu.crosscheck import (
    TOTAL_TOLERANCE_BYTES,
    Difference,
    difference_bytes,
    located,
)
from fragscope.sources.gpu.device import Device, Source

_SPEAK_S = 1.0
"""Between reads of a library that speaks: a peak between two ticks should have a chance to be seen."""
_IDLE_S = 1.0
_REST_STEPS = 60.0
"""A source that sees nothing is asked ever more rarely, at last once in so many of its periods."""
_FRESH_S = 30.0
"""So long the last devices stand for a source that does not answer: the deadline, and a rest."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the speaking source says now, by GPU: its name, bytes in use and totals."""

    source: str
    used_bytes: Mapping[str, int]
    total_bytes: Mapping[str, int]


class Surroundings(Protocol):
    """What a witness must know of the others."""

    def role(self, name: str) -> Role:
        """What it is asked for now."""

    def reference(self) -> Reference:
        """Whom it is held against."""

    def known(self) -> tuple[frozenset[str], Mapping[str, str]]:
        """Every PCI address that sysfs shows, and addresses by unique_id."""


class WitnessFeed(Feed):
    """Asks one source for ever; the child behind it is started when needed and ended when it sees nothing.

    The source itself is kept: it remembers a child that could not be killed, beside which no other may be started.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Source],
        around: Surroundings,
        check_s: float,
        tolerance_bytes: int,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        super().__init__(f"gpu-{name}", clock, stop)
        self._source_name = name
        self._make = make
        self._around = around
        self._check_s = check_s
        self._tolerance_bytes = tolerance_bytes
        self._source: Source | None = None
        self._lock = threading.Lock()
        self._peaks: dict[str, int] = {}
        self._failed_in_a_row = 0
        self.devices: tuple[Device, ...] = ()
        self.gaps: tuple[Gap, ...] = ()
        self.devices_at = float("-inf")
        self.differences: tuple[Difference, ...] = ()
        self.role = Role.IDLE
        self.asked = False
        self.status = SourceStatus(name)

    def sees(self, now: float) -> bool:
        """Whether it has named devices lately."""
        return bool(self.devices) and now - self.devices_at <= _FRESH_S * self._clock.speed

    def step(self) -> float:
        """Asks once if there is something to ask for."""
        self.role = self._around.role(self._source_name)
        if self.role is Role.IDLE:
            self._forget()
            return _IDLE_S * self._clock.speed
        began = self._clock.now()
        before = self._around.reference()
        self._ask(began)
        self._compare(before)
        return self._delay_s() * self._clock.speed

    def _ask(self, began: float) -> None:
        self._source = self._source or self._make()
        gap = self._source.why_not()
        listing = self._source.read() if gap is None else None
        found = listing.devices if listing is not None else ()
        devices, strange = located(found, *self._around.known())
        gaps = (*(listing.gaps if listing is not None else (gap,) if gap is not None else ()), *strange)
        now = self._clock.now()
        with self._lock:
            self.gaps = gaps
            if devices:
                self.devices, self.devices_at = devices, now
                for device in devices:
                    gpu = str(device.gpu)
                    self._peaks[gpu] = max(self._peaks.get(gpu, 0), device.used_bytes)
        self._account(devices, gaps, now, now - began)
        self.asked = True
        if not devices:
            self._source.rest()

    def _account(self, devices: Sequence[Device], gaps: Sequence[Gap], now: float, duration_s: float) -> None:
        if devices:
            self._failed_in_a_row = 0
            self.status = self.status.succeeded(now, duration_s)
            for gap in gaps:
                self.status = self.status.counted(gap.reason)
        else:
            self._failed_in_a_row += 1
            self.status = self.status.failed(gaps[0].reason if gaps else Reason.ABSENT, duration_s)

    def _compare(self, before: Reference) -> None:
        """Holds the devices of this read against what the speaking source showed before and after it."""
        after = self._around.reference()
        if self.role is not Role.CHECK or before.source != after.source or self._failed_in_a_row:
            self.differences = ()
            return
        far = {d.gpu for d in self.differences if abs(d.difference_bytes) > self._tolerance_bytes}
        found = []
        for device in self.devices:
            gpu = str(device.gpu)
            total = after.total_bytes.get(gpu)
            if total is None or abs(total - device.total_bytes) > TOTAL_TOLERANCE_BYTES:
                continue  # not the same thing is counted
            if gpu not in before.used_bytes or gpu not in after.used_bytes:
                continue
            apart = difference_bytes(device, before.used_bytes[gpu], after.used_bytes[gpu])
            lasting = gpu in far and abs(apart) > self._tolerance_bytes
            found.append(Difference(gpu, self._source_name, after.source, apart, lasting))
        self.differences = tuple(found)

    def _delay_s(self) -> float:
        fast = self.role is Role.FIGURES and self._source_name not in TOOLS
        period_s = min(_SPEAK_S, self._check_s) if fast else self._check_s
        return period_s * min(_REST_STEPS, 2.0 ** min(self._failed_in_a_row, 8))

    def take(self) -> tuple[dict[str, GpuReading], tuple[Gap, ...]]:
        """The last figures of every GPU with the peak since the last call, and what could not be read."""
        with self._lock:
            readings = {str(device.gpu): self._reading(device) for device in self.devices}
            self._peaks = {}
            return readings, self.gaps

    def _reading(self, device: Device) -> GpuReading:
        gpu = str(device.gpu)
        peak = max(device.used_bytes, self._peaks.get(gpu, 0))
        return GpuReading(self.devices_at, gpu, device.total_bytes, device.used_bytes, peak, source=self._source_name)

    def _forget(self) -> None:
        if self._source is not None:
            self._source.rest()
        self.differences = ()
        with self._lock:
            self.devices, self.devices_at = (), float("-inf")

    def close(self) -> None:
        """Ends what the source started; the thread's present read comes back with a gap."""
        source = self._source
        if source is not None:
            source.close()
