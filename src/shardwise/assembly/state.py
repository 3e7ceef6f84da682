"""Fill the tensors of a run: from a `State` what it has, the rest from the model's files.

The tensors of a run are known by the keys of `interfaces.State`. A checkpoint writes the tensors
that `portable_tensors` gives, and `load_state` reads the same ones, so that each layout reads what
another wrote.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.assembly.optimizer import optimized_parameters
from shardwise.base.interfaces import ParallelModel, State
from shardwise.base.process.watchdog import beat, paused
from shardwise.config import Lora, RunConfig
from shardwise.kernels.quantised import dequantise
from shardwise.models import load, published, weight_files, weight_folder
from shardwise.models.adapters import lora, peft_config
from shardwise.models.initialise import nudged
from shardwise.models.names import hf_name, is_adapter, is_saved_copy
from shardwise.models.quantise import quantised
from shardwise.models.stored import stored_in
from shardwise.parallel.optimizers import update_rule_of


@dataclass(frozen=True)
class MemoryState:
    """A state in memory: full tensors that every rank has. With no tensors it is a fresh start."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0
    loss_scale: Mapping[str, float | int | bool] | None = None
    lora: Lora | None = None

    @property
    def keys(self) -> Collection[str]:
        """The keys of the tensors."""
        return self.tensors.keys()

    def check(self, model: nn.Module, cfg: RunConfig, selected: Collection[str]) -> None:
        """Check that the model has what the tensors are of; their shapes are checked when read."""
        known = {f"buffers/{name}" for name, _ in persistent_buffers(model)}
        for name, parameter in model.named_parameters():
            kinds = update_rule_of(cfg).states(parameter, name in selected)
            known |= {f"weights/{name}", *(f"optimizer/{name}/{kind}" for kind in kinds)}
        unknown = set(self.keys) - known
        assert not unknown, f"the model has no {min(unknown)}"

    def read(self, key: str, portable: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the full tensor."""
        return self.tensors[key]


FRESH = MemoryState()


def load_initial_weights(pm: ParallelModel, cfg: RunConfig, state: State) -> None:
    """Fill the weights and buffers of this rank that are not in `state`, from the files.

    One full tensor at a time is in CPU memory. Each rank copies its share of it; nothing is sent.
    """
    places: dict[str, list[torch.Tensor]] = {}
    for key, name, local in _weights(pm):
        if key not in state.keys:
            # Two stages of a rank may each hold a copy of a tied weight.
            places.setdefault(name, []).append(local)
    if not places:
        return
    left = set(places)
    for name, full in _initial_weights(pm, cfg, places):
        if cfg.measure.nudge_weights and full.is_floating_point():
            full = nudged(full, cfg.training.seed, name)
        for local in places[name]:
            pm.from_portable(name, local, full)
        left.discard(name)
        beat()
    assert not left, f"never filled: {sorted(left)[:5]}"


def load_state(
    pm: ParallelModel, optimizer: torch.optim.Optimizer, cfg: RunConfig, state: State
) -> None:
    """Fill the weights, buffers and optimizer states that `state` has.

    `optimizer` has not made a step, so it has no states yet.
    """
    selected = {p for g in optimizer.param_groups if g.get("is_selected") for p in g["params"]}
    load_weights(pm, state)
    for name, parameter in optimized_parameters(optimizer):
        states = update_rule_of(cfg).states(parameter, parameter in selected)
        for kind, make in states.items():
            # Each is read as soon as it is made: it may go to disk from there.
            if (key := f"optimizer/{name}/{kind}") in state.keys:
                optimizer.state[parameter][kind] = local = make()
                _read(pm, state, key, name, local)
                beat()


def load_weights(pm: ParallelModel, state: State) -> None:
    """Fill the weights and buffers that `state` has, of a run that may have made steps."""
    for key, name, local in _weights(pm):
        if key in state.keys:
            _read(pm, state, key, name, local)
            beat()


def portable_tensors(
    pm: ParallelModel, optimizer: torch.optim.Optimizer, trained_only: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, tensor) of all that a checkpoint saves; tensors are plain ones or DTensors.

    They share the run's memory where its layout allows that.
    `trained_only`: without frozen weights and buffers, which the model's files have.
    """
    for key, name, local in _all_tensors(pm, optimizer, trained_only):
        yield key, _portable(pm, name, local)


def portable_weights(pm: ParallelModel, trained_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of weights and buffers only."""
    for _, name, local in _weights(pm, trained_only):
        yield name, _portable(pm, name, local)


def persistent_buffers(hf: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) of the buffers that a model's files have, such as a router's bias."""
    persistent = hf.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in hf.named_buffers() if name in persistent)


def _initial_weights(
    pm: ParallelModel, cfg: RunConfig, names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor): base weights from the model's files, LoRA factors drawn.

    Magnitudes of DoRA are those of base weights. With `lora.path` the factors, the magnitudes and
    the trained copies of modules are those of that folder.
    """
    section = cfg.lora if cfg.lora is not None and cfg.lora.path is not None else None
    # `modules_to_save` keeps the original beside the trained copy: two parameters for one weight.
    by_hf_name: dict[str, list[str]] = {}
    stored = {name: part for p in pm.parts for name, part in stored_in(p.hf).items()}
    # Of a matrix in few bits there are several tensors.
    matrices = {
        f"{name}.{tensor}": name for name in stored for tensor, _ in stored[name].named_parameters()
    }
    magnitudes: dict[str, tuple[str, Any]] = {}
    for part in () if section else pm.parts:
        magnitudes |= lora.magnitude_starts(part.hf, names)
    bases = [matrices.get(name, name) for name in names]
    for name in dict.fromkeys([*bases, *magnitudes]):
        if not is_adapter(name) and not (section and is_saved_copy(name)):
            by_hf_name.setdefault(hf_name(name), []).append(name)
    if by_hf_name:
        with paused():
            weight_folder.fetch(cfg.model)
        hf = pm.parts[0].hf
        assert isinstance(hf, PreTrainedModel), "the state of a caller's module has all values"
        own = None
        if cfg.model.base != "none":
            form = published.stored_form(hf.config, cfg.model.base)
            is_of_all = published.base_of(hf.config) == cfg.model.base
            wanted = {hf_name(name) for name in stored}
            own = weight_files.OwnCodes(form, wanted, is_of_all=is_of_all)
        base = load.weights(hf, cfg.model, cfg.training.seed, by_hf_name, own)
        for disk_name, full in base:
            for name in by_hf_name[disk_name]:
                if name in stored:
                    assert own is not None
                    matrix, kept = stored[name], own.of(disk_name)
                    if kept is None:
                        tensors = quantised(matrix.turned(full), matrix.format, name)
                    else:
                        tensors = {part: matrix.turned(values) for part, values in kept.items()}
                    yield from ((f"{name}.{part}", values) for part, values in tensors.items())
                    if name in magnitudes:
                        values = dequantise(tensors, matrix.format, matrix.weight_dtype)
                        full = matrix.turned(values)
                elif name in names:
                    yield name, full
                if name in magnitudes:
                    magnitude, layer = magnitudes[name]
                    yield magnitude, lora.first_magnitude(layer, full)
    for part in pm.parts:
        if section is None:
            yield from lora.adapter_weights(part.hf, cfg.training.seed, names)
        else:
            assert isinstance(part.hf, PreTrainedModel), "a rule refuses LoRA on a caller's module"
            yield from peft_config.folder_weights(section, cfg.model, part.hf, names)


def _weights(
    pm: ParallelModel, trained_only: bool = False
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (key, name, what this rank holds) of weights and persistent buffers.

    The order is the same on every rank that has them.
    """
    for name, parameter in pm.named_parameters():
        if parameter.requires_grad or not trained_only:
            yield f"weights/{name}", name, parameter
    if trained_only:
        return
    for part in pm.parts:
        for name, buffer in persistent_buffers(part.hf):
            yield f"buffers/{name}", name, buffer


def _all_tensors(
    pm: ParallelModel, optimizer: torch.optim.Optimizer, trained_only: bool = False
) -> Iterator[tuple[str, str, torch.Tensor]]:
    yield from _weights(pm, trained_only)
    for name, parameter in optimized_parameters(optimizer):
        for kind, tensor in optimizer.state[parameter].items():
            yield f"optimizer/{name}/{kind}", name, tensor


def _portable(pm: ParallelModel, name: str, local: torch.Tensor) -> torch.Tensor:
    # A number, such as AdamW's count of steps, is whole on every rank.
    return pm.to_portable(name, local) if local.dim() else local.detach()


def _read(pm: ParallelModel, state: State, key: str, name: str, local: torch.Tensor) -> None:
    portable = state.read(key, lambda: _portable(pm, name, local))
    if local.dim():
        pm.from_portable(name, local, portable)
    else:
        local.detach().copy_(portable)
