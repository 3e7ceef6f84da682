"""Check a run by its run file, its model's config and the number of its ranks, before any rank starts.

The check needs no process group and no memory for weights: a launcher calls it before it starts
ranks, `shardwise split` before it draws a plan, and `build` before it takes memory. What only a
rank knows (its free memory, its files) is checked where it is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from shardwise import rules
from shardwise.config import RunConfig
from shardwise.layouts import Facts, axis_sizes
from shardwise.models import causal_lm, load, lora, lora_forward
from shardwise.models.experts import choose_product
from shardwise.models.facts import facts_of
from shardwise.models.families import Family, family_of, spec_of
from shardwise.models.spec import ModelSpec
from shardwise.parallel.pipeline_parallel import pipeline_of
from shardwise.process.world import device_type
from shardwise.schedule.orders import Pipeline


@dataclass(frozen=True)
class Description:
    """A run that may begin, before it takes memory; the same on every rank."""

    hf: PreTrainedModel
    """The whole model with its adapters, parameters on meta."""
    spec: ModelSpec
    family: Family
    sizes: Mapping[str, int]
    """Ranks along each axis of the mesh."""
    positions: int | None
    """How many positions the model has learned; None: it takes any number."""
    coverage: lora.Coverage | None
    """What LoRA adapts; None without LoRA."""
    has_plain_adapters: bool
    """Whether there are adapters that a kernel in kernels/lora_linear computes."""
    pipeline: Pipeline | None
    notes: tuple[str, ...]
    """What whoever reads the result must know."""


def describe(cfg: RunConfig, num_ranks: int, device: torch.device | None = None) -> Description:
    """Describe a run of `num_ranks` ranks; raise UserError with the first reason for which it may not begin.

    `device`: a rank's. Without one, a GPU is left alone, so that a process that forks ranks does not
    start CUDA; the ranks then find out whether `training.loss` and `lora.kernel` can run there.
    """
    if device is None and device_type(cfg) == "cpu":
        device = torch.device("cpu")
    rules.check(cfg, Facts(num_ranks))
    hf_config = load.read_config(cfg.model)
    hf = load.build_meta(cfg.model, hf_config)
    spec, family = spec_of(hf_config, hf), family_of(hf)
    coverage = lora.inject(hf, cfg.lora, spec) if cfg.lora else None
    facts = facts_of(hf, spec, family)
    rules.check(cfg, Facts(num_ranks, facts))
    if device is not None:
        causal_lm.loss_of_run(cfg, family, device)
        if cfg.lora and facts.has_plain_adapters:
            lora_forward.kernel_for(hf, cfg.lora.kernel, device, cfg.training.precision)
    notes = _beyond_positions(cfg, hf.config, facts.num_positions)
    if product := choose_product(hf, spec, family, cfg.parallel.tp):
        notes += (product,)
    return Description(
        hf=hf,
        spec=spec,
        family=family,
        sizes=axis_sizes(cfg, num_ranks),
        positions=facts.num_positions,
        coverage=coverage,
        has_plain_adapters=facts.has_plain_adapters,
        pipeline=pipeline_of(cfg, num_ranks) if cfg.parallel.pp > 1 else None,
        notes=notes,
    )


def _beyond_positions(cfg: RunConfig, hf_config: PretrainedConfig, learned: int | None) -> tuple[str, ...]:
    """That rows are longer than the model was made for, if they are: with rotary positions they train all the same."""
    most = getattr(hf_config, "max_position_embeddings", None)
    if learned is not None or not isinstance(most, int) or cfg.data.sequence_length <= most:
        return ()
    return (
        f"data.sequence_length: rows of {cfg.data.sequence_length} tokens are longer than the model was made for "
        f"(max_position_embeddings {most} in config.json)",
    )
