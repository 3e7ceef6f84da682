"""What the units of a model cost in a run's pipeline, and where the model is cut."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.assembly.profiles import path_of, read, unit_keys, with_measured
from shardwise.config import RunConfig
from shardwise.layouts import HALVING, V_SHAPED
from shardwise.metrics.flops import unit_flops_per_token
from shardwise.models.counts import ModelCounts, Unit, Weight, count_model, unit_modules
from shardwise.models.spec import ModelSpec
from shardwise.schedule.costs import COUNTED, Cost, CostSource
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.split import Split, split


def costs_of(
    cfg: RunConfig,
    hf: PreTrainedModel,
    spec: ModelSpec,
    counts: ModelCounts | None,
    num_processes: int,
    num_shards: int = 1,
    flops_per_second: float = 1.0,
) -> tuple[tuple[Cost, ...], CostSource]:
    """What one micro-batch costs in each unit of a model, bottom up, and where that is known from.

    `hf`: the whole model with its adapters, on any device (`meta` too). `counts`: of it, where the run has any.
    `num_processes`: of the run. `num_shards`: fsdp2's ranks that share a stage. With tensor parallelism costs are those
    of whole layers: the ranks of a stage share them out alike, so that they compare as the shares do.

    Times and activations are those of a profile of this model, run and machine, where the cache has one (UserError if
    it is damaged). Else seconds are the FLOPs that the hardware runs over `flops_per_second`, with the default of 1
    good for comparisons only, which is all that a split needs, and activations are `_kept_bytes`. Weights, gradients
    and optimizer are exact; a tied weight counts at either end, unless both are on one rank.
    """
    units = _with_gradients(counts or count_model(hf, spec), cfg.parallel.schedule).units
    modules = [[hf.get_submodule(name) for name in names] for names in unit_modules(spec)]
    costs = [
        _cost(cfg, hf, unit, parts, num_shards, flops_per_second)
        for unit, parts in zip(units, modules)
    ]
    if spec.tied and cfg.parallel.schedule in V_SHAPED:
        tied = hf.get_parameter(f"{spec.embed}.weight")
        own = [p for module in modules[-1] for p in module.parameters() if p is not tied]
        weights, gradients, optimizer = _state_bytes(cfg, own, num_shards)
        costs[-1] = replace(
            costs[-1], weight_bytes=weights, gradient_bytes=gradients, optimizer_bytes=optimizer
        )
    keys = unit_keys(hf, spec, cfg.parallel.schedule)
    path = path_of(cfg, hf, keys, num_processes)
    profile = read(path)
    if profile is None:
        return tuple(costs), COUNTED
    return with_measured(tuple(costs), keys, profile), CostSource(path.stem, profile.num_processes)


def choose_split(cfg: RunConfig, units: tuple[Cost, ...], num_microbatches: int) -> Split:
    """Cut the model as `parallel.split` says; UserError where that is not possible or breaks the memory limit."""
    parallel = cfg.parallel
    pipeline = Pipeline(parallel.schedule, parallel.pp, num_microbatches, parallel.num_virtual)
    limit = math.inf if parallel.memory_limit_gib is None else parallel.memory_limit_gib * 2**30
    return split(parallel.split, units, pipeline, limit)


def memory_caveat(spec: ModelSpec, source: CostSource) -> str | None:
    """What is wrong with the memory of a split by these costs, in words; None where nothing is known to be."""
    keeping = [
        layer for layer in spec.layers if any(block.kind.keeps_more for block in layer.mixers)
    ]
    recurrent = list(dict.fromkeys(layer.kind for layer in keeping))
    if source.is_measured or not recurrent:
        return None
    return (
        f"memory is counted too low, without what {' and '.join(recurrent)} layers keep within; "
        "shardwise split --profile measures it"
    )


def _with_gradients(counts: ModelCounts, schedule: str) -> ModelCounts:
    """Under schedules that halve backwards, the gradient goes down to the embedding's output, whatever is trained."""
    if schedule not in HALVING:
        return counts
    embedding, *above = counts.units
    return ModelCounts(
        (replace(embedding, backward=True), *(_with_gradient(unit) for unit in above))
    )


def _with_gradient(unit: Unit) -> Unit:
    weights = tuple(replace(weight, input_gradient=True) for weight in unit.weights)
    return replace(unit, weights=weights, core_gradient=True, backward=True)


