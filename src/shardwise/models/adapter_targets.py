"""Targets and patterns with which PEFT's config adapts the same weights, with the same ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer, ParamWrapper

from shardwise.models.names import renamed_by_peft


@dataclass(frozen=True)
class Seen:
    """The class that PEFT will see, without adapters."""

    names: frozenset[str]
    """The names of its parameters."""
    model_type: str
    layers: str
    """The path to its layers."""

    @property
    def _modules(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.names}

    def targets(self, layers: Mapping[str, LoraLayer]) -> tuple[list[str], list[str]]:
        """Return `target_modules` and `target_parameters` for PEFT's layers, by their names here.

        PEFT renames, by model type, targets that look like a checkpoint's per-expert matrices, and
        so loses linears of MLPs (`names.renamed_by_peft`). Those are listed as parameters
        (`....weight`) instead of modules, which gives the same factors under the same names. PEFT
        then computes W + BA rather than Wx + BAx, and the config must not have dropout.
        """
        modules: list[str] = []
        parameters: list[str] = []
        for path, layer in layers.items():
            name = self._peft_name(path, layer)
            is_module = name == path and not isinstance(layer, ParamWrapper)
            (modules if is_module else parameters).append(name)
        return (
            short_targets(modules, self._modules, self.layers),
            short_targets(parameters, self.names, self.layers),
        )

    def sizes(self, layers: Mapping[str, LoraLayer]) -> dict[str, tuple[int, float]]:
        """Return rank and alpha of PEFT's layers by the names that its patterns match."""
        return {
            self._peft_name(path, layer): size
            for (path, layer), size in zip(layers.items(), sizes_of(layers).values())
        }

    def _peft_name(self, path: str, layer: LoraLayer) -> str:
        """Return the name of what PEFT adapts: of a module, or of a parameter where it renames."""
        is_renamed = path.rpartition(".")[2] in renamed_by_peft(self.model_type)
        return f"{path}.weight" if is_renamed and not isinstance(layer, ParamWrapper) else path

    def patterns(
        self, sizes: Mapping[str, tuple[int, float]], r: int, alpha: float
    ) -> dict[str, dict[str, Any]]:
        """Return `rank_pattern` and `alpha_pattern` for adapters of these ranks and alphas.

        PEFT takes the first entry that matches; no two match one weight, so order means nothing.
        """
        patterns: dict[str, dict[str, Any]] = {}
        all_names = self._modules | self.names
        for place, (key, default) in enumerate((("rank_pattern", r), ("alpha_pattern", alpha))):
            entries = patterns[key] = {}
            for value in dict.fromkeys(size[place] for size in sizes.values()):
                paths = [path for path, size in sizes.items() if size[place] == value]
                if value != default:
                    entries |= dict.fromkeys(short_targets(paths, all_names, self.layers), value)
        return patterns


def sizes_of(layers: Mapping[str, LoraLayer]) -> dict[str, tuple[int, float]]:
    """Return rank and alpha of PEFT's layers."""
    return {name: (x.r["default"], x.lora_alpha["default"]) for name, x in layers.items()}


def short_targets(paths: list[str], all_names: Iterable[str], layers: str) -> list[str]:
    """Return targets for PEFT's config: an end of names where all that have it are meant.

    PEFT matches a target with the end of a name, so that one target stands for all layers.
    `all_names` are those of the class that it will see, `layers` its path to the layers.
    """
    all_names, wanted = list(all_names), set(paths)
    short: dict[str, None] = {}
    for path in paths:
        end = path.removeprefix(f"{layers}.").partition(".")[2]
        is_in_layer = path.startswith(f"{layers}.")
        complete = all(name in wanted for name in all_names if name.endswith(f".{end}"))
        short[end if is_in_layer and complete else path] = None
    return list(short)
