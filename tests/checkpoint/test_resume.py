"""Where a run may start: what fits a checkpoint and what does not, and where a restart goes on."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.assembly.build import build
from shardwise.assembly.optimizer import lr_factor
from shardwise.base.process.ending import Ending
from shardwise.checkpoint import memory_folder
from shardwise.checkpoint.folder import (
    MANIFEST,
    StoredSlot,
    folder_of,
    read_manifest,
    take_over,
    write_manifest,
)
from shardwise.checkpoint.resume import find_start, may_have_steps
from shardwise.commands.library import LOOP
from shardwise.config import (
    Data,
    Launch,
    Lora,
    Measure,
    Model,
    Optimizer,
    RunConfig,
    Training,
    UserError,
    presets,
)
from shardwise.launch import local as launch
from shardwise.launch.group import Group
from shardwise.models import load
from shardwise.parallel.mesh import build_mesh
from tests.checkpoint.test_checkpointer import config, make_checkpoints, save_steps
from tests.distributed import run_ranks
from tests.models.tiny import CONFIGS
from tests.parity.harness import Cell, run_config


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run that has saved step 2."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, save_steps, config(folder), 2)
    return folder


@pytest.mark.parametrize("resume", ["latest", "latest-good"])
def test_no_checkpoint_to_go_on_from(resume, tmp_path):
    with pytest.raises(
        RuntimeError, match=rf"UserError: training\.resume is {resume}, but .* holds no checkpoint"
    ):
        run_ranks(1, find_start, config(tmp_path, resume=resume))


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("training", "seed", 7, "training.seed is 7, but checkpoint .* was trained with 0"),
        ("training", "global_batch_size", 4, "training.global_batch_size is 4, .* with 8"),
        (
            "training",
            "steps",
            9,
            r"training.steps is 9, .* with 3 \(the learning rates of .* depend on it\)",
        ),
        ("lora", "r", 2, "lora.r is 2, .* with 4"),
        ("optimizer", "lr", 0.5, "optimizer.lr is 0.5, .* with 1.0"),
        ("optimizer", "lora_b_lr_ratio", 4.0, "optimizer.lora_b_lr_ratio is 4.0, .* with 1.0"),
        ("data", "sequence_length", 9, "data.sequence_length is 9"),
    ],
)
def test_a_run_of_other_work_is_refused(section, key, value, message, saved):
    cfg = config(saved, resume="latest")
    cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{key: value})})
    with pytest.raises(RuntimeError, match=f"UserError: {message}"):
        run_ranks(1, find_start, cfg)


@pytest.mark.parametrize(
    ("before", "skipped", "now", "may"),
    [("fail", {}, "skip", True), ("skip", {}, "fail", True), ("skip", {"x": 1}, "fail", False)],
)
def test_bad_documents_may_be_left_out_from_now_on(before, skipped, now, may, saved, tmp_path):
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    folder = folder_of(tmp_path, 2)
    manifest = read_manifest(folder)
    manifest.config["data"]["on_error"] = before
    slot = StoredSlot(0, 0, 0, (), 0, skipped, 0, is_begun=False)
    slots = dict.fromkeys(map(str, range(8)), slot)
    loader = replace(manifest.loader, slots=slots, filled=dict.fromkeys(slots, 0))
    manifest = replace(manifest, loader=loader)
    (folder / MANIFEST).unlink()
    write_manifest(folder, manifest)
    cfg = config(tmp_path, resume="latest")
    cfg = replace(cfg, data=replace(cfg.data, on_error=now))
    if may:
        assert run_ranks(1, find_start, cfg)[0].step == 2
    else:
        with pytest.raises(RuntimeError, match=r"trained with skip and has left out documents"):
            run_ranks(1, find_start, cfg)


COSINE = Optimizer(warmup_steps=10)
SHARE = Optimizer(warmup_ratio=0.1, lr_schedule="constant")
STABLE = Optimizer(warmup_steps=10, lr_schedule="wsd", decay_ratio=0.2)


@pytest.mark.parametrize(
    ("optimizer", "before", "done", "steps", "may"),
    [
        (COSINE, 100, 10, 200, True),  # the warm-up is the same
        (COSINE, 100, 11, 200, False),
        (COSINE, 100, 50, 50, True),  # no step is left
        (Optimizer(lr_schedule="constant"), 100, 100, 200, True),
        (SHARE, 100, 50, 200, False),  # 10 and 20 steps of warm-up
        (SHARE, 100, 50, 101, True),  # 10 in both
        (STABLE, 100, 80, 200, True),
        (STABLE, 100, 81, 200, False),  # the fall had begun
        (STABLE, 200, 80, 100, True),
        (STABLE, 200, 81, 100, False),  # the fall would have begun
    ],
)
def test_other_steps_need_the_same_learning_rates(optimizer, before, done, steps, may):
    assert may_have_steps(optimizer, before, done, steps) == may
    if may and done < steps:
        rates = [
            [lr_factor(optimizer, step, total) for step in range(1, done + 1)]
            for total in (before, steps)
        ]
        assert rates[0] == rates[1]


def test_another_kernel_is_no_other_work(saved):
    cfg = config(saved, resume="latest")
    assert cfg.lora is not None
    cfg = replace(cfg, lora=replace(cfg.lora, kernel="peft"))
    (start,) = run_ranks(1, find_start, cfg)
    assert start.step == 2


def run_of_a_model(folder: Path, mode: str) -> RunConfig:
    """A run that has saved step 1, of a model with weights in two files."""
    cfg = run_config(Cell("llama", "single", mode), "adamw")
    load.load_whole(cfg.model, load.read_config(cfg.model)).save_pretrained(
        folder / "model", max_shard_size="100KB"
    )
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    cfg = replace(cfg, model=replace(cfg.model, path=str(folder / "model"), init="weights"))
    cfg = replace(cfg, training=replace(cfg.training, output_dir=str(folder)))
    run_ranks(1, save_steps, cfg, 1)
    return replace(cfg, training=replace(cfg.training, resume="latest"))


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_adapters_do_not_go_on_upon_another_base_model(mode, tmp_path):
    cfg = run_of_a_model(tmp_path, mode)
    file = max((tmp_path / "model").glob("*.safetensors"))
    tensors = load_file(file)
    last = sorted(tensors)[-1]
    tensors[last].view(-1)[tensors[last].numel() // 2] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    if mode == "full":  # the checkpoint has every weight
        assert run_ranks(1, find_start, cfg)[0].step == 1
    else:
        message = rf"UserError: model\.path {tmp_path}/model: {file.name} is not what .*/step-1 "
        with pytest.raises(RuntimeError, match=message):
            run_ranks(1, find_start, cfg)


def test_a_model_and_its_data_may_lie_elsewhere(tmp_path, monkeypatch):
    cfg = run_of_a_model(tmp_path / "run", "lora")
    shutil.copytree(tmp_path / "run" / "model", tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "copy"), "copy", "run/../run/model"):
        moved = replace(cfg, model=replace(cfg.model, path=path))
        assert run_ranks(1, find_start, moved)[0].step == 1
    with pytest.raises(
        RuntimeError, match=r"UserError: data\.validation is"
    ):  # a share is part of the work
        run_ranks(1, find_start, replace(cfg, data=replace(cfg.data, validation=["other.txt"])))


def test_validation_files_may_lie_elsewhere(tmp_path):
    cfg = config(tmp_path)
    cfg = replace(cfg, data=replace(cfg.data, validation="a.txt"))
    run_ranks(1, save_steps, cfg, 1)
    cfg = replace(
        cfg,
        training=replace(cfg.training, resume="latest"),
        data=replace(cfg.data, validation=["b.txt"]),
    )
    assert run_ranks(1, find_start, cfg)[0].step == 1  # what is in them the loaders compare


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_no_run_goes_on_with_another_model_config(mode, tmp_path):
    cfg = run_of_a_model(tmp_path, mode)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))
    with pytest.raises(
        RuntimeError,
        match=r"UserError: model\.path .*/model: config\.json is not what .* was trained on",
    ):
        run_ranks(1, find_start, cfg)


def test_states_of_a_parameter_that_is_not_there(saved):
    def body() -> str:
        cfg = config(saved, resume="latest")
        assert cfg.lora is not None
        state = find_start(cfg).state()
        cfg = replace(cfg, lora=replace(cfg.lora, targets=["o_proj"]))
        with pytest.raises(UserError) as error:
            build(cfg, build_mesh(cfg, torch.device("cpu")), state)
        return str(error.value)

    (told,) = run_ranks(1, body)
    assert re.fullmatch(
        r"checkpoint .*/step-2 does not fit this run: \S*lora_\S* was trained, and is not here; .*",
        told,
    )


def test_full_training_does_not_go_on_from_adapters(saved):
    with pytest.raises(RuntimeError, match=r"UserError: lora\.r is left out, but checkpoint "):
        run_ranks(1, find_start, replace(config(saved, resume="latest"), lora=None))


def restarting(cfg: RunConfig) -> RunConfig:
    """A run under ddp that starts again when a process has died."""
    parallel = replace(cfg.parallel, data="ddp")
    return replace(cfg, parallel=parallel, launch=Launch(restarts=3))


@pytest.mark.parametrize("resume", [None, "auto", "latest", "older"])
def test_a_restart_goes_on_from_where_the_run_stands(resume, tmp_path, monkeypatch):
    """The first attempt dies before it saves, the second after.

    `older`: by hand, from the older of two checkpoints.
    """
    if resume is not None:
        make_checkpoints(tmp_path, "step-2", "step-4")
    resume = str(folder_of(tmp_path, 2)) if resume == "older" else resume
    given = []

    def run(_: Group, main: partial[None], *__: Any) -> Ending | None:
        given.append(main.args[0].training.resume)
        if len(given) == 2:
            take_over(tmp_path, 2, None)
            make_checkpoints(tmp_path, "step-4")  # of the same name as one that was there
        return None if len(given) == 4 else Ending(1, "died", "error: died")

    monkeypatch.setattr(Group, "run", run)
    cfg = config(tmp_path, resume=resume)
    assert launch.start_processes(restarting(cfg), 2, LOOP) == 0
    assert given == [resume, resume, "auto", "auto"]


@pytest.mark.parametrize("is_named", [False, True])
def test_a_restart_with_copies_in_memory_loses_no_checkpoint_that_was_named(
    is_named, tmp_path, monkeypatch
):
    """The name in memory is there before a copy is: the run may have died before its first one."""
    make_checkpoints(tmp_path / "other", "step-2")
    resume, given = str(folder_of(tmp_path / "other", 2)) if is_named else None, []

    def run(_: Group, main: partial[None], *__: Any) -> Ending | None:
        given.append(main.args[0].training.resume)
        memory_folder.draw_name(tmp_path / "run")
        return None if len(given) == 2 else Ending(1, "died", "error: died")

    monkeypatch.setattr(Group, "run", run)
    cfg = config(tmp_path / "run", resume=resume, memory_checkpoint_every=1)
    Path(cfg.training.output_dir).mkdir()
    assert launch.start_processes(restarting(cfg), 2, LOOP) == 0
    assert given == [resume, resume if is_named else "auto"]


@pytest.mark.parametrize("save_every", [0, 2])
def test_what_fails_after_the_results_are_saved_is_not_started_again(
    save_every, tmp_path, monkeypatch, capsys
):
    starts = []

    def run(_: Group, main: partial[None], *__: Any) -> Ending:
        starts.append(main.args[0].training.resume)
        if save_every and len(starts) == 1:
            make_checkpoints(tmp_path, "step-2")
        else:
            (tmp_path / "model").mkdir()
        return Ending(1, "died", "error: died")

    monkeypatch.setattr(Group, "run", run)
    cfg = config(tmp_path, save_every=save_every)
    assert launch.start_processes(restarting(cfg), 2, LOOP) == 1
    assert starts == ([None, "auto"] if save_every else [None])
    assert (tmp_path / "model").is_dir()
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == "error: died; the results were saved before, so it does not start again"


def test_results_that_were_there_before_do_not_keep_a_run_from_starting_again(
    tmp_path, monkeypatch
):
    make_checkpoints(tmp_path, "step-2")
    (tmp_path / "model").mkdir()
    endings = iter([Ending(1, "died", "error: died"), None])
    monkeypatch.setattr(Group, "run", lambda *_: next(endings))
    cfg = config(tmp_path, resume="latest")
    assert launch.start_processes(restarting(cfg), 2, LOOP) == 0


STARTER = Path(presets.__file__).parent / "starter"


def _of_pairs(folder: Path, model: str, lora: Lora | None, **training: Any) -> RunConfig:
    return RunConfig(
        Model(model),
        Data(str(folder.parent / "pairs.jsonl"), format="preference", sequence_length=64),
        Training(
            str(folder),
            **{"objective": "dpo", "global_batch_size": 2, "save_every": 1, "device": "cpu"},
            **training,
        ),
        lora=lora,
        optimizer=Optimizer(lr=0.01, lr_schedule="constant"),
        measure=Measure(memory=False),
    )


def _last_line(cfg: RunConfig) -> list[float]:
    Path(cfg.training.output_dir).mkdir(exist_ok=True)
    assert launch.start_processes(cfg, 1, LOOP) == 0
    lines = Path(cfg.training.output_dir, "metrics.jsonl").read_text().splitlines()
    names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected")
    return [json.loads(lines[-1])[name] for name in names]


@pytest.mark.parametrize("is_adapter", [True, False])
def test_a_resume_compares_pairs_with_what_the_run_found(is_adapter, tmp_path, capfd):
    """The reference is in no checkpoint: its files are read again, and must be the same."""
    rows = [{"prompt": f"say {n} ", "chosen": "yes", "rejected": "no no"} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first = _of_pairs(tmp_path / "0", str(CONFIGS / "tiny-qwen3_5"), None, steps=1)
    drawn = replace(first.model, init="random", tokenizer=str(STARTER))
    _last_line(replace(first, model=drawn))
    lora, model = None, str(tmp_path / "0" / "model")
    source = Path(model, "model.safetensors")
    if is_adapter:
        _last_line(_of_pairs(tmp_path / "1", model, Lora(r=2), steps=2))
        lora = Lora(path=str(tmp_path / "1" / "adapter"))
        source = tmp_path / "1" / "adapter" / "adapter_model.safetensors"
    whole = _last_line(_of_pairs(tmp_path / "a", model, lora, steps=3))
    _last_line(_of_pairs(tmp_path / "b", model, lora, steps=2))
    assert whole == _last_line(_of_pairs(tmp_path / "b", model, lora, steps=3, resume="latest"))
    assert whole[2] != 0.0
    tensors = {name: values + 1e-3 for name, values in load_file(source).items()}
    save_file(tensors, source, {"format": "pt"})
    more = _of_pairs(tmp_path / "b", model, lora, steps=4, resume="latest")
    assert launch.start_processes(more, 1, LOOP) == 2
    assert f"{source.name} is not what checkpoint" in capfd.readouterr().err
