"""Measured costs of a model's units, in files of the user's cache.

The name of a file is a digest of all that the costs depend on.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.base.process.world import device_type, num_cores
from shardwise.base.safety import cache_folder, write_atomically
from shardwise.base.schedule.costs import Cost
from shardwise.base.schedules import HALVING
from shardwise.config import RunConfig, UserError
from shardwise.config.keys import facts_of
from shardwise.metrics.hardware import environment, version
from shardwise.models.counts import unit_modules
from shardwise.models.spec import ModelSpec

SCHEMA_VERSION = 3
KERNEL_PACKAGES = ("triton", "fla-core", "mamba-ssm", "causal-conv1d", "kernels")
"""Packages that layers take kernels from where they are installed."""


@dataclass(frozen=True)
class Measured:
    """One micro-batch in a stage with one unit, less what every stage does around its layers."""

    forward_seconds: float
    backward_seconds: float
    """The whole backward, in one go."""
    input_seconds: float
    """The half of a backward for the stage's input; 0 where the backward has no halves."""
    weight_seconds: float
    """The half of a backward for the stage's weights."""
    activation_bytes: int
    """Bytes that its forward leaves alive: its input, but not its output."""


@dataclass(frozen=True)
class Profile:
    """The measured costs of a model's units on one machine."""

    units: dict[str, Measured]
    """The costs of each unit, by its key (`unit_keys`)."""
    stage_seconds: float
    """Time that every stage takes around its layers, for masks and positions, after a backward."""
    output_seconds: float
    """Time to send hidden states to another rank; 0 if one process measured."""
    num_processes: int
    spread: float
    """Half the distance between the quartiles of a round's seconds, over their median."""
    rounds: int


def unit_keys(hf: PreTrainedModel, spec: ModelSpec, schedule: str) -> tuple[str, ...]:
    """Return a key for each unit, bottom up; units of equal keys cost the same.

    A key has the kind of layer, the names, shapes and dtypes of the parameters, which of them are
    trained, and whether the unit's input needs a gradient.
    """
    kinds = ["embedding", *(f"{layer.kind}, {layer.feed_forward}" for layer in spec.layers), "head"]
    keys = []
    for kind, parameters, is_needed in zip(
        kinds, _parameters(hf, spec), needs_gradient(hf, spec, schedule), strict=True
    ):
        facts = [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters]
        keys.append(f"{kind}, {_digest([facts, is_needed])[:8]}")
    return tuple(keys)


def needs_gradient(hf: PreTrainedModel, spec: ModelSpec, schedule: str) -> list[bool]:
    """Return whether the input of each unit needs a gradient, bottom up."""
    trained = [any(p.requires_grad for _, p in unit) for unit in _parameters(hf, spec)]
    halves = schedule in HALVING
    return [place > 0 and (halves or any(trained[:place])) for place in range(len(trained))]


def _parameters(hf: PreTrainedModel, spec: ModelSpec) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the parameters of each unit by their names in it, bottom up."""
    units = []
    for paths in unit_modules(spec):
        modules = [hf.get_submodule(path).named_parameters() for path in paths]
        units.append([(f"{i}.{n}", p) for i, named in enumerate(modules) for n, p in named])
    return units


def num_busy(cfg: RunConfig, num_processes: int) -> int:
    """Return how many of a run's processes keep this machine busy: at most its cores or GPUs."""
    num_devices = torch.cuda.device_count() if device_type(cfg) == "cuda" else num_cores()
    return min(num_processes, num_devices)


def path_of(cfg: RunConfig, hf: PreTrainedModel, keys: Sequence[str], num_processes: int) -> Path:
    """Return the file of the profile of this run of so many processes on this machine."""
    facts = environment(torch.device(device_type(cfg)))
    machine = ("shardwise", "python", "torch", "cuda", "transformers", "peft", "device", "threads")
    run = {
        f"{section}.{key}": value
        for section, values in cfg.to_dict().items()
        for key, value in (values or {}).items()
        if facts_of(f"{section}.{key}").timed
    }
    run["data.packing"] = cfg.data.packed  # `auto` goes by the format, which is no key
    model = hf.config.to_dict()
    for key in ("_name_or_path", "transformers_version"):
        model.pop(key, None)
    depends = {
        "schema": SCHEMA_VERSION,
        "units": sorted(set(keys)),
        "model": model,
        "run": run,
        "machine": {key: facts[key] for key in machine}
        | {name: version(name) for name in KERNEL_PACKAGES},
        "busy": num_busy(cfg, num_processes),
    }
    return cache_folder() / "profiles" / f"{_digest(depends)[:16]}.json"


def write(profile: Profile, path: Path) -> None:
    """Write the file, all or nothing, also where another process writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(profile)}, indent=2)
    write_atomically(path, content + "\n")


def read(path: Path) -> Profile | None:
    """Return the profile in the file, or None if there is no such file; UserError if damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content.pop("schema_version") == SCHEMA_VERSION
        units = {key: Measured(**unit) for key, unit in content.pop("units").items()}
        content.pop("slowdown", None)  # of an older file; nothing reads it
        return Profile(units, **content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, AssertionError) as error:
        what = f"{path}: not a complete profile ({type(error).__name__}: {error})"
        way_out = "remove the file, or measure again with shardwise split --profile"
        raise UserError(f"{what}; {way_out}") from None


def with_measured(costs: Sequence[Cost], keys: Sequence[str], profile: Profile) -> tuple[Cost, ...]:
    """Return the costs with the profile's seconds and activation bytes."""
    pairs = zip(costs, keys, strict=True)
    return tuple(_with_measured(cost, profile.units[key], profile) for cost, key in pairs)


def _with_measured(cost: Cost, unit: Measured, profile: Profile) -> Cost:
    halves_seconds = unit.input_seconds + unit.weight_seconds
    inputs_seconds = unit.backward_seconds
    if halves_seconds:
        inputs_seconds = min(unit.input_seconds, unit.backward_seconds)
    return replace(
        cost,
        forward_seconds=unit.forward_seconds,
        input_seconds=inputs_seconds,
        weight_seconds=unit.backward_seconds - inputs_seconds,
        split_seconds=max(0.0, halves_seconds - unit.backward_seconds),
        activation_bytes=unit.activation_bytes,
        stage_seconds=profile.stage_seconds,
        output_seconds=profile.output_seconds,
    )


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
