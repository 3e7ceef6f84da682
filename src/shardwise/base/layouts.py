"""Names of layouts, sizes of mesh axes, and the facts that the rules of `rules/` ask for.

A layout is how a run is split over processes: `single`, `ddp`, `fsdp2`, `pp-fsdp2-tp-sp` and so on.
Everything here is plain data, computed without torch or transformers.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import gcd, lcm
from typing import Any, Literal

from shardwise.base.schedule.context import ContextFacts
from shardwise.config import Parallel, RunConfig
from shardwise.config.plugins import plugins

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the mesh, the slowest first: those that communicate most come last, within a node."""
MODEL_AXES = ("pp", "cp", "ep", "tp")
"""Axes whose ranks compute parts of one model, in the order of layouts' names."""
EXPERT_AXES = ("dp_expert", "ep")
"""Axes that a mixture of experts makes of the axis of the data-parallel strategy: ranks with the
same experts, and neighbours that have different ones."""
TOKENS_IN_STEPS = 8
"""Tokens by which rows that end early differ: a matrix product has a few sizes, not every one."""
SHARED_IN_STEPS = 64
"""The same of a rank's share of a row under `cp`: even, as it may have two chunks, and no less than
what a convolution reads before its own tokens (config/rules/context.py)."""


class StrategyFacts:
    """Facts that others may ask of a data-parallel strategy: see `parallel/strategies/`."""

    name: str = ""
    """The value of `parallel.data`, which is the name of its file."""
    order: float = 0
    """Place among the strategies, the simplest first."""
    axis: Literal["dp_replicate", "dp_shard"] | None = "dp_replicate"
    """The axis of the mesh that it works over; None, of `single` alone: no ranks but a model's."""
    with_replicas: str | None = None
    """Name of its layouts with several replicas (`parallel.dp_replicate`); None: it has no
    replicas beside its shards."""
    sharded: tuple[str, ...] = ()
    """The parts of which a rank has a piece between steps, of weights, gradients and optimizer."""
    offloads: tuple[str, ...] = ("none",)
    """The values of `parallel.offload` that it may have."""
    is_searched: bool = True
    """Whether a plan tries it without being asked."""
    needs_ranks: bool = False
    """Whether it cannot run on a single rank."""
    frees_weights: bool = False
    """Whether it gathers weights that `parallel.reshard_after_forward` lets it free early."""
    gathers_copies: bool = False
    """Whether it gathers weights in the dtype that `training.cast: weights` gives them."""
    is_flat: bool = False
    """Whether parameters are views into flat ones, which hold plain floating-point tensors only."""
    unfit_for_stages: str = ""
    """Why it is refused in a pipeline, in words; "": it is proven there."""
    takes_late_sums: bool = True
    """Whether gradients may be completed after the last backward, as `tp` completes some."""
    shares: str = ""
    """Parts that its ranks divide among them, in words; "": those of others of its axis."""


ALONE = Parallel().data
"""The layout that splits nothing, and the strategy that it has."""


def strategies() -> Mapping[str, StrategyFacts]:
    """Return the data-parallel strategies by name, the simplest first."""
    return plugins("strategies")


def strategy_facts(parallel: Parallel) -> StrategyFacts:
    """Return the facts of a layout's strategy."""
    return strategies()[parallel.data]


@cache
def layout_names() -> tuple[str, ...]:
    """Return every layout that can be composed, offered or not.

    It is a pipeline over data parallelism over context parallelism over tensor parallelism; `hsdp`
    is fsdp2 with replicas, `sp` is sequence parallelism. `ep` spreads experts over ranks of the
    data and context axes.
    """
    return tuple(
        "-".join(filter(None, parts)) or ALONE
        for tensor, experts, context, pipeline, data in product(
            ("", "tp", "tp-sp"), ("", "ep"), ("", "cp"), ("", "pp"), ("", *data_parts())
        )
        for parts in [(pipeline, data, context, experts, tensor)]
        if data or context or not experts
    )


@cache
def data_parts() -> Mapping[str, tuple[str, int]]:
    """Return the parts of layouts' names that are data-parallel, the simplest first.

    Each has the name of its strategy, and the fewest replicas of what that shards.
    """
    split = [strategy for strategy in strategies().values() if strategy.axis is not None]
    parts = {strategy.name: (strategy.name, 1) for strategy in split}
    return parts | {s.with_replicas: (s.name, 2) for s in split if s.with_replicas is not None}


