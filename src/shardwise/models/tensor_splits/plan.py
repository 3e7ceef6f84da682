"""From a model and a number of ranks to what becomes of each of its blocks and parameters."""

from __future__ import annotations

from collections import Counter

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.models.families import FAMILIES
from shardwise.models.lora import adapter_layers
from shardwise.models.names import hf_name, in_use, is_adapter
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.models.tensor_splits.base import BlockSplit, Cut, Indivisible, unwrapped


def problem(hf: PreTrainedModel, spec: ModelSpec, num_ranks: int) -> str | None:
    """What cannot be cut into `num_ranks` shares, if anything."""
    if -(-spec.vocab_size // num_ranks) * (num_ranks - 1) >= spec.vocab_size:
        return f"{spec.vocab_size} tokens in its vocabulary"
    try:
        for layer in spec.layers:
            split_blocks(hf, spec, layer, num_ranks)
    except Indivisible as error:
        return str(error)
    return None


def split_blocks(
    hf: PreTrainedModel, spec: ModelSpec, layer: LayerSpec, num_ranks: int
) -> dict[str, BlockSplit | None]:
    """By path in the layer, how each of its blocks is cut; None for one that every rank computes whole.

    Raises Indivisible.
    """
    module = hf.get_submodule(layer.name)
    found: dict[str, BlockSplit | None] = {}
    for path, split in FAMILIES[spec.family].splits.items():
        wrapped = _submodule(module, path)
        if wrapped is not None:
            block = in_use(wrapped)
            name = path if block is wrapped else f"{path}.modules_to_save.default"
            found[name] = None if split is None else split(block, num_ranks)
    return found


def undealt_weights(hf: PreTrainedModel, spec: ModelSpec, num_ranks: int) -> list[Counter[str]]:
    """Bytes that a rank has of matrices that others have too, whole or in part: by name, of each unit of a split.

    Units are the embedding (and what else lies outside of the layers, as learned positions do), the layers, the head.
    """
    cuts = cuts_of(hf, spec, num_ranks)
    units = {f"{layer.name}.": Counter() for layer in spec.layers}
    outside: Counter[str] = Counter()
    for name, parameter in hf.named_parameters():
        if is_adapter(name) or parameter.dim() < 2 or name.startswith((f"{spec.embed}.", f"{spec.head}.")):
            continue
        rows = cuts[name].rows if name in cuts else None
        share = 1.0 if rows is None else rows.num_shared / rows.size
        layer = next(filter(name.startswith, units), "")
        module = hf_name(name.removeprefix(layer)).rpartition(".")[0]
        units.get(layer, outside)[module] += round(share * parameter.nbytes)
    return [+found for found in (outside, *units.values(), Counter())]


def cuts_of(hf: PreTrainedModel, spec: ModelSpec, num_ranks: int) -> dict[str, Cut]:
    """By name in the model, how each parameter within the layers is cut that is not whole. Raises Indivisible."""
    cuts: dict[str, Cut] = {}
    for layer in spec.layers:
        for path, split in split_blocks(hf, spec, layer, num_ranks).items():
            if split is not None:
                cut = parameter_cuts(hf.get_submodule(f"{layer.name}.{path}"), split)
                cuts |= {f"{layer.name}.{path}.{name}": rows for name, rows in cut.items()}
    return cuts


def parameter_cuts(block: nn.Module, split: BlockSplit) -> dict[str, Cut]:
    """By name in the block, with PEFT's layers in it: how each parameter is cut that is not whole.

    An adapter is cut as its base is: B with the features that come out, A with those that go in.
    """
    named = dict(block.named_parameters())
    cuts = {
        name: split.weights[hf_name(name)] for name in named if not is_adapter(name) and hf_name(name) in split.weights
    }
    names = {parameter: name for name, parameter in named.items()}
    for path, layer in adapter_layers(block).items():
        cut = split.weights.get(path) or split.weights.get(f"{path}.weight")
        if cut is not None:
            factor, dim = (layer.lora_A, 1) if _goes_in(unwrapped(layer), cut) else (layer.lora_B, 0)
            cuts |= {names[p]: Cut(dim, cut.rows) for p in factor.parameters()}
    return cuts


def rows_in(block: nn.Module, split: BlockSplit) -> dict[str, Cut]:
    """By path in the block, with PEFT's layers in it: the linears of which the features that go in are cut."""
    found = {}
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not is_adapter(f"{path}."):
            cut = split.weights.get(hf_name(f"{path}.weight"))
            if cut is not None and _goes_in(module, cut):
                found[path] = cut
    return found


def _goes_in(base: nn.Module, cut: Cut) -> bool:
    """A linear's weight is [out, in], a Conv1D's [in, out], a stack of experts [E, out, in]."""
    if isinstance(base, nn.Linear):
        return cut.dim == 1
    return cut.dim == (0 if isinstance(base, Conv1D) else 2)


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None
