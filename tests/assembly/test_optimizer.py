"""Learning rate and optimizer."""

from __future__ import annotations

import re
from copy import deepcopy
from math import ceil
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn

from shardwise.assembly.optimizer import decayed, lr_factor, make_lr_schedule, make_optimizer
from shardwise.config import Lora, Optimizer
from shardwise.models.adapters.lora import inject
from shardwise.models.families import spec_of
from tests.models.tiny import on_meta, tiny


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 2 warm-up steps of 6: 1/2, 1, then from progress 0, 1/4, 2/4, 3/4.
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_learning_rate_of_each_step(schedule, expected):
    cfg = Optimizer(lr=2.0, warmup_steps=2, lr_schedule=schedule)
    assert [lr_factor(cfg, step, 6) for step in range(1, 7)] == pytest.approx(expected)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = make_optimizer(cfg, [("p", parameter)], {"p"})
    scheduler = make_lr_schedule(cfg, optimizer, 6)
    used = []
    for _ in range(6):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert used == pytest.approx([2.0 * factor for factor in expected])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # round(0.2 * 10) = 2 steps of warm-up.
        (
            {"lr_schedule": "linear", "warmup_ratio": 0.2},
            [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
        ),
        # 0.2 + 0.8 * (1 - progress), with progress 0, 1/10, ..., 9/10.
        (
            {"lr_schedule": "linear", "min_lr_ratio": 0.2},
            [1, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44, 0.36, 0.28],
        ),
        # 0.5 + 0.5 * (1 + cos(pi * progress)) / 2, with progress 0, 1/8, ..., 7/8.
        (
            {"lr_schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.5},
            [0.5, 1, 1, 0.9809699, 0.9267767, 0.8456709, 0.75, 0.6543291, 0.5732233, 0.5190301],
        ),
        # The last round(0.4 * 10) = 4 steps have progress 0, 1/4, 2/4, 3/4.
        (
            {"lr_schedule": "wsd", "warmup_ratio": 0.2, "decay_ratio": 0.4},
            [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25],
        ),
        (
            {"lr_schedule": "wsd", "decay_ratio": 0.2, "min_lr_ratio": 0.5},
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.75],
        ),
        ({"lr_schedule": "wsd", "decay_ratio": 0.0}, [1] * 10),
        # 7 steps of warm-up leave 3 of the 8 steps of the fall.
        (
            {"lr_schedule": "wsd", "warmup_steps": 7, "decay_ratio": 0.8},
            [1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7, 1, 1, 2 / 3, 1 / 3],
        ),
    ],
)
def test_shares_of_the_steps_and_of_the_rate(schedule, expected):
    factors = [lr_factor(Optimizer(**schedule), step, 10) for step in range(1, 11)]
    assert factors == pytest.approx(expected)


