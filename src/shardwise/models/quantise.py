"""Which matrices of a model are stored in 8 or 4 bits, and where that cannot be."""

import copy
from collections.abc import Container, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import Model, UserError
from shardwise.kernels.quantised import Format, block_of, dequantise, is_ordered, quantise
from shardwise.models.families import spec_of
from shardwise.models.load import weights
from shardwise.models.names import hf_name
from shardwise.models.published import base_of, is_kept_plain, method_of, stored_form
from shardwise.models.spec import ModelSpec
from shardwise.models.stored import QuantisedConv1D, QuantisedLinear, Stored, is_turned
from shardwise.models.tensor_plan import cuts_of
from shardwise.models.weight_files import OwnCodes
from shardwise.models.weights import weights_of

M = TypeVar("M", bound=nn.Module)


def quantise_frozen(hf: PreTrainedModel, spec: ModelSpec, fmt: Format) -> None:
    """Put `Stored` in the place of the frozen matrices of all layers, in place, on meta.

    A folder that is quantised as `fmt` already keeps its own scales (`published.stored_form`).
    """
    paths, fmt = [*stored_paths(hf, spec, fmt)], stored_form(hf.config, fmt)
    for path in paths:
        owner_path, _, name = path.rpartition(".")
        owner: Any = hf.get_submodule(owner_path)
        owner._modules[name] = Stored(owner._parameters.pop(name), fmt, is_turned(owner))
        if type(owner) in (nn.Linear, Conv1D):
            owner.__class__ = QuantisedLinear if type(owner) is nn.Linear else QuantisedConv1D


def stored_paths(hf: PreTrainedModel, spec: ModelSpec, base: Format) -> Iterator[str]:
    """Yield the names of the parameters that `model.base` stores in few bits.

    They are the matrices of linears and of stacks of experts in the layers, without those of
    `lora.modules_to_save`, which are trained or not used, and those that a folder quantised as
    `base` has in full.
    """
    is_own = base_of(hf.config) == base
    for row in weights_of(hf, spec):
        is_used = row.takes_few_bits and not row.is_original and not row.is_saved_copy
        if is_used and not (is_own and is_kept_plain(hf.config, row.target)):
            yield row.name


def as_stored(hf: PreTrainedModel, fmt: Format | Literal["none"]) -> PreTrainedModel:
    """Return a whole model on meta as `model.base` stores it: itself, or one that shares with it
    what is not stored in few bits.
    """
    return hf if fmt == "none" else _stored(hf, fmt)


@lru_cache(maxsize=2)
def _stored(hf: PreTrainedModel, fmt: Format) -> PreTrainedModel:
    stored = _with_own_modules(hf)
    quantise_frozen(stored, spec_of(hf.config, hf), fmt)
    return stored


def _with_own_modules(module: M) -> M:
    """Return a copy of a module whose modules are its own, and whose tensors are shared."""
    own = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        own.__dict__[kind] = dict(getattr(module, kind))
    children = module._modules.items()
    own.__dict__["_modules"] = {
        name: None if child is None else _with_own_modules(child) for name, child in children
    }
    return own


