import math
import re
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from shardwise.base.layouts import AdapterFacts
from shardwise.config import Lora, UserError
from shardwise.models.adapters.lora import Coverage, adapter_facts, adapter_weights, inject
from shardwise.models.families import spec_of
from shardwise.models.load import load_whole, read_config
from shardwise.models.names import adapter_layers, hf_name, is_adapter
from tests.left_out import some_now
from tests.models.tiny import (
    EACH_KIND,
    PLAIN,
    TINY,
    logits,
    on_meta,
    relative_error,
    tiny,
    tokens,
    with_adapters,
)

# Weights an adapter could be on / adapted by `auto` / by `all-linear` / by `attention`, per layer
# kind and in the order of the layers, counted by hand. MLP: gate, up, down. GDN in Qwen3.5: qkv, z,
# b, a, out; in Qwen3-Next: qkvz, ba, out; in OLMo: q, k, v, a, b, g, o. Qwen3-Next's layers 0, 2
# and 3 have a shared expert (3), its gate (1) and 2 stacks of experts, layer 1 has an MLP (3);
# Qwen3-MoE's have the stacks alone. LFM2's convolution: in and out. GPT-2: q, k and v are one.
# Mamba2: in and out, of which out is read past its module. Granite: two linears are its MLP, beside
# 2 stacks. Falcon-H1: Mamba2's two, q, k, v, o, MLP. Kimi: q, k, v, f_a, f_b, b, g_a, g_b, o in
# KDA, and q, kv_a, kv_b, o in attention; then an MLP in layer 0, 2 stacks and a shared expert in
# the others. Jamba: in, x, dt (read past its module) and out; layer 1 has 2 stacks, the others an
# MLP. JetBlock: q, k, v, a, b, g, o and the generator's w1 and w2; an MLP. DeepSeek-V3: q_a, q_b,
# kv_a, kv_b and o; like GLM-4.5, an MLP in layer 0, 2 stacks and a shared expert in the others.
EXPECTED = {
    "tiny-llama": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-olmo2": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-qwen3": {"full_attention": (3 * 7, 21, 21, 12), "sliding_attention": (7, 7, 7, 4)},
    "tiny-arcee": {"full_attention": (4 * 6, 24, 24, 16)},
    "tiny-granite": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-granite_swa": {"full_attention": (7, 7, 7, 4), "sliding_attention": (3 * 7, 21, 21, 12)},
    "tiny-mistral": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-ministral3": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-smollm3": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-seed_oss": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-ernie4_5": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-ernie4_5_moe": {"full_attention": (7 + 3 * 9, 4 * 7, 7 + 3 * 9, 16)},
    "tiny-hunyuan_v1_dense": {"full_attention": (4 * 7, 28, 28, 16)},
    "tiny-starcoder2": {"full_attention": (4 * 6, 24, 24, 16)},
    "tiny-glm4": {"full_attention": (4 * 6, 24, 24, 16)},
    "tiny-gemma2": {"sliding_attention": (2 * 7, 14, 14, 8), "full_attention": (2 * 7, 14, 14, 8)},
    "tiny-gemma3": {"full_attention": (7, 7, 7, 4), "sliding_attention": (3 * 7, 21, 21, 12)},
    "tiny-cohere2": {"full_attention": (7, 7, 7, 4), "sliding_attention": (3 * 7, 21, 21, 12)},
    "tiny-apertus": {"full_attention": (4 * 6, 24, 24, 16)},
    "tiny-phi3": {"full_attention": (4 * 4, 16, 16, 8)},
    "tiny-afmoe": {
        "sliding_attention": (8 + 2 * 11, 3 * 8, 8 + 2 * 11, 15),
        "full_attention": (11, 8, 11, 5),
    },
    "tiny-dots1": {
        "full_attention": (7 + 2 * 9, 3 * 7, 7 + 2 * 9, 12),
        "sliding_attention": (9, 7, 9, 4),
    },
    "tiny-qwen2_moe": {
        "full_attention": (7 + 2 * 10, 3 * 7, 7 + 2 * 10, 12),
        "sliding_attention": (10, 7, 10, 4),
    },
    "tiny-glm4_moe_lite": {"full_attention": (8 + 3 * 10, 4 * 8, 8 + 3 * 10, 20)},
    "tiny-qwen2": {"full_attention": (3 * 7, 21, 21, 12), "sliding_attention": (7, 7, 7, 4)},
    "tiny-olmo3": {"full_attention": (7, 7, 7, 4), "sliding_attention": (3 * 7, 21, 21, 12)},
    "tiny-exaone4": {"full_attention": (7, 7, 7, 4), "sliding_attention": (3 * 7, 21, 21, 12)},
    "tiny-qwen3_moe": {"full_attention": (4 * 4 + 3 + 3 * 2, 19, 25, 16)},
    "tiny-lfm2": {"short_convolution": (3 * 5, 15, 15, 0), "full_attention": (7, 7, 7, 4)},
    "tiny-gpt2": {"full_attention": (4 * 4, 16, 16, 8)},
    "tiny-qwen3_5": {"gated_delta_net": (3 * 8, 24, 24, 0), "full_attention": (7, 7, 7, 4)},
    "tiny-qwen3_next": {
        "gated_delta_net": (9 + 6 + 9, 6 + 6 + 6, 24, 0),
        "full_attention": (10, 7, 10, 4),
    },
    "tiny-olmo_hybrid": {"gated_delta_net": (3 * 10, 30, 30, 0), "full_attention": (7, 7, 7, 4)},
    "tiny-nemotron_h": {
        "mamba2": (2, 1, 1, 0),
        "moe": (4, 2, 4, 0),
        "full_attention": (4, 4, 4, 4),
        "mlp": (2, 2, 2, 0),
    },
    "tiny-granitemoehybrid": {
        "mamba2": (2 + 2 + 2, 3, 5, 0),
        "full_attention": (4 + 2 + 2, 6, 8, 4),
    },
    "tiny-falcon_h1": {"attention_and_mamba2": (2 * 9, 16, 16, 8)},
    "tiny-kimi_linear": {"kda": (9 + 3 + 9 + 5, 24, 26, 0), "full_attention": (4 + 5, 7, 9, 4)},
    "tiny-jamba": {"mamba": (4 + 3 + 4 + 2, 9, 11, 0), "full_attention": (7, 7, 7, 4)},
    "tiny-qwen3_5_moe": {
        "gated_delta_net": (3 * 11, 3 * 8, 3 * 11, 0),
        "full_attention": (10, 7, 10, 4),
    },
    "tiny-lfm2_moe": {
        "short_convolution": (5 + 2 * 4, 5 + 2 * 2, 5 + 2 * 4, 0),
        "full_attention": (6, 4, 6, 4),
    },
    "tiny-granitemoe": {"full_attention": (4 * 6, 16, 24, 16)},
    "tiny-mixtral": {"full_attention": (4 * 6, 16, 24, 16)},
    "tiny-gpt_oss": {"sliding_attention": (12, 8, 12, 8), "full_attention": (12, 8, 12, 8)},
    "tiny-bamba": {"mamba2": (3 * 5, 12, 12, 0), "full_attention": (7, 7, 7, 4)},
    "tiny-glm4_moe": {"full_attention": (7 + 3 * 9, 4 * 7, 7 + 3 * 9, 16)},
    "tiny-deepseek_v3": {"full_attention": (8 + 3 * 10, 4 * 8, 8 + 3 * 10, 20)},
    "tiny-jet_nemotron": {
        "jet_block": (2 * (9 + 3), 24, 24, 0),
        "sliding_attention": (7, 7, 7, 4),
        "full_attention": (7, 7, 7, 4),
    },
}