def replicated() -> Parallel:
    """Return the simplest layout of several ranks, each of which has the whole model."""
    return Parallel(data=next(iter(data_parts())))


def shortened(names: Iterable[str]) -> list[str]:
    """Return layouts in a few lines such as `ddp, fsdp2 [-cp][-tp[-sp]]`, for twelve of them.

    What stands in brackets may be left out. `single` is left out where more follows.
    """
    within = (*MODEL_AXES[1:], "sp")
    tails: dict[str, set[str]] = {}
    for name in names:
        parts = [part for part in name.split("-") if part != ALONE]
        tail = "".join(f"-{part}" for part in parts if part in within)
        base = "-".join(part for part in parts if part not in within)
        tails.setdefault(base or ALONE, set()).add(tail)
    alike: dict[tuple[str, ...], list[str]] = {}
    for base, offered in tails.items():
        alike.setdefault(_patterns(offered), []).append(base)
    return [
        f"{', '.join(bases)} {pattern}".rstrip()
        for patterns, bases in alike.items()
        for pattern in patterns
    ]


def _patterns(tails: set[str]) -> tuple[str, ...]:
    """Return patterns that together match these ends of names, each once: the largest first."""
    choices = [[("", [""])] for _ in range(3)]
    for options, part in zip(choices, ("-cp", "-ep", "-tp")):
        options += [(part, [part]), (f"[{part}]", ["", part])]
    with_sequence = ["-tp", "-tp-sp"]
    choices[2] += [("-tp[-sp]", with_sequence), ("[-tp[-sp]]", ["", *with_sequence])]
    patterns = {
        "".join(text for text, _ in chosen): {
            "".join(parts) for parts in product(*(ends for _, ends in chosen))
        }
        for chosen in product(*choices)
    }
    found, left = [], set(tails)
    while left:
        fits = [pattern for pattern, matched in patterns.items() if matched <= left]
        best = max(fits, key=lambda pattern: len(patterns[pattern]))
        found.append(best)
        left -= patterns[best]
    return tuple(found)


@dataclass(frozen=True)
class ModelFacts:
    """Facts that a rule may ask of a model with its adapters; `models/facts.py` finds it."""

    family: str
    """`model_type` of its config."""
    is_listed: bool
    """Whether the family is one that shardwise knows, which the parity matrix covers."""
    num_layers: int
    kinds: tuple[str, ...]
    """The kinds of its layers, without repetition."""
    is_tied: bool
    """Whether the head's weight is the embedding's."""
    num_positions: int | None
    """How many positions it has learned an embedding for; None: it takes any number."""
    unseeded_noise: tuple[str, float] | None
    """Key and value in config.json of random numbers that no seed of a run file reaches."""
    sees_ahead: tuple[str, Any] | None
    """Key and value in config.json by which its tokens see those after them."""
    has_router_loss: bool
    """Whether it has routers that are trained with a load-balancing loss."""
    has_router_bias: bool
    """Whether it has routers with a bias on their scores, which balances loads."""
    adds_positions: bool
    """Whether it adds positions to the embeddings before its first layer."""
    kinds_without_isolation: tuple[str, ...]
    """Kinds of its layers for which no test shows that they keep documents apart."""
    trains_in_16_bits: bool
    """Whether a trained weight has another dtype than float32."""
    has_plain_adapters: bool
    """Whether an adapter lies on a plain linear, which kernels/lora_linear computes."""
    saved_layers: str | None
    """A module of `lora.modules_to_save` that holds whole decoder layers."""
    blocks: tuple[str, ...]
    """Paths in a layer of the blocks that tensor parallelism shards."""
    num_experts: tuple[int, ...]
    """The routed experts of its layers that have any, without repetition."""
    indivisible: Callable[[int], str | None]
    """Return what of the model cannot be sharded over so many ranks of `tp`, or None."""
    has_fused_attention: bool = True
    """Whether its attention has a form for torch's scaled dot product."""
    has_own_attention: bool = False
    """Whether the project's function takes the place of transformers' functions of attention."""
    folds_adapters: bool = False
    """Whether PEFT adds adapters to a copy of a stack of experts, of a form that only it knows."""
    is_own: bool = False
    """Whether it is a module of the caller rather than a transformers model."""
    gives_stages: bool = False
    """Whether such a module cuts stages of itself."""
    gives_cuts: bool = False
    """Whether such a module says how its weights are sharded."""
    context: ContextFacts | None = None
    """How the tokens of its rows are cut over ranks; None: such a module's cannot be."""
    most_earlier_tokens: int = 0
    """How many tokens before its own a convolution of the model reads, at most."""
    odd_blocks: Callable[[Any, int], str | None] = lambda base, num_ranks: None
    """Return what has no whole blocks of a form of `model.base` in so many shares, or None."""
    num_in_8_bits: int = 0
    """How many of its trained weights are such that 8-bit AdamW keeps their moments in 8 bits."""
    cut_blocks: Callable[[int, int, int], str | None] = lambda tp, ep, num_shards: None
    """Return in words which of these weights has no whole blocks on a rank, for sizes of `tp` and
    `ep` and a number of data ranks over which states are sharded; None if all have whole ones."""
    num_float8_linears: int = 0
    """How many linears can multiply in 8 bits."""


