"""A resumed run equals one that never ended: bit for bit, or up to rounding in another layout."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict

from shardwise.assembly import build as assembly
from shardwise.assembly import state as assembly_state
from shardwise.assembly.build import build
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint import folder as checkpoint_folder
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.checkpoint.resume import Start, find_start
from shardwise.checkpoint.saved_state import SavedState
from shardwise.config import Data, Lora, Measure, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.kernels.eight_bit import MOMENTS
from shardwise.lab.instruments import INSTRUMENTS
from shardwise.metrics.hardware import PeakFlops
from shardwise.models import load
from shardwise.parallel.mesh import build_mesh
from shardwise.training import loop, measure
from shardwise.training.step import training_step
from tests.checkpoint.test_checkpointer import NoLoader, equal, values
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import loaded_by_transformers, logits, same
from tests.parity.harness import (
    CONFIGS,
    DEEP,
    EIGHT_BIT,
    Cell,
    microbatches,
    numerics_of,
    run_config,
)

STEPS, HALF = 6, 3
PIPELINES = {
    "pp": Parallel(pp=2),
    "pp-interleaved": Parallel(pp=2, schedule="interleaved-1f1b"),
    "pp-ddp": Parallel("ddp", pp=2),
    "pp-zero1": Parallel("zero1", pp=2),
    "pp-fsdp2": Parallel("fsdp2", pp=2),
}
TENSOR = {"tp": Parallel(tp=2), "fsdp2-tp": Parallel("fsdp2", tp=2, sequence_parallel=True)}
PARALLEL = {
    **{
        layout: Parallel(layout) for layout in ("single", "ddp", "zero1", "zero2", "fsdp1", "fsdp2")
    },
    "offload": Parallel("fsdp2", offload="optimizer"),
    "hsdp": Parallel("fsdp2", dp_replicate=2),
    **PIPELINES,
    **TENSOR,
    "cp": Parallel(cp=2),
}
PROCESSES = (
    dict.fromkeys(PARALLEL, 2)
    | {"single": 1}
    | dict.fromkeys(("hsdp", "pp-ddp", "pp-zero1", "pp-fsdp2", "fsdp2-tp"), 4)
)
"""Of every layout; under `offload` the optimizer has copies of the weights."""
ADAPTERS_OF = ("single", "ddp", "zero2", "fsdp2", "pp")
"""Layouts that `make test` resumes with LoRA; it resumes others, and `single`, in full.

