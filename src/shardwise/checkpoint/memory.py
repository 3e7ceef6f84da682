"""Checkpoints in host memory, from which a run starts again without a disk.

On each node, the folder of `memory_folder` holds a checkpoint like those on disk, except that the
tensors in it are those of the ranks of this node and of the node before. So it is whole after the
processes have died, or one node. A rank writes its share once, and sends as many bytes to the rank
in its place on the next node. There are two while the newer one is written: at most four times a
rank's share is in memory for each rank of a node.
"""

import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import memory_folder
from shardwise.checkpoint import tensors as checkpoint_tensors
from shardwise.checkpoint.folder import MANIFEST, METRICS, UNFINISHED, File, Manifest, step_of
from shardwise.checkpoint.index import DamagedError
from shardwise.checkpoint.tensors import Tensors, file_of
from shardwise.checkpoint.together import together
from shardwise.config import RunConfig
from shardwise.parallel.reduce import from_every_rank

MESSAGE_BYTES = 2**28
"""The most bytes that are sent at once."""
_MAKE_ROOM = "make room in memory, or leave out training.memory_checkpoint_every"


class Nodes:
    """The ranks by the node whose memory they share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Find the nodes of a group of all ranks."""
        self.rank = dist.get_rank()
        by_name: dict[str, list[int]] = {}
        names = from_every_rank(f"{socket.gethostname()} {memory_folder.root()}", group)
        for rank, name in enumerate(names):
            by_name.setdefault(name, []).append(rank)
        self.ranks = list(by_name.values())
        self.index = next(i for i, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its node, which does what is done once there."""
        return self.ranks[self.index][0] == self.rank

    def keepers(self) -> dict[int, int]:
        """Return for each rank the rank of the next node that keeps its copy."""
        pairs = zip(self.ranks, [*self.ranks[1:], self.ranks[0]])
        if len(self.ranks) == 1:
            return {}
        return {
            rank: others[i % len(others)] for ranks, others in pairs for i, rank in enumerate(ranks)
        }


class MemoryCheckpoints:
    """Keeps the newest checkpoint of a run in memory. Its methods are collectives."""

    def __init__(self, cfg: RunConfig) -> None:
        """Name the folders of the run, and make this node's."""
        timeout = timedelta(seconds=2 * cfg.launch.timeout_seconds)
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._output_dir = cfg.training.output_dir
        self._sent, self._sha256 = 0, hashlib.sha256()  # the bytes of metrics in the latest copy
        self._latest: Path | None = None
        self.nodes = Nodes(self.group)
        if self.nodes.rank == 0:
            memory_folder.draw_name(self._output_dir)
        folder = from_every_rank(_name_of(self._output_dir), self.group)[0]
        self.folder = memory_folder.root() / folder

    def save(self, manifest: Manifest, tensors: Tensors) -> None:
        """Keep a checkpoint with rank 0's manifest, and then remove those before.

        RunError, the same on every rank, if there is no room.
        """
        nodes, folder = self.nodes, self.folder / f"step-{manifest.step}"
        unfinished = folder.with_name(folder.name + UNFINISHED)
        added = b""

        def read() -> tuple[Manifest, int]:
            nonlocal added
            begin = self._sent
            if nodes.rank == 0:
                with Path(self._output_dir, METRICS).open("rb") as file:
                    file.seek(begin)
                    added = file.read()
                self._sent += len(added)
                self._sha256.update(added)
            files = {METRICS: File(self._sent, self._sha256.hexdigest())}
            return replace(manifest, files=files), begin

        def begin() -> None:
            memory_folder.make_private(self.folder)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            if self._latest is not None:
                os.link(self._latest / METRICS, unfinished / METRICS)
            with (unfinished / METRICS).open("ab") as file:
                file.truncate(num_bytes)
                file.write(lines.numpy().data)

        def held() -> Mapping[str, Any]:
            return checkpoint_tensors.held(tensors, nodes.rank)

        def write() -> dict[str, File]:
            names = checkpoint_tensors.write(
                tensors, unfinished, ranks, nodes.rank, writes_index=nodes.is_first
            )
            return folders.checksums(unfinished, names)

        def finish() -> None:
            folders.write_manifest(unfinished, replace(common, files=files))
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)

        def remove_older() -> None:
            for path in self.folder.iterdir():
                if path != folder:
                    shutil.rmtree(path)

        is_here = self._latest is not None and (self._latest / METRICS).is_file()
        if not all(
            from_every_rank(is_here, self.group)
        ):  # the first one, or the memory was cleared
            self._sent, self._sha256, self._latest = 0, hashlib.sha256(), None
        common, num_bytes = self._together(read, folder)[0]
        lines = torch.empty(common.files[METRICS].num_bytes - num_bytes, dtype=torch.uint8)
        if nodes.rank == 0 and added:
            lines = torch.frombuffer(bytearray(added), dtype=torch.uint8)
        # From rank 0 to all: the lines since the copy before.
        dist.broadcast(lines, 0, self.group)
        self._on_nodes(begin, folder)
        ranks = self._together(held, folder)
        files = common.files
        for known in self._together(write, folder):
            files |= known
        pairs = [(file_of(rank), rank, keeper) for rank, keeper in nodes.keepers().items()]
        self._send([pair for pair in pairs if pair[0] in files], files, unfinished)
        # Whoever dies from here on leaves this one or the one before, whole, on all other nodes.
        self._on_nodes(finish, folder)
        self._latest = folder
        self._on_nodes(remove_older, folder)

    def recover(self, least_step: int) -> tuple[Path | None, list[str]]:
        """Return the newest checkpoint that the nodes' memories make whole, and lines on others.

        Each node gets the files that it lacks. None where there is none, or all are of steps
        before `least_step`.
        """
        found = self._found() if self.nodes.is_first else {}
        by_rank = from_every_rank(found, self.group)
        keys = {key for found in by_rank for key in found}
        lines: list[str] = []
        for step, checksum in sorted(keys, reverse=True):
            if step < least_step:
                break
            holders = {
                rank: found[step, checksum]
                for rank, found in enumerate(by_rank)
                if (step, checksum) in found
            }
            folder = self.folder / f"step-{step}"
            problem = self._complete(folder, holders)
            if problem is None:
                return folder, lines
            lines.append(f"the copy of step {step} in memory is passed over: {problem}")
        if not keys and not least_step:
            lines.append("nothing of the run is left in memory, and nothing is on disk")
        return None, lines

    def _found(self) -> "dict[tuple[int, str], _Found]":
        """Return the checkpoints in this node's memory, by step and checksum of the manifest."""
        found: dict[tuple[int, str], _Found] = {}
        if not self.folder.is_dir():
            return found
        memory_folder.make_private(self.folder)
        for path in self.folder.glob("step-*"):
            if path.name.endswith(UNFINISHED):
                continue
            try:
                files = folders.read_manifest(path).files
                folders.shorten(path / METRICS, files[METRICS])
            except (DamagedError, KeyError, OSError):
                continue
            written = (path / MANIFEST).read_bytes()
            good = {name for name in files if folders.is_whole(path / name, files[name])}
            key = step_of(path), hashlib.sha256(written).hexdigest()
            found[key] = _Found(written, files, good)
        return found

    def _complete(self, folder: Path, holders: "Mapping[int, _Found]") -> str | None:
        """Send the files of a checkpoint that nodes lack to them; return why that cannot be."""
        first = next(iter(holders.values()))
        files, moves = first.files, []
        for name in sorted(files):
            with_it = [rank for rank, found in holders.items() if name in found.good]
            if not with_it:
                return f"{name} is lost with the nodes that had it"
            receivers = [ranks[0] for ranks in self.nodes.ranks if ranks[0] not in with_it]
            moves += [
                (name, with_it[i % len(with_it)], receiver) for i, receiver in enumerate(receivers)
            ]

        def begin() -> None:
            memory_folder.make_private(self.folder)
            folder.mkdir(exist_ok=True)

        try:
            self._on_nodes(begin, folder)
            self._send(moves, files, folder)
            self._on_nodes(lambda: (folder / MANIFEST).write_bytes(first.manifest), folder)
        except RuntimeError as error:  # such as no room here for what the lost node had
            return str(error)
        ranks = self.nodes.ranks[self.nodes.index]
        problem = folders.damage(folder, ranks.index(self.nodes.rank), len(ranks))
        problems = from_every_rank(problem, self.group)
        return next((problem for problem in problems if problem is not None), None)

    def _send(
        self, moves: list[tuple[str, int, int]], files: Mapping[str, File], folder: Path
    ) -> None:
        """Send files (name, from, to) of the ranks' folders; each is mapped into memory."""
        rank = self.nodes.rank

        ends: list[tuple[torch.Tensor, int, bool]] = []

        def open_all() -> None:
            for name, sender, receiver in moves:
                path, size = folder / name, files[name].num_bytes
                if receiver == rank:
                    with path.open("wb") as file:
                        if size:  # a page that is missing later would kill the process
                            os.posix_fallocate(file.fileno(), 0, size)
                if rank in (sender, receiver) and size:
                    tensor = torch.from_file(
                        str(path), shared=receiver == rank, size=size, dtype=torch.uint8
                    )
                    ends.append((tensor, receiver if rank == sender else sender, rank == sender))

        self._together(open_all, folder)
        # Each rank of a node to one of the next node: the bytes of its share of the run's state.
        pending = []
        for tensor, other, is_sender in ends:
            call = dist.isend if is_sender else dist.irecv
            pending += [call(part, other, self.group) for part in tensor.split(MESSAGE_BYTES)]
        for work in pending:
            assert work is not None
            work.wait()

    def _on_nodes(self, work: Callable[[], object], folder: Path) -> None:
        self._together(work if self.nodes.is_first else lambda: None, folder)

    def _together(self, work: Callable[[], Any], folder: Path) -> list[Any]:
        name = f"the copy of {folder.name.removesuffix(UNFINISHED)} in memory"
        return together(work, self.group, name, _MAKE_ROOM)


class _Found(NamedTuple):
    """A checkpoint in a node's memory."""

    manifest: bytes
    files: dict[str, File]
    """The files of the whole checkpoint."""
    good: set[str]
    """The files that are there and unchanged."""


def _name_of(output_dir: str) -> str | None:
    folder = memory_folder.find(output_dir)
    return None if folder is None else folder.name