@dataclass(frozen=True)
class AdapterFacts:
    """Facts that a rule may ask of the adapters of a run, before a model has them.

    `models/adapters/lora.py` finds it.
    """

    num_weights: int
    """How many weights get an adapter."""
    targets_to_save: tuple[str, ...]
    """Names of `lora.targets` whose weights `lora.modules_to_save` trains in full."""
    has_experts: bool
    """Whether an adapter lies on stacked experts."""
    highest_rank: int
    """The highest rank that a weight of the model can have."""
    renamed_by_peft: tuple[str, ...] = ()
    """Linears with an adapter, by their names in a layer, that PEFT takes for routed experts'."""
    contradicted: tuple[str, object, object] | None = None
    """A key of `lora`, its value, and the other one that the folder of `lora.path` has."""


@cache
def torch_version() -> tuple[int, int]:
    """Return the major and minor version of the installed torch, without importing it."""
    from importlib.metadata import version  # late: it imports much

    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Facts:
    """Facts that a rule may ask for, beside the run file."""

    num_ranks: int
    """Processes of the run."""
    model: ModelFacts | None = None
    """None before the model is read: rules on models do not apply yet."""
    adapters: AdapterFacts | None = None
    """None without LoRA, or before the model is read: rules on adapters do not apply."""
    torch_version: tuple[int, int] = field(default_factory=torch_version)


def layout_of(parallel: Parallel) -> str:
    """Return the name of a layout: what is in use, joined by hyphens, or `single`."""
    strategy = strategy_facts(parallel)
    name = (parallel.dp_replicate > 1 and strategy.with_replicas) or strategy.name
    in_use = {
        "pp": parallel.pp > 1,
        name: strategy.axis is not None,
        "cp": parallel.cp > 1,
        "ep": parallel.ep > 1,
        "tp": parallel.tp > 1,
        "sp": parallel.sequence_parallel,
    }
    return "-".join(name for name, is_in_use in in_use.items() if is_in_use) or ALONE


def parallel_of(layout: str) -> Parallel:
    """Return the section `parallel` of a layout, with two ranks along each axis in its name."""
    parts = layout.split("-")
    sizes: Any = {axis: 2 if axis in parts else 1 for axis in MODEL_AXES}
    given = (part_kind for part, part_kind in data_parts().items() if part in parts)
    data, replicas = next(given, (ALONE, 1))
    return Parallel(data, replicas, sequence_parallel="sp" in parts, **sizes)


