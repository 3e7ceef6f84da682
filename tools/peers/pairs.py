"""Pairs of answers by shardwise and by TRL's DPOTrainer: seconds of a step, and its memory.

    python -m tools.peers.pairs [--rounds 3] [--out results/peers/pairs.json]

Two models of some 50 million random weights get LoRA on all linears of their layers, in float32, on
one process and by DDP on two. `dpo` and `trl` have the same weights, adapters, pairs (`PAIRS` a
rank in a step, each a row) and optimizer; `sft` is ours on the rows of `dpo`. Each side of each
round runs in processes of its own of one thread, and the sides take turns.
"""

from __future__ import annotations

import json
import random
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from tests.models.test_preferences import document
from tokenizers import Tokenizer, models, pre_tokenizers
from tools.paired import Results, command_line, table, turns
from tools.peers import __main__ as peers
from tools.peers.sides import MAX_NORM, ROOT, TIMED, WARM_UP, Side
from tools.peers.trainer import Watching
from tools.peers.work import CPU, Watch, Work
from tools.plan_pages import with_table
from tools.speed_of_cores import COMMON, LAYERS, MODELS, plain_model
from transformers import PreTrainedTokenizerFast

from shardwise.assembly.build import build as build_job
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.data.packing import RowLengths, row_of, to_batch
from shardwise.metrics.hardware import environment
from shardwise.models import load
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step

HYBRID = {"model_type": "qwen3_5_text", "layer_types": LAYERS, **COMMON, **MODELS["qwen3_5_text"]}
LLAMA = {"model_type": "llama", **COMMON, "num_key_value_heads": 2, "head_dim": 64}
SHAPES = {"llama": LLAMA, "hybrid": HYBRID}
NAMES, PAIRS, LENGTH, END = ("dpo", "trl", "sft"), 2, 512, COMMON["vocab_size"] - 1
PAGE, START = ROOT / "docs" / "guides" / "preferences.md", "<!-- tools/peers/pairs.py -->"
HEAD = ("model", "processes", "time over TRL's", "peak over TRL's", "peak over `sft`'s")


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "peers" / "pairs.json")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "trl")}
    work = {"pairs": PAIRS, "sequence_length": LENGTH, "lora_r": 16, "shapes": SHAPES}
    equal = {"environment": environment(), "versions": versions, "work": work}
    results = Results(options.out, {**equal, "rounds": options.rounds})
    for number, (model, ranks, name) in turns([*product(SHAPES, (1, 2), NAMES)], options.rounds):
        measure = partial(peers.run, Side(name, "pairs", f"{name}/{model}", ranks), "lora", False)
        results.add(f"{number}/{model}/{ranks}/{name}", partial(measure, untimed=False))
    results.write()
    PAGE.write_text(with_table(PAGE.read_text(), [lines(results.rows)], START))


def lines(rows: dict[str, Any]) -> str:
    """Return the table: medians over rounds, of times with the smallest and the largest."""
    cells = []
    for model, ranks in product(SHAPES, "12"):
        taken = [[r for c, r in rows.items() if c.endswith(f"{model}/{ranks}/{n}")] for n in NAMES]
        ours, trl, _ = ([median(r["seconds"][WARM_UP:][:TIMED]) for r in side] for side in taken)
        peak, by_trl, by_sft = (median(max(r["peak_bytes"]) for r in side) for side in taken)
        times = sorted(a / b for a, b in zip(ours, trl, strict=True))
        time = f"{median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"
        cells.append([model, ranks, time, f"{peak / by_trl:.2f}", f"{peak / by_sft:.2f}"])
    return table(HEAD, cells)


def pair(number: int) -> list[list[int]]:
    """Return a prompt and both answers, of random tokens and lengths; answers end with END."""
    drawn = random.Random(number)
    sizes = [drawn.randrange(16, most) for most in (48, 96, 96)]
    prompt, *answers = [[drawn.randrange(END) for _ in range(size)] for size in sizes]
    return [prompt, *([*answer, END] for answer in answers)]


def build(work: Work) -> Any:
    """Return a model, and our run, job and mesh or TRL's trainer."""
    name, model = work.option.split("/")
    folder = Path(work.folder, f"model-{work.rank}")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[model]), encoding="utf-8")
    form: Any = {"format": "text" if name == "sft" else "preference", "packing": "none"}
    size: Any = {"global_batch_size": PAIRS * work.num_ranks, "micro_batch_size": PAIRS}
    size |= {"objective": "sft" if name == "sft" else "dpo", "device": "cpu"}
    cfg = RunConfig(
        Model(str(folder), init="random"),
        Data("unused", sequence_length=LENGTH, **form),
        Training("unused", **size),
        lora=Lora(r=16, alpha=32, targets="all-linear"),
        parallel=Parallel("ddp" if name != "trl" and work.num_ranks > 1 else "single"),
        optimizer=Optimizer(lr=work.learning_rate, lr_schedule="constant", max_grad_norm=MAX_NORM),
    )
    if name == "trl":
        return trainer(cfg, work)
    mesh = build_mesh(cfg, CPU)
    job = build_job(cfg, mesh)
    return job.pm.parts[0], cfg, job, mesh


def train(built: Any, batches: list[Any], watch: Watch, work: Work) -> Any:
    """Train as many steps as there are batches, on the pairs that their numbers draw."""
    if len(built) == 2:
        return built[1].add_callback(Watching(watch)) or built[1].train()
    _, cfg, job, mesh = built
    for step in range(len(batches)):
        first = (step * work.num_ranks + work.rank) * PAIRS
        rows = [row_of([document(*pair(n))], LENGTH, 0) for n in range(first, first + PAIRS)]
        batch = to_batch(RowLengths.of(cfg).cut(rows), range(PAIRS), step + 1)
        watch.begin()
        result = training_step(job, [batch], mesh, MAX_NORM)
        watch.end()
        watch.took(result.loss, result.grad_norm)
    return None


def trainer(cfg: RunConfig, work: Work) -> Any:
    """Return TRL's trainer, whose reference is the model with its adapters off."""
    from trl import DPOConfig, DPOTrainer

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(END)} | {"</s>": END}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>", "pad_token": "w0", "unk_token": "w0"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    found = [pair(n) for n in range((WARM_UP + TIMED + 1) * PAIRS * work.num_ranks)]
    texts = [["".join(f"w{n} " for n in tokens if n != END) for tokens in one] for one in found]
    columns = zip(("prompt", "chosen", "rejected"), map(list, zip(*texts)), strict=True)
    arguments = DPOConfig(
        work.folder,
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "beta": 0.1},
        **{"per_device_train_batch_size": PAIRS, "max_length": LENGTH, "num_train_epochs": 1},
        **{"learning_rate": work.learning_rate, "lr_scheduler_type": "constant"},
        **{"max_grad_norm": MAX_NORM, "train_sampling_strategy": "sequential"},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
    )
    adapted = plain_model(cfg)
    built = DPOTrainer(
        load.load_whole(cfg.model, load.read_config(cfg.model), cfg.training.seed),
        args=arguments,
        train_dataset=Dataset.from_dict(dict(columns)),
        processing_class=tokenizer,
        peft_config=adapted.peft_config["default"],
    )
    set_peft_model_state_dict(built.model, get_peft_model_state_dict(adapted))
    return built.model, built


if __name__ == "__main__":
    main()
