"""CPU offload: the optimizer, or also the weights and gradients that fsdp2 shards.

`optimizer`: the optimizer works on copies in CPU memory of what this rank trains. Per step the
gradients are copied down, after all sums over ranks, and the updated weights are copied up, their
bytes each way; the device keeps nothing of the optimizer. `all`: fsdp2 itself keeps the shards on
the CPU (see fsdp2.py), and so their gradients and states are there too.
Sources: Ren et al., "ZeRO-Offload", arXiv 2101.06840; torch's CPUOffloadPolicy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import RunConfig
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import local, placed_like

CPU = torch.device("cpu")


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Move the optimizer to the CPU, with `optimizer`; make portable tensors on the device."""

    def to_portable(name: str, local: torch.Tensor) -> torch.Tensor:
        # A DTensor's collectives run on its mesh's device.
        return _copied_to(mesh.device, pm.to_portable(name, local))

    if cfg.parallel.offload == "all":
        return replace(pm, to_portable=to_portable)
    copies = Copies.of(pm.trained())

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = pm.make_optimizer([(name, copies.on_cpu[name]) for name, _ in named])
        optimizer.register_step_post_hook(lambda *_: copies.update_weights())
        return optimizer

    def from_portable(name: str, target: torch.Tensor, portable: torch.Tensor) -> None:
        pm.from_portable(name, target, portable)
        weight = copies.weights.get(name)
        if weight is not None and local(target).data_ptr() == local(weight).data_ptr():
            copies.refresh(name)

    return replace(
        pm,
        make_optimizer=make_optimizer,
        reduce_grads=(*pm.reduce_grads, copies.take_gradients),
        to_portable=to_portable,
        from_portable=from_portable,
    )


@dataclass(frozen=True)
class Copies:
    """Trained weights by name, and their copies in CPU memory, even where the weights are there."""

    weights: dict[str, nn.Parameter]
    on_cpu: dict[str, nn.Parameter]

    @staticmethod
    def of(weights: dict[str, nn.Parameter]) -> "Copies":
        """Return copies of these weights as they are now."""
        copied = {name: _copied_to(CPU, weight.detach()) for name, weight in weights.items()}
        return Copies(weights, {name: nn.Parameter(copy) for name, copy in copied.items()})

    def take_gradients(self) -> None:
        """Move this rank's gradients from the device to the CPU, after the backward."""
        for name, weight in self.weights.items():
            gradient, weight.grad = weight.grad, None
            if gradient is not None:
                self.on_cpu[name].grad = _copied_to(CPU, gradient)

    @torch.no_grad()
    def update_weights(self) -> None:
        """Copy this rank's updated weights from the CPU to the device, after the step."""
        for name, weight in self.weights.items():
            local(weight).copy_(local(self.on_cpu[name]))

    @torch.no_grad()
    def refresh(self, name: str) -> None:
        """Copy a weight that was loaded from the device to the CPU."""
        local(self.on_cpu[name]).copy_(local(self.weights[name]))


def _copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return placed_like(tensor, local(tensor).to(device, copy=True))
