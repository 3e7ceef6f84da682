"""Write docs/reference/config.md from the docstrings in src/shardwise/config.py: `python
tools/config_reference.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path

from shardwise.ranges import RANGES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "config.md"
AS_YAML = {"field(default_factory=list)": "[]", "None": "null", "True": "true", "False": "false"}
HEAD = """\
# The run file

A YAML mapping of sections. Every key is typed; an unknown or misspelt one is an error that names the nearest. On the
command line `--section.key=value` replaces a value (values are YAML: `null`, `[a, b]`), `--lora=null` a whole section.

This page is written by `tools/config_reference.py` from `src/shardwise/config.py`.
"""


def page() -> str:
    """The whole page."""
    tree = ast.parse((ROOT / "src" / "shardwise" / "config.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    parts = [HEAD]
    for field in fields(classes["RunConfig"]):
        name, kind, default, _ = field
        section = classes[kind.removesuffix(" | None")]
        needed = (
            "required"
            if default is None
            else "leave it out to train in full"
            if default == "null"
            else "optional"
        )
        parts += [f"\n## `{name}` ({needed})\n", "| key | type | default | |", "|---|---|---|---|"]
        for key, key_kind, key_default, text in fields(section):
            shown = "required" if key_default is None else f"`{key_default}`"
            least, most = RANGES.get(f"{name}.{key}", (None, None))
            bounds = f" From {least:,} to {most:,}." if least is not None else ""
            parts.append(
                f"| `{name}.{key}` | {cell(key_kind)} | {shown} | {' '.join(text.split())}{bounds} |"
            )
    return "\n".join(parts) + "\n"


def fields(section: ast.ClassDef) -> list[tuple[str, str, str | None, str]]:
    """Name, type, default (None: required) and docstring of each field."""
    found = []
    for node, after in zip(section.body, [*section.body[1:], None]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = (
                after.value.value
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                else ""
            )
            default = None if node.value is None else ast.unparse(node.value)
            default = (
                AS_YAML.get(default, default.strip("'").replace("(", "[").replace(")", "]"))
                if default
                else None
            )
            found.append((node.target.id, ast.unparse(node.annotation), default, str(text)))
    return found


def cell(kind: str) -> str:
    """A type as people write it."""
    kind = kind.replace("DType", "Literal['float32', 'bfloat16']")
    while "Literal[" in kind:
        before, _, rest = kind.partition("Literal[")
        inside, _, after = rest.partition("]")
        kind = before + " | ".join(inside.replace("'", "").split(", ")) + after
    return kind.replace(" | ", ", ").replace("None", "null")


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
