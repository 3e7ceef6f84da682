"""LoRA layers that compute through kernels/lora_linear, against PEFT's own forward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from shardwise.config import Lora, UserError
from shardwise.kernels import lora_linear
from shardwise.kernels.lora_linear import torch_backend
from shardwise.metrics.memory import PeakMemory
from shardwise.models.adapters.magnitude import use_magnitudes
from shardwise.models.kinds import SHARED_INPUTS
from shardwise.models.names import adapter_layers
from shardwise.models.patches import lora_kernel
from shardwise.models.patches.lora_kernel import kernel_for, use_lora_kernel
from shardwise.models.slot_dropout import DropoutState, replace_dropouts
from tests.kernels.lora_linear.cases import worst
from tests.left_out import some_now
from tests.models.test_slot_dropout import batch
from tests.models.tiny import EACH_KIND, PLAIN, tiny, tokens, with_adapters

CPU = torch.device("cpu")
EXACT = 1e-5
"""Of float32 sums in another order."""
SMALL = 1e-4
"""Of whole models: there it moves the smallest gradients, those of what sets a decay, by some 1e-5
of them."""


def gradients(model: nn.Module, **inputs: torch.Tensor) -> list[torch.Tensor]:
    """Logits, and the gradient of every factor."""
    model.zero_grad()
    logits = model.train()(input_ids=tokens(length=24), use_cache=False).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many linears each call of the kernel had."""
    found: list[int] = []

    def noting(x, linears, drop, backend, half, float8):
        found.append(len(linears))
        return lora_linear.lora_linear(x, linears, drop, backend, half, float8)

    monkeypatch.setattr(lora_kernel, "lora_linear", noting)
    return found


@pytest.mark.parametrize(
    "name", some_now(PLAIN, (*EACH_KIND, "tiny-qwen3_next", "tiny-olmo_hybrid"))
)
def test_as_peft_computes_and_what_shares_an_input_is_computed_together(name, calls):
    model, _ = with_adapters(tiny(name), Lora(r=4, rslora=True, targets="all-linear"))
    names = [n for n, _ in model.named_modules()]
    # Which of PEFT's layers are called with one tensor, in one module. Tensors are held: none has
    # the id of another.
    inputs: list[tuple[str, torch.Tensor]] = []

    def note(path: str) -> Any:
        return lambda _, args: inputs.append((path, args[0]))

    hooks = [
        layer.register_forward_pre_hook(note(path)) for path, layer in adapter_layers(model).items()
    ]
    expected = gradients(model)
    groups: dict[tuple[str, int], list[str]] = {}
    for path, x in inputs:
        deep = [shared for shared in SHARED_INPUTS if "." in shared and path.endswith(f".{shared}")]
        own = deep[0] if deep else path.rpartition(".")[2]
        parent = path.removesuffix(f".{own}")
        if not parent.endswith(".experts"):
            groups.setdefault((parent, id(x)), []).append(own)
    for group in groups.values():
        assert len(group) == 1 or set(group) <= SHARED_INPUTS, f"{group} share an input"
    for hook in hooks:
        hook.remove()
    use_lora_kernel(model, "auto", CPU)
    assert [n for n, _ in model.named_modules()] == names
    assert worst(gradients(model), expected) < SMALL
    assert sorted(calls) == sorted(map(len, groups.values()))


class Block(nn.Module):
    """Queries and keys of one input, or of two."""

    def __init__(self, config: LoraConfig | None = None) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(
        self, x: torch.Tensor, other: torch.Tensor | None = None, between: Any = None
    ) -> torch.Tensor:
        q = self.q_proj(x)
        if between is not None:
            between()
        return self.o_proj(q * self.k_proj(x if other is None else other))


def block(p: float = 0.0, **options: Any) -> tuple[nn.ModuleDict, DropoutState]:
    """With adapters that do something."""
    torch.manual_seed(0)
    names = ["q_proj", "k_proj", "o_proj"]
    config = LoraConfig(
        r=4, target_modules=names, lora_dropout=p, init_lora_weights=False, **options
    )
    model = inject_adapter_in_model(config, nn.ModuleDict({"block": Block()}))
    state = DropoutState(0)
    replace_dropouts(model, state)
    state.start(batch((0, 1)))
    return model, state