def read_back(
    hf: PreTrainedModel, model: Model, seed: int, base: Format, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of `load.weights`, as a run with `model.base` computes it.

    `hf` has no adapters. Matrices that are stored have the values that are read, in the parameter's
    dtype; all others are as they were.
    """
    fmt = stored_form(hf.config, base)
    own = OwnCodes(fmt, is_of_all=base_of(hf.config) == base)
    stored = set(stored_paths(hf, spec_of(hf.config, hf), base))
    dtypes = {name: tensor.dtype for name, tensor in hf.state_dict().items()}
    for name, tensor in weights(hf, model, seed, wanted, own):
        if name in stored and not own.is_own:
            own.check(name)
            check_blocks(hf, name, fmt)
            tensor = _read_back(hf, name, tensor, fmt, dtypes[name])
        elif method_of(hf.config) is not None:  # the folder may have it in few bits
            tensor = tensor.to(dtypes[name])
        yield name, tensor


def _read_back(
    hf: nn.Module, name: str, tensor: torch.Tensor, fmt: Format, dtype: torch.dtype
) -> torch.Tensor:
    if _is_turned(hf, name):
        return dequantise(quantised(tensor.mT, fmt, name), fmt, dtype).mT
    return dequantise(quantised(tensor, fmt, name), fmt, dtype)


def quantised(matrix: torch.Tensor, fmt: Format, name: str) -> dict[str, torch.Tensor]:
    """Return `quantise` of a real matrix; UserError where int4's scales, float16, overflow."""
    stored = quantise(matrix, fmt)
    if fmt.startswith("int4") and not stored["scales"].isfinite().all():
        raise UserError(
            f"{name} has values as large as {matrix.abs().max().item():.3g}, for which the scales "
            "of int4 (float16) are too small; use model.base: nf4 or int8"
        )
    return stored


def _is_turned(hf: nn.Module, name: str) -> bool:
    return is_turned(hf.get_submodule(name.rpartition(".")[0]))


def _width(hf: nn.Module, name: str) -> int:
    """Return the number of a matrix's inputs."""
    return hf.get_parameter(name).shape[-2 if _is_turned(hf, name) else -1]


def check_blocks(hf: nn.Module, name: str, fmt: Format) -> None:
    """Raise UserError where a run could not store a matrix with so many columns."""
    width = _width(hf, name)
    if width % block_of(fmt, width):
        raise UserError(
            f"{name} has {width} columns, which are no whole blocks of {block_of(fmt, width)}: no "
            f"run stores it as {fmt}; use int8"
        )


def rounding_of_merge(
    hf: PreTrainedModel, merged: Mapping[str, torch.Tensor], model: Model, seed: int, base: Format
) -> tuple[float, float]:
    """Return how far storing the merged matrices as `base` once more would move them, and how far
    the merge has moved them.

    Both are root mean squares over all matrices that are stored, relative to that of the merged
    ones. `merged`: the weights by the names of `hf`, which has no adapters.
    """
    stored = set(stored_paths(hf, spec_of(hf.config, hf), base))
    squares = torch.zeros(3, dtype=torch.float64)
    for name, before in read_back(hf, model, seed, base, stored):
        if name in stored and _width(hf, name) % block_of(base, _width(hf, name)) == 0:
            after = merged[name]
            again = _read_back(hf, name, after, base, torch.float32)
            parts = (again - after, after - before, after)
            squares += torch.stack([part.double().square().sum() for part in parts])
    again, moved, size = squares.sqrt().tolist()
    return again / size, moved / size


def problem(hf: PreTrainedModel, spec: ModelSpec, base: Format, num_ranks: int) -> str | None:
    """Return a matrix that has no whole blocks in each of so many shares along `tp`, if any."""
    fmt = stored_form(hf.config, base)
    cuts = cuts_of(hf, spec, num_ranks) if num_ranks > 1 else {}
    for name in stored_paths(hf, spec, base):
        dims, width = hf.get_parameter(name).dim(), _width(hf, name)
        lengths = [width]
        if name in cuts and cuts[name].dim == dims - (2 if _is_turned(hf, name) else 1):
            lengths = [segment.length for segment in cuts[name].rows.segments]
            if is_ordered(fmt):
                return f"the inputs of {hf_name(name)} are in an order of their own (desc_act)"
        if is_ordered(fmt) and dims == 3:
            return f"the experts of {hf_name(name)} have an order of inputs each (desc_act)"
        block = block_of(fmt, width)
        for length in lengths:
            if length % block:
                columns = f"{length} columns on a rank, which are no whole blocks of {block}"
                return f"{hf_name(name)} has {columns}"
    return None