def axis_sizes(cfg: RunConfig, num_ranks: int) -> dict[str, int]:
    """Return the ranks along each axis of `AXES`.

    What `pp`, `cp` and `tp` leave goes to the axis of the data-parallel strategy.
    Sizes that do not fit the number of ranks are rounded down, and a rule refuses them.
    """
    parallel = cfg.parallel
    sizes = dict.fromkeys(AXES, 1) | {axis: getattr(parallel, axis) for axis in ("pp", "cp", "tp")}
    ranks_for_data = num_ranks // parallel.ranks_of_a_model
    axis = strategy_facts(parallel).axis
    if axis is not None:
        replicas = parallel.dp_replicate if axis == "dp_shard" else 1
        sizes |= {"dp_replicate": replicas, axis: ranks_for_data // replicas}
    return sizes


def has_copies(cfg: RunConfig, num_ranks: int) -> bool:
    """Return whether ranks hold copies of one another's weights."""
    sizes = axis_sizes(cfg, num_ranks)
    joined = sizes["cp"] if context_joins_of(cfg) == "dp_replicate" else 1
    return sizes["dp_replicate"] * joined * sizes["tp"] > 1


def fitted(cfg: RunConfig, num_ranks: int) -> RunConfig:
    """Return an elastic run (`launch.min_nodes`) as it is on `num_ranks` of its ranks.

    Only data axes differ. `pp`, `cp`, `tp` and `ep` stay, and so do the rows of each step and
    micro-batch: a rank computes more micro-batches. Replicas of fsdp2 keep their number of shards
    where it divides the ranks; else there is one replica, whose ranks hold least. Rules refuse
    what is not possible.
    """
    all_ranks = cfg.launch.nodes * cfg.launch.processes
    if cfg.launch.min_nodes is None or num_ranks == all_ranks:
        return cfg
    parallel, ranks_for_data = cfg.parallel, num_ranks // cfg.parallel.ranks_of_a_model
    if parallel.dp_replicate > 1:
        num_shards = max(1, axis_sizes(cfg, all_ranks)["dp_shard"])
        replicas, left_over = divmod(ranks_for_data, num_shards)
        parallel = replace(parallel, dp_replicate=1 if left_over else max(1, replicas))
    if strategy_facts(parallel).needs_ranks and num_ranks == 1:  # there is nothing to shard over
        parallel = replace(parallel, data=ALONE)
    cfg = replace(cfg, parallel=parallel)
    if not has_copies(cfg, num_ranks):  # nothing can be compared
        cfg = replace(cfg, training=replace(cfg.training, check_copies_every=0))
    return cfg


def fewest_ranks(parallel: Parallel) -> int:
    """Return the fewest ranks of a run: of each replica those that hold all experts once."""
    if strategy_facts(parallel).axis is None:
        return parallel.ranks_of_a_model
    num_shards = parallel.ep // gcd(parallel.ep, parallel.cp)
    return parallel.ranks_of_a_model * parallel.dp_replicate * num_shards


def context_joins_of(cfg: RunConfig) -> str:
    """Return the axis that the data-parallel strategy works over, which `cp` is flattened into."""
    return strategy_facts(cfg.parallel).axis or "dp_replicate"


def num_strategy_ranks(cfg: RunConfig, sizes: Mapping[str, int]) -> int:
    """Return the ranks that the data-parallel strategy works over, with those of `cp`."""
    return sizes[context_joins_of(cfg)] * sizes["cp"]


def shard_dim(shape: Sequence[int], num_shards: int, taken: Collection[int] = ()) -> int | None:
    """Return the dim of a weight that data parallelism shards, of those that are not `taken`.

    It is the first that divides evenly. Where none does, it is dim 0, of which the last ranks hold
    less; or None if a dim is taken: then each data rank has all that there is.
    """
    dims = (dim for dim, size in enumerate(shape) if dim not in taken and size % num_shards == 0)
    return next(dims, None if taken else 0)


def num_data_ranks(cfg: RunConfig, num_ranks: int) -> int:
    """Return among how many ranks the rows of a global batch are divided."""
    sizes = axis_sizes(cfg, num_ranks)
    return sizes["dp_replicate"] * sizes["dp_shard"]


def num_microbatches(cfg: RunConfig, num_ranks: int) -> int:
    """Return the micro-batches that each rank computes in one optimizer step."""
    rows = cfg.training.global_batch_size // num_data_ranks(cfg, num_ranks)
    return rows // cfg.training.micro_batch_size


def length_steps(parallel: Parallel) -> int:
    """Return the tokens of which the length of a row is a multiple: `cp` and `tp` cut it evenly."""
    is_shared = "cp" in layout_of(parallel).split("-")
    tokens = SHARED_IN_STEPS if is_shared else TOKENS_IN_STEPS
    return parallel.cp * lcm(parallel.tp, tokens)
