"""Tensors of every kind are written, and read on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.checkpoint import tensors as checkpoint_tensors
from shardwise.checkpoint.index import check_header, read_index
from shardwise.parallel.place import full_tensor
from shardwise.parallel.reduce import from_every_rank
from tests.distributed import run_ranks

WHOLE = {
    "count": torch.tensor(7.0),
    "nothing": torch.zeros(0, 3),
    "double": torch.arange(15, dtype=torch.float64).reshape(5, 3) / 7,
    "bfloat": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "half": torch.arange(3, dtype=torch.float16),
    "long": torch.arange(-2, 3) * 2**40,
    "switch": torch.tensor([True, False, True]),
    "one row": torch.ones(1, 4),
    "cut twice": torch.arange(35.0).reshape(5, 7),
    "strided": torch.arange(12.0).reshape(4, 3).t(),
}


def laid_out(
    shards: dict[str, list[Shard | Replicate]], shape: tuple[int, ...], fill: bool
) -> dict[str, torch.Tensor]:
    """The tensors above, or zeros of their kinds, those in `shards` cut over a mesh."""
    mesh = init_device_mesh("cpu", shape)
    given = {name: tensor if fill else torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    return {
        n: distribute_tensor(t, mesh, shards[n]) if n in shards else t.clone()
        for n, t in given.items()
    }


def write(folder: Path, shape: tuple[int, ...]) -> None:
    over_all = [Shard(0)] * len(shape)
    cut = dict.fromkeys(
        ("nothing", "double", "bfloat", "half", "long", "switch", "one row"), over_all
    )
    tensors = laid_out(cut | {"cut twice": [Shard(0), Shard(1)][: len(shape)]}, shape, fill=True)
    rank = dist.get_rank()
    ranks = from_every_rank(checkpoint_tensors.held(tensors, rank))
    checkpoint_tensors.write(tensors, folder, ranks, rank)


def read(folder: Path, shape: tuple[int, ...]) -> bool:
    replicated = [Replicate()] * (len(shape) - 1)
    cut = {key: [*replicated, Shard(0)] for key in ("double", "one row", "switch", "nothing")}
    tensors = laid_out(
        cut | {"cut twice": [*replicated, Shard(1)], "bfloat": [*replicated, Shard(1)]},
        shape,
        False,
    )
    reader = checkpoint_tensors.Reader(folder, read_index(folder).tensors)
    for key, tensor in tensors.items():
        reader.read(key, tensor)
    assert isinstance(tensors["double"], DTensor)
    return all(torch.equal(full_tensor(tensor), WHOLE[name]) for name, tensor in tensors.items())


def test_every_dtype_and_placement_goes_through_a_file_unchanged(tmp_path):
    run_ranks(4, write, tmp_path, (2, 2))
    index = read_index(tmp_path)
    for name in index.files():
        check_header(tmp_path / name, index.content_of(name))
    assert run_ranks(3, read, tmp_path, (3,)) == [True] * 3


def test_one_copy_is_written_and_plain_safetensors_reads_it(tmp_path):
    run_ranks(3, write, tmp_path, (3,))
    held: dict[str, int] = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                held[name] = held.get(name, 0) + file.get_tensor(name).numel()
    assert held == {name: tensor.numel() for name, tensor in WHOLE.items() if tensor.numel()}
