"""The graph of the library's modules: which file names which other one, in whatever way."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import networkx as nx

LOADERS = {"import_module", "run_module", "in_files"}
"""Functions that load modules by their names, which are the first argument."""
BY_ARGUMENT = {
    "parallel/registry.py": "it loads what `in_files` is given",
    "lab/preloaded.py": "it loads a list of names that stands in it",
}
"""The files that load a module by a name that they compute."""


def graph_of(source: Path) -> Any:
    """Return the graph of a library's modules, as networkx has it.

    All imports count: also those inside functions, for types alone, and of modules by their names
    as strings. `from package import module` leads to the module, and `from package import name` to
    the package's `__init__`. Whoever enters a package from outside leads to its `__init__` too,
    since Python runs that first; a module within has been entered already.
    """
    files = {name_of(path, source): path for path in sorted(source.rglob("*.py"))}
    graph: Any = nx.DiGraph()
    graph.add_nodes_from(files)
    for name, path in files.items():
        for target in targets(path, name, source, files):
            graph.add_edge(name, target)
            package = target.rpartition(".")[0]
            while package and not f"{name}.".startswith(f"{package}."):
                graph.add_edge(name, package)
                package = package.rpartition(".")[0]
    return graph


def name_of(path: Path, source: Path) -> str:
    """Return the dotted name of a module; a package has that of its folder."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def targets(path: Path, name: str, source: Path, files: Collection[str]) -> Iterator[str]:
    """Yield the modules of a library that a file of it names."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    for node in nodes:
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases if alias.name in files)
            case ast.ImportFrom(module=str(module), names=aliases) if module in files:
                wanted = (f"{module}.{alias.name}" for alias in aliases)
                yield from (one if one in files else module for one in wanted)
            case ast.Call(func=ast.Name(id=f) | ast.Attribute(attr=f), args=[text, *_]):
                if f in LOADERS:
                    file = path.relative_to(source).as_posix()
                    assert file in BY_ARGUMENT or is_readable(text), f"{path}:{node.lineno}"
                    yield from loaded_by(text, name, files)
            case ast.Constant(value=str(text)) if path.name == "preloaded.py" and text in files:
                yield text


def is_readable(text: ast.expr) -> bool:
    """Return whether it can be read here which modules a text may name."""
    begins = isinstance(text, ast.JoinedStr) and isinstance(text.values[0], ast.Constant)
    return begins or isinstance(text, ast.Constant) or "__name__" in ast.unparse(text)


def loaded_by(text: ast.expr, name: str, files: Collection[str]) -> Iterator[str]:
    """Yield the modules that an expression of module `name` may name: of a package, all."""
    match text:
        case ast.Constant(value=str(module)):
            yield from {module} & {*files}
            return
        case ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]):
            package = start.rpartition(".")[0]
        case _:
            package = name if "__name__" in ast.unparse(text) else "-"
    yield from (one for one in files if one.rpartition(".")[0] == package and one != name)


def circles(graph: Any) -> list[list[str]]:
    """Return the groups of modules each of which leads to all others of its group."""
    return [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]
