"""The one option of the suite, and its one rule: in CI nothing is skipped because a program is missing."""

import os

import pytest

MAY_SKIP_IN_CI = ("../shared",)
"""The operator's CRDs lie beside the checkout where there are any; they are never copied into it."""

skipped: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="ten minutes instead of twenty seconds for soak tests")


@pytest.fixture(scope="session")
def soak_s(pytestconfig: pytest.Config) -> float:
    """How long a soak test runs: 600 s by hand, 20 s otherwise."""
    return 600.0 if pytestconfig.getoption("--soak") else 20.0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if not any(words in reason for words in MAY_SKIP_IN_CI):
            skipped.append(f"{report.nodeid}: {reason}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        skipped.append(f"{report.nodeid}: {report.longrepr}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") == "true" and skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") == "true" and skipped:
        terminalreporter.section("skipped, which fails in CI")
        for line in skipped:
            terminalreporter.line(line)