`make parity` resumes the rest.
"""
LATER = (
    *("pp-interleaved", "pp-ddp", "pp-zero1", "pp-fsdp2"),
    *("zero1", "hsdp", "cp", "fsdp2-tp"),
)
"""Layouts that `make parity` alone resumes: `make test` resumes pipelines, replicas, shards, zero2,
whose states are those of zero1, and tp; hsdp has the shards of fsdp2, and cp copies of all."""
PAIRS = [(name, name in ADAPTERS_OF) for name in PROCESSES if name not in LATER]
PAIRS.append(("single", False))
REST = [
    (layout, lora) for layout in PROCESSES for lora in (True, False) if (layout, lora) not in PAIRS
]


def cases(layouts: Iterable[str] = PROCESSES) -> list[Any]:
    """The parameters (layout, lora) of a test of these layouts."""
    rest = [pytest.param(*case, marks=pytest.mark.slow) for case in REST if case[0] in layouts]
    return [*(case for case in PAIRS if case[0] in layouts), *rest]


Values = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def cheap(folder) -> Iterator[None]:
    """Few layers, and a peak that no run here needs is not measured."""
    model = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text())
    for layers in (2, 4):
        path = folder / f"model-{layers}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**model, "num_hidden_layers": layers}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "peak_of", lambda *_: PeakFlops(1.0, "not measured"))
        yield


def config(
    folder: Path, name: str, layout: str = "single", *, lora: bool = True, **training: Any
) -> RunConfig:
    """A run with all that a resume could forget: moments, learning rate, dropout, data order."""
    parallel = PARALLEL[layout]
    layers = 2 * parallel.num_virtual  # as many as there are stages
    return RunConfig(
        model=Model(
            str(folder / f"model-{layers}"), init="random", tokenizer=str(folder / "tokenizer")
        ),
        lora=Lora(r=4, dropout=0.1, targets=["q_proj", "down_proj"]) if lora else None,
        data=Data(str(folder / "corpus.jsonl"), validation=0.2, sequence_length=32),
        parallel=parallel,
        optimizer=Optimizer(
            lr=1e-2, lora_b_lr_ratio=4.0 if lora else 1.0, warmup_steps=1, weight_decay=0.1
        ),
        training=Training(
            **{
                "output_dir": str(folder / name),
                "steps": STEPS,
                "global_batch_size": 4,
                "micro_batch_size": 2 if PROCESSES[layout] == 2 else 1,
                "device": "cpu",
                "eval_batches": 1,
                "save_every": HALF,
                **training,
            }
        ),
        measure=Measure(warmup_steps=0, memory=False),
    )


def run(cfg: RunConfig) -> None:
    Path(cfg.training.output_dir).mkdir(parents=True, exist_ok=True)
    loop.train(cfg, build_mesh(cfg, torch.device("cpu")), INSTRUMENTS)


def run_all(*cfgs: RunConfig) -> None:
    for cfg in cfgs:
        run(cfg)


def run_until(step: int, cfg: RunConfig) -> None:
    """As `run`, but the run is ended after `step`."""
    after_step = Checkpointer.after_step

    def then_end(self, done, evaluation):
        after_step(self, done, evaluation)
        if done == step:
            raise EndedError

    Checkpointer.after_step = then_end
    with pytest.raises(EndedError):
        run(cfg)


class EndedError(Exception):
    """A run was ended from outside."""


def run_with(bug: Callable[[], None], cfg: RunConfig) -> None:
    """As `run`, with a bug in the project's own code."""
    bug()
    run(cfg)


def record(cfg: RunConfig) -> RunRecord:
    return RunRecord.read(Path(cfg.training.output_dir) / "record.json")


def curves(cfg: RunConfig) -> tuple[Any, ...]:
    return record(cfg).losses, record(cfg).grad_norms, record(cfg).eval


def result(cfg: RunConfig) -> bytes:
    """The weights that a run leaves."""
    (file,) = Path(cfg.training.output_dir).glob("*/*.safetensors")
    return file.read_bytes()


def metrics(cfg: RunConfig) -> list[dict[str, Any]]:
    """What is in metrics.jsonl but times."""
    lines = (Path(cfg.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if "second" not in key}
        for line in lines
    ]


def checkpoint_of(cfg: RunConfig, step: int) -> str:
    return str(Path(cfg.training.output_dir) / "checkpoints" / f"step-{step}")


def whole(folder: Path, layout: str, lora: bool = True) -> RunConfig:
    """A run that never ends before its last step."""
    return config(folder, f"whole-{layout}-{lora}", layout, lora=lora, async_save=lora)


def second_half(folder: Path, layout: str, lora: bool) -> RunConfig:
    start = checkpoint_of(whole(folder, layout, lora), HALF)
    return config(folder, f"half-{layout}-{lora}", layout, lora=lora, resume=start)


def run_cases(folder: Path, wanted: list[tuple[str, bool]]) -> None:
    """All `whole` runs of the cases, and then, in other processes, their second halves again."""
    for nproc in sorted(set(PROCESSES.values())):
        here = [(layout, lora) for layout, lora in wanted if PROCESSES[layout] == nproc]
        if here:
            run_ranks(nproc, run_all, *(whole(folder, *case) for case in here))
            run_ranks(nproc, run_all, *(second_half(folder, *case) for case in here))


