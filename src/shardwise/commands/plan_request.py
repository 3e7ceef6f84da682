"""From the options of `shardwise plan` to a question, and from its answer to a run file."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.layouts import MODEL_AXES, data_parts, layout_names, layout_of
from shardwise.base.safety import check_no_pipes
from shardwise.base.words import size
from shardwise.commands.command import with_preset
from shardwise.config import Parallel, RunConfig, UserError, require
from shardwise.config.keys import facts_of, is_searched, known_keys, meant, nearest
from shardwise.config.presets import MODELS, preset_names, published_runs
from shardwise.config.presets.compose import FirstRun, compose, write_new
from shardwise.config.run_file import apply_override, parse_config, read_config, read_yaml
from shardwise.lab.planner import HERE

if TYPE_CHECKING:
    from shardwise.lab.planner.candidates import Question
    from shardwise.lab.planner.cluster import Cluster
    from shardwise.lab.planner.search import Answer

FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SEQUENCE_LENGTH = 8_192
TOKENS_PER_STEP = 2**20
RANK = 16
"""Rank of the adapters that are planned where nothing else is said."""
CORPUS, OUTPUT_DIR = "corpus.jsonl", "runs/plan"
"""The data and the folder of a model's run if no override names any; `--write` replaces them."""
PUBLISHED = "published:"
"""Before the name of a published run, which may also be that of a model."""


def with_published(args: Namespace) -> Namespace:
    """Return the arguments with those of the published run that they name as `published:NAME`.

    The run stands as it is, except for what they themselves say. UserError for another name, and
    where no devices are named at all.
    """
    if args.run.startswith(PUBLISHED):
        runs, name = published_runs(), args.run.removeprefix(PUBLISHED)
        if name not in runs:
            way_out = nearest(name[:80], [*runs], "runs")
            raise UserError(f"{args.run[:80]}: no such run; {way_out}")
        run = runs[name]
        if "preset" not in run:
            raise UserError(
                f"{args.run}: its source gives the layout in words ({run['layout']}); give a model "
                "and --devices"
            )
        parallel = Parallel(**run["parallel"])
        keys = {
            "model.dtype": run.get("dtype", "bfloat16"),
            "training.global_batch_size": None if args.tokens_per_step else run["rows"],
            "training.micro_batch_size": run.get("micro_batch_size", 1),
            "training.checkpointing": run.get("checkpointing", "none"),
        }
        keys |= {f"parallel.{key}": value for key, value in vars(parallel).items()}
        nodes = run["nodes"] if args.nodes is None and args.devices is None else args.nodes
        # One node has no link between nodes.
        link = run.get("link") if args.devices is None and (nodes or 1) > 1 else None
        given = {
            "run": run["preset"],
            "full": args.full or not args.lora,
            "devices": args.devices or run["devices"],
            "nodes": nodes,
            "link": args.link or link,
            "sequence": args.sequence or str(run["sequence_length"]),
            "precision": args.precision or run.get("precision"),
            "explain": args.explain or layout_of(parallel),
            "overrides": [
                *(f"--{key}={value}" for key, value in keys.items() if value is not None),
                *args.overrides,
            ],
        }
        args = Namespace(**{**vars(args), **given})
    require(
        args.devices is not None,
        "--devices is missing; give the devices of a node, such as --devices 8xH100-80GB",
    )
    return Namespace(**{**vars(args), "nodes": 1 if args.nodes is None else args.nodes})


def count(text: str, option: str) -> int:
    """Return a number such as 32768, 32K or 1M (K is 1,024); UserError for any other text."""
    match = re.fullmatch(r"(\d{1,12})([KMG]?)", text)
    require(match is not None, f"{option} {text[:40]}: write a number such as 32768, 32K or 1M")
    assert match is not None
    number = int(match[1]) * FACTORS[match[2]]
    require(number > 0, f"{option} is {text}; give at least 1")
    return number


def sections_of_model(name: str, lora: str | None) -> dict[str, Any]:
    """Return the sections of a run file that trains a preset, a folder or a hub id."""
    is_preset = name in preset_names()
    path = str(MODELS / name) if is_preset else name
    if not is_preset and not Path(name).is_dir() and name.count("/") != 1:
        raise UserError(
            f"{name[:80]}: no run file, folder or preset; {meant(name, preset_names())}shardwise "
            "init --list lists the presets"
        )
    length = SEQUENCE_LENGTH
    if type(learned := _config(path).get("n_positions")) is int:  # GPT-2 learns its positions
        length = min(length, learned)
    return {
        # LoRA freezes weights, which may then be bfloat16; full training updates float32 ones.
        "model": {"path": path, "dtype": "bfloat16" if lora else "float32"},
        "data": {"train": CORPUS, "sequence_length": length},
        "training": {"output_dir": OUTPUT_DIR, "precision": "bfloat16"},
        **({"lora": {"r": RANK, "alpha": 2 * RANK}} if lora else {}),
    }


