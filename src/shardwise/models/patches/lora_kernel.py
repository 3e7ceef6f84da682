"""LoRA layers that compute through kernels/lora_linear in the place of PEFT's forward.

Modules, names and what is saved stay PEFT's. Only the forward of a plain layer is replaced: one
linear, one adapter, no variant except DoRA. What else PEFT can do with such a layer later
(switch the adapter off, merge it, take another or several) is left to its own forward. Adapters on
stacks of experts are computed in experts.py.

Projections that share their input (queries, keys and values; gate and up) are computed together, so
that the input is read once: see `_Shared`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.config import RunConfig, UserError
from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.dropout import Dropout
from shardwise.kernels.float8 import Float8
from shardwise.kernels.lora_linear import Linear, LoraBackend, load_backend, lora_linear
from shardwise.kernels.lora_linear.magnitude import row_norms, with_magnitude
from shardwise.models.adapters.lora import magnitude_of
from shardwise.models.kinds import SHARED_INPUTS
from shardwise.models.names import is_lengths, is_lora
from shardwise.models.slot_dropout import SlotDropout
from shardwise.models.stored import weight_of

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as PeftLinear

    from shardwise.models.causal_lm import CausalLM

NO_FLOAT8: Mapping[nn.Module, Float8] = {}
Kernel = Literal["auto", "torch", "triton", "peft"]
"""The values of `lora.kernel`."""


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let the plain adapters of a part compute with the kernel that `lora.kernel` asks for."""
    if cfg.lora and has_plain_layers(part.hf):
        use_lora_kernel(part.hf, kernel_of(cfg), device, part.backward_half, part.float8)


def kernel_of(cfg: RunConfig) -> Kernel:
    """Return `lora.kernel`, or what `auto` means where torch's backend alone has the products."""
    assert cfg.lora is not None
    is_default = cfg.lora.kernel == "auto" and cfg.training.matmul == "default"
    return cfg.lora.kernel if is_default or cfg.lora.kernel != "auto" else "torch"


def use_lora_kernel(
    model: nn.Module,
    kernel: Kernel,
    device: torch.device,
    half: BackwardHalf | None = None,
    float8: Mapping[nn.Module, Float8] = NO_FLOAT8,
) -> str:
    """Let the plain LoRA layers of a model compute with a kernel that runs on `device`.

    The model may still be on another device. Return the name of the kernel; with `peft` nothing is
    replaced. The model's dropouts must be `SlotDropout`s, which no strategy has wrapped yet. `half`
    says which half of a backward runs, in a pipeline whose schedule has two. Linears in
    `float8` multiply in 8 bits, which torch's kernel alone can. Raises UserError as `kernel_for`.
    """
    kernel, backend = kernel_for(kernel, device)
    if backend is None:
        return kernel
    for layer in _plain_layers(model):
        _Shared([layer], backend, half, float8)
    for parent in list(model.modules()):
        together = _alike(_with_one_input(parent))
        if len(together) > 1:
            shared = _Shared(together, backend, half, float8)
            parent.forward = shared.within(parent.forward)
    return kernel


def kernel_for(kernel: Kernel, device: torch.device) -> tuple[Kernel, LoraBackend | None]:
    """Return the kernel that runs for plain LoRA layers on `device`, and its backend.

    `peft` has no backend. `auto` is Triton's on a GPU where it can run, else torch's. Raises
    UserError if the kernel cannot run there.
    """
    if kernel == "peft":
        return kernel, None
    if kernel == "auto":
        has_triton = device.type == "cuda" and _why_not("triton", device) is None
        kernel = "triton" if has_triton else "torch"
    if why := _why_not(kernel, device):
        raise UserError(f"lora.kernel is {kernel}, but {why}; use auto or torch")
    return kernel, load_backend(kernel)


def has_plain_layers(model: nn.Module) -> bool:
    """Return whether a model has adapters that a kernel of kernels/lora_linear computes."""
    return bool(_plain_layers(model))


def _why_not(kernel: str, device: torch.device) -> str | None:
    try:
        return load_backend(kernel).missing(device)
    except ImportError as error:
        return f"{error.name} is not installed (pip install {error.name})"


def _plain_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_plain(module)]


def _is_plain(module: nn.Module) -> bool:
    if not is_lora(module):
        return False
    from peft.tuners.lora.layer import Linear as PeftLinear
    from peft.tuners.lora.variants import DoraLinearVariant

    return (
        type(module) is PeftLinear
        # A linear of a model's own code may compute something else.
        and type(module.get_base_layer()).forward in (nn.Linear.forward, Conv1D.forward)
        and len(module.lora_A) == 1
        and all(isinstance(v, DoraLinearVariant) for v in module.lora_variant.values())
        and all(is_lengths(m) for m in module.lora_magnitude_vector.values())
        and not any(module.lora_bias.values())
    )


def _with_one_input(parent: nn.Module) -> list[Any]:
    """Return the plain layers in a module that are called with one tensor."""
    return [
        module
        for path, module in parent.named_modules()
        if path in SHARED_INPUTS and _is_plain(module)
    ]


