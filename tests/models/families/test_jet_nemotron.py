"""Jet-Nemotron: published names and shapes, one answer by every path, generation, padding, packing,
files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config import Model, UserError
from shardwise.kernels.dynamic_conv import naive as naive_conv
from shardwise.kernels.gated_delta_rule import naive as naive_rule
from shardwise.models import load
from shardwise.models.families.jet_nemotron import JetNemotronConfig, jet_block
from tests.left_out import some_now
from tests.models.tiny import CONFIGS, relative_error

TINY = CONFIGS / "jet-nemotron-tiny"
# Around the chunks of 64 tokens and the convolution's 3 tokens back; the window sees 16 tokens.
SIZES = (1, 2, 3, 4, 17, 63, 64, 65, 131)

# The published checkpoints, by the published modelling code and config.json; layers are counted
# from 0.
PUBLISHED: dict[str, dict[str, Any]] = {
    "2b": {
        "layers": 28,
        "full": (14, 19),
        "window": (20, 21),
        "window_size": 1152,
        "parameters": 1_964_806_208,
        "around": {"model.embed_tokens.weight": (151936, 1536), "model.norm.weight": (1536,)},
        "every": {
            "input_layernorm.weight": (1536,),
            "post_attention_layernorm.weight": (1536,),
            "mlp.gate_proj.weight": (8960, 1536),
            "mlp.up_proj.weight": (8960, 1536),
            "mlp.down_proj.weight": (1536, 8960),
        },
        "attention": {
            "self_attn.q_proj.weight": (1536, 1536),
            "self_attn.q_proj.bias": (1536,),
            "self_attn.k_proj.weight": (256, 1536),
            "self_attn.k_proj.bias": (256,),
            "self_attn.v_proj.weight": (256, 1536),
            "self_attn.v_proj.bias": (256,),
            "self_attn.o_proj.weight": (1536, 1536),
        },
        "jet": {
            "self_attn.A_log": (12,),
            "self_attn.dt_bias": (12,),
            "self_attn.q_proj.weight": (1152, 1536),
            "self_attn.k_proj.weight": (1152, 1536),
            "self_attn.v_proj.weight": (3072, 1536),
            "self_attn.b_proj.weight": (12, 1536),
            "self_attn.a_proj.weight": (12, 1536),
            "self_attn.dynamic_conv1d.kernel_generator.w1.weight": (384, 1536),
            "self_attn.dynamic_conv1d.kernel_generator.w2.weight": (12288, 384),
            "self_attn.dynamic_conv1d.kernel_generator.w2.bias": (12288,),
            "self_attn.g_proj.weight": (3072, 1536),
            "self_attn.o_norm.weight": (256,),
            "self_attn.o_proj.weight": (1536, 3072),
        },
    },
    "4b": {
        "layers": 36,
        "full": (17, 20, 32),
        "window": (5, 16, 19, 21, 22, 25, 27),
        "window_size": 2048,
        "parameters": 3_960_424_768,
        "around": {"model.embed_tokens.weight": (151936, 2048), "model.norm.weight": (2048,)},
        "every": {
            "input_layernorm.weight": (2048,),
            "post_attention_layernorm.weight": (2048,),
            "mlp.gate_proj.weight": (11008, 2048),
            "mlp.up_proj.weight": (11008, 2048),
            "mlp.down_proj.weight": (2048, 11008),
        },
        "attention": {
            "self_attn.q_proj.weight": (2048, 2048),
            "self_attn.q_proj.bias": (2048,),
            "self_attn.k_proj.weight": (256, 2048),
            "self_attn.k_proj.bias": (256,),
            "self_attn.v_proj.weight": (256, 2048),
            "self_attn.v_proj.bias": (256,),
            "self_attn.o_proj.weight": (2048, 2048),
        },
        "jet": {
            "self_attn.A_log": (16,),
            "self_attn.dt_bias": (16,),
            "self_attn.q_proj.weight": (2048, 2048),
            "self_attn.k_proj.weight": (2048, 2048),
            "self_attn.v_proj.weight": (4096, 2048),
            "self_attn.b_proj.weight": (16, 2048),
            "self_attn.a_proj.weight": (16, 2048),
            "self_attn.dynamic_conv1d.kernel_generator.w1.weight": (512, 2048),
            "self_attn.dynamic_conv1d.kernel_generator.w2.weight": (16384, 512),
            "self_attn.dynamic_conv1d.kernel_generator.w2.bias": (16384,),
            "self_attn.g_proj.weight": (4096, 2048),
            "self_attn.o_norm.weight": (256,),
            "self_attn.o_proj.weight": (2048, 4096),
        },
    },
}


def tiny(**changes: Any):
    """A tiny model in eval mode, with weights large enough for tokens to matter to each other."""
    config = AutoConfig.from_pretrained(TINY, **{"initializer_range": 0.1, **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(length))


def logits(model: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False, **given).logits


def loss_gradients(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(ids, use_cache=False).logits
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_names_and_shapes(size):
    published = PUBLISHED[size]
    folder = Model(str(CONFIGS / f"jet-nemotron-{size}"), init="random", dtype="bfloat16")
    built = load.build_meta(folder, load.read_config(folder))
    expected = dict(published["around"])
    for number in range(published["layers"]):
        kind = "attention" if number in published["full"] + published["window"] else "jet"
        expected |= {
            f"model.layers.{number}.{name}": s
            for name, s in (published["every"] | published[kind]).items()
        }
    state = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    assert (
        state.pop("lm_head.weight") == state["model.embed_tokens.weight"]
    )  # tied: files don't have it
    assert state == expected
    assert built.num_parameters() == published["parameters"]
    windows = {
        n: layer.self_attn.sliding_window
        for n, layer in enumerate(built.model.layers)
        if n in published["full"]
    }
    assert windows == dict.fromkeys(published["full"])
    windows = {n: built.model.layers[n].self_attn.sliding_window for n in published["window"]}
    assert windows == dict.fromkeys(published["window"], published["window_size"])


@pytest.mark.parametrize("length", some_now(SIZES, (1, 4, 65, 131)))
def test_fast_paths_compute_what_the_naive_ones_do(length, monkeypatch):
    model, ids = tiny(), tokens(length)
    out, grads = loss_gradients(model, ids)
    monkeypatch.setattr(jet_block, "gated_delta_rule", naive_rule.gated_delta_rule)
    monkeypatch.setattr(jet_block, "dynamic_conv", naive_conv.dynamic_conv)
    expected, expected_grads = loss_gradients(model, ids)
    assert relative_error(out, expected) < 1e-5
    for name, grad in grads.items():
        other = expected_grads[name]
        if (
            length == 1 and other.abs().max() < 1e-6
        ):  # of one token: what decays, and whom it attends to
            assert (
                name.endswith(("A_log", "dt_bias", "a_proj.weight"))
                or "q_proj" in name
                or "k_proj" in name
            )
        else:
            assert other.abs().max() > 0
            assert relative_error(grad, other) < 1e-4, name


def test_the_block_is_the_published_formula():
    """One token after the other, written out from the paper and the published code: no kernel of
    the project."""
    model = tiny()
    block, x = (
        model.model.layers[0].self_attn,
        torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)),
    )
    weight = {name: p.detach() for name, p in block.named_parameters()}

    def unit(v: torch.Tensor) -> torch.Tensor:
        return v / (v.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def silu(v: torch.Tensor) -> torch.Tensor:
        return v / (1 + (-v).exp())

    values = x[0] @ weight["v_proj.weight"].T  # [T, 4 heads of 32]
    state, outs = torch.zeros(4, 12, 32), []
    for t in range(9):
        h = x[0, t]
        inner = silu(weight["dynamic_conv1d.kernel_generator.w1.weight"] @ h)
        kernel = weight["dynamic_conv1d.kernel_generator.w2.weight"] @ inner
        kernel = (kernel + weight["dynamic_conv1d.kernel_generator.w2.bias"]).view(128, 4)
        seen = torch.cat([torch.zeros(3, 128), values])[
            t : t + 4
        ]  # the last tap is the token's own
        v = silu((seen.T * kernel).sum(-1)).view(4, 32)
        q = unit(silu(weight["q_proj.weight"] @ h).view(4, 12)) / 12**0.5
        k = unit(silu(weight["k_proj.weight"] @ h).view(4, 12))
        beta = 1 / (1 + (-(weight["b_proj.weight"] @ h)).exp())
        rate = (1 + (weight["a_proj.weight"] @ h + weight["dt_bias"]).exp()).log()
        state = state * (-weight["A_log"].exp() * rate).exp()[:, None, None]
        error = v - torch.einsum("nkv,nk->nv", state, k)
        state = state + torch.einsum("n,nk,nv->nkv", beta, k, error)
        o = torch.einsum("nkv,nk->nv", state, q)
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight["o_norm.weight"]
        outs.append(
            weight["o_proj.weight"]
            @ (o * silu(weight["g_proj.weight"] @ h).view(4, 32).clone()).flatten()
        )
    with torch.no_grad():
        assert relative_error(block(x)[0][0], torch.stack(outs)) < 1e-5


def test_a_window_sees_its_tokens_and_no_more():
    model = tiny(num_hidden_layers=1, layer_types=["sliding_attention"])
    embedded = model.model.embed_tokens(tokens(40, 1)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(
        model(inputs_embeds=embedded).logits[0, 30].square().sum(), embedded
    )
    assert gradient[0].abs().amax(1).nonzero().flatten().tolist() == list(
        range(15, 31)
    )  # 16 tokens, itself too


@pytest.mark.parametrize("prompt", some_now((1, 2, 3, 5, 63, 64, 65), (1, 3, 65)))
def test_steps_with_a_cache_are_the_full_forward(prompt):
    model, ids = tiny(), tokens(90)
    expected = logits(model, ids)
    with torch.no_grad():
        out = model(ids[:, :prompt], use_cache=True)
        parts, cache = [out.logits], out.past_key_values
        for t in range(prompt, prompt + 20):
            parts.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
        parts.append(model(ids[:, prompt + 20 :], past_key_values=cache).logits)  # several at once
    for part, other in zip(parts, expected.split([p.shape[1] for p in parts], 1)):
        assert relative_error(part, other) < 1e-5


def test_generation_takes_the_most_likely_token_each_time():
    model, ids = tiny(), tokens(10)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 25}
    made = model.generate(ids, **options)
    longer = ids
    for _ in range(25):
        longer = torch.cat([longer, logits(model, longer)[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, longer)
    assert len(made[:, 10:].unique()) > 3  # and it is not one token over and over
    padded = torch.cat([torch.zeros(2, 7, dtype=torch.long), ids], 1)
    assert torch.equal(
        model.generate(padded, attention_mask=(padded > 0).long(), **options)[:, 7:], made
    )
    # Beams change places in the cache; without one there is nothing to mix up.
    beams = model.generate(ids, num_beams=3, **options)
    assert torch.equal(beams, model.generate(ids, num_beams=3, use_cache=False, **options))
    assert not torch.equal(beams, made)


@pytest.mark.parametrize(
    ("side", "pad"),
    some_now(
        product(("left", "right"), (1, 3, 20, 70)), [("left", 3), ("left", 70), ("right", 20)]
    ),
)
def test_padding_changes_nothing(side, pad):
    model, ids = tiny(), tokens(80)
    own = slice(pad, None) if side == "left" else slice(0, 80 - pad)
    mask = torch.zeros(2, 80, dtype=torch.long)
    mask[0, own], mask[1] = 1, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = logits(model, ids, attention_mask=mask, position_ids=positions)
    assert relative_error(out[:1, own], logits(model, ids[:1, own])) < 1e-5
    assert relative_error(out[1:], logits(model, ids[1:])) < 1e-5
    if side == "left":  # what the padding would do
        assert relative_error(logits(model, ids[:1])[:, own], logits(model, ids[:1, own])) > 1e-3


@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.slow), False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    model, ids = tiny().train(), tokens(70)
    expected, expected_grads = loss_gradients(model, ids)
    for layer in model.model.layers:  # transformers' own switch, whose name is about to change
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda f, *args: torch.utils.checkpoint.checkpoint(
            f, *args, use_reentrant=reentrant
        )
    out, grads = loss_gradients(model, ids)
    assert torch.equal(out, expected)
    assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)


def test_reload_gives_identical_logits(tmp_path):
    model, ids = tiny(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}), tokens(70)
    model.save_pretrained(tmp_path)
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids), logits(model, ids)
    )
    folder = Model(str(tmp_path))
    assert torch.equal(
        logits(load.load_whole(folder, load.read_config(folder)), ids), logits(model, ids)
    )
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["layer_types"] == ["jet", "jet", "swa", "attn"]  # as published
    assert written["model_type"] == "jet_nemotron"
    assert written["rope_theta"] == 5000.0  # where the published class looks


def test_a_folder_like_the_official_one_loads(tmp_path):
    """All keys of the official config.json, in its own spelling; no code comes with it, and none is
    asked for."""
    model, ids = tiny(), tokens(70)
    config = json.loads((TINY / "config.json").read_text())
    config["efficient_attention_config"]["jet"] |= {
        "norm_eps": "1e-5",
        "mode": "chunk",
        "dconv_implementation": "triton",
    }
    config |= {
        "auto_map": {
            "AutoConfig": "configuration_jet_nemotron.JetNemotronConfig",
            "AutoModelForCausalLM": "modeling_jet_nemotron.JetNemotronForCausalLM",
        },
        "max_window_layers": 4,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.3",
        "use_mrope": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {
        name: tensor.bfloat16()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model.load_state_dict(state, strict=False)
    expected = logits(model, ids)
    folder = Model(str(tmp_path))
    assert (
        relative_error(logits(load.load_whole(folder, load.read_config(folder)), ids), expected)
        < 1e-6
    )
    assert (
        relative_error(
            logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), ids),
            expected,
        )
        < 1e-6
    )


def test_random_weights_are_what_training_starts_from():
    model = Model(str(TINY), init="random")
    state = load.load_whole(model, load.read_config(model)).state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    block = "model.layers.0.self_attn."
    assert state[f"{block}A_log"].exp().max() < 16
    step = torch.nn.functional.softplus(state[f"{block}dt_bias"])
    assert 0.001 <= step.min() <= step.max() <= 0.1
    assert state[f"{block}dynamic_conv1d.kernel_generator.w2.bias"].std() > 0.01
    assert (state[f"{block}o_norm.weight"] == 1).all()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_close(precision):
    dtype, model, ids = getattr(torch, precision), tiny(initializer_range=0.02), tokens(70)
    expected = logits(model, ids)
    with torch.autocast("cpu", dtype=dtype):
        assert relative_error(logits(model, ids).float(), expected) < 4 * torch.finfo(dtype).eps
    assert (
        relative_error(logits(model.to(dtype), ids).float(), expected) < 4 * torch.finfo(dtype).eps
    )


JET: dict[str, Any] = {"num_heads": 4, "head_dim": 12, "expand_v": 2.0}


@pytest.mark.parametrize(
    ("layers", "sizes", "message"),
    [
        (
            ["swa"],
            None,
            "layer_types has swa, but efficient_attention_config no swa with a window_size",
        ),
        (["swa"], {"swa": None}, "no swa with a window_size"),
        (["swa"], {"swa": {"window_size": "16"}}, "no swa with a window_size"),
        (
            ["jet"],
            None,
            "layer_types has jet, but efficient_attention_config no jet with its sizes",
        ),
        (
            ["jet"],
            {"jet": {**JET, "headdim": 3}},
            "jet has 'headdim'; it may have num_heads, head_dim",
        ),
        (["jet"], {"jet": {**JET, "conv_size": 0}}, "jet has conv_size 0"),
        (
            ["jet"],
            {"jet": {**JET, "dconv_generator_reduction": 10**6}},
            "dconv_generator_reduction 1000000",
        ),
        (["jet"], {"jet": {**JET, "expand_v": 1.3}}, "whole number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(layers, sizes, message):
    with pytest.raises(ValueError, match=message):
        JetNemotronConfig(num_hidden_layers=1, layer_types=layers, efficient_attention_config=sizes)


def test_what_a_config_may_leave_out():
    assert JetNemotronConfig(num_hidden_layers=2).layer_types == ["full_attention"] * 2
    with pytest.raises(
        ValueError, match="num_attention_heads is no multiple of num_key_value_heads"
    ):
        JetNemotronConfig(num_attention_heads=8, num_key_value_heads=3)
    # The published class keeps what it does not know, and its model does not look at it.
    assert not hasattr(
        JetNemotronConfig(auto_map={"AutoConfig": "configuration_jet_nemotron.JetNemotronConfig"}),
        "auto_map",
    )
    assert JetNemotronConfig(sliding_window=32).sliding_window is None


def test_a_config_that_names_an_unknown_layer_is_the_users_mistake(tmp_path):
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"][0] = "rwkv"
    Path(tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot read config"):
        load.read_config(replace(Model(str(TINY), init="random"), path=str(tmp_path)))