def _cost(
    cfg: RunConfig,
    hf: PreTrainedModel,
    unit: Unit,
    modules: list[nn.Module],
    num_shards: int,
    flops_per_second: float,
) -> Cost:
    tokens = cfg.training.micro_batch_size * cfg.data.sequence_length
    flops = unit_flops_per_token(
        unit, cfg.data.sequence_length, cfg.training.micro_batch_size, cfg.training.checkpointing
    )
    forward, weights = flops.forward, flops.weight_gradient
    inputs = flops.input_gradient + flops.recomputed
    if unit.kind == "head" and cfg.training.loss != "plain":
        # The chunked loss takes the gradients in its forward; its backward only scales them.
        forward, inputs, weights = forward + inputs + weights, 0.0, 0.0
    rate = flops_per_second / tokens
    parameters = list({p for module in modules for p in module.parameters()})
    weight_bytes, gradient_bytes, optimizer_bytes = _state_bytes(cfg, parameters, num_shards)
    return Cost(
        name=unit.name,
        forward_seconds=forward / rate,
        input_seconds=inputs / rate,
        weight_seconds=weights / rate,
        activation_bytes=_kept_bytes(cfg, hf, unit),
        output_bytes=tokens * hf.config.hidden_size * getattr(torch, cfg.model.dtype).itemsize,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        parameters=sum(p.numel() for p in parameters),
        trainable=any(p.requires_grad for p in parameters),
    )


def _state_bytes(
    cfg: RunConfig, parameters: list[nn.Parameter], num_shards: int
) -> tuple[int, int, int]:
    """Of weights, gradients and optimizer on a rank with this unit.

    AdamW has two states in the weight's dtype and a float32 count for each parameter. With fsdp2 torch's stages keep
    weights gathered from a backward to the next forward, beside the shards, and gradients whole until the last one.
    """
    trained = [p for p in parameters if p.requires_grad]
    wide = cfg.training.accumulation == "float32"
    states, counter = (2, 4) if cfg.optimizer.name == "adamw" else (0, 0)
    weights = sum(p.nbytes for p in parameters)
    gradients = sum(p.numel() * 4 if wide else p.nbytes for p in trained)
    optimizer = sum(states * p.nbytes for p in trained) // num_shards + counter * len(trained)
    return weights + (weights // num_shards if num_shards > 1 else 0), gradients, optimizer


def _kept_bytes(cfg: RunConfig, hf: PreTrainedModel, unit: Unit) -> int:
    """What a forward leaves for the backward, by formula.

    A layer: what goes into and comes out of each product (of an adapter, its rank), in the dtype of products; its input
    alone if it is computed again; its input and what comes out of products with `operators`. Without dropout that is
    the 32 bytes per token and channel of a GPT layer in 16 bits in Korthikanti et al., arXiv 2205.05198, section 4.1,
    with fused attention. Autocast keeps, in 16 bits, each weight that it casts. What recurrences keep within is left
    out: only a profile knows it. Head: its input and what the loss keeps.
    """
    if not unit.backward or unit.kind == "embed":
        return 0
    tokens = cfg.training.micro_batch_size * cfg.data.sequence_length
    autocast = cfg.training.precision != "float32"
    itemsize = 2 if autocast else getattr(torch, cfg.model.dtype).itemsize
    hidden = tokens * hf.config.hidden_size * getattr(torch, cfg.model.dtype).itemsize
    if unit.kind == "head":
        weight = unit.weights[0]
        if cfg.training.loss == "plain":  # the probabilities, in float32
            return 2 * hidden + 4 * tokens * hf.config.vocab_size
        return hidden + 4 * (tokens * hf.config.hidden_size + weight.numel * weight.trainable)
    again = cfg.training.checkpointing
    if again == "full" or (isinstance(again, list) and unit.kind in again):
        return hidden
    if again == "operators":
        return hidden + sum(_elements(hf, weight)[1] for weight in unit.weights) * tokens * itemsize
    kept = sum(sum(_elements(hf, weight)) for weight in unit.weights) * tokens * itemsize
    cast = autocast and cfg.model.dtype == "float32"
    return int(
        kept
        + sum(itemsize * weight.numel for weight in unit.weights if weight.input_gradient) * cast
    )


def _elements(hf: PreTrainedModel, weight: Weight) -> tuple[float, float]:
    """Elements per token that go into a product and come out of it."""
    shape = hf.get_parameter(weight.name).shape
    if ".lora_" in weight.name:  # what goes in and comes out is the adapted product's already
        return 0.0, shape[0] if ".lora_A." in weight.name and not weight.folded else 0.0
    if len(shape) == 3 and shape[1] == 1:  # a convolution of each channel, [C, 1, K]
        return shape[0], shape[0]
    met = weight.active * math.prod(shape[:-2])  # experts that a token meets
    return met * shape[-1], met * shape[-2]