def _alike(layers: list[PeftLinear]) -> list[PeftLinear]:
    """Return the layers that have the rank, dtype and dropout of the first."""

    def traits(layer: PeftLinear) -> object:
        (name,) = layer.lora_A
        factor, dropout = layer.lora_A[name], layer.lora_dropout[name]
        return factor.weight.shape, factor.weight.dtype, getattr(dropout, "p", 0.0)

    return [layer for layer in layers if traits(layer) == traits(layers[0])]


class _Shared:
    """Layers that are called with one tensor, or a single layer.

    The first layer that is called with a tensor computes the outputs of all. The outputs of the
    others wait here, until these layers are called with that very tensor, unchanged; a layer that
    is called with another tensor computes by itself. At the end of the forward of the module that
    holds the layers, whatever still waits is dropped.
    """

    def __init__(
        self,
        layers: list[PeftLinear],
        backend: LoraBackend,
        half: BackwardHalf | None,
        float8: Mapping[nn.Module, Float8],
    ) -> None:
        self.layers = [_Layer(layer) for layer in layers]
        self.backend = backend
        self.half = half
        self.float8 = float8
        self.x: torch.Tensor | None = None  # the input of what waits
        self.version = 0  # how often it had been changed in place
        self.waiting: dict[int, torch.Tensor] = {}  # outputs by place in `layers`
        for place, layer in enumerate(layers):
            assert isinstance(self.layers[place].dropout, SlotDropout | nn.Identity)
            layer.forward = self._forward(place, type(layer).forward.__get__(layer))

    def _forward(
        self, place: int, forward_of_peft: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        layer = self.layers[place].layer
        names = [*layer.lora_A]
        output_of = self.output_of

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            is_off = layer.disable_adapters or layer.merged or layer.active_adapters != names
            if args or kwargs or is_off:
                return forward_of_peft(x, *args, **kwargs)
            return output_of(place, x)

        return forward

    def output_of(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer at a place for x."""
        version = _version(x)
        if place in self.waiting and x is self.x and version == self.version:
            return self.waiting.pop(place)
        if len(self.layers) == 1 or version is None or self.waiting:
            (output,) = self._compute([self.layers[place]], x)
            return output
        outputs = self._compute(self.layers, x)
        self.x, self.version = x, version
        self.waiting = {other: y for other, y in enumerate(outputs) if other != place}
        return outputs[place]

    def _compute(self, layers: list[_Layer], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        linears, drop = [layer.linear() for layer in layers], None
        first = layers[0].dropout
        if isinstance(first, SlotDropout) and first.active:
            seeds = torch.stack([layer.dropout.seeds(x) for layer in layers])
            drop = Dropout(first.p, seeds, first.features)
        float8 = [self.float8.get(layer.base) for layer in layers] if self.float8 else ()
        if all(layer.magnitude is None for layer in layers):
            return lora_linear(x, linears, drop, self.backend, self.half, float8)
        inner = [
            linear if layer.magnitude is None else linear._replace(bias=None)
            for layer, linear in zip(layers, linears)
        ]
        ys = lora_linear(x, inner, drop, self.backend, self.half, float8)
        return tuple(self._with_magnitude(*each) for each in zip(layers, linears, ys))

    def _with_magnitude(self, layer: _Layer, linear: Linear, y: torch.Tensor) -> torch.Tensor:
        magnitude = layer.magnitude
        if magnitude is None:
            return y
        norms = row_norms(linear.weight, linear.a, linear.b, linear.scale, magnitude.add_up)
        return with_magnitude(y, magnitude.weight, norms, linear.bias, self.half)

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of the module that holds the layers, after which nothing waits."""

        def forward_and_drop(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:  # checkpointing ends a recomputation by an error once it has all tensors
                self.x, self.waiting = None, {}

        return forward_and_drop


class _Layer:
    """A layer of PEFT, whose modules are looked up once: torch's search takes the host 0.5 us each.

    Their parameters are read in every call, as attributes: strategies exchange both.
    """

    def __init__(self, layer: PeftLinear) -> None:
        (self.name,) = layer.lora_A
        self.layer = layer
        self.base: Any = layer.get_base_layer()
        self.a: Any = layer.lora_A[self.name]
        self.b: Any = layer.lora_B[self.name]
        self.magnitude = magnitude_of(layer)
        self.is_turned = isinstance(self.base, Conv1D)
        self.has_bias = getattr(self.base, "bias", None) is not None
        self._dropouts = layer.lora_dropout._modules

    @property
    def dropout(self) -> Any:
        """The dropout before A; a strategy may exchange it."""
        return self._dropouts[self.name]

    def linear(self) -> Linear:
        """Return the linear and its adapter."""
        weight, bias = weight_of(self.base), self.base.bias if self.has_bias else None
        weight, scale = weight.mT if self.is_turned else weight, self.layer.scaling[self.name]
        return Linear(weight, bias, self.a.weight, self.b.weight, scale)


def _version(x: torch.Tensor) -> int | None:
    """Return how often x was changed in place; None where torch does not count it."""
    if torch.compiler.is_compiling():
        return 0
    return None if x.is_inference() else x._version
