"""Whatever happens to the network between two nodes, no loss is wrong and no run hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.network_faults import FAULTS, LAYOUTS, outcome_of
from tests.clusters.nodes import Nodes, why_not
from tests.clusters.runs import prepare

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