def injected(name: str, lora: Lora) -> Coverage:
    model = on_meta(tiny(name))
    return inject(model, lora, spec_of(model.config, model))


@pytest.mark.parametrize("name", PLAIN)
def test_what_each_choice_of_targets_covers(name):
    for place, targets in enumerate(("auto", "all-linear", "attention")):
        coverage = injected(name, Lora(r=4, targets=targets))  # ty: ignore[invalid-argument-type]
        assert {row.kind: (row.weights, row.adapted) for row in coverage.rows} == {
            kind: (counts[0], counts[place + 1]) for kind, counts in EXPECTED[name].items()
        }


def test_coverage_counts_parameters_and_names_what_is_frozen():
    coverage = injected("tiny-nemotron_h", Lora(r=4))
    base = sum(p.numel() for p in on_meta(tiny("tiny-nemotron_h")).parameters())
    # r * (in + out). Mamba2's in_proj gives gate 128, x 128, B and C 4 * 16 each and dt 8: 64 ->
    # 392. Shared expert 64 -> 44 -> 64, MLP 64 -> 172 -> 64, attention q 64 -> 128, k and v 64 ->
    # 64, o 128 -> 64.
    trainable = 4 * (
        (64 + 392) + 2 * (64 + 44) + 2 * (64 + 172) + (64 + 128) + 2 * (64 + 64) + (128 + 64)
    )
    assert coverage.trainable == trainable
    assert coverage.total == base + trainable
    assert coverage.percent == pytest.approx(100 * trainable / (base + trainable))
    frozen = {row.kind: row.frozen for row in coverage.rows}
    assert frozen["mamba2"] == ("mixer.out_proj",)
    assert frozen["moe"] == ("mixer.experts.up_proj", "mixer.experts.down_proj")
    assert frozen["mlp"] == ()