def test_the_picture_of_the_schedules_is_what_they_are():
    """Each line of the guide's picture is a schedule, with a block for each of 60 steps."""
    page = Path(__file__).parents[2] / "docs" / "guides" / "learning-rate.md"
    (picture,) = re.findall(r"^```text\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    lines = []
    for schedule in get_args(get_type_hints(Optimizer)["lr_schedule"]):
        cfg = Optimizer(lr_schedule=schedule, warmup_steps=8, decay_ratio=0.3)
        heights = [lr_factor(cfg, step, 60) for step in range(1, 61)]
        lines.append(f"{schedule:10}" + "".join(BLOCKS[ceil(8 * h) - 1] for h in heights))
    assert picture.splitlines() == lines


BLOCKS = "▁▂▃▄▅▆▇█"


def test_warmup_longer_than_the_run():
    assert [lr_factor(Optimizer(warmup_steps=4), step, 2) for step in (1, 2)] == [0.25, 0.5]


def test_sgd_and_adamw_take_their_settings():
    parameter = nn.Parameter(torch.ones(3))
    sgd = make_optimizer(Optimizer(name="sgd", lr=0.5, weight_decay=0.1), [("p", parameter)], {"p"})
    parameter.grad = torch.full((3,), 2.0)
    sgd.step()
    torch.testing.assert_close(parameter.data, torch.full((3,), 1 - 0.5 * (2.0 + 0.1)))
    adamw = make_optimizer(
        Optimizer(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3), [("p", parameter)], {"p"}
    )
    assert isinstance(adamw, torch.optim.AdamW)
    assert {k: adamw.param_groups[0][k] for k in ("betas", "eps", "weight_decay", "lr")} == {
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.3,
        "lr": 2e-4,
    }


# What is not decayed, by the ends of the names; everything else of a family is.
PLAIN_NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}
DELTA_NET = {"linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"}
QK_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
NORMS_BEHIND = {
    *QK_NORMS,
    *("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "norm.weight"),
}
NORMS_AROUND = {*NORMS_BEHIND, "input_layernorm.weight", "pre_feedforward_layernorm.weight"}
QKV_BIASES = {f"self_attn.{name}_proj.bias" for name in "qkv"}
OTHER_BIASES = {"self_attn.o_proj.bias", *(f"mlp.{x}_proj.bias" for x in ("gate", "up", "down"))}
NOT_DECAYED = {
    "tiny-llama": PLAIN_NORMS,
    "tiny-ministral3": PLAIN_NORMS,
    "tiny-granite_swa": {*PLAIN_NORMS, "self_attn.sinks"},
    **dict.fromkeys(("tiny-olmo2", "tiny-olmo3", "tiny-exaone4"), NORMS_BEHIND),
    "tiny-qwen2": {*PLAIN_NORMS, *QKV_BIASES},
    "tiny-seed_oss": {*PLAIN_NORMS, *QKV_BIASES},
    "tiny-ernie4_5": {*PLAIN_NORMS, *QKV_BIASES, *OTHER_BIASES},
    "tiny-ernie4_5_moe": {
        *PLAIN_NORMS, *QKV_BIASES, *OTHER_BIASES, "mlp.gate.weight", "lm_head.bias",
        *(f"mlp.shared_experts.{name}_proj.bias" for name in ("gate", "up", "down")),
    },
    "tiny-hunyuan_v1_dense": {
        *PLAIN_NORMS, "self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight",
    },
    "tiny-starcoder2": {
        *PLAIN_NORMS, *(norm.replace("weight", "bias") for norm in PLAIN_NORMS), *QKV_BIASES,
        "self_attn.o_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias",
    },
    "tiny-cohere2": {"input_layernorm.weight", "norm.weight"},
    "tiny-apertus": {
        "attention_layernorm.weight", "feedforward_layernorm.weight", "norm.weight", *QK_NORMS,
        "mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n",
    },
    "tiny-glm4": {
        *PLAIN_NORMS, "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight", *QKV_BIASES,
    },
    "tiny-gemma2": NORMS_AROUND - QK_NORMS,
    "tiny-gemma3": NORMS_AROUND,
    "tiny-afmoe": {
        *PLAIN_NORMS, *QK_NORMS, "pre_mlp_layernorm.weight", "post_mlp_layernorm.weight",
        "mlp.router.gate.weight",
    },
    "tiny-dots1": {*PLAIN_NORMS, *QK_NORMS, "mlp.gate.weight"},
    "tiny-qwen2_moe": {
        *PLAIN_NORMS, *QKV_BIASES, "mlp.shared_expert_gate.weight", "mlp.gate.weight",
    },
    "tiny-glm4_moe_lite": {
        *PLAIN_NORMS, "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight",
        "mlp.gate.weight",
    },
    "tiny-qwen3_moe": {*PLAIN_NORMS, *QK_NORMS, "mlp.gate.weight"},
    "tiny-qwen3_5": {
        *PLAIN_NORMS, *DELTA_NET, *QK_NORMS, "linear_attn.in_proj_a.weight",
        "linear_attn.in_proj_b.weight",
    },
    "tiny-qwen3_next": {
        *PLAIN_NORMS, *DELTA_NET, *QK_NORMS, "mlp.shared_expert_gate.weight",
        "mlp.gate.weight", "linear_attn.in_proj_ba.weight",
    },
    "tiny-olmo_hybrid": {
        *PLAIN_NORMS, *QK_NORMS, "linear_attn.A_log", "linear_attn.dt_bias",
        "linear_attn.o_norm.weight", "linear_attn.a_proj.weight", "linear_attn.b_proj.weight",
        "post_feedforward_layernorm.weight",
    },
    "tiny-nemotron_h": {
        "norm.weight", "mixer.norm.weight", "norm_f.weight", "mixer.A_log", "mixer.dt_bias",
        "mixer.D", "mixer.conv1d.bias", "mixer.gate.weight",
    },
    "tiny-granitemoehybrid": {
        *PLAIN_NORMS, "mamba.norm.weight", "mamba.A_log", "mamba.dt_bias", "mamba.D",
        "mamba.conv1d.bias", "block_sparse_moe.router.weight",
    },
    "tiny-kimi_linear": {
        *PLAIN_NORMS, "self_attn.forget_gate.A_log", "self_attn.forget_gate.dt_bias",
        "self_attn.o_norm.weight", "self_attn.kv_a_layernorm.weight",
        "self_attn.forget_gate.f_a_proj.weight", "self_attn.b_proj.weight",
        "self_attn.forget_gate.f_b_proj.weight", "mlp.gate.weight",
    },
    "tiny-qwen3_5_moe": {
        *PLAIN_NORMS, *DELTA_NET, *QK_NORMS, "mlp.shared_expert_gate.weight", "mlp.gate.weight",
        "linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight",
    },
    "tiny-lfm2_moe": {
        "operator_norm.weight", "ffn_norm.weight", "embedding_norm.weight",
        "self_attn.q_layernorm.weight", "self_attn.k_layernorm.weight", "feed_forward.gate.weight",
    },
    "tiny-granitemoe": {*PLAIN_NORMS, "block_sparse_moe.router.weight"},
    "tiny-gpt_oss": {
        *PLAIN_NORMS, *QKV_BIASES, "self_attn.o_proj.bias", "self_attn.sinks", "mlp.router.weight",
        "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias",
    },
    "tiny-bamba": {
        "input_layernorm.weight", "pre_ff_layernorm.weight", "final_layernorm.weight",
        "mamba.norm.weight", "mamba.A_log", "mamba.dt_bias", "mamba.D", "mamba.conv1d.bias",
    },
    "tiny-glm4_moe": {
        *PLAIN_NORMS, *QK_NORMS, "mlp.gate.weight", *(f"self_attn.{x}_proj.bias" for x in "qkv"),
    },
    "tiny-deepseek_v3": {
        *PLAIN_NORMS, "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight",
        "mlp.gate.weight",
    },
    "tiny-jet_nemotron": {
        *PLAIN_NORMS, "self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight",
        "self_attn.a_proj.weight", "self_attn.b_proj.weight",
        "self_attn.dynamic_conv1d.kernel_generator.w2.bias", *(f"self_attn.{x}_proj.bias" for x in
        "qkv"),
    },
    "tiny-jamba": {
        "input_layernorm.weight", "pre_ff_layernorm.weight", "final_layernorm.weight",
        "mamba.A_log", "mamba.D", "mamba.conv1d.bias", "mamba.dt_proj.bias", "mamba.dt_proj.weight",
        "feed_forward.router.weight", *(f"mamba.{x}_layernorm.weight" for x in ("dt", "b", "c")),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_DECAYED)
def test_weight_decay_by_name(name):
    model = on_meta(tiny(name))
    spec = spec_of(model.config, model)
    spared = {n for n, _ in model.named_parameters()} - decayed(model, spec)
    spared = {re.sub(r"^model\.(layers\.\d+\.)?", "", n) for n in spared}
    assert spared == NOT_DECAYED[name]
    inject(model, Lora(r=1, targets="all-linear"), spec)
    factors = {n for n, _ in model.named_parameters() if ".lora_" in n}
    assert factors
    assert factors <= decayed(model, spec)  # of rank 1 too


def test_a_copy_of_a_router_is_left_alone_like_the_router():
    model = on_meta(tiny("tiny-qwen3_moe"))
    spec = spec_of(model.config, model)
    inject(model, Lora(r=1, modules_to_save=["lm_head", "mlp.gate"]), spec)
    trained = {n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n}
    assert len(trained) == 4  # the head, and the routers of three layers
    assert trained & decayed(model, spec) == {"lm_head.modules_to_save.default.weight"}


def test_only_named_parameters_decay():
    # A shard of a matrix may be flat, and a norm's may not: names decide.
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer(
        Optimizer(name="sgd", lr=0.5, weight_decay=0.1), [("one", one), ("two", two)], {"one"}
    )
    assert [group["param_names"] for group in optimizer.param_groups] == [["one"], ["two"]]
    one.grad, two.grad = torch.zeros(3), torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(one.data, torch.full((3,), 1 - 0.5 * 0.1))
    assert torch.equal(two.data, torch.ones(2, 2))


def test_factors_b_have_a_rate_of_their_own_in_every_step():
    """Of the linear and of the experts; the schedule multiplies it, and A comes first."""
    model = on_meta(tiny("tiny-qwen3_moe"))
    adapters = Lora(r=1, targets="all-linear", modules_to_save=["lm_head"])
    inject(model, adapters, spec_of(model.config, model))
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    cfg = Optimizer(name="sgd", lr=0.5, weight_decay=0.1, lora_b_lr_ratio=16.0, warmup_steps=2)
    of_b = {name for name, _ in named if ".lora_B." in name}
    assert any(".experts." in name for name in of_b)
    for done in (0, 3):  # a resumed run has the same rates
        optimizer = make_optimizer(cfg, named[::-1], {name for name, _ in named})
        others, factors = optimizer.param_groups
        assert set(factors["param_names"]) == of_b
        assert set(others["param_names"]) == {name for name, _ in named} - of_b
        assert others["weight_decay"] == factors["weight_decay"] == 0.1
        schedule = make_lr_schedule(cfg, optimizer, 6, done)
        for step in range(done + 1, 7):
            expected = 0.5 * lr_factor(cfg, step, 6)
            assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(
                [expected, 16 * expected]
            )
            optimizer.step()
            schedule.step()


def test_a_ratio_of_1_makes_no_group_of_its_own():
    named = [(f"q.lora_{x}.default.weight", nn.Parameter(torch.ones(2, 2))) for x in "AB"]
    (group,) = make_optimizer(Optimizer(), named, {name for name, _ in named}).param_groups
    assert group["lr"] == Optimizer().lr


def test_a_ratio_of_b_gives_the_weights_that_peft_gives():
    """Three steps of AdamW on the same gradients as those of PEFT's LoRA+."""
    adapters = LoraConfig(r=2, target_modules=["0", "1"])
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), adapters)
    other = deepcopy(model)
    peft_optimizer = create_loraplus_optimizer(
        other,
        torch.optim.AdamW,
        lr=0.01,
        loraplus_lr_ratio=8.0,
        loraplus_weight_decay=0.1,
        weight_decay=0.1,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    cfg = Optimizer(lr=0.01, lora_b_lr_ratio=8.0, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    optimizer = make_optimizer(cfg, named, {name for name, _ in named})
    others = dict(other.named_parameters())
    for _ in range(3):
        for name, parameter in named:
            parameter.grad = torch.randn(parameter.shape)
            others[name].grad = parameter.grad.clone()
        optimizer.step()
        peft_optimizer.step()
    assert named
    for name, parameter in named:
        torch.testing.assert_close(parameter, others[name])
