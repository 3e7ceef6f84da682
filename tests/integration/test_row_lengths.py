"""Rows without packing end with the longest document of their micro-batch, under every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tools.speed_of_cores import plain_model

from shardwise.assembly.build import build
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint.resume import find_start
from shardwise.config.run_file import parse_config
from shardwise.data import loader
from shardwise.data.loader import build_loaders
from shardwise.data.packing import RowLengths
from shardwise.data.tokenizer import load_tokenizer
from shardwise.metrics.hardware import PeakFlops
from shardwise.parallel.mesh import build_mesh
from shardwise.training import measure
from shardwise.training.step import training_step
from tests.command import run_command
from tests.distributed import run_ranks
from tests.integration.conftest import make_corpus

MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3_next"
"""Recurrent layers, attention, and experts with a router loss."""
LAYOUTS = {
    "single": (),
    "zero1": ("--parallel.data=zero1",),
    "tp": ("--parallel.tp=2", "--parallel.sequence_parallel=true"),
    "pp": ("--parallel.pp=2", "--parallel.schedule=1f1b"),
    "cp": ("--parallel.cp=2",),
    "ep": ("--parallel.data=fsdp2", "--parallel.ep=2"),
}
SENTENCE = "the state of a gated delta rule decays and is corrected by each key and value"
Train = Callable[..., RunRecord]


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Train:
    folder = tmp_path_factory.mktemp("lengths")
    make_corpus(folder)
    # 5 to 200 tokens, a byte each: some longer than a row.
    texts = [(SENTENCE * 3)[: 5 + 13 * (7 * i % 16)] for i in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    run = {
        "model": {"path": str(MODEL), "init": "random", "tokenizer": str(folder / "tokenizer")},
        "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
        "data": {
            "train": str(folder / "texts.jsonl"),
            "packing": "none",
            "validation": 0.1,
            "sequence_length": 192,
        },
        "training": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 1, "device": "cpu"},
    }
    run["model"]["router_aux_loss_coef"] = 0.01
    run["measure"] = {"warmup_steps": 1}
    (folder / "run.yaml").write_text(json.dumps(run))  # JSON is YAML

    def of(name: str, *arguments: str) -> RunRecord:
        nproc = "1" if name.startswith("single") else "2"
        out = f"--training.output_dir={folder / name}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "peak_of", lambda *_: PeakFlops(1.0, "not measured"))
            command = ["train", str(folder / "run.yaml"), "--nproc", nproc, out, *arguments]
            done = run_command(command, {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        return RunRecord.read(folder / name / "record.json")

    return of


@pytest.fixture(scope="module")
def full(train: Train) -> RunRecord:
    """One process whose rows all have `data.sequence_length` positions."""

    def of(cfg):
        return replace(RowLengths.of(cfg), multiple=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "RowLengths", type("Full", (), {"of": of}))
        return train("single-full")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_rows_of_full_length(train: Train, full: RunRecord, layout: str):
    record = train(layout, *LAYOUTS[layout])
    assert record.losses == pytest.approx(full.losses, rel=2e-6)
    assert record.grad_norms == pytest.approx(full.grad_norms, rel=2e-5)
    assert record.eval[-1]["loss"] == pytest.approx(full.eval[-1]["loss"], rel=2e-6)
    assert record.data["train"] == full.data["train"]
    # The work of a token is less where rows are shorter, and so is the share of the peak.
    assert record.flops["model_per_token"] < full.flops["model_per_token"]


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _chats_here_and_there(model: str, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of three steps of ours, and those of transformers, PEFT and torch on rows that are
    padded as TRL's collator does: to the longest of a micro-batch, with labels of -100."""
    training = {"steps": 3, "global_batch_size": 4, "micro_batch_size": 2, "device": "cpu"}
    cfg = parse_config(
        {
            "model": {"path": model, "init": "random", "tokenizer": str(folder / "tokenizer")},
            "lora": {"r": 4, "alpha": 8},
            "data": {
                "train": str(folder / "chats.jsonl"),
                "format": "chat",
                "packing": "none",
                "sequence_length": 256,
                "chat_template": str(folder / "template.jinja"),
            },
            "optimizer": {"lr": 0.01, "lr_schedule": "constant", "max_grad_norm": 1.0},
            "training": training | {"output_dir": str(folder / "out")},
        },
        "chats",
    )
    mesh = build_mesh(cfg, torch.device("cpu"))
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    loaders = build_loaders(cfg, tokenizer, mesh.slots(4), None, 256)
    job = build(cfg, mesh, find_start(cfg).state(), 3)
    with closing(loaders.train):
        steps = [next(loaders.train) for _ in range(3)]
    ours = [training_step(job, batches, mesh, 1.0).loss for batches in steps]

    texts = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    encoded = {}
    for text in texts:
        tokens, prompt = (
            tokenizer.apply_chat_template(messages, return_dict=True, add_generation_prompt=more)
            for messages, more in ((text["messages"], False), (text["messages"][:-1], True))
        )
        encoded[tuple(tokens["input_ids"])] = len(prompt["input_ids"])
    plain = plain_model(cfg)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.01, weight_decay=0)
    theirs = []
    for batches in steps:
        # Which chats a step has is asked of ours, what they are and how they lie side by side not.
        chats = [[_chat_of(row, encoded) for row in batch.input_ids.tolist()] for batch in batches]
        number = sum(len(c) - encoded[c] for rows in chats for c in rows)
        total = 0.0
        for rows, batch in zip(chats, batches, strict=True):
            length = max(map(len, rows))
            assert batch.input_ids.shape[1] < length + 8 < 256
            ids, labels = torch.zeros(2, len(rows), length, dtype=torch.int64)
            mask, labels = torch.zeros_like(ids), torch.full_like(labels, -100)
            for place, chat in enumerate(rows):
                ids[place, : len(chat)], mask[place, : len(chat)] = torch.tensor(chat), 1
                labels[place, encoded[chat] : len(chat)] = torch.tensor(chat[encoded[chat] :])
            loss = plain(
                input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=number
            ).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(total)
    return ours, theirs


def _chat_of(row: list[int], chats: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    (found,) = (chat for chat in chats if list(chat[:-1]) == row[: len(chat) - 1])
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3_5"])
def test_chats_that_are_not_packed_have_the_losses_of_rows_padded_as_trl_does(name, tmp_path):
    make_corpus(tmp_path)
    (tmp_path / "template.jinja").write_text(CHAT_TEMPLATE)
    chats = [
        [
            {"role": "user", "content": f"{number}: {SENTENCE[: 5 + 3 * (5 * number % 12)]}?"},
            {"role": "assistant", "content": (SENTENCE * 2)[number : 20 + 17 * number % 101]},
        ]
        for number in range(20)
    ]
    lines = [json.dumps({"messages": messages}) for messages in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    ((ours, theirs),) = run_ranks(1, _chats_here_and_there, str(MODEL.parent / name), tmp_path)
    assert ours == pytest.approx(theirs, rel=1e-5)
