"""How each block and parameter of a model is sharded over a number of tensor-parallel ranks."""

from collections import Counter
from collections.abc import Iterator
from math import prod

from torch import nn
from transformers import PreTrainedModel

from shardwise.models.names import hf_name, in_use, is_adapter, is_lengths
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.models.stored import is_turned, stored_in
from shardwise.models.tensor_cuts import BlockSplit, DimCut, Indivisible
from shardwise.models.weights import LINEARS, weights_of


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
        goes_in = cut.dim == (1 if issubclass(row.owner, LINEARS) else 2) - row.is_turned
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
        if isinstance(module, LINEARS) and not is_adapter(f"{path}."):
            cut = split.weights.get(hf_name(f"{path}.weight"))
            if cut is not None and cut.dim == 1 - is_turned(module):
                cuts[path] = cut
    return cuts


def whole_biases(block: nn.Module, split: BlockSplit) -> Iterator[tuple[nn.Module, str]]:
    """Yield owner and name of the whole biases of linears and stacks whose input is cut."""
    for row in weights_of(block):
        stem = row.path.removesuffix("bias")
        matrix = stem.removesuffix("_") if stem.endswith("_") else f"{stem}weight"
        if row.role == "bias" and row.path not in split.weights and matrix in split.weights:
            owner, _, name = row.name.rpartition(".")
            yield block.get_submodule(owner), name


def cut_rows(block: nn.Module, split: BlockSplit) -> tuple[int, ...]:
    """Return the rows of each matrix under DoRA of which a rank has a part of each row."""
    layers = [
        block.get_submodule(path.removesuffix(".base_layer")) for path in rows_in(block, split)
    ]
    magnitudes = [part for layer in layers for part in layer.modules() if is_lengths(part)]
    return tuple(magnitude.weight.numel() for magnitude in magnitudes)
