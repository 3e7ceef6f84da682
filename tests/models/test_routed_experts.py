"""Routed experts equal transformers' and PEFT's own forwards, without a copy of a stack."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from peft.tuners.lora import ParamWrapper
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shardwise.config import Lora, Model
from shardwise.metrics.memory import PeakMemory
from shardwise.models.adapters.writing import merge_adapter, save_adapter
from shardwise.models.families import FAMILIES, spec_of
from shardwise.models.load import weights
from shardwise.models.routed_experts import RoutedExperts, use_routed_experts
from shardwise.models.save import save_model
from tests.kernels.lora_linear.cases import worst
from tests.left_out import some_now
from tests.models.patches.test_lora_kernel import CPU, EXACT, SMALL, gradients
from tests.models.tiny import (
    TINY_OF,
    loaded_by_transformers,
    logits,
    relative_error,
    tiny,
    tokens,
    trained,
    with_adapters,
)

MIXTURES = tuple(TINY_OF[name] for name, family in FAMILIES.items() if family.named("experts"))
EXPERTS = Lora(r=4, rslora=True, targets=["experts"])
SHARED = replace(EXPERTS, experts="shared")


TRAINED = ("adapters", "all")


@pytest.mark.parametrize(
    ("name", "trains"),
    some_now(
        product(MIXTURES, TRAINED),
        [(name, TRAINED[place % 2]) for place, name in enumerate(MIXTURES)],
    ),
)
def test_as_transformers_and_peft_compute(name, trains):
    model, _ = with_adapters(tiny(name), EXPERTS)
    if trains == "all":
        model.requires_grad_(True)
    expected = gradients(model)
    names = [path for path, _ in model.named_parameters()]  # PEFT's forward changes their order
    replaced = use_routed_experts(model)
    spec = spec_of(model.config, model)
    assert set(replaced) == {
        f"{layer.name}.{stack.rpartition('.')[0]}"
        for layer in spec.layers
        for stack in layer.experts
    }
    assert [path for path, _ in model.named_parameters()] == names
    assert worst(gradients(model), expected) < SMALL


SIZES = {
    "num_experts": 5,
    "n_routed_experts": 5,
    "num_local_experts": 5,
    "hidden_size": 8,
    "intermediate_size": 6,
    "moe_intermediate_size": 6,
}
CLASSES: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeExperts,
    "nemotron_h": NemotronHExperts,
    "gpt_oss": GptOssExperts,  # stacks [E, in, out], biases, and a gate of its own
}


def module_of(model_type: str) -> Any:
    """A module of experts, in float64, that runs transformers' loop."""
    config = AutoConfig.for_model(model_type, **SIZES)
    config._experts_implementation = "eager"
    module = CLASSES[model_type](config).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    return module


