"""The costs of a model's units in a run's pipeline, and the split that they lead to."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from shardwise.assembly.profiles import path_of, read, unit_keys, with_measured
from shardwise.base.layouts import axis_sizes, num_strategy_ranks, strategy_facts
from shardwise.base.process.world import device_type
from shardwise.base.schedule.costs import COUNTED, Cost, CostSource
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.split import Split, split
from shardwise.base.schedules import HALVING, V_SHAPED
from shardwise.config import Parallel, Recomputation, RunConfig
from shardwise.metrics.flops import unit_flops_per_token
from shardwise.models.activations import unit_memory
from shardwise.models.alike import same_structure
from shardwise.models.counts import ModelCounts, Unit, count_model, unit_modules
from shardwise.models.dtypes import hidden_dtype
from shardwise.models.expert_plan import experts_of
from shardwise.models.quantise import as_stored
from shardwise.models.spec import ModelSpec
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.weights import gradient_bytes

Costs = tuple[tuple[Cost, ...], CostSource]


def costs_of(
    cfg: RunConfig,
    hf: PreTrainedModel,
    spec: ModelSpec,
    counts: ModelCounts | None,
    num_processes: int,
    flops_per_second: float = 1.0,
) -> Costs:
    """Return what one micro-batch costs in each unit of a model, bottom up, and the source of that.

    `hf`: the whole model with its adapters, on any device (`meta` too). `counts`: its counts, where
    the run has any. `num_processes`: of the run. With tensor parallelism costs are those of whole
    layers: the ranks of a stage have equal shares of them, so that units compare as their shares
    do. With expert parallelism a rank holds its experts alone, and multiplies as many rows as its
    own tokens have experts, as if every expert were given as many.

    Seconds and activations are those of a profile of this model, run and machine, where the cache
    has one; UserError if it is damaged. Otherwise seconds are the FLOPs that the hardware runs over
    `flops_per_second`, and activations those of `models/activations.py`. With the default rate of 1
    seconds only compare with one another, which is all that a split needs. Weights, gradients and
    optimizer states are exact. A tied weight counts at either end, unless both are on one rank.
    """
    chosen = cfg.training.checkpointing
    if isinstance(chosen, Recomputation):
        ways = ("none", *(chosen.way_of(layer.number) for layer in spec.layers), "none")
        alike = {
            way: costs_of(
                replace(cfg, training=replace(cfg.training, checkpointing=way)),
                *(hf, spec, counts, num_processes, flops_per_second),
            )
            for way in dict.fromkeys(ways)
        }
        sources = [source for _, source in alike.values()]
        costs = tuple(alike[way][0][place] for place, way in enumerate(ways))
        return costs, next((s for s in sources if not s.is_measured), sources[0])
    costs = counted_costs(cfg, hf, spec, counts, num_processes, flops_per_second)
    keys = unit_keys(hf, spec, cfg.parallel.schedule)
    path = path_of(cfg, hf, keys, num_processes)
    profile = read(path)
    if profile is None:
        return costs, COUNTED
    return with_measured(costs, keys, profile), CostSource(path.stem, profile.num_processes)


def counted_costs(
    cfg: RunConfig,
    hf: PreTrainedModel,
    spec: ModelSpec,
    counts: ModelCounts | None = None,
    num_processes: int = 1,
    flops_per_second: float = 1.0,
    device: Literal["cpu", "cuda"] | None = None,
    alike: Mapping[str, int] | None = None,
) -> tuple[Cost, ...]:
    """Return the costs of a model's units by formulas alone, as `costs_of` without a profile.

    `device`: whose kernels keep the activations; by default those of the run here. `alike`: see
    `same_structure`.
    """
    counts = counts or count_model(hf, spec)
    alike = alike or same_structure(hf, spec, counts)
    units = with_gradients(counts, cfg.parallel.schedule).units
    stored = as_stored(hf, cfg.model.base)
    ranks, costs = _Ranks.of(cfg, hf, stored, spec, num_processes), []
    # Costs are those of whole layers, whatever tensor parallelism shards.
    alone = replace(
        cfg,
        parallel=replace(cfg.parallel, tp=1, sequence_parallel=False),
        training=replace(cfg.training, device=device or device_type(cfg)),
    )
    kept: dict[object, int] = {}
    for place, (unit, paths) in enumerate(zip(units, unit_modules(spec), strict=True)):
        parameters = {p for path in paths for p in stored.get_submodule(path).parameters()}
        # A layer keeps as much as one that is alike, if both or neither have trained weights below.
        key = alike.get(unit.name, unit.name), place > 0 and units[place - 1].backward
        if key not in kept:
            kept[key] = unit_memory(alone, hf, spec, place).kept
        cost = _cost(cfg, hf, unit, list(parameters), kept[key], ranks, flops_per_second)
        logical = {p for path in paths for p in hf.get_submodule(path).parameters()}
        costs.append(replace(cost, parameters=sum(p.numel() for p in logical)))
    if spec.tied and cfg.parallel.schedule in V_SHAPED:
        tied = stored.get_parameter(f"{spec.embed}.weight")
        ends = [stored.get_submodule(path) for path in unit_modules(spec)[-1]]
        untied = [p for module in ends for p in module.parameters() if p is not tied]
        weights, gradients, optimizer = _state_bytes(cfg, untied, ranks)
        costs[-1] = replace(
            costs[-1], weight_bytes=weights, gradient_bytes=gradients, optimizer_bytes=optimizer
        )
    return tuple(costs)


def choose_split(cfg: RunConfig, units: tuple[Cost, ...], num_microbatches: int) -> Split:
    """Cut the model as `parallel.split` says.

    UserError where that is not possible or breaks the memory limit.
    """
    parallel = cfg.parallel
    shape = (parallel.schedule, parallel.pp, num_microbatches, parallel.num_virtual)
    pipeline = Pipeline(*shape, speeds=tuple(parallel.speeds or ()))
    return split(parallel.split, units, pipeline, limits_bytes(parallel))


def limits_bytes(parallel: Parallel) -> list[float]:
    """Return the limit of each pipeline rank's memory."""
    limit = math.inf if parallel.memory_limit_gib is None else parallel.memory_limit_gib
    gib = limit if isinstance(limit, list) else [limit] * parallel.pp
    return [number * 2**30 for number in gib]


