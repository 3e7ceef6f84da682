"""Of every family's tiny model: what is cut, what is whole, and that all of it fits together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from peft.tuners.lora import ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from shardwise.config import Lora
from shardwise.models.adapters.lora import inject
from shardwise.models.families import spec_of
from shardwise.models.load import build_meta, read_config
from shardwise.models.names import adapter_layers
from shardwise.models.stored import is_turned
from shardwise.models.tensor_cuts import BlockSplit, unwrapped
from shardwise.models.tensor_plan import parameter_cuts, problem, rows_in, split_blocks
from tests.models.tiny import PLAIN, entries, on_meta, tiny

KIMI = (
    "forget_gate.f_a_proj",
    "g_a_proj",
    "kv_a_proj_with_mqa",
)  # first factors, of which all heads need the result
WHOLE = {
    "tiny-qwen3_moe": {"mlp.gate"},
    "tiny-qwen3_next": {"mlp.gate", "mlp.shared_expert_gate"},
    "tiny-nemotron_h": {"mixer.gate"},
    "tiny-granitemoehybrid": {"block_sparse_moe.router"},
    "tiny-kimi_linear": {"mlp.gate", *(f"self_attn.{name}" for name in KIMI)},
    "tiny-jamba": {"feed_forward.router"},
    "tiny-qwen3_5_moe": {"mlp.gate", "mlp.shared_expert_gate"},
    "tiny-lfm2_moe": {"feed_forward.gate"},
    "tiny-granitemoe": {"block_sparse_moe.router"},
    "tiny-mixtral": {"mlp.gate"},
    "tiny-gpt_oss": {"mlp.router", "mlp.experts.down_proj_bias"},
    "tiny-glm4_moe": {"mlp.gate"},
    "tiny-dots1": {"mlp.gate"},
    "tiny-afmoe": {"mlp.router.gate"},
    "tiny-ernie4_5_moe": {"mlp.gate"},
    "tiny-qwen2_moe": {"mlp.gate", "mlp.shared_expert_gate"},
    "tiny-glm4_moe_lite": {"mlp.gate", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"},
    "tiny-deepseek_v3": {"mlp.gate", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"},
    "tiny-jet_nemotron": {"self_attn.dynamic_conv1d.kernel_generator.w1"},
}
"""The matrices of a layer that every rank holds whole: routers, and first factors."""
INDIVISIBLE = {
    "tiny-qwen3_5": "4 key heads of Gated DeltaNet",
    "tiny-qwen3_5_moe": "4 key heads of Gated DeltaNet",
    "tiny-qwen3_next": "4 key heads of Gated DeltaNet",
    "tiny-olmo_hybrid": "4 key heads of Gated DeltaNet",
    "tiny-lfm2": "64 channels of a short convolution",
    "tiny-lfm2_moe": "64 channels of a short convolution",
    "tiny-bamba": "8 heads of Mamba2",
    "tiny-falcon_h1": "2 groups of heads of Mamba2",
    "tiny-gpt2": "4 attention heads",
    "tiny-nemotron_h": "8 heads of Mamba2",
    "tiny-granitemoehybrid": "8 heads of Mamba2",
    "tiny-kimi_linear": "4 heads of Kimi Delta Attention",
    "tiny-jamba": "128 channels of Mamba",
    "tiny-jet_nemotron": "4 heads of JetBlock",
}
"""What 3 ranks cannot share; of the others, attention heads."""

SIZES = [
    (name, num_ranks)
    for name in PLAIN
    for num_ranks in (2, 4)
    if (name, num_ranks) != ("tiny-falcon_h1", 4)
]
"""Falcon-H1's tiny model has 6 heads of Mamba2."""


def blocks(model: PreTrainedModel, num_ranks: int) -> Iterator[tuple[str, nn.Module, BlockSplit]]:
    """(path, module, split) of every block of a model; here each of them is cut."""
    spec = spec_of(model.config, model)
    for layer in spec.layers:
        for path, split in split_blocks(model, layer, num_ranks).items():
            assert split is not None
            yield f"{layer.name}.{path}", model.get_submodule(f"{layer.name}.{path}"), split


@pytest.mark.parametrize("name", PLAIN)
def test_every_matrix_is_cut_or_named_whole(name):
    assert held_whole(on_meta(tiny(name))) == WHOLE.get(name, set())


