"""FLOPs against torch's counter on real forwards and backwards, and against figures derived by
hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedModel

from shardwise.kernels import gated_delta_rule, kimi_delta_attention, state_space_duality
from shardwise.kernels.attention import capped
from shardwise.kernels.grouped_linear import loop
from shardwise.kernels.grouped_linear.gradients import Needs
from shardwise.metrics.flops import hardware_flops_per_token, model_flops_per_token, utilization
from shardwise.models.counts import ModelCounts, Unit, count_model
from shardwise.models.families import FAMILIES
from shardwise.models.kinds.attention import Attention
from shardwise.models.kinds.base import Core
from shardwise.models.kinds.gated_delta_net import GatedDeltaNet
from shardwise.models.kinds.jet_block import DynamicConvolution
from shardwise.models.kinds.kda import KimiDeltaAttention
from shardwise.models.kinds.mamba import Mamba
from shardwise.models.kinds.mamba2 import Mamba2
from shardwise.models.routed_experts import use_routed_experts
from shardwise.models.slot_dropout import DropoutState
from shardwise.models.spec import ModelSpec
from shardwise.parallel.activation_checkpoint import recompute
from tests.kernels.gated_delta_rule import test_chunked as of_gated_delta_rule
from tests.kernels.kimi_delta_attention import test_chunked as of_kda
from tests.kernels.state_space_duality import test_chunked as of_mamba2
from tests.left_out import some_now
from tests.metrics.tiny_models import CONFIGS, add_lora, build, linears

ROWS, LENGTH = 2, 80  # 80 tokens: chunks of 64 and 16, or of 32, 32 and 16


IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **options: 2 * a[0] * a[1] * b[1]}
"""Torch's counter knows no product that is added in place."""


def flops_within(function: Callable[..., object]) -> Any:
    """A formula for torch's counter: the FLOPs that it sees in a function of an operator's inputs.

    It does not look into an operator that torch does not know."""

    def flops(*args: Any, out_val: object) -> int:
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            function(*args)
        return counter.get_total_flops()

    flops._get_raw = True  # ty: ignore[unresolved-attribute]
    return flops


def of_flash(q: Any, k: Any, v: Any, *_: Any, **options: Any) -> int:
    """The FLOPs of fused attention on a CPU, which torch's counter does not know; from shapes."""
    return sdpa_flop_count(q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))


def of_flash_backward(out: Any, q: Any, k: Any, v: Any, *_: Any, **options: Any) -> int:
    """The FLOPs of its backward, which computes the scores again."""
    return sdpa_backward_flop_count(out, q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))


OWN_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: of_flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: of_flash_backward,
    torch.ops.shardwise.capped_attention: flops_within(capped.forward._init_fn),
    torch.ops.shardwise.capped_attention_gradients: flops_within(capped.backward._init_fn),
    torch.ops.shardwise.grouped_linear: flops_within(loop.forward),
    torch.ops.shardwise.grouped_linear_gradients: flops_within(
        lambda *args: loop.backward(*args[:-1], Needs(*args[-1]))
    ),
}


def counted(model: PreTrainedModel, spec: ModelSpec, checkpointing: str | list[str]) -> float:
    """FLOPs per token that torch's counter sees in one forward and backward."""
    use_routed_experts(model)
    recompute(model, spec, checkpointing, DropoutState(seed=0))
    counter = FlopCounterMode(display=False, custom_mapping=OWN_FLOPS)
    ids = torch.randint(0, 64, (ROWS, LENGTH))
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops() / (ROWS * LENGTH)


def hidden_from_counter(core: Core, forwards: int, backward: bool, has_sinks: bool) -> float:
    """What `hardware_flops_per_token` has and the counter, on the math attention kernel, has not.
    FLOPs per token."""
    if isinstance(core, Attention) and (core.cap or has_sinks):
        # The project's own, of five backward products, on all T keys of rows as short as these.
        nk, nv = core.num_heads * core.key_dim, core.num_heads * core.value_dim
        num_keys = 0 if core.window else (LENGTH + 1) / 2 - LENGTH
        return 2 * (forwards * (nk + nv) + backward * (3 * nk + 2 * nv)) * num_keys
    if isinstance(core, Attention) and core.window:
        # Both have all T keys; the scores that a fused backward computes again are ours alone.
        return 0.5 * backward * 4 * core.num_heads * core.key_dim * LENGTH
    if isinstance(core, Attention):
        # All T keys instead of (T + 1) / 2, and four backward products, of K, K, V and V, instead
        # of five.
        nk, nv = core.num_heads * core.key_dim, core.num_heads * core.value_dim
        ours = (forwards * (nk + nv) + backward * (3 * nk + 2 * nv)) * (LENGTH + 1)
        return ours - (forwards + 2 * backward) * 2 * (nk + nv) * LENGTH
    if isinstance(core, GatedDeltaNet):
        # Inverses of matrices of 64 and of 16 tokens, of 4 heads; a backward has one.
        return (forwards + backward) * 4 * (64 * 64 * 63 + 16 * 16 * 15) / LENGTH
    if isinstance(core, DynamicConvolution):
        # Elementwise: 4 taps of 4 heads of 16 channels.
        return (forwards + 2 * backward) * 2 * 4 * 4 * 16
    if isinstance(core, KimiDeltaAttention):
        # In each of 2 chunks of 64 (the last one is padded) and 2 heads: a solve with 16 + 16
        # columns, and the product of a token's query with its key, of 16 channels. A backward has
        # two and three of them.
        solve, of_same = 64 * 63 * (16 + 16), 2 * 64 * 16
        of_backward = backward * (2 * solve + 3 * of_same)
        return 2 * 2 * (forwards * (solve + of_same) + of_backward) / LENGTH
    if isinstance(core, Mamba):
        # By elements, of 64 channels with states of 8: all but the products with B, C and their
        # gradients, one forward and four backward.
        return (3 * forwards + 12 * backward) * 64 * 8
    return 0.0


