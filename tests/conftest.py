"""Fixtures and settings that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Test modules, and the processes that run their functions, import each other as `tests.<folder>.<module>`.
sys.path.insert(0, str(Path(__file__).parents[1]))

# Tensors in tests are tiny, and several processes share the cores: a second thread would cost more than it gains.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Many tests start Python again; compiled modules need not be compiled by each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from tests.distributed.ranks import RankPool
from tests.transports import VARIABLE

# A shell that starts this in the background makes it ignore Ctrl-C, and all processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A gate that fails must fail again: the examples follow from the code of a test. The thorough form looks for others;
# what it finds is kept as an `@example`.
settings.register_profile(
    "quick",
    settings(),
    derandomize=True,
    max_examples=20,
    deadline=None,  # other processes may use the same cores, so the time of an example means nothing
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("quick"), derandomize=False, max_examples=1000)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that `make test-thorough` uses."""
    parser.addoption("--transport", choices=["nixl", "stand-in"], help="move rows and weights between ranks by NIXL")
    parser.addoption("--thorough", action="store_true", help="run the long forms too, with 1,000 random examples each")


def pytest_configure(config: pytest.Config) -> None:
    """Explore in the thorough form, unless another profile of hypothesis is selected."""
    if library := config.getoption("transport"):
        os.environ[VARIABLE] = library
    if config.getoption("thorough") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not inspect modules and tests for garbage, neither while they are made nor later: they stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `thorough`, unless the option is given; begin with files of many tests on several ranks.

    Those take the longest: at the end, one of them would keep a single process busy while others have nothing left.
    """
    if not config.getoption("thorough"):
        long_forms = {item for item in items if item.get_closest_marker("thorough")}
        if long_forms:
            config.hook.pytest_deselected(items=[*long_forms])
            items[:] = [item for item in items if item not in long_forms]
    on_ranks = Counter(item.path for item in items if "ranks" in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: -on_ranks[item.path])


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that run functions of tests as ranks of one process group; started when a test first needs them."""
    pool = RankPool()
    yield pool
    pool.close()
