"""Checkpoints in the memory of two nodes of two ranks: what is left after which loss."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.base.process.ending import RunError
from shardwise.checkpoint import memory, memory_folder
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.checkpoint.folder import MEMORY_NAME, damage, read_manifest
from shardwise.checkpoint.output_dir import claim
from shardwise.checkpoint.resume import Start, find_start
from shardwise.config import Parallel, RunConfig, UserError
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.checkpoint.test_checkpointer import NoLoader, config, values
from tests.distributed import run_ranks
from tests.parity.harness import microbatches


def elastic(folder: Path) -> RunConfig:
    cfg = config(folder, save_every=2, memory_checkpoint_every=1, resume="auto")
    return replace(cfg, parallel=Parallel("fsdp2"))


def go_to_node(folder: Path, num_nodes: int) -> None:
    """Give this rank the memory of its node; neighbours share one."""
    node = dist.get_rank() * num_nodes // dist.get_world_size()
    os.environ["SHARDWISE_MEMORY"] = str(folder / f"node-{node}")
    (folder / f"node-{node}").mkdir(exist_ok=True)


def train(cfg: RunConfig, folder: Path) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Three steps, after which the processes die: the values after each, and the bytes sent."""
    go_to_node(folder, 2)
    sent, isend = [0], dist.isend

    def counted(tensor: torch.Tensor, *args: Any) -> Any:
        sent[0] += tensor.nbytes
        return isend(tensor, *args)

    dist.isend = counted
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    Path(cfg.training.output_dir, "metrics.jsonl").touch()
    checkpointer = Checkpointer(cfg, job, NoLoader(), Start()).__enter__()
    after = []
    for step in (1, 2, 3):
        training_step(job, microbatches(cfg, mesh, step), mesh, None)
        checkpointer.after_step(step, None)
        after.append(values(job, cfg))
    return after, sent[0]


def resume(
    cfg: RunConfig, folder: Path, num_nodes: int, loads: bool
) -> tuple[Start, dict[str, torch.Tensor]]:
    """Where a run resumes and, where it `loads` that, the values that it has then."""
    go_to_node(folder, num_nodes)
    claim(cfg, clear=dist.get_rank() == 0)
    start = find_start(cfg)
    if not loads:
        return start, {}
    mesh = build_mesh(cfg, torch.device("cpu"))
    return start, values(build(cfg, mesh, start.state()), cfg)


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    folder = tmp_path_factory.mktemp("died")
    (folder / "out").mkdir()
    return folder, run_ranks(4, train, elastic(folder / "out"), folder)


@pytest.fixture
def copy(died, tmp_path):
    """A copy of what is left: its folder, and the values after each step."""
    folder, ranks = died
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy", ranks[0][0]


def checkpoint(folder: Path, node: int) -> Path:
    (path,) = (folder / f"node-{node}").glob("shardwise-*/step-3")
    return path


def check(
    copy, num_ranks: int, num_nodes: int, step: int, in_memory: bool, loads: bool = False
) -> tuple[str, ...]:
    folder, after = copy
    cfg = elastic(folder / "out")
    for start, found in run_ranks(num_ranks, resume, cfg, folder, num_nodes, loads):
        assert (start.step, start.in_memory) == (step, in_memory)
        assert found.keys() == (after[step - 1].keys() if loads else set())
        for key, value in found.items():
            assert torch.equal(value, after[step - 1][key]), key
    return start.passed_over


def test_each_node_has_its_own_shares_and_those_before(died):
    folder, ranks = died
    files = read_manifest(checkpoint(folder, 0)).files
    shares = {name: file.num_bytes for name, file in files.items() if name.startswith("tensors-")}
    for node in (0, 1):
        private = checkpoint(folder, node).parent
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert [path.name for path in private.iterdir()] == ["step-3"]
        assert (
            shares.items()
            <= {
                path.name: path.stat().st_size for path in checkpoint(folder, node).iterdir()
            }.items()
        )
    # Each of three times, a rank sends its share once.
    for rank, (_, sent) in enumerate(ranks):
        assert sent == 3 * shares.get(f"tensors-{rank}.safetensors", 0)


def test_processes_that_died_lose_no_step(copy):
    assert check(copy, 4, 2, step=3, in_memory=True) == ()


def test_a_node_that_is_replaced_gets_its_shares_from_the_next(copy):
    shutil.rmtree(copy[0] / "node-0")
    check(copy, 4, 2, step=3, in_memory=True)
    assert {p.name for p in checkpoint(copy[0], 0).iterdir()} == {
        p.name for p in checkpoint(copy[0], 1).iterdir()
    }


def test_one_node_of_two_has_everything(copy):
    shutil.rmtree(copy[0] / "node-0")
    (copy[0] / "node-1").rename(copy[0] / "node-0")
    check(copy, 2, 1, step=3, in_memory=True, loads=True)


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_copy_that_is_not_whole_is_never_used(copy, how):
    shutil.rmtree(copy[0] / "node-1")
    path = checkpoint(copy[0], 0) / "tensors-3.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if how == "flipped":
        path.write_bytes(content)
    (line,) = check(copy, 4, 2, step=2, in_memory=False)
    assert "the copy of step 3 in memory is passed over: tensors-3.safetensors is lost" in line


def test_an_unfinished_copy_is_never_used(copy):
    for node in (0, 1):
        shutil.copytree(checkpoint(copy[0], node), checkpoint(copy[0], node).parent / "step-4.tmp")
    check(copy, 4, 2, step=3, in_memory=True)


def test_a_run_in_a_new_folder_finds_nothing(copy):
    (copy[0] / "out" / MEMORY_NAME).unlink()
    check(copy, 4, 2, step=2, in_memory=False)


def test_results_are_kept_whatever_was_in_memory(tmp_path):
    cfg = elastic(tmp_path)
    for name in ("metrics.jsonl", MEMORY_NAME):
        (tmp_path / name).write_text("")
    claim(cfg, clear=True)
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="holds a finished run"):
        claim(cfg, clear=True)
    assert (tmp_path / "model").is_dir()


def test_a_folder_of_others_is_refused(tmp_path):
    folder = tmp_path / "shardwise"
    folder.mkdir(mode=0o755)
    with pytest.raises(RunError, match="not a folder of this user alone"):
        memory_folder.make_private(folder)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(RunError, match="not a folder of this user alone"):
        memory_folder.make_private(folder)


@pytest.mark.parametrize("name", ["../../etc", "", "a" * 31, "A" * 32])
def test_a_name_leads_nowhere_else(tmp_path, name):
    (tmp_path / MEMORY_NAME).write_text(name)
    assert memory_folder.find(tmp_path) is None


def fill(cfg: RunConfig, folder: Path) -> str:
    go_to_node(folder, 2)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        memory.os.posix_fallocate = no_room
    with pytest.raises(RunError) as error:
        train(cfg, folder)
    return str(error.value)


def test_no_room_is_said_on_every_rank(tmp_path):
    (tmp_path / "out").mkdir()
    for message in run_ranks(2, fill, elastic(tmp_path / "out"), tmp_path):
        assert "the copy of step-1 in memory could not be written: No space left" in message
        assert "training.memory_checkpoint_every" in message


# -------------------------------------------------------------------------------------- the history

LINE = '{"step": %d, "loss": 1.0, "grad_norm": 1.0, "skipped_steps": 0}\n'
HISTORY = "".join(LINE % step for step in range(1, 1001))


def train_long(cfg: RunConfig, folder: Path, lost: int = 0) -> list[int]:
    """Steps 1001 to 1004 of a run whose history is a thousand lines long; the bytes of history
    that each copy sends to all. The memory of the nodes is cleared after step `lost`."""
    go_to_node(folder, 2)
    sent, broadcast = [0], dist.broadcast

    def counted(tensor: torch.Tensor, *args: Any) -> Any:
        sent[-1] += tensor.nbytes
        return broadcast(tensor, *args)

    metrics = Path(cfg.training.output_dir, "metrics.jsonl")
    metrics.write_text(HISTORY)
    mesh = build_mesh(cfg, torch.device("cpu"))
    checkpointer = Checkpointer(cfg, build(cfg, mesh), NoLoader(), Start()).__enter__()
    dist.barrier()
    dist.broadcast = counted
    for step in range(1001, 1005):
        if dist.get_rank() == 0:
            with metrics.open("a") as file:
                file.write(LINE % step)
        checkpointer.after_step(step, None)
        sent.append(0)
        if step == lost:
            dist.barrier()
            shutil.rmtree(checkpointer._memory_folder, ignore_errors=True)
            dist.barrier()
    return sent[:-1]


@pytest.fixture
def long(tmp_path) -> RunConfig:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text(HISTORY)
    cfg = elastic(tmp_path / "out")
    return replace(cfg, training=replace(cfg.training, save_every=0, steps=2000))


def test_a_copy_sends_the_new_lines_only_and_has_all(long, tmp_path):
    sent = run_ranks(2, train_long, long, tmp_path)
    lines = (tmp_path / "out" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert sent[0] == [sum(map(len, lines[:1001])), *map(len, lines[1001:])]
    for node in (0, 1):
        (newest,) = (tmp_path / f"node-{node}").glob("shardwise-*/*")
        assert newest.name == "step-1004"
        assert (newest / "metrics.jsonl").read_bytes() == b"".join(lines)
        assert damage(newest) is None


def test_a_copy_is_whole_after_the_memory_was_cleared(long, tmp_path):
    run_ranks(2, train_long, long, tmp_path, 1002)
    (newest,) = (tmp_path / "node-0").glob("shardwise-*/*")
    assert damage(newest) is None
    assert (newest / "metrics.jsonl").read_text() == (tmp_path / "out/metrics.jsonl").read_text()


def test_the_copy_before_is_whole_while_the_next_one_is_made(long, tmp_path):
    """Whoever is killed in a copy leaves the one before, in which the next one's lines begin."""
    run_ranks(2, train_long, long, tmp_path)
    for node in (0, 1):
        (newest,) = (tmp_path / f"node-{node}").glob("shardwise-*/*")
        later = newest.with_name("step-1005.tmp")
        later.mkdir()
        os.link(newest / "metrics.jsonl", later / "metrics.jsonl")
        with (later / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1005, "lo')
    for start, _ in run_ranks(2, resume, long, tmp_path, 2, False):
        assert (start.step, start.in_memory) == (1004, True)
        assert damage(start.folder) is None
    assert (later / "metrics.jsonl").read_text().endswith('{"step": 1005, "lo')
