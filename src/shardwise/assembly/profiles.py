"""Measured costs of a model's units, kept in the user's cache folder under all that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.config import RunConfig, UserError
from shardwise.layouts import HALVING
from shardwise.metrics.hardware import environment, version
from shardwise.models.counts import unit_modules
from shardwise.models.spec import ModelSpec
from shardwise.process.world import device_type, num_cores
from shardwise.schedule.costs import Cost

SCHEMA_VERSION = 3
KERNEL_PACKAGES = ("triton", "fla-core", "mamba-ssm", "causal-conv1d", "kernels")
"""Packages that layers take kernels from where they are installed."""

_VALUES = "the time of a product does not depend on the numbers in it"
_UNITS = "it is in the names, shapes and dtypes of the units' parameters, and in which of them are trained"
_TOKENS = "a profile runs random tokens"
_AROUND = "it happens around a step's forwards and backwards, which alone are measured"
NOT_TIMED: Mapping[str, str] = {
    "model.path": "the model is known by its config and its units' parameters, wherever it lies",
    "model.init": _VALUES,
    "model.dtype": _UNITS,
    "model.tokenizer": _TOKENS,
    "lora.r": _UNITS,
    "lora.alpha": _VALUES,
    "lora.targets": _UNITS,
    "lora.rslora": _VALUES,
    "lora.modules_to_save": _UNITS,
    "lora.dtype": _UNITS,
    "data.train": _TOKENS,
    "data.weights": _TOKENS,
    "data.validation": _TOKENS,
    "data.format": _TOKENS,
    "data.text_field": _TOKENS,
    "data.on_error": _TOKENS,
    "data.workers": _TOKENS,
    "parallel": "a unit is measured whole, in a process of its own; the schedule's part in it is in the units' names",
    "optimizer": _AROUND,
    "training.output_dir": _AROUND,
    "training.steps": _AROUND,
    "training.global_batch_size": "one micro-batch is measured",
    "training.seed": _VALUES,
    "training.eval_every": _AROUND,
    "training.eval_batches": _AROUND,
    "training.save_every": _AROUND,
    "training.keep_last": _AROUND,
    "training.keep_best": _AROUND,
    "training.async_save": _AROUND,
    "training.resume": _AROUND,
    "training.max_restarts": _AROUND,
    "training.timeout_seconds": _AROUND,
    "training.sample": _AROUND,
    "training.device": "the device's name is looked at",
    "training.overwrite": _AROUND,
    "measure": _AROUND,
}
"""Sections and keys that a profile does not depend on, and why; it depends on all others, new ones too."""


@dataclass(frozen=True)
class Measured:
    """One micro-batch in a stage with one unit, less what every stage does around its layers."""

    forward_seconds: float
    backward_seconds: float
    """In one go."""
    input_seconds: float
    """Of a backward in two halves, the gradient of the stage's input; 0 where it has none."""
    weight_seconds: float
    """And the gradients of its weights."""
    activation_bytes: int
    """What its forward leaves alive: its input, but not its output."""


@dataclass(frozen=True)
class Profile:
    """What was measured on one machine, by `unit_keys`."""

    units: dict[str, Measured]
    stage_seconds: float
    """What every stage does around its layers in a forward, such as masks and positions, after a backward."""
    output_seconds: float
    """What it takes until hidden states are on another rank; 0 if one process measured."""
    num_processes: int
    slowdown: float
    """Seconds of one among `num_processes` that are busy, over those of one alone."""
    spread: float
    """Half the distance between the quartiles of a round's seconds, over their median."""
    rounds: int


def unit_keys(hf: PreTrainedModel, spec: ModelSpec, schedule: str) -> tuple[str, ...]:
    """A name for each unit, bottom up; units of equal names cost the same.

    In it: the kind of layer, the parameters with their shapes and dtypes and which of them are trained, and whether
    the unit's input needs a gradient.
    """
    kinds = ["embedding", *(f"{layer.kind}, {layer.feed_forward}" for layer in spec.layers), "head"]
    units = zip(kinds, _parameters(hf, spec), needs_gradient(hf, spec, schedule), strict=True)
    facts = (
        (kind, [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in named], needed)
        for kind, named, needed in units
    )
    return tuple(f"{kind}, {_digest([named, needed])[:8]}" for kind, named, needed in facts)


