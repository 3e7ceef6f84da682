"""What a kind of block is called, and what its modules are called, stands in models/kinds and
models/families alone."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.models import kinds
from shardwise.models.families import FAMILIES
from shardwise.models.kinds import KINDS, attention
from shardwise.models.kinds.base import CORE_STEP, Kind
from tests.models.tiny import PLAIN, on_meta, tiny

SOURCE = Path(kinds.__file__).parents[2]
HOME = (SOURCE / "models" / "kinds", SOURCE / "models" / "families")
ALLOWED = {
    # It replaces the forward of one class of transformers, with the names of that class.
    "models/patches/forget_gate.py": {"f_a_proj", "f_b_proj", "A_log", "dt_bias"}
}
"""By file, the names that it may have, and why."""


def plain(name: str) -> bool:
    """Whether a name is also an English word, which code may use for something else."""
    return re.search(r"[_\d]", name) is None


def modules_of(kind: Kind) -> set[str]:
    """The names in a kind's dataflow, without where they lie: `experts.up_proj` is `up_proj`."""
    return {name.rpartition(".")[2] for step in (*kind.before, *kind.after) for name in step}


NAMES = {name for kind in KINDS for name in (kind.name, *modules_of(kind)) if len(name) > 1} | {
    mixer.name for family in FAMILIES.values() for mixer in family.mixers.values()
}


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers, and words of strings that are not prose (which stands alone, as docstrings do),
    by line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(word := getattr(node, field, None), str):
                yield from ((line, part) for part in word.split(".") if not plain(part))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield line, node.value
            yield from (
                (line, word)
                for word in re.findall(r"[\w-]+", re.sub(r"\S+://\S+", "", node.value))
                if not plain(word)
            )


def test_no_name_stands_elsewhere() -> None:
    found: dict[str, set[tuple[int, str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if not any(path.is_relative_to(home) for home in HOME):
            own = str(path.relative_to(SOURCE))
            named = {
                (line, word)
                for line, word in words(path)
                if word in NAMES - ALLOWED.get(own, set())
            }
            if named:
                found[own] = named
    assert found == {}


def test_the_search_finds_names(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        '"""A docstring with q_proj."""\nx = "mlp"\ny.q_proj = "an mlp, and a moe"\nz = f"{x}.in_proj"\n'
    )
    assert {(line, word) for line, word in words(file) if word in NAMES} == {
        (2, "mlp"),
        (3, "q_proj"),
        (4, "in_proj"),
    }


def test_what_may_have_names_needs_them() -> None:
    for own, names in ALLOWED.items():
        assert names <= {word for _, word in words(SOURCE / own)}, own


def test_all_kinds_are_listed() -> None:
    files = {path.stem for path in HOME[0].glob("*.py")} - {"__init__", "base"}
    made = [
        value
        for name in files
        for value in vars(getattr(kinds, name)).values()
        if isinstance(value, Kind)
    ]
    assert set(map(id, made)) == set(map(id, KINDS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}-{KINDS.index(kind)}")
def test_a_kind_speaks_of_its_own_modules(kind: Kind) -> None:
    steps = [name for step in (*kind.before, *kind.after) for name in step]
    assert len(steps) == len(set(steps))
    for names in (
        kind.shares_input,
        kind.ends,
        kind.gates,
        kind.gating,
        kind.rates,
        kind.bypassed,
        kind.experts,
    ):
        assert set(names) <= set(steps)
    assert set(kind.shares_input) <= set(kind.before[0])
    assert kind.cores is Kind.cores or kind.mixes_tokens
    assert kind.split is not None
    assert list(inspect.signature(kind.split).parameters) == ["block", "num_ranks"]


def test_steps_compare_as_data_meets_them() -> None:
    steps = [attention.FULL.step_of(name) for name in ("q_proj", "q_norm", "o_proj")]
    assert None not in steps
    before, norm, after = steps
    assert before < norm < CORE_STEP < after
    assert attention.FULL.step_of("v_proj") == before
    assert attention.FULL.step_of("in_proj") is None


@pytest.mark.parametrize("name", PLAIN)
def test_kinds_are_families_kinds(name: str) -> None:
    family = FAMILIES[on_meta(tiny(name)).config.model_type]
    assert {id(block.kind) for block in family.blocks} <= set(map(id, KINDS))


def test_every_kind_is_some_familys() -> None:
    assert {id(kind) for kind in KINDS} == {
        id(b.kind) for family in FAMILIES.values() for b in family.blocks
    }
