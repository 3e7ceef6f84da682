import inspect
import re

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.config import Lora, UserError
from shardwise.models.adapters.lora import inject
from shardwise.models.families import FAMILIES, family_of, spec_of
from shardwise.models.load import build_meta, load_whole, read_config
from tests.left_out import some_now
from tests.models.tiny import EACH_KIND, PLAIN, TINY, on_meta, tiny, tokens

KINDS = {
    "tiny-qwen3": ["full_attention"] * 3 + ["sliding_attention"],
    "tiny-olmo2": ["full_attention"] * 4,
    "tiny-qwen3_moe": ["full_attention"] * 4,
    "tiny-lfm2": ["short_convolution"] * 2 + ["full_attention", "short_convolution"],
    "tiny-gpt2": ["full_attention"] * 4,
    "tiny-llama": ["full_attention"] * 4,
    "tiny-arcee": ["full_attention"] * 4,
    "tiny-granite": ["full_attention"] * 4,
    "tiny-granite_swa": ["full_attention"] + ["sliding_attention"] * 3,
    "tiny-seed_oss": ["full_attention"] * 4,
    "tiny-ernie4_5": ["full_attention"] * 4,
    "tiny-ernie4_5_moe": ["full_attention"] * 4,
    "tiny-hunyuan_v1_dense": ["full_attention"] * 4,
    "tiny-starcoder2": ["full_attention"] * 4,
    "tiny-glm4": ["full_attention"] * 4,
    "tiny-gemma2": ["sliding_attention", "full_attention"] * 2,
    "tiny-gemma3": ["sliding_attention"] * 3 + ["full_attention"],
    "tiny-cohere2": ["sliding_attention"] * 3 + ["full_attention"],
    "tiny-apertus": ["full_attention"] * 4,
    "tiny-phi3": ["full_attention"] * 4,
    "tiny-afmoe": ["sliding_attention"] * 3 + ["full_attention"],
    "tiny-dots1": ["full_attention"] * 3 + ["sliding_attention"],
    "tiny-qwen2_moe": ["full_attention"] * 3 + ["sliding_attention"],
    "tiny-glm4_moe_lite": ["full_attention"] * 4,
    "tiny-mistral": ["full_attention"] * 4,
    "tiny-ministral3": ["full_attention"] * 4,
    "tiny-smollm3": ["full_attention"] * 4,
    "tiny-qwen2": ["full_attention"] * 3 + ["sliding_attention"],
    "tiny-olmo3": ["sliding_attention"] * 3 + ["full_attention"],
    "tiny-exaone4": ["sliding_attention"] * 3 + ["full_attention"],
    "tiny-qwen3_5": ["gated_delta_net"] * 3 + ["full_attention"],
    "tiny-qwen3_next": ["gated_delta_net"] * 3 + ["full_attention"],
    "tiny-olmo_hybrid": ["gated_delta_net"] * 3 + ["full_attention"],
    "tiny-nemotron_h": ["mamba2", "moe", "full_attention", "mlp"],
    "tiny-granitemoehybrid": ["mamba2", "full_attention"],
    "tiny-falcon_h1": ["attention_and_mamba2"] * 2,
    "tiny-kimi_linear": ["kda", "kda", "full_attention"],
    "tiny-jamba": ["mamba", "mamba", "full_attention"],
    "tiny-qwen3_5_moe": ["gated_delta_net"] * 3 + ["full_attention"],
    "tiny-lfm2_moe": ["short_convolution"] * 2 + ["full_attention", "short_convolution"],
    "tiny-granitemoe": ["full_attention"] * 4,
    "tiny-mixtral": ["full_attention"] * 4,
    "tiny-gpt_oss": ["sliding_attention", "full_attention"] * 2,
    "tiny-bamba": ["mamba2"] * 2 + ["full_attention", "mamba2"],
    "tiny-glm4_moe": ["full_attention"] * 4,
    "tiny-deepseek_v3": ["full_attention"] * 4,
    "tiny-jet_nemotron": ["jet_block"] * 2 + ["sliding_attention", "full_attention"],
}
FEED_FORWARDS = {
    "tiny-qwen3_moe": ["moe", "dense", "moe", "moe"],
    "tiny-qwen3_next": ["moe", "dense", "moe", "moe"],
    "tiny-nemotron_h": ["none"] * 4,
    "tiny-granitemoehybrid": ["moe"] * 2,
    "tiny-kimi_linear": ["dense", "moe", "moe"],
    "tiny-jamba": ["dense", "moe", "dense"],
    "tiny-qwen3_5_moe": ["moe"] * 4,
    "tiny-granitemoe": ["moe"] * 4,
    "tiny-mixtral": ["moe"] * 4,
    "tiny-gpt_oss": ["moe"] * 4,
    "tiny-lfm2_moe": ["dense", "moe", "moe", "moe"],
    "tiny-glm4_moe": ["dense", "moe", "moe", "moe"],
    "tiny-ernie4_5_moe": ["dense", "moe", "moe", "moe"],
    "tiny-afmoe": ["dense", "moe", "moe", "moe"],
    "tiny-dots1": ["dense", "moe", "moe", "moe"],
    "tiny-qwen2_moe": ["moe", "dense", "moe", "moe"],
    "tiny-glm4_moe_lite": ["dense", "moe", "moe", "moe"],
    "tiny-deepseek_v3": ["dense", "moe", "moe", "moe"],
}