@pytest.fixture(scope="module")
def ran(folder) -> Path:
    """Where the cases of `make test` have run."""
    run_cases(folder, PAIRS)
    return folder


@pytest.fixture(scope="module")
def ran_the_rest(ran) -> Path:
    run_cases(ran, REST)
    return ran


@pytest.fixture
def ran_case(request, layout, lora) -> Path:
    """Where the runs of this case are."""
    return request.getfixturevalue("ran" if (layout, lora) in PAIRS else "ran_the_rest")


@pytest.mark.parametrize(("layout", "lora"), cases())
def test_to_go_on_is_never_to_have_ended(ran_case, layout, lora):
    one, half = whole(ran_case, layout, lora), second_half(ran_case, layout, lora)
    assert len(record(half).losses) == STEPS
    assert [e["step"] for e in record(half).eval] == [0, STEPS]
    assert curves(half) == curves(one)
    assert result(half) == result(one)
    assert metrics(half) == metrics(one)
    assert record(half).resumed_from == {"folder": half.training.resume, "step": HALF}
    assert record(one).resumed_from is None


def test_a_run_stops_early_wherever_it_was_resumed(folder):
    """Nothing improves at a learning rate of 0, so the first evaluation stays the best."""

    def early(name: str, **training: Any) -> RunConfig:
        cfg = config(
            folder,
            name,
            "ddp",
            steps=12,
            eval_every=2,
            save_every=4,
            patience=2,
            keep_best=True,
            **training,
        )
        return replace(cfg, optimizer=replace(cfg.optimizer, lr=0.0))

    one = early("early")
    half = early("early-half", resume=checkpoint_of(one, 4))
    over = early("early-over", resume=checkpoint_of(one, 6))
    longer = early("early-longer", resume=checkpoint_of(one, 6))
    longer = replace(longer, training=replace(longer.training, patience=3))
    run_ranks(2, run_all, one, half, over, longer)
    best_loss = record(one).eval[1]["loss"]
    for cfg, last, checkpoints in (
        (one, 6, {"step-2", "step-4", "step-6", "best"}),
        (half, 6, {"step-6"}),
        (over, 6, set()),
        (longer, 8, {"step-8"}),
    ):
        ended = record(cfg)
        assert ended.status == "ok"
        assert ended.stopped_early == {"step": last, "best_step": 2, "best_loss": best_loss}
        assert ended.saved_step == 2
        assert len(ended.losses) == last
        folders = (Path(cfg.training.output_dir) / "checkpoints").glob("*")
        assert {path.name for path in folders} == checkpoints
        assert metrics(cfg)[: len(metrics(one))] == metrics(one)
        assert result(cfg) == result(one)
    assert (folder / "early" / "checkpoints" / "best").resolve().name == "step-2"


def test_a_resume_without_a_step_left_writes_the_result_of_a_checkpoint(ran):
    checkpoint = checkpoint_of(whole(ran, "single"), HALF)
    cfg = config(ran, "of-a-checkpoint", resume=checkpoint, steps=HALF)
    run_ranks(1, run, cfg)
    saved = safetensors.torch.load_file(Path(checkpoint) / "tensors-0.safetensors")
    weights = [value for key, value in saved.items() if key.startswith("weights/")]
    written = safetensors.torch.load(result(cfg)).values()
    assert sorted(map(_bytes, written)) == sorted(map(_bytes, weights))
    assert result(cfg) != result(whole(ran, "single"))
    assert record(cfg).losses == record(whole(ran, "single")).losses[:HALF]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


