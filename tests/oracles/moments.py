"""Where a step is: in whose forward or backward, or in what follows the last backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.assembly.build import Job


class Moments:
    """Says where a step is: in the module that it has entered last, forwards or backwards."""

    def __init__(self) -> None:
        self._moment = ""

    def latest(self) -> str:
        """Return the moment, such as "backward of model.layers.3"."""
        return self._moment

    def watched(self, job: Job) -> Job:
        """Return the job, whose modules and optimizer now say when they begin."""
        for part in job.pm.parts:
            for name, module in part.hf.named_modules():
                if name:
                    module.register_forward_pre_hook(partial(self._enter, name))
                    module.register_forward_hook(partial(self._leave, name))
        job.optimizer.register_step_pre_hook(lambda *_: self._set("step of the optimizer"))
        reduce_grads = (partial(self._set, "after the last backward"), *job.pm.reduce_grads)
        return replace(job, pm=replace(job.pm, reduce_grads=reduce_grads))

    def _set(self, moment: str) -> None:
        self._moment = moment

    def _enter(self, name: str, *_: Any) -> None:
        # A forward inside of a backward is computed again, because of activation checkpointing.
        is_again = torch._C._current_graph_task_id() != -1
        self._set(f"recomputed forward of {name}" if is_again else f"forward of {name}")

    def _leave(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for output in tree_leaves(outputs):
            # The first of its backward is the last of its forward.
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(partial(self._backwards, name))

    def _backwards(self, name: str, *_: Any) -> None:
        self._set(f"backward of {name}")
