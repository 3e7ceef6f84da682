"""Rules of what a sweep may compare.

An axis varies what is computed, or one choice of how it is computed, and never both: otherwise
nobody could say which of the two made a difference.
"""

from collections.abc import Iterable, Mapping
from itertools import combinations, pairwise
from typing import Any

from shardwise.base.records.cell import Axis
from shardwise.config import REMOVED, UserError
from shardwise.config.keys import all_keys, facts_of, flat, known_keys, nearest

NPROC, GLOBAL_BATCH = "nproc", "training.global_batch_size"
TIMED = "timed"
"""A value of an axis may set this too: whether its cells are timed (default true)."""
WORK, LAYOUT = "work", "layout"
"""The two families of keys that have several members; see `family`."""
SECTIONS = ("lora", "optimizer", "parallel")
"""The sections that an axis may replace. The others say both what is computed and how."""


def family(key: str) -> str:
    """Return WORK for a key that says what is computed, LAYOUT for the layout, else the key."""
    return LAYOUT if key == NPROC else facts_of(key).decides or key


def rounds(key: str) -> bool:
    """Return whether a key changes how numbers are rounded."""
    return key in all_keys() and facts_of(key).rounds


def check_keys(where: str, keys: Iterable[str], varied: bool) -> None:
    """Check that a sweep may set these keys, or, if `varied`, that an axis may.

    `where` is the place in the sweep file, for the message. Raises UserError for the first key that
    is unknown or that the bench sets itself.
    """
    for key in keys:
        if key in (NPROC, *SECTIONS):
            continue
        section, _, name = key.partition(".")
        if section not in known_keys():
            sections = [*known_keys(), NPROC]
            raise UserError(f"{where}: unknown key {key}; {nearest(section, sections, 'sections')}")
        if not name:
            raise UserError(
                f"{where} replaces the section {key}; set its keys one by one, as in {key}.KEY"
            )
        if key in REMOVED:
            raise UserError(f"{where} sets {key}, which was removed; leave it out")
        if name not in known_keys(section):
            raise UserError(f"{where}: unknown key {key}; {nearest(name, known_keys(section))}")
        facts = facts_of(key)
        if facts.never_set:
            raise UserError(f"{where} sets {key}, but {facts.never_set}; leave it out")
        if varied and facts.never_varied:
            raise UserError(
                f"{where} sets {key}, but {facts.never_varied}; set it for all cells, under set"
            )


def check_axis(
    name: str, values: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> tuple[Axis, bool]:
    """Return an axis, and whether it is one of weak scaling.

    `values` are the keys that each value of the axis sets; `defaults` are NPROC and GLOBAL_BATCH
    where a value does not set them. Raises UserError where the cells along the axis could not be
    compared fairly.
    """
    for value, settings in values.items():
        check_keys(f"axes.{name}.{value}", settings, varied=True)
    keys = _all_keys(values)
    if len({family(key) for key in keys}) > 1:
        # A key to which all values give the same content makes no difference between cells.
        keys = [key for key in keys if _differs(key, values)]
    families = {family(key) for key in keys}
    work_keys = {key for key in keys if family(key) == WORK}
    weak = families == {WORK, LAYOUT} and NPROC in keys and work_keys == {GLOBAL_BATCH}
    if weak:
        _check_equal_share(name, values, defaults)
    elif len(families) > 1:
        _refuse_mixture(name, values, keys)
    return Axis(name, tuple(values), tuple(keys), compared=weak or WORK not in families), weak


def _all_keys(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return every key that a value of an axis sets, once each."""
    return [*dict.fromkeys(key for settings in values.values() for key in settings)]


def _differs(key: str, values: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether the values of an axis do not all give a key the same content."""
    first, *others = (settings.get(key, ...) for settings in values.values())
    return any(other != first for other in others)


def _refuse_mixture(name: str, values: Mapping[str, Mapping[str, Any]], keys: list[str]) -> None:
    """Raise UserError for an axis whose keys belong to several families."""
    main = family(keys[0])
    key = next(key for key in keys if family(key) != main)
    value = next(value for value, settings in values.items() if key in settings)
    others = ", ".join(other for other in keys if family(other) == main)
    change = "what is computed" if family(key) == WORK else "another choice"
    raise UserError(
        f"axes.{name} would compare unlike cells: {value} sets {key} ({change}), the rest of the "
        f"axis sets {others}; make {key} an axis of its own, or set it for all cells, under set"
    )


def _check_equal_share(
    name: str, values: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> None:
    """Raise UserError where processes along an axis of weak scaling have unequal rows."""
    rows_per_process = {}
    for value, settings in values.items():
        rows, nproc = ({**defaults, **settings}[key] for key in (GLOBAL_BATCH, NPROC))
        if not isinstance(rows, int):
            raise UserError(f"axes.{name}.{value}: {GLOBAL_BATCH} is {rows!r}; give a whole number")
        rows_per_process[value] = rows / nproc
    for (a, rows_a), (b, rows_b) in pairwise(rows_per_process.items()):
        if rows_a != rows_b:
            raise UserError(
                f"axes.{name} varies {NPROC} and {GLOBAL_BATCH}, which is fair only as weak "
                f"scaling, but a step has {rows_a:g} rows per process in {a} and {rows_b:g} in "
                f"{b}; give each process equally many"
            )


def check_axes(axes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise UserError where two axes set the same key, as the names of cells would be wrong."""
    setters = [(key, name) for name, values in axes.items() for key in _all_keys(values)]
    for (key, axis), (other, other_axis) in combinations(setters, 2):
        shorter, longer = sorted((key, other), key=len)
        # A key may be the section of another one.
        if axis != other_axis and f"{longer}.".startswith(f"{shorter}."):
            raise UserError(
                f"axes.{axis} and axes.{other_axis} both set {longer}; let one axis set it"
            )


def check_group(
    cells: Mapping[str, tuple[int, Mapping[str, Any]]], varied: Iterable[str], weak: bool
) -> dict[str, Any]:
    """Return what the cells of one group have in common, for a reader: `section.key` -> value.

    `cells` are the number of processes and the resolved run file by cell id; `varied` are the keys
    that compared axes set. Raises UserError where two cells differ in any other key: this is the
    last check before anything runs.
    """
    free = {*varied, "training.output_dir"}
    (first, (nproc, run)), *others = cells.items()
    expected = flat(run)
    for other, (_, other_run) in others:
        actual = flat(other_run)
        for key in expected.keys() | actual.keys():
            is_free = key in free or key.partition(".")[0] in free
            if not is_free and expected.get(key) != actual.get(key):
                raise UserError(
                    f"the cells {first} and {other} are compared, but {key} is "
                    f"{expected.get(key)!r} in one and {actual.get(key)!r} in the other; make "
                    f"{key} an axis of its own"
                )
    tokens = expected[GLOBAL_BATCH] * expected["data.sequence_length"]
    name = "tokens per step and process" if weak else "tokens per step"
    common = {name: tokens // nproc if weak else tokens}
    listed = (key for key in expected if key == "lora" or facts_of(key).reported)
    return common | {key: expected[key] for key in listed if key not in free}
