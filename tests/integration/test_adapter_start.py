"""A run that starts from a saved adapter (`lora.path`): under each layout its factors and its loss
are those of that adapter, and a folder that does not fit is refused before memory is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.assembly.describe import describe
from shardwise.checkpoint.saved_state import SavedState
from shardwise.config import Lora, Optimizer, Parallel, RunConfig, UserError
from shardwise.launch import local
from shardwise.models.adapters import lora, peft_config
from shardwise.models.names import is_magnitude
from tests.distributed import run_ranks
from tests.integration.test_train import CONFIGS, config, run, run_on
from tests.left_out import some_now
from tests.models.tiny import relative_error

SOURCES = {
    "linears": ("tiny-qwen3_5", Lora(r=4, alpha=3.0, rslora=True)),
    "experts": ("tiny-qwen3_next", Lora(r=4, alpha=3.0, targets="all-linear")),
    "dora": ("tiny-qwen3_5", Lora(r=4, alpha=3.0, dora=True)),
    "head": ("tiny-qwen3_next", Lora(r=4, alpha=3.0, modules_to_save=["lm_head"])),
    "sizes": (
        "tiny-qwen3_next",
        Lora(r=4, alpha=3.0, targets={"experts": [2, 5.0], "q_proj": None, "o_proj": [6, 3.0]}),
    ),
}


def of(cfg: RunConfig, model: str, section: Lora) -> RunConfig:
    return replace(cfg, model=replace(cfg.model, path=str(CONFIGS / model)), lora=section)


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, tuple[Path, float]]:
    """The adapter that two steps give, and the validation loss with it, by name."""
    results = {}
    for name, (model, section) in SOURCES.items():
        cfg = of(config(folder, f"source-{name}", steps=2, eval_every=2), model, section)
        record = run_on(1, cfg)
        results[name] = (Path(cfg.training.output_dir) / "adapter", record.eval[-1]["loss"])
    return results


def start(folder: Path, name: str, adapter: Path, of_source: str, parallel: Parallel) -> RunConfig:
    """A run of one step that changes nothing: its learning rate is lost in rounding."""
    cfg = of(
        config(folder, name, steps=1, eval_every=1), SOURCES[of_source][0], Lora(path=str(adapter))
    )
    return replace(cfg, parallel=parallel, optimizer=Optimizer(lr=1e-30))


LAYOUTS = {
    "single": (1, Parallel()),
    "ddp": (2, Parallel("ddp")),
    "zero1": (2, Parallel("zero1")),
    "zero2": (2, Parallel("zero2")),
    "fsdp1": (2, Parallel("fsdp1")),
    "fsdp2": (2, Parallel("fsdp2")),
    "tp": (2, Parallel(tp=2)),
    "tp-sp": (2, Parallel(tp=2, sequence_parallel=True)),
    "pp": (2, Parallel(pp=2)),
    "cp": (2, Parallel(cp=2)),
    "ep": (2, Parallel("ddp", ep=2)),
    "hsdp": (4, Parallel("fsdp2", dp_replicate=2)),
}
CELLS = [
    *((layout, "linears") for layout in ("single", "fsdp1", "tp")),
    *((layout, "experts") for layout in ("fsdp2", "ep")),
    *((layout, "dora") for layout in ("zero1", "tp-sp")),
    ("pp", "head"),
    *((layout, "sizes") for layout in ("tp", "ep")),
]
REST = [
    *((layout, "linears") for layout in ("ddp", "zero2", "fsdp2", "pp", "hsdp", "cp")),
    *((layout, "experts") for layout in ("single", "ddp", "zero2", "tp", "pp", "hsdp", "cp")),
    *((layout, "dora") for layout in ("single", "zero2", "fsdp1", "fsdp2", "hsdp", "tp", "pp")),
    *((layout, "head") for layout in ("single", "fsdp2")),
    *((layout, "sizes") for layout in ("single", "zero2", "fsdp1", "fsdp2", "pp", "hsdp")),
]
"""Cells that only `make parity` runs. Each source is in `CELLS`, and each sort of layout: weights
whole on every rank, flat, sharded, cut by tp, in stages, and experts on other ranks."""


@pytest.mark.parametrize(("layout", "source"), some_now([*CELLS, *REST], CELLS))
def test_a_run_starts_with_the_factors_and_the_loss_of_the_adapter(layout, source, trained, folder):
    adapter, loss = trained[source]
    nproc, parallel = LAYOUTS[layout]
    cfg = start(folder, f"start-{layout}-{source}", adapter, source, parallel)
    record = run_on(nproc, cfg)
    out = Path(cfg.training.output_dir) / "adapter"
    before, after = (load_file(path / "adapter_model.safetensors") for path in (adapter, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert record.eval[-1]["loss"] == pytest.approx(loss, rel=1e-6)
    configs = [json.loads((p / "adapter_config.json").read_text()) for p in (adapter, out)]
    assert configs[0] == configs[1]


def drawn(cfg: RunConfig) -> float:
    """The planted bug: the factors of the file are left out."""

    def left_out(section, base, model, wanted):
        return lora.adapter_weights(model, cfg.training.seed, wanted)

    return _loss_with(cfg, "folder_weights", left_out)


def default_scale(cfg: RunConfig) -> float:
    """The planted bug: the scale is that of the run file's default."""
    section_of = peft_config.section_of

    def unscaled(section, base, model):
        return replace(section_of(section, base, model), alpha=Lora().alpha, rslora=False)

    return _loss_with(cfg, "section_of", unscaled)


