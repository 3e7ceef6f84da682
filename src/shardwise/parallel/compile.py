"""torch.compile of one decoder layer at a time.

Layers of one kind share compiled code, and wrappers stay outside.
"""

import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh, ParallelModel, Run
from shardwise.base.safety import cache_folder, private_folder
from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.spec import ModelSpec

GRAPHED = "reduce-overhead"
"""The value of `training.compile` whose layers are CUDA graphs."""
BACKENDS = {
    "inductor": ("inductor", None),
    GRAPHED: ("inductor", GRAPHED),
    "max-autotune": ("inductor", "max-autotune-no-cudagraphs"),
    "aot_eager": ("aot_eager_decomp_partition", None),
}
"""Torch's backend and its mode. Its plain aot_eager assumes a contiguous gradient of softplus,
which makes Gated DeltaNet's backward fail. This one decomposes the gradient, as inductor does, and
runs what it has traced operator by operator too."""

VERSIONS_PER_LAYER = 8
"""Layers share a code object, with a compiled version for each kind, shape and mode. More versions
than so many for each layer are an error."""

ACTIVATIONS_KEPT = 0.9
"""The most that a compiled layer keeps for its backward, as a share of what torch would keep.

Below 1 the backward computes cheap operators again wherever that keeps less, also where torch does
not for the sake of time. In the model of `tools/speed_of_cores.py` a step's peak falls by a fifth.
"""


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Compile the forward of every decoder layer, and with it its backward.

    A layer's forward is replaced rather than the layer wrapped, so names stay. It lies within
    activation checkpointing, so that a recomputation runs compiled too. Experts run as they are
    where tokens are sent or dropped, and what is around them is compiled.
    """
    # torch loads and runs what lies in this folder; its default is a name in the temporary folder
    # that anybody may have taken.
    # An import may have set the variable to that name.
    utils: Any = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, utils.default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder(cache_folder() / "compiled"))
    # The import takes seconds, which only a compiled run has to wait.
    dynamo: Any = importlib.import_module("torch._dynamo")
    # Versions of earlier runs of this process would count too. A run that goes on compiles again.
    dynamo.reset()
    dynamo.config.recompile_limit = VERSIONS_PER_LAYER * len(spec.layers)
    dynamo.config.fail_on_recompile_limit_hit = True
    importlib.import_module("torch._functorch.config").activation_memory_budget = ACTIVATIONS_KEPT
    backend, mode = BACKENDS[cfg.training.compile]
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        if cfg.parallel.ep > 1 or cfg.model.expert_capacity is not None:
            # A number of rows that the step alone knows would be another version at every step.
            for routed in part.experts.values():
                routed.module.forward = torch.compiler.disable(routed.forward)
        for layer in part.spec.layers:
            module = part.get_submodule(f"hf.{layer.name}")
            module.forward = torch.compile(
                module.forward, backend=backend, mode=mode, dynamic=False
            )
    return replace(pm, run=_from_a_new_step(pm.run)) if cfg.training.compile == GRAPHED else pm


def _from_a_new_step(run: Run) -> Run:
    """Return `run` that first lets graphs write again where those of the step before have written.

    Torch cannot see by itself that a step's hidden states are done with.
    """

    def begin_and_run(
        pm: ParallelModel, microbatches: Sequence[AnyBatch], loss_scale: float, train: bool
    ) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return run(pm, microbatches, loss_scale, train)

    return begin_and_run


def uncompiled(cfg: RunConfig) -> AbstractContextManager[None]:
    """Return a context in which compiled layers run eagerly, for rows that differ in length."""
    if not cfg.training.is_compiled:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
