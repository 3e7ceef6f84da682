"""Where a run starts: from scratch, or after a checkpoint that is whole and fits the run.

Nothing is loaded before that is known.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from shardwise.assembly.optimizer import lr_phases
from shardwise.assembly.state import FRESH
from shardwise.base.interfaces import State
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import memory_folder, output_dir
from shardwise.checkpoint.index import DamagedError
from shardwise.checkpoint.memory import MemoryCheckpoints
from shardwise.checkpoint.saved_state import SavedState
from shardwise.config import Optimizer, RunConfig, UserError
from shardwise.config.keys import all_keys, facts_of, flat
from shardwise.config.run_file import parse_config, without_removed
from shardwise.data.state import LoaderState
from shardwise.models import weight_folder
from shardwise.models.adapters.peft_config import resumed
from shardwise.models.adapters.reading import read_adapter
from shardwise.parallel.reduce import from_every_rank

ADAPTER = "lora.path: "
"""Beginning of the names of an adapter's files among those of a model."""


@dataclass(frozen=True)
class Start:
    """Step 0 of a new run, or the checkpoint that a run resumes from."""

    folder: Path | None = None
    manifest: folders.Manifest | None = None
    passed_over: tuple[str, ...] = ()
    """A line for each newer checkpoint that is not used."""
    in_memory: bool = False
    """Whether the checkpoint lies in the memory of the nodes."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step if self.manifest else 0

    @property
    def loader(self) -> LoaderState | None:
        """Where every slot of the global batch is in its stream."""
        return asdict(self.manifest.loader) if self.manifest else None

    def state(self) -> State:
        """Return the provider of what `build` loads."""
        if self.folder is None or self.manifest is None:
            return FRESH
        return SavedState(self.folder, self.manifest)


def find_start(cfg: RunConfig) -> Start:
    """Find the checkpoint that `training.resume` asks for; all ranks check its files, a share each.

    UserError, the same on every rank, where there is no checkpoint, or it is damaged or of another
    run.
    """
    resume = cfg.training.resume
    if resume is None:
        return Start()
    by_name = resume not in folders.BY_AGE
    candidates = from_every_rank(_candidates(cfg, resume))[0]
    passed_over: list[str] = []
    in_memory = None
    if resume == "auto" and from_every_rank(memory_folder.has_name(cfg.training.output_dir))[0]:
        least_step = folders.step_of(candidates[0]) if candidates else 0
        in_memory, passed_over = MemoryCheckpoints(cfg).recover(least_step)
    if in_memory is not None:
        candidates = [in_memory, *candidates]
    elif resume == "auto" and not candidates:
        if passed_over and dist.get_rank() == 0:  # what the lost steps have written
            output_dir.remove_files(cfg)
        return Start(passed_over=tuple(passed_over))
    for folder in candidates:
        damages = from_every_rank(folders.damage(folder, dist.get_rank(), dist.get_world_size()))
        problem = next((problem for problem in damages if problem is not None), None)
        if problem is None:
            manifest = folders.read_manifest(folder)
            _check_fits(cfg, manifest, folder)
            if by_name:
                passed_over += _set_aside(cfg.training.output_dir, manifest.step)
            return Start(folder, manifest, tuple(passed_over), folder == in_memory)
        if resume not in ("latest-good", "auto"):
            raise UserError(
                f"checkpoint {folder.name} is damaged: {problem}; --resume latest-good goes back "
                "to the last whole one"
            )
        passed_over.append(f"{folder.name} is passed over, it is damaged: {problem}")
    missing = "no whole checkpoint" if candidates else "no checkpoint"
    raise UserError(
        f"training.resume is {resume}, but {cfg.training.output_dir} holds {missing}"
        f"{''.join(f' ({line})' for line in passed_over)}; leave resume out to start from scratch"
    )


def with_saved_adapter(cfg: RunConfig) -> RunConfig:
    """Return a run with what its checkpoint says of its adapter, which needs no `lora.path` then.

    It is for checks before ranks start, which read the checkpoint themselves. A checkpoint that
    cannot be read says nothing.
    """
    resume = cfg.training.resume
    for folder in () if resume is None else _candidates(cfg, resume):
        try:
            manifest = folders.read_manifest(folder)
            saved = None if manifest.lora is None else manifest.configured(str(folder)).lora
        except (DamagedError, UserError):
            continue
        return resumed(cfg, saved)
    return cfg


def _candidates(cfg: RunConfig, resume: str) -> list[Path]:
    """Return the checkpoint that `training.resume` names, or those of the run, newest first."""
    return folders.complete(cfg.training.output_dir) if resume in folders.BY_AGE else [Path(resume)]


def _set_aside(output_dir: str, step: int) -> list[str]:
    later = [
        folder.name for folder in folders.complete(output_dir) if folders.step_of(folder) > step
    ]
    return [f"{name} is later; it is set aside as {name}{folders.ABANDONED}" for name in later]


def _check_fits(cfg: RunConfig, manifest: folders.Manifest, folder: Path) -> None:
    old = parse_config(without_removed(manifest.config), source=str(folder))
    before, now = flat(old.to_dict()), flat(cfg.to_dict())
    for values, training in ((before, old.training), (now, cfg.training)):
        values["training.steps"] = training.num_steps  # null is a number too
    may_differ = {key for key in all_keys() if facts_of(key).resumable}
    steps, num_steps = cfg.training.num_steps, manifest.num_steps or old.training.num_steps
    if steps is None or num_steps is None:  # what epochs come to is not known yet
        optimizer = cfg.optimizer
        may_change = optimizer.lr_schedule == "constant" and not optimizer.warmup_ratio
    else:
        may_change = may_have_steps(cfg.optimizer, num_steps, manifest.step, steps)
    if may_change:
        may_differ |= {"training.steps", "training.epochs"}
    if all(isinstance(values["data.validation"], str | list) for values in (before, now)):
        may_differ.add("data.validation")  # files, whose content the loaders compare
    # A run that may not leave documents out has left out none: both values read the same rows.
    if old.data.on_error == "fail" or not any(
        slot.skipped for slot in manifest.loader.slots.values()
    ):
        may_differ.add("data.on_error")
    if not cfg.precomputes:
        may_differ.add("preference.reference_logprobs")  # the reference can compute in each step
    for key in dict.fromkeys([*before, *now]):
        differs = before.get(key) != now.get(key)
        if differs and key not in may_differ:
            reason = ""
            if key in ("training.steps", "training.epochs"):
                reason = " (the learning rates of the steps that are done depend on it)"
            if key == "data.on_error":
                reason = " and has left out documents"
            value, old_value = now.get(key, "left out"), before.get(key, "it left out")
            value, old_value = ("null" if v is None else v for v in (value, old_value))
            raise UserError(
                f"{key} is {value}, but checkpoint {folder} was trained with {old_value}{reason}; "
                "set it back, or start from scratch without training.resume"
            )
    model, trained_on = fingerprint(cfg), dict(manifest.model)
    if cfg.precomputes:
        model |= output_dir.reference_sum(output_dir.reference_file(cfg, folder))
    else:
        trained_on.pop(output_dir.REFERENCE, None)
    for name in sorted(model.keys() | trained_on.keys()):
        if model.get(name) != trained_on.get(name):
            is_models = name != output_dir.REFERENCE and not name.startswith(ADAPTER)
            where = f"model.path {cfg.model.path}: " if is_models else ""
            raise UserError(
                f"{where}{name} is not what checkpoint {folder} was trained on; put that file "
                "back, or start from scratch without training.resume"
            )
    if steps is not None and manifest.step > steps:
        raise UserError(
            f"training.steps is {steps}, but checkpoint {folder} has done {manifest.step}"
        )


def may_have_steps(cfg: Optimizer, before: int, done: int, steps: int) -> bool:
    """Return whether a run of `before` steps may have `steps` instead, after `done` of them.

    It may where the steps that are done had the same learning rates, and where no step is left:
    that writes the result of a checkpoint.
    """
    warmup, plateau = lr_phases(cfg, steps)
    warmup_before, plateau_before = lr_phases(cfg, before)
    is_same = warmup == warmup_before and done <= min(plateau, plateau_before)
    return is_same or done == steps


def fingerprint(cfg: RunConfig) -> dict[str, str]:
    """Return checksums of the model's files, also of weights where a resume reads them again.

    No checkpoint has those below adapters, nor those that pairs of answers are compared with.
    """
    if cfg.model.is_callers:  # a checkpoint holds all of it
        return {}
    weights = cfg.lora is not None or cfg.reference == "start"
    found = weight_folder.fingerprint(cfg.model, weights)
    if cfg.reference_adapter is not None:
        file = read_adapter(cfg.reference_adapter).file
        found[f"{ADAPTER}{file.name}"] = weight_folder.sample(file)
    return found