def needs_gradient(hf: PreTrainedModel, spec: ModelSpec, schedule: str) -> list[bool]:
    """Whether each unit's input needs a gradient: something below is trained, or the schedule wants it all the way."""
    trained = [any(p.requires_grad for _, p in named) for named in _parameters(hf, spec)]
    return [
        place > 0 and (schedule in HALVING or any(trained[:place])) for place in range(len(trained))
    ]


def _parameters(hf: PreTrainedModel, spec: ModelSpec) -> list[list[tuple[str, torch.nn.Parameter]]]:
    return [
        [
            (f"{i}.{n}", p)
            for i, module in enumerate(modules)
            for n, p in hf.get_submodule(module).named_parameters()
        ]
        for modules in unit_modules(spec)
    ]


def num_busy(cfg: RunConfig, num_processes: int) -> int:
    """How many of a run's processes keep this machine busy: no more than there are cores or GPUs."""
    return min(
        num_processes, torch.cuda.device_count() if device_type(cfg) == "cuda" else num_cores()
    )


def path_of(cfg: RunConfig, hf: PreTrainedModel, keys: Sequence[str], num_processes: int) -> Path:
    """The file of the profile of this run of so many processes on this machine."""
    facts = environment(torch.device(device_type(cfg)))
    machine = ("shardwise", "python", "torch", "cuda", "transformers", "peft", "device", "threads")
    sections = cfg.to_dict().items()
    values = {
        f"{section}.{key}": value
        for section, content in sections
        for key, value in (content or {}).items()
    }
    depends = {
        "schema": SCHEMA_VERSION,
        "units": sorted(set(keys)),
        "model": {
            k: v
            for k, v in hf.config.to_dict().items()
            if k not in ("_name_or_path", "transformers_version")
        },
        # By models/patches/experts.py, which may choose another product for a tensor-parallel rank's share.
        "experts": hf.config._experts_implementation,
        "run": {
            key: v
            for key, v in values.items()
            if key not in NOT_TIMED and key.partition(".")[0] not in NOT_TIMED
        },
        "machine": {k: facts[k] for k in machine}
        | {name: version(name) for name in KERNEL_PACKAGES},
        "busy": num_busy(cfg, num_processes),
    }
    cache = os.environ.get("SHARDWISE_CACHE") or Path.home() / ".cache" / "shardwise"
    return Path(cache, "profiles", f"{_digest(depends)[:16]}.json")


def write(profile: Profile, path: Path) -> None:
    """Write the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(profile)}, indent=2)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(content + "\n")
    os.replace(file.name, path)


def read(path: Path) -> Profile | None:
    """The profile in the file; None if there is no such file. UserError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content.pop("schema_version") == SCHEMA_VERSION
        units = {key: Measured(**unit) for key, unit in content.pop("units").items()}
        return Profile(units, **content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, AssertionError) as error:
        raise UserError(
            f"{path}: not a whole profile ({type(error).__name__}: {error}); remove the file, or measure again with "
            "shardwise split --profile"
        ) from None


def with_measured(costs: Sequence[Cost], keys: Sequence[str], profile: Profile) -> tuple[Cost, ...]:
    """The costs with times and activation bytes as measured."""
    return tuple(
        _with(cost, profile.units[key], profile) for cost, key in zip(costs, keys, strict=True)
    )


def _with(cost: Cost, unit: Measured, profile: Profile) -> Cost:
    apart = unit.input_seconds + unit.weight_seconds
    inputs = min(unit.input_seconds, unit.backward_seconds) if apart else unit.backward_seconds
    return replace(
        cost,
        forward_seconds=unit.forward_seconds,
        input_seconds=inputs,
        weight_seconds=unit.backward_seconds - inputs,
        split_seconds=max(0.0, apart - unit.backward_seconds),
        activation_bytes=unit.activation_bytes,
        stage_seconds=profile.stage_seconds,
        output_seconds=profile.output_seconds,
    )


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