def hidden_convolutions(unit: Unit, checkpointing: str | list[str]) -> float:
    """What the counter does not see of products by elements, which no checkpointing keeps."""
    is_rerun = checkpointing in ("full", "operators") or unit.kind in checkpointing
    forwards = 1 + (unit.backward and is_rerun)
    return sum(
        2 * w.numel * (forwards + w.input_gradient + w.trainable)
        for w in unit.weights
        if w.by_elements
    )


def check(model: PreTrainedModel, spec: ModelSpec, checkpointing: str | list[str]) -> ModelCounts:
    counts = count_model(model, spec)
    ours = hardware_flops_per_token(counts, LENGTH, checkpointing)
    again = {u.kind for u in counts.units} if checkpointing == "full" else checkpointing
    has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    hidden = sum(
        hidden_from_counter(
            core, 2 if unit.kind in again and unit.backward else 1, unit.core_gradient, has_sinks
        )
        for unit in counts.units
        for core in unit.cores
    )
    hidden += sum(hidden_convolutions(unit, checkpointing) for unit in counts.units)
    assert ours - hidden == pytest.approx(counted(model, spec, checkpointing), rel=1e-12)
    return counts


def in_turn(*settings: str) -> list[Any]:
    """Return each family with each setting; `make test` takes one for each family."""
    now = [(family, settings[i % len(settings)]) for i, family in enumerate(CONFIGS)]
    return some_now(product(CONFIGS, settings), now)


@pytest.mark.parametrize(("family", "checkpointing"), in_turn("none", "full"))
def test_training_in_full_matches_the_counter(family, checkpointing):
    model, spec = build(family)
    check(model, spec, checkpointing)


EXPERTS = {
    name: family.named("experts") for name, family in FAMILIES.items() if family.named("experts")
}


@pytest.mark.parametrize(("family", "checkpointing"), in_turn("operators", "one-kind"))
def test_selective_checkpointing_matches_the_counter(family, checkpointing):
    model, spec = build(family)
    attention = next(layer.kind for layer in spec.layers if layer.attention)
    check(model, spec, [attention] if checkpointing == "one-kind" else checkpointing)


@pytest.mark.parametrize(("family", "checkpointing"), in_turn("none", "full", "operators"))
def test_lora_everywhere_matches_the_counter(family, checkpointing):
    model, spec = build(family)
    # Where PEFT renames targets (qwen3_next) it adapts fewer linears than requested. The count
    # takes those.
    add_lora(model, linears(model), EXPERTS.get(family, []))
    counts = check(model, spec, checkpointing)
    # With its B at zero an adapter's A has a gradient of zero, but the products are run all the
    # same.
    assert {w.on_stack for u in counts.units for w in u.weights} == (
        {False, True} if family in EXPERTS else {False}
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("family", "within"),
    [
        ("llama", ["layers.1.mlp"]),  # nothing in layer 0, only the MLP of layer 1
        ("llama", ["layers.0.self_attn.o_proj"]),
        ("olmo_hybrid", ["layers.0.mlp", "layers.1"]),
        ("qwen3_5_text", ["layers.1.self_attn"]),
        ("nemotron_h", ["layers.2", "layers.3"]),
    ],
)
def test_nothing_flows_below_the_lowest_adapter(family, within, checkpointing):
    model, spec = build(family)
    add_lora(model, linears(model, *within))
    check(model, spec, checkpointing)


def test_saved_copies_and_a_head_that_is_trained_alone():
    model, spec = build("llama")
    add_lora(model, linears(model, "layers.1.mlp.down_proj"), modules_to_save=["lm_head"])
    counts = check(model, spec, "none")
    assert [w.name for w in counts.units[-1].weights] == ["lm_head.modules_to_save.default.weight"]


