"""Settings that hold for every test."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import settings

from tests.durations import Durations
from tests.left_out import LeftOut

# Before torch is imported anywhere: several processes of one thread each, no network, no fork
# warnings.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Costs that somebody has measured on this machine are not to move a test's split.
os.environ["SHARDWISE_CACHE"] = os.path.join(tempfile.gettempdir(), "shardwise-no-such-cache")
# Compiled code is kept all the same.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser("~/.cache/shardwise/compiled"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile(
    "patient", deadline=None
)  # a busy machine may take a while for one example
settings.load_profile("patient")


MOST_OBJECTS = 30_000
"""So many are looked through in ten milliseconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", metavar="FILE", help="write CPU seconds by folder (JSON)")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(), "durations")
    config.pluginmanager.register(LeftOut(), "left_out")


def pytest_collection_finish() -> None:
    """Leave all that was imported out of every later garbage collection, which takes half a second
    with it. What transformers makes of tables when it saves a first model is made here, so that
    each forked process has it."""
    if "transformers.conversion_mapping" in sys.modules:
        sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Freeze what earlier files have imported, and what the end of a run in this process has
    unfrozen: each measurement of memory begins with a collection."""
    if len(gc.get_objects()) > MOST_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def short_measurement_of_the_peak() -> Iterator[None]:
    """Every run on a CPU measures its peak FLOP/s for 0.4 seconds; for a test 0.01 seconds are
    enough."""
    from shardwise.metrics import hardware

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "measured_flops", partial(hardware.measured_flops, seconds=0.01))
        yield