def test_coverage_prints_as_a_table_and_as_plain_data():
    coverage = injected("tiny-nemotron_h", Lora(r=4))
    lines = str(coverage).splitlines()
    assert lines[0].split() == ["layers", "count", "weights", "adapted", "left", "frozen"]
    assert lines[1].split() == ["mamba2", "1", "2", "1", "mixer.out_proj"]
    assert lines[4].split() == ["mlp", "1", "2", "2", "-"]
    assert lines[5].startswith("trainable: 7,136 of 160,440 parameters")
    assert coverage.to_dict()["rows"][0]["kind"] == "mamba2"
    assert coverage.to_dict()["percent"] == coverage.percent


@pytest.mark.parametrize("targets", [pytest.param("auto", marks=pytest.mark.slow), "all-linear"])
@pytest.mark.parametrize("name", some_now(TINY, (*EACH_KIND, "tiny-qwen3_5-tied")))
def test_every_adapter_is_alive_and_nothing_else_is_trained(name, targets):
    lora = Lora(r=3, targets=targets)  # ty: ignore[invalid-argument-type]
    model, coverage = with_adapters(tiny(name), lora)
    model.train()(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(parameter_name)
        assert (parameter.grad is None) == (not is_adapter(parameter_name)), parameter_name
        if parameter.grad is not None:
            assert parameter.grad.abs().max() > 0, parameter_name
    assert coverage.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "rslora"), [("tiny-qwen3_next", True), ("tiny-nemotron_h", False)]
)
def test_an_adapter_adds_scale_times_b_a(name: str, rslora: bool) -> None:
    # The factors folded into the weights by hand give the same model. Experts: rows r*e..r*e+r-1 of
    # A are expert e's; in B the experts vary fastest.
    r, alpha = 3, 7.0
    lora = Lora(r=r, alpha=alpha, targets="all-linear", rslora=rslora)
    model, _ = with_adapters(tiny(name), lora)
    whole = load_whole(tiny(name), read_config(tiny(name)))
    scale = alpha / math.sqrt(r) if rslora else alpha / r
    for path, layer in adapter_layers(model).items():
        a, b = (
            factor["default"].get_parameter("weight") for factor in (layer.lora_A, layer.lora_B)
        )
        if "experts." in path and "shared" not in path:
            weight = whole.get_parameter(path)
            experts = weight.shape[0]
            delta = torch.stack([b[:, e::experts] @ a[e * r : (e + 1) * r] for e in range(experts)])
        else:
            weight = whole.get_parameter(f"{path}.weight")
            delta = b @ a
        with torch.no_grad():
            weight += scale * delta
    assert relative_error(logits(model), logits(whole)) < 1e-5


