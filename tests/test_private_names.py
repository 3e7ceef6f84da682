"""Private names of libraries are listed in private_names.toml, and the libraries have them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.added import SOURCE

ROOT = Path(__file__).parents[1]
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"}
"""Names of Python's that its own pages describe."""


ROWS = tomllib.loads((ROOT / "tests" / "private_names.toml").read_text(encoding="utf-8"))["name"]


def names_in(row: dict[str, Any]) -> list[str]:
    return [name for key in ("names", "instances", "operators") for name in row.get(key, ())]


def is_private_module(name: str) -> bool:
    return (
        not name.startswith(("shardwise", "__")) and re.search(r"(^|\.)_[A-Za-z]", name) is not None
    )


def of_libraries(tree: ast.AST, ours: set[str]) -> set[str]:
    """The private names that a file reads of others, without their modules."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if re.match("_[A-Za-z]", name) and name not in ours:
                found.add(name)
            case ast.ImportFrom(module=str(module), names=names):
                private = [n.name for n in names if n.name.startswith("_")]
                if not module.startswith("shardwise"):
                    found |= {n.name for n in names} if is_private_module(module) else {*private}
            case ast.Constant(value=str(text)) if re.fullmatch(r"torch[\w.]*\._[\w.]+", text):
                found.add(text.rpartition(".")[2])
    return found - DOCUMENTED


def names_of_ours(tree: ast.AST) -> set[str]:
    """The names that a file defines, without methods that call those that they replace."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                calls = {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Call)
                    and isinstance(part.value.func, ast.Name)
                    and part.value.func.id == "super"
                }
                names |= {name} - calls
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_the_list_has_every_private_name_that_the_source_reads():
    trees = {p: ast.parse(p.read_text(encoding="utf-8")) for p in SOURCE.rglob("*.py")}
    ours = set().union(*map(names_of_ours, trees.values()))
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for name in of_libraries(tree, ours):
            found[name].append(str(path.relative_to(SOURCE)))
    listed = {part for row in ROWS for name in names_in(row) for part in name.split(".")}
    assert {name: files for name, files in found.items() if name not in listed} == {}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["files"][0])
def test_a_row_names_files_that_read_it_and_a_test(row):
    source = "".join((SOURCE / file).read_text(encoding="utf-8") for file in row["files"])
    assert [name for name in names_in(row) if name.rpartition(".")[2] not in source] == []
    assert (ROOT / row["test"]).is_file()


@pytest.mark.parametrize("name", [name for row in ROWS for name in row.get("names", ())])
def test_a_library_still_has_it(name):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return
    raise AssertionError(f"no module of {name}")
