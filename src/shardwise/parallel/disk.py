"""Disk offload: weights and the optimizer's states lie in a file, in memory only while in use.

Units are the layers and the two ends of a model. A unit is read before its forward, and again
before its backward, while the unit before it computes; nothing is written. The optimizer steps unit
by unit: trained weights and states are read, updated, and written while the next unit is updated.
Memory per rank: all gradients, and three times the largest unit. Autograd keeps no weights for the
backward but their places in the window.
Sources: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857; torch.autograd.graph's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.config import RunConfig, UserError, require
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.part import ModelPart
from shardwise.models.spec import ModelSpec
from shardwise.parallel.disk_window import Leaf, Pages, Unit, Window, aligned, stand_in
from shardwise.parallel.place import local, materialise, placed_like
from shardwise.parallel.reduce import of_every_rank

STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""The states of each trained weight that are as large as it, by optimizer."""
PAGE = 4096
"""Units begin at a multiple of so many bytes."""


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Give weights on `meta` a place on disk, and read them around the forward of each unit."""
    # Only here is the device known.
    require(
        mesh.device.type == "cpu",
        "parallel.offload disk is for CPUs; use offload all with parallel.data fsdp2 on a GPU",
    )
    materialise(nn.ModuleList(pm.parts), mesh.device, memory=_stand_in)
    offload = Offload(pm, cfg)
    offload.reserve(cfg)
    window = offload.window

    def to_portable(name: str, held: torch.Tensor) -> torch.Tensor:
        return pm.to_portable(name, window.values(held))

    def from_portable(name: str, target: torch.Tensor, portable: torch.Tensor) -> None:
        leaf = window.places.get(local(target.detach()).data_ptr())
        if leaf is not None:
            memory = torch.empty(leaf.stand_in.shape, dtype=leaf.stand_in.dtype)
            whole = placed_like(target, memory) if _is_wrapped(target) else memory
            pm.from_portable(name, whole, portable)
            window.store(leaf, memory)
        else:
            pm.from_portable(name, target, portable)
            offload.take_state(target)

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return offload.by_unit(pm.make_optimizer(named))

    return replace(
        pm,
        make_optimizer=make_optimizer,
        to_portable=to_portable,
        from_portable=from_portable,
        values=window.values,
        disk_bytes=lambda: (window.read_bytes, window.written_bytes),
    )


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def _stand_in(like: torch.Tensor) -> torch.Tensor:
    made = stand_in(local(like))
    return placed_like(like, made) if _is_wrapped(like) else made


class Kept(NamedTuple):
    """What autograd keeps in place of a weight, or of a view of it."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class Offload:
    """The units of a rank, and what is done around each."""

    def __init__(self, pm: ParallelModel, cfg: RunConfig) -> None:
        """Give each parameter a place in a unit, and each unit one in the file."""
        self.kinds = STATES[cfg.optimizer.name]
        self.states: dict[nn.Parameter, list[Leaf]] = {}
        self.trained: dict[Unit, list[nn.Parameter]] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.window: Window
        self._end = 0
        for part in pm.parts:
            assert isinstance(part, ModelPart)
            self._add(part)

    def reserve(self, cfg: RunConfig) -> None:
        """Make this rank's file; UserError, the same on every rank, if one has no room."""
        folder = Path(cfg.parallel.offload_folder or cfg.training.output_dir)
        reason = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.window = Window(folder, [*self.trained])
        except OSError as error:
            reason = error.strerror
        # A few words from every rank to all.
        if reasons := [reason for reason in of_every_rank(reason) if reason]:
            raise UserError(
                f"parallel.offload disk needs {self._end / 2**30:.1f} GiB of {folder} for each "
                f"rank ({reasons[0]}); make room, or name another folder in "
                "parallel.offload_folder"
            )

    def _add(self, part: ModelPart) -> None:
        """Make the units of a part, and replace the forwards of their modules."""
        hf, spec = part.hf, part.spec
        layers = [f"{layer.name}." for layer in spec.layers]
        last = (f"{spec.norm}.", f"{spec.head}.")
        named: dict[str, list[nn.Parameter]] = {"": [], **{layer: [] for layer in layers}}
        named["last"] = []
        for name, parameter in hf.named_parameters():
            at_end = not spec.tied and name.startswith(last)
            place = next((layer for layer in layers if name.startswith(layer)), "")
            named["last" if at_end else place].append(parameter)
        units = {place: self._unit(parameters) for place, parameters in named.items()}
        if spec.tied:
            units["last"] = units[""]
        places = ["", *layers, "last"]
        if not spec.first or not named[""]:
            places.remove("")
        if not spec.last:
            places.remove("last")
        visits = [Pages(units[place]) for place in places]
        for number, place in enumerate(places):
            for path in _modules(hf, spec, place, layers):
                module = hf.get_submodule(path)
                module.forward = self._around(module, visits, number)

    def _unit(self, parameters: Sequence[nn.Parameter]) -> Unit:
        unit = Unit()
        end = unit.begin = -(-self._end // PAGE) * PAGE

        def leaf(tensor: torch.Tensor, own: torch.Tensor | None) -> Leaf:
            nonlocal end
            made = Leaf(tensor, end, own)
            end += aligned(made.nbytes)
            return made

        trained = [p for p in parameters if p.requires_grad]
        with torch.no_grad():  # where a DTensor gives its own tensor
            for p in parameters:
                if not p.requires_grad:
                    unit.frozen.append(leaf(local(p).data, local(p)))
            unit.begin_trained = end
            for p in trained:
                unit.trained.append(leaf(local(p).data, local(p)))
            unit.begin_states = end
            for p in trained:
                self.states[p] = [leaf(stand_in(local(p)), None) for _ in self.kinds]
                unit.states += self.states[p]
        unit.end = self._end = end
        self.trained[unit] = trained
        return unit

    def _around(
        self, module: nn.Module, visits: Sequence[Pages], number: int
    ) -> Callable[..., Any]:
        """Return a module's forward, before which its weights are read, as before its backward."""
        forward, pages = module.forward, visits[number]
        # Forwards turn round at the end. Without a backward the next one begins at the first unit.
        ahead = visits[number + 1] if number + 1 < len(visits) else None
        below = visits[number - 1] if number else ahead

        def keep(tensor: torch.Tensor) -> Kept | torch.Tensor:
            if _is_wrapped(tensor) or not self.window.hold(pages).has(tensor):
                return tensor
            place = tensor.storage_offset()
            return Kept(tensor.dtype, tensor.size(), tensor.stride(), place)

        def back(kept: Kept | torch.Tensor) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            storage = self.window.hold(pages, below).bytes.untyped_storage()
            tensor = torch.empty(0, dtype=kept.dtype)
            return tensor.set_(storage, kept.offset, kept.size, kept.stride)

        def read(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                self.window.hold(pages, ahead or visits[0])
                return forward(*args, **kwargs)
            self.window.hold(pages, ahead or below)
            with saved_tensors_hooks(keep, back):
                output = forward(*args, **kwargs)
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    # Layers that are computed again read weights before autograd asks for them.
                    tensor.register_hook(lambda _: self._before_backward(pages, below))
            return output

        return read

    def _before_backward(self, pages: Pages, below: Pages | None) -> None:
        self.window.hold(pages, below)

    def by_unit(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the optimizer's step update one unit after the other."""
        inner = optimizer.step
        self.optimizer = optimizer

        @torch.no_grad()
        def step(_: torch.optim.Optimizer) -> None:
            self.window.clear()
            gradients = {p: p.grad for trained in self.trained.values() for p in trained}
            units = [u for u, ps in self.trained.items() if any(gradients[p] is not None for p in ps)]
            for parameter in gradients:
                parameter.grad = None
            for unit, then in zip(units, [*units[1:], None]):
                pages = Pages(unit, is_update=True)
                held = self.window.hold(pages, then and Pages(then, is_update=True))
                for parameter in self.trained[unit]:
                    parameter.grad = gradients[parameter]
                inner()
                for parameter in self.trained[unit]:
                    parameter.grad = None
                    for leaf, state in self._states(parameter):
                        if leaf.tensor is None:  # made by this step
                            leaf.tensor = local(state)
                            held.view(leaf).copy_(leaf.tensor)
                self.window.drop(pages, is_changed=True)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

        optimizer.step = MethodType(step, optimizer)  # ty: ignore[invalid-assignment]
        return optimizer

    def _states(self, parameter: nn.Parameter) -> list[tuple[Leaf, torch.Tensor]]:
        assert self.optimizer is not None
        of_parameter = self.optimizer.state.get(parameter, {})
        leaves = zip(self.states[parameter], self.kinds, strict=True)
        return [(leaf, of_parameter[kind]) for leaf, kind in leaves if kind in of_parameter]

    @torch.no_grad()
    def take_state(self, tensor: torch.Tensor) -> None:
        """Move a state of the optimizer that was just loaded to disk; leave anything else."""
        if self.optimizer is None:
            return
        for parameter in self.optimizer.state:
            for leaf, state in self._states(parameter):
                if state is tensor:
                    leaf.tensor = local(state)
                    self.window.store(leaf, leaf.tensor)
                    leaf.set(leaf.stand_in)


def _modules(hf: nn.Module, spec: ModelSpec, place: str, layers: Sequence[str]) -> list[str]:
    """Return the paths of the modules whose forwards use the weights of a place."""
    if place in layers:
        return [place.removesuffix(".")]
    if place == "last":
        return [spec.norm, spec.head]
    ends = (spec.embed, spec.norm, spec.head)
    inside = (*layers, *(f"{end}." for end in ends))
    others = [
        path
        for path, module in hf.named_modules()
        if any(p is not None for p in module._parameters.values())
        and path not in ends
        and not f"{path}.".startswith(inside)
    ]
    return [spec.embed, *others]
