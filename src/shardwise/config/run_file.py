"""Read a run file: YAML and command-line overrides, checked by pydantic against `config/`."""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from shardwise.base.safety import check_given
from shardwise.config import MOVED, REMOVED, RunConfig, Section, UserError, require, rules
from shardwise.config.keys import all_keys, elsewhere, facts_of, known_keys, nearest
from shardwise.config.ranges import shown
from shardwise.config.wanted import wanted


def parse_config(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Return plain data as a RunConfig; raise UserError for the first mistake in it.

    A mistake is a key, a type, a range, or a combination that a rule of the run file refuses.
    """
    cfg = read_config(data, source)
    for _, message in rules.refusals(cfg):
        raise UserError(f"{source}: {message}")
    return cfg


def read_config(data: dict[str, Any], source: str) -> RunConfig:
    """Return plain data as a RunConfig; UserError for a wrong key, type or range.

    The rules have not been asked whether its keys go together.
    """
    import pydantic  # late: a Python caller who builds a RunConfig does not need it

    try:
        cfg = _adapter().validate_python(data)
    except pydantic.ValidationError as error:
        raise UserError(f"{source}: {_first_problem(error, data)}") from None
    place = _switch_for_number(data, cfg)
    require(place is None, f"{source}: {_wrong(place or [], True, data)}")
    return cfg


def _switch_for_number(value: Any, parsed: Any) -> list[str] | None:
    """Return the place of a switch where a number is read: pydantic takes true for 1."""
    parts: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(value, Mapping):
        get = functools.partial(getattr, parsed) if isinstance(parsed, Section) else parsed.get
        parts = ((name, part, get(name, None)) for name, part in value.items())
    elif isinstance(value, list) and isinstance(parsed, list | tuple):
        parts = zip(itertools.count(), value, parsed, strict=False)
    elif isinstance(value, bool) and not isinstance(parsed, bool):
        return []
    for name, *both in parts:
        if (place := _switch_for_number(*both)) is not None:
            return [str(name), *place]
    return None


def without_removed(data: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a stored run file without keys of REMOVED that changed nothing."""

    def is_needed(section: str, key: str, value: Any) -> bool:
        name = f"{section}.{key}"
        return name not in REMOVED or value != REMOVED[name]

    return {
        section: {key: value for key, value in keys.items() if is_needed(section, key, value)}
        if isinstance(keys, dict)
        else keys
        for section, keys in data.items()
    }


@functools.cache
def _adapter() -> Any:
    """Return pydantic's checks of the sections, which take long to make."""
    import pydantic

    return pydantic.TypeAdapter(RunConfig)


@functools.cache
def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a run file: types, words, ranges, and descriptions of its keys."""
    schema = _adapter().json_schema()
    for section in schema["$defs"].values():
        for described in (section, *section["properties"].values()):
            described["description"] = " ".join(described["description"].split())
    for key in all_keys():
        if (between := facts_of(key).between) is None:
            continue
        section, _, name = key.partition(".")
        types = schema["$defs"][section.capitalize()]["properties"][name]
        for kind in types.get("anyOf", [types]):
            if kind["type"] in ("integer", "number"):
                kind |= dict(zip(("minimum", "maximum"), between))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return head | schema | {"title": "A run file of shardwise"}


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file and apply `--section.key=value` overrides, whose values are YAML."""
    check_given(path, "a run file")
    data = read_yaml(path, "a run file is a mapping of sections; shardwise init writes one")
    for override in overrides or []:
        apply_override(data, override)
    return parse_config(data, source=str(path))


def read_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """Read a YAML file whose content has to be a mapping.

    Raises UserError where it is not (`what` is then the message), or where a key is given twice.
    """
    # To read a pipe would wait until somebody writes to it.
    require(not Path(path).is_fifo(), f"{path}: a pipe; give the path of a YAML file")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a null byte in a name raises ValueError
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or no valid date
        raise UserError(f"{path}: not valid YAML{_where(error, content)}; correct it") from None
    require(isinstance(data, dict), f"{path}: {what}")
    return data


MOST_BYTES, MOST_LEVELS, MOST_VALUES = 1 << 20, 20, 100_000
"""Bounds of a YAML file: far above any run or sweep, and small enough for every later pass."""


class _PlainData(yaml.SafeLoader):
    """Loads YAML's plain data within the bounds above; a key given twice is an error."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        # The number of values in each node. An alias counts as what it stands for.
        self._sizes: dict[yaml.Node, int] = {}

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
            children = node.value
            if isinstance(node, yaml.MappingNode):
                children = itertools.chain.from_iterable(children)
            self._sizes[node] = 1 + sum(self._sizes.get(child, 1) for child in children)
            if self._sizes[node] > MOST_VALUES:
                raise yaml.YAMLError(
                    f"more than {MOST_VALUES:,} values, each alias counted as what it stands for"
                )
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # Here the keys are as written. Later, those that `<<` merges stand beside them, and a key
        # of the mapping itself may repeat one of these.
        node = super().compose_mapping_node(anchor)
        for key, times in Counter(str(key.value) for key, _ in node.value).items():
            if times > 1:
                raise yaml.YAMLError(f"the key {key} is given twice")
        return node


_PROBLEMS = {
    "mapping values are not allowed": "a colon where no key can be: a value with a colon is quoted",
    "expected ',' or ']'": "a bracket that is not closed",
    "expected ',' or '}'": "a brace that is not closed",
    "could not find expected ':'": "a line without a colon",
    "expected <block end>": "more than one value, or an indentation that fits no line above",
    "unexpected end of stream": "a quote that is not closed",
    "found undefined alias": "an alias of no anchor",
    "unknown escape character": "a backslash in double quotes: use single ones",
    "'\\t' that cannot start": "a tab: lines are indented by spaces",
    "cannot start any token": "a character that begins no value: quote it",
    "could not determine a constructor": "a tag, and tags are not read",
    "found unhashable key": "a list or a mapping as a key",
    "codec can't decode": "it is not in UTF-8",
    "special characters are not allowed": "a control character",
    "must be in": "a date that does not exist: quote it",
    "out of range": "a date that does not exist: quote it",
    "Exceeds the limit": "a number of thousands of digits",
}
"""The reason in our words, by a part of the message of PyYAML or Python."""


def _where(error: Exception, content: bytes) -> str:
    """Return where a file is no YAML, and why, as the end of a sentence."""
    text = str(error)
    reason = next((reason for part, reason in _PROBLEMS.items() if part in text), None)
    if not isinstance(error, yaml.MarkedYAMLError):
        return f" ({reason or text})"
    is_open = reason is not None and "not closed" in reason  # the line is that of its beginning
    mark = (error.context_mark if is_open else None) or error.problem_mark
    line = 0 if mark is None else mark.line
    lines = content.decode().splitlines()
    quoted = shown(lines[line].strip()) if line < len(lines) else "the end"
    return f" in line {line + 1}, {quoted}" + (f" ({reason})" if reason else "")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set a key in the sections of a run file, or a whole section, as in `--lora=null`."""
    key, equals, text = override.removeprefix("--").partition("=")
    section, _, name = key.partition(".")
    start = f"--{key[:80]}"
    require(bool(equals and section), f"{override[:80]}: write an override as --section.key=value")
    known = known_keys()
    way_out = elsewhere(section) or nearest(section, known)
    require(section in known, f"{start}: unknown key {section[:80]}; {way_out}")
    require(bool(text.strip()), f"{start}: no value; write null for none")
    try:
        value = yaml.load(text, _PlainData)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{start}: the value is not valid YAML; quote it") from None
    if name:
        keys = data.get(section)
        data[section] = {**(keys if isinstance(keys, dict) else {}), name: value}
    else:
        data[section] = value


def _first_problem(error: Any, data: Any) -> str:
    """Return the message for one of pydantic's errors of this data."""
    # Unknown keys come first: a misspelt required key is also missing, and the spelling helps.
    # Where a key may have several types, each has an error: the one that leads deepest into the
    # data is of the type that was meant.
    problems = [(error["type"], [*_keys_of(error["loc"], data)], error) for error in error.errors()]
    kind, keys, problem = min(
        problems,
        key=lambda p: (
            p[0] not in ("unexpected_keyword_argument", "value_error"),
            -len(p[1]),
            p[0] not in ("missing", "missing_argument"),
        ),
    )
    location = [*_keys_of(problem["loc"][:-1], data), *(str(p)[:80] for p in problem["loc"][-1:])]
    if kind == "unexpected_keyword_argument":
        key = ".".join(location)
        if key in MOVED:
            return f"{key} is called {MOVED[key]}; rename it"
        if key in REMOVED:
            return f"{key} was removed; leave it out"
        near = nearest(location[-1], known_keys(*location[:-1]))
        return f"unknown key {key}; {elsewhere(location[-1]) or near}"
    is_in_list = any(isinstance(part, int) for part in problem["loc"][-1:])  # one of a pair
    if kind in ("missing", "missing_argument") and not is_in_list:
        return f"{'.'.join(location)} is missing; add it"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    if problem["loc"][-1:] == ("[key]",):
        key = _in_yaml(problem["input"])
        return f"{'.'.join(keys[:-1])} has the key {key}; give a text, in quotes"
    *_, value = [data, *(part for _, part in _parts_of(problem["loc"], data))]
    return _wrong(keys, value, data)


def _wrong(place: Sequence[str], value: Any, data: Any) -> str:
    """Return the message for a value, at a place of data, of another type than its key has."""
    words = wanted(RunConfig, place, data)
    if words == "a text" and isinstance(value, int | float | date):
        words += ", in quotes"
    return f"{'.'.join(place) or 'the run'} is {_in_yaml(value)}; give {words}"


def _in_yaml(value: Any) -> str:
    """Return the text of a value in an error, as a run file has it."""
    if value is None or isinstance(value, bool | date):
        return json.dumps(value, default=str).strip('"')
    return shown(value)


def _keys_of(place: Sequence[str | int], data: Any) -> Iterator[str]:
    """Yield the keys that lead to a place in data, without the names of types among them."""
    return (key for key, _ in _parts_of(place, data))


def _parts_of(place: Sequence[str | int], data: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys that lead to a place in data, each with what it leads to."""
    for part in place:
        is_index = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_index or (isinstance(data, Mapping) and part in data):
            data = data[part]
            yield str(part)[:80], data
