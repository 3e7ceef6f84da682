"""The table of weights against PEFT's choice of linears, and against rows written by hand."""

from __future__ import annotations

import pytest
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from shardwise.config import Lora
from shardwise.models.adapters.lora import inject
from shardwise.models.families import spec_of
from shardwise.models.names import adapter_layers
from shardwise.models.quantise import as_stored
from shardwise.models.weights import WeightRow, weights_of
from tests.models.tiny import PLAIN, on_meta, tiny


def rows_of(name: str, lora: Lora | None = None) -> list[WeightRow]:
    hf = on_meta(tiny(name))
    spec = spec_of(hf.config, hf)
    if lora is not None:
        inject(hf, lora, spec)
    return list(weights_of(hf, spec))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
@pytest.mark.parametrize("name", PLAIN)
def test_linears_are_those_that_peft_calls_all_linear(name):
    theirs = on_meta(tiny(name))
    head = spec_of(theirs.config, theirs).head
    # Without a config around them, by whose model type PEFT leaves out some linears.
    holder = nn.ModuleDict({"model": theirs})
    inject_adapter_in_model(LoraConfig(target_modules="all-linear"), holder)
    ours = {row.target for row in rows_of(name) if row.is_linear}
    assert ours | {head} == adapter_layers(theirs).keys()


def test_rows_of_a_layer_with_experts():
    rows = [row for row in rows_of("tiny-qwen3_next") if row.layer and row.layer.number == 2]
    assert {row.path.removeprefix("model.layers.2."): row.role for row in rows} == {
        "input_layernorm.weight": "other",
        "linear_attn.dt_bias": "bias",
        "linear_attn.A_log": "rate",
        "linear_attn.conv1d.weight": "other",
        "linear_attn.in_proj_qkvz.weight": "projection",
        "linear_attn.in_proj_ba.weight": "gating",
        "linear_attn.norm.weight": "other",
        "linear_attn.out_proj.weight": "projection",
        "post_attention_layernorm.weight": "other",
        "mlp.gate.weight": "gating",
        "mlp.experts.gate_up_proj": "expert",
        "mlp.experts.down_proj": "expert",
        "mlp.shared_expert.gate_proj.weight": "projection",
        "mlp.shared_expert.up_proj.weight": "projection",
        "mlp.shared_expert.down_proj.weight": "projection",
        "mlp.shared_expert_gate.weight": "score",
    }
    assert [row.path for row in rows if row.is_stack] == [
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
    ]
    assert {row.block.path for row in rows if row.block} == {"linear_attn", "mlp"}


@pytest.mark.parametrize("base", ["none", "int8"])
def test_parts_of_adapters_and_stored_matrices_have_the_role_of_their_weight(base):
    hf = on_meta(tiny("tiny-qwen3_next"))
    spec = spec_of(hf.config, hf)
    plain = {row.path: row.role for row in weights_of(hf, spec)}
    inject(hf, Lora(r=2, targets="all-linear", modules_to_save=["lm_head", "gate"]), spec)
    rows = list(weights_of(as_stored(hf, base), spec))  # ty: ignore[invalid-argument-type]
    assert all(row.role == plain[row.path] for row in rows)
    assert {row.path for row in rows} == plain.keys()
    adapted = {row.path for row in rows if row.part == "lora_A"}
    assert adapted == {row.path for row in rows if row.part == "lora_B"}
    assert sum("experts" in path.split(".") for path in adapted) == 6  # two stacks in three layers
    copied = {row.path for row in rows if row.is_saved_copy}
    assert copied == {row.path for row in rows if row.is_original}
    assert {path.rpartition(".")[0] for path in copied} == {
        "lm_head",
        *(f"model.layers.{i}.mlp.gate" for i in (0, 2, 3)),
    }
    stored = {row.path for row in rows if row.part and not row.is_adapter}
    assert (
        stored >= adapted - {p for p, role in plain.items() if role in ("gating", "score")}
    ) is (base == "int8")


def test_a_shared_pair_of_factors_says_how_many_experts_have_it():
    rows = rows_of("tiny-qwen3_next", Lora(r=2, targets=["experts"], experts="shared"))
    num_experts = {row.shape[0] for row in rows if row.is_stack and not row.part}
    assert {row.num_sharing for row in rows if row.part} == num_experts
