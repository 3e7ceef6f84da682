"""Whole runs through the loop: what a user gets under each layout, and what he is told when
something is off."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.base.records.record import RunRecord
from shardwise.config import Data, Lora, Measure, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.lab.instruments import INSTRUMENTS
from shardwise.models.save import save_model
from shardwise.parallel.mesh import build_mesh
from shardwise.training import evaluate, loop
from shardwise.training.loop import train
from tests import compiling  # noqa: F401  (what forked processes then need not import)
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models import multimodal
from tests.models.test_carried import MTP, PAST, in_files, write_base
from tests.models.tiny import entries, on_meta, same, tiny
from tests.models.unproven import write_config
from tests.notes import beside_random_base
from tests.parity.harness import CONFIGS

STEPS = 6


def config(
    folder: Path, name: str, layout: str = "single", *, lora: bool = True, **training: Any
) -> RunConfig:
    return RunConfig(
        model=Model(
            str(CONFIGS / "tiny-qwen3_5"), init="random", tokenizer=str(folder / "tokenizer")
        ),
        lora=Lora(r=4, dropout=0.1) if lora else None,
        data=Data(str(folder / "corpus.jsonl"), validation=0.02, sequence_length=32),
        parallel=Parallel(
            "fsdp2" if layout == "hsdp" else layout, dp_replicate=2 if layout == "hsdp" else 1
        ),
        optimizer=Optimizer(lr=1e-2),
        training=Training(
            **{
                "output_dir": str(folder / name),
                "steps": STEPS,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "device": "cpu",
                "eval_every": 3,
                **training,
            }
        ),
        measure=Measure(warmup_steps=2, memory=False),
    )


def run(cfg: RunConfig) -> RunRecord | None:
    Path(cfg.training.output_dir).mkdir(parents=True, exist_ok=True)
    return train(cfg, build_mesh(cfg, torch.device("cpu")), INSTRUMENTS)


def run_on(nproc: int, cfg: RunConfig) -> RunRecord:
    first, *others = run_ranks(nproc, run, cfg)
    assert all(other is None for other in others)
    assert first is not None
    on_disk = RunRecord.read(Path(cfg.training.output_dir) / "record.json")
    assert (on_disk.losses, on_disk.eval, on_disk.step_seconds) == (
        first.losses,
        first.eval,
        first.step_seconds,
    )
    return on_disk


@pytest.fixture(scope="module")
def single(folder) -> RunRecord:
    return run_on(1, config(folder, "single"))


def test_record_of_a_run(folder, single):
    assert single.status == "ok"
    assert len(single.losses) == len(single.grad_norms) == STEPS
    assert [e["step"] for e in single.eval] == [0, 3, 6]
    assert single.eval[-1]["loss"] < single.eval[0]["loss"] - 0.1
    assert all(math.isclose(e["perplexity"], math.exp(e["loss"])) for e in single.eval)
    assert (
        single.parameters["trainable"] + single.parameters["frozen"] == single.parameters["total"]
    )
    assert single.step_seconds is not None
    assert single.step_seconds["steps"] == STEPS - 2
    assert single.tokens_per_second is not None
    assert 0 < single.mfu < single.hfu < 1
    assert "measured here" in single.flops["peak_source"]
    rows = [
        json.loads(line) for line in (folder / "single" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["loss"] for row in rows if "loss" in row] == single.losses
    steps = [row for row in rows if "loss" in row]
    num_rows = single.config["training"]["global_batch_size"]
    for row in steps:
        assert row["samples_per_second"] == pytest.approx(num_rows / row["seconds"])
    timed = [row["seconds"] for row in steps[2:]]
    assert single.samples_per_second == pytest.approx(num_rows * len(timed) / sum(timed))
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == [
        e["loss"] for e in single.eval
    ]


@pytest.fixture(scope="module")
def noise(folder, single) -> RunRecord:
    record = run_on(1, replace_measure(config(folder, "noise"), reverse_microbatches=True))
    adapters = [
        (folder / name / "adapter" / "adapter_model.safetensors").read_bytes()
        for name in ("noise", "single")
    ]
    assert adapters[0] != adapters[1], "the control made no noise"
    return record


def test_what_ddp_sends_is_counted_where_the_warm_up_ends_in_its_second_step(folder):
    """There DDP agrees on its buckets, by a message of C++ that nothing counts."""
    cfg = replace_measure(config(folder, "two", "ddp", steps=3, eval_every=0), memory=True)
    assert cfg.measure.warmup_steps == 2
    record = run_on(2, cfg)
    assert record.sent_bytes_per_step is not None
    assert record.sent_bytes_per_step == record.sent_bytes_by_formula


# Cells of parity compare the steps. What whole runs add, test_resume.py and test_tensor.py have.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "nproc"), [("zero2", 2), ("hsdp", 4), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2)]
)
def test_every_layout_follows_the_same_curve(folder, single, noise, layout, nproc):
    record = run_on(nproc, config(folder, layout, layout, micro_batch_size=1))
    # Under AdamW rounding grows from step to step: as much as the noise control shows, ten times
    # over, is allowed, and in the first step, before any update, plain float32 rounding.
    bound = max(1e-6, *(10 * abs(a - b) for a, b in zip(noise.losses, single.losses)))
    assert max(abs(a - b) for a, b in zip(record.losses, single.losses)) <= bound
    assert math.isclose(record.losses[0], single.losses[0], rel_tol=1e-6)
    assert math.isclose(record.eval[0]["loss"], single.eval[0]["loss"], rel_tol=1e-6)
    assert [e["tokens"] for e in record.eval] == [e["tokens"] for e in single.eval]


def replace_measure(cfg: RunConfig, **changes: Any) -> RunConfig:
    return replace(cfg, measure=replace(cfg.measure, **changes))


def test_two_runs_are_bit_identical(folder, single):
    again = run_on(1, config(folder, "again"))
    assert (again.losses, again.grad_norms, again.eval) == (
        single.losses,
        single.grad_norms,
        single.eval,
    )
    name = "adapter/adapter_model.safetensors"
    assert (folder / "again" / name).read_bytes() == (folder / "single" / name).read_bytes()


@pytest.mark.parametrize("family", some_now(("lfm2", "gpt2", "qwen3_moe"), ("lfm2",)))
def test_whole_runs_of_other_shapes(folder, family, capfd):
    cfg = config(
        folder, family, "fsdp2", steps=2, eval_every=2, checkpointing="full", sample="the state"
    )
    record = run_on(2, replace(cfg, model=replace(cfg.model, path=str(CONFIGS / f"tiny-{family}"))))
    assert record.sample.startswith("the state")
    assert record.flops["model_per_token"] > 0
    assert beside_random_base(record.notes) == ()
    cores = {"short convolution": "torch"} if family == "lfm2" else {}
    experts = {"experts": "loop"} if family == "qwen3_moe" else {}
    assert record.kernels == {"loss": "chunked", **cores, **experts, "lora": "torch"}
    text = ", ".join(f"{name} {kernel}" for name, kernel in record.kernels.items())
    assert f"kernels: {text}\n" in capfd.readouterr().out


def test_a_bias_that_balances_experts_is_kept_by_full_training(folder):
    name, bias = "model.layers.1.mlp.gate.e_score_correction_bias", torch.arange(8) / 7
    base = tiny("tiny-deepseek_v3")
    save_model(on_meta(base), {**entries(base), name: bias}.items(), folder / "biased")
    cfg = config(folder, "kept", "fsdp2", lora=False, steps=1, eval_every=None)
    stored = replace(cfg.model, path=str(folder / "biased"), init="weights")
    run_on(2, replace(cfg, model=stored))
    before, after = (
        load_file(folder / path / "model.safetensors") for path in ("biased", "kept/model")
    )
    assert torch.equal(after[name], bias)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert "model.layers.1.mlp.gate.weight" in changed


def test_heads_of_the_base_are_there_after_a_resume_under_another_layout(folder):
    """And the other weights are trained ones."""
    base = write_base(folder / "base", "glm4_moe", MTP | PAST)
    kinds = {"lora": False, "steps": 2, "save_every": 1}
    first = config(folder, "heads", "fsdp2", **kinds)
    start = str(folder / "heads" / "checkpoints" / "step-1")
    for cfg in (first, config(folder, "heads-resumed", "ddp", resume=start, **kinds)):
        stored = replace(cfg.model, path=str(folder / "base"), init="weights")
        record = run_on(2, replace(cfg, model=stored))
        assert any("6 tensors that Glm4MoeForCausalLM does not load" in n for n in record.notes)
        saved = in_files(Path(cfg.training.output_dir) / "model")
        assert saved.keys() == base.keys()
        assert same({key: saved[key] for key in MTP | PAST}, MTP | PAST)
        assert not torch.equal(saved["lm_head.weight"], base["lm_head.weight"])


def test_documents_that_were_left_out_are_counted_whatever_the_ranks(folder, capfd):
    lines = ["not JSON" if i % 5 == 0 else json.dumps({"text": "the state"}) for i in range(20)]
    (folder / "broken.jsonl").write_text("\n".join(lines))
    (folder / "held-out.jsonl").write_text("\n".join(lines[:6]))
    data = Data(
        str(folder / "broken.jsonl"), validation=str(folder / "held-out.jsonl"), sequence_length=32
    )
    data = replace(data, on_error="skip", packing="none")
    one, two = (
        run_on(
            nproc,
            replace(
                replace_measure(config(folder, f"broken-{nproc}", layout, steps=3), memory=True),
                data=data,
            ),
        )
        for nproc, layout in ((1, "single"), (2, "ddp"))
    )
    assert one.data == two.data
    documents = {
        "epochs": None,
        "epochs_by_entry": None,
        "rows": 4,
        "padding": None,
        "documents_begun": 6,
        "documents_finished": 6,
        "documents_long": 0,
        "documents_skipped": 2,
    }
    assert one.data["validation"] == {**documents, "skipped_by_reason": {"not JSON": 2}}
    # A row holds one document: 3 steps of 8 rows took 24, and the step that memory is measured in
    # does not count.
    read = one.data["train"]
    skipped, finished = read["documents_skipped"], read["documents_finished"]
    assert read["rows"] == finished - skipped == 24
    assert read["skipped_by_reason"] == {"not JSON": skipped}
    assert skipped > 0
    shown = capfd.readouterr().out
    padding = f"{read['padding']:.1%} padding"
    documents = f"{finished} begun, {finished} finished, {skipped} left"
    assert shown.count(f"epochs; 24 rows, {padding}; documents: {documents}") == 2
    assert (
        shown.count(
            "data.validation: 4 rows; documents: 6 begun, 6 finished, 2 left out (2 not JSON)"
        )
        == 2
    )


def test_a_run_of_a_family_that_is_not_listed_says_so(folder, tmp_path, capfd):
    cfg = config(folder, "ministral", "ddp", steps=2, eval_every=2, sample="the state")
    record = run_on(
        2, replace(cfg, model=replace(cfg.model, path=str(write_config("ministral", tmp_path))))
    )
    assert len(record.losses) == 2
    assert record.sample.startswith("the state")
    assert (record.mfu, record.hfu, record.flops) == (None, None, None)
    assert record.parameters["trainable"] == record.lora["trainable"]
    (note,) = beside_random_base(record.notes)
    assert note.startswith("family ministral is not proven here")
    assert f"note: {note}" in " ".join(capfd.readouterr().out.split())


def test_mfu_is_null_where_documents_are_isolated(folder):
    cfg = config(folder, "isolated", steps=2)
    record = run_on(1, replace(cfg, data=replace(cfg.data, packing="isolated")))
    assert len(record.losses) == 2
    assert (record.mfu, record.hfu, record.flops) == (None, None, None)
    (note,) = beside_random_base(record.notes)
    assert note.startswith("data.packing isolated: no FLOPs are counted")


def test_full_training_in_bfloat16_with_checkpointing_memory_and_a_sample(folder):
    cfg = config(
        folder,
        "full",
        "fsdp2",
        lora=False,
        steps=3,
        precision="bfloat16",
        checkpointing="full",
        sample="the state",
    )
    record = run_on(2, replace_measure(cfg, memory=True, trackers=["tensorboard"]))
    assert record.losses[-1] < record.losses[0]
    assert record.sample is not None
    assert record.sample.startswith("the state")
    assert record.peak_memory_bytes is not None
    assert record.state_bytes is not None
    assert [s["gradients"] for s in record.state_bytes] == [
        s["weights"] for s in record.state_bytes
    ]
    assert all(
        peak > sum(s.values()) for peak, s in zip(record.peak_memory_bytes, record.state_bytes)
    )
    assert record.memory_parts is not None
    assert [sum(parts.values()) for parts in record.memory_parts] == record.peak_memory_bytes
    assert record.sent_bytes_per_step == record.sent_bytes_by_formula
    assert record.sent_bytes_per_step[0] > max(s["weights"] for s in record.state_bytes)
    assert record.first_step_seconds > 0
    assert record.hfu > record.mfu
    assert list((folder / "full" / "tensorboard").glob("events*"))
    assert (folder / "full" / "model" / "tokenizer.json").is_file()
    _, info = AutoModelForCausalLM.from_pretrained(
        folder / "full" / "model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_a_loss_that_is_not_finite_stops_every_rank_with_step_and_file(folder):
    cfg = config(folder, "diverges", "ddp")
    with pytest.raises(
        RuntimeError,
        match=r"UserError: step \d: loss .*; this rank's rows .*rank-\d.json; .*optimizer\.lr",
    ):
        run_on(
            2,
            replace(
                cfg,
                optimizer=replace(
                    cfg.optimizer, name="sgd", lr=1e6, weight_decay=1.0, max_grad_norm=None
                ),
            ),
        )
    files = sorted((folder / "diverges").glob("non-finite-step-*.json"))
    assert [file.stem[-6:] for file in files] == ["rank-0", "rank-1"]
    assert len(json.loads(files[0].read_text())["rows"]) == 4


@pytest.mark.slow  # tests/parallel/test_compile.py has rows of several lengths
def test_a_compiled_run_has_a_sample(folder, monkeypatch):
    monkeypatch.setattr(evaluate, "SAMPLE_TOKENS", 48)
    # 48 rows, each of another length: as many versions of a compiled layer would be too many (8 for
    # each of 4 layers).
    cfg = config(folder, "compiled", steps=1, eval_every=0, compile="aot_eager", sample="the state")
    record = run_on(1, replace(cfg, model=replace(cfg.model, path=str(CONFIGS / "tiny-llama"))))
    assert record.sample is not None
    assert len(record.sample) > len("the state")


def test_what_fails_after_training_does_not_cost_the_record(folder, monkeypatch):
    def fails(*args: object) -> str:
        raise LookupError("no sample")

    monkeypatch.setattr(loop, "greedy_sample", fails)
    with pytest.raises(RuntimeError, match="no sample"):
        run_on(1, config(folder, "failing", steps=2, sample="the state"))
    record = RunRecord.read(folder / "failing" / "record.json")
    assert (record.status, len(record.losses), record.sample) == ("ok", 2, None)
    assert (folder / "failing" / "adapter").exists()


def test_a_run_on_a_multimodal_folder_saves_its_class_and_resumes(folder, tmp_path):
    multimodal.write(tmp_path / "base")
    model = Model(str(tmp_path / "base"), tokenizer=str(folder / "tokenizer"))
    lora = {"save_every": 2, "eval_every": 0, "steps": 4}
    one = replace(config(tmp_path, "one", **lora), model=model)
    one = replace(one, data=replace(one.data, train=str(folder / "corpus.jsonl")))
    run_on(1, one)
    resume = str(tmp_path / "one" / "checkpoints" / "step-2")
    other_training = replace(one.training, output_dir=str(tmp_path / "other"), resume=resume)
    run_on(1, replace(one, training=other_training))
    files = [tmp_path / n / "adapter" / "adapter_model.safetensors" for n in ("one", "other")]
    tensors, resumed = map(load_file, files)
    assert all(k.startswith("base_model.model.model.language_model.layers.") for k in tensors)
    assert same(tensors, resumed)
    full = replace(one.training, output_dir=str(tmp_path / "full"), steps=1, save_every=0)
    run_on(1, replace(one, lora=None, training=full))
    saved, before = (multimodal.entries(tmp_path / n) for n in ("full/model", "base"))
    assert saved.keys() == before.keys()
    changed = {key for key in saved if not torch.equal(saved[key], before[key])}
    assert changed
    assert all(key.startswith(("model.language_model.", "lm_head.")) for key in changed)
