"""Turn a user's run into a small one of the same layout, which a laptop's CPU can run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, lcm
from pathlib import Path
from typing import Any

import psutil

from shardwise.assembly.describe import Description, describe
from shardwise.base.layouts import axis_sizes, layout_of, num_data_ranks, strategy_facts
from shardwise.base.words import size as size_text
from shardwise.config import (
    Lora,
    Measure,
    Optimizer,
    Parallel,
    Recomputation,
    RunConfig,
    Training,
    UserError,
    require,
    rules,
)
from shardwise.config.section import facts_in
from shardwise.lab.proof.harness import ROWS, PairRows, RandomRows
from shardwise.lab.proof.shrink import Small, shrink
from shardwise.models import tensor_plan
from shardwise.models.families import FAMILIES, unproven_note

STEPS = 3
"""Optimizer steps that are compared."""
MAX_NORM, UPDATE_NORM, DECAY = 1e-4, 0.1, 0.01
"""The norm that gradients are clipped to, below that of any model; the norm of an update; the share
that weight decay takes off a weight in the first step."""
MOST_RANK = 8
"""The largest rank of adapters: the smallest width of a model's linear."""
BYTES_PER_PARAMETER = 24
"""Weight, gradient, and the copies of both that are compared, with the buffers of a layout."""
BYTES_PER_PROCESS = 300 * 2**20
"""Bytes of a process beside the parameters: libraries, activations, queues of messages."""


@dataclass(frozen=True)
class SmallRun:
    """A run that stands for the user's."""

    cfg: RunConfig
    num_ranks: int
    rows: RandomRows
    changes: Mapping[str, tuple[Any, Any]]
    """Old and new value of the numbers that became smaller, in config.json and in `parallel`."""
    num_parameters: tuple[int, int]
    """Parameters of the large and of the small model, without adapters."""
    notes: tuple[str, ...]

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes in use."""
        sizes = axis_sizes(self.cfg, self.num_ranks)
        return {axis: size for axis, size in sizes.items() if size > 1}

    def one_process(self) -> RunConfig:
        """Return the same run without its layout, and plain where an option changes no number."""
        training = replace(self.cfg.training, checkpointing="none", compile="none")
        return replace(self.cfg, parallel=Parallel(), training=training)


def small_run(cfg: RunConfig, nproc: int | None, own_precision: bool, folder: Path) -> SmallRun:
    """Return a small run of the layout of `cfg`; its model's config.json is written to `folder`.

    `nproc`: its processes; None: two along each axis in use. Raises UserError for a layout that the
    run cannot have, as training would, or that so many processes do not make.
    """
    require(
        not cfg.model.trust_remote_code,
        "model.trust_remote_code is true, but a model with code of its own is not made smaller; "
        "prove the layout with a small model of your own, and train that",
    )
    require(
        cfg.lora is None or cfg.lora.path is None,
        "lora.path is set, but an adapter of the whole model does not fit the small one that is "
        "proven; give lora.r, alpha and targets of that adapter, and lora.path null",
    )
    cfg, notes = _on_cpu(cfg)
    given = cfg.parallel
    parallel, num_ranks = _smaller_layout(given, nproc)
    # The run is checked as it is given, with as few data-parallel ranks as it may have and with as
    # many rows as these take: how many ranks it has, only its launcher knows.
    fewest = _fewest_ranks(given)
    facts = describe(_with_rows(cfg, fewest), fewest)
    stages = parallel.pp * parallel.num_virtual if parallel.pp > 1 else 1
    small = shrink(cfg.model, facts.spec, _named_modules(cfg.lora), stages, (given.tp, parallel.tp))
    small.config.save_pretrained(folder)
    parallel = replace(parallel, split=_split(given.split, len(small.layers)))
    adapters = cfg.lora and _smaller_adapters(cfg.lora, small)
    chosen = cfg.training.checkpointing
    if isinstance(chosen, Recomputation):
        notes.append("the ways to compute layers again take turns: other layers than the run's")
        chosen = _in_turn(cfg, len(small.layers))
    training = replace(cfg.training, checkpointing=chosen)
    cfg = replace(cfg, lora=adapters, parallel=parallel, training=training)
    cfg = _compared(cfg if own_precision else in_float32(cfg), folder)
    _check_memory(num_ranks, small.num_parameters[1])
    cfg = _with_rows(cfg, num_ranks)
    described = describe(cfg, num_ranks)
    if facts.spec.family not in FAMILIES:
        notes.append(unproven_note(facts.spec.family))
    if _shares_rows(facts, given.tp) and not _shares_rows(facts, parallel.tp):
        notes.append(
            f"{given.tp} ranks of tp share key/value heads or groups, which {parallel.tp} do not; "
            f"--nproc {num_ranks // parallel.tp * given.tp} proves that too"
        )
    rows = ROWS.get(cfg.objective, PairRows)(
        cfg.data.sequence_length, min(RandomRows.vocabulary, described.spec.vocab_size)
    )
    axes = {
        f"parallel.{key}": (getattr(given, key), getattr(parallel, key))
        for key in ("pp", "ep", "tp", "dp_replicate")
        if getattr(given, key) != getattr(parallel, key)
    }
    changes = {**small.changes, **axes}
    return SmallRun(cfg, num_ranks, rows, changes, small.num_parameters, tuple(notes))


def _named_modules(adapters: Lora | None) -> list[str]:
    """Return the modules that the section `lora` names."""
    return [] if adapters is None else [*adapters.names, *adapters.modules_to_save]


def _smaller_adapters(adapters: Lora, small: Small) -> Lora:
    """Return adapters of the small model, of the same scale and of a rank that its weights have."""
    adapters = adapters.with_rank_at_most(MOST_RANK)
    targets = adapters.targets
    if isinstance(targets, dict):
        targets = {new: size for name, size in targets.items() for new in small.named([name])}
    return replace(
        adapters,
        targets=small.named(targets) if isinstance(targets, list) else targets,
        modules_to_save=small.named(adapters.modules_to_save),
    )


def _on_cpu(cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the run with random weights on a CPU, and what cannot run there replaced and noted."""
    notes = []
    model = replace(cfg.model, init="random", tokenizer=None)
    training = replace(cfg.training, device="cpu")
    lora, preference = cfg.lora, cfg.preference
    if cfg.precomputes:
        notes.append("the reference computes in each step, and not before the first one")
        preference = preference.in_each_step()
    if model.attention in ("flash_attention_2", "flash", "efficient", "cudnn"):
        notes.append(f"attention runs by torch's choice, not by {model.attention}")
        model = replace(model, attention="auto")
    if training.loss == "triton":
        notes.append("the loss runs chunked, not by Triton's kernels")
        training = replace(training, loss="chunked")
    if training.compile not in ("none", "aot_eager"):
        notes.append(f"layers are compiled by aot_eager, not by {training.compile}")
        training = replace(training, compile="aot_eager")
    if lora is not None and lora.kernel == "triton":
        notes.append("LoRA runs by torch's operators, not by the triton kernel")
        lora = replace(lora, kernel="torch")
    parts = {"model": model, "training": training, "lora": lora, "preference": preference}
    return replace(cfg, **parts), notes


