"""Which modules hold routed experts, and how their weights are spread over ranks."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn

from shardwise.models.kinds.mixture import BIASES
from shardwise.models.names import hf_name, in_use
from shardwise.models.routed_experts import is_routed
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import DimCut, blocked, even, unwrapped
from shardwise.models.weights import weights_of

WHAT = "routed experts"


def experts_of(hf: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of what computes the routed experts of each layer that has some.

    The module is transformers', or what PEFT has put around it.
    """
    for layer in spec.layers:
        for block in layer.blocks:
            paths = {name.rpartition(".")[0] for name in block.kind.experts}
            for path in paths:
                block_path, block_module = _used(f"{layer.name}.{block.path}", hf)
                yield _used(path, block_module, f"{block_path}.")


def num_experts(experts: nn.Module) -> int:
    """Return how many experts a module that `experts_of` yields has, over all ranks."""
    return len(next(iter(unwrapped(experts).parameters())))


def experts_by_layer(hf: nn.Module, spec: ModelSpec) -> dict[str, int]:
    """Return the number of experts by the path of what `RoutedExperts` computes in each layer."""
    return {
        hf_name(path): num_experts(experts)
        for path, experts in experts_of(hf, spec)
        if is_routed(unwrapped(experts))
    }


def biases_of(hf: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path of the experts, bias [E]) of each layer whose router's scores have a bias."""
    for path, _ in experts_of(hf, spec):
        block = hf.get_submodule(path.rpartition(".experts")[0])
        for name, buffer in block.named_buffers():
            if name.rpartition(".")[2] in BIASES:
                yield path, buffer.view(-1)  # ERNIE has a row of them


def cuts_of(hf: nn.Module, spec: ModelSpec, num_ranks: int) -> dict[str, DimCut]:
    """Return how the weights of experts are cut, by their names in `hf`: a rank has some experts.

    PEFT puts the factors of a stack [E, out, in] side by side: A is [E R, in], with the R rows of
    an expert one after the other, B is [out, R E], with E columns for each of the R rows. A pair
    that all experts share is not cut. Raises Indivisible.
    """
    cuts: dict[str, DimCut] = {}
    sizes: dict[str, int] = {}
    for row in chain.from_iterable(weights_of(hf, spec, layer.name) for layer in spec.layers):
        if not row.is_of_stack or row.is_original:
            continue
        if not row.is_adapter:
            sizes.setdefault(row.path, row.shape[0])
        total = sizes[row.path]
        if row.num_sharing > 1:
            continue
        if row.part == "lora_B":
            rank = row.shape[1] // total
            cuts[row.name] = DimCut(1, blocked(num_ranks, (total,) * rank, WHAT))
        else:
            even(num_ranks, total, WHAT)  # all R rows of an expert stay on one rank
            cuts[row.name] = DimCut(0, even(num_ranks, row.shape[0], WHAT))
    return cuts


def _used(path: str, parent: nn.Module, prefix: str = "") -> tuple[str, nn.Module]:
    """Return the path and the module that computes, which may be PEFT's copy of one."""
    module = parent.get_submodule(path)
    used = in_use(module)
    copy = "" if used is module else ".modules_to_save.default"
    return f"{prefix}{path}{copy}", used
