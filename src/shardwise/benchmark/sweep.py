"""A sweep file: axes over a base run, spread out into cells that are fair to compare."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.benchmark import fairness
from shardwise.benchmark.fairness import GLOBAL_BATCH, NPROC, TIMED
from shardwise.config import Training, UserError, known_keys, nearest
from shardwise.ranges import shown
from shardwise.records.cell import SWEEP, WEAK_SCALING, Axis, CellPlan, SweepRecord
from shardwise.run_file import parse_config, read_yaml

KEYS = ("title", "base", "set", "nproc", "rounds", "memory_rounds", "timeout_seconds", "reference", "axes")
ID_LENGTH, MOST_CELLS = 80, 10_000
RESERVED = {SWEEP, "figures", "report.html", "report.md"}
"""What else lies beside the folders of the cells: the report writes there too."""


@dataclass(frozen=True)
class Cell:
    """A cell as it is to run."""

    plan: CellPlan
    run: dict[str, Any]  # the run file as plain data, resolved if it is valid
    refusal: str = ""  # why it is not valid


@dataclass(frozen=True)
class Sweep:
    """A sweep file, checked and spread out."""

    record: SweepRecord
    cells: tuple[Cell, ...]  # in the order of `record.cells`


def read_sweep(path: str | Path, out: str | Path, command: list[str] | None = None) -> Sweep:
    """Read a sweep file whose cells will run in folders of `out`.

    Raises UserError with one line for the first thing wrong, comparisons that would be unfair included. A cell whose
    combination of values is not a valid run is no mistake, unless all are: it has its `refusal`.
    """
    path = Path(path)
    data = read_yaml(path, "a sweep is a mapping with base and axes; see docs/guides/benchmarking.md")
    try:
        return _expand(data, path, Path(out), command or [])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _expand(data: dict[str, Any], path: Path, out: Path, command: list[str]) -> Sweep:
    for key in data:
        if key not in KEYS:
            raise UserError(f"unknown key {key}; {nearest(str(key), KEYS)}")
    rounds = _positive(data, "rounds", 3, int)
    memory_rounds = _positive(data, "memory_rounds", 1, int)
    limit = float(_positive(data, "timeout_seconds", 600.0, int | float))
    nproc = _positive(data, NPROC, 1, int)
    title = data.get("title") or path.stem
    base = _base(data, path)
    named = {_name(name): _values(_name(name), entry) for name, entry in _mapping(data, "axes").items()}
    if not named:
        raise UserError("axes is empty; name at least one, with its values")
    untimed = {
        (axis, name)
        for axis, values in named.items()
        for name, settings in values.items()
        if not settings.pop(TIMED, True)
    }
    rows = fairness.flat(base).get(GLOBAL_BATCH, Training.global_batch_size)
    defaults = {NPROC: nproc, GLOBAL_BATCH: rows}
    checked = [fairness.check_axis(name, values, defaults) for name, values in named.items()]
    axes = tuple(axis for axis, _ in checked)
    fairness.check_axes(named)
    weak = {axis.name for axis, is_weak in checked if is_weak}
    numerics = {axis.name for axis in axes if fairness.NUMERICS & set(axis.keys)}
    reference = _reference(data, axes)

    if (number := math.prod(map(len, named.values()))) > MOST_CELLS:
        raise UserError(f"the axes make {number:,} cells, more than {MOST_CELLS:,}; bench a part of them")
    taken = set(RESERVED)
    ids = {names: _unique("-".join(map(_slug, names)), taken) for names in itertools.product(*named.values())}

    def other(values: Mapping[str, str], own: set[str]) -> str | None:
        """The cell with the reference's values, but these on the axes `own`; None where these are just that."""
        names = tuple(value if axis in own else reference.get(axis, value) for axis, value in values.items())
        return ids[names] if names != tuple(values.values()) else None

    cells = []
    for names, cell_id in ids.items():
        values = dict(zip(named, names))
        settings = {key: v for axis, name in values.items() for key, v in named[axis][name].items()}
        plan = CellPlan(
            cell_id,
            values,
            nproc=settings.pop(NPROC, nproc),
            group=_group(values, axes, weak),
            reference=other(values, weak | numerics),
            baseline=other(values, weak),
            timed=untimed.isdisjoint(values.items()),
        )
        cells.append(_resolve(plan, _applied(base, settings), out))
    if all(cell.refusal for cell in cells):
        raise UserError(f"none of the {len(cells)} cells is a valid run; the first: {cells[0].refusal}")
    equal = {group: _equal(group, cells, axes, bool(weak)) for group in dict.fromkeys(c.plan.group for c in cells)}
    cells += _controls(cells, taken, out)
    plans = tuple(cell.plan for cell in cells)
    return Sweep(SweepRecord(str(title), axes, plans, equal, rounds, limit, command, memory_rounds), tuple(cells))


