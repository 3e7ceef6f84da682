"""Check a run by its run file, its model's config and its number of ranks, before it starts.

The check needs no process group and no memory for weights: a launcher calls it before it starts
ranks, `shardwise split` before it draws a plan, and `build` before it takes memory. What only a
rank knows (its free memory, its files) is checked where it is known.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from shardwise.assembly.costs import Costs, costs_of
from shardwise.assembly.order import WholeModel, prepare
from shardwise.assembly.routing import Routing
from shardwise.base.layouts import Facts, ModelFacts, axis_sizes, strategy_facts
from shardwise.base.process.world import device_type
from shardwise.base.schedule.orders import Pipeline
from shardwise.config import RunConfig, rules
from shardwise.models import load, published
from shardwise.models.adapters import lora, peft_config
from shardwise.models.adapters.coverage import with_rest
from shardwise.models.counts import ModelCounts, count_model
from shardwise.models.facts import context_facts, facts_of, why_in_a_loop
from shardwise.models.families import family_of, spec_of, unproven_note
from shardwise.models.multimodal import Multimodal, multimodal_of
from shardwise.models.patches import attention, cores, elementwise, float8, lora_kernel
from shardwise.models.patches.loss import loss_of_run
from shardwise.models.routed_experts import is_routed
from shardwise.models.weight_folder import unread_note
from shardwise.parallel.pipeline_parallel import pipeline_of


@dataclass(frozen=True)
class Description(WholeModel):
    """A run that may begin, before it takes memory; the same on every rank."""

    hf: Any
    """The whole model with its adapters, parameters on meta: transformers' or the caller's."""
    multimodal: Multimodal | None
    """The class that is saved, where `architectures` names another one than that of `hf`."""
    sizes: Mapping[str, int]
    """Ranks along each axis of the mesh."""
    positions: int | None
    """Positions that the model has learned an embedding for; None: it takes any number."""
    kernels: Mapping[str, str]
    """Backends of the loss, LoRA and each core on the device; {} without one."""
    pipeline: Pipeline | None
    facts: ModelFacts
    """Facts of the model that the rules have asked for."""
    notes: tuple[str, ...]
    """Notes for a reader of the run's figures."""

    def counts(self) -> ModelCounts | None:
        """Return the counts of the whole model; None where its family is not listed."""
        return count_model(self.hf, self.spec) if self.facts.is_listed else None

    def costs(self, cfg: RunConfig, counts: ModelCounts | None, num_ranks: int) -> Costs:
        """Return the costs of the units that a pipeline distributes; see `costs_of`."""
        return costs_of(cfg, self.hf, self.spec, counts, num_ranks)

    def routing(self, cfg: RunConfig, device: torch.device) -> Routing | None:
        """Return the counters of tokens by expert, on meta; None without routed experts."""
        return Routing.of(self.hf, self.spec, device, cfg.model.router_bias_rate)

    def uncounted(self, cfg: RunConfig) -> Iterator[str]:
        """Yield notes on a family that is not listed, and on why no FLOPs are counted."""
        if not self.facts.is_listed:
            yield unproven_note(self.spec.family)
            if not self.facts.has_fused_attention:
                yield (
                    f"{self.spec.family}'s attention keeps whole scores [B, N, T, T], the only "
                    "form that transformers has of it"
                )
        if cfg.data.keeps_documents_apart:
            yield (
                f"data.packing {cfg.data.packed}: no FLOPs are counted (mfu and hfu are null), "
                "since attention's depend on where the documents end"
            )


Describe = Callable[[RunConfig, int, torch.device], Description]
"""Function that describes a run on a device, as `describe` does."""


