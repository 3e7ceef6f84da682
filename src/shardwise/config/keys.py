"""The keys of the run file: which there are, and the values of a run by `section.key`."""

import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from shardwise.config import RunConfig
from shardwise.config.section import KeyFacts, facts_in


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
    if cfg.data.chat_template is not None:
        yield "data.chat_template", cfg.data.chat_template
    tools = [("data.tools", cfg.data.tools)]
    for name in ("train", "validation"):
        for entry in cfg.data.entries(name):
            yield f"data.{name}", entry if isinstance(entry, str) else entry.path
            if not isinstance(entry, str):
                tools.append((f"data.{name}", entry.tools))
    yield from ((key, path) for key, path in tools if path is not None and path.endswith(".json"))


def nearest(name: str, known: Sequence[str], what: str = "keys") -> str:
    """Return the way out for a user who wrote `name`, which is not in `known`."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"known {what}: {', '.join(known)}"


def meant(name: str, known: Sequence[str]) -> str:
    """Return "did you mean ...? " where a known name is near; nothing where none is."""
    text = nearest(name, known)
    return f"{text} " if text.startswith("did you mean") else ""


_ALIASES = {
    "learning_rate": "optimizer.lr",
    "optim": "optimizer.name",
    "lr_scheduler_type": "optimizer.lr_schedule",
    "batch_size": "training.global_batch_size",
    "train_batch_size": "training.global_batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size, of which each process takes "
    "training.micro_batch_size rows at once",
    "max_steps": "training.steps",
    "num_steps": "training.steps",
    "num_epochs": "training.epochs",
    "num_train_epochs": "training.epochs",
    "save_steps": "training.save_every",
    "eval_steps": "training.eval_every",
    "bf16": "training.precision: bfloat16",
    "fp16": "training.precision: float16",
    "gradient_checkpointing": "training.checkpointing: full",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "dataset": "data.train",
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attention",
    "sdpa_backend": "model.attention",
    "load_in_4bit": "model.base: nf4",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
}
"""Names of other libraries, and what to write in place of each."""


_MTP = (
    "layers that predict further tokens (MTP) are not trained, since transformers computes no loss "
    "of them; the result has them as the base has"
)


def elsewhere(name: str) -> str:
    """Return the way out for a key that another section has, or another library; "" for neither."""
    if "mtp" in name.split("_"):
        return f"{_MTP}: leave it out"
    if name in _ALIASES:
        return f"write {_ALIASES[name]}"
    homes = [section for section in known_keys() if name in known_keys(section)]
    if not homes:
        return ""
    keys = " or ".join(f"{section}.{name}" for section in homes)
    return f"{name} belongs to {' and '.join(homes)}: write {keys}"


def known_keys(*section: str) -> list[str]:
    """Return the keys of a section of the run file; without an argument the sections.

    A place within a list may be named by its index, and by names of types.
    """
    cls: Any = RunConfig
    for part in section:
        hint = _hints_of(cls).get(part)
        cls = cls if hint is None else next(_sections_in(hint), hint)
    return [f.name for f in dataclasses.fields(cls)]


@functools.cache
def facts_of(key: str) -> KeyFacts:
    """Return the facts of a key of the run file, or those of a section."""
    section, _, name = key.partition(".")
    cls = next(_sections_in(_hints_of(RunConfig)[section]))
    return facts_in(cls)[name] if name else cls.facts


def is_searched(key: str) -> bool:
    """Return whether the search of a layout chooses a key; it need not be one of the run file."""
    return key in all_keys() and facts_of(key).searched


def all_keys() -> list[str]:
    """Return the keys of all sections, as `section.key`."""
    return [f"{section}.{key}" for section in known_keys() for key in known_keys(section)]


_hints_of = functools.cache(get_type_hints)  # which evaluates the texts of all annotations


def _sections_in(hint: Any) -> Iterator[Any]:
    """Yield the classes of sections that a type names."""
    if dataclasses.is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _sections_in(part)
