"""How each block and parameter of a model is sharded over a number of tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter
from math import prod

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.models.names import hf_name, in_use, is_adapter, is_lengths
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.models.stored import stored_in
from shardwise.models.tensor_cuts import BlockSplit, DimCut, Indivisible
from shardwise.models.weights import weights_of


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
    units = {name: Counter[str]() for name in ("", *(layer.name for layer in spec.layers))}
    for row in weights_of(hf, spec):
        if row.role == "ends" or row.is_adapter or len(row.shape) < 2:
            continue
        rows = cuts[row.name].rows if row.name in cuts else None
        share = 1.0 if rows is None else rows.num_shared / rows.size
        layer = row.layer.name if row.layer else ""
        module = row.path.removeprefix(f"{layer}.").rpartition(".")[0]
        units[layer][module] += round(share * prod(row.shape) * row.dtype.itemsize)
    return [+sizes for sizes in (*units.values(), Counter())]


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
    cuts: dict[str, DimCut] = {}
    for row in weights_of(block):
        cut = split.weights.get(row.path)
        if cut is None:
            continue
        goes_in = _goes_in(row.owner, cut)
        if not row.part:
            cuts[row.name] = cut
        elif row.is_adapter and (row.part == "lora_A") == goes_in:
            cuts[row.name] = DimCut(int(goes_in), cut.rows)
    for path, matrix in stored_in(block).items():
        if hf_name(path) in split.weights:
            cuts |= {f"{path}.{n}": cut for n, cut in matrix.cuts(split.weights[hf_name(path)])}
    return cuts


def rows_in(block: nn.Module, split: BlockSplit) -> dict[str, DimCut]:
    """Return the linears of a block whose input features are cut, by their path there."""
    cuts = {}
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not is_adapter(f"{path}."):
            cut = split.weights.get(hf_name(f"{path}.weight"))
            if cut is not None and _goes_in(type(module), cut):
                cuts[path] = cut
    return cuts


def cut_rows(block: nn.Module, split: BlockSplit) -> tuple[int, ...]:
    """Return the rows of each matrix under DoRA of which a rank has a part of each row."""
    layers = [
        block.get_submodule(path.removesuffix(".base_layer")) for path in rows_in(block, split)
    ]
    magnitudes = [part for layer in layers for part in layer.modules() if is_lengths(part)]
    return tuple(magnitude.weight.numel() for magnitude in magnitudes)


def _goes_in(owner: type[nn.Module], cut: DimCut) -> bool:
    """Return whether a linear [out, in], Conv1D [in, out] or stack [E, out, in] is cut by input."""
    if issubclass(owner, nn.Linear):
        return cut.dim == 1
    return cut.dim == (0 if issubclass(owner, Conv1D) else 2)