def outcome(model: nn.ModuleDict, *args: Any) -> list[torch.Tensor]:
    """Output, and every gradient."""
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    factors = [p for p in model.parameters() if p.requires_grad]
    y = model["block"](x, *args)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *factors])]


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_masks_are_those_of_each_layer(p):
    plain, fused = block(p)[0], block(p)[0]
    use_lora_kernel(fused, "torch", CPU)
    assert worst(outcome(fused), outcome(plain)) < EXACT
    assert worst(outcome(fused.eval()), outcome(plain.eval())) < EXACT


def test_another_input_is_another_product(calls):
    plain, fused = block()[0], block()[0]
    use_lora_kernel(fused, "torch", CPU)
    other = torch.randn(2, 5, 16)
    assert worst(outcome(fused, other), outcome(plain, other)) < EXACT
    assert calls == [2, 1, 1]
    del calls[:]
    x = torch.ones(2, 5, 16)
    with torch.no_grad():
        changed = fused["block"](x, None, lambda: x.mul_(2.0))
        assert calls == [2, 1, 1]  # the same tensor, but it was changed in between
        expected = plain["block"](torch.ones(2, 5, 16), torch.full((2, 5, 16), 2.0))
    torch.testing.assert_close(changed, expected)
    with torch.inference_mode():  # where tensors do not tell
        y = torch.ones(2, 5, 16)
        torch.testing.assert_close(fused["block"](y, None, lambda: y.mul_(2.0)), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nothing_outlives_the_block_even_after_an_error(mode):
    model, _ = block()
    use_lora_kernel(model, "torch", CPU)
    seen = []

    def fail():
        seen.append(True)
        raise KeyError

    with mode():
        x = torch.randn(2, 5, 16)
        model["block"](x)
        with pytest.raises(KeyError):
            model["block"](x, None, fail)
        gone = weakref.ref(x)
        del x
    gc.collect()
    assert seen
    assert gone() is None


def test_what_peft_can_do_else_is_left_to_it(calls):
    model, _ = block()
    layer: Any = model["block"].q_proj
    use_lora_kernel(model, "torch", CPU)
    x = torch.randn(2, 5, 16)

    def count() -> int:
        del calls[:]
        layer(x)
        return len(calls)

    assert count() == 1
    with_adapter = layer(x)
    layer.enable_adapters(False)
    assert count() == 0
    torch.testing.assert_close(layer(x), layer.base_layer(x))
    layer.enable_adapters(True)
    layer.merge()
    assert count() == 0
    torch.testing.assert_close(layer(x), with_adapter)
    layer.unmerge()
    assert count() == 1
    layer.update_layer("other", 2, 4, LoraConfig(r=2))
    layer.set_adapter(["default", "other"])
    assert count() == 0


def with_magnitudes(use_ours: bool) -> nn.ModuleDict:
    """With lengths of rows that are not those of W."""
    model, _ = block(use_dora=True)
    for layer in adapter_layers(model).values():
        for magnitude in layer.lora_magnitude_vector.parameters():
            magnitude.data.mul_(torch.linspace(0.5, 1.5, len(magnitude)))
        if use_ours:
            use_magnitudes(layer)
    return model


def test_dora_is_that_of_peft(calls):
    plain, fused = with_magnitudes(False), with_magnitudes(True)
    use_lora_kernel(fused, "torch", CPU)
    expected = outcome(plain)
    assert worst(outcome(fused), expected) < EXACT
    assert calls == [2, 1]
    assert worst(outcome(block()[0])[:2], expected[:2]) > 0.1  # it does something


def errors_in_16_bits(use_ours: bool) -> torch.Tensor:
    """How far DoRA under autocast is off PEFT's in float64: output, then each gradient, as the root
    of the mean over inputs. One loss would not tell: its rounding is small or large by chance.
    """
    rounded, exact = with_magnitudes(use_ours), with_magnitudes(False)
    if use_ours:
        use_lora_kernel(rounded, "torch", CPU)
    layers = (adapter_layers(model).values() for model in (rounded, exact))
    for layer, other in zip(*layers, strict=True):
        layer.get_base_layer().to(torch.bfloat16)
        other.get_base_layer().load_state_dict(layer.get_base_layer().state_dict())
    exact.double()
    errors = []
    for seed in range(20):
        inputs = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))
        found = []
        for model, dtype in ((rounded, torch.float32), (exact, torch.float64)):
            x = inputs.to(dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=model is rounded):
                y = model["block"](x)
            factors = [p for p in model.parameters() if p.requires_grad]
            found.append(
                [y.detach(), *torch.autograd.grad(y.to(dtype).square().sum(), [x, *factors])]
            )
        errors.append([float((one - other).norm() / other.norm()) for one, other in zip(*found)])
    return torch.tensor(errors).square().mean(0).sqrt()


