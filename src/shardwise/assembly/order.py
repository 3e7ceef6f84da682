"""The one order in which everything is done to a model between `meta` and training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from transformers import PreTrainedModel

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import Lora, RunConfig, require
from shardwise.models import casting
from shardwise.models.adapters import lora
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import Family
from shardwise.models.part import ModelPart
from shardwise.models.patches import FOR_ANY_MODULE, PATCHES, Patch
from shardwise.models.quantise import quantise_frozen
from shardwise.models.spec import ModelSpec
from shardwise.models.stage import stages
from shardwise.parallel import (
    accumulate,
    activation_checkpoint,
    activation_offload,
    compile,
    context_parallel,
    disk,
    expert_parallel,
    float8_scales,
    offload,
    pipeline_parallel,
    preferences,
    tensor_parallel,
)
from shardwise.parallel.strategies import STRATEGIES
from shardwise.parallel.strategy import Strategy

ApplyToWhole = Callable[["WholeModel", RunConfig], "WholeModel"]
Apply = Callable[[ParallelModel, Mesh, RunConfig, ModelSpec], ParallelModel]
Load = Callable[[ParallelModel], None]


@dataclass(frozen=True)
class WholeModel:
    """A transformers model on `meta`, before it becomes the parts of ranks."""

    hf: PreTrainedModel
    """The model, with what entries of ON_THE_WHOLE have put on it."""
    spec: ModelSpec
    family: Family
    coverage: lora.Coverage | None
    """The modules that LoRA adapts; None without LoRA."""
    lora: Lora | None
    """The section `lora`, with what the folder of `lora.path` gave."""

    def parts(
        self, cfg: RunConfig, boundaries: Sequence[int] = (), chunks: Sequence[int] = ()
    ) -> tuple[ModelPart, ...]:
        """Return it as one part or, with boundaries, the stages of these chunks (see `stages`)."""
        if not boundaries:
            return (CausalLM(self.hf, self.spec, self.family, cfg),)
        return stages(self.hf, self.spec, boundaries, chunks, cfg, self.family)


Function = TypeVar("Function")


class OrderEntry(NamedTuple, Generic[Function]):
    """Something that is done to a model before it becomes parts, or to its parts."""

    name: str
    is_requested: Callable[[RunConfig], bool]
    apply: Function


def _with_adapters(model: WholeModel, cfg: RunConfig) -> WholeModel:
    assert model.lora is not None
    coverage = lora.inject(model.hf, model.lora, model.spec)
    return replace(model, coverage=coverage)


def _patched(name: str, patch: Patch) -> Apply:
    def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
        for part in pm.parts:
            if isinstance(part, CausalLM) or name in FOR_ANY_MODULE:
                patch(part, cfg, mesh.device)
        return pm

    return apply


def _with_quantised_base(
    pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec
) -> ParallelModel:
    assert cfg.model.base != "none"
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        quantise_frozen(part.hf, part.spec, cfg.model.base)
    return pm


def _strategies(is_before_loading: bool) -> Iterator[OrderEntry[Apply]]:
    for strategy in STRATEGIES.values():
        if strategy.axis is not None and strategy.is_before_loading == is_before_loading:
            yield OrderEntry(strategy.name, strategy.is_requested, _with_equal_gradients(strategy))


def _with_equal_gradients(strategy: Strategy) -> Apply:
    """Return what applies a strategy, and refuses one that leaves each rank its own gradients."""

    def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
        given = pm.run, pm.set_sync, pm.reduce_grads
        pm = strategy.apply(pm, mesh, cfg, spec)
        has_others = any(mesh.size(axis) > 1 for axis in mesh.gradient_axes)
        require(
            not has_others or given != (pm.run, pm.set_sync, pm.reduce_grads),
            f"parallel.data is {strategy.name}, whose `apply` does nothing to gradients, so that "
            "copies of weights would drift apart; let it add a function that sums them to "
            "`reduce_grads` of its ParallelModel, or set parallel.data to ddp",
        )
        return pm

    return apply


ON_THE_WHOLE: tuple[OrderEntry[ApplyToWhole], ...] = (
    # Stages are copies of parts of the model, with their adapters.
    OrderEntry("LoRA", lambda cfg: cfg.lora is not None, _with_adapters),
)
BEFORE_LOADING: tuple[OrderEntry[Apply], ...] = (
    # Replaces the forward of attention, which patches and tensor parallelism wrap.
    OrderEntry("context", lambda cfg: cfg.parallel.cp > 1, context_parallel.apply),
    # What replaces forwards comes first: the strategies wrap or shard what it has left.
    *(OrderEntry(name, lambda cfg: True, _patched(name, patch)) for name, patch in PATCHES),
    # Every rank stores its share, in blocks that no other rank has a part of.
    OrderEntry("quantised base", lambda cfg: cfg.model.base != "none", _with_quantised_base),
    # Reads how weights will be sharded, off blocks that are still complete.
    OrderEntry("FP8 scales", lambda cfg: cfg.training.matmul != "default", float8_scales.apply),
    # Shards the weights that all others then wrap.
    OrderEntry("tensor", lambda cfg: cfg.parallel.tp > 1, tensor_parallel.apply),
    # Shards what tensor parallelism has left of experts.
    OrderEntry("expert", lambda cfg: cfg.parallel.ep > 1, expert_parallel.apply),
    # Inside checkpointing, which runs compiled layers again.
    OrderEntry("compile", lambda cfg: cfg.training.is_compiled, compile.apply),
    # Around compiled code and inside checkpointing, which makes the copies once more.
    OrderEntry("copies of weights", lambda cfg: cfg.training.casts_weights, casting.apply),
    # Inside the wrappers, so that their hooks lie outside.
    OrderEntry(
        "activation checkpointing",
        lambda cfg: cfg.training.checkpointing != "none",
        activation_checkpoint.apply,
    ),
    # Moves what is kept with checkpointing, which is little.
    OrderEntry(
        "activation offload", lambda cfg: cfg.training.offload_activations, activation_offload.apply
    ),
    # Outside of checkpointing: a layer's weights are read once for its recomputation and backward.
    # Gives no memory to what is on meta, and all others have sharded that.
    OrderEntry("disk", lambda cfg: cfg.parallel.offload == "disk", disk.apply),
    # Shard a model on meta, so that no rank ever holds all of it.
    *_strategies(is_before_loading=True),
)
AFTER_LOADING: tuple[OrderEntry[Apply], ...] = (
    # Wrap real weights, or give the optimizer shards that are views into them.
    *_strategies(is_before_loading=False),
    # Changes which gradients the wrappers give to the optimizer.
    OrderEntry(
        "float32 accumulation", lambda cfg: cfg.training.accumulation == "float32", accumulate.apply
    ),
    # Runs the stages that all others have prepared.
    OrderEntry("pipeline", lambda cfg: cfg.parallel.pp > 1, pipeline_parallel.apply),
    # Takes gradients after all others have added them up.
    OrderEntry("offload", lambda cfg: cfg.parallel.offload in ("optimizer", "all"), offload.apply),
    # Runs what all others have made of the model twice: as the reference, and to train.
    OrderEntry("preferences", lambda cfg: cfg.training.has_preferences, preferences.apply),
)
ORDER = (*ON_THE_WHOLE, *BEFORE_LOADING, *AFTER_LOADING)
"""After the first section the model becomes `WholeModel.parts`. Between the other two weights are
loaded, into what each rank holds."""


def prepare(model: WholeModel, cfg: RunConfig) -> WholeModel:
    """Do to a model everything that the run requests before it becomes parts."""
    for entry in ON_THE_WHOLE:
        if entry.is_requested(cfg):
            model = entry.apply(model, cfg)
    return model


def apply(
    pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec, load: Load
) -> ParallelModel:
    """Do to the parts of a model everything that the run requests, in ORDER, and load weights."""
    pm = _apply_each(BEFORE_LOADING, pm, mesh, cfg, spec)
    load(pm)
    return _apply_each(AFTER_LOADING, pm, mesh, cfg, spec)


def _apply_each(
    entries: Sequence[OrderEntry[Apply]],
    pm: ParallelModel,
    mesh: Mesh,
    cfg: RunConfig,
    spec: ModelSpec,
) -> ParallelModel:
    for entry in entries:
        if entry.is_requested(cfg):
            pm = entry.apply(pm, mesh, cfg, spec)
    return pm
