"""The splits of a folder of data files, by the names of its folders and files.

The rule is that of `datasets` (its function `get_data_patterns`), so that a folder has the same
splits here, in a stream and on the hub.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.config import UserError

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words in the names of folders and files that name a split."""

_SHARD = re.compile(r"data/([^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*")


def splits_of(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each split of a folder; none where no name tells of splits.

    Shards such as `data/train-00000-of-00002.parquet` come first. Without them the names of folders
    decide (`test/a.jsonl`), and without such folders those of files (`test.jsonl`). A keyword
    stands between separators, as in `my-test_2.jsonl`.
    """
    shards: dict[str, list[Path]] = {}
    depth = len(folder.parts)
    for file in files:
        if shard := _SHARD.fullmatch("/".join(file.parts[depth:])):
            shards.setdefault(shard[1], []).append(file)
    if shards:
        return {split: shards[split] for split in (*KEYWORDS, *shards) if split in shards}

    def by_names(names_of: Callable[[Path], Sequence[str]]) -> dict[str, list[Path]]:
        splits = {
            split: [file for file in files if any(map(_has(words), names_of(file)))]
            for split, words in KEYWORDS.items()
        }
        return {split: chosen for split, chosen in splits.items() if chosen}

    return by_names(lambda file: file.parts[depth:-1]) or by_names(lambda file: [file.name])


def _has(words: Sequence[str]) -> Callable[[str], object]:
    """Return a function that tells whether one of these words stands in a name by itself."""
    return re.compile(rf"(.*[-._ 0-9])?({'|'.join(words)})([-._ 0-9].*)?").fullmatch


def files_of_split(folder: Path, files: Sequence[Path], split: str | None, key: str) -> list[Path]:
    """Return the files of one split of a folder, or all files of a folder without splits.

    UserError, which names `key`, for a split that does not exist. Where none is named, UserError
    for several splits, and for one split beside files that belong to none: to read them together
    would train on what is for tests.
    """
    splits = splits_of(folder, files)
    if split in splits:
        return splits[split]
    if split is not None:
        problem = f"{key}: {folder} has no split {split}"
        if not splits:
            raise UserError(f"{problem}, and no splits at all; give {folder} alone")
        raise UserError(
            f"{problem}, only {', '.join(splits)}; give one that it has, as in "
            f"{folder}::{next(iter(splits))}"
        )
    if not splits:
        return list(files)
    chosen = {file for members in splits.values() for file in members}
    others = [file for file in files if file not in chosen and file.name != "README.md"]
    if len(splits) == 1 and not others:
        return next(iter(splits.values()))
    beside = f" and files of no split, such as {others[0].relative_to(folder)}" if others else ""
    raise UserError(
        f"{key}: {folder} has the split{'s' * (len(splits) > 1)} {', '.join(splits)}{beside}; name "
        f"one, as in {folder}::{next(iter(splits))}, or the files to read, as in "
        f"{folder}/**/*{files[0].suffix}"
    )