@pytest.mark.parametrize(
    ("name", "options", "also_whole"),
    [
        ("tiny-lfm2", {"conv_bias": True}, set()),
        ("tiny-jamba", {"mamba_proj_bias": True}, set()),
        ("tiny-kimi_linear", {"attention_bias": True, "q_lora_rank": 20}, {"self_attn.q_a_proj"}),
    ],
)
def test_so_is_what_a_config_adds(name, options, also_whole):
    config = read_config(tiny(name))
    plain = on_meta(tiny(name)).num_parameters()
    for option, value in options.items():
        setattr(config, option, value)
    model = build_meta(tiny(name), config)
    assert model.num_parameters() != plain
    assert held_whole(model) == WHOLE.get(name, set()) | also_whole


def held_whole(model: PreTrainedModel) -> set[str]:
    """The matrices of layers that are not cut; what else is not must be a norm's, an activation's
    or the bias of a whole output."""
    spec = spec_of(model.config, model)
    cut, whole_outputs, found = set(), set(), set()
    for path, block, split in blocks(model, 2):
        cut |= {f"{path}.{weight}" for weight in split.weights}
        whole_outputs |= {f"{path}.{linear}" for linear in rows_in(block, split)}
    for layer in spec.layers:
        for own, parameter in model.get_submodule(layer.name).named_parameters():
            if f"{layer.name}.{own}" in cut:
                continue
            module = own.removesuffix(".weight").removesuffix(".bias")
            if parameter.ndim > 1:
                found.add(module)
            elif not any(part in own for part in ("norm", "ln_", "act_fn")):
                assert own.endswith(".bias"), own
                assert module in found or f"{layer.name}.{module}" in whole_outputs, own
    return found


@pytest.mark.parametrize(("name", "num_ranks"), SIZES)
def test_names_and_sizes_are_the_models_own(name, num_ranks):
    model = on_meta(tiny(name))
    for path, block, split in blocks(model, num_ranks):
        parameters = dict(block.named_parameters())
        assert split.weights.keys() <= parameters.keys(), path
        for weight, cut in split.weights.items():
            assert cut.rows.num_ranks == num_ranks
            assert cut.rows.size == parameters[weight].shape[cut.dim], f"{path}.{weight}"
        for attribute, value in split.attributes.items():
            owner, _, own = attribute.rpartition(".")
            whole = getattr(block.get_submodule(owner), own)
            if own == "config":  # a copy of the model's, with fewer heads
                assert value is not whole
                assert value.to_dict() | {"num_attention_heads": 8} == whole.to_dict()
                whole, value = whole.num_attention_heads, value.num_attention_heads
            assert isinstance(whole, int), f"{path}.{attribute}"
            assert whole % value == 0, f"{path}.{attribute}"
        for module in (*split.norms, *split.summed):
            assert f"{module}.weight" in split.weights, f"{path}.{module}"


@pytest.mark.parametrize(("name", "num_ranks"), SIZES)
def test_restoring_gives_every_weight_back(name, num_ranks):
    values = entries(tiny(name))
    for path, _, split in blocks(on_meta(tiny(name)), num_ranks):
        for weight, cut in split.weights.items():
            whole = values[f"{path}.{weight}"]
            assert torch.equal(
                cut.rows.restore(cut.rows.arrange(whole, cut.dim), cut.dim), whole
            ), f"{path}.{weight}"


@pytest.mark.parametrize("name", PLAIN)
def test_an_adapters_share_has_the_shape_of_its_bases_share(name):
    model = on_meta(tiny(name))
    inject(model, Lora(r=4, targets="all-linear"), spec_of(model.config, model))
    adapted = 0
    for path, block, split in blocks(model, 2):
        cuts = parameter_cuts(block, split)
        shapes = {}
        for own, parameter in block.named_parameters():
            shapes[own] = [*parameter.shape]
            if own in cuts:
                shapes[own][cuts[own].dim] = cuts[own].rows.local_size
        names = {parameter: own for own, parameter in block.named_parameters()}
        for module, layer in adapter_layers(block).items():
            base = unwrapped(layer)
            (a,), (b,) = (factor.parameters() for factor in (layer.lora_A, layer.lora_B))
            stack = isinstance(layer, ParamWrapper)
            weight = getattr(base, layer.parameter_name) if stack else base.weight
            given, taken = shapes[names[weight]][-2:]
            if is_turned(base):
                given, taken = taken, given
            assert (shapes[names[b]][0], shapes[names[a]][1]) == (given, taken), f"{path}.{module}"
            assert shapes[names[a]][0] == shapes[names[b]][1]  # the rank, of all experts together
            adapted += 1
    assert adapted == len(adapter_layers(model))


@pytest.mark.parametrize("name", PLAIN)
def test_what_3_ranks_cannot_share_is_named(name):
    model = on_meta(tiny(name))
    found = problem(model, spec_of(model.config, model), 3)
    assert found == INDIVISIBLE.get(name, f"{model.config.num_attention_heads} attention heads")
