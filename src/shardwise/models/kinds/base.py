"""Questions that the rest of the project may ask of a kind of block, and code that kinds share.

A block is a module of a decoder layer: a mixer, which mixes the tokens of a sequence, or a
feed-forward. Each kind of block has a file of its own beside this one. Names in it are those of
transformers' modules, within the block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import SplitBlock


class Core:
    """The function between the projections of a mixer, by its FLOPs per token of T tokens.

    Its *model* FLOPs are what the definition of the layer asks for, whatever computes it. Its FLOPs
    *as run*, by transformers' torch code (fused attention; recurrences in chunks, padded to full
    ones, or token by token), are what its node in `Kind.activations` says. The conventions are
    those of `models/counts.py`: a multiply-add is 2, and only products count.
    """

    def model_forward(self, sequence_length: int) -> float:
        """Return what the definition asks of a forward; a backward is twice that."""
        raise NotImplementedError


def no_cores(config: PretrainedConfig) -> tuple[Core, ...]:
    """Return the cores of a kind that has none."""
    return ()


def width_of_convolutions(block: nn.Module) -> int:
    """Return over how many tokens a block's convolutions reach; 1 without one."""
    widths = [m.kernel_size[0] for m in block.modules() if isinstance(m, nn.Conv1d)]
    return max(widths, default=1)


Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each parameter of a block by its name, as a rank of tensor parallelism has it."""


class Carried(NamedTuple):
    """Tensors that a block passes on to the tokens of another rank, for one row."""

    channels: int = 0
    """Channels of its convolution."""
    transition_numel: int = 0
    """Elements of its recurrence's transition, as its kernel's `summary` gives them."""
    state_numel: int = 0


def carries_nothing(config: PretrainedConfig, shapes: Shapes) -> Carried:
    """Return what a kind without convolution or recurrence passes on."""
    return Carried()


class Backend(NamedTuple):
    """How to know what computes a core on a device."""

    core: str
    """The name of the core, which stands in records."""
    chosen: Callable[[torch.device, torch.dtype], str]
    """Return `torch`, or the package whose kernels compute the core for inputs of a dtype."""
    takes_documents: bool = True
    """The package's kernels keep documents apart; with documents, plain torch runs otherwise."""
    takes_state: bool = True
    """They begin from a state; under `parallel.cp`, which passes one on, plain torch runs else."""
    is_slow_in_torch: bool = True
    """On a GPU the torch path is many times slower than what people use there."""


@dataclass(frozen=True)
class Kind:
    """One kind of block, or the variant of it that some families have."""

    name: str
    """`LayerSpec.kind` of a layer whose tokens such a block mixes. It stands in records and run
    files."""
    cores: Callable[[PretrainedConfig], tuple[Core, ...]] = no_cores
    """Return the core by the config of a model, in one part or several; empty where tokens do not
    meet, or meet in a weight like any other."""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    """Functions that the mixer's forward looks up in its module, and what computes each instead:
    it takes the Tokens, then what the mixer gives. They keep documents apart by themselves."""
    width: Callable[[Any], int] = width_of_convolutions
    """Return over how many tokens the convolutions of a block reach: `parallel.cp` gives a rank
    those before its own."""
    carries: Callable[[PretrainedConfig, Shapes], Carried] = carries_nothing
    """Return what a block passes on under `parallel.cp`, whose bytes are counted from it."""
    backends: tuple[Backend, ...] = ()
    """Backend of each of these functions."""
    split: SplitBlock | None = None
    """Return how tensor parallelism shards a block; None: every rank computes all of it."""

    mixes_tokens: bool = True
    """Carries something from one token to the next."""
    keeps_documents_apart: bool = False
    """`data.packing: isolated` is proven to keep documents apart in it
    (tests/models/patches/test_isolation.py)."""
    is_attention: bool = False
    """Is softmax attention: `lora.targets: attention` means its projections."""
    activations: Callable[[TapedBlock, Tensor], Tensor] | None = None
    """Return the output of a block for an input, with sizes in place of numbers (models/tape.py):
    so it says what a forward keeps for the backward, and how much memory both take."""

    shares_input: tuple[str, ...] = ()
    """Linears that, where they lie in one module, are called with one tensor: LoRA reads it
    once."""
    gates: tuple[str, ...] = ()
    """Linears that give a score rather than a projection; `lora.targets: auto` leaves them
    frozen."""
    gating: tuple[str, ...] = ()
    """Linears whose output only routes tokens or sets how fast a state decays and is written;
    weight decay leaves them alone. (The gate of an MLP or of a mixer's output weighs features: it
    is a weight like any other.)"""
    rates: tuple[str, ...] = ()
    """Parameters that set how fast a state decays, in some models matrices: no factors of a
    product, never decayed."""
    bypassed: tuple[str, ...] = ()
    """Linears whose weight is read past the module, by a fused GPU kernel or by the block itself,
    so that an adapter would do nothing."""
    experts: tuple[str, ...] = ()
    """Parameters that stack the weights of all routed experts, [E, out, in]."""
