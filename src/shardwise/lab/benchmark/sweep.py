"""A sweep file: axes that vary a base run. Their combinations are cells that can be compared."""

import copy
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.base.layouts import Facts
from shardwise.base.records.cell import SWEEP, WEAK_SCALING, Axis, CellPlan, SweepRecord
from shardwise.base.safety import check_given
from shardwise.config import Training, UserError, rules
from shardwise.config.keys import all_keys, facts_of, flat, known_keys, nearest
from shardwise.config.ranges import shown
from shardwise.config.run_file import read_config, read_yaml
from shardwise.lab.benchmark import fairness
from shardwise.lab.benchmark.fairness import GLOBAL_BATCH, NPROC, TIMED

KEYS = (
    "title",
    "base",
    "set",
    "nproc",
    "rounds",
    "memory_rounds",
    "timeout_seconds",
    "reference",
    "axes",
)
MAX_ID_LENGTH, MAX_CELLS = 80, 10_000
RESERVED = {SWEEP, "figures", "report.html", "report.md"}
"""Names beside the folders of the cells: the bench and the report write there too."""

Settings = dict[str, Any]
"""Keys of a run file, or NPROC, and what they are set to."""
Values = dict[str, Settings]
"""The values of an axis by name."""


@dataclass(frozen=True)
class Cell:
    """A cell before it runs."""

    plan: CellPlan
    run: dict[str, Any]  # the run file as plain data; resolved if it is valid
    refusal: str = ""  # why the run file is not valid


@dataclass(frozen=True)
class Sweep:
    """A sweep file that was checked, and all its cells."""

    record: SweepRecord
    cells: tuple[Cell, ...]  # ordered as `record.cells`


def read_sweep(path: str | Path, out: str | Path, command: list[str] | None = None) -> Sweep:
    """Read a sweep file whose cells will run in folders of `out`.

    `command` is kept in the sweep's record. A cell whose combination of values is no valid run has
    a `refusal`. Raises UserError, one line, for the first mistake in the file, for comparisons that
    would be unfair, and where no cell is a valid run.
    """
    path = Path(path)
    check_given(path, "a sweep")
    data = read_yaml(path, "a sweep has base and axes; see docs/guides/benchmarking.md")
    try:
        return _expand(data, path, Path(out), command or [])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _expand(data: dict[str, Any], path: Path, out: Path, command: list[str]) -> Sweep:
    """Return the sweep that a file describes."""
    for key in data:
        if key not in KEYS:
            raise UserError(f"unknown key {key}; {nearest(str(key), KEYS)}")
    rounds = _positive(data, "rounds", 3, int)
    memory_rounds = _positive(data, "memory_rounds", 1, int)
    limit = float(_positive(data, "timeout_seconds", 600.0, int | float))
    nproc = _positive(data, NPROC, 1, int)
    title = data.get("title") or path.stem
    base = _base(data, path)
    entries = {_name(axis): entry for axis, entry in _mapping(data, "axes").items()}
    values = {axis: _values(axis, entry) for axis, entry in entries.items()}
    if not values:
        raise UserError("axes is empty; give at least one axis with its values")
    untimed = set()
    for axis, choices in values.items():
        for name, settings in choices.items():
            if not settings.pop(TIMED, True):
                untimed.add((axis, name))
    axes, weak = _axes(values, base, nproc)
    reference = _reference(data, axes)
    num_cells = math.prod(map(len, values.values()))
    if num_cells > MAX_CELLS:
        raise UserError(f"the axes make {num_cells:,} cells; give at most {MAX_CELLS:,}")
    taken = set(RESERVED)
    combinations = itertools.product(*values.values())
    ids = {names: _unique("-".join(map(_slug, names)), taken) for names in combinations}
    cells = []
    for names in ids:
        plan = _plan(names, ids, axes, weak, reference)
        settings = {NPROC: nproc}
        for axis, name in plan.values.items():
            settings |= values[axis][name]
        timed = untimed.isdisjoint(plan.values.items())
        plan = replace(plan, nproc=settings.pop(NPROC), timed=timed)
        cells.append(_resolve(plan, _applied(base, settings), out))
    if all(cell.refusal for cell in cells):
        first = cells[0].refusal
        raise UserError(f"none of the {len(cells)} cells is a valid run; the first: {first}")
    groups = dict.fromkeys(cell.plan.group for cell in cells)
    equal = {group: _equal(group, cells, axes, bool(weak)) for group in groups}
    cells += _controls(cells, taken, out)
    plans = tuple(cell.plan for cell in cells)
    record = SweepRecord(str(title), axes, plans, equal, rounds, limit, command, memory_rounds)
    return Sweep(record, tuple(cells))