@pytest.mark.parametrize("name", some_now(TINY, EACH_KIND))
def test_a_fresh_adapter_changes_nothing(name):
    model, _ = with_adapters(tiny(name), Lora(r=4, targets="all-linear"))
    with torch.no_grad():
        for parameter_name, value in adapter_weights(model, seed=0):
            model.get_parameter(parameter_name).copy_(value)
    assert (
        relative_error(logits(model), logits(load_whole(tiny(name), read_config(tiny(name)))))
        < 1e-6
    )


def test_first_values_are_a_function_of_seed_and_name():
    model = on_meta(tiny("tiny-qwen3_next"))
    inject(model, Lora(r=4, targets="all-linear"), spec_of(model.config, model))
    smaller = on_meta(tiny("tiny-qwen3_next"))
    inject(
        smaller,
        Lora(r=4, targets=["linear_attn.out_proj", "experts"]),
        spec_of(smaller.config, smaller),
    )
    state = torch.get_rng_state()
    values = dict(adapter_weights(model, seed=5))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in adapter_weights(smaller, seed=5):
        assert torch.equal(value, values[name])
    other = dict(adapter_weights(model, seed=6))
    assert values.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, value in values.items():
        if ".lora_B." in name:
            assert not value.any()
            continue
        bound = 1 / math.sqrt(value.shape[1])
        # Of n uniform draws the largest is below 90 % of the bound with probability 0.9^n: n >= 128
        # here.
        assert 0.9 * bound < value.abs().max() <= bound
        assert not torch.equal(value, other[name])


def test_injection_leaves_the_random_state_and_everything_on_meta():
    model = on_meta(tiny("tiny-qwen3_next"))
    state = torch.get_rng_state()
    inject(
        model,
        Lora(r=4, targets="all-linear", modules_to_save=["lm_head"]),
        spec_of(model.config, model),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())
    plain = on_meta(tiny("tiny-qwen3_next"))
    assert {hf_name(n) for n, _ in model.named_parameters() if not is_adapter(n)} == {
        n for n, _ in plain.named_parameters()
    }


# --- a list of targets


@pytest.mark.parametrize(
    ("name", "targets", "adapted"),
    [
        ("tiny-llama", ["q_proj"], {f"model.layers.{i}.self_attn.q_proj" for i in range(4)}),
        ("tiny-llama", ["layers.2.mlp.up_proj"], {"model.layers.2.mlp.up_proj"}),
        # `down_proj` is the linears', not the experts'; `experts` both stacks; one stack by its
        # full ending
        (
            "tiny-qwen3_next",
            ["down_proj"],
            {f"model.layers.{i}.mlp.shared_expert.down_proj" for i in (0, 2, 3)}
            | {"model.layers.1.mlp.down_proj"},
        ),
        (
            "tiny-nemotron_h",
            ["experts"],
            {"model.layers.1.mixer.experts.up_proj", "model.layers.1.mixer.experts.down_proj"},
        ),
        ("tiny-nemotron_h", ["experts.up_proj"], {"model.layers.1.mixer.experts.up_proj"}),
        (
            "tiny-qwen3_next",
            ["shared_expert_gate"],
            {f"model.layers.{i}.mlp.shared_expert_gate" for i in (0, 2, 3)},
        ),
    ],
)
def test_a_list_names_weights_by_the_end_of_their_names(name, targets, adapted):
    model = on_meta(tiny(name))
    inject(model, Lora(targets=targets), spec_of(model.config, model))
    assert adapter_layers(model).keys() == adapted


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        (
            "tiny-qwen3_5",
            ["q_proj", "in_proj_qvk"],
            r"in_proj_qvk is no linear of this qwen3_5_text; did you mean .*in_proj_qkv",
        ),
        (
            "tiny-llama",
            ["conv1d"],
            r"conv1d is no linear of this llama; there are down_proj, gate_proj",
        ),
        ("tiny-llama", ["proj"], r"proj is no linear"),
        (
            "tiny-nemotron_h",
            ["out_proj"],
            r"out_proj of nemotron_h takes no adapter: its layer reads",
        ),
        ("tiny-jamba", ["dt_proj"], r"dt_proj of jamba takes no adapter: its layer reads"),
        (
            "tiny-qwen3_next",
            ["gate_up_proj"],
            r"gate_up_proj is a stack of routed experts .*; name it experts.gate_up_proj, or all "
            "stacks experts$",
        ),
        ("tiny-qwen3_next", ["gate_up"], r"did you mean .*experts.gate_up_proj"),
        ("tiny-llama", ["lm_head"], r"lm_head is the head; .*modules_to_save: \[lm_head\]"),
    ],
)
def test_a_name_that_adapts_nothing_is_the_users_mistake(name, targets, message):
    with pytest.raises(UserError, match=message):
        injected(name, Lora(targets=targets))


