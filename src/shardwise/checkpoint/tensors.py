"""Write a run's tensors to safetensors files, one per rank, and read them under any layout.

torch.distributed.checkpoint decides which rank writes what. Its own writers pickle the description
of the tensors, or hold a rank's share in memory twice; this one streams one tensor after the other,
and describes them in `index.json`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shardwise.checkpoint.folder import write_synced
from shardwise.checkpoint.index import INDEX, Chunk, Entry, Index, encode_index
from shardwise.process.watchdog import paused

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


def save(
    tensors: dict[str, torch.Tensor], folder: Path, group: torch.distributed.ProcessGroup
) -> None:
    """Write the tensors of all ranks and `index.json` into a folder that exists.

    Of what several ranks hold, one copy is written.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, storage_writer=_Writer(folder), planner=planner, process_group=group)


class _Writer(dcp.StorageWriter):
    """Writes one file per rank. The watchdog does not time what a rank's own disk takes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer is made for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing differs between ranks."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan of a rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the name of its file."""
        return [
            replace(plan, storage_data=f"tensors-{rank}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    @paused()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the chunks of this rank, one tensor in memory at a time."""
        # The widest dtype first, so that each tensor begins at a multiple of its element's size.
        # Empty shards are left out.
        items = [item for item in plan.items if math.prod(_chunk(item).sizes)]
        items.sort(key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
        if items:
            with (self._folder / plan.storage_data).open("wb") as file:
                file.write(_header(items))
                for item in items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, torch.Tensor)
                    assert (tensor.shape, tensor.dtype) == (_chunk(item).sizes, _dtype(item))
                    file.write(
                        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                    )
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [WriteResult(item.index, _num_bytes(item), plan.storage_data) for item in items]
        )
        return future

    @paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, on the first rank."""
        file_of = {result.index: result.storage_data for written in results for result in written}
        tensors = {}
        for key, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            # A rank without a share has chunks without elements, which lie in no file.
            chunks = [
                Chunk(
                    file_of[MetadataIndex(key, chunk.offsets)],
                    list(chunk.offsets),
                    list(chunk.sizes),
                )
                for chunk in saved.chunks
                if math.prod(chunk.sizes)
            ]
            tensors[key] = Entry(_NAMES[saved.properties.dtype], list(saved.size), chunks)
        write_synced(self._folder / INDEX, encode_index(Index(tensors)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No name but the folder's is ever given."""
        return False


class Reader:
    """Reads this rank's parts of tensors from a checkpoint that was checked before.

    A file is opened when its first tensor is read, and closed with the reader.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Entry]) -> None:
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


def _header(items: list[WriteItem]) -> bytes:
    entries, begin = {}, 0
    for item in items:
        assert item.index.fqn not in entries, f"two chunks of {item.index.fqn} on one rank"
        end = begin + _num_bytes(item)
        dtype, shape = _NAMES[_dtype(item)], list(_chunk(item).sizes)
        entries[item.index.fqn] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None, "not a tensor"
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None, "not a tensor"
    return item.tensor_data.properties.dtype


def _num_bytes(item: WriteItem) -> int:
    return math.prod(_chunk(item).sizes) * _dtype(item).itemsize
