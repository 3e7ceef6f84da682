"""Read a run file: YAML and command-line overrides, checked against the sections of `config.py` with pydantic."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from shardwise import rules
from shardwise.config import REMOVED, RunConfig, UserError, known_keys, nearest, require
from shardwise.ranges import shown


def parse_config(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Return plain data as a run file; raise UserError with one line for the first thing that is wrong.

    That is a key, a type, a range, or a combination that no rule of the run file allows.
    """
    import pydantic  # here, so that a Python caller who builds RunConfig himself does not need it

    try:
        cfg = _adapter().validate_python(data)
    except pydantic.ValidationError as error:
        raise UserError(f"{source}: {_first_problem(error)}") from None
    for section, keys in data.items():  # pydantic takes true for 1
        for key, value in (keys or {}).items():
            taken = getattr(getattr(cfg, section), key)
            require(
                not isinstance(value, bool) or isinstance(taken, bool),
                f"{source}: {section}.{key} is not a switch",
            )
    for _, message in rules.refusals(cfg):
        raise UserError(f"{source}: {message}")
    return cfg


def without_removed(data: dict[str, Any]) -> dict[str, Any]:
    """Return the sections that an earlier version stored, without keys of REMOVED that changed nothing."""
    data = {
        section: dict(keys) if isinstance(keys, dict) else keys for section, keys in data.items()
    }
    for name, unused in REMOVED.items():
        section, _, key = name.partition(".")
        keys = data.get(section)
        if isinstance(keys, dict) and key in keys and keys[key] == unused:
            del keys[key]
    return data


@functools.cache
def _adapter() -> Any:
    """Return pydantic's checks of the sections; making them takes as long as checking a thousand files."""
    import pydantic

    return pydantic.TypeAdapter(RunConfig)


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file and apply `--section.key=value` overrides (values are YAML, so `null` and `[a, b]` work)."""
    data = read_yaml(path, "a run file is a mapping of sections; see docs/reference/config.md")
    for override in overrides or []:
        _apply_override(data, override)
    return parse_config(data, source=str(path))


def read_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """Read a YAML file whose content has to be a mapping; `what` tells the user so. A key given twice is an error."""
    # Nobody may ever write to a pipe, and reading it would wait.
    require(not Path(path).is_fifo(), f"{path}: a pipe; give the path of a YAML file")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a name that holds a null byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{path}: cannot read the file ({reason}); give the path of a YAML file"
        ) from None
    require(
        len(content) <= MOST_BYTES,
        f"{path}: larger than {MOST_BYTES:,} bytes; give the path of a YAML file",
    )
    try:
        data = yaml.load(content.decode(), _PlainData)
    except (yaml.YAMLError, ValueError) as error:  # bytes that are no text, dates that are none
        raise UserError(f"{path}: not valid YAML ({error}); mend it") from None
    require(isinstance(data, dict), f"{path}: {what}")
    return data


MOST_BYTES, MOST_LEVELS, MOST_VALUES = 1 << 20, 20, 100_000
"""What is read of a YAML file: many times what any run or sweep needs, and little enough for every later pass."""


class _PlainData(yaml.SafeLoader):
    """YAML's plain data within the bounds above, where a key given twice is an error: else the second would win."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._sizes: dict[
            yaml.Node, int
        ] = {}  # values in each node; an alias has all that it stands for once more

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        self._level += 1
        if self._level > MOST_LEVELS:
            raise yaml.YAMLError(f"nested more than {MOST_LEVELS} levels deep")
        node = super().compose_node(parent, index)
        self._level -= 1
        if isinstance(node, yaml.CollectionNode) and node not in self._sizes:
            if is_alias:
                raise yaml.YAMLError("an alias stands within what it stands for")
            children = (
                itertools.chain.from_iterable(node.value)
                if isinstance(node, yaml.MappingNode)
                else node.value
            )
            self._sizes[node] = 1 + sum(self._sizes.get(child, 1) for child in children)
            if self._sizes[node] > MOST_VALUES:
                raise yaml.YAMLError(
                    f"more than {MOST_VALUES:,} values, each alias counted as what it stands for"
                )
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # As written: later what `<<` merges stands beside a mapping's own keys, which go before it.
        node = super().compose_mapping_node(anchor)
        key, times = (
            Counter(str(key.value) for key, _ in node.value).most_common(1)[0]
            if node.value
            else ("", 0)
        )
        if times > 1:
            raise yaml.YAMLError(f"the key {key} is given twice")
        return node


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.removeprefix("--").partition("=")
    section, _, name = key.partition(".")
    start = f"--{key[:80]}"
    require(bool(equals and section), f"{override[:80]}: write an override as --section.key=value")
    known = known_keys()
    require(section in known, f"{start}: unknown key {section[:80]}; {nearest(section, known)}")
    try:
        value = yaml.load(text, _PlainData)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{start}: the value is not valid YAML; quote it") from None
    existing = data.get(section)
    kept = existing if isinstance(existing, dict) else {}
    data[section] = (
        {**kept, name: value} if name else value
    )  # the latter a whole section, such as --lora=null


def _first_problem(error: Any) -> str:
    # Unknown keys first: a misspelt required key also makes a "missing" error, and the spelling is the way out.
    problem = min(
        error.errors(),
        key=lambda e: e["type"] not in ("unexpected_keyword_argument", "value_error"),
    )
    location = [str(part)[:80] for part in problem["loc"]]
    if problem["type"] == "unexpected_keyword_argument":
        key = ".".join(location)
        if key in REMOVED:
            return f"{key} was removed; leave it out"
        return f"unknown key {key}; {nearest(location[-1], known_keys(*location[:-1]))}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{'.'.join(location)} is missing; add it"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    wanted = " or ".join(
        dict.fromkeys(
            e["msg"] for e in error.errors() if [str(p) for p in e["loc"][:2]] == location[:2]
        )
    )
    return (
        f"{'.'.join(location[:2])} is {shown(problem['input'])}: {wanted[:1].lower()}{wanted[1:]}"
    )
