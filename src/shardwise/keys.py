"""The keys of the run file: which there are, and the values of a run by `section.key`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from shardwise.config import RunConfig


def flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run file by `section.key`.

    A section without keys, such as `lora: null`, keeps its own name.
    """
    values: dict[str, Any] = {}
    for section, keys in run.items():
        if isinstance(keys, Mapping):
            values |= {f"{section}.{key}": value for key, value in keys.items()}
        else:
            values[section] = keys
    return values


def input_paths(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys of a run that name what it reads, each with a file, a folder or a pattern.

    A model or a dataset may have its name on the hub in place of a folder.
    """
    yield "model.path", cfg.model.path
    if cfg.model.tokenizer is not None:
        yield "model.tokenizer", cfg.model.tokenizer
    if cfg.lora is not None and cfg.lora.path is not None:
        yield "lora.path", cfg.lora.path
    data, tools = cfg.data, [("data.tools", cfg.data.tools)]
    for key, value in (("data.train", data.train), ("data.validation", data.validation)):
        entries: list[Any] = value if isinstance(value, list) else [value]
        for entry in entries:
            path = getattr(entry, "path", entry)
            if isinstance(path, str):  # a share for validation is a number
                yield key, path
            tools.append((key, getattr(entry, "tools", None)))
    if data.chat_template is not None:
        yield "data.chat_template", data.chat_template
    yield from ((key, path) for key, path in tools if path is not None and path.endswith(".json"))


def nearest(name: str, known: Sequence[str], what: str = "keys") -> str:
    """Return the way out for a user who wrote `name`, which is not in `known`."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"known {what}: {', '.join(known)}"


def known_keys(*section: str) -> list[str]:
    """Return the keys of a section of the run file; without an argument the sections.

    A place within a list may be named by its index, and by names of types.
    """
    cls: Any = RunConfig
    for part in section:
        hint = get_type_hints(cls).get(part)
        cls = cls if hint is None else next(_sections_in(hint), hint)
    return [f.name for f in dataclasses.fields(cls)]


def _sections_in(hint: Any) -> Iterator[Any]:
    """Yield the classes of sections that a type names."""
    if dataclasses.is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _sections_in(part)
