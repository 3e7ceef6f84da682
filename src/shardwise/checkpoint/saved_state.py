"""The state of a run in a checkpoint, which `build` reads under any layout."""

from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from shardwise.assembly.state import persistent_buffers
from shardwise.base.process.ending import RunError
from shardwise.base.process.watchdog import paused
from shardwise.checkpoint.folder import Manifest
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.tensors import DTYPES, Reader
from shardwise.config import RunConfig, UserError
from shardwise.parallel.optimizers import update_rule_of


class SavedState:
    """A state that is read from a checkpoint: see `interfaces.State`.

    With LoRA a checkpoint has trained weights only; frozen ones come from the model's files.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._tensors = read_index(folder).tensors
        self._reader = Reader(folder, self._tensors)
        self.step = manifest.step
        self.loss_scale = asdict(manifest.loss_scale)
        self.lora = None if manifest.lora is None else manifest.configured(str(folder)).lora

    @property
    def keys(self) -> Collection[str]:
        """The keys of the tensors that the checkpoint holds."""
        return self._tensors.keys()

    def check(self, model: nn.Module, cfg: RunConfig, selected: Collection[str]) -> None:
        """Raise UserError unless the checkpoint has exactly what a run of this model trains."""
        if problem := self._problem(model, cfg, selected):
            raise UserError(
                f"checkpoint {self._folder} does not fit this run: {problem}; take one of a run of "
                "the same model and lora, or start from scratch without training.resume"
            )

    def read(self, key: str, portable: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Read this rank's part into what it holds; RunError if a file cannot be read any more."""
        target = portable()
        try:
            with paused():
                self._reader.read(key, target)
        except (OSError, SafetensorError) as error:
            raise RunError(f"checkpoint {self._folder} could not be read: {error}") from None
        return target

    def _problem(self, model: nn.Module, cfg: RunConfig, selected: Collection[str]) -> str | None:
        parameters = dict(model.named_parameters())
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        expected: dict[str, torch.Tensor] = {}
        for name, parameter in (trained if cfg.lora else parameters).items():
            expected[f"weights/{name}"] = parameter
        for name, buffer in () if cfg.lora else persistent_buffers(model):
            expected[f"buffers/{name}"] = buffer
        for name, states in self._optimizer_states().items():
            if name not in trained:
                return f"{name} was trained, and is not here"
            kept = update_rule_of(cfg).states(trained[name], name in selected)
            if states != kept.keys():
                return f"{cfg.optimizer.name} does not keep {', '.join(sorted(states))} of {name}"
            for state in sorted(states):
                expected[f"optimizer/{name}/{state}"] = kept[state]()
        for key, like in expected.items():
            entry = self._tensors.get(key)
            if entry is None:
                return f"it does not hold {key}"
            if (tuple(entry.shape), DTYPES[entry.dtype]) != (like.shape, like.dtype):
                return (
                    f"its {key} is {DTYPES[entry.dtype]} of {entry.shape}, "
                    f"and here it is {like.dtype} of {list(like.shape)}"
                )
        if others := self._tensors.keys() - expected.keys():
            return f"it holds {min(others)}, which this run does not train"
        return None

    def _optimizer_states(self) -> dict[str, set[str]]:
        """Return the kinds of states that the checkpoint holds of each parameter, by its name."""
        states: dict[str, set[str]] = {}
        for key in self._tensors:
            if key.startswith("optimizer/"):
                name, _, state = key.removeprefix("optimizer/").rpartition("/")
                states.setdefault(name, set()).add(state)
        return states