@pytest.mark.parametrize("name", PLAIN)
def test_spec_names_every_layer_and_its_kind(name):
    model = on_meta(tiny(name))
    spec = spec_of(model.config, model)
    assert [layer.kind for layer in spec.layers] == KINDS[name]
    assert [layer.feed_forward for layer in spec.layers] == FEED_FORWARDS.get(
        name, ["dense"] * len(KINDS[name])
    )
    assert [layer.name for layer in spec.layers] == [
        f"{family_of(model).layers}.{i}" for i in range(len(spec.layers))
    ]
    assert model.get_submodule(spec.embed) is model.get_input_embeddings()
    assert model.get_submodule(spec.head) is model.get_output_embeddings()
    assert (spec.hidden_size, spec.vocab_size, spec.tied) == (
        64,
        256,
        model.config.tie_word_embeddings,
    )


def test_spec_sees_tied_embeddings():
    model = on_meta(tiny("tiny-qwen3_5-tied"))
    assert spec_of(model.config, model).tied


def test_a_granite_hybrid_without_experts_has_its_shared_mlp():
    config = read_config(tiny("tiny-granitemoehybrid"))
    config.num_local_experts = 0
    model = build_meta(tiny("tiny-granitemoehybrid"), config)
    spec = spec_of(config, model)
    assert [layer.feed_forward for layer in spec.layers] == ["dense", "dense"]
    rows = inject(model, Lora(), spec).rows
    assert [(row.kind, row.weights, row.frozen) for row in rows] == [
        ("mamba2", 4, ("mamba.out_proj",)),
        ("full_attention", 6, ()),
    ]


def test_the_tiny_configs_are_of_all_families():
    assert {read_config(tiny(name)).model_type for name in PLAIN} == set(FAMILIES)


def test_every_facts_name_is_there():
    for name in PLAIN:
        model = on_meta(tiny(name))
        family = family_of(model)
        spec = spec_of(model.config, model)
        names = {
            n.removeprefix(f"{layer.name}.")
            for layer in spec.layers
            for n, _ in model.named_parameters()
        }
        for linear in (*family.named("gates"), *family.named("bypassed")):
            assert f"{linear}.weight" in names, (name, linear)
        assert set(family.named("experts")) <= names
        stacks = {n for n, p in model.named_parameters() if p.dim() == 3 and "experts" in n}
        assert {n.removeprefix(f"{family.layers}.").partition(".")[2] for n in stacks} == set(
            family.named("experts")
        )
        assert family.router is None or family.router in {
            type(module).__name__ for module in model.modules()
        }


@pytest.mark.parametrize("name", PLAIN)
def test_linears_whose_weight_is_read_past_the_module_are_known(name: str) -> None:
    # A mixer that hands `self.some_linear.weight` to a kernel makes an adapter on that linear do
    # nothing, on the path that calls the kernel, which no CPU takes: so the source is searched.
    model = on_meta(tiny(name))
    read = set()
    for path, module in model.named_modules():
        linears = {
            n for n, child in module.named_children() if isinstance(child, (nn.Linear, Conv1D))
        }
        if linears:
            used = set(
                re.findall(r"self\.(\w+)\.(?:weight|bias)\b", inspect.getsource(type(module)))
            )
            read |= {
                f"{path.removeprefix(f'{family_of(model).layers}.').partition('.')[2]}.{linear}"
                for linear in linears & used
            }
    assert read == set(family_of(model).named("bypassed"))


@pytest.mark.parametrize("name", PLAIN)
def test_linears_that_gate_are_there(name):
    names = [parameter_name for parameter_name, _ in on_meta(tiny(name)).named_parameters()]
    for gate in family_of(on_meta(tiny(name))).named("gating"):
        assert any(parameter_name.endswith(f".{gate}.weight") for parameter_name in names), gate


def test_an_unknown_kind_of_layer():
    config = read_config(tiny("tiny-llama"))
    config.layer_types = ["full_attention", "sideways"]
    with pytest.raises(
        UserError,
        match="has 'sideways', which llama does not know here; it may have full_attention, ",
    ):
        FAMILIES["llama"].mixers_of(config)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some_now(TINY, (*EACH_KIND, "tiny-qwen3_5-tied")))
def test_forward_and_backward_reach_every_parameter(name, dtype):
    model = tiny(name, dtype)
    whole = load_whole(model, read_config(model)).train()
    whole(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    for parameter_name, parameter in whole.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
