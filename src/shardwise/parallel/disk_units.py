"""Units that disk offload reads together: the layers and the ends of a model, and where each one
lies.

A tensor that is not in memory is a stand-in of its shape: one NaN, expanded, so that nobody
computes with it unnoticed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from shardwise.models.part import ModelPart
from shardwise.models.storages import plain_tensors

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes, as torch's own memory does."""
PAGE = 4096
"""Units begin at a multiple of so many bytes."""
ENDS = ("", "after the layers")
"""The places before the layers and after them."""


def stand_in(
    like: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Return one number, a NaN where there is one, that is seen as a tensor of this shape."""
    dtype, device = dtype or like.dtype, device or like.device
    number = torch.full((1,), torch.nan if dtype.is_floating_point else 1.0, device=device)
    return number.to(dtype).expand(like.shape)


def aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor of so many takes in the file."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Leaf:
    """A weight of this rank on disk, or its gradient, or a state of the optimizer."""

    stand_in: torch.Tensor
    begin: int
    """Where it begins in the file."""
    tensor: torch.Tensor | None = None
    """The tensor of the model or the optimizer; None: a state that was not made yet."""

    @property
    def nbytes(self) -> int:
        """Its bytes, without those that align the next one."""
        return self.stand_in.numel() * self.stand_in.itemsize

    def belong_to(self, tensor: torch.Tensor) -> None:
        """Have a tensor of the optimizer, which has made or loaded it."""
        self.tensor = tensor

    def set(self, values: torch.Tensor) -> None:
        """Let the tensor have these values, in place of those or the stand-in that it has."""
        if self.tensor is not None:
            self.tensor.data = values


@dataclass(eq=False)
class DiskUnit:
    """Tensors that are read together. In the file it lies in the order of the fields here."""

    frozen: list[Leaf]
    trained: list[Leaf]
    states: list[Leaf]
    gradients: list[Leaf]
    begin: int
    begin_trained: int
    begin_states: int
    begin_gradients: int
    end: int


class Pages(NamedTuple):
    """A part of a unit that is in memory at once: all weights, or what the optimizer updates."""

    unit: DiskUnit
    is_update: bool = False

    @property
    def begin(self) -> int:
        """Where it begins in the file."""
        return self.unit.begin_trained if self.is_update else self.unit.begin

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return (self.unit.end if self.is_update else self.unit.begin_states) - self.begin

    @property
    def leaves(self) -> Iterator[Leaf]:
        """The tensors in it."""
        yield from self.unit.states if self.is_update else self.unit.frozen
        yield from self.unit.trained


class Visit(NamedTuple):
    """A unit in the order of a forward, and the modules whose forwards use its weights."""

    unit: DiskUnit
    modules: Sequence[nn.Module]


class FileLayout:
    """The units of a rank, each with its place in the file."""

    def __init__(
        self,
        parts: Sequence[ModelPart],
        num_states: int,
        gradient: Callable[[torch.Tensor], torch.dtype] | None,
    ) -> None:
        """Give each parameter a place, and if it is trained so many states of it.

        Also its gradient, if there is a function that returns the dtype of that. A tied weight is
        used at both ends of a model, which may be two stages of this rank.
        """
        self.num_states, self.gradient = num_states, gradient
        self.trained: dict[DiskUnit, list[nn.Parameter]] = {}
        """The trained parameters of each unit."""
        self.states: dict[nn.Parameter, list[Leaf]] = {}
        self.gradients: dict[nn.Parameter, Leaf] = {}
        self.num_bytes = 0
        ends = dict.fromkeys(p for part in parts if part.spec.tied for p in named(part)[""])
        tied = self._unit([*ends])
        self.visits = [self._visits(part, tied if part.spec.tied else None) for part in parts]
        """Units of each part."""

    def _visits(self, part: ModelPart, tied: DiskUnit | None) -> list[Visit]:
        units = {
            place: tied if tied and place in ENDS else self._unit(parameters)
            for place, parameters in named(part).items()
        }
        is_there = dict(zip(ENDS, (part.spec.first, part.spec.last), strict=True))
        return [
            Visit(unit, _modules(part, place))
            for place, unit in units.items()
            if is_there.get(place, True)
        ]

    def _unit(self, parameters: Sequence[nn.Parameter]) -> DiskUnit:
        self.num_bytes = -(-self.num_bytes // PAGE) * PAGE
        begins = [self.num_bytes]
        trained = [p for p in parameters if p.requires_grad]
        frozen = [self._weight(p) for p in parameters if not p.requires_grad]
        begins.append(self.num_bytes)
        weights = [self._weight(p) for p in trained]
        begins.append(self.num_bytes)
        for p in trained:
            self.states[p] = [self._leaf(stand_in(own(p))) for _ in range(self.num_states)]
        begins.append(self.num_bytes)
        if self.gradient is not None:
            for p in trained:
                self.gradients[p] = self._leaf(stand_in(own(p), self.gradient(p)))
        states = [leaf for p in trained for leaf in self.states[p]]
        gradients = [self.gradients[p] for p in trained if p in self.gradients]
        unit = DiskUnit(frozen, weights, states, gradients, *begins, self.num_bytes)
        self.trained[unit] = trained
        return unit

    def _weight(self, parameter: nn.Parameter) -> Leaf:
        return self._leaf(own(parameter).data, own(parameter))

    def _leaf(self, values: torch.Tensor, tensor: torch.Tensor | None = None) -> Leaf:
        leaf = Leaf(values, self.num_bytes, tensor)
        self.num_bytes += aligned(leaf.nbytes)
        return leaf


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or the one that a DTensor wraps: `to_local` gives a view of it."""
    (inner,) = plain_tensors(tensor)
    return inner


def named(part: ModelPart) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of a part by place: before the layers, each layer, and after them.

    Where embedding and head have a weight in common, all outside of the layers come before them.
    """
    spec = part.spec
    before, after = ENDS
    by_place: dict[str, list[nn.Parameter]] = {
        place: [] for place in (before, *(f"{layer.name}." for layer in spec.layers), after)
    }
    last = () if spec.tied else (f"{spec.norm}.", f"{spec.head}.")
    for name, parameter in part.hf.named_parameters():
        layer = next((place for place in by_place if place and name.startswith(place)), before)
        by_place[after if name.startswith(last) else layer].append(parameter)
    return by_place


def _modules(part: ModelPart, place: str) -> list[nn.Module]:
    """Return the modules whose forwards use the weights of a place."""
    hf, spec = part.hf, part.spec
    before, after = ENDS
    if place not in ENDS:
        return [hf.get_submodule(place.removesuffix("."))]
    if place == after:
        return [hf.get_submodule(path) for path in (spec.norm, spec.head) if spec.last]
    # The embedding, and what a family has beside it, such as learned positions.
    assert place == before
    paths = (spec.embed, spec.norm, spec.head, *(layer.name for layer in spec.layers))
    inside = tuple(f"{path}." for path in paths)
    others = [
        module
        for path, module in hf.named_modules()
        if any(p is not None for p in module._parameters.values())
        and not f"{path}.".startswith(inside)
    ]
    return [hf.get_submodule(spec.embed), *others]
