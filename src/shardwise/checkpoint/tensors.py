"""Tensors to and from safetensors files, for torch.distributed.checkpoint: each rank writes one, and reads any.

Torch's own writers pickle what describes the tensors, or hold a rank's whole share in memory twice; these stream one
tensor after the other, and describe them in `index.json`.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
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
    """Write the tensors of all ranks into a folder that is there, and `index.json`; of what several hold, one copy."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, storage_writer=_Writer(folder), planner=planner, process_group=group)


def load(tensors: dict[str, torch.Tensor], folder: Path, index: Index) -> None:
    """Fill these tensors, in place, from a folder that has been checked; each rank reads what it holds."""
    dcp.load(
        tensors,
        storage_reader=_Reader(folder, index),
        planner=_LoadPlanner(flatten_state_dict=False),
    )


class _Writer(dcp.StorageWriter):
    """Waits for the disk for as long as that takes; only what lies between a rank's own files is timed."""

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
        # The widest first, so that each begins at a multiple of its element's size. Empty shards are left out.
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
            # Ranks without a share of their own have chunks without elements, which lie nowhere.
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


class _Reader(dcp.StorageReader):
    """Reads no more than it is asked for; a rank waits for its disk for as long as that takes."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index
        self._file_of: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader is made for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index as torch has it: of tensors alone, never of bytes, which it would unpickle."""
        described: dict[str, Any] = {}
        for key, entry in self._index.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape))
                for c in entry.chunks
            ]
            properties = TensorProperties(dtype=DTYPES[entry.dtype])
            described[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            self._file_of |= {
                MetadataIndex(key, torch.Size(c.offsets)): c.file for c in entry.chunks
            }
        return Metadata(described)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing differs between ranks."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan of a rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave all plans as they are."""
        return plans

    @paused()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts of chunks that this rank needs into its tensors, file by file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._file_of[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with safe_open(self._folder / name, framework="pt") as file:
                for item in items:
                    key = item.storage_index.fqn
                    box = tuple(
                        slice(o, o + n)
                        for o, n in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    part = file.get_slice(key)[box] if box else file.get_tensor(key)
                    target = planner.resolve_tensor(item).detach()
                    assert (part.shape, part.dtype) == (target.shape, target.dtype), key
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No name but the folder's is ever given."""
        return False


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Torch would unpickle them; no index has any."""
        raise AssertionError(read_item)


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
