"""A module that is not from transformers: what it gives, and the parts that strategies split.

The module takes a batch and returns its summed loss. It names its layers, and may give stages of
itself and the cuts of its weights. Parameters keep their names in the module.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from shardwise.base.batches import AnyBatch
from shardwise.config import RunConfig, require
from shardwise.config.ranges import shown
from shardwise.models.kinds.base import Kind
from shardwise.models.part import ModelPart, StagePart
from shardwise.models.slot_dropout import SlotDropout
from shardwise.models.spec import Block, LayerSpec, ModelSpec
from shardwise.models.tensor_cuts import BlockSplit, Indivisible, evenly, require_divides

OWN = "own"
"""The kind of the layers of such a module, and the `model_type` of its family."""


@runtime_checkable
class NamesLayers(Protocol):
    """Methods that every module must have beside its forward, `module(batch) -> summed loss`."""

    def layer_names(self) -> Sequence[str]:
        """Return the paths of its layers, such as `blocks.0`, in the order of the forward.

        A layer is a module that is called. Its weights are gathered together under FSDP, it may be
        computed again in the backward, and it is what a pipeline distributes.
        """
        ...


@runtime_checkable
class GivesStages(Protocol):
    """Further methods of a module that can be trained in a pipeline."""

    def cut(self, layers: Sequence[str], first: bool, last: bool) -> nn.Module:
        """Return a stage: a module of these layers, whose parameters keep their names.

        `first`: it holds what comes before all layers; `last`: what comes after them. It is called
        as `stage(batch, hidden)`, where `hidden` is what the stage below has returned (None for the
        first), and returns hidden states, the last one the summed loss.
        """
        ...

    def passed_on(self, batch: AnyBatch) -> torch.Tensor:
        """Return a tensor on meta like the hidden states between two stages for this batch."""
        ...


@runtime_checkable
class GivesCuts(Protocol):
    """Further methods of a module whose weights tensor parallelism can shard."""

    def tensor_cuts(self) -> "Mapping[str, TensorCut]":
        """Return how blocks are sharded, by their paths, each within a layer.

        A block takes hidden states as its first argument and returns the sum of what its `into`
        linears give. What is not named is on every rank.
        """
        ...


@dataclass(frozen=True)
class TensorCut:
    """How a block's linears are sharded; the scheme of Megatron-LM, arXiv 1909.08053."""

    out: tuple[str, ...]
    """Linears in the block that are sharded by the features that come out."""
    into: tuple[str, ...]
    """Linears in the block that are sharded by the features that go in; their outputs are added up
    over the ranks."""
    sizes: tuple[str, ...] = ()
    """Attributes of the block that its own code reads, such as a number of heads. Each is divided
    by the number of ranks."""

    def split(self, block: Any, num_ranks: int) -> BlockSplit:
        """Return the cut of a block over so many ranks; raises Indivisible."""
        drops = any(isinstance(m, nn.Dropout | SlotDropout) and m.p > 0 for m in block.modules())
        if drops and num_ranks > 1:  # its mask would be that of other features on each rank
            raise Indivisible("a dropout within a sharded block")
        for name in self.sizes:
            require_divides(num_ranks, getattr(block, name), name)
        weights = evenly(block, num_ranks, "features", out=self.out, into=self.into)
        return BlockSplit(weights, {name: getattr(block, name) // num_ranks for name in self.sizes})


@dataclass(frozen=True)
class OwnModel:
    """A module of the caller, read once: on meta, with its values aside."""

    module: nn.Module
    """The whole module with parameters on meta; buffers have their values."""
    spec: ModelSpec
    values: Mapping[str, torch.Tensor]
    """The values of its parameters and persistent buffers, by the keys of `interfaces.State`."""

    @classmethod
    def of(cls, module: nn.Module) -> "OwnModel":
        """Read a module, which stays as it is; UserError where it does not give what it must."""
        _check(module)
        on_meta = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            for p in module.parameters()
        }
        buffers = dict(module.named_buffers())
        values = {f"weights/{name}": p.detach() for name, p in module.named_parameters()}
        persistent = module.state_dict(keep_vars=True).keys() & buffers.keys()
        values |= {f"buffers/{name}": buffers[name].clone() for name in sorted(persistent)}
        # A deep copy takes what its memo has for copied already, so tied parameters stay tied.
        return cls(copy.deepcopy(module, {**on_meta}), _spec(module), values)

    @property
    def is_tied(self) -> bool:
        """Whether a parameter lies at more than one place."""
        num_places = Counter(p for _, p in self.module.named_parameters(remove_duplicate=False))
        return max(num_places.values()) > 1


class OwnPart(ModelPart):
    """A complete module of the caller."""

    def __init__(self, module: nn.Module, spec: ModelSpec, cfg: RunConfig) -> None:
        super().__init__(spec, cfg)
        self.hf = module

    def forward(self, batch: AnyBatch) -> torch.Tensor:
        """Return the summed loss (scalar, float32)."""
        self.dropout.start(batch)
        with self.autocast(batch):
            return _checked_loss(self.hf(batch))


class OwnStage(StagePart):
    """A stage that a module of the caller has cut from itself."""

    def __init__(
        self, module: nn.Module, spec: ModelSpec, cfg: RunConfig, complete: GivesStages
    ) -> None:
        """Take a stage, the paths of its layers, and the module that it was cut from."""
        super().__init__(spec, cfg)
        self.hf = module
        self.passed_on = complete.passed_on

    def forward(self, carried: torch.Tensor, microbatch: torch.Tensor) -> torch.Tensor:
        """Return hidden states, contiguous; the last stage returns the summed loss.

        `carried`: what the stage below has returned, which the first stage ignores. `microbatch`:
        int64 [1], the place of its batch in `microbatches`.
        """
        batch = self.microbatches[int(microbatch)]
        self.dropout.start(batch)
        with self.autocast(batch):
            output = self.hf(batch, None if self.spec.first else carried)
        if self.spec.last:
            return _checked_loss(output)
        like = self.passed_on(batch)
        require(
            isinstance(output, torch.Tensor) and _described(output) == _described(like),
            f"a stage returns {_described(output)}, but `passed_on` says {_described(like)}; let "
            "both say the same",
        )
        # A schedule may detach a stage's output in place, which a view does not allow.
        return output.clone() if output._is_view() else output.contiguous()


def own_stages(
    complete: nn.Module,
    spec: ModelSpec,
    boundaries: Sequence[int],
    chunks: Sequence[int],
    cfg: RunConfig,
) -> tuple[OwnStage, ...]:
    """Return the stages of a rank, one for each chunk in `chunks`; see `stage.stages`.

    UserError, the same on every rank, unless all chunks together have each parameter once.
    """
    assert isinstance(complete, GivesStages), "a rule refuses it in a pipeline"
    last = len(spec.layers) + 1
    made: list[OwnStage] = []
    places = Counter[str]()
    for chunk, (low, high) in enumerate(pairwise(boundaries)):
        layers = spec.layers[max(low - 1, 0) : high - 1]
        part = replace(spec, layers=layers, first=low == 0, last=high > last)
        module = complete.cut([layer.name for layer in layers], part.first, part.last)
        places.update(name for name, _ in module.named_parameters())
        if chunk in chunks:
            made.append(OwnStage(module, part, cfg, complete))
    expected = Counter(name for name, _ in complete.named_parameters())
    for name in sorted({*places, *expected}):
        require(
            places[name] == expected[name],
            f"the stages that `cut` returns hold {name} {places[name]} times, and the module has "
            f"it {expected[name]} times; let each parameter of the module lie in one stage",
        )
    return tuple(made)


def _check(module: nn.Module) -> None:
    """Raise UserError where a module does not give what every module must."""
    kind = type(module).__name__
    require(
        isinstance(module, NamesLayers),
        f"{kind} does not name its layers; give it a method layer_names() that returns their paths",
    )
    assert isinstance(module, NamesLayers)
    given: object = module.layer_names()
    names = [] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    require(
        isinstance(given, Iterable) and all(isinstance(name, str) for name in names),
        f"{kind}.layer_names() returns {shown(given)}; let it return a list of paths",
    )
    paths = {path for path, _ in module.named_modules()}
    require(bool(names), f"{kind}.layer_names() is empty; name at least one layer")
    for name in names:
        require(
            bool(name) and name in paths,
            f"{kind}.layer_names() has {name!r}, which is no module in it; give paths as "
            "named_modules() has them",
        )
        inside = [other for other in names if f"{other}.".startswith(f"{name}.")]
        require(
            len(inside) == 1,
            f"{kind}.layer_names() has {name} and {inside[-1]}, which lies in it; name one of them",
        )
    for name, parameter in module.named_parameters():
        require(
            not parameter.is_meta,
            f"{kind} has {name} on meta; build it on the CPU, with its initial values",
        )
    for path, part in module.named_modules():
        require(
            not isinstance(part, nn.modules.batchnorm._BatchNorm),
            f"{kind} has {path}, a batch norm, whose output depends on which rows share a "
            "micro-batch; use a layer or group norm",
        )
    trained = [p for p in module.parameters() if p.requires_grad]
    require(bool(trained), f"no parameter of {kind} requires a gradient; train at least one")
    for path, cut in _tensor_cuts(module).items():
        require(
            any(path.startswith(f"{name}.") for name in names) and path in paths,
            f"{kind}.tensor_cuts() has {path!r}, which is no module within a layer; give the path "
            "of a block, such as blocks.0.mlp",
        )
        for linear in (*cut.out, *cut.into):
            require(
                isinstance(dict(module.get_submodule(path).named_modules()).get(linear), nn.Linear),
                f"{kind}.tensor_cuts(): {path} has no linear {linear}; name nn.Linear modules",
            )


def _spec(module: nn.Module) -> ModelSpec:
    assert isinstance(module, NamesLayers)
    cuts = _tensor_cuts(module)
    layers = []
    for name in module.layer_names():
        blocks = tuple(
            Block(path.removeprefix(f"{name}."), Kind(OWN, split=cut.split))
            for path, cut in cuts.items()
            if path.startswith(f"{name}.")
        )
        layers.append(LayerSpec(name, OWN, "none", mixers=blocks, number=len(layers)))
    return ModelSpec(
        family=type(module).__name__,
        embed="",
        positions=None,
        layers=tuple(layers),
        norm="",
        head="",
        tied=False,
        hidden_size=0,
        vocab_size=0,
    )


def _tensor_cuts(module: nn.Module) -> Mapping[str, TensorCut]:
    return module.tensor_cuts() if isinstance(module, GivesCuts) else {}


def _checked_loss(loss: torch.Tensor) -> torch.Tensor:
    require(
        isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point(),
        f"the module returns {_described(loss)}; let it return its summed loss, one number",
    )
    return loss.float()


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of {list(value.shape)}"
