"""Write a run's tensors to safetensors files, one per rank, and read them under any layout.

Nothing is gathered, and nothing is pickled: torch.distributed.checkpoint's own writers pickle the
description of the tensors, or hold a rank's share in memory twice.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from shardwise.base.process.watchdog import paused
from shardwise.checkpoint.folder import write_synced
from shardwise.checkpoint.index import INDEX, Index, TensorBox, TensorEntry, encode_index

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Tensors(Protocol):
    """Tensors by key: a dict or, where they are not in memory, what makes them again each time."""

    def items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return (key, tensor) of each, in the same order each time."""
        ...


def file_of(rank: int) -> str:
    """Return the name of a rank's file; a rank that writes no tensor has none."""
    return f"tensors-{rank}.safetensors"


def held(tensors: Tensors, rank: int) -> dict[str, TensorEntry]:
    """Return what this rank holds of each tensor, which all ranks must know before they `write`.

    A tensor is a DTensor, or plain and equal on every rank that has it.
    """
    shards: dict[str, TensorEntry] = {}
    for key, tensor in tensors.items():
        begins, sizes, _ = _local_box(tensor)
        chunks = [TensorBox(file_of(rank), list(begins), list(sizes))] if math.prod(sizes) else []
        shards[key] = TensorEntry(_NAMES[tensor.dtype], list(tensor.shape), chunks)
    return shards


def write(
    tensors: Tensors,
    folder: Path,
    ranks: Sequence[Mapping[str, TensorEntry]],
    rank: int,
    writes_index: bool | None = None,
) -> list[str]:
    """Write this rank's share into a folder that exists, and on one rank `index.json`.

    Return the names of the files that this rank has written.

    `ranks` is what each rank has `held`. `writes_index`: whether this rank writes the index; None:
    rank 0 does. Of what several ranks hold, one writes it. One tensor at a time is copied to the
    CPU. No rank waits for another one, which may have failed.
    """
    index, file = _index_of(ranks), file_of(rank)
    content = index.content_of(file)
    with paused():
        _write(folder / file, content, tensors)
        if rank == 0 if writes_index is None else writes_index:
            write_synced(folder / INDEX, encode_index(index))
            return [file, INDEX] if content else [INDEX]
    return [file] if content else []


def _index_of(ranks: Sequence[Mapping[str, TensorEntry]]) -> Index:
    """Choose a file for each shard: of ranks that hold it, the one with the fewest bytes so far."""
    tensors: dict[str, TensorEntry] = {}
    num_bytes = Counter[str]()
    for key in sorted(set().union(*ranks)):
        entries = [shards[key] for shards in ranks if key in shards]
        copies: dict[tuple[int, ...], list[TensorBox]] = {}
        for chunk in (chunk for entry in entries for chunk in entry.chunks):
            copies.setdefault(tuple(chunk.offsets), []).append(chunk)
        chunks = [min(equal, key=lambda chunk: num_bytes[chunk.file]) for equal in copies.values()]
        for chunk in chunks:
            num_bytes[chunk.file] += _num_bytes(entries[0].dtype, chunk.shape)
        tensors[key] = replace(entries[0], chunks=chunks)
    return Index(tensors)


def _write(path: Path, content: Mapping[str, tuple[str, list[int]]], tensors: Tensors) -> None:
    """Write those of the tensors that this rank's file has; without any there is no file."""
    if not content:
        for _ in tensors.items():  # which may be collectives
            pass
        return
    # The widest dtype first, so that each tensor begins at a multiple of its element's size.
    content = dict(sorted(content.items(), key=lambda item: -DTYPES[item[1][0]].itemsize))
    header = _header(content)
    begins, begin = {}, len(header)
    for key, (dtype, shape) in content.items():
        begins[key] = begin
        begin += _num_bytes(dtype, shape)
    with path.open("wb") as file:
        file.write(header)
        for key, tensor in tensors.items():
            if key in begins:
                _, _, local = _local_box(tensor)
                file.seek(begins[key])
                file.write(local.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(content: Mapping[str, tuple[str, list[int]]]) -> bytes:
    entries, begin = {}, 0
    for key, (dtype, shape) in content.items():
        end = begin + _num_bytes(dtype, shape)
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


class Reader:
    """Reads this rank's parts of tensors from a checkpoint that was checked before.

    A file is opened when its first tensor is read, and closed with the reader.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorEntry]) -> None:
        self._folder, self._tensors = folder, tensors
        self._files: dict[str, Any] = {}

    def read(self, key: str, target: torch.Tensor) -> None:
        """Fill a plain tensor or this rank's shard of a DTensor, from whatever files it lies in.

        OSError or SafetensorError if a file cannot be read any more.
        """
        begins, sizes, local = _local_box(target)
        for chunk in self._tensors[key].chunks:
            # Of each dim, the range that the chunk and this rank's shard have in common.
            ranges = [
                (max(begin, offset), min(begin + size, offset + length))
                for begin, size, offset, length in zip(begins, sizes, chunk.offsets, chunk.shape)
            ]
            if any(first >= last for first, last in ranges):
                continue
            # A view of the mapped file: only the bytes that are copied are read from the disk.
            part = self._open(chunk.file).get_tensor(key)[_slices(ranges, chunk.offsets)]
            place = local[_slices(ranges, begins)]
            assert (part.shape, part.dtype) == (place.shape, place.dtype), key
            place.copy_(part)

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._folder / name, framework="pt")
        return self._files[name]


def _local_box(tensor: torch.Tensor) -> tuple[Sequence[int], Sequence[int], torch.Tensor]:
    """Return where this rank's shard begins in the full tensor, its sizes, and the shard."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim(), tensor.shape, tensor
    (chunk,) = tensor.__create_chunk_list__()
    return chunk.offsets, chunk.sizes, tensor.to_local()


def _slices(ranges: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(first - begin, last - begin)
        for (first, last), begin in zip(ranges, origin, strict=True)
    )
