"""Layers that compute with copies of their weights in 16 bits: `training.cast: weights`.

The run's weights, their gradients and the optimizer's states have float32, whereas hidden states
and products have the dtype of the copies. So a forward computes what a model stored in 16 bits
does, and an update is not rounded to 16 bits. Source: Micikevicius et al., "Mixed Precision
Training", arXiv 1710.03740, section 3.1 (master weights).
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.dtypes import copied_names, hidden_dtype
from shardwise.models.spec import ModelSpec


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Make the forward of each layer, and of each module beside them, read copies of its weights.

    A copy is made in each forward, within checkpointing, and lasts as long as autograd needs it.
    Of a weight that fsdp2 has gathered in 16 bits none is made.
    """
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        copied, hf = copied_names(cfg, part.hf), part.hf
        layers = {hf.get_submodule(layer.name) for layer in part.spec.layers}
        within = {module for layer in layers for module in layer.modules()}
        for path, module in hf.named_modules():
            recurse = module in layers
            if recurse or module not in within:
                listed = (module.named_parameters, module.named_buffers)
                names = copied.intersection(name for of in listed for name, _ in of(path, recurse))
                _read_copies(module, path, sorted(names), hidden_dtype(cfg))
    return pm


def _read_copies(module: nn.Module, path: str, names: Sequence[str], dtype: torch.dtype) -> None:
    """Replace a module's forward by one that reads copies in `dtype` of what has these names."""
    places: list[tuple[dict[str, Any], str]] = []
    for name in names:
        owner, _, leaf = name.removeprefix(f"{path}.").rpartition(".")
        found = module.get_submodule(owner)
        tensors: Any = found._parameters if leaf in found._parameters else found._buffers
        places.append((tensors, leaf))
    if not places:
        return
    # What is called has been replaced before, and may be another module's method.
    computing: Callable[..., Any] = module.forward

    @wraps(computing)
    def forward(*args: Any, **kwargs: Any) -> Any:
        held = [tensors[leaf] for tensors, leaf in places]
        for (tensors, leaf), tensor in zip(places, held):
            assert tensor is not None
            tensors[leaf] = tensor.to(dtype)
        try:
            return computing(*args, **kwargs)
        finally:
            for (tensors, leaf), tensor in zip(places, held):
                tensors[leaf] = tensor

    module.forward = forward
