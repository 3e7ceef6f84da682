"""What a cell takes of a node of a Ray cluster; no Ray is needed. Real cells: tests/clusters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.config import UserError
from shardwise.lab.benchmark.ray import resources_of

SMALL = {"Alive": True, "Resources": {"CPU": 4.0}}
LARGE = {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}}
DEAD = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}


def cell(nproc: int, timed: bool = True, device: str = "auto", cpus: int | None = None) -> Any:
    plan = SimpleNamespace(id="ddp", nproc=nproc, timed=timed)
    run: dict[str, Any] = {"training": {"device": device}}
    if cpus is not None:
        run["launch"] = {"ray": {"cpus": cpus}}
    return SimpleNamespace(state=SimpleNamespace(cell=SimpleNamespace(plan=plan, run=run)))


@pytest.mark.parametrize(
    ("run", "nodes", "num_cpus", "num_gpus"),
    [
        (cell(2), [SMALL], 4, 0),
        (cell(2), [SMALL, LARGE, DEAD], 16, 2),
        (cell(2, device="cpu"), [SMALL, LARGE], 16, 0),
        (cell(2, timed=False), [SMALL, LARGE], 2, 2),
        (cell(2, timed=False, cpus=3), [LARGE], 6, 2),
    ],
)
def test_a_timed_cell_is_alone_on_its_node(run, nodes, num_cpus, num_gpus):
    assert resources_of(run, nodes) == {"num_cpus": num_cpus, "num_gpus": num_gpus}


@pytest.mark.parametrize("nodes", [[DEAD], [SMALL], [SMALL, LARGE]])
def test_a_cell_that_fits_on_no_node_is_refused(nodes):
    with pytest.raises(UserError, match=r"cell ddp needs 8 CPUs and \d GPUs on one node"):
        resources_of(cell(8), nodes)