def test_dora_in_16_bits_is_as_near_to_float64_as_pefts():
    ours, pefts = errors_in_16_bits(True), errors_in_16_bits(False)
    assert (ours / pefts).max() < 1.25
    assert ours.mean() < 1.05 * pefts.mean()


def test_dora_compiles_without_a_break():
    plain, fused = with_magnitudes(False), with_magnitudes(True)
    use_lora_kernel(fused, "torch", CPU)
    torch._dynamo.reset()
    fused["block"].forward = torch.compile(
        fused["block"].forward, backend="aot_eager", fullgraph=True
    )
    assert worst(outcome(fused), outcome(plain)) < EXACT


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_variants_keep_pefts_forward(options, calls):
    plain, same = block(**options)[0], block(**options)[0]
    use_lora_kernel(same, "torch", CPU)
    assert worst(outcome(same), outcome(plain)) == 0
    assert calls == []


def test_a_linear_that_computes_something_else_keeps_pefts_forward(calls):
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model, _ = block()
    layer: Any = model["block"].q_proj
    layer.base_layer.__class__ = Doubled
    expected = outcome(model)
    use_lora_kernel(model, "torch", CPU)
    assert worst(outcome(model), expected) < EXACT
    assert calls == [1, 1]


def test_peft_can_be_asked_for(calls):
    model, _ = block()
    use_lora_kernel(model, "peft", CPU)
    outcome(model)
    assert calls == []


def test_a_kernel_that_cannot_run_here_is_refused():
    assert kernel_for("auto", CPU) == kernel_for("torch", CPU) == ("torch", torch_backend)
    with pytest.raises(UserError, match=r"lora\.kernel is triton, but .*; use auto or torch"):
        kernel_for("triton", CPU)


def test_peak_memory_is_below_pefts():
    x = torch.randn(2048, 16, generator=torch.Generator().manual_seed(1)).bfloat16()

    def peak(kernel: str) -> int:
        model, _ = block()
        model.bfloat16()
        for layer in adapter_layers(model).values():
            layer.lora_A.float()
            layer.lora_B.float()
        use_lora_kernel(model, kernel, CPU)  # ty: ignore[invalid-argument-type]
        with PeakMemory(CPU) as memory:
            model["block"](x).sum().backward()
        assert memory.peak_bytes is not None
        return memory.peak_bytes

    # Of PEFT's three layers each keeps its input once more, in its adapter's float32.
    assert peak("peft") - peak("torch") > 2 * x.numel() * 4


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_a_block_compiles_without_a_break(p):
    plain, fused = block(p)[0], block(p)[0]
    use_lora_kernel(fused, "torch", CPU)
    torch._dynamo.reset()
    fused["block"].forward = torch.compile(
        fused["block"].forward, backend="aot_eager", fullgraph=True
    )
    assert worst(outcome(fused), outcome(plain)) < EXACT