# The chain of shares has other numbers of processes too, and all tensors cross layouts below.
@pytest.mark.slow
def test_each_part_under_another_layout_and_number_of_processes(ran):
    one, noise = whole(ran, "single"), config(ran, "noise")
    noise = replace(noise, measure=replace(noise.measure, reverse_microbatches=True))
    run_ranks(1, run, noise)
    parts = [
        ("fsdp2", 2, 1),
        ("fsdp2", 4, 2),
        ("ddp", 4, 3),
        ("zero1", 2, 4),
        ("fsdp1", 2, 5),
        ("single", 1, STEPS),
    ]
    for layout, nproc, last in parts:
        resume = None if layout == "fsdp2" and nproc == 2 else "latest"
        cfg = config(ran, "chain", layout, micro_batch_size=1, save_every=last, resume=resume)
        if last < STEPS:
            run_ranks(nproc, run_until, last, cfg)
        else:
            run_ranks(nproc, run, cfg)
    assert [line["step"] for line in metrics(cfg)] == [line["step"] for line in metrics(one)]
    assert record(cfg).mesh["dp_replicate"] == 1
    # As in test_train: ten times what another order of micro-batches does to one process.
    for apart in (losses_apart, weights_apart):
        assert apart(cfg, one) <= max(1e-6, 10 * apart(noise, one))


# The next test's chain has a pipeline too, beside tp.
@pytest.mark.slow
def test_a_pipeline_goes_on_under_fsdp2_as_another_pipeline_and_alone(ran):
    def deep(name: str, **training: Any) -> RunConfig:
        cfg = config(ran, name, steps=5, micro_batch_size=1, eval_batches=1, **training)
        return replace(cfg, model=replace(cfg.model, path=str(DEEP / "deep-llama")))  # of 8 layers

    one, noise = deep("deep"), deep("deep-noise")
    noise = replace(noise, measure=replace(noise.measure, reverse_microbatches=True))
    run_ranks(1, run_all, one, noise)
    parts = [
        (4, Parallel("zero1", pp=2)),
        (2, Parallel("fsdp2")),
        (4, Parallel(pp=4, schedule="zbv")),
        (4, Parallel("zero1", pp=2, schedule="interleaved-1f1b")),
        (1, Parallel()),
    ]
    for step, (nproc, parallel) in enumerate(parts, 1):
        resume = "latest" if step > 1 else None
        cfg = replace(deep("deep-chain", save_every=step, resume=resume), parallel=parallel)
        run_ranks(nproc, *([run] if step == len(parts) else [run_until, step]), cfg)
    assert [line["step"] for line in metrics(cfg)] == [line["step"] for line in metrics(one)]
    for apart in (losses_apart, weights_apart):
        assert apart(cfg, one) <= max(1e-6, 10 * apart(noise, one))


# In full, tensors cross the layouts without stages in the tests of `cross_all`; with stages and tp
# in `make parity`.
@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_with_shares_of_layers_and_without_in_every_composition(folder, lora):
    def deep(name: str, **training: Any) -> RunConfig:
        cfg = config(
            folder,
            f"{name}-{lora}",
            lora=lora,
            steps=6,
            micro_batch_size=1,
            eval_batches=1,
            **training,
        )
        # A rank has some of each of Gated DeltaNet's [q, k, v] rows: joined shares are not the full
        # tensor.
        return replace(
            cfg,
            model=replace(cfg.model, path=str(CONFIGS / "tiny-qwen3_5")),
            lora=cfg.lora and ADAPTERS,
        )

    one, noise = deep("shares-alone"), deep("shares-noise")
    noise = replace(noise, measure=replace(noise.measure, reverse_microbatches=True))
    run_ranks(1, run_all, one, noise)
    parts = [
        (1, Parallel()),
        (2, Parallel("fsdp2")),
        (2, Parallel(tp=2)),
        (4, Parallel(pp=2, tp=2)),
        (4, Parallel("fsdp2", tp=2, sequence_parallel=True)),
        (2, Parallel("ddp")),
    ]
    for step, (nproc, parallel) in enumerate(parts, 1):
        resume = "latest" if step > 1 else None
        cfg = replace(deep("shares-chain", save_every=step, resume=resume), parallel=parallel)
        run_ranks(nproc, *([run] if step == len(parts) else [run_until, step]), cfg)
    assert [line["step"] for line in metrics(cfg)] == [line["step"] for line in metrics(one)]
    for apart in (losses_apart, weights_apart):
        assert apart(cfg, one) <= max(1e-6, 10 * apart(noise, one))