def _smaller_layout(parallel: Parallel, nproc: int | None) -> tuple[Parallel, int]:
    """Return the layout on `nproc` processes, or on as few as two along each axis in use.

    An axis keeps its size or gets a divisor of it; the larger one goes to tp, then to cp, ep and
    pp. A split that is given stage by stage keeps its stages.
    """
    fixed = not isinstance(parallel.split, str)
    choices = {
        "tp": _divisors(parallel.tp),
        "cp": _divisors(parallel.cp),
        "ep": _divisors(parallel.ep),
        "pp": [parallel.pp] if fixed else _divisors(parallel.pp),
        "dp_replicate": _divisors(parallel.dp_replicate),
    }
    smaller = [
        replace(parallel, **dict(zip(choices, sizes, strict=True)))
        for sizes in product(*choices.values())
    ]
    least = min(smaller, key=_fewest_ranks)
    if nproc is None:
        return least, _fewest_ranks(least)
    for layout in reversed(smaller):
        shares, rest = divmod(nproc, layout.ranks_of_a_model * layout.dp_replicate)
        has_place = shares == 1 if strategy_facts(layout).axis is None else shares >= 2
        if rest == 0 and has_place and shares * layout.cp % layout.ep == 0:
            return layout, nproc
    raise UserError(
        f"--nproc is {nproc}, which {layout_of(parallel)} cannot be split over; leave it out, or "
        f"give {_fewest_ranks(least)}"
    )


def _divisors(size: int) -> list[int]:
    return [n for n in range(min(size, 2), size + 1) if size % n == 0]


def _fewest_ranks(parallel: Parallel) -> int:
    """Return the ranks of a layout with few along an axis that takes those that others leave."""
    return parallel.ranks_of_a_model * parallel.dp_replicate * _fewest_shares(parallel)


