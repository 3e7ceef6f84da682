"""Costs of a run's units by FLOPs and formula, and the split that they lead to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from shardwise.assembly.costs import choose_split, costs_of
from shardwise.assembly.optimizer import make_optimizer
from shardwise.base.schedule.costs import COUNTED, Cost
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training, UserError
from shardwise.metrics.flops import hardware_flops_per_token
from shardwise.models import load
from shardwise.models.adapters import lora
from shardwise.models.counts import count_model
from shardwise.models.expert_plan import experts_of
from shardwise.models.families import spec_of
from shardwise.models.quantise import as_stored
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import materialise

MODELS = Path(__file__).parents[2] / "configs" / "models"
LENGTH = 24


def config(
    model: str, lora: Lora | None = None, training: dict[str, Any] | None = None, **parallel: Any
) -> RunConfig:
    parallel = {"pp": 2, "schedule": "1f1b", **parallel}
    run = Training(output_dir="out", micro_batch_size=2, **(training or {}))
    return RunConfig(
        Model(model, init="random"),
        Data("x", sequence_length=LENGTH),
        run,
        lora,
        Parallel(**parallel),
    )


def tiny(name: str) -> str:
    return str(MODELS / f"tiny-{name}")


def build(cfg: RunConfig) -> tuple[PreTrainedModel, ModelSpec]:
    hf_config = load.read_config(cfg.model)
    hf = load.build_meta(cfg.model, hf_config)
    spec = spec_of(hf_config, hf)
    if cfg.lora:
        lora.inject(hf, cfg.lora, spec)
    return hf, spec


def costs(cfg: RunConfig, num_copies: int = 1) -> tuple[Cost, ...]:
    """Return the costs of the units with so many data-parallel ranks."""
    hf, spec = build(cfg)
    num_ranks = cfg.parallel.ranks_of_a_model * num_copies
    return costs_of(cfg, hf, spec, count_model(hf, spec), num_ranks)[0]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("adapters", [None, Lora()], ids=["full", "lora"])
@pytest.mark.parametrize("model", ["llama", "qwen3_next", "nemotron_h", "jet_nemotron"])
def test_flops_of_the_units_are_those_of_the_model(model, adapters, checkpointing):
    cfg = config(tiny(model), adapters, {"checkpointing": checkpointing})
    hf, spec = build(cfg)
    counts = count_model(hf, spec)
    units, source = costs_of(cfg, hf, spec, counts, 2, flops_per_second=10.0)
    step = 2 * LENGTH * hardware_flops_per_token(counts, LENGTH, checkpointing)
    assert sum(unit.seconds for unit in units) == pytest.approx(step / 10.0)
    assert (len(units), source) == (len(spec.layers) + 2, COUNTED)
    # Where the run has no counts.
    assert costs_of(cfg, hf, spec, None, 2, flops_per_second=10.0)[0] == units


def test_a_rank_of_cp_has_its_share_of_the_tokens():
    whole, share = (costs(config(tiny("qwen3_next"), cp=cp)) for cp in (1, 2))
    for unit, half in zip(whole[:-1], share[:-1], strict=True):
        assert half.forward_seconds == unit.forward_seconds / 2
        assert half.activation_bytes == pytest.approx(unit.activation_bytes / 2, rel=0.1)
        assert half.output_bytes == unit.output_bytes / 2
        assert half.weight_bytes == unit.weight_bytes


def test_a_frozen_weight_has_no_gradient_and_the_chunked_loss_takes_its_own_in_the_forward():
    full, frozen = costs(config(tiny("llama"))), costs(config(tiny("llama"), Lora(r=1)))
    linears = 2 * (2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 172) * 2 * LENGTH  # q, o, k, v, MLP
    assert full[2].weight_seconds == linears
    assert frozen[2].weight_seconds < linears / 40  # rank 1; a width is 64 or more
    assert frozen[2].input_seconds >= linears
    head = 2 * 64 * 256 * 2 * LENGTH
    assert (full[-1].forward_seconds, full[-1].backward_seconds) == (3 * head, 0.0)
    assert (frozen[-1].forward_seconds, frozen[-1].backward_seconds) == (2 * head, 0.0)
    plain = costs(config(tiny("llama"), training={"loss": "plain"}))[-1]
    assert (plain.forward_seconds, plain.input_seconds, plain.weight_seconds) == (head, head, head)


def test_a_layer_computed_again_keeps_its_input_and_costs_its_forward_once_more():
    kept, again = (
        costs(config(tiny("llama"))),
        costs(config(tiny("llama"), training={"checkpointing": "full"})),
    )
    assert again[1].activation_bytes == again[1].output_bytes == 4 * 64 * 2 * LENGTH
    last_product = 2 * 172 * 64 * 2 * LENGTH
    assert again[1].input_seconds - kept[1].input_seconds == pytest.approx(
        kept[1].forward_seconds - last_product
    )
    operators = costs(config(tiny("llama"), training={"checkpointing": "operators"}))
    assert again[1].activation_bytes < operators[1].activation_bytes < kept[1].activation_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble"])
def test_gradients_below_what_is_trained(schedule):
    adapters = Lora(targets=["model.layers.2.self_attn.q_proj"])
    units = costs(config(tiny("llama"), adapters, schedule=schedule))
    assert [unit.trainable for unit in units] == [False, False, False, True, False, False]
    below = [unit.input_seconds > 0 for unit in units[1:3]]
    # A zero-bubble schedule takes the gradient down to the embedding.
    assert below == [schedule != "1f1b"] * 2
    assert units[4].input_seconds > units[4].forward_seconds  # its attention's backward


@pytest.mark.parametrize("accumulation", ["model", "float32"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("adapters", [None, Lora()], ids=["full", "lora"])
def test_state_bytes_are_what_training_holds(adapters, optimizer, accumulation):
    cfg = config(tiny("qwen3_5-tied"), adapters, {"accumulation": accumulation})
    cfg = replace(
        cfg, model=replace(cfg.model, dtype="bfloat16"), optimizer=Optimizer(name=optimizer)
    )
    units = costs(cfg)
    hf, spec = build(cfg)
    materialise(hf, torch.device("cpu"))
    trained = [(name, p) for name, p in hf.named_parameters() if p.requires_grad]
    step = make_optimizer(cfg.optimizer, trained, ())
    for _, p in trained:
        p.grad = torch.zeros_like(p)
    step.step()
    tied = hf.get_submodule(spec.embed).weight  # both ends hold it
    twice = tied.nbytes
    assert (
        sum(unit.weight_bytes for unit in units) == sum(p.nbytes for p in hf.parameters()) + twice
    )
    gradients = [
        p.numel() * (4 if accumulation == "float32" else p.element_size()) for _, p in trained
    ]
    tied_gradient = 0 if adapters else tied.numel() * (4 if accumulation == "float32" else 2)
    assert sum(unit.gradient_bytes for unit in units) == sum(gradients) + tied_gradient
    states = sum(
        t.nbytes
        for state in step.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    )
    tied_state = 2 * twice + 4 if optimizer == "adamw" and not adapters else 0
    assert sum(unit.optimizer_bytes for unit in units) == states + tied_state


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe-v"])
def test_a_tied_weight_counts_once_where_both_ends_are_on_one_rank(schedule):
    cfg = config(tiny("qwen3_5-tied"), None, {})
    cfg = replace(cfg, parallel=Parallel(pp=2, schedule=schedule))
    hf, _ = build(cfg)
    weights = sum(p.nbytes for p in hf.parameters())
    units = costs(cfg)
    assert (
        sum(unit.weight_bytes for unit in units)
        == sum(unit.gradient_bytes for unit in units)
        == weights
    )
    assert sum(unit.optimizer_bytes for unit in units) == 2 * weights + 4 * len(
        list(hf.parameters())
    )


def test_fsdp2_shares_optimizer_states_but_no_gradients():
    whole, shared = (costs(config(tiny("llama"), data="fsdp2"), n)[1] for n in (1, 4))
    assert shared.weight_bytes == whole.weight_bytes * 5 // 4  # gathered, beside the shard
    assert shared.gradient_bytes == whole.gradient_bytes
    count = 4 * 9  # a float32 for each of a layer's parameters
    assert 4 * (shared.optimizer_bytes - count) == whole.optimizer_bytes - count


def test_a_rank_of_ep_holds_its_experts_and_computes_as_many_rows():
    """qwen3_moe: 8 experts of 3 matrices of 64 x 32 in every layer but the second."""
    cfg = config(tiny("qwen3_moe"), data="fsdp2")
    spread_cfg = config(tiny("qwen3_moe"), data="fsdp2", ep=4)
    experts = 4 * 8 * 3 * 64 * 32
    rows = 2 * cfg.data.sequence_length * cfg.training.micro_batch_size  # a token meets two experts
    orders = 2 * 8 * rows  # in which rows leave for other ranks, and in which they arrive
    for copies, kept, kept_of_spread in (
        (1, 1, 1 / 4),
        (4, 1 + 1 / 4, 1 / 4),  # 4 ranks share them, or each has other ones
        (8, 1 + 1 / 8, 1 / 4 + 1 / 8),
    ):
        whole, spread = costs(cfg, copies), costs(spread_cfg, copies)
        for place, (one, other) in enumerate(zip(whole, spread, strict=True)):
            assert (one.forward_seconds, one.seconds) == (other.forward_seconds, other.seconds)
            has_experts = place in (1, 3, 4)
            more = orders if has_experts else 0
            assert other.activation_bytes - one.activation_bytes == more
            off = experts if has_experts else 0
            assert one.weight_bytes - other.weight_bytes == off * (kept - kept_of_spread)
            assert one.gradient_bytes - other.gradient_bytes == off * 3 / 4


@pytest.mark.parametrize("base", ["none", "int8", "nf4"])
def test_a_rank_of_ep_holds_its_experts_in_whatever_form(base):
    cfg = config(tiny("qwen3_moe"), Lora(), data="ddp")
    cfg = replace(cfg, model=replace(cfg.model, base=base))
    spread_cfg = replace(cfg, parallel=replace(cfg.parallel, ep=4))
    hf, spec = build(cfg)
    stored = as_stored(hf, base)
    experts = sum(p.nbytes for _, module in experts_of(stored, spec) for p in module.parameters())
    whole, spread = (sum(u.weight_bytes for u in costs(c, 4)) for c in (cfg, spread_cfg))
    assert whole - spread == experts * 3 // 4


def test_states_in_8_bits_are_so_beside_a_stored_base(tmp_path):
    LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=8,
    ).save_pretrained(tmp_path)
    cfg = config(str(tmp_path), Lora(r=64))
    cfg = replace(cfg, optimizer=Optimizer(name="adamw8bit"))
    plain, stored = (
        sum(u.optimizer_bytes for u in costs(replace(cfg, model=replace(cfg.model, base=base))))
        for base in ("none", "int8")
    )
    all_in_32_bits = replace(cfg, optimizer=Optimizer())
    assert stored == plain < sum(unit.optimizer_bytes for unit in costs(all_in_32_bits))


def test_a_split_goes_by_the_experts_of_a_token_and_memory_by_all(tmp_path):
    """A layer with 16 experts, of which a token meets one, computes as much as a dense one.

    Its weights are 16 times as large.
    """
    width, ffn = 64, 1024
    Qwen3MoeConfig(
        hidden_size=width,
        intermediate_size=ffn,
        moe_intermediate_size=ffn,
        num_hidden_layers=8,
        mlp_only_layers=[0, 1, 2, 3],
        num_experts=16,
        num_experts_per_tok=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=8,
    ).save_pretrained(tmp_path)

    def layers(split: str, limit: float | None = None, **parallel: Any) -> tuple[int, ...]:
        cfg = config(str(tmp_path), split=split, memory_limit_gib=limit, **parallel)
        return tuple(choose_split(cfg, costs(cfg, cfg.parallel.ep), 4).layers)

    assert layers("balanced") == (4, 4)
    assert layers("parameters") == (6, 2)
    state = 4 * 4 * 3 * width * ffn  # of one expert, weights, gradients and AdamW's two states
    # Two stages of whole layers with experts, of which one has three.
    limit = 3.2 * 16 * state / 2**30
    assert layers("balanced", limit) == (5, 3)
    assert layers("balanced", limit, data="ddp", ep=2) == (4, 4)


def test_adapters_on_the_upper_half_are_worth_a_third(tmp_path):
    """Cut 24 equal layers of which the upper half is trained.

    A forward takes 1 and a backward 1 where trained: 24 on the upper half of an even cut, 18 on
    each of a balanced one. Head, embedding, attention's core (8 tokens) and adapters are under 2 %
    of a layer together.
    """
    LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=24,
        num_attention_heads=4,
        vocab_size=8,
    ).save_pretrained(tmp_path)
    targets = [f"model.layers.{i}.self_attn.q_proj" for i in range(12, 24)]
    cfg = config(str(tmp_path), Lora(r=1, targets=targets))
    cfg = replace(cfg, data=replace(cfg.data, sequence_length=8))
    units = costs(cfg)
    balanced = choose_split(cfg, units, 64)
    uniform = choose_split(replace(cfg, parallel=replace(cfg.parallel, split="uniform")), units, 64)
    assert (uniform.boundaries, balanced.boundaries) == ((0, 13, 26), (0, 16, 26))
    slowest = [max(chunk.seconds for chunk in split.chunks) for split in (uniform, balanced)]
    assert slowest[0] / slowest[1] == pytest.approx(4 / 3, rel=0.02)


def test_a_split_takes_the_run_files_word():
    cfg = config(tiny("llama"), split=[1, 3])
    assert choose_split(cfg, costs(cfg), 4).boundaries == (0, 2, 6)


def test_the_limit_that_an_error_names_is_accepted():
    units = costs(config(tiny("llama")))
    with pytest.raises(
        UserError, match=r"within 0\.0001 GiB; set parallel\.memory_limit_gib to 0\.\d+ or more"
    ) as error:
        choose_split(config(tiny("llama"), memory_limit_gib=1e-4), units, 4)
    named = str(error.value).split()[-3]
    cut = choose_split(config(tiny("llama"), memory_limit_gib=float(named)), units, 4)
    assert float(named) - 1e-6 < max(cut.memory_bytes) / 2**30 <= float(named)
