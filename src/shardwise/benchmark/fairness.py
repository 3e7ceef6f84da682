"""What may be compared: an axis varies what is computed, or one choice of how it is computed, never both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from shardwise.config import REMOVED, UserError, known_keys, nearest
from shardwise.records.cell import Axis

NPROC, GLOBAL_BATCH = "nproc", "training.global_batch_size"
TIMED = "timed"
"""What a value may set beside NPROC and keys of a run file: whether its cells are timed, which they are by default."""
WORK, LAYOUT = "work", "layout"
SECTIONS = ("lora", "optimizer", "parallel")
"""The sections that an axis may set as a whole; the others hold both what is computed and how."""
NUMERICS = {
    "model.dtype",
    "model.sdpa_backend",
    "lora.kernel",
    "training.precision",
    "training.accumulation",
    "training.compile",
    "training.loss",
    "training.device",
}
"""What changes how numbers are rounded: losses are compared between cells that agree in it."""
_WORK_OF_TRAINING = ("training.seed", "training.steps", GLOBAL_BATCH)
_NEVER = {
    "training.output_dir": "it belongs to the bench, which gives each round a folder of its own",
    "training.overwrite": "it belongs to the bench, which gives each round a folder of its own",
    "training.resume": "a cell starts from the beginning",
}
_NEVER_VARIED = {
    "measure.memory": "all cells are measured alike",
    "measure.warmup_steps": "all cells are measured alike",
    "measure.reverse_microbatches": "it is what the controls of the losses vary",
    "measure.nudge_weights": "it is what the controls of the losses vary",
}
_SHOWN = (
    *("model.path", "model.dtype", "lora", "lora.r", "lora.targets", "data.train", "data.sequence_length"),
    *("data.packing", "optimizer.name", "optimizer.lr", "training.seed", "training.steps", GLOBAL_BATCH),
    *("training.micro_batch_size", "training.precision", "training.checkpointing"),
)


def family(key: str) -> str:
    """WORK for a key that says what is computed; else the choice of how that it is part of."""
    section = key.partition(".")[0]
    if key == NPROC or section == "parallel":
        return LAYOUT
    if key in ("model.dtype", "model.sdpa_backend", "lora.kernel", "data.workers"):
        return key
    if section in ("model", "lora", "data", "optimizer") or key in _WORK_OF_TRAINING:
        return WORK
    return key


def check_keys(where: str, keys: Iterable[str], varied: bool) -> None:
    """Raise UserError where a key is unknown, or is not one that a sweep (`varied`: that an axis) may set."""
    for key in keys:
        if key in (NPROC, *SECTIONS):
            continue
        section, _, name = key.partition(".")
        if section not in known_keys():
            raise UserError(f"{where}: unknown key {key}; {nearest(section, [*known_keys(), NPROC], 'sections')}")
        if not name:
            raise UserError(f"{where} sets the section {key} as a whole; name its keys, as in {key}.KEY")
        if key in REMOVED:
            raise UserError(f"{where} sets {key}, which was removed; leave it out")
        if name not in known_keys(section):
            raise UserError(f"{where}: unknown key {key}; {nearest(name, known_keys(section))}")
        if key in _NEVER:
            raise UserError(f"{where} sets {key}; {_NEVER[key]}: leave it out")
        if varied and key in _NEVER_VARIED:
            raise UserError(f"{where} sets {key}; {_NEVER_VARIED[key]}: set it for every cell, under set")


def check_axis(name: str, values: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]) -> tuple[Axis, bool]:
    """The axis whose values set these keys, and whether it scales weakly; UserError where comparing would be unfair.

    `defaults` says what NPROC and GLOBAL_BATCH are where a value does not set them.
    """
    for value, settings in values.items():
        check_keys(f"axes.{name}.{value}", settings, varied=True)
    keys = _keys(values)
    if len({family(key) for key in keys}) > 1:  # then what all its values set alike does not count: it differs nowhere
        first = next(iter(values.values()))
        keys = [key for key in keys if any(key not in s or s[key] != first.get(key) for s in values.values())]
    families = dict.fromkeys(family(key) for key in keys)
    weak = (
        set(families) == {WORK, LAYOUT} and NPROC in keys and {k for k in keys if family(k) == WORK} == {GLOBAL_BATCH}
    )
    if weak:
        _check_equal_share(name, values, defaults)
    elif len(families) > 1:
        main = family(keys[0])
        key = next(key for key in keys if family(key) != main)
        value = next(value for value, settings in values.items() if key in settings)
        others = ", ".join(k for k in keys if family(k) == main)
        other = "other work" if family(key) == WORK else "another choice"
        raise UserError(
            f"axes.{name} would compare unlike cells: {value} sets {key}, {other} than the rest of the axis "
            f"({others}); make {key} an axis of its own, or set it for every cell, under set"
        )
    return Axis(name, tuple(values), tuple(keys), compared=weak or WORK not in families), weak


def check_axes(axes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise UserError where two axes set the same key: the later would win, and the earlier's names would lie."""
    setters = [(key, name) for name, values in axes.items() for key in _keys(values)]
    for i, (key, axis) in enumerate(setters):
        for other, other_axis in setters[i + 1 :]:
            if axis != other_axis and (f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")):
                both = f"axes.{axis} and axes.{other_axis}"
                raise UserError(f"{both} both set {max(key, other, key=len)}; let one axis set it")


def _keys(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [*dict.fromkeys(key for settings in values.values() for key in settings)]


def _check_equal_share(name: str, values: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    shares = {}
    for value, settings in values.items():
        rows, nproc = ({**defaults, **settings}[key] for key in (GLOBAL_BATCH, NPROC))
        if not isinstance(rows, int):
            raise UserError(f"axes.{name}.{value}: {GLOBAL_BATCH} is {rows!r}; give a whole number")
        shares[value] = rows / nproc
    for (a, rows_a), (b, rows_b) in pairwise(shares.items()):
        if rows_a != rows_b:
            raise UserError(
                f"axes.{name} varies {NPROC} and {GLOBAL_BATCH}, which is fair only as weak scaling, but for each "
                f"process a step has {rows_a:g} rows in {a} and {rows_b:g} in {b}; give each equally many"
            )


def flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run file as `section.key` -> value; a section that holds no keys, such as `lora: null`, under its own name."""
    found: dict[str, Any] = {}
    for section, keys in run.items():
        found |= (
            {f"{section}.{key}": value for key, value in keys.items()} if isinstance(keys, dict) else {section: keys}
        )
    return found


def check_group(
    cells: Mapping[str, tuple[int, Mapping[str, Any]]], varied: Iterable[str], weak: bool
) -> dict[str, Any]:
    """What the cells (id -> processes, resolved run file) of one group have in common, for a reader.

    Raises UserError where they differ in anything but the keys `varied` on compared axes: the last net.
    """
    free = {*varied, "training.output_dir"}
    (first, (nproc, run)), *others = cells.items()
    expected = flat(run)
    for other, (_, its_run) in others:
        found = flat(its_run)
        for key in expected.keys() | found.keys():
            if not {key, key.partition(".")[0]} & free and expected.get(key) != found.get(key):
                raise UserError(
                    f"the cells {first} and {other} are compared, but {key} is {expected.get(key)!r} in one and "
                    f"{found.get(key)!r} in the other; make it an axis of its own"
                )
    tokens = expected[GLOBAL_BATCH] * expected["data.sequence_length"]
    common = {"tokens per step and process": tokens // nproc} if weak else {"tokens per step": tokens}
    return common | {key: expected[key] for key in _SHOWN if key in expected and key not in free}