@pytest.mark.parametrize("name", ["tiny-qwen3_next", "tiny-nemotron_h", "tiny-llama"])
@pytest.mark.parametrize("wrong", ["gate", "gate_up_pro", "up", "expert", "xyz"])
def test_every_name_that_is_suggested_is_taken(name, wrong):
    with pytest.raises(UserError) as error:
        injected(name, Lora(targets=[wrong]))
    suggested = re.search(r"(?:did you mean|there are) (.*?)\??$", str(error.value))
    assert suggested is not None
    for target in re.split(" or |, ", suggested[1]):
        assert any(row.adapted for row in injected(name, Lora(targets=[target])).rows), target


def facts(name: str, lora: Lora) -> AdapterFacts:
    model = on_meta(tiny(name))
    return adapter_facts(model, lora, spec_of(model.config, model))


def test_the_highest_rank_is_that_of_the_largest_weight():
    assert facts("tiny-llama", Lora()).highest_rank == 64  # features between layers


def test_facts_say_whether_experts_have_adapters():
    assert facts("tiny-qwen3_next", Lora(targets="all-linear")).has_experts
    assert not facts("tiny-qwen3_next", Lora(targets="auto")).has_experts


def test_dropout_is_on_the_adapters_input():
    model, _ = with_adapters(tiny("tiny-llama"), Lora(dropout=0.5))
    dropouts = [m for layer in adapter_layers(model).values() for m in layer.lora_dropout.values()]
    assert {type(module) for module in dropouts} == {torch.nn.Dropout}
    assert {module.p for module in dropouts} == {0.5}
    assert len(dropouts) == 28


# --- modules to save


