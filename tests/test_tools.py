"""The arithmetic of the tools that compare, and that what they compare is alike."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shardwise.batches import Batch
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.parity.layouts import PROVEN
from tests.report.conftest import strategies, write

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("tool", ["communication"], indirect=True)
def test_the_page_of_communication_is_what_the_formulas_say(tool: ModuleType) -> None:
    result = json.loads(tool.RESULTS.read_text(encoding="utf-8"))
    assert result == tool.compute(), "run python tools/communication.py"
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(result)
    assert {row["layout"] for row in result["rows"]} == set(PROVEN) - {"single"}


@pytest.mark.parametrize("tool", ["tensor_overhead"], indirect=True)
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_both_sides_of_the_overhead_train_alike(
    tool: ModuleType, mode: str, tmp_path: Path
) -> None:
    sizes = tool.SIZES | {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    for ours, others in run_ranks(2, both_losses, tool, str(tmp_path), mode):
        assert ours == pytest.approx(others, rel=1e-5)
        assert abs(ours[0] - ours[-1]) > 1e-4  # which are no constants


def both_losses(tool: ModuleType, folder: str, mode: str) -> tuple[list[float], list[float]]:
    cfg = tool.run_config(folder, mode)
    mesh = build_mesh(cfg, torch.device("cpu"))
    tokens = torch.randint(0, 128, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.zeros_like(tokens[:, 1:]), (0, 1, 2, 3), 1)
    ours, others = tool.our_step(cfg, mesh), tool.torch_step(cfg, mesh)
    return [ours(batch) for _ in range(3)], [others(batch) for _ in range(3)]


@pytest.mark.parametrize("tool", ["study_table"], indirect=True)
def test_the_table_of_a_study_goes_into_its_page(tool: ModuleType, tmp_path: Path) -> None:
    sweep, records = strategies()
    cells = tuple(replace(plan, timed=plan.id != "fsdp2") for plan in sweep.cells)
    page = tmp_path / "page.md"
    page.write_text(f"Before\n{tool.BEGIN}old\n{tool.END}After\n")
    tool.main([str(write(tmp_path / "bench", replace(sweep, cells=cells), records)), str(page)])
    before, *table, end, after = page.read_text().splitlines()
    assert (before, end, after) == ("Before", tool.END.strip(), "After")
    assert table[2:6] == [
        "| --- | --- |",
        "| `single` | 1.00 · 100.0 |",
        "| `ddp` | 1.50 · 80.0 |",
        "| `fsdp2` | not timed · 60.0 |",
    ]
    assert table[6:] == ["| `zero1` | – |", "| `fsdp1` | – |", "| `pp` | – |"]