ADAPTERS = Lora(r=4, dropout=0.1)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # which peft asks for
@pytest.mark.parametrize(("layout", "lora"), cases(("pp", "pp-fsdp2", "tp", "fsdp2-tp")))
def test_others_read_what_a_model_in_parts_leaves(ran_case, layout, lora):
    cfg, alone = (whole(ran_case, name, lora) for name in (layout, "single"))
    assert (
        safetensors.torch.load(result(cfg)).keys() == safetensors.torch.load(result(alone)).keys()
    )
    if not lora:
        found = loaded_by_transformers(Path(cfg.training.output_dir) / "model").state_dict()
        assert same(found, safetensors.torch.load(result(cfg)))
        return
    base = load.load_whole(cfg.model, load.read_config(cfg.model))
    before = logits(base)
    adapted = PeftModel.from_pretrained(base, Path(cfg.training.output_dir) / "adapter")
    found = get_peft_model_state_dict(adapted)
    assert same(found, safetensors.torch.load(result(cfg)))
    assert not torch.allclose(logits(adapted), before)


def losses_apart(cfg: RunConfig, other: RunConfig) -> float:
    return max(abs(a - b) for a, b in zip(record(cfg).losses, record(other).losses, strict=True))


def weights_apart(cfg: RunConfig, other: RunConfig) -> float:
    """The greatest difference of a weight that two runs leave."""
    ones, others = (safetensors.torch.load(result(run)) for run in (cfg, other))
    assert ones.keys() == others.keys()
    return max((ones[name] - others[name]).abs().max().item() for name in ones)


# --------------------------------------------------------------------------------- killed in a save