def test_modules_to_save_are_trained_in_full_and_start_as_the_base():
    lora = Lora(
        targets=["q_proj"], modules_to_save=["lm_head", "model.norm", "layers.0.input_layernorm"]
    )
    model, coverage = with_adapters(tiny("tiny-llama"), lora)
    trained = {
        name for name, p in model.named_parameters() if p.requires_grad and not is_adapter(name)
    }
    saved = {"lm_head", "model.norm", "model.layers.0.input_layernorm"}
    assert trained == {f"{name}.modules_to_save.default.weight" for name in saved}
    for name in saved:
        copy = model.get_parameter(f"{name}.modules_to_save.default.weight")
        original = model.get_parameter(f"{name}.original_module.weight")
        assert torch.equal(copy, original)
        assert copy.data_ptr() != original.data_ptr()
    # q_proj 64 -> 128 at r = 8 in 4 layers; head 256 x 64; two norms of 64
    assert coverage.trainable == 4 * 8 * (64 + 128) + 256 * 64 + 2 * 64
    model.train()(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    assert all(model.get_parameter(name).grad is not None for name in trained)


def test_a_module_to_save_takes_no_adapter_as_well():
    model = on_meta(tiny("tiny-llama"))
    inject(model, Lora(modules_to_save=["layers.0.mlp"]), spec_of(model.config, model))
    adapted = adapter_layers(model)
    assert not any(path.startswith("model.layers.0.mlp") for path in adapted)
    assert len(adapted) == 28 - 3


def test_facts_name_the_targets_that_modules_to_save_train_in_full():
    both = facts("tiny-llama", Lora(targets=["q_proj"], modules_to_save=["self_attn"]))
    assert (both.num_weights, both.targets_to_save) == (0, ("q_proj",))
    one = facts("tiny-llama", Lora(targets=["q_proj", "up_proj"], modules_to_save=["self_attn"]))
    assert (one.num_weights, one.targets_to_save) == (4, ("q_proj",))
    some = facts("tiny-llama", Lora(targets=["q_proj"], modules_to_save=["layers.0.self_attn"]))
    assert (some.num_weights, some.targets_to_save) == (3, ())


def test_an_unknown_module_to_save_is_the_users_mistake():
    with pytest.raises(UserError, match=r"no module lm_haed in this llama; did you mean lm_head"):
        injected("tiny-llama", Lora(modules_to_save=["lm_haed"]))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_tied_modules_to_save_are_refused(name):
    with pytest.raises(UserError, match=f"{name} is tied"):
        injected("tiny-qwen3_5-tied", Lora(modules_to_save=[name]))


# --- dtypes


@cache
def _exact_loss(name: str) -> float:
    exact, _ = with_adapters(tiny(name), Lora(r=4, targets="all-linear"))
    with torch.no_grad():
        return exact.train()(input_ids=tokens(), labels=tokens(), use_cache=False).loss.item()


@pytest.mark.parametrize(
    ("name", "dtype", "autocast"),
    [
        pytest.param(
            name,
            dtype,
            autocast,
            marks=[pytest.mark.slow] * (name not in EACH_KIND or (i + j + autocast) % 2),
        )
        for i, name in enumerate(PLAIN)
        for j, dtype in enumerate(("float32", "model"))
        for autocast in (False, True)
    ],
)
def test_adapters_on_a_bfloat16_model(name, dtype, autocast):
    lora = Lora(r=4, targets="all-linear", dtype=dtype)  # ty: ignore[invalid-argument-type]
    model, _ = with_adapters(tiny(name, "bfloat16"), lora)
    factors = {p.dtype for n, p in model.named_parameters() if is_adapter(n)}
    assert factors == {torch.float32 if dtype == "float32" else torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        loss = model.train()(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    # bfloat16 keeps 8 bits, and a loss near ln 256 = 5.5 is a mean over 138 tokens of sums of
    # rounded numbers.
    assert abs(loss.item() - _exact_loss(name)) < 2**-8 * _exact_loss(name)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# --- what PEFT does by itself: each of these tests fails when PEFT mends its defect


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
def test_peft_still_leaves_qwen3_next_mlps_without_adapters() -> None:
    # Then `adapter._renamed_by_peft` and the holder in `inject` can go.
    model = on_meta(tiny("tiny-qwen3_next"))
    config = LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], r=2)
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert adapted
    assert all("experts" in name for name in adapted)


@pytest.mark.parametrize("name", ["tiny-nemotron_h", "tiny-falcon_h1"])
def test_peft_still_bans_mambas_output_projection(name: str) -> None:
    # Then saved adapters could reach it, on kernels that do not read its weight directly.
    model = on_meta(tiny(name))
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        inject_adapter_in_model(
            LoraConfig(target_modules=["out_proj"]), model, low_cpu_mem_usage=True
        )


def test_an_adapter_on_jambas_time_step_is_still_dead() -> None:
    # Then `dt_proj` need not be in `Kind.bypassed`: the mixer calls it again.
    model = load_whole(tiny("tiny-jamba"), read_config(tiny("tiny-jamba")))
    inject_adapter_in_model(
        LoraConfig(target_modules=["dt_proj", "x_proj"], init_lora_weights=False), model
    )
    model.train()(
        input_ids=tokens(length=8), labels=tokens(length=8), use_cache=False
    ).loss.backward()
    dead = {
        name.split(".")[4]
        for name, p in model.named_parameters()
        if is_adapter(name) and p.grad is None
    }
    assert dead == {"dt_proj"}


def test_peft_still_matches_modules_to_save_by_any_ending() -> None:
    # Then `inject` could pass a user's names on. `norm` is meant to be the final norm alone.
    model = on_meta(tiny("tiny-llama"))
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    saved = {name for name, _ in model.named_parameters() if "modules_to_save" in name}
    assert any("input_layernorm" in name for name in saved)
