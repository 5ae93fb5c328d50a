"""What `check` does where the kernel keeps it waiting."""

import threading
from pathlib import Path

import pytest

from fragscope import check_gpus
from fragscope.check_gpus import look_at_gpus
from fragscope.model import Gap, Part, Reason
from fragscope.serve.gpus import Gpus, Wanted
from fragscope.serve.ownership import Tenant
from tests.serve.test_daemon import FakeClock
from tests.sources.fake_proc import FakeProc
from tests.sources.test_sysfs import add_card


def test_a_process_that_cannot_be_looked_into_does_not_hang_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_card(tmp_path / "sys", 1, "0000:c1:00.0")
    FakeProc(tmp_path / "proc").engine(100)
    tenants = (Tenant("vllm", "http://127.0.0.1:8000"),)
    wanted = Wanted(("sysfs", "fdinfo"), tmp_path / "sys", tmp_path / "proc", tenants=tenants)
    gpus = Gpus(wanted, FakeClock(), threading.Event(), {})
    release = threading.Event()

    def waits_for_a_lock(name: str, tenant: Tenant) -> Gap:
        release.wait(10)
        return Gap(Part.GPU, Reason.ABSENT, f"{name} of {tenant.name} was waited for")

    monkeypatch.setattr(gpus.ownership, "ask", waits_for_a_lock)
    monkeypatch.setattr(check_gpus, "_DEADLINE_S", 0.3)
    _, probes = look_at_gpus(gpus, wanted, {}, 5.0)
    release.set()
    by_name = {probe.source: probe for probe in probes}
    assert len(by_name["sysfs"].devices) == 1
    assert [gap.reason for gap in by_name["fdinfo"].gaps] == [Reason.TIMEOUT]