def cut_short(file: int) -> None:
    os.ftruncate(file, os.fstat(file).st_size // 2)


def half_removed(folder: Path) -> None:
    next(folder.iterdir()).unlink()


KILLS = {
    "tensors are half written": (os, "fsync", cut_short),
    "there is no manifest yet": (checkpoint_folder, "write_manifest", None),
    "it is not renamed yet": (checkpoint_folder, "publish", None),
    "the best is not marked yet": (checkpoint_folder, "mark_best", None),
    "older ones are not removed yet": (checkpoint_folder, "prune", None),
    "an older one is half removed": (checkpoint_folder.shutil, "rmtree", half_removed),
}
"""Moments in a save: before which function's work, and what of it is done."""


def run_killed(moment: str, call: int, rank: int, cfg: RunConfig) -> None:
    """As `run`, but this rank is killed in the `call`-th call of a function."""
    owner, name, begin = KILLS[moment]
    function, calls = getattr(owner, name), itertools.count(1)

    def killed(*args):
        if dist.get_rank() == rank and next(calls) == call:
            if begin is not None:
                begin(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    setattr(owner, name, killed)
    run(cfg)


@pytest.mark.parametrize(
    ("moment", "layout", "call", "rank", "start"),
    [
        ("tensors are half written", "ddp", 2, 1, 2),  # rank 1 waits for the disk once in a save
        pytest.param("tensors are half written", "pp", 2, 1, 2, marks=pytest.mark.slow),
        ("there is no manifest yet", "ddp", 2, 0, 2),
        ("it is not renamed yet", "single", 2, 0, 2),
        *(
            pytest.param(moment, "single", 2, 0, 4, marks=pytest.mark.slow)
            for moment in ("the best is not marked yet", "older ones are not removed yet")
        ),
        ("an older one is half removed", "single", 1, 0, 4),
    ],
)
def test_killed_in_the_second_save(ran, tmp_path, moment, layout, call, rank, start):
    cfg = config(
        ran,
        "unused",
        layout,
        save_every=2,
        eval_every=2,
        keep_last=1,
        keep_best=True,
        resume="auto",
    )
    cfg = replace(cfg, training=replace(cfg.training, output_dir=str(tmp_path)))
    with pytest.raises(RuntimeError, match=f"rank {rank} died without a word"):
        run_ranks(PROCESSES[layout], run_killed, moment, call, rank, cfg)
    run_ranks(PROCESSES[layout], run, cfg)
    assert record(cfg).resumed_from == {"folder": checkpoint_of(cfg, start), "step": start}
    assert record(cfg).losses == record(whole(ran, layout)).losses
    assert result(cfg) == result(whole(ran, layout))
    best = min((e for e in record(cfg).eval if e["step"]), key=lambda e: e["loss"])["step"]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step-{STEPS}", f"step-{best}", "best"}
    assert (tmp_path / "checkpoints" / "best").resolve().name == f"step-{best}"


def cross(folder: Path, read: Path | None, cell: Cell) -> Values:
    """Read a checkpoint, or make a step, and write one; return this rank's full tensors by key."""
    with numerics_of(cell):
        return _cross(folder, read, cell)


def _cross(folder: Path, read: Path | None, cell: Cell) -> Values:
    cfg = run_config(cell, "adamw")
    resume = None if read is None else str(read)
    training = replace(
        cfg.training,
        output_dir=str(folder),
        resume=resume,
        global_batch_size=12,
        micro_batch_size=1,
    )
    cfg = replace(cfg, training=training)
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").touch()
    mesh = build_mesh(cfg, torch.device("cpu"))
    start = find_start(cfg)
    job = build(cfg, mesh, start.state())
    if start.folder is None:
        training_step(job, microbatches(cfg, mesh, 1), mesh, None)
    with Checkpointer(
        cfg, job, NoLoader(rows=cfg.training.global_batch_size), start
    ) as checkpointer:
        checkpointer.save(1)
    return values(job, cfg)


def cross_all(folder: Path, family: str, layouts: dict[str, int], variant: str = "") -> Values:
    """Each layout, on so many ranks, reads what the one before it wrote; what all of them have."""
    written, read = None, None
    for layout, nproc in layouts.items():
        for found in run_ranks(
            nproc, cross, folder / layout, read, Cell(family, layout, "full", nproc, variant)
        ):
            assert written is None or equal(found, written), layout
            written = found
        read = folder / layout / "checkpoints" / "step-1"
    assert written is not None
    return written


@pytest.mark.parametrize(
    "layouts",
    [
        {"single": 1, "fsdp2": 3, "ddp": 2},  # three ranks cut unevenly
        pytest.param({"ddp": 2, "hsdp": 4}, marks=pytest.mark.slow),
    ],
)
def test_momentum_of_matrices_crosses_layouts_unchanged(layouts, tmp_path):
    written = cross_all(tmp_path, "qwen3_moe", layouts, "muon")
    states = {key: value for key, value in written.items() if key.startswith("optimizer/")}
    kinds = {key.rpartition("/")[2] for key in states}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    assert all(value.any() for value in states.values())


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        # Three ranks cut unevenly.
        ("nemotron_h", {"single": 1, "zero1": 3, "fsdp2": 3}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("nemotron_h", {"ddp": 2, "hsdp": 4, "zero2": 2}),
                # 4 ranks of tp hold some columns twice.
                (
                    "granitemoehybrid",
                    {"tp": 4, "single": 1, "fsdp2-tp-sp": 4, "zero1-tp": 4, "ddp": 2},
                ),
            )
        ),
    ],
)
def test_moments_in_8_bits_cross_layouts_unchanged(tmp_path, family, layouts):
    written = cross_all(tmp_path, family, layouts, EIGHT_BIT)
    states = {key: value for key, value in written.items() if key.startswith("optimizer/")}
    codes = {key for key, value in states.items() if value.dtype == torch.uint8}
    assert codes == {key for key in states if key.endswith("_codes")}
    kinds = {key.rpartition("/")[2] for key in states}
    moments = {f"{moment}_{part}" for moment in MOMENTS for part in ("codes", "scales")}
    assert kinds == {*moments, "exp_avg", "exp_avg_sq", "step"}
    assert all(value.any() for value in states.values())