def _config(path: str) -> dict[str, Any]:
    """Return the config.json of a folder, {} if none can be read: who builds the model says why."""
    check_no_pipes(path)
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def sections_of(args: Namespace) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the sections of the run that is planned, and the keys that its search may not change.

    `args`: the command's.
    """
    what, lora, is_full, tokens = args.run, args.lora, args.full, args.tokens_per_step
    require(not (lora and is_full), "--lora and --full: give one of them")
    is_run_file = Path(what).is_file()
    if is_run_file:
        sections = read_yaml(what, "a run file is a mapping of sections; shardwise init writes one")
    else:
        sections = sections_of_model(what, None if is_full else lora or f"r={RANK}")
    if lora:
        match = re.fullmatch(r"(?:r=)?(\d{1,6})", lora)
        require(match is not None, f"--lora {lora[:40]}: write the rank as r=16")
        assert match is not None
        sections["lora"] = {**(sections.get("lora") or {}), "r": int(match[1])}
    if is_full:
        sections.pop("lora", None)
    changes: dict[str, dict[str, Any]] = {}
    if args.precision:
        changes["training"] = {"precision": args.precision}
    if args.sequence is not None:
        changes["data"] = {"sequence_length": count(args.sequence, "--sequence")}
    for section, keys in changes.items():
        sections[section] = {**(sections.get(section) or {}), **keys}
    for override in args.overrides:
        apply_override(sections, override)
    keys = frozenset(_overridden(sections, args.overrides))
    has_rows = "training.global_batch_size" in keys
    require(
        tokens is None or not has_rows,
        "--tokens-per-step and --training.global_batch_size: give one of them",
    )
    if tokens is not None or not (is_run_file or has_rows):
        number = None if tokens is None else count(tokens, "--tokens-per-step")
        _set_rows(sections, number)
    return sections, frozenset(key for key in keys if is_searched(key))


def _overridden(sections: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Yield the keys that overrides have set, such as `parallel.tp`."""
    for override in overrides:
        key = override.removeprefix("--").partition("=")[0]
        value = sections.get(key)
        if isinstance(value, dict):  # a complete section
            yield from (f"{key}.{name}" for name in value)
        else:
            yield key


def not_taken(sections: Mapping[str, Any], fixed: frozenset[str]) -> list[str]:
    """Return the keys of a run file that a search does not take from it."""
    return [
        f"{section}.{key}"
        for section, keys in sections.items()
        for key in (keys if isinstance(keys, dict) else ())
        if is_searched(f"{section}.{key}") and f"{section}.{key}" not in fixed
    ]


