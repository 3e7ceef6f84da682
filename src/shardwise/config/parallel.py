"""How a run is split over processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shardwise.config.plugins import names_in
from shardwise.config.section import KeyFacts, Section, require, with_facts

STRATEGY_NAMES = names_in("strategies")
"""The data-parallel strategies."""
if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[(*STRATEGY_NAMES, "zero3")]


@dataclass(frozen=True)
class Parallel(Section):
    """How the run is split over processes."""

    facts: ClassVar[KeyFacts] = KeyFacts(resumable=True, timed=False, decides="layout")

    data: StrategyName = with_facts("single", searched=True)
    """The data-parallel strategy, over the processes that the other axes leave; `zero3` is another
    name of `fsdp2`."""
    dp_replicate: int = with_facts(1, between=(1, 1_000_000), searched=True)
    """fsdp2: the number of replicas of the sharded model (HSDP); each is sharded over the rest."""
    reshard_after_forward: bool = with_facts(True, searched=True)
    """fsdp2: free a layer's gathered weights after its forward, and gather them again for its
    backward."""
    fsdp1_wrap: Literal["separate", "naive"] = with_facts("separate", follows=True)
    """fsdp1: `separate`: each layer has a flat parameter of trainable weights and one of frozen
    weights. `naive`: it has one of all, in which frozen weights need memory for gradients too."""
    offload: Literal["none", "optimizer", "all", "disk"] = with_facts("none", searched=True)
    """Parts that stay on the CPU: the optimizer's states and step (single, ddp, fsdp2), or these
    and the sharded weights and gradients (fsdp2). `disk`: weights and states lie in a file, and
    three of the model's layers or ends are in memory (single, ddp)."""
    offload_folder: str | None = None
    """The folder, on a local disk, of the files of `offload: disk`, which have no names and end
    with the run; null: the output folder."""
    tp: int = with_facts(1, between=(1, 1_000_000), searched=True)
    """Tensor: the number of ranks over which each layer's weights are sharded."""
    sequence_parallel: bool = with_facts(False, searched=True)
    """Tensor: between the blocks of layers, each rank holds 1/tp of the tokens."""
    cp: int = with_facts(1, between=(1, 1_000_000), searched=True)
    """Context: the number of ranks over which the tokens of each row are cut."""
    cp_attention: Literal["auto", "ring", "gather", "ulysses"] = with_facts("auto", follows=True)
    """Context: how attention meets the keys of other ranks. `ring`: keys and values go from rank to
    rank while attention is computed. `gather`: all ranks gather all of them. `ulysses`: ranks
    exchange tokens for heads. `auto`: the way of equal work that sends fewest bytes."""
    ep: int = with_facts(1, between=(1, 1_000_000), searched=True)
    """Experts: the number of ranks over which the routed experts of each layer are spread. For the
    rest of the model they are data-parallel or context-parallel ranks."""
    pp: int = with_facts(1, between=(1, 1_000_000), searched=True)
    """Pipeline: the number of ranks over which the layers are distributed."""
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
        "interleaved-zero-bubble",
        "zbv",
        "dualpipe-v",
    ] = with_facts("1f1b", searched=True)
    """Pipeline: the order in which a rank runs the forwards and backwards of micro-batches."""
    virtual_stages: int | None = with_facts(None, between=(1, 10_000), searched=True)
    """Pipeline: stages per rank; null: 1 for gpipe and 1f1b, 2 for the other schedules."""
    split: Literal["balanced", "dynamic", "uniform", "parameters"] | list[int] = with_facts(
        "balanced", searched=True
    )
    """Pipeline: `balanced`: the shortest step, by measured costs (`shardwise split --profile`) or
    else by FLOPs. `dynamic`: that at first; layers then move where the times of a run's own steps
    say so. `uniform`: equal numbers of layers. `parameters`: equal numbers of parameters. A list
    gives the number of layers in each stage."""
    speeds: list[float] | None = with_facts(None, follows=True)
    """Pipeline: how fast each rank computes, as `[1, 0.5]` where the second one takes twice as
    long; null: all alike."""
    memory_limit_gib: float | list[float] | None = None
    """Pipeline: the most GiB that a rank may hold of weights, gradients, optimizer states and
    activations in flight; a list has a number for each rank."""

    @property
    def num_virtual(self) -> int:
        """Pipeline stages per rank."""
        return self.virtual_stages or (1 if self.schedule in ("gpipe", "1f1b") else 2)

    @property
    def ranks_of_a_model(self) -> int:
        """The ranks that compute a row together."""
        return self.pp * self.cp * self.tp

    @property
    def offloads(self) -> bool:
        """Whether a part of a rank's states lies outside of its device's memory."""
        return self.offload != "none"

    def __post_init__(self) -> None:
        if self.data == "zero3":
            object.__setattr__(self, "data", "fsdp2")
        super().__post_init__()
        for key in ("memory_limit_gib", "speeds"):
            given = getattr(self, key)
            numbers = given if isinstance(given, list) else [1.0 if given is None else given]
            require(
                all(0 < number < math.inf for number in numbers),
                f"parallel.{key} is {given}; give positive numbers, or leave it out",
            )
