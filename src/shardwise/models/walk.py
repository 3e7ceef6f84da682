"""The walk of a layer: its operations on a tape of sizes, in the order in which they run."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from shardwise.kernels.quantised import Format
from shardwise.models.names import adapter_layers, hf_name, is_adapter
from shardwise.models.operations import TapedBlock
from shardwise.models.parameters import Adapter, Parameter
from shardwise.models.spec import LayerSpec
from shardwise.models.tape import Slot, Tape, Tensor
from shardwise.models.tensor_cuts import unwrapped


def walk_of(
    module: nn.Module, layer: LayerSpec, config: PretrainedConfig, needs_input: bool
) -> Tape:
    """Return what a layer of a model on any device does with one token.

    `needs_input`: the backward goes on below it.
    """
    tape, size = Tape(), next(module.parameters()).itemsize
    block = taped(
        *(tape, module, config),
        rows=1,
        length=1,
        hidden=size,
        cast=None,
        is_windowed=is_windowed(layer),
    )
    x = tape.tensor(config.hidden_size, size)
    if needs_input:
        x.slot = Slot(x.num_bytes)
    run_layer(block, layer, x, num_shares=1)
    tape.forget()
    return tape


def is_windowed(layer: LayerSpec | None) -> bool:
    """Return whether attention of a layer is over a window."""
    return layer is not None and "sliding" in layer.kind


def taped(
    tape: Tape,
    module: nn.Module,
    config: PretrainedConfig,
    cuts: Iterable[tuple[str, int, int]] = (),
    stored: Mapping[str, Format] = MappingProxyType({}),
    **options: Any,
) -> TapedBlock:
    """Return a layer, or another module, on a tape.

    `cuts`: names of parameters of which a rank has a part, a dim, and its size there.
    """
    return TapedBlock(tape, **tables_of(module, config, cuts, stored), **options)


def tables_of(
    module: nn.Module,
    config: PretrainedConfig,
    cuts: Iterable[tuple[str, int, int]],
    stored: Mapping[str, Format],
) -> dict[str, Any]:
    """Return what `taped` reads off a module, whatever runs on it."""
    parameters, adapters = _tensors_of(module, cuts, stored)
    return {
        "parameters": parameters,
        "adapters": adapters,
        "config": config,
        "is_rotated": all(_is_rotated(m, config) for m in module.modules()),
        "is_transposed": any(isinstance(unwrapped(m), Conv1D) for m in module.modules()),
        "buffers": frozenset(name for name, _ in module.named_buffers()),
    }


def _is_rotated(module: nn.Module, config: PretrainedConfig) -> bool:
    """Return False for a module whose layer has no rotary positions, in a model that has some."""
    thetas, number = getattr(config, "layer_rope_theta", None), getattr(module, "layer_idx", None)
    has_angles = not thetas or number is None or thetas[number] != 0
    return has_angles and getattr(module, "use_rope", True)


def _tensors_of(
    module: nn.Module, cuts: Iterable[tuple[str, int, int]], stored: Mapping[str, Format]
) -> tuple[dict[str, Parameter], dict[str, Adapter]]:
    """Return the parameters of a module by transformers' names, and its adapters by path."""
    sizes: dict[str, dict[int, int]] = defaultdict(dict)
    for name, dim, size in cuts:
        sizes[name][dim] = size
    local: dict[nn.Parameter, Parameter] = {}
    parameters = {}
    for name, p in module.named_parameters():
        shape = tuple(sizes[name].get(dim, size) for dim, size in enumerate(p.shape))
        local[p] = Parameter(shape, p.itemsize, p.requires_grad, stored.get(name), name)
        # Under a name of its own, as PEFT may have wrapped the module itself.
        full = f"module.{name}"
        if not is_adapter(name) and ".original_module." not in full:
            parameters[hf_name(full).removeprefix("module.")] = local[p]
    adapters = {}
    for path, adapter in adapter_layers(module).items():
        factors: list[Any] = [*adapter.lora_A.values(), *adapter.lora_B.values()]
        if factors:
            a, b = (local[factor.weight] for factor in factors)
            lengths = [local[p] for p in adapter.lora_magnitude_vector.parameters()]
            adapters[path] = Adapter(a, b, lengths[0] if lengths else None)
    return parameters, adapters


def run_layer(block: TapedBlock, layer: LayerSpec, x: Tensor, num_shares: int) -> Tensor:
    """Return the output of a layer: norms, mixers, feed-forward and the residual sums.

    `num_shares`: ranks that share the tokens between blocks.
    """
    norms = layer.norms
    residual, h = x, x
    del x
    if f"{norms.before}.weight" in block.parameters:
        h = norm_of(block, norms.before, h)
    is_after = f"{norms.after}.weight" in block.parameters
    is_between = f"{norms.between}.weight" in block.parameters
    if layer.feed_forwards and not (is_after or is_between):  # Both take the same, Cohere's.
        attended = _side_by_side(block, layer.mixers, h, num_shares)
        h = _side_by_side(block, layer.feed_forwards, h, num_shares)
        return block.sum(block.sum(residual, attended), h)
    h = _side_by_side(block, layer.mixers, h, num_shares)
    if is_after:
        h = norm_of(block, norms.behind or norms.between, h)
    h = block.sum(residual, block.multiplied(h, "residual_multiplier"))
    if layer.feed_forwards:
        residual = h
        if norms.behind or not is_after:
            h = norm_of(block, norms.between, h)
        h = _side_by_side(block, layer.feed_forwards, h, num_shares)
        if is_after:
            h = norm_of(block, norms.after, h)
        h = block.sum(residual, block.multiplied(h, "residual_multiplier"))
    block.tape.named.clear()
    return h


def norm_of(block: TapedBlock, name: str, x: Tensor) -> Tensor:
    """Return a layer's or the final norm: a layer norm where it has a bias, and Cohere's."""
    prefix = f"{name}." if name else ""
    size = block.parameters[f"{prefix}weight"].shape[0]
    if f"{prefix}bias" in block.parameters or hasattr(block.config, "layer_norm_eps"):
        return block.layer_norm(prefix, x, size)
    return block.rms_norm(f"{prefix}weight", x, size)


def _side_by_side(block: TapedBlock, blocks: Sequence[Any], x: Tensor, num_shares: int) -> Tensor:
    """Return the sum of what blocks give for one input, which all ranks of `tp` have whole."""
    if num_shares > 1:
        sizes = [(x.numel * num_shares, x.itemsize)]
        (x,) = block.tape.run([x], sizes, forward_moves=(), backward_moves=())  # a message
    total: Tensor | None = None
    for one in blocks:
        assert one.kind.activations is not None, f"{one.kind.name} has no formula of its memory"
        out = one.kind.activations(block.within(one.path), x)
        if len(blocks) > 1 and (one.kind.mixes_tokens or one is not blocks[-1]):
            block.tape.hold(out)
        total = out if total is None else block.sum(total, out)
    assert total is not None
    if num_shares > 1:
        sizes = [(total.numel // num_shares, total.itemsize)]
        (total,) = block.tape.run([total], sizes, forward_moves=(), backward_moves=())
    return total
