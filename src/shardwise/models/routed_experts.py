"""Routed experts: every token through the experts that its router chose.

transformers stacks the weights of a layer's experts, [E, out, in]. Rows are sorted by expert once,
go through the stacks as kernels/grouped_linear says, and return in their order. Adapters on stacks
keep PEFT's modules, names and files; PEFT's forward, which adds B A to a copy of the stack, is
replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.gated_activation import gated_silu
from shardwise.kernels.grouped_linear import (
    StackedAdapter,
    grouped_linear,
    rows_of_experts,
    take_rows,
    takes,
)
from shardwise.kernels.quantised import Weight
from shardwise.models.capacity import Capacity, Documents
from shardwise.models.names import hf_name, is_wrapper
from shardwise.models.stored import weight_of

if TYPE_CHECKING:
    from peft.tuners.lora import ParamWrapper

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes rows [S, D] sorted by expert, and where those of each expert end, [E] int32; returns the
experts' outputs [S, D]."""


def use_routed_experts(
    model: nn.Module,
    half: BackwardHalf | None = None,
    capacity: Capacity | None = None,
    documents: Documents | None = None,
) -> dict[str, RoutedExperts]:
    """Replace the forwards of a model's stacked experts; return what does, by the modules' paths.

    `half` says which half of a backward runs, in a pipeline whose schedule has two. `capacity`
    limits the tokens of each expert in training; evaluation drops none, as servers don't.
    `documents` says which tokens are padding; None: none are.
    """
    adapters: dict[nn.Module, dict[str, ParamWrapper]] = {}
    for module in model.modules():
        if is_wrapper(module):
            adapters.setdefault(module.get_base_layer(), {})[module.parameter_name] = module
    replaced = {}
    for path, module in model.named_modules():
        # What a copy in `modules_to_save` replaces is never called.
        if is_routed(module) and ".original_module" not in path:
            routed = RoutedExperts(module, adapters.get(module, {}), half, capacity, documents)
            module.forward = routed.forward
            for wrapper in routed.adapters.values():
                wrapper.forward = wrapper.base_layer.__call__
            replaced[hf_name(path)] = routed
    return replaced


def is_routed(module: nn.Module) -> bool:
    """Return whether a module has stacks of experts in the form that `RoutedExperts` computes."""
    return "has_gate" in vars(module)  # transformers' decorator of such classes sets it


def widths_of(experts: Any) -> tuple[int, int, int]:
    """Return the features that go into each of the stacked experts and come out of it, and the
    bytes of an element of its last weight.
    """
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    ins, outs = (1, 2) if experts.is_transposed else (2, 1)
    return first.shape[ins], experts.down_proj.shape[outs], experts.down_proj.itemsize


def has_silu(module: Any) -> bool:
    """Return whether the activation is silu; a forward without a module for it says which."""
    names = ("act_fn", "activation", "activation_fn")
    activation = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    return not isinstance(activation, nn.Module) or isinstance(activation, SiLUActivation | nn.SiLU)