def uncontrolled(cells: Sequence[Cell], selected: Sequence[Cell]) -> list[str]:
    """Return the ids of `selected` cells whose reference has no noise control in `cells`."""
    controlled = {cell.plan.reference for cell in cells if cell.plan.control and not cell.refusal}
    runs = [cell.plan for cell in selected if not cell.refusal and not cell.plan.control]
    checked = [plan for plan in runs if plan.reference is not None]
    return [plan.id for plan in checked if plan.reference not in controlled]


def left_out(cells: Sequence[Cell], selected: Sequence[Cell]) -> list[str]:
    """Return the ids of `cells` that others are compared with, but that are not `selected`."""
    names = {cell.plan.id for cell in selected}
    references = {cell.plan.reference or cell.plan.id for cell in selected}
    needed = references | {cell.plan.baseline for cell in selected}
    others = [cell.plan for cell in cells if cell.plan.id not in names and not cell.refusal]
    needed |= {plan.id for plan in others if plan.control and plan.reference in references}
    return [plan.id for plan in others if plan.id in needed]


# ----------------------------------------------------------------- reading the sweep file


def _base(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the base run as plain data, with the keys that `set` changes in every cell."""
    base = data.get("base")
    is_inline = isinstance(base, dict)
    if isinstance(base, str):
        base = read_yaml(
            path.parent / base, "a run file is a mapping of sections; shardwise init writes one"
        )
    if not isinstance(base, dict):
        raise UserError("base is missing; give the path of a run file from here, or sections")
    settings = {str(key): value for key, value in _mapping(data, "set").items()}
    if NPROC in settings:
        raise UserError("set names nproc; write it beside set, as nproc: N")
    fairness.check_keys("set", settings, varied=False)
    training = base.get("training")
    if isinstance(training, dict):
        # A run file has an output_dir of its own, which no cell uses.
        forbidden = ("output_dir", "resume", "patience") if is_inline else ("resume", "patience")
        keys = (f"training.{key}" for key in forbidden if training.get(key) not in (None, 0))
        fairness.check_keys("base", keys, varied=False)
    return _applied(base, settings)


def _values(axis: str, entry: object) -> Values:
    """Return the values of an axis by name."""
    if not entry or not isinstance(entry, dict | list):
        raise UserError(f"axes.{axis} has no values; map names to keys, or list a key's values")
    if isinstance(entry, list):
        section = axis.partition(".")[0]
        if axis != NPROC and section not in known_keys():
            problem = f"axes.{axis} is a list of values, but {axis} is no key of a run file"
            raise UserError(f"{problem}; name the axis like the key, or map names to keys")
        pairs = [(_name(value), {axis: value}) for value in entry]
    else:
        pairs = [(_name(name), settings) for name, settings in entry.items()]
    values: Values = {}
    for name, settings in pairs:
        where = f"axes.{axis}.{name}"
        if name in values:
            raise UserError(f"{where} is given twice; give each value once")
        if not isinstance(settings, dict):
            raise UserError(f"{where} is {settings!r}; write a mapping of keys, or {{}} for none")
        if NPROC in settings:
            _positive(settings, NPROC, 1, int, where)
        if not isinstance(settings.get(TIMED, True), bool):
            raise UserError(f"{where}.{TIMED} is {settings[TIMED]!r}; give true or false")
        values[name] = {str(key): value for key, value in settings.items()}
    return values


def _axes(
    values: Mapping[str, Values], base: Mapping[str, Any], nproc: int
) -> tuple[tuple[Axis, ...], set[str]]:
    """Return the axes, and the names of those that scale weakly."""
    rows = flat(base).get(GLOBAL_BATCH, Training.global_batch_size)
    defaults = {NPROC: nproc, GLOBAL_BATCH: rows}
    checked = [fairness.check_axis(name, choices, defaults) for name, choices in values.items()]
    fairness.check_axes(values)
    return tuple(axis for axis, _ in checked), {axis.name for axis, is_weak in checked if is_weak}


def _reference(data: dict[str, Any], axes: tuple[Axis, ...]) -> dict[str, str]:
    """Return the reference's value on each compared axis; by default its first."""
    requested = {_name(axis): _name(value) for axis, value in _mapping(data, "reference").items()}
    compared = {axis.name: axis.values for axis in axes if axis.compared}
    for axis, value in requested.items():
        if axis not in compared:
            hint = nearest(axis, list(compared), "compared axes")
            raise UserError(f"reference names {axis}; {hint}")
        if value not in compared[axis]:
            hint = nearest(value, compared[axis], "values")
            raise UserError(f"reference.{axis} is {value}; {hint}")
    return {axis: requested.get(axis, values[0]) for axis, values in compared.items()}


def _positive(data: dict[str, Any], key: str, default: Any, kind: Any, where: str = "") -> Any:
    """Return a number of the sweep file, checked to be of this kind, positive and below 1e9."""
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e9:
        requirement = "a whole number of at least 1" if kind is int else "a positive number"
        if isinstance(value, int | float) and value >= 1e9:
            requirement = "less than 1e9"
        name = f"{where}.{key}" if where else key
        raise UserError(f"{name} is {shown(value)}; give {requirement}")
    return value


def _mapping(data: dict[str, Any], key: str) -> dict[Any, Any]:
    """Return a mapping of the sweep file, which is empty where the key is left out."""
    value = data.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{key} is {value!r}; write a mapping")
    return value


def _name(value: object) -> str:
    """Return the name of a value: a string as it is, anything else as YAML shows it on one line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str).replace('"', "")


# --------------------------------------------------------------------------- making cells


def _plan(
    names: tuple[str, ...],
    ids: Mapping[tuple[str, ...], str],
    axes: tuple[Axis, ...],
    weak: set[str],
    reference: Mapping[str, str],
) -> CellPlan:
    """Return the plan of the cell with these values, one per axis, without its processes.

    Losses are compared between cells that round in the same way. Speeds are compared across
    numerics, so the baseline may be another cell than the reference.
    """
    values = {axis.name: name for axis, name in zip(axes, names, strict=True)}

    def counterpart(kept: set[str]) -> str | None:
        """Return the cell with the reference's values, except on `kept` axes; None for itself."""
        changed = {axis: value for axis, value in reference.items() if axis not in kept}
        other = tuple({**values, **changed}.values())
        return None if other == names else ids[other]

    numerics = {axis.name for axis in axes if any(map(fairness.rounds, axis.keys))}
    group = [f"{axis.name}={values[axis.name]}" for axis in axes if not axis.compared]
    if weak:
        group.append(WEAK_SCALING)
    return CellPlan(
        id=ids[names],
        values=values,
        nproc=1,
        group=", ".join(group) or "all cells",
        reference=counterpart(weak | numerics),
        baseline=counterpart(weak),
    )


def _applied(base: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return a run file with some keys or sections replaced."""
    run = copy.deepcopy(dict(base))
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if not name:
            run[section] = copy.deepcopy(value)
        elif run.get(section) is None or isinstance(run[section], dict):  # else it is refused later
            run[section] = {**(run.get(section) or {}), name: copy.deepcopy(value)}
    return run


def _resolve(plan: CellPlan, run: dict[str, Any], out: Path) -> Cell:
    """Return a cell with its run file resolved; refused where a rule refuses it.

    Raises UserError for a wrong key, type or range, which is a mistake in the sweep.
    """
    run = _applied(run, {"training.output_dir": str(out / plan.id / "round-1")})
    cfg = read_config(run, f"cell {plan.id}")
    for facts in (None, Facts(plan.nproc)):
        for _, refusal in rules.refusals(cfg, facts):
            return Cell(plan, run, refusal)
    return Cell(plan, cfg.to_dict())


def _equal(group: str, cells: list[Cell], axes: tuple[Axis, ...], weak: bool) -> dict[str, Any]:
    """Return what the valid cells of a group have in common; see `fairness.check_group`."""
    group_cells = [cell for cell in cells if cell.plan.group == group and not cell.refusal]
    valid = {cell.plan.id: (cell.plan.nproc, cell.run) for cell in group_cells}
    varied = [key for axis in axes if axis.compared for key in axis.keys]
    return fairness.check_group(valid, varied, weak) if valid else {}


def _controls(cells: list[Cell], taken: set[str], out: Path) -> list[Cell]:
    """Return the noise controls: each reference once more, with sums that round in another way."""
    references = {cell.plan.reference for cell in cells}
    controls = []
    for cell in cells:
        if cell.plan.id in references and not cell.refusal:
            control_id = _unique(f"control-{cell.plan.id}", taken)
            plan = replace(cell.plan, id=control_id, reference=cell.plan.id, control=True)
            noise = {key: True for key in all_keys() if facts_of(key).is_noise}
            controls.append(_resolve(plan, _applied(cell.run, noise), out))
    return controls


def _slug(name: str) -> str:
    """Return a name as part of a folder's name that is no option and no hidden file."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", name).strip("._-") or "x"


def _unique(name: str, taken: set[str]) -> str:
    """Return a short name that is not `taken`, whatever its case, and take it."""
    name = name[:MAX_ID_LENGTH]
    candidate = name
    for number in itertools.count(2):
        if candidate.lower() not in taken:
            break
        candidate = f"{name}-{number}"
    taken.add(candidate.lower())
    return candidate
