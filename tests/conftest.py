"""The one option of the suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="ten minutes instead of twenty seconds for tests/soak")


@pytest.fixture(scope="session")
def soak_s(pytestconfig: pytest.Config) -> float:
    """How long a soak test runs: 600 s by hand, 20 s otherwise."""
    return 600.0 if pytestconfig.getoption("--soak") else 20.0
