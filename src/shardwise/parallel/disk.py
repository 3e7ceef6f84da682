"""Disk offload: weights and the optimizer's states lie in a file, in memory only while in use.

Units are the layers and the two ends of a model. A unit is read before its forward, and again
before its backward, while the unit before it computes; nothing is written. The optimizer steps unit
by unit: trained weights and states are read, updated, and written while the next unit is updated.
In full training, gradients that no ranks add up wait in the file too; all others stay in memory.
Memory per rank: the gradients that stay in memory, and three times the largest unit. For the
backward, autograd keeps the places of weights in the window instead of the weights.
Sources: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857; torch.autograd.graph's hooks.
"""

import contextlib
import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.base.layouts import strategy_facts
from shardwise.config import RunConfig, UserError
from shardwise.models.part import ModelPart
from shardwise.models.spec import ModelSpec
from shardwise.parallel.disk_buffers import SideStream
from shardwise.parallel.disk_units import FileLayout, Pages, stand_in
from shardwise.parallel.disk_update import Update
from shardwise.parallel.disk_window import Window
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.place import local, materialise, placed_like
from shardwise.parallel.reduce import from_every_rank


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Give weights on `meta` a place on disk, and read them around the forward of each unit."""
    memory = partial(_stand_in, mesh.device)
    materialise(nn.ModuleList(pm.parts), mesh.device, memory=memory)
    parts = [part for part in pm.parts if isinstance(part, ModelPart)]
    kinds = update_rule_of(cfg).whole_states
    layout = FileLayout(parts, len(kinds), _dtype_of_gradients(pm, cfg, spec))
    window = _reserve(layout, cfg, _side_stream(mesh.device))
    update = Update(layout, window, kinds)
    for visits in layout.visits:
        order = [Pages(visit.unit) for visit in visits]
        for number, visit in enumerate(visits):
            for module in visit.modules:
                module.forward = _around(module, window, order, number)

    def to_portable(name: str, held: torch.Tensor) -> torch.Tensor:
        return pm.to_portable(name, window.values(held))

    def from_portable(name: str, target: torch.Tensor, portable: torch.Tensor) -> None:
        memory = window.room(target)
        pm.from_portable(name, target if memory is None else memory, portable)
        if memory is None:
            update.take_state(target)
        else:
            window.change(target, memory)

    return replace(
        pm,
        make_optimizer=lambda named: update.by_unit(pm.make_optimizer(named)),
        reduce_grads=(*pm.reduce_grads, update.finish),
        to_portable=to_portable,
        from_portable=from_portable,
        storage=window,
    )


def _dtype_of_gradients(
    pm: ParallelModel, cfg: RunConfig, spec: ModelSpec
) -> Callable[[torch.Tensor], torch.dtype] | None:
    """Return the dtype of each gradient on disk; None where gradients are in memory.

    With LoRA they are small, and what adds up those of several ranks finds them in memory.
    """
    parallel = cfg.parallel
    is_alone = strategy_facts(parallel).axis is None and parallel.ranks_of_a_model == parallel.pp
    if cfg.lora is not None or not is_alone or (spec.tied and parallel.pp > 1):
        return None
    in_float32 = cfg.training.accumulation == "float32"
    return lambda parameter: torch.float32 if in_float32 else parameter.dtype


def _side_stream(device: torch.device) -> SideStream | None:
    return None if device.type == "cpu" else SideStream(device)


def _stand_in(device: torch.device, like: torch.Tensor) -> torch.Tensor:
    return placed_like(like, stand_in(local(like), device=device))


def _reserve(layout: FileLayout, cfg: RunConfig, side: SideStream | None) -> Window:
    """Make this rank's file; UserError, the same on every rank, if one of them has no room."""
    folder = Path(cfg.parallel.offload_folder or cfg.training.output_dir)
    window, reason, made = None, None, None
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()  # not the folders above it, which a mistake may name
            made = folder
        window = Window(folder, [*layout.trained], made, side)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError("no memory for the buffers of parallel.offload disk") from None
        reason = error.strerror
    # A few words from every rank to all.
    reasons = [reason for reason in from_every_rank(reason) if reason]
    if reasons:
        if window is not None:
            window.close()
        elif made is not None:
            made.rmdir()
        raise UserError(
            f"parallel.offload disk needs {layout.num_bytes / 2**30:.2f} GiB in {folder} for each "
            f"rank ({reasons[0]}); make room, or name another folder in parallel.offload_folder"
        )
    assert window is not None
    return window


class KeptWeight(NamedTuple):
    """The stand-in that autograd keeps in place of a weight, or of a view of it."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def _around(
    module: nn.Module, window: Window, order: Sequence[Pages], number: int
) -> Callable[..., Any]:
    """Return a module's forward, before which its weights are read, as before its backward.

    `order`: what the forwards of the part need, one after the other; `number`: of this one.
    """
    forward, pages = module.forward, order[number]
    # At the end forwards turn round. Without a backward the next one begins at the first unit.
    above = order[number + 1] if number + 1 < len(order) else None
    below = order[number - 1] if number else above

    def keep(tensor: torch.Tensor) -> KeptWeight | torch.Tensor:
        if isinstance(tensor, DTensor) or not window.hold(pages).has(tensor):
            return tensor
        return KeptWeight(tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def back(kept: KeptWeight | torch.Tensor) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        storage = window.hold(pages, below).bytes.untyped_storage()
        tensor = torch.empty(0, dtype=kept.dtype, device=storage.device)
        return tensor.set_(storage, kept.offset, kept.size, kept.stride)

    def before_backward(_: torch.Tensor) -> None:
        # Layers that are computed again read weights before autograd asks for any.
        window.hold(pages, below)

    def read(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            window.hold(pages, above or order[0])
            return forward(*args, **kwargs)
        window.hold(pages, above or below)
        with saved_tensors_hooks(keep, back):
            output = forward(*args, **kwargs)
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(before_backward)
        return output

    return read
