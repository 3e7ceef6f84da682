"""Where a step is: which module's forward or backward runs, or the optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.interfaces import ParallelModel


class Moments:
    """Says where a step is."""

    def __init__(self) -> None:
        self._moment = "between steps"

    def latest(self) -> str:
        """Return the moment, such as "backward of model.layers.3"."""
        return self._moment

    def watch(self, pm: ParallelModel) -> None:
        """Follow the modules that hold weights or layers."""
        for part in pm.parts:
            for name, module in part.hf.named_modules():
                if any(True for _ in module.parameters(recurse=False)) or name.count(".") >= 2:
                    module.register_forward_pre_hook(partial(self._enter, name))
                    module.register_forward_hook(partial(self._leave, name))

    def _enter(self, name: str, *_: Any) -> None:
        self._moment = f"forward of {name}"

    def _leave(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(partial(self._enter_backward, name))

    def _enter_backward(self, name: str, *_: Any) -> None:
        self._moment = f"backward of {name}"
