"""The weight files of a model's folder: which of them are read, and their checksums."""

import hashlib
import json
from os.path import isfile
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from shardwise.config import Model, UserError
from shardwise.config.ranges import shown

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class NoWeights(UserError):
    """The error of a folder without weight files. Its way out is one of a run that trains."""


def fetch(model: Model) -> None:
    """Get the model's weight files onto this machine; UserError if the hub refuses them."""
    if model.init == "weights":
        weight_folder(model.path)


def fingerprint(model: Model, weights: bool) -> dict[str, str]:
    """Return a checksum by file name, of `config.json` and of code that may run.

    With `weights` also of a sample of each weight file: its size, its header, and up to 4 KiB from
    the middle of each tensor. Those are some MB of a model of 100 GB, and other weights differ
    everywhere. Random weights need none. UserError if the files cannot be read.
    """
    if weights and model.init == "weights":
        folder = weight_folder(model.path)
        weight_files = sorted(set(files_by_key(folder).values()))
    else:
        folder = Path(str(cached_file(model.path, "config.json"))).parent
        weight_files = []
    files = [folder / "config.json"]
    if model.trust_remote_code:
        files += sorted(folder.glob("*.py"))
    checksums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return checksums | {str(file.relative_to(folder)): sample(file) for file in weight_files}


def weight_folder(path: str) -> Path:
    """Return a model's folder on this machine; UserError where the hub refuses its weights."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot fetch the weights from the hub ({str(error)[:200]})"
        ) from None


def files_by_key(folder: Path) -> dict[str, Path]:
    """Return the file of each entry that transformers reads in a folder; UserError for damage.

    It takes `transformers_weights` of config.json, else `model.safetensors`, else the index. Of an
    index it reads all that is in its files, the last one's where two have an entry.
    """
    chosen = _chosen(folder)
    names = _entries(chosen)
    files = {key: file for file in sorted(set(names.values())) for key in keys_in(file)}
    if missing := names.keys() - files.keys() - {""}:
        raise UserError(
            f"{chosen}: none of its files has {shown(min(missing))}; fetch the model again"
        )
    return files


def unread_note(path: str) -> str | None:
    """Return a line of the weight files in a folder that are not read; None where all are.

    Nothing is fetched, and no weight file is opened.
    """
    folder = Path(path)
    try:
        chosen = _chosen(folder)
        read = {chosen, *_entries(chosen).values()}
    except UserError:  # raised once more by who reads the weights
        return None
    present = [folder / INDEX, *sorted(folder.glob("*.safetensors"))]
    unread = [file.name for file in present if file.is_file() and file not in read]
    if not unread:
        return None
    etc = ", ..." * (len(unread) > 3)
    return (
        f"{folder}: {chosen.name} is read, as by transformers; beside it is not read: "
        f"{', '.join(unread[:3])}{etc}"
    )


def _entries(chosen: Path) -> dict[str, Path]:
    """Return what an index says, the file of each entry; of a file itself: {"": the file}."""
    if not chosen.name.endswith(".index.json"):
        return {"": chosen}
    try:
        names = json.loads(chosen.read_text(encoding="utf-8"))["weight_map"]
        files = {key: chosen.parent / name for key, name in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{chosen}: not a safetensors index; fetch the file again") from None
    for name in set(names.values()):
        # Judged by the name: in the hub's cache every file is a link to another folder.
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UserError(
                f"{chosen}: names {shown(name)}, which is not in its folder; fetch the model again"
            )
        if not isfile(chosen.parent / name):  # a Path's own fails where a name is too long
            raise UserError(
                f"{chosen.parent}: {shown(name)} is named in {chosen.name} but not there; fetch "
                "the file"
            )
    return files


def _chosen(folder: Path) -> Path:
    """Return the weight file or index that transformers takes in a folder."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder}: has an adapter_config.json beside the model, whose adapter transformers "
            "would add; move the adapter to a folder of its own, and merge it (shardwise export "
            "--merge) or give it as lora.path"
        )
    if any(folder.glob("shard-*-model-*-of-*.safetensors")):
        raise UserError(
            f"{folder}: has a distributed checkpoint (shard-...), which transformers would take; "
            "move it away, or load and save the model with transformers"
        )
    named = _named_weights(folder / "config.json")
    if named is not None:
        is_text = isinstance(named, str)
        inside = is_text and not PurePath(named).is_absolute() and ".." not in PurePath(named).parts
        if not (inside and named.endswith((".safetensors", INDEX)) and isfile(folder / named)):
            raise UserError(
                f"{folder}: transformers_weights of config.json is {shown(named)}, no safetensors "
                "file or index here; correct config.json"
            )
        return folder / named
    for name in (SINGLE, INDEX):
        if (folder / name).is_file():
            return folder / name
    others = sorted(file.name for end in ("safetensors", "bin") for file in folder.glob(f"*.{end}"))
    hint = f" (but {', '.join(others[:3])})" if others else ""
    raise NoWeights(
        f"{folder}: no {SINGLE} and no {INDEX} here{hint}; give a folder with safetensors weights "
        "under these names, or start from random ones (model.init: random)"
    )


def _named_weights(config: Path) -> Any:
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("transformers_weights")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # who reads the config says so


def keys_in(file: Path) -> list[str]:
    """Return the names in a safetensors file; UserError if it is none."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: not a whole safetensors file ({str(error)[:200]}); fetch it again"
        ) from None


def sample(file: Path) -> str:
    """Return a checksum of a weight file's header, and of some bytes of each of its tensors."""
    keys_in(file)  # raises if the header is damaged
    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
        header = opened.read(begin - 8)
        digest = hashlib.sha256(header + str(file.stat().st_size).encode())
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                opened.seek(begin + max(first, (first + last) // 2 - 2048))
                digest.update(opened.read(min(4096, last - first)))
    return digest.hexdigest()