def _fewest_shares(parallel: Parallel) -> int:
    """Return the fewest data-parallel ranks of a replica over which experts can be spread."""
    if strategy_facts(parallel).axis is None:
        return 1
    return lcm(2, parallel.ep // gcd(parallel.ep, parallel.cp))


def _in_turn(cfg: RunConfig, num_layers: int) -> Recomputation:
    """Return a run's ways to compute layers again, over so many layers: each in turn."""
    layers = range(num_layers)
    full, operators = tuple(layers[::3]), tuple(layers[1::3])
    mixed = Recomputation(full=full, operators=operators)
    training = replace(cfg.training, checkpointing=mixed)
    is_refused = [*rules.refusals(replace(cfg, training=training))]
    return Recomputation(full=full) if is_refused else mixed


def _split(split: Any, num_layers: int) -> Any:
    """Return a split of so many layers.

    Of a list, each stage that has layers gets one, then those that miss most get more.
    """
    if isinstance(split, str):
        return split
    counts = [min(count, 1) for count in split]
    while sum(counts) < num_layers:
        missing = [count - small for count, small in zip(split, counts, strict=True)]
        counts[missing.index(max(missing))] += 1
    return counts


def in_float32(cfg: RunConfig) -> RunConfig:
    """Return the run with weights, adapters and products in float32."""
    return replace(
        cfg,
        model=replace(cfg.model, dtype="float32"),
        lora=cfg.lora and replace(cfg.lora, dtype="float32"),
        training=cfg.training.in_float32(),
    )


def is_in_16_bits(cfg: RunConfig) -> bool:
    """Return whether weights or products of a run have 16 bits."""
    return cfg.model.dtype != "float32" or cfg.training.precision != "float32"


def _compared(cfg: RunConfig, folder: Path) -> RunConfig:
    """Return the run with what a comparison needs: the small model, SGD, short rows, few steps."""
    # In 16 bits a weight that is off by 1e-7 may be rounded the other way, so weights stay.
    lr = 0.0 if is_in_16_bits(cfg) else UPDATE_NORM / MAX_NORM
    ratio = cfg.optimizer.lora_b_lr_ratio
    length = min(cfg.data.sequence_length, RandomRows.length)
    stretches = cfg.parallel.cp
    if cfg.parallel.sequence_parallel:
        stretches *= cfg.parallel.tp
    length = -(-length // stretches) * stretches
    # Rounding to 8 bits would hide wrong scales: cells of the matrix bend numbers instead.
    fixed = {"matmul": "default", "device": "cpu"}
    names = [key for key, facts in facts_in(Training).items() if facts.rounds]
    roundings: dict[str, Any] = {name: getattr(cfg.training, name) for name in names} | fixed
    training = Training(
        output_dir=str(folder),
        steps=STEPS,
        micro_batch_size=min(cfg.training.micro_batch_size, 2),
        checkpointing=cfg.training.checkpointing,
        seed=cfg.training.seed,
        objective=cfg.objective,
        **roundings,
    )
    return replace(
        cfg,
        model=replace(cfg.model, path=str(folder)),
        data=replace(cfg.data, sequence_length=length),
        optimizer=Optimizer(
            name="sgd",
            lr=lr / max(1.0, ratio),  # B's updates are no larger than others' without a ratio
            lora_b_lr_ratio=ratio,
            lr_schedule="linear",
            weight_decay=DECAY * MAX_NORM / UPDATE_NORM,
            max_grad_norm=MAX_NORM,
        ),
        training=training,
        measure=Measure(),
    )


def _with_rows(cfg: RunConfig, num_ranks: int) -> RunConfig:
    """Return the run with several micro-batches in a step, as few as every schedule accepts."""
    num_microbatches = 2 * cfg.parallel.pp
    rows = num_data_ranks(cfg, num_ranks) * num_microbatches * cfg.training.micro_batch_size
    return replace(cfg, training=replace(cfg.training, global_batch_size=rows))


def _shares_rows(facts: Description, num_ranks: int) -> bool:
    """Return whether several ranks of so many of `tp` hold the same rows of a weight."""
    cuts = tensor_plan.cuts_of(facts.hf, facts.spec, num_ranks) if num_ranks > 1 else {}
    return any(cut.rows.shared for cut in cuts.values())


def _check_memory(num_ranks: int, num_parameters: int) -> None:
    needed = num_ranks * (BYTES_PER_PROCESS + BYTES_PER_PARAMETER * num_parameters)
    available = psutil.virtual_memory().available
    require(
        needed <= available,
        f"{num_ranks} processes with {num_parameters:,} parameters take about {size_text(needed)}, "
        f"and {size_text(available)} are free; lower --nproc, or leave it out",
    )
