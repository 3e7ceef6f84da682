"""Read a run file: YAML and command-line overrides, checked against the sections of `config.py` with pydantic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shardwise.config import RunConfig, UserError, known_keys, nearest, require


def parse_config(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Check plain data against the sections above; raise UserError with one line for the first thing wrong."""
    import pydantic  # here, so that a Python caller who builds RunConfig himself does not need it

    try:
        cfg = pydantic.TypeAdapter(RunConfig).validate_python(data)
    except pydantic.ValidationError as error:
        raise UserError(f"{source}: {_first_problem(error)}") from None
    for section, keys in data.items():  # pydantic takes true for 1
        for key, value in (keys or {}).items():
            taken = getattr(getattr(cfg, section), key)
            require(
                not isinstance(value, bool) or isinstance(taken, bool), f"{source}: {section}.{key} is not a switch"
            )
    return cfg


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file and apply `--section.key=value` overrides (values are YAML, so `null` and `[a, b]` work)."""
    data = read_yaml(path, "a run file is a mapping of sections; see docs/reference/config.md")
    for override in overrides or []:
        _apply_override(data, override)
    return parse_config(data, source=str(path))


def read_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """Read a YAML file whose content has to be a mapping; `what` tells the user so. A key given twice is an error."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _NoDuplicates)
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:  # bytes that are no text, dates that are none
        raise UserError(f"{path}: not valid YAML ({error})") from None
    require(isinstance(data, dict), f"{path}: {what}")
    return data


class _NoDuplicates(yaml.SafeLoader):
    """YAML's plain data, but a key given twice is an error: the second would win without a word."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # As written: later what `<<` merges stands beside a mapping's own keys, which go before it.
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"the key {twice[0]} is given twice")
        return node


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.removeprefix("--").partition("=")
    section, _, name = key.partition(".")
    require(bool(equals and section), f"{override}: write an override as --section.key=value")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{override}: the value is not valid YAML; quote it") from None
    existing = data.get(section)
    kept = existing if isinstance(existing, dict) else {}
    data[section] = {**kept, name: value} if name else value  # the latter a whole section, such as --lora=null


def _first_problem(error: Any) -> str:
    # Unknown keys first: a misspelt required key also makes a "missing" error, and the spelling is the way out.
    problem = min(error.errors(), key=lambda e: e["type"] not in ("unexpected_keyword_argument", "value_error"))
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "unexpected_keyword_argument":
        return f"unknown key {'.'.join(location)}; {nearest(location[-1], known_keys(*location[:-1]))}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{'.'.join(location)} is missing; add it"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    wanted = " or ".join(
        dict.fromkeys(e["msg"] for e in error.errors() if [str(p) for p in e["loc"][:2]] == location[:2])
    )
    return f"{'.'.join(location[:2])} is {problem['input']!r}: {wanted[:1].lower()}{wanted[1:]}"
