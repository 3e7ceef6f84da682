"""Whatever happens to the network between two nodes, no loss is wrong and no run hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.network_faults import (
    FAULTS,
    LAYOUTS,
    START_SECONDS,
    TIMEOUT_SECONDS,
    outcome_of,
    start,
    undisturbed,
)
from tests.clusters.nodes import Nodes, why_not
from tests.clusters.runs import losses, prepare, wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
CASES = list(zip(FAULTS, [*LAYOUTS, *LAYOUTS], strict=False))
"""Each fault, each time in another layout. `python -m tests.clusters.network_faults` runs all."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    with Nodes(prepare(tmp_path_factory.mktemp("nodes"))) as both:
        yield both


@pytest.mark.parametrize(("fault", "layout"), CASES)
def test_a_run_ends_as_undisturbed_or_stops_and_resumes(nodes, fault, layout):
    assert outcome_of(nodes, layout, fault) == FAULTS[fault].outcome


def test_a_node_that_is_cut_off_is_lost_and_the_run_goes_on_without_it(nodes):
    """No connection breaks: the ranks that are left end when they have waited long enough."""
    expected = undisturbed(nodes, "ddp")
    start(nodes, "ddp by launch", "elastic", "--launch.min_nodes=1", "--launch.restarts=2")
    metrics = nodes.folder / "runs" / "elastic" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, "a step")
        nodes.cable.is_cut = True
        kept, cut_off = nodes.wait(2 * TIMEOUT_SECONDS + START_SECONDS)
    finally:
        nodes.cable.mend()
        nodes.end()
    assert (kept, cut_off) == (0, 1), nodes.log(0) + nodes.log(1)
    assert losses(nodes.folder, "elastic") == pytest.approx(expected, rel=1e-5)
    assert "note: 2 of 4 processes: " in nodes.log(0)
    assert "error: " in nodes.log(1)