def with_gradients(counts: ModelCounts, schedule: str) -> ModelCounts:
    """Return the counts under a schedule.

    Under one that halves backwards, the gradient goes down to the embedding's output, whatever is
    trained.
    """
    return counts.with_all_input_gradients if schedule in HALVING else counts


def _cost(
    cfg: RunConfig,
    hf: PreTrainedModel,
    unit: Unit,
    parameters: list[nn.Parameter],
    kept_bytes: int,
    ranks: "_Ranks",
    flops_per_second: float,
) -> Cost:
    """Return the cost of a unit with these parameters, which keeps so many bytes."""
    # A token's attention is on its complete row, whichever ranks have that.
    length = cfg.data.sequence_length
    flops = unit_flops_per_token(unit, length, cfg.training.checkpointing)
    forward, weights = flops.forward, flops.weight_gradient
    inputs = flops.input_gradient + flops.recomputed
    if unit.kind == "head" and cfg.training.loss != "plain":
        # The chunked loss takes the gradients in its forward; its backward only scales them.
        forward, inputs, weights = forward + inputs + weights, 0.0, 0.0
    tokens_per_second = flops_per_second / _tokens_of_a_rank(cfg)
    held_weights, held_gradients, states = _state_bytes(cfg, parameters, ranks)
    return Cost(
        name=unit.name,
        forward_seconds=forward / tokens_per_second,
        input_seconds=inputs / tokens_per_second,
        weight_seconds=weights / tokens_per_second,
        activation_bytes=kept_bytes,
        # The hidden states [B, T, D] of a micro-batch between layers.
        output_bytes=_tokens_of_a_rank(cfg) * hf.config.hidden_size * hidden_dtype(cfg).itemsize,
        weight_bytes=held_weights,
        gradient_bytes=held_gradients,
        optimizer_bytes=states,
        trainable=any(p.requires_grad for p in parameters),
    )


def _tokens_of_a_rank(cfg: RunConfig) -> int:
    """Return the tokens of a micro-batch that a rank computes: 1/cp of each row."""
    return cfg.training.micro_batch_size * cfg.data.sequence_length // cfg.parallel.cp


@dataclass(frozen=True)
class _Ranks:
    """The ranks that share the weights of a stage."""

    num_shards: int
    """Ranks over which fsdp2 shards the weights."""
    ep: int
    experts: frozenset[nn.Parameter]
    """The weights that `ep` spreads, in the form of `model.base`."""
    selected: frozenset[nn.Parameter]
    """The weights that the optimizer selects."""

    @classmethod
    def of(
        cls,
        cfg: RunConfig,
        hf: PreTrainedModel,
        stored: PreTrainedModel,
        spec: ModelSpec,
        num_processes: int,
    ) -> "_Ranks":
        """Return those of a run; `stored`: the model in the form of `model.base`."""
        is_sharded = "weights" in strategy_facts(cfg.parallel).sharded
        num_shards = num_strategy_ranks(cfg, axis_sizes(cfg, num_processes)) if is_sharded else 1
        modules = [m for _, m in experts_of(stored, spec)] if cfg.parallel.ep > 1 else []
        experts = frozenset(p for module in modules for p in module.parameters())
        names = update_rule_of(cfg).selected(hf, spec)
        selected = frozenset(p for name, p in stored.named_parameters() if name in names)
        return cls(num_shards, cfg.parallel.ep, experts, selected)

    def shares(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return into how many parts `ep` cuts a weight, and fsdp2 each of these."""
        if parameter not in self.experts:
            return 1, self.num_shards
        return self.ep, max(1, self.num_shards // self.ep)


def _state_bytes(
    cfg: RunConfig, parameters: list[nn.Parameter], ranks: _Ranks
) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer states on a rank with this unit.

    With fsdp2 torch's stages keep weights gathered from a backward to the next forward, beside the
    shards, and gradients whole until the last backward.
    """
    weights = gradients = states = 0
    rule = update_rule_of(cfg)
    for parameter in parameters:
        num_parts, num_shards = ranks.shares(parameter)
        num_bytes = parameter.nbytes // num_parts
        weights += num_bytes // num_shards
        if num_shards > 1:
            weights += num_bytes
        if parameter.requires_grad:
            numel, is_selected = parameter.numel() // num_parts, parameter in ranks.selected
            gradients += gradient_bytes(cfg, numel, parameter.itemsize)
            states += rule.state_bytes(numel // num_shards, parameter.itemsize, is_selected)
    return weights, gradients, states