def test_model_flops_of_llama_by_hand():
    model, spec = build("llama")
    # Per layer: q 32*32, k and v 16*32 each, o 32*32, gate, up, down 3*32*48 = 7680; head 64*32 =
    # 2048. Causal core, forward: 2 * 4 heads * 8 * (T + 1).
    layers, head, core = 2 * 7680, 2048, 2 * 2 * 4 * 8 * (LENGTH + 1)
    counts = count_model(model, spec)
    assert model_flops_per_token(counts, LENGTH) == 6 * (layers + head) + 3 * core

    add_lora(model, linears(model))
    # Factors: rank 4 times the sum of both widths, q 64, k and v 48, o 64, gate, up and down 80:
    # 464 per layer. Not flowing: the gradients of layer 0's input by q, k and v (2048 elements) and
    # by their A (3 * 4 * 32).
    counts = count_model(model, spec)
    lora = 2 * 4 * 464
    assert model_flops_per_token(counts, LENGTH) == 4 * (
        layers + head
    ) + 6 * lora + 3 * core - 2 * (2048 + 384)


def test_model_flops_of_a_hybrid_core_do_not_depend_on_chunks():
    model, spec = build("qwen3_5_text")
    counts = count_model(model, spec)
    # 7 N K V = 7 * 4 * 8 * 16 against a chunked count by chunks.
    (core,), (flops,) = counts.units[1].cores, counts.units[1].core_flops
    assert core.model_forward(LENGTH) == core.model_forward(64) == 7 * 4 * 8 * 16
    # Per head: 2 C^2 (3K + 2V) + 6 C K V + C^2 (C - 1) with K = 8, V = 16; C = 64, then 16.
    chunks = [2 * c**2 * 56 + 6 * c * 128 + c**2 * (c - 1) for c in (64, 16)]
    assert flops.per_token(LENGTH)[0] == 4 * sum(chunks) / LENGTH


def test_a_fused_attention_backward_is_five_products():
    shape = (1, 4, LENGTH, 8)
    forward = sdpa_flop_count(shape, shape, shape)
    backward = sdpa_backward_flop_count(shape, shape, shape, shape)
    (core,) = count_model(*build("llama", device="meta")).units[1].core_flops
    runs, gradients = core.per_token(LENGTH)
    assert gradients / runs == backward / forward
    # The counter's forward takes every key for every query: T instead of (T + 1) / 2.
    assert runs * LENGTH * 2 * LENGTH == forward * (LENGTH + 1)


@pytest.mark.parametrize(
    ("recurrence", "tensors", "flops", "hidden"),
    [
        # 3 heads each; hidden are inverses, or solves and products of a token with itself.
        (
            gated_delta_rule.RECURRENCE,
            of_gated_delta_rule.inputs(LENGTH, with_state=False),
            GatedDeltaNet(3, 5, 8).flops(3),
            3 * (64 * 64 * 63 + 16 * 16 * 15),
        ),
        (
            kimi_delta_attention.RECURRENCE,
            of_kda.inputs(LENGTH)[:-1],
            KimiDeltaAttention(3, 5, 8).flops(3),
            3 * 2 * (64 * 63 * (5 + 8) + 2 * 64 * 5),
        ),
        (
            state_space_duality.RECURRENCE,
            of_mamba2.inputs(LENGTH)[:-1],
            Mamba2(4, 3, 5, num_groups=2).flops(4, 2),
            0,
        ),
    ],
    ids=["gated delta rule", "Kimi Delta Attention", "Mamba2"],
)
def test_maps_of_context_parallelism_match_the_counter(recurrence, tensors, flops, hidden):
    values = tensors[0 if recurrence is state_space_duality.RECURRENCE else 2]
    plain, with_maps = (flops.per_token(LENGTH, maps) for maps in (False, True))
    maps = recurrence.summary, lambda *inputs: recurrence.grad_before(*inputs[:-1], values, None)
    for run, both, one in zip(maps, with_maps, plain, strict=True):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            run(*tensors, None)
        seen = counter.get_total_flops() / ROWS
        assert (both - one) * LENGTH == pytest.approx(seen + hidden, rel=1e-12)


def test_experts_count_by_the_share_a_token_meets():
    model, spec = build("qwen3_next")
    weights = {w.name: w for u in count_model(model, spec).units for w in u.weights}
    assert weights["model.layers.0.mlp.experts.gate_up_proj"].active == 2 / 4
    assert weights["model.layers.0.mlp.shared_expert.up_proj.weight"].active == 1.0
    assert weights["model.layers.0.mlp.gate.weight"].active == 1.0


def test_utilization_is_over_all_devices():
    # 2e9 FLOPs per token, 1000 tokens per second, on 4 devices of 1e12: 2e12 of 4e12.
    assert utilization(2e9, 1000.0, 1e12, 4) == 0.5
