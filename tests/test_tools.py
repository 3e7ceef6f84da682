"""The arithmetic of the tools that compare, and that what they compare is alike."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shardwise.interfaces import Batch
from shardwise.parallel.mesh import build_mesh
from shardwise.schedule.costs import Cost
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.simulate import simulate
from shardwise.schedule.timeline import Event, Timeline, pack
from tests.distributed import run_ranks
from tests.parity.layouts import PROVEN
from tests.report.conftest import strategies, write

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module(request.param)


def timeline(*spans: tuple[int, float, float]) -> Timeline:
    return Timeline(2, tuple(Event(rank, rank, 0, "F", start, end) for rank, start, end in spans))


@pytest.mark.parametrize("tool", ["pipeline_split"], indirect=True)
def test_only_what_one_rank_does_alone_gets_faster(tool: ModuleType) -> None:
    # Alone: rank 0 from 0 to 1 and 6 to 7, rank 1 from 2 to 4; both from 1 to 2; neither from 4 to
    # 6.
    step = timeline((0, 0, 2), (1, 1, 4), (0, 6, 7))
    assert tool.alone_seconds(step) == 4
    assert tool.corrected_seconds(step, slowdown=2.0) == 7 - 4 / 2
    assert tool.corrected_seconds(step, slowdown=1.0) == 7


@pytest.mark.parametrize("tool", ["pipeline_split"], indirect=True)
def test_an_uneven_pipeline_loses_less_than_its_costs_say(tool: ModuleType) -> None:
    # A stage of 1 and one of 3 seconds alone, 1.25 times as much while both work. While the first
    # does a micro-batch, 1.25 s, the second does 1 of its 3 seconds; the other 2 go at full speed:
    # 3.25 s, where the costs say 3.75.
    chunks = [
        Cost(f"{s}", 1.25 * s / 2, 1.25 * s / 2, 0.0, activation_bytes=0, output_bytes=0)
        for s in (1.0, 3.0)
    ]
    step = simulate(Pipeline("1f1b", 2, 200), chunks)
    fill_and_drain = 1.25 * (1 + 3)  # at most one micro-batch through both
    assert step.seconds == pytest.approx(200 * 3.75, abs=fill_and_drain)
    assert tool.corrected_seconds(step, slowdown=1.25) == pytest.approx(
        200 * 3.25, abs=fill_and_drain
    )


@pytest.mark.parametrize("tool", ["pipeline_split"], indirect=True)
def test_a_simulated_step_is_simulated_without_error_from_its_own_costs(tool: ModuleType) -> None:
    chunks = [
        Cost("below", 0.25, 0.0, 0.0, 0, 0, backward=False),
        Cost("above", 0.5, 0.75, 0.0, 0, 0),
    ]
    step = simulate(Pipeline("1f1b", 2, 4), chunks)  # whole microseconds, which are kept exactly
    assert tool.own_seconds({"schedule": "1f1b", "events": pack(step)}) == 1.0
    late = Timeline(
        2,
        tuple(
            e._replace(start=2 * e.start, end=2 * e.start + e.end - e.start) for e in step.events
        ),
    )
    assert (
        tool.own_seconds({"schedule": "1f1b", "events": pack(late)}) < 0.6
    )  # the same costs, twice as far apart


@pytest.mark.parametrize("tool", ["pipeline_zero_bubble"], indirect=True)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_wins_by_the_weights_gradients_alone(tool: ModuleType, ranks: int) -> None:
    m = 4 * ranks
    assert tool.predicted("lora", ranks, m)["speed_over_1f1b"]["zb1p"] == 1.0
    # (m + p - 1) (F + I + W) over m (F + I + W) + (p - 1) (F + I - W), with F = I = W = 1.
    expected = 3 * (m + ranks - 1) / (3 * m + ranks - 1)
    assert tool.predicted("full", ranks, m)["speed_over_1f1b"]["zb1p"] == pytest.approx(
        expected, abs=5e-5
    )


@pytest.mark.parametrize("tool", ["pipeline_shapes"], indirect=True)
@pytest.mark.parametrize(
    ("repository", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("openai-community/gpt2-large", 774_030_080),
        ("jet-ai/Jet-Nemotron-2B", 1_964_806_208),
    ],
)
def test_published_models_have_their_published_size(
    tool: ModuleType, repository: str, parameters: int
) -> None:
    (shape,) = (shape for shape in tool.SHAPES if shape.repository == repository)
    embedding, *others = tool.units_of(shape, "full")
    config, matrix = shape.config(), 0
    if config["tie_word_embeddings"]:  # then the head's unit counts the matrix once more
        matrix = config["vocab_size"] * config.get("n_embd", config.get("hidden_size"))
    assert embedding.parameters + sum(unit.parameters for unit in others) - matrix == parameters


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