@pytest.mark.parametrize(
    "layouts",
    [
        {"tp": 4, "single": 1},
        pytest.param({"fsdp2-tp-sp": 4, "zero1-tp": 4, "ddp": 2}, marks=pytest.mark.slow),
    ],
)
def test_shares_that_several_ranks_hold_cross_layouts_unchanged(layouts, tmp_path):
    # 2 heads of keys and values, and 2 groups of Mamba2's B and C: 4 ranks hold each twice, 2 ranks
    # hold each once.
    written = cross_all(tmp_path, "granitemoehybrid", layouts)
    assert all(value.any() for key, value in written.items() if key.startswith("optimizer/"))


@pytest.mark.parametrize(
    "layouts",
    [
        {"single": 1, "zero1": 3, "fsdp2": 3, "fsdp1": 3, "hsdp": 4},  # three cut unevenly
        pytest.param({"ddp": 2, "fsdp2": 3, "zero2": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_tensor_crosses_every_layout_unchanged(layouts, tmp_path):
    written = cross_all(tmp_path, "nemotron_h", layouts)
    assert {key.rpartition("/")[2] for key in written} >= {"exp_avg", "exp_avg_sq", "step"}
    assert any(key.startswith("buffers/") for key in written)
    assert all(value.any() for key, value in written.items() if key.startswith("optimizer/"))


def schedule_that_restarts():
    initialise = SavedState.__init__

    def without_step(self, folder, manifest):
        initialise(self, folder, replace(manifest, step=0))

    SavedState.__init__ = without_step


def one_rate_after_a_resume():
    make = assembly.make_lr_schedule

    def without_ratio(cfg, optimizer, num_steps, done):
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr
        return make(cfg, optimizer, num_steps, done)

    assembly.make_lr_schedule = without_ratio


def loader_that_restarts():
    Start.loader = property(lambda self: None)


def moments_forgotten():
    load_state = assembly.load_state

    def forgetful(pm, optimizer, cfg, state):
        load_state(pm, optimizer, cfg, state)
        optimizer.state.clear()

    assembly.load_state = forgetful


def moments_of_another_parameter():
    optimized = assembly_state.optimized_parameters

    def swapped(optimizer):
        named = list(optimized(optimizer))
        places = [i for i, (_, p) in enumerate(named) if p.shape == named[0][1].shape][:2]
        names = {named[places[0]][0]: named[places[1]][0], named[places[1]][0]: named[places[0]][0]}
        return iter([(names.get(name, name), p) for name, p in named])

    assembly_state.optimized_parameters = swapped


def weights_not_restored():
    SavedState.keys = property(
        lambda self: [key for key in self._tensors if key.startswith("optimizer/")]
    )


@pytest.mark.parametrize(
    ("bug", "layout"),
    some_now(
        [
            (schedule_that_restarts, "single"),
            (one_rate_after_a_resume, "single"),
            (loader_that_restarts, "single"),
            (moments_forgotten, "single"),
            (weights_not_restored, "single"),
            (moments_of_another_parameter, "fsdp2"),
        ],
        [(loader_that_restarts, "single"), (moments_of_another_parameter, "fsdp2")],
    ),
)
def test_planted_bug_is_caught(ran, bug, layout):
    one = whole(ran, layout)
    parts = config(ran, bug.__name__, layout, resume=checkpoint_of(one, HALF))
    run_ranks(PROCESSES[layout], run_with, bug, parts)
    assert len(record(parts).losses) == STEPS
    assert curves(parts) != curves(one)