class RoutedExperts:
    """The forward of a module of stacked experts, with PEFT's adapters on its stacks by name."""

    def __init__(
        self,
        module: Any,
        adapters: dict[str, ParamWrapper],
        half: BackwardHalf | None = None,
        capacity: Capacity | None = None,
        documents: Documents | None = None,
    ) -> None:
        assert capacity is None or documents is not None
        self.module = module
        self.adapters = adapters
        self.half = half
        self.capacity = capacity
        self.documents = documents
        self.compute: Compute = self.outputs
        """Function of the sorted rows. A strategy that sends rows to other ranks wraps it."""
        self._counts: torch.Tensor | None = None

    def forward(
        self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums [N, D] of experts' outputs for hidden states [N, D].

        indices [N, k] are the experts of each token, weights [N, k] what their outputs count.
        """
        num_tokens, top_k = indices.shape
        experts, order = indices.flatten().sort(stable=True)
        ids = None if self.documents is None else self.documents()
        capacity = self.capacity if self.module.training else None
        if capacity is not None:
            assert ids is not None
            experts, order = capacity.drop(experts, order, ids, top_k, self.module.num_experts)
        ends = self._ends(experts)
        if torch.is_grad_enabled():
            self._count(indices, ids, order, ends)
        back = order.argsort()
        rows = take_rows(hidden, order, back, top_k)
        y = self.compute(rows, ends) if capacity is None else self._of_kept(rows, ends)
        y = take_rows(y, back, order).view(num_tokens, top_k, -1)
        return (y * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)

    def take_counts(self) -> torch.Tensor | None:
        """Return the tokens of documents in training since this was asked last: those that chose
        each expert, and the number that were dropped, [E + 1].

        None: no forward ran.
        """
        counts, self._counts = self._counts, None
        return counts

    def _count(
        self,
        indices: torch.Tensor,
        ids: torch.Tensor | None,
        order: torch.Tensor,
        ends: torch.Tensor,
    ) -> None:
        """Count choices [N, k], none of padding; those in `order` behind all ends are dropped."""
        if ids is None:
            numbers = torch.ones_like(indices, dtype=torch.float32)
        else:
            numbers = (ids >= 0).view(-1, 1).expand_as(indices).to(torch.float32)
        numbers = numbers.flatten()
        counts = numbers.new_zeros(self.module.num_experts + 1)
        counts.index_add_(0, indices.flatten(), numbers)
        if self.capacity is not None:
            is_dropped = torch.arange(len(order), device=order.device) >= ends[-1]
            counts[-1] = (numbers[order] * is_dropped).sum()
        self._counts = counts if self._counts is None else self._counts + counts

    def _ends(self, experts: torch.Tensor) -> torch.Tensor:
        """Return where the rows of each expert end, [E] int32, of sorted numbers of experts."""
        numbers = torch.arange(self.module.num_experts, device=experts.device)
        return torch.searchsorted(experts, numbers, right=True, out_int32=True)

    def _of_kept(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs, and zeros for the rows behind those of the last expert.

        The host waits for the number of rows that are kept.
        """
        num_kept = int(ends[-1])
        y = self.compute(rows[:num_kept], ends)
        return F.pad(y, (0, 0, 0, len(rows) - num_kept))

    def outputs(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [S, D] for rows [S, D] sorted by expert.

        Where a loop has to multiply the stacks, the host waits for `ends` here, once.
        """
        module = self.module
        first = "gate_up_proj" if module.has_gate else "up_proj"
        if not self._are_grouped(x.device, (first, "down_proj")):
            ends = ends.cpu()
        y = self._linear(first, x, ends)
        if not module.has_gate:
            y = module.act_fn(y)
        elif type(module)._apply_gate is _default_apply_gate and has_silu(module):
            y = gated_silu(*y.chunk(2, dim=-1))
        else:
            y = module._apply_gate(y)
        y = self._linear("down_proj", y, ends)
        return module.post_expert_norm(y) if module.has_post_expert_norm else y

    def _linear(self, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        y = grouped_linear(x, self._stack(name), ends, self._adapter(name), self.half)
        if not self.module.has_bias:
            return y
        # Not into y, which selective checkpointing keeps.
        return rows_of_experts(getattr(self.module, f"{name}_bias"), ends, len(x)).add_(y)

    def _stack(self, name: str) -> Weight:
        """Return a stack as [E, out, in], a view where a class keeps [E, in, out]."""
        stack = weight_of(self.module, name)
        return stack.mT if self.module.is_transposed else stack

    def _adapter(self, name: str) -> StackedAdapter | None:
        """Return views of PEFT's factors: A [E R, in], by expert, and B [out, R E], by rank.

        One pair that experts share is A [R, in] and B [out, R].
        """
        wrapper = self.adapters.get(name)
        if wrapper is None or wrapper.disable_adapters or wrapper.merged:
            return None
        (adapter,) = wrapper.active_adapters
        factors: Any = (wrapper.lora_A[adapter], wrapper.lora_B[adapter])
        a, b = (factor.weight for factor in factors)
        rank, num_experts = wrapper.r[adapter], self._stack(name).shape[0]
        a, b = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
        a, b = (factor.expand(num_experts, -1, -1) for factor in (a, b))
        return StackedAdapter(a, b, wrapper.scaling[adapter])

    def _are_grouped(self, device: torch.device, names: tuple[str, ...]) -> bool:
        stacks = [self._stack(name) for name in names]
        widths = {width for stack in stacks for width in stack.shape[1:]}
        widths |= {rank for wrapper in self.adapters.values() for rank in wrapper.r.values()}
        return takes(device, stacks[0].dtype, widths)
