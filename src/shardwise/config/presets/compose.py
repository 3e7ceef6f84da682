"""Compose a first run: a run file with comments, and the files beside it that it needs."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwise.config import UserError, require
from shardwise.config.keys import meant
from shardwise.config.presets import (
    EXAMPLES,
    MODELS,
    STARTER,
    Recipe,
    preset_names,
    recipes,
    sections_of,
)
from shardwise.config.run_file import json_schema, parse_config

SCHEMA_FILE = "run-file.schema.json"
"""The JSON schema beside a run file, where an editor finds it without a network."""
FIRST_PRESET = "tiny-qwen3_5"
"""Model that is trained where none is named."""
_CORPUS, _PAIRS = "corpus.jsonl", "pairs.jsonl"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_WIDTH = 100


@dataclass(frozen=True)
class FirstRun:
    """A run file, and the other files that it needs."""

    path: Path
    sections: dict[str, dict[str, Any]]
    command: str
    """The command that trains it."""
    head: tuple[str, ...]
    """The lines at its top."""
    files: dict[Path, bytes]
    """The JSON schema and, unless others are named, the model and the data."""


def find_recipe(name: str) -> Recipe:
    """Return a recipe; UserError where there is none of that name."""
    known = recipes()
    if name not in known:
        near = meant(name, list(known))
        raise UserError(f"--recipe {name}: no such recipe; {near}shardwise init --list lists all")
    return known[name]


def compose(
    path: Path,
    recipe: Recipe | None,
    model: str | None,
    data: Sequence[str] | None,
    data_keys: Mapping[str, Any],
) -> FirstRun:
    """Return what `shardwise init` writes: a run file at `path`, and files in the same folder.

    `model` is the name of a preset, a folder or a hub id, and replaces that of the recipe. `data`
    are the entries of data.train, and `data_keys` other keys that fit them. UserError where there
    is no such model, or where the run file would not be accepted.
    """
    name = model or (recipe.path if recipe else FIRST_PRESET)
    is_preset = name in preset_names()
    if not is_preset:
        _check_model(name)
    is_dpo = recipe is not None and recipe.layout == "dpo"
    has_pairs = data_keys.get("format", "preference" if is_dpo else "text") == "preference"
    require(has_pairs or not is_dpo, "a recipe of dpo needs pairs of answers; give them as --data")
    start = "from_scratch" if is_preset and recipe is None else "fine_tuning"
    if recipe is None and Path(name).name in EXAMPLES:
        start = "example"
    sections = sections_of(start, has_pairs)
    files = {path.parent / SCHEMA_FILE: schema_text().encode()}
    if is_preset:
        # With a tokenizer it is a model folder like any other, except that it has no weights.
        for file in (MODELS / name / "config.json", *(STARTER / name for name in _TOKENIZER)):
            files[path.parent / name / file.name] = file.read_bytes()
        sections["model"] = {"path": str(path.parent / name), "init": "random"}
    else:
        sections["model"] = {"path": name, **sections["model"]}
    notes = []
    if data:
        train = data[0] if len(data) == 1 else list(data)
        sections["training"].pop("sample", None)  # which continues a sentence of the corpus
    else:
        file = _PAIRS if is_dpo else _CORPUS
        train = str(path.parent / file)
        files[path.parent / file] = (STARTER / file).read_bytes()
        notes.append("data.train is a small example; put your own files in its place.")
    sections["data"] = {"train": train, **sections["data"], **data_keys}
    if has_pairs:
        notes.append("optimizer.lr is a tenth or less of what supervised training takes.")
        if "label" in data_keys.get("fields", {}):
            sections["training"]["objective"] = "kto"
    if recipe:
        sections["parallel"] = recipe.parallel
    sections["training"]["output_dir"] = str(path.parent / "runs" / path.stem)
    parse_config(sections, str(path))
    command = f"shardwise train {path}"
    if recipe and recipe.num_gpus > 1:
        command += f" --nproc {recipe.num_gpus}"
    what = f"{name}, from random weights" if is_preset else f"LoRA on {name}"
    return FirstRun(path, sections, command, (f"{what}: {command}", *notes), files)


def _check_model(name: str) -> None:
    """Raise UserError where `name` is neither a model folder nor written as a hub id."""
    if Path(name).is_dir():
        has_config = (Path(name) / "config.json").is_file()
        require(has_config, f"--model {name}: no config.json here; give a model folder")
    elif not _HUB_ID.fullmatch(name):
        raise UserError(
            f"--model {name}: no such folder or preset, nor a hub id such as owner/name; "
            f"{meant(name, preset_names())}shardwise init --list lists the presets"
        )


def text_of(run: FirstRun) -> str:
    """Return the text of a run file: its head, and each key below its description."""
    types = json_schema()["$defs"]
    lines = [f"# yaml-language-server: $schema={SCHEMA_FILE}", *_comment("", *run.head)]
    for section, keys in run.sections.items():
        lines += ["", f"{section}:"] if keys else []
        for key, value in keys.items():
            lines += _comment("  ", types[section.capitalize()]["properties"][key]["description"])
            pair = yaml.safe_dump(
                {key: value},
                default_flow_style=True,
                allow_unicode=True,
                width=float("inf"),
                sort_keys=False,
            )
            lines.append(f"  {pair.strip()[1:-1]}")  # without braces
    return "\n".join(lines) + "\n"


def _comment(indent: str, *texts: str) -> list[str]:
    """Return texts as lines of comments, each text from a new line."""
    start = f"{indent}# "
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, _WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False
        )
    ]


def schema_text() -> str:
    """Return the JSON schema of a run file as the content of a file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def write_new(run: FirstRun) -> list[Path]:
    """Write a run file and the files that it needs; return those that were not there.

    UserError, before anything is written, where the run file exists, or another file has other
    content.
    """
    way_out = "it is kept; move it away, or give another FILE, in another folder if need be"
    try:
        require(run.path.parent.is_dir(), f"{run.path}: no folder {run.path.parent}; make it first")
        require(not run.path.exists(), f"{run.path} exists; {way_out}")
        taken = {*run.files, *(path.parent for path in run.files)}
        is_free = run.path not in taken
        require(is_free, f"{run.path} is written too, as something else; give another FILE")
        missing = [path for path in run.files if not path.exists()]
        for path, content in run.files.items():
            is_same = path in missing or path.read_bytes() == content
            require(is_same, f"{path} exists with other content; {way_out}")
        for path in missing:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(run.files[path])
        run.path.write_text(text_of(run), encoding="utf-8")
    except UserError:
        raise
    except (OSError, ValueError) as error:  # a null byte in a name raises ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{run.path}: cannot be written ({reason}); give another FILE") from None
    return [run.path, *missing]
