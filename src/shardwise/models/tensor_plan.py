"""How each block and parameter of a model is sharded over a number of tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.models.dora import Magnitude
from shardwise.models.lora import adapter_layers
from shardwise.models.names import hf_name, in_use, is_adapter
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.models.stored import stored_in
from shardwise.models.tensor_cuts import BlockSplit, DimCut, Indivisible, unwrapped


def problem(hf: PreTrainedModel, spec: ModelSpec, num_ranks: int) -> str | None:
    """Return what cannot be cut into `num_ranks` shares, if anything."""
    if -(-spec.vocab_size // num_ranks) * (num_ranks - 1) >= spec.vocab_size:
        return f"{spec.vocab_size} tokens in its vocabulary"
    try:
        for layer in spec.layers:
            split_blocks(hf, layer, num_ranks)
    except Indivisible as error:
        return str(error)
    return None


def split_blocks(hf: nn.Module, layer: LayerSpec, num_ranks: int) -> dict[str, BlockSplit | None]:
    """Return how each block of a layer is cut, by its path there; None where every rank has it all.

    Raises Indivisible.
    """
    module = hf.get_submodule(layer.name)
    splits: dict[str, BlockSplit | None] = {}
    for block in layer.blocks:
        wrapped = module.get_submodule(block.path)
        used = in_use(wrapped)
        path = block.path if used is wrapped else f"{block.path}.modules_to_save.default"
        splits[path] = None if block.kind.split is None else block.kind.split(used, num_ranks)
    return splits


def replicated_weights(hf: PreTrainedModel, spec: ModelSpec, num_ranks: int) -> list[Counter[str]]:
    """Return, by name, the bytes of matrices that a rank shares with others, for each unit.

    Units are the embedding (with what else lies outside of the layers, as learned positions do),
    the layers, and the head.
    """
    cuts = cuts_of(hf, spec, num_ranks)
    units = {f"{layer.name}.": Counter() for layer in spec.layers}
    outside: Counter[str] = Counter()
    for name, parameter in hf.named_parameters():
        is_ends = name.startswith((f"{spec.embed}.", f"{spec.head}."))
        if is_ends or is_adapter(name) or parameter.dim() < 2:
            continue
        rows = cuts[name].rows if name in cuts else None
        share = 1.0 if rows is None else rows.num_shared / rows.size
        layer = next(filter(name.startswith, units), "")
        module = hf_name(name.removeprefix(layer)).rpartition(".")[0]
        units.get(layer, outside)[module] += round(share * parameter.nbytes)
    return [+sizes for sizes in (outside, *units.values(), Counter())]


def cuts_of(hf: nn.Module, spec: ModelSpec, num_ranks: int) -> dict[str, DimCut]:
    """Return how each parameter within the layers that is not whole is cut, by its name.

    Raises Indivisible.
    """
    cuts: dict[str, DimCut] = {}
    for layer in spec.layers:
        for path, split in split_blocks(hf, layer, num_ranks).items():
            if split is not None:
                cut = parameter_cuts(hf.get_submodule(f"{layer.name}.{path}"), split)
                cuts |= {f"{layer.name}.{path}.{name}": rows for name, rows in cut.items()}
    return cuts


def parameter_cuts(block: nn.Module, split: BlockSplit) -> dict[str, DimCut]:
    """Return how each parameter of a block that is not whole is cut, by its name there.

    An adapter is cut as its base is: B and magnitudes with the features that come out, A with those
    that go in.
    """
    names = {parameter: name for name, parameter in block.named_parameters()}
    cuts = {
        name: split.weights[hf_name(name)]
        for name in names.values()
        if not is_adapter(name) and hf_name(name) in split.weights
    }
    for path, matrix in stored_in(block).items():
        if hf_name(path) in split.weights:
            cuts |= {f"{path}.{n}": cut for n, cut in matrix.cuts(split.weights[hf_name(path)])}
    for path, layer in adapter_layers(block).items():
        cut = split.weights.get(path) or split.weights.get(f"{path}.weight")
        if cut is None:
            continue
        goes_in = _goes_in(unwrapped(layer), cut)
        for factor in (layer.lora_A if goes_in else layer.lora_B).parameters():
            cuts[names[factor]] = DimCut(int(goes_in), cut.rows)
        for magnitude in () if goes_in else layer.lora_magnitude_vector.parameters():
            cuts[names[magnitude]] = DimCut(0, cut.rows)
    return cuts


def rows_in(block: nn.Module, split: BlockSplit) -> dict[str, DimCut]:
    """Return the linears of a block whose input features are cut, by their path there."""
    cuts = {}
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not is_adapter(f"{path}."):
            cut = split.weights.get(hf_name(f"{path}.weight"))
            if cut is not None and _goes_in(module, cut):
                cuts[path] = cut
    return cuts


def cut_rows(block: nn.Module, split: BlockSplit) -> tuple[int, ...]:
    """Return the rows of each matrix under DoRA of which a rank has a part of each row."""
    layers = [
        block.get_submodule(path.removesuffix(".base_layer")) for path in rows_in(block, split)
    ]
    magnitudes = [
        part for layer in layers for part in layer.modules() if isinstance(part, Magnitude)
    ]
    return tuple(magnitude.weight.numel() for magnitude in magnitudes)


def _goes_in(base: nn.Module, cut: DimCut) -> bool:
    """Return whether a linear [out, in], Conv1D [in, out] or stack [E, out, in] is cut by input."""
    if isinstance(base, nn.Linear):
        return cut.dim == 1
    return cut.dim == (0 if isinstance(base, Conv1D) else 2)
