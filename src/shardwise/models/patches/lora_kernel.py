"""LoRA layers that compute through kernels/lora_linear in the place of PEFT's forward.

Modules, names and what is saved stay PEFT's; only the forward of a plain layer is replaced: one linear, one adapter, no
variant (DoRA and the like). What else PEFT can do with such a layer later (switch the adapter off, merge it, take
another or several) is left to its own forward, and so are adapters on stacks of experts.

Projections that share their input (queries, keys and values; gate and up) are computed together: the first one that is
called with a tensor computes all, and the others hand out what is theirs if they are called with that very tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.config import RunConfig, UserError
from shardwise.kernels.dropout import Dropout
from shardwise.kernels.lora_linear import Backend, BackwardHalf, Linear, load_backend, lora_linear
from shardwise.models.dtypes import autocast_dtype
from shardwise.models.kinds import SHARED_INPUTS
from shardwise.models.patches.dropout import SlotDropout

if TYPE_CHECKING:
    from shardwise.models.causal_lm import CausalLM

OTHER_DTYPE = "set training.precision to bfloat16, or lora.kernel to auto"

Kernel = Literal["auto", "torch", "triton", "cuda", "peft"]
"""As `lora.kernel` has it."""


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let the plain adapters of a part compute with the kernel that `lora.kernel` asks for."""
    if cfg.lora and has_plain_layers(part.hf):
        use_lora_kernel(
            part.hf, cfg.lora.kernel, device, cfg.training.precision, part.backward_half
        )


def use_lora_kernel(
    model: nn.Module,
    kernel: Kernel,
    device: torch.device,
    precision: str = "float32",
    half: BackwardHalf | None = None,
) -> str:
    """Let the plain LoRA layers of a model, on any device yet, compute with a kernel that runs on `device`.

    Return its name; with `peft` nothing is replaced. Call it once the model's dropouts are `SlotDropout`s, and before a
    strategy wraps them. `half` says which half of a backward runs, in a pipeline whose schedule has two. Raises
    UserError as `kernel_for`.
    """
    kernel, backend = kernel_for(model, kernel, device, precision)
    if backend is None:
        return kernel
    for layer in _plain_layers(model):
        _Shared([layer], backend, half)
    for parent in list(model.modules()):
        inner: list[tuple[str, Any]] = list(parent.named_modules())
        together = _alike(
            [module for path, module in inner if path in SHARED_INPUTS and _is_plain(module)]
        )
        if len(together) > 1:
            shared = _Shared(together, backend, half)
            parent.forward = shared.within(parent.forward)
    return kernel


def kernel_for(
    model: nn.Module, kernel: Kernel, device: torch.device, precision: str
) -> tuple[Kernel, Backend | None]:
    """What `kernel` comes to for the plain LoRA layers of a model, and its backend; None for `peft`, which has none.

    UserError if it cannot run on `device`, or not with what `training.precision` makes it multiply.
    """
    if kernel == "peft":
        return kernel, None
    kernel, backend = backend_of(kernel, device)
    dtype = autocast_dtype(precision)
    for layer in _plain_layers(model):
        linear = _linear(layer)
        if why := backend.refused([dtype] if dtype else [linear.weight.dtype, linear.a.dtype]):
            raise UserError(f"lora.kernel is {kernel}, but {why}; {OTHER_DTYPE}")
    return kernel, backend


def has_plain_layers(model: nn.Module) -> bool:
    """Return whether a model has adapters that a kernel of kernels/lora_linear computes."""
    return bool(_plain_layers(model))


def backend_of(kernel: Kernel, device: torch.device) -> tuple[Kernel, Backend]:
    """The backend of that name; `auto`: on a GPU Triton's where it can run, else torch's. UserError if it cannot."""
    if kernel == "auto":
        kernel = (
            "triton" if device.type == "cuda" and _why_not("triton", device) is None else "torch"
        )
    if why := _why_not(kernel, device):
        raise UserError(f"lora.kernel is {kernel}, but {why}; use auto or torch")
    return kernel, load_backend(kernel)


