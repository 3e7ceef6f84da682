"""What is found as a file: who branches on its name, and a copy of the library with one more."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from shardwise.config.presets import MODELS
from tests.distributed import PATIENCE

SOURCE = Path(__file__).parents[1] / "src" / "shardwise"
RUN: dict[str, Any] = {
    "model": {
        "path": str(MODELS / "tiny-llama"),
        "init": "random",
        "tokenizer": str(MODELS.parent / "starter"),
    },
    "lora": {"r": 4},
    "data": {"train": "corpus.jsonl", "sequence_length": 32, "packing": "none"},
    "training": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "output_dir": "out"},
}


def decided_by(tree: ast.AST, names: Collection[str]) -> Iterator[str]:
    """Yield the names that are compared, looked up, or listed."""

    def named_in(part: ast.AST) -> Iterator[str]:
        for inner in ast.walk(part):
            if isinstance(inner, ast.Constant) and inner.value in names:
                yield str(inner.value)

    for node in ast.walk(tree):
        match node:
            case ast.Compare() | ast.Tuple() | ast.List() | ast.Set() | ast.MatchValue():
                yield from named_in(node)
            case ast.Dict(keys=parts) | ast.Call(func=ast.Attribute(attr="get"), args=parts):
                yield from (name for part in parts if part for name in named_in(part))
            case ast.Subscript(slice=part):
                yield from named_in(part)


def branches(names: Collection[str], folder: str) -> set[tuple[str, str]]:
    """Return (file, name) for each name that decides something outside of its folder."""
    return {
        (str(path.relative_to(SOURCE)), name)
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE / folder
        for name in decided_by(ast.parse(path.read_text(encoding="utf-8")), names)
    }


def files_with(name: str) -> set[str]:
    """Return the files of src that have this name, import such a file, or have it as a string.

    Docstrings and messages do not count.
    """
    return {file for file, names in _names_by_file().items() if name in names}


@cache
def _names_by_file() -> dict[str, set[str]]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        names = {*path.relative_to(SOURCE).with_suffix("").parts}
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in texts:
                names.add(str(node.value))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
                names |= {
                    str(node.module).rpartition(".")[2],
                    *(alias.name for alias in node.names),
                }
        found["/".join(path.relative_to(SOURCE).parts)] = names
    return found


def files_that_read(key: str) -> set[str]:
    """Return the files of src that read a key of a section, or set it, beside its declaration.

    A section is known by its name, as in `cfg.training.seed` or `replace(training, seed=0)`; who
    has a key under another name is not seen.
    """
    section, _, name = key.partition(".")
    return {file for file, read in _read_by_file().items() if (section, name) in read}


@cache
def _read_by_file() -> dict[str, set[tuple[str, str]]]:
    """Return what each file reads, but for those that declare sections."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        file = path.relative_to(SOURCE).as_posix()
        if file.startswith("config/rules/") or not file.startswith("config/"):
            found[file] = pairs_read(ast.parse(path.read_text(encoding="utf-8")))
    return found


def pairs_read(tree: ast.AST) -> set[tuple[str, str]]:
    """Return (section, key) for each attribute of what is called like a section, and for each key
    that a section is made or replaced with; more pairs, which are none, come too.
    """
    read = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=of, attr=name):
                read.add((_last_name(of), name))
            case ast.Call(func=function, args=args, keywords=keywords):
                changed = args[0] if args and _last_name(function) == "replace" else function
                section = _last_name(changed).lower()
                read |= {(section, keyword.arg) for keyword in keywords if keyword.arg}
    return read


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def library_with(folder: Path, added: Mapping[str, str], run: Mapping[str, Any]) -> None:
    """Make a folder with a copy of the library with more files, a run file and its rows."""
    shutil.copytree(SOURCE, folder / "src" / "shardwise", ignore=lambda *_: ["__pycache__"])
    for name, text in added.items():
        (folder / "src" / "shardwise" / name).write_text(text)
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    texts = ({"text": f"row {number} of a small corpus"} for number in range(40))
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, texts)))


def shardwise(folder: Path, *arguments: str, code: int = 0) -> str:
    """Return what a command of that library prints, whose exit code is this one."""
    command = [sys.executable, "-m", "shardwise", *arguments]
    paths = os.pathsep.join([str(folder / "src"), *sys.path])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr
