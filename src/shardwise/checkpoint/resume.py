"""Where a run starts: from scratch, or after a checkpoint that was found whole and fits, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint.folder import (
    ABANDONED,
    Manifest,
    complete,
    damage,
    read_manifest,
    step_of,
)
from shardwise.config import RunConfig, UserError
from shardwise.data.state import LoaderState
from shardwise.models import load
from shardwise.parallel.reduce import of_every_rank
from shardwise.run_file import parse_config, without_removed

MAY_DIFFER = frozenset(
    (
        "parallel",
        "measure.warmup_steps",
        "measure.memory",
        "measure.reverse_microbatches",
        "measure.trackers",
        "data.train",  # what is in it is compared by the loaders, and so is the tokenizer
        "model.path",  # what is in it is compared by its fingerprint
        "model.tokenizer",
        "model.sdpa_backend",
        "lora.kernel",
        "data.workers",
        "training.output_dir",
        "training.micro_batch_size",
        "training.checkpointing",
        "training.compile",
        "training.loss",
        "training.eval_every",
        "training.eval_batches",
        "training.save_every",
        "training.keep_last",
        "training.keep_best",
        "training.async_save",
        "training.resume",
        "training.max_restarts",
        "training.timeout_seconds",
        "training.sample",
        "training.device",
        "training.overwrite",
    )
)
"""Sections and keys that a resumed run may set otherwise: the function that is computed does not depend on them."""


@dataclass(frozen=True)
class Start:
    """Step 0 of a new run, or the checkpoint that a run goes on from."""

    folder: Path | None = None
    manifest: Manifest | None = None
    passed_over: tuple[str, ...] = ()  # newer checkpoints, a line for each

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step if self.manifest else 0

    @property
    def loader(self) -> LoaderState | None:
        """Where every slot of the global batch is in its stream."""
        return self.manifest.loader if self.manifest else None


def find_start(cfg: RunConfig) -> Start:
    """What `training.resume` asks for, checked by all ranks together: each reads a share of the files.

    Raises UserError, the same on every rank, where there is no checkpoint, or it is damaged or of another run.
    """
    wanted = cfg.training.resume
    if wanted is None:
        return Start()
    by_name = wanted not in ("latest", "latest-good", "auto")
    found = of_every_rank([Path(wanted)] if by_name else complete(cfg.training.output_dir))[0]
    if wanted == "auto" and not found:
        return Start()
    passed_over: list[str] = []
    for folder in found:
        damages = of_every_rank(damage(folder, dist.get_rank(), dist.get_world_size()))
        problem = next((problem for problem in damages if problem is not None), None)
        if problem is None:
            manifest = read_manifest(folder)
            _check_fits(cfg, manifest, folder)
            later = [
                path.name
                for path in complete(cfg.training.output_dir)
                if step_of(path) > manifest.step
            ]
            passed_over += [
                f"{name} is later; it is set aside as {name}{ABANDONED}"
                for name in later
                if by_name
            ]
            return Start(folder, manifest, tuple(passed_over))
        if wanted not in ("latest-good", "auto"):
            raise UserError(
                f"checkpoint {folder.name} is damaged: {problem}; --resume latest-good goes back to the last whole one"
            )
        passed_over.append(f"{folder.name} is passed over, it is damaged: {problem}")
    raise UserError(
        f"training.resume is {wanted}, but {cfg.training.output_dir} holds no {'whole ' * bool(found)}checkpoint"
        f"{''.join(f' ({line})' for line in passed_over)}; leave resume out to start from scratch"
    )


def _check_fits(cfg: RunConfig, manifest: Manifest, folder: Path) -> None:
    old = parse_config(without_removed(manifest.config), source=str(folder))
    before, now = _keys(old), _keys(cfg)
    if (
        cfg.optimizer.lr_schedule == "constant"
    ):  # else the learning rate of every step depends on how many there are
        before.pop("training.steps"), now.pop("training.steps")
    if all(isinstance(values.get("data.validation"), str | list) for values in (before, now)):
        now["data.validation"] = before[
            "data.validation"
        ]  # files, whose content the loaders compare
    for key in dict.fromkeys([*before, *now]):
        if (
            key not in MAY_DIFFER
            and key.partition(".")[0] not in MAY_DIFFER
            and before.get(key) != now.get(key)
        ):
            hint = (
                f" (the {old.optimizer.lr_schedule} schedule depends on it)"
                if key == "training.steps"
                else ""
            )
            raise UserError(
                f"{key} is {now.get(key)}, but checkpoint {folder} was trained with {before.get(key)}{hint}; "
                "set it back, or start from scratch without training.resume"
            )
    model = fingerprint(cfg)
    for name in sorted(model.keys() | manifest.model.keys()):
        if model.get(name) != manifest.model.get(name):
            raise UserError(
                f"model.path {cfg.model.path}: {name} is not what checkpoint {folder} was trained on; "
                "put that file back, or start from scratch without training.resume"
            )
    if manifest.step > cfg.training.steps:
        raise UserError(
            f"training.steps is {cfg.training.steps}, but checkpoint {folder} has done {manifest.step}"
        )


def fingerprint(cfg: RunConfig) -> dict[str, str]:
    """By which the model's files are known: with LoRA its weights too, which no checkpoint holds."""
    return load.fingerprint(cfg.model, weights=cfg.lora is not None)


def _keys(cfg: RunConfig) -> dict[str, Any]:
    """Every value under `section.key`, and under the section's name whether it is given."""
    values: dict[str, Any] = {}
    for section, content in cfg.to_dict().items():
        values[section] = "left out" if content is None else "given"
        values |= {f"{section}.{key}": value for key, value in (content or {}).items()}
    return values
