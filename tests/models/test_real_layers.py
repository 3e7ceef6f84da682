"""Formulas of memory and FLOPs beside the layers themselves, at the flags and sizes of every preset
and of every family's default config in transformers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.kernels.linear_cross_entropy import chunked
from shardwise.models.activations import UnitMoves, unit_memory, unit_moves
from shardwise.models.counts import count_model
from shardwise.models.facts import noise_of
from shardwise.models.families import FAMILIES
from shardwise.models.operations import TapedBlock
from tests.left_out import some_now
from tests.models.fake_layers import Real, head_moves, real_layers
from tests.models.tiny import CONFIGS

LENGTH = 128
IN_CHUNKS = 0.05
"""Relative error of the peak of a recurrence: how much of a chunk is alive is known roughly."""
MOVED = 0.075
"""Relative error of the bytes that operators move in a pass of a layer."""
LAUNCHED = 10
"""Error of the number of operators in a pass of a layer."""
LORA = Lora(r=8, targets="all-linear")
PRESETS = sorted(path.name for path in CONFIGS.iterdir())
DEFAULTS = sorted({*FAMILIES} - {"lfm2_moe", "jet_nemotron"})
"""transformers cannot build Lfm2Moe by its default config, and does not know Jet-Nemotron."""
UNFINISHED = ("dots1", "hunyuan_v1_dense")
"""Families whose classes cannot be built by their default configs, which lack some sizes."""
MODELS = (*PRESETS, *(f"default {name}" for name in DEFAULTS))
SETTINGS = ("full", "lora on 16 bits")
NOT_TINY = [name for name in MODELS if not name.startswith("tiny-")]
PUBLISHED = [name for name in NOT_TINY if name in PRESETS and name[-1] == "b"]
IN_TURN = [(name, SETTINGS[place % 2]) for place, name in enumerate(NOT_TINY)]


@pytest.fixture(autouse=True)
def what_fake_tensors_show(monkeypatch):
    """What an operator takes within itself has no storage; test_activations measures it."""
    monkeypatch.setattr(TapedBlock, "promotion_bytes", lambda *operands: 0)


@pytest.mark.parametrize(("model", "setting"), some_now(product(MODELS, SETTINGS), IN_TURN))
def test_a_layer_keeps_and_multiplies_what_formulas_say(model, setting, tmp_path):
    path = CONFIGS / model
    if model not in PRESETS:
        path = tmp_path
        name = model.removeprefix("default ")
        family = FAMILIES[name]
        config = AutoConfig.for_model(name, **(family.options if name in UNFINISHED else {}))
        config.update(dict.fromkeys(noise_of(config, family), 0.0))  # as a rule wants it
        config.save_pretrained(path)
    lora = None if setting == "full" else LORA
    cfg = run_of(str(path), "bfloat16" if lora else "float32", lora)
    hf, spec, layers = real_layers(cfg)
    units = count_model(hf, spec).units
    for real in layers:
        formula = unit_memory(cfg, hf, spec, real.place + 1)
        assert formula.kept == pytest.approx(real.kept, rel=0.005), real
        in_chunks = any(block.kind.backends for block in real.layer.mixers)
        rel = IN_CHUNKS if in_chunks else 0.005
        assert formula.forward == pytest.approx(real.forward, rel=rel), real
        if lora is None:
            weights = units[real.place + 1].weights
            flops = sum(2 * w.numel * w.active for w in weights if not w.by_elements)
            assert flops * LENGTH == pytest.approx(real.flops, rel=1e-12), real
        check_moves(unit_moves(cfg, hf, spec, real.place + 1), real)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model", some_now(PUBLISHED, ["olmo-hybrid-7b", "granite-4.0-h-tiny", "gpt2-large"])
)
def test_layers_under_autocast_keep_and_move_what_the_walk_says(model, dtype, lora):
    cfg = run_of(str(CONFIGS / model), dtype, lora, precision="bfloat16")
    hf, spec, layers = real_layers(cfg)
    for real in layers:
        formula = unit_memory(cfg, hf, spec, real.place + 1)
        assert formula.kept == pytest.approx(real.kept, rel=0.005), real
        assert formula.forward == pytest.approx(real.forward, rel=IN_CHUNKS), real
        check_moves(unit_moves(cfg, hf, spec, real.place + 1), real)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", ["plain", "chunked", "triton"])
def test_operators_of_a_head_move_what_the_walk_says(loss, dtype, lora, monkeypatch):
    # A GPU's product adds to the sum, and Triton's softmax is one kernel in a chunk's place.
    monkeypatch.setattr(chunked, "_add_product", lambda total, a, b: a @ b)
    cfg = run_of(str(CONFIGS / "llama-3.1-8b"), dtype, lora, precision="bfloat16", loss=loss)
    counted = cfg
    if loss == "triton":
        monkeypatch.setattr(chunked, "_softmax_of", lambda *of: (written_once, False))
        counted = replace(cfg, training=replace(cfg.training, loss="chunked"))
    hf, spec, moves = head_moves(counted, plain_loss if loss == "plain" else loss_in_head)
    walk = unit_moves(cfg, hf, spec, len(spec.layers) + 1)
    for of_walk, real in zip(walk[:2], moves, strict=True):
        assert sum(of_walk) == pytest.approx(sum(real), rel=MOVED)


def loss_in_head(norm: Any, head: Any, x: Any, labels: Any, rows: Any) -> torch.Tensor:
    return head(norm(x), labels=labels, rows=rows)


def plain_loss(norm: Any, head: Any, x: Any, labels: Any, rows: Any) -> torch.Tensor:
    logits = head(norm(x)).float().flatten(0, -2)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def written_once(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    """Read and write a chunk of logits, as the softmax of Triton does."""
    return logits.mul_(0.5).new_zeros(())


def run_of(path: str, dtype: Any, lora: Lora | None, **training: Any) -> RunConfig:
    return RunConfig(
        Model(path, init="random", dtype=dtype),
        Data("x", sequence_length=LENGTH),
        Training(output_dir="out", micro_batch_size=1, device="cpu", **training),
        lora,
        Parallel(),
    )


def check_moves(walk: UnitMoves, real: Real) -> None:
    for of_walk, counted in (
        (walk.forward, real.forward_moves),
        (walk.backward, real.backward_moves),
    ):
        assert sum(of_walk) == pytest.approx(sum(counted), rel=MOVED), real.layer
        assert len(of_walk) == pytest.approx(len(counted), abs=LAUNCHED), real.layer
