"""The optimizer of disk offload: gradients that wait on disk, and a step that goes unit by unit."""

from itertools import pairwise
from types import MethodType

import torch
from torch import nn

from shardwise.parallel.disk_units import FileLayout, Leaf, Pages, own
from shardwise.parallel.disk_window import Window


class Update:
    """The update of a rank's weights in the window."""

    def __init__(self, layout: FileLayout, window: Window, kinds: tuple[str, ...]) -> None:
        """Let gradients that have a place on disk go there as soon as a backward has made them.

        `kinds`: the states that are as large as their parameter.
        """
        self.layout, self.window, self.kinds = layout, window, kinds
        self.optimizer: torch.optim.Optimizer | None = None
        self.waiting: set[nn.Parameter] = set()
        """The parameters that an earlier micro-batch of this step has left a gradient of."""
        for parameter in layout.gradients:
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: torch.Tensor) -> None:
        """Add a micro-batch's gradient to those that wait on disk."""
        assert isinstance(parameter, nn.Parameter)
        leaf, gradient = self.layout.gradients[parameter], parameter.grad
        assert gradient is not None
        if parameter in self.waiting:
            gradient += self.window.read(leaf)
        self.window.write(leaf, gradient)
        self.waiting.add(parameter)
        parameter.grad = None

    def finish(self) -> None:
        """Let parameters have stand-ins for their gradients, after the last micro-batch.

        A backward in two halves adds up gradients by itself, in memory: beside another
        micro-batch's that wait, or alone.
        """
        for parameter in self.waiting:
            if parameter.grad is not None:
                self._add(parameter)
            parameter.grad = self.layout.gradients[parameter].stand_in
        self.waiting.clear()

    def by_unit(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the optimizer's step update one unit after the other."""
        inner = optimizer.step
        self.optimizer = optimizer

        @torch.no_grad()
        def step(_: torch.optim.Optimizer) -> None:
            trained = self.layout.trained
            gradients = {p: p.grad for unit in trained for p in trained[unit] if p.grad is not None}
            updated = [
                Pages(unit, is_update=True)
                for unit in trained
                if not gradients.keys().isdisjoint(trained[unit])
            ]
            for parameter in gradients:
                parameter.grad = None
            self.window.clear()
            for pages, then in pairwise([*updated, None]):
                assert pages is not None
                held = self.window.hold(pages, then)
                parameters = [p for p in trained[pages.unit] if p in gradients]
                for parameter in parameters:
                    leaf, gradient = self.layout.gradients.get(parameter), gradients[parameter]
                    is_waiting = leaf is not None and gradient is leaf.stand_in
                    parameter.grad = held.view(leaf) if leaf and is_waiting else gradient
                inner()
                for parameter in parameters:
                    parameter.grad = None
                    for leaf, state in self._states(parameter):
                        if leaf.tensor is None:  # made by this step
                            leaf.belong_to(own(state))
                            held.view(leaf).copy_(own(state))
                self.window.drop(pages, is_changed=True)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

        optimizer.step = MethodType(step, optimizer)
        return optimizer

    def _states(self, parameter: nn.Parameter) -> list[tuple[Leaf, torch.Tensor]]:
        assert self.optimizer is not None
        parameter_states = self.optimizer.state.get(parameter, {})
        leaves = zip(self.layout.states[parameter], self.kinds, strict=True)
        return [(leaf, parameter_states[kind]) for leaf, kind in leaves if kind in parameter_states]

    def take_state(self, tensor: torch.Tensor) -> None:
        """Move a state of the optimizer that was just loaded to disk; leave anything else."""
        for parameter in self.layout.states if self.optimizer is not None else ():
            for leaf, state in self._states(parameter):
                if state is tensor:
                    leaf.belong_to(own(state))
                    self.window.write(leaf, own(state))
                    leaf.set(leaf.stand_in)