def _why_not(kernel: str, device: torch.device) -> str | None:
    try:
        return load_backend(kernel).missing(device)
    except ImportError as error:
        return f"{error.name} is not installed (pip install {error.name})"


def _plain_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_plain(module)]


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is PeftLinear
        # A linear of a model's own code may compute something else.
        and type(module.get_base_layer()).forward in (nn.Linear.forward, Conv1D.forward)
        and len(module.lora_A) == 1
        and not module.lora_variant
        and not any(module.lora_bias.values())
    )


def _alike(layers: list[PeftLinear]) -> list[PeftLinear]:
    """Those like the first: of its rank, dtype and dropout."""

    def traits(layer: PeftLinear) -> object:
        (name,) = layer.lora_A
        factor, dropout = layer.lora_A[name], layer.lora_dropout[name]
        return factor.weight.shape, factor.weight.dtype, getattr(dropout, "p", 0.0)

    return [layer for layer in layers if traits(layer) == traits(layers[0])]


class _Shared:
    """Layers of one input, and what those that were not called yet will give for it."""

    def __init__(
        self, layers: list[PeftLinear], backend: Backend, half: BackwardHalf | None
    ) -> None:
        self.layers = layers
        self.backend = backend
        self.half = half
        self.x: torch.Tensor | None = None
        self.version = 0
        self.waiting: dict[int, torch.Tensor] = {}  # by place in `layers`
        for place, layer in enumerate(layers):
            assert all(
                isinstance(dropout, SlotDropout | nn.Identity)
                for dropout in layer.lora_dropout.values()
            )
            layer.forward = self._forward(place, PeftLinear.forward.__get__(layer))

    def _forward(
        self, place: int, otherwise: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        layer = self.layers[place]
        (own,) = layer.lora_A

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if (
                args
                or kwargs
                or layer.disable_adapters
                or layer.merged
                or layer.active_adapters != [own]
            ):
                return otherwise(x, *args, **kwargs)
            return self.compute(place, x)

        return forward

    def compute(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """What the layer at a place gives for x."""
        version = _version(x)
        if len(self.layers) == 1 or version is None:
            (y,) = _compute([self.layers[place]], x, self.backend, self.half)
            return y
        if x is self.x and self.version == version and place in self.waiting:
            return self.waiting.pop(place)
        if self.waiting:  # not called together after all
            (y,) = _compute([self.layers[place]], x, self.backend, self.half)
            return y
        ys = _compute(self.layers, x, self.backend, self.half)
        self.x, self.version = x, version
        self.waiting = {other: y for other, y in enumerate(ys) if other != place}
        return ys[place]

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of the module that holds the layers: nothing outlives it."""

        def forgetting(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:  # also when checkpointing has all it wants and ends the recomputation here
                self.x, self.waiting = None, {}

        return forgetting


def _linear(layer: PeftLinear) -> Linear:
    (name,) = layer.lora_A
    base: Any = layer.get_base_layer()
    weight = base.weight.t() if isinstance(base, Conv1D) else base.weight
    factors: Any = (layer.lora_A[name], layer.lora_B[name])
    return Linear(weight, base.bias, *(factor.weight for factor in factors), layer.scaling[name])


def _version(x: torch.Tensor) -> int | None:
    """How often x was changed in place; None where it does not tell."""
    if torch.compiler.is_compiling():
        return 0
    return None if x.is_inference() else x._version


def _compute(
    layers: list[PeftLinear], x: torch.Tensor, backend: Backend, half: BackwardHalf | None
) -> tuple[torch.Tensor, ...]:
    linears = [_linear(layer) for layer in layers]
    dropouts: list[Any] = [next(iter(layer.lora_dropout.values())) for layer in layers]
    drop = None
    if isinstance(dropouts[0], SlotDropout) and dropouts[0].active:
        drop = Dropout(
            dropouts[0].p, torch.stack([own.seeds(x) for own in dropouts]), dropouts[0].features
        )
    try:
        return lora_linear(x, linears, drop, backend, half)
    except UserError as error:  # only a forward knows the dtype of its input
        raise UserError(f"lora.kernel: {error}: {OTHER_DTYPE}") from None