def _loss_with(cfg: RunConfig, name: str, function) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"shardwise.models.adapters.peft_config.{name}", function)
        record = run(cfg)
    assert record is not None
    return record.eval[-1]["loss"]


@pytest.mark.parametrize("bug", [drawn, default_scale])
def test_a_planted_bug_changes_the_loss(bug, trained, folder):
    adapter, loss = trained["linears"]
    cfg = start(folder, f"bug-{bug.__name__}", adapter, "linears", Parallel())
    (with_bug,) = run_ranks(1, bug, cfg)
    assert with_bug != pytest.approx(loss, rel=1e-6)


def _config(**changes):
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _tensors(change_tensors):
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change_tensors(tensors, sorted(key for key in tensors if "lora_A" in key)[0])
        save_file(tensors, file)

    return change


def _remove(name: str):
    return lambda folder: (folder / name).unlink()


BAD = {
    "no folder": (shutil.rmtree, r"no adapter_config.json here"),
    "no config": (_remove("adapter_config.json"), r"no adapter_config.json here"),
    "no file": (_remove("adapter_model.safetensors"), r"no adapter_model.safetensors here"),
    "dora without lengths": (_config(use_dora=True), r"the file lacks: .*magnitude"),
    "dora of text": (_config(use_dora="false"), r'use_dora is "false" instead of true or false'),
    "bias": (_config(lora_bias=True), r"has lora_bias"),
    "bias of the base": (_config(bias="all"), r"has bias"),
    "rslora of text": (_config(use_rslora="false"), r'use_rslora is "false" instead of true or'),
    "rank of text": (_config(r="4"), r'r is "4" instead of a whole number'),
    "rank true": (_config(r=True), r"r is true instead of a whole number"),
    "rank 4.0": (_config(r=4.0), r"r is 4.0 instead of a whole number"),
    "rank 0": (_config(r=0), r"r is 0 instead of a whole number"),
    "alpha true": (_config(lora_alpha=True), r"lora_alpha is true instead of a finite number"),
    "alpha nan": (_config(lora_alpha=float("nan")), r"lora_alpha is NaN instead of a finite"),
    "targets of numbers": (_config(target_modules=[1]), r"target_modules is \[1\] instead of"),
    "stacks a number": (_config(target_parameters=3), r"target_parameters is 3 instead of a list"),
    "saved an object": (_config(modules_to_save={"a": 1}), r"modules_to_save is .* instead of"),
    "other method": (_config(peft_type="IA3"), r'peft_type is "IA3"; give'),
    "ranks": (_config(rank_pattern={"q_proj": 2}), r"config's rank: .* \[4, \d+\] instead of"),
    "pissa": (_config(init_lora_weights="pissa"), r"init_lora_weights is pissa"),
    "rank": (_config(r=3), r"\[4, \d+\] instead of \[3, \d+\]"),
    "missing": (_tensors(lambda t, key: t.pop(key)), r"the file lacks: "),
    "surplus": (
        _tensors(lambda t, key: t.update({"base_model.model.other.weight": torch.ones(2)})),
        r"does not read with this config: base_model.model.other",
    ),
    "other model": (
        _tensors(lambda t, key: t.update({key.replace("layers.", "blocks."): t.pop(key)})),
        r"modules that the model does not have: .*blocks",
    ),
    "shape": (
        _tensors(lambda t, key: t.update({key: torch.ones(4, 3)})),
        r"\[4, 3\] instead of \[4, \d+\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_does_not_fit_is_refused(case, trained, folder, tmp_path):
    change, message = BAD[case]
    adapter = tmp_path / "adapter"
    shutil.copytree(trained["linears"][0], adapter)
    change(adapter)
    with pytest.raises(UserError, match=message) as error:
        describe(start(folder, "unused", adapter, "linears", Parallel()), 1)
    assert "\n" not in str(error.value)
    assert "; " in str(error.value)


@pytest.mark.parametrize(
    "given",
    [{"r": 5}, {"alpha": 2.0}, {"targets": "attention"}, {"experts": "shared"}, {"dora": True}],
    ids=str,
)
def test_a_key_that_says_otherwise_is_refused(given, trained, folder):
    cfg = start(folder, "unused", trained["linears"][0], "linears", Parallel())
    cfg = replace(cfg, lora=Lora(path=cfg.lora.path, **given))
    (key,) = given
    with pytest.raises(UserError, match=f"lora.{key} is .*; leave lora.{key} out"):
        describe(cfg, 1)


def test_equal_keys_pass(trained, folder):
    cfg = start(folder, "unused", trained["linears"][0], "linears", Parallel())
    describe(replace(cfg, lora=Lora(path=cfg.lora.path, r=4, alpha=3.0, rslora=True)), 1)


@pytest.fixture(scope="module")
def in_two_parts(trained, folder: Path) -> Callable[[str], RunConfig]:
    """By source: a run of four steps, which has saved step 2, from a copy of an adapter."""

    @cache
    def run_of(source: str) -> RunConfig:
        adapter = folder / f"copy-{source}"
        shutil.copytree(trained[source][0], adapter)
        cfg = config(folder, f"whole-{source}", steps=4, save_every=2, keep_last=9)
        section = Lora(path=str(adapter), kernel="torch")
        cfg = of(cfg, SOURCES[source][0], section)
        run_on(1, cfg)
        return cfg

    return run_of


def resumed(cfg: RunConfig, name: str, step: int = 2, **changes) -> RunConfig:
    """The run from this step on, in a folder of its own."""
    before = Path(cfg.training.output_dir)
    checkpoint = str(before / "checkpoints" / f"step-{step}")
    training = replace(cfg.training, output_dir=str(before.parent / name), resume=checkpoint)
    return replace(cfg, training=training, **changes)


def adapter_of(cfg: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(cfg.training.output_dir) / "adapter" / "adapter_model.safetensors")


def other_rank(folder: Path) -> None:
    _config(r=2, lora_alpha=9.0)(folder)
    _tensors(lambda tensors, key: tensors.pop(key))(folder)


@pytest.mark.parametrize(
    ("change", "source"),
    some_now(
        product((other_rank, shutil.rmtree), ("linears", "dora", "head", "sizes")),
        [(other_rank, "dora"), (shutil.rmtree, "sizes")],
    ),
)
def test_a_resume_needs_no_folder(change, source, in_two_parts):
    """Neither one that was changed nor one that is gone."""
    whole = in_two_parts(source)
    adapter = Path(whole.lora.path)
    kept = adapter.with_name(f"kept-{source}")
    shutil.copytree(adapter, kept)
    change(adapter)
    try:
        cfg = resumed(whole, f"again-{source}-{change.__name__}")
        with pytest.raises(UserError, match=r"lora\.path|no adapter_config"):
            describe(cfg, 1)
        local._prepare(cfg, 1, None, check_signals=lambda: None)
        run_on(1, cfg)
        last = resumed(cfg, f"last-{source}-{change.__name__}", step=4)
        run_on(1, last)  # from a checkpoint of the resumed run: no step is left
    finally:
        shutil.rmtree(adapter, ignore_errors=True)
        kept.rename(adapter)
    expected = adapter_of(whole)
    for again in (cfg, last):
        found = adapter_of(again)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    configs = [Path(c.training.output_dir) / "adapter/adapter_config.json" for c in (whole, last)]
    assert configs[0].read_text() == configs[1].read_text()


@pytest.mark.parametrize("layout", some_now(("tp", "fsdp2", "pp"), ("tp",)))
def test_magnitudes_cross_layouts(layout, in_two_parts):
    whole = in_two_parts("dora")
    nproc, parallel = LAYOUTS[layout]
    cfg = resumed(whole, f"crossed-{layout}", parallel=parallel)
    run_on(nproc, cfg)
    expected, found = adapter_of(whole), adapter_of(cfg)
    assert max(relative_error(found[key], expected[key]) for key in expected) < 1e-4


def magnitudes_lost(cfg: RunConfig) -> None:
    """The planted bug: a resume begins with the lengths of the base's rows."""
    keys = SavedState.keys

    def without(self) -> set[str]:
        return {key for key in keys.fget(self) if not is_magnitude(key)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedState, "keys", property(without))
        run(cfg)


def test_magnitudes_that_are_not_resumed_change_the_result(in_two_parts):
    whole = in_two_parts("dora")
    cfg = resumed(whole, "magnitudes-lost")
    run_ranks(1, magnitudes_lost, cfg)
    expected, found = adapter_of(whole), adapter_of(cfg)
    assert max(relative_error(found[key], expected[key]) for key in expected) > 1e-3
