"""CPU offload under fsdp2: the optimizer's states and its step, or the sharded weights and gradients too.

`optimizer`: the optimizer works on copies of this rank's shards in CPU memory. Per step the gradients of the shards
are copied down and the updated shards are copied up, their bytes each way; on the device nothing of the optimizer is
left. `all`: fsdp2 itself keeps the shards on the CPU (see fsdp2.py), and with them all that is made from them.
Sources: Ren et al., "ZeRO-Offload", arXiv 2101.06840; torch's CPUOffloadPolicy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import local, placed_like


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let what is kept on the CPU be handed over on the device, and move the optimizer there if that is asked for."""

    def to_portable(name: str, held: torch.Tensor) -> torch.Tensor:
        return _on(
            mesh.device, pm.to_portable(name, held)
        )  # a DTensor's collectives run on its mesh's device

    if cfg.parallel.offload == "all":
        return replace(pm, to_portable=to_portable)
    copies = Copies.of(
        {name: parameter for name, parameter in pm.named_parameters() if parameter.requires_grad}
    )

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = pm.make_optimizer([(name, copies.on_cpu[name]) for name, _ in named])
        optimizer.register_step_post_hook(lambda *_: copies.update_weights())
        return optimizer

    def from_portable(name: str, held: torch.Tensor, portable: torch.Tensor) -> None:
        pm.from_portable(name, held, portable)
        if (
            name in copies.weights
            and local(held).data_ptr() == local(copies.weights[name]).data_ptr()
        ):
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
    """Trained weights by name, and their copies in CPU memory, distinct even where the weights are on the CPU too."""

    weights: dict[str, nn.Parameter]
    on_cpu: dict[str, nn.Parameter]

    @staticmethod
    def of(weights: dict[str, nn.Parameter]) -> Copies:
        """Copies of these weights as they are now."""
        return Copies(
            weights,
            {
                name: nn.Parameter(_on(torch.device("cpu"), w.detach()))
                for name, w in weights.items()
            },
        )

    def take_gradients(self) -> None:
        """After the backward: this rank's gradients go from the device to the CPU, and are freed there."""
        for name, weight in self.weights.items():
            gradient, weight.grad = weight.grad, None
            if gradient is not None:
                self.on_cpu[name].grad = _on(torch.device("cpu"), gradient)

    @torch.no_grad()
    def update_weights(self) -> None:
        """After the optimizer's step: this rank's updated shards go from the CPU to the device."""
        for name, weight in self.weights.items():
            local(weight).copy_(local(self.on_cpu[name]))

    @torch.no_grad()
    def refresh(self, name: str) -> None:
        """A weight was loaded: so is its copy."""
        local(self.on_cpu[name]).copy_(local(self.weights[name]))


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    held = local(tensor).to(device, copy=True)
    return placed_like(tensor, held) if isinstance(tensor, DTensor) else held
