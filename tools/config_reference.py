"""Write docs/reference/config.md from the docstrings of the run file's sections."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from shardwise.config.keys import facts_of
from shardwise.parallel.optimizers import OPTIMIZERS
from shardwise.parallel.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "config.md"
AS_YAML = {
    "list": "[]",
    "field(default_factory=list)": "[]",
    "dict": "{}",
    "field(default_factory=dict)": "{}",
    "None": "null",
    "True": "true",
    "False": "false",
}
OF_FILES: dict[str, dict[str, Any]] = {"StrategyName": STRATEGIES, "OptimizerName": OPTIMIZERS}
"""The types whose values are the names of files, each with a class."""
HEAD = """\
# The run file

*Which keys has a run file?*

This page lists every key of a run file with its type, its default and what it does. A run file is a
YAML mapping of sections. An unknown or misspelt key is an error that names the nearest. On the
command line `--section.key=value` replaces a value (values are YAML: `null`, `[a, b]`),
`--lora=null` a whole section.

This page is written by `tools/config_reference.py` from `src/shardwise/config`.
"""


def page() -> str:
    """Return the whole page."""
    classes = {
        node.name: node
        for path in (ROOT / "src" / "shardwise" / "config").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    needs = {None: "required", "null": "leave it out to train in full"}
    parts = [HEAD]
    for name, kind, default, _ in fields(classes["RunConfig"]):
        parts += [f"\n## `{name}` ({needs.get(default, 'optional')})\n"]
        parts += ["| key | type | default | |", "|---|---|---|---|"]
        for key, key_kind, key_default, text in fields(classes[kind.removesuffix(" | None")]):
            shown = "required" if key_default is None else f"`{key_default}`"
            between = facts_of(f"{name}.{key}").between
            bounds = " From {:,} to {:,}.".format(*between) if between else ""
            described = OF_FILES.get(key_kind, {}).items()
            texts = [text, *(f"`{value}`: {cls.__doc__}" for value, cls in described)]
            text = " ".join(" ".join(texts).split()) + bounds
            parts.append(f"| `{name}.{key}` | {cell(key_kind)} | {shown} | {text} |")
    return "\n".join(parts) + "\n"


def fields(section: ast.ClassDef) -> list[tuple[str, str, str | None, str]]:
    """Return name, type, default (None: required) and docstring of each field."""
    rows = []
    for node, after in zip(section.body, [*section.body[1:], None]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if ast.unparse(node.annotation).startswith("ClassVar"):
                continue
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            rows.append((node.target.id, ast.unparse(node.annotation), yaml_of(node.value), text))
    return rows


def yaml_of(default: ast.expr | None) -> str | None:
    """Return the default of a field as YAML, None if it has none."""
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "with_facts":
        factories = [word.value for word in default.keywords if word.arg == "factory"]
        made = (
            ast.Call(ast.Name("field"), [], [ast.keyword("default_factory", f)]) for f in factories
        )
        default = next(iter(default.args), next(made, None))
    if default is None:
        return None
    text = ast.unparse(default)
    return AS_YAML.get(text, text.strip("'").replace("(", "[").replace(")", "]"))


def cell(kind: str) -> str:
    """Return a type as people write it."""
    kind = kind.replace("Recomputation", "mapping").replace(
        "DType", "Literal['float32', 'bfloat16']"
    )
    kind = ", ".join(OF_FILES.get(kind, (kind,)))
    while "Literal[" in kind:
        before, _, rest = kind.partition("Literal[")
        inside, _, after = rest.partition("]")
        kind = before + " | ".join(inside.replace("'", "").split(", ")) + after
    return kind.replace(" | ", ", ").replace("None", "null")


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