def describe(cfg: RunConfig, num_ranks: int, device: torch.device | None = None) -> Description:
    """Describe a run of `num_ranks` ranks; UserError with the first reason why it may not begin.

    `device`: that of a rank. Without one no GPU is touched, so that a process that forks ranks does
    not start CUDA; the ranks then check whether `training.loss` and `lora.kernel` can run there.
    """
    if device is None and device_type(cfg) == "cpu":
        device = torch.device("cpu")
    rules.check(cfg, Facts(num_ranks), but="step")  # too many stages are refused before
    hf_config = load.read_config(cfg.model)
    hf = load.build_meta(cfg.model, hf_config)
    multimodal = multimodal_of(cfg.model, hf)
    spec, family = spec_of(hf_config, hf), family_of(hf)
    section = None
    if cfg.lora:
        section = peft_config.section_of(cfg.lora, cfg.model, hf)
        seen = hf_config if multimodal is None else multimodal.model.config
        adapters = replace(
            lora.adapter_facts(hf, section, spec, seen.model_type),
            contradicted=peft_config.contradicted(cfg.lora, section),
        )
        rules.check(replace(cfg, lora=section), Facts(num_ranks, adapters=adapters), but="step")
    model = prepare(WholeModel(hf, spec, family, coverage=None, lora=section), cfg)
    if model.coverage is not None and multimodal is not None:
        model = replace(model, coverage=with_rest(model.coverage, multimodal))
    facts = facts_of(hf, spec, family)
    rules.check(cfg, Facts(num_ranks, facts))
    notes = _beyond_positions(cfg, hf.config, facts.num_positions)
    notes += _of_quantised_folder(cfg, hf.config)
    notes += () if multimodal is None else multimodal.unscaled(family)
    if cfg.lora and cfg.model.init == "random":
        notes += (
            "model.init is random, and the base is saved nowhere: the adapter fits nothing else; "
            "train in full first (lora: null), then an adapter on what that saves",
        )
    if cfg.model.init == "weights" and (unread := unread_note(cfg.model.path)):
        notes += (f"model.path: {unread}",)
    if device_type(cfg) == "cuda" and (reason := why_in_a_loop(hf, spec, cfg.parallel.tp)):
        notes += (f"experts run one after the other, which is slower: {reason}",)
    notes += float8.notes(hf, spec, cfg, device_type(cfg))
    notes += _of_one_process(cfg, num_ranks)
    return Description(
        **vars(model),
        multimodal=multimodal,
        sizes=axis_sizes(cfg, num_ranks),
        positions=facts.num_positions,
        kernels={} if device is None else _kernels(cfg, model, device),
        pipeline=pipeline_of(cfg, num_ranks),
        facts=facts,
        notes=notes,
    )


def _of_one_process(cfg: RunConfig, num_ranks: int) -> tuple[str, ...]:
    """Return a note where one process leaves GPUs unused, or splits nothing by its strategy."""
    if num_ranks > 1:
        return ()
    num_gpus = torch.cuda.device_count() if device_type(cfg) == "cuda" else 1
    if num_gpus > 1:
        return (f"one of {num_gpus} GPUs is used; --nproc {num_gpus} uses all of them",)
    if strategy_facts(cfg.parallel).axis is None:
        return ()
    return (
        f"parallel.data is {cfg.parallel.data}, but one process splits nothing; --nproc N starts N",
    )


def _of_quantised_folder(cfg: RunConfig, hf_config: PretrainedConfig) -> tuple[str, ...]:
    """Return a note where a folder that is quantised is not stored as it is."""
    form = published.base_of(hf_config)
    if form is None or form == cfg.model.base:
        return ()
    note = f"model.path: its matrices are stored as {form}, and here "
    if cfg.model.base != "none":
        return (f"{note}once more as {cfg.model.base}; model.base: {form} has the same values",)
    advice = f"; model.base: {form} keeps them small" if cfg.lora else ""
    return (f"{note}they take the memory of {cfg.model.dtype}{advice}",)


def _kernels(cfg: RunConfig, model: WholeModel, device: torch.device) -> dict[str, str]:
    hf = model.hf
    kernels = {"loss": loss_of_run(cfg, model.family, device)}
    kernels |= cores.backends(model.spec, cfg, device)
    kernels |= attention.backends(cfg)
    if cfg.parallel.cp > 1:
        context = context_facts(hf, model.spec)
        if context.attention is not None:
            kernels["attention"], _ = context.way_and_cut(cfg.parallel)
    kernels |= elementwise.backends(cfg, device)
    if any(is_routed(module) for module in hf.modules()):
        is_loop = device.type != "cuda" or why_in_a_loop(hf, model.spec, cfg.parallel.tp)
        kernels["experts"] = "loop" if is_loop else "grouped"
    if cfg.lora and lora_kernel.has_plain_layers(hf):
        kernels["lora"], _ = lora_kernel.kernel_for(lora_kernel.kernel_of(cfg), device)
    if float8.recipe_of(cfg):
        kernels["matmul"] = float8.kernel_for(cfg, device)
    return kernels


def _beyond_positions(
    cfg: RunConfig, hf_config: PretrainedConfig, num_learned: int | None
) -> tuple[str, ...]:
    """Return a note where rows are longer than the model was made for.

    With rotary positions it trains all the same.
    """
    most = getattr(hf_config, "max_position_embeddings", None)
    length = cfg.data.sequence_length
    if num_learned is not None or not isinstance(most, int) or length <= most:
        return ()
    return (
        f"data.sequence_length: rows of {length} tokens are longer than the model was made for "
        f"(max_position_embeddings {most})",
    )