def uncontrolled(cells: Sequence[Cell], selected: Sequence[Cell]) -> list[str]:
    """The `selected` of all `cells` whose losses cannot be checked, since their reference has no control."""
    controlled = {cell.plan.reference for cell in cells if cell.plan.control and not cell.refusal}
    runs = [cell.plan for cell in selected if not cell.refusal and not cell.plan.control]
    return [plan.id for plan in runs if plan.reference is not None and plan.reference not in controlled]


def left_out(cells: Sequence[Cell], selected: Sequence[Cell]) -> list[str]:
    """What of all `cells` the losses and speeds of the `selected` are set against, and is not selected itself."""
    names = {cell.plan.id for cell in selected}
    references = {cell.plan.reference or cell.plan.id for cell in selected}
    wanted = references | {cell.plan.baseline for cell in selected}
    others = [cell.plan for cell in cells if cell.plan.id not in names and not cell.refusal]
    return [plan.id for plan in others if plan.id in wanted or (plan.control and plan.reference in references)]


def _base(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """The base run as plain data, with what `set` changes in every cell."""
    base = data.get("base")
    inline = isinstance(base, dict)
    if isinstance(base, str):
        base = read_yaml(path.parent / base, "a run file is a mapping of sections; see docs/reference/config.md")
    if not isinstance(base, dict):
        raise UserError("base is missing; give a run file's path (relative to the sweep file) or its sections")
    settings = {str(key): value for key, value in _mapping(data, "set").items()}
    if NPROC in settings:
        raise UserError("set names nproc; write it beside set, as nproc: N")
    fairness.check_keys("set", settings, varied=False)
    training = base.get("training")
    if isinstance(training, dict):
        forbidden = ("output_dir", "resume") if inline else ("resume",)  # a file's own output_dir is not used
        set_keys = (f"training.{key}" for key in forbidden if training.get(key) is not None)
        fairness.check_keys("base", set_keys, varied=False)
    return _applied(base, settings)


def _applied(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    run = copy.deepcopy(dict(base))
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if not name:
            run[section] = copy.deepcopy(value)
        elif run.get(section) is None or isinstance(run[section], dict):  # else the section itself is told as wrong
            run[section] = {**(run.get(section) or {}), name: copy.deepcopy(value)}
    return run


def _values(axis: str, entry: object) -> dict[str, dict[str, Any]]:
    """The values of an axis by name, each as the keys it sets."""
    if not entry or not isinstance(entry, dict | list):
        raise UserError(f"axes.{axis} has no values; write a mapping of names to keys, or a list of a key's values")
    if isinstance(entry, list):
        section = axis.partition(".")[0]
        if axis != NPROC and section not in known_keys():
            hint = "name the axis like the key, or write a mapping of names to keys"
            raise UserError(f"axes.{axis} is a list of values, but {axis} is no key of a run file; {hint}")
        pairs = [(_name(value), {axis: value}) for value in entry]
    else:
        pairs = [(_name(name), settings) for name, settings in entry.items()]
    values: dict[str, dict[str, Any]] = {}
    for name, settings in pairs:
        where = f"axes.{axis}.{name}"
        if name in values:
            raise UserError(f"{where} is given twice; give each value once")
        if not isinstance(settings, dict):
            raise UserError(f"{where} is {settings!r}, not a mapping of keys; write {{}} for the base as it is")
        if NPROC in settings:
            _positive(settings, NPROC, 1, int, where)
        if not isinstance(settings.get(TIMED, True), bool):
            raise UserError(f"{where}.{TIMED} is {settings[TIMED]!r}; give true or false")
        values[name] = {str(key): value for key, value in settings.items()}
    return values


def _reference(data: dict[str, Any], axes: tuple[Axis, ...]) -> dict[str, str]:
    asked = {_name(axis): _name(value) for axis, value in _mapping(data, "reference").items()}
    compared = {axis.name: axis.values for axis in axes if axis.compared}
    for axis, value in asked.items():
        if axis not in compared:
            raise UserError(f"reference names {axis}; {nearest(axis, list(compared), 'compared axes')}")
        if value not in compared[axis]:
            raise UserError(f"reference.{axis} is {value}; {nearest(value, compared[axis], 'values')}")
    return {axis: asked.get(axis, values[0]) for axis, values in compared.items()}


def _resolve(plan: CellPlan, run: dict[str, Any], out: Path) -> Cell:
    run = _applied(run, {"training.output_dir": str(out / plan.id / "round-1")})
    source = f"cell {plan.id}"
    try:
        return Cell(plan, parse_config(run, source).to_dict())
    except UserError as error:
        return Cell(plan, run, str(error).removeprefix(f"{source}: "))


def _group(values: Mapping[str, str], axes: tuple[Axis, ...], weak: set[str]) -> str:
    parts = [f"{axis.name}={values[axis.name]}" for axis in axes if not axis.compared]
    return ", ".join([*parts, *([WEAK_SCALING] if weak else [])]) or "all cells"


def _equal(group: str, cells: list[Cell], axes: tuple[Axis, ...], weak: bool) -> dict[str, Any]:
    valid = {c.plan.id: (c.plan.nproc, c.run) for c in cells if c.plan.group == group and not c.refusal}
    varied = [key for axis in axes if axis.compared for key in axis.keys]
    return fairness.check_group(valid, varied, weak) if valid else {}


NOISE = ("measure.reverse_microbatches", "measure.nudge_weights")
"""Switches that change only how a run rounds: its sums over micro-batches, and all that its weights reach."""


def _controls(cells: list[Cell], taken: set[str], out: Path) -> list[Cell]:
    """For each cell that another's losses are checked against: the same once more, but for how its sums are rounded."""
    wanted = {cell.plan.reference for cell in cells}
    controls = []
    for cell in cells:
        if cell.plan.id in wanted and not cell.refusal:
            control_id = _unique(f"control-{cell.plan.id}", taken)
            plan = replace(cell.plan, id=control_id, reference=cell.plan.id, control=True)
            controls.append(_resolve(plan, _applied(cell.run, dict.fromkeys(NOISE, True)), out))
    return controls


def _positive(data: dict[str, Any], key: str, default: Any, kind: Any, where: str = "") -> Any:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e9:
        what = "a whole number of at least 1" if kind is int else "a positive number"
        if isinstance(value, int | float) and value >= 1e9:
            what = "less than 1e9"
        raise UserError(f"{where + '.' if where else ''}{key} is {shown(value)}; give {what}")
    return value


def _mapping(data: dict[str, Any], key: str) -> dict[Any, Any]:
    value = data.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{key} is {value!r}; write a mapping")
    return value


def _name(value: object) -> str:
    """The name of a value: text as it is, anything else as YAML would show it on one line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str).replace('"', "")


def _slug(name: str) -> str:
    """What of a name may stand in a folder's name on any system, and does not look like an option or a hidden file."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", name).strip("._-") or "x"


def _unique(name: str, taken: set[str]) -> str:
    """`name`, shortened, and numbered where it is `taken`; some file systems do not tell A from a."""
    name = name[:ID_LENGTH]
    found = name
    for number in itertools.count(2):
        if found.lower() not in taken:
            break
        found = f"{name}-{number}"
    taken.add(found.lower())
    return found