def outcome(module: Any, indices: torch.Tensor, forward: Any = None) -> tuple[torch.Tensor, ...]:
    """Outputs, and the gradients of hidden states, of the router's weights and of the stacks."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(indices), 8, generator=generator, dtype=torch.float64)
    shares = torch.rand(indices.shape, generator=generator, dtype=torch.float64)
    inputs = [hidden.requires_grad_(), shares.requires_grad_()]
    out = (forward or module)(hidden, indices, shares)
    needed = [*inputs, *module.parameters()]
    return (out, *torch.autograd.grad(out.sin().sum(), needed))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([*CLASSES]), st.integers(1, 6), st.integers(1, 4), st.randoms())
def test_any_routing_equals_transformers_loop(model_type, num_tokens, top_k, random):
    chosen = [random.sample(range(5), top_k) for _ in range(num_tokens)]
    check(model_type, torch.tensor(chosen))


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("expert", [0, 4])
def test_all_tokens_to_one_expert_and_one_token_alone(model_type, expert):
    check(model_type, torch.full((6, 1), expert))
    check(model_type, torch.tensor([[expert, 2]]))


def check(model_type: str, indices: torch.Tensor) -> None:
    module = module_of(model_type)
    forward = RoutedExperts(module, {}).forward
    assert worst(outcome(module, indices, forward), outcome(module, indices)) < 1e-12


def test_what_computes_sorted_rows_may_be_wrapped():
    """As a strategy does that sends rows to other ranks."""
    routed = RoutedExperts(module_of("qwen3_moe"), {})
    indices = torch.tensor([[4, 1], [0, 4], [1, 4]])
    expected = outcome(routed.module, indices, routed.forward)
    seen = []
    compute = routed.compute

    def noting(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        seen.append((x.detach(), ends.tolist()))
        return compute(x, ends)

    routed.compute = noting
    found = outcome(routed.module, indices, routed.forward)
    assert all(map(torch.equal, found, expected))
    ((rows, ends),) = seen
    assert ends == [1, 3, 3, 3, 6]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    assert torch.equal(rows, hidden[[1, 0, 2, 0, 1, 2]])  # of an expert in the tokens' order


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_adapter_that_is_off_or_merged_adds_nothing(is_merged):
    model, _ = with_adapters(tiny("tiny-qwen3_moe"), EXPERTS)
    use_routed_experts(model)
    adapted = logits(model)
    for wrapper in (module for module in model.modules() if isinstance(module, ParamWrapper)):
        if is_merged:
            wrapper.merge()
        else:
            wrapper.enable_adapters(False)
    plain, _ = with_adapters(tiny("tiny-qwen3_moe"), EXPERTS, factor_std=0.0)
    assert relative_error(logits(model), adapted if is_merged else logits(plain)) < EXACT
    assert relative_error(logits(plain), adapted) > SMALL


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("tiny-qwen3_next", EXPERTS),
        ("tiny-nemotron_h", EXPERTS),
        ("tiny-nemotron_h", SHARED),
        ("tiny-gpt_oss", EXPERTS),
    ],
)
def test_peft_alone_reads_what_is_saved_and_merges_the_same(name, lora, tmp_path):
    model, _ = with_adapters(tiny(name), lora)
    use_routed_experts(model)
    expected = logits(model)
    save_model(model, weights(model, tiny(name), seed=0), tmp_path / "base")
    save_adapter(model, lora, trained(model), tmp_path / "adapter", base_name="base")
    base = loaded_by_transformers(tmp_path / "base")
    theirs: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert relative_error(logits(theirs), expected) < EXACT
    merge_adapter(Model(str(tmp_path / "base")), tmp_path / "adapter", tmp_path / "merged")
    merged = loaded_by_transformers(tmp_path / "merged").state_dict()
    by_peft = theirs.merge_and_unload().state_dict()
    assert merged.keys() == by_peft.keys()
    assert all(torch.allclose(by_peft[key], merged[key], rtol=1e-6, atol=1e-7) for key in merged)


def test_an_adapter_that_experts_share_is_one_pair_of_factors():
    each, _ = with_adapters(tiny("tiny-qwen3_moe"), EXPERTS)
    shared, _ = with_adapters(tiny("tiny-qwen3_moe"), SHARED)
    sizes = {name: p.shape for name, p in each.named_parameters() if p.requires_grad}
    pairs = {name: p for name, p in shared.named_parameters() if p.requires_grad}
    assert pairs.keys() == sizes.keys()
    num_experts = each.config.num_experts
    assert all(sizes[name].numel() == num_experts * p.numel() for name, p in pairs.items())
    # Factors of each expert that are equal: their gradients add up to that of the pair.
    for name, p in each.named_parameters():
        if name in pairs:
            is_a = ".lora_A." in name
            pair = pairs[name].detach()
            p.data = pair.repeat(num_experts, 1) if is_a else pair.repeat_interleave(num_experts, 1)
    expected = gradients(each)
    use_routed_experts(shared)
    assert relative_error(logits(shared), logits(each)) < EXACT
    for gradient, other, name in zip(gradients(shared)[1:], expected[1:], pairs, strict=True):
        dims = (num_experts, -1) if ".lora_A." in name else (-1, num_experts)
        summed = (
            other.unflatten(0, dims).sum(0)
            if ".lora_A." in name
            else other.unflatten(1, dims).sum(2)
        )
        assert relative_error(gradient, summed) < SMALL


def test_no_copy_of_the_stack_is_alive():
    def peak(ours: bool) -> tuple[int, int]:
        model, _ = with_adapters(tiny("tiny-qwen3_moe"), EXPERTS)
        if ours:
            use_routed_experts(model)
        ids = tokens(rows=1, length=8)
        with PeakMemory(CPU) as memory:
            model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        assert memory.peak_bytes is not None
        assert memory.entry_bytes is not None
        stacks = [p for name, p in model.named_parameters() if "experts" in name and p.ndim == 3]
        return memory.peak_bytes - memory.entry_bytes, sum(p.nbytes for p in stacks)

    (ours, stacks), (pefts, _) = peak(True), peak(False)
    # PEFT's copies of the stacks of all layers wait for the backward. Ours is below one layer's.
    assert 3 * ours < stacks < pefts
