"""The peak of a rank by formulas beside that of a simulated step."""

from __future__ import annotations

import json

import pytest

from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.config.presets import MODELS, STARTER
from shardwise.lab.planner.peak import boundaries_of, memory_of_rank
from tests.oracles.simulate import simulate
from tests.planner.grid import Cell, config_of

CELLS = [
    Cell("qwen3_5", "1f1b", "lora", 2, 128, 2, 4, "none", "float32"),
    Cell("llama", "tp", "full", 2, 128, 2, 1, "none", "float32"),
    Cell("qwen3_5", "zero1", "lora", 2, 128, 2, 1, "operators", "float32"),
    Cell("falcon_h1", "fsdp2", "full", 2, 128, 2, 1, "full", "float32"),
    Cell("llama", "ddp", "lora", 2, 128, 2, 2, "none", "float32"),
    Cell("falcon_h1", "ddp", "full", 2, 128, 2, 1, "none", "float32"),
]
"""Cells that `make parity` compares: `make test` measures peaks by the formulas (tests/planner) and
of simulations (test_simulate.py), each beside real ones."""


@pytest.mark.parametrize(
    ("preset", "parallel", "checkpointing"),
    [
        # A window has a mask of all tokens of each row, which recomputed layers read again.
        ("tiny-qwen3", {}, "full"),
        pytest.param("tiny-qwen3", {"cp": 2}, "none", marks=pytest.mark.slow),
        # Attention under cp keeps no scores where keys are wider than values.
        ("tiny-deepseek_v3", {"cp": 2}, "none"),
        pytest.param("tiny-deepseek_v3", {"cp": 2}, "operators", marks=pytest.mark.slow),
        pytest.param("tiny-llama", {"cp": 2}, "full", marks=pytest.mark.slow),
        # Each call of an operator has an output, of which `operators` keeps all.
        pytest.param("tiny-llama", {"cp": 2}, "operators", marks=pytest.mark.slow),
        pytest.param("tiny-falcon_h1", {"cp": 2}, "none", marks=pytest.mark.slow),
        pytest.param("tiny-qwen3_moe", {"data": "ddp", "ep": 2}, "none", marks=pytest.mark.slow),
    ],
)
def test_they_agree_on_long_rows_of_tiny_models(preset, parallel, checkpointing):
    cfg = RunConfig(
        Model(str(MODELS / preset), init="random"),
        Data("unused", sequence_length=512),
        Training(
            "unused",
            global_batch_size=4,
            micro_batch_size=2,
            checkpointing=checkpointing,
            device="cpu",
        ),
        lora=Lora(),
        parallel=Parallel(**parallel),
    )
    check(cfg, max(cfg.parallel.ranks_of_a_model, cfg.parallel.ep))


@pytest.mark.parametrize(
    ("layout", "precision"),
    [({}, "bfloat16"), ({}, "float32"), ({"data": "fsdp2"}, "bfloat16"), ({"pp": 2}, "bfloat16")],
)
def test_no_backward_reads_the_hidden_states_of_bfloat16_weights(layout, precision, tmp_path):
    """Norms keep them in float32. A stage of a pipeline holds its input all the same."""
    content = json.loads((MODELS / "tiny-llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 8}))
    training = Training(
        "unused", global_batch_size=4, micro_batch_size=1, precision=precision, device="cpu"
    )
    parallel = Parallel(**layout, schedule="1f1b") if "pp" in layout else Parallel(**layout)
    cfg = RunConfig(
        Model(str(tmp_path), tokenizer=str(STARTER), init="random", dtype="bfloat16"),
        Data("unused", sequence_length=1024),
        training,
        lora=Lora(),
        parallel=parallel,
    )
    check(cfg, 2 if layout else 1, most=0.03 if "pp" in layout else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_formulas_and_simulation_agree(cell, tmp_path):
    check(config_of(cell, tmp_path), cell.num_ranks)


def check(cfg: RunConfig, num_ranks: int, most: float = 0.03) -> None:
    run = describe(cfg, num_ranks)
    simulated = simulate(cfg, num_ranks, 0)
    first = dict.fromkeys(run.sizes, 0)
    memory = memory_of_rank(cfg, run, first, boundaries_of(cfg, run))
    assert memory.total == pytest.approx(simulated.peak_bytes, rel=most), (memory, simulated)
