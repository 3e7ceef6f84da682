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

from shardwise.config import RunConfig, UserError
from shardwise.models import causal_lm, load, lora, lora_forward
from shardwise.models.experts import choose_product
from shardwise.models.families import Family, family_of, spec_of
from shardwise.models.spec import ModelSpec
from shardwise.models.stage import check_cut, hidden_dtype
from shardwise.models.tensor_splits import plan
from shardwise.parallel import accumulate, activation_checkpoint, compile, compose, fsdp1
from shardwise.parallel.mesh import mesh_sizes
from shardwise.parallel.pipeline_parallel import pipeline_of
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.split import check as check_split
from shardwise.training.world import device_type


@dataclass(frozen=True)
class Facts:
    """What the checks have found out about a run that may begin; the same on every rank."""

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


def check(cfg: RunConfig, num_ranks: int, device: torch.device | None = None) -> Facts:
    """Return the facts of a run of `num_ranks` ranks; raise UserError if it may not begin.

    `device`: a rank's. Without one, a GPU is left alone, so that a process that forks ranks does not
    start CUDA; the ranks then find out whether `training.loss` and `lora.kernel` can run there.
    """
    if device is None and device_type(cfg) == "cpu":
        device = torch.device("cpu")
    sizes = mesh_sizes(cfg, num_ranks)
    compile.check(cfg)
    hf_config = load.read_config(cfg.model)
    compose.check(cfg, hf_config.model_type)
    hf = load.build_meta(cfg.model, hf_config)
    spec, family = spec_of(hf_config, hf), family_of(hf)
    activation_checkpoint.check(cfg, spec)
    positions = None if spec.positions is None else hf_config.max_position_embeddings
    if positions is not None and cfg.data.sequence_length > positions:
        raise UserError(
            f"data.sequence_length is {cfg.data.sequence_length}, but {spec.family} has learned only "
            f"{positions} positions; lower it"
        )
    coverage = lora.inject(hf, cfg.lora, spec) if cfg.lora else None
    causal_lm.check(hf, spec, family, cfg)
    if cfg.parallel.tp > 1:
        plan.check(hf, spec, cfg.parallel.tp)
    notes = _beyond_positions(cfg, hf.config, positions)
    if product := choose_product(hf, spec, family, cfg):
        notes += (product,)
    accumulate.check(cfg, (p for p in hf.parameters() if p.requires_grad))
    if cfg.parallel.data == "fsdp1":
        fsdp1.check(cfg, hf, sizes["dp_shard"])
    plain = cfg.lora is not None and lora_forward.check(hf, cfg.lora)
    if device is not None:
        causal_lm.loss_of_run(cfg, family, device)
        if cfg.lora and plain:
            lora_forward.kernel_for(hf, cfg.lora.kernel, device, cfg.training.precision)
    return Facts(
        hf=hf,
        spec=spec,
        family=family,
        sizes=sizes,
        positions=positions,
        coverage=coverage,
        has_plain_adapters=plain,
        pipeline=_pipeline(cfg, hf, spec, family, sizes),
        notes=notes,
    )


def _pipeline(
    cfg: RunConfig, hf: PreTrainedModel, spec: ModelSpec, family: Family, sizes: Mapping[str, int]
) -> Pipeline | None:
    if cfg.parallel.pp == 1:
        return None
    check_cut(family)
    compose.check_tied(cfg, spec)
    hidden_dtype(hf.config, cfg)
    pipeline = pipeline_of(cfg, sizes["dp_replicate"] * sizes["dp_shard"])
    check_split(cfg.parallel.split, len(spec.layers), pipeline)
    return pipeline


def _beyond_positions(cfg: RunConfig, hf_config: PretrainedConfig, learned: int | None) -> tuple[str, ...]:
    """That rows are longer than the model was made for, if they are: with rotary positions they train all the same."""
    most = getattr(hf_config, "max_position_embeddings", None)
    if learned is not None or not isinstance(most, int) or cfg.data.sequence_length <= most:
        return ()
    return (
        f"data.sequence_length: rows of {cfg.data.sequence_length} tokens are longer than the model was made for "
        f"(max_position_embeddings {most} in config.json)",
    )
