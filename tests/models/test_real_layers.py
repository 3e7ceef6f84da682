"""Formulas of memory and FLOPs beside the layers themselves, at the flags and sizes of every preset
and of every family's default config in transformers."""

from __future__ import annotations

from itertools import product

import pytest
from transformers import AutoConfig

from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.models.activations import unit_memory
from shardwise.models.counts import count_model
from shardwise.models.families import FAMILIES
from shardwise.models.operations import TapedBlock
from tests.left_out import some_now
from tests.models.fake_layers import real_layers
from tests.models.tiny import CONFIGS

LENGTH = 128
IN_CHUNKS = 0.05
"""Relative error of the peak of a recurrence: how much of a chunk is alive is known roughly."""
PRESETS = sorted(path.name for path in CONFIGS.iterdir())
DEFAULTS = sorted({*FAMILIES} - {"lfm2_moe", "jet_nemotron"})
"""transformers cannot build Lfm2Moe by its default config, and does not know Jet-Nemotron."""
MODELS = (*PRESETS, *(f"default {name}" for name in DEFAULTS))
SETTINGS = ("full", "lora on 16 bits")
NOT_TINY = [name for name in MODELS if not name.startswith("tiny-")]
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
        config = AutoConfig.for_model(model.removeprefix("default "))
        config.attn_pdrop = 0.0  # a rule refuses another one
        config.save_pretrained(path)
    lora = None if setting == "full" else Lora(r=8, targets="all-linear")
    cfg = RunConfig(
        Model(str(path), init="random", dtype="bfloat16" if lora else "float32"),
        Data("x", sequence_length=LENGTH),
        Training(output_dir="out", micro_batch_size=1, device="cpu"),
        lora,
        Parallel(),
    )
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
