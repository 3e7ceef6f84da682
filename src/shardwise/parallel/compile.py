"""torch.compile, one decoder layer at a time: layers of one kind share compiled code, and wrappers stay outside."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.causal_lm import CausalLM
from shardwise.models.spec import ModelSpec

BACKENDS = {"inductor": "inductor", "aot_eager": "aot_eager_decomp_partition"}
"""torch's plain aot_eager takes softplus's gradient for contiguous, which it is not: Gated DeltaNet's backward fails.
This one takes the gradient apart, as inductor does, and runs what it has traced operator by operator too."""

VERSIONS_PER_LAYER = 8
"""Layers share a code object, of which there is one version for each kind, shape and mode of them; more than so many
for each layer is an error, not slow."""


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Compile the forward of every decoder layer, and with it its backward, on `training.compile`'s backend.

    A layer's forward is replaced rather than the layer wrapped, so names stay. Within activation checkpointing: what is
    computed again runs compiled too.
    """
    dynamo: Any = importlib.import_module(
        "torch._dynamo"
    )  # seconds that only a compiled run has to wait
    dynamo.reset()  # what earlier runs of this process have compiled counts too; one still in use compiles again
    dynamo.config.recompile_limit = VERSIONS_PER_LAYER * len(spec.layers)
    dynamo.config.fail_on_recompile_limit_hit = True
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        for layer in part.spec.layers:
            module = part.get_submodule(f"hf.{layer.name}")
            module.forward = torch.compile(
                module.forward, backend=BACKENDS[cfg.training.compile], dynamic=False
            )
    return pm


def uncompiled(cfg: RunConfig) -> AbstractContextManager[None]:
    """Within it, compiled layers run as they were written: for rows of which each has another length."""
    return (
        nullcontext()
        if cfg.training.compile == "none"
        else torch.compiler.set_stance("force_eager")
    )