def _set_rows(sections: dict[str, Any], num_tokens: int | None) -> None:
    """Set the rows of a step so that they have so many tokens.

    None: as many rows as the largest power of two that gives at most TOKENS_PER_STEP, but one at
    least.
    """
    if not all(isinstance(sections.get(key) or {}, dict) for key in ("data", "training")):
        return  # the parser of the run file says what is wrong
    length = (sections.get("data") or {}).get("sequence_length", 512)
    between = facts_of("training.global_batch_size").between
    assert between is not None
    most = int(between[1])
    if not isinstance(length, int) or length < 1:
        return  # the parser of the run file says what is wrong
    if num_tokens is None:
        rows = min(most, max(1, TOKENS_PER_STEP // length))
        num_tokens = 2 ** (rows.bit_length() - 1) * length
    rows, rest = divmod(num_tokens, length)
    if rows > most:
        raise UserError(
            f"--tokens-per-step {num_tokens:,} are {rows:,} rows of {length:,} tokens, and a step "
            f"has at most {most:,}; give fewer, or a longer --sequence"
        )
    if rest or rows < 1:
        below = max(1, rows) * length
        raise UserError(
            f"--tokens-per-step {num_tokens:,} is not a number of rows of {length:,} tokens; give "
            f"{below:,} or another multiple of --sequence"
        )
    training = sections.get("training") or {}
    sections["training"] = {"micro_batch_size": 1, **training, "global_batch_size": rows}


def wanted_layout(text: str) -> dict[str, tuple[int, ...]]:
    """Return the parts of a layout such as `pp:4-hsdp:2x8-tp-sp`, with the sizes that it gives."""
    parts: dict[str, tuple[int, ...]] = {}
    for part in text.split("-"):
        match = re.fullmatch(r"([a-z0-9]+)(?::([1-9]\d{0,6})(?:x([1-9]\d{0,6}))?)?", part)
        if match is None or match[1] in parts:
            raise UserError(f"--explain {text[:80]}: write a layout as fsdp2:8-tp:8-sp")
        parts[match[1]] = tuple(int(size) for size in match.groups()[1:] if size)
    name = "-".join(parts)
    require(
        name in (known := layout_names()),
        f"--explain {text[:80]}: no layout is called {name[:80]}; {meant(name, known)}the order of "
        "parts is pp, data, cp, ep, tp, sp",
    )
    for part in MODEL_AXES:
        require(parts.get(part) != (1,), f"--explain {text[:80]}: leave out {part}:1")
    replicated = [part for part, (_, replicas) in data_parts().items() if replicas > 1]
    for part, sizes in parts.items():
        require(
            len(sizes) < 2 or part in replicated,
            f"--explain {text[:80]}: only {', '.join(replicated)} has two sizes, replicas x shards",
        )
        require(
            len(sizes) != 1 or part not in replicated,
            f"--explain {text[:80]}: {part} has two sizes, replicas x shards, such as {part}:2x8",
        )
    return parts


def folders_of(sections: Mapping[str, Any], devices: str) -> list[str]:
    """Return the folders that a plan of these sections reads; none where it reads more than these.

    It reads the measures of this machine for the devices `here`, figures of a device in a file, and
    Python files with
    `model.trust_remote_code`.
    """
    model, lora = sections.get("model"), sections.get("lora") or {}
    if (
        devices == HERE
        or devices.endswith((".yaml", ".yml"))
        or not isinstance(model, dict)
        or not isinstance(lora, dict)
    ):
        return []
    if model.get("trust_remote_code") or not isinstance(model.get("path"), str):
        return []
    return [str(path) for path in (model["path"], lora.get("path")) if path is not None]


def question_of(
    sections: Mapping[str, Any], fixed: frozenset[str], cluster: Cluster, source: str
) -> Question:
    """Return the question which layout the run of these sections should have."""
    from shardwise.lab.planner.candidates import Question

    return Question(with_preset(_parsed(sections, source, fixed)), cluster, fixed)


def _parsed(sections: Mapping[str, Any], source: str, fixed: frozenset[str]) -> RunConfig:
    """Return a run without the keys that a search sets, except fixed ones.

    Fixed ones may need a layout that the run file does not name, such as
    `parallel.reshard_after_forward`: the rules see them in each layout that is tried.
    """
    alone = _without_searched(sections, frozenset())
    if isinstance(parallel := alone.get("parallel"), dict):
        dependent = {key for key in known_keys("parallel") if facts_of(f"parallel.{key}").follows}
        dependent |= {"memory_limit_gib"} if "parallel.split" in fixed else set()
        alone["parallel"] = {k: v for k, v in parallel.items() if k not in dependent}
    parse_config(alone, source)
    return read_config(_without_searched(sections, fixed), source)


def _without_searched(sections: Mapping[str, Any], fixed: frozenset[str]) -> dict[str, Any]:
    return {
        section: {
            key: value
            for key, value in (keys or {}).items()
            if not is_searched(f"{section}.{key}") or f"{section}.{key}" in fixed
        }
        if isinstance(keys, dict)
        else keys
        for section, keys in sections.items()
    }


def write_run_file(path: Path, what: str, sections: dict[str, Any], answer: Answer) -> list[Path]:
    """Write a run file with the best layout, and what it needs beside it; return what is new.

    A model gets a small corpus as data, and a preset random weights and a tokenizer, as with
    `shardwise init`. UserError where a file of other content is there.
    """
    from shardwise.lab.planner.choices import written

    best, cluster = answer.best, answer.question.cluster
    chosen, default = deepcopy(sections), Parallel()
    chosen["parallel"] = {
        key: value
        for key, value in vars(best.cfg.parallel).items()
        if value != getattr(default, key)
    }
    chosen["training"] |= {
        "micro_batch_size": best.cfg.training.micro_batch_size,
        "checkpointing": written(best.cfg.training.checkpointing),
    }
    command = f"shardwise train {path} --nproc {cluster.per_node}"
    if cluster.nodes > 1:
        command = (
            f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.per_node} -m shardwise "
            f"train {path}"
        )
    head = (
        f"{best.title} on {cluster.num_devices} x {cluster.device.name}, by shardwise plan: "
        f"{size(best.memory.total)} on the fullest rank, {best.time.total:.3g} s a step",
        command,
    )
    if Path(what).is_file():
        return write_new(FirstRun(path, chosen, command, head, {}))
    train = chosen["data"]["train"]
    own = None if train == CORPUS else [train] if isinstance(train, str) else train
    first = compose(path, None, what, own, {})
    chosen["model"] = first.sections["model"] | {
        key: value for key, value in chosen["model"].items() if key != "path"
    }
    chosen["data"]["train"] = first.sections["data"]["train"]
    if chosen["training"]["output_dir"] == OUTPUT_DIR:
        chosen["training"]["output_dir"] = first.sections["training"]["output_dir"]
    return write_new(
        replace(first, sections=chosen, command=command, head=(*head, *first.head[1:]))
    )
