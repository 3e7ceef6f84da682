"""Train a small hybrid model from scratch, LoRA-tune it under every strategy, and compare them in one table.

`make demo` runs this from the repository's root. Everything it reads comes with Python; it writes below runs/demo.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

RUNS = Path("runs/demo")
CORPUS_BYTES = 3_000_000
ROWS = {
    "single": (1, ["--parallel.data=single"]),
    # One process again, its micro-batches in the other order: what rounding alone does to a loss curve.
    "noise control": (1, ["--parallel.data=single", "--measure.reverse_microbatches=true"]),
    **{name: (2, [f"--parallel.data={name}"]) for name in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2")},
}


def main() -> int:
    """Prepare, train, tune, compare; returns 1 if a row did not learn."""
    start = time.monotonic()
    console = Console()
    shutil.rmtree(RUNS, ignore_errors=True)
    prepare_corpora()
    train_tokenizer(vocab_size=json.loads(Path("configs/models/demo-hybrid/config.json").read_text())["vocab_size"])
    console.rule("base model: 8 layers, 6 Gated DeltaNet and 2 attention, from scratch")
    train("base", "configs/demo/base.yaml", nproc=2, overrides=[])
    records = {}
    for name, (nproc, overrides) in ROWS.items():
        console.rule(f"LoRA, {name}, {nproc} process{'es' * (nproc > 1)}")
        records[name] = train(name.replace(" ", "-"), "configs/demo/lora.yaml", nproc, overrides)
    rows = [summarise(name, records) for name in ROWS]
    content = {"environment": records["single"]["environment"], "rows": rows}
    (RUNS / "table.json").write_text(json.dumps(content, indent=1) + "\n")
    console.print(table(rows))
    console.print(f"{time.monotonic() - start:.0f} s in all; records below {RUNS}, table in {RUNS / 'table.json'}")
    failed = [row["row"] for row in rows if row["validation_loss_before"] - row["validation_loss"] < 0.3]
    if failed:
        console.print(f"validation loss fell by less than 0.3 nats in: {', '.join(failed)}")
    return 1 if failed else 0


def prepare_corpora() -> None:
    """Python's own source for the base, its language reference for the tuning."""
    from pydoc_data.topics import topics

    folder = RUNS / "python"
    folder.mkdir(parents=True)
    size = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        if size + len(text) > CORPUS_BYTES:
            break
        (folder / file.name).write_text(text, encoding="utf-8")
        size += len(text)
    lines = (json.dumps({"text": text.strip()}) for _, text in sorted(topics.items()))
    (RUNS / "reference.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def train_tokenizer(vocab_size: int) -> None:
    """A byte-level BPE tokenizer of the base's corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train(sorted(map(str, (RUNS / "python").iterdir())), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(RUNS / "tokenizer")


def train(name: str, run_file: str, nproc: int, overrides: list[str]) -> dict:
    """One `shardwise train`, as one would type it; its record."""
    output_dir = RUNS / name
    command = ["shardwise", "train", run_file, f"--training.output_dir={output_dir}", f"--nproc={nproc}", *overrides]
    print("$", " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", *command], check=True)
    return json.loads((output_dir / "record.json").read_text())


def summarise(name: str, records: dict[str, dict]) -> dict:
    """A row of the table from a run's record."""
    record, reference = records[name], records["single"]
    return {
        "row": name,
        "processes": len(record["state_bytes"]),
        "first_loss": record["losses"][0],
        "final_loss": record["losses"][-1],
        "validation_loss_before": record["eval"][0]["loss"],
        "validation_loss": record["eval"][-1]["loss"],
        "largest_difference": max(abs(a - b) for a, b in zip(record["losses"], reference["losses"], strict=True)),
        "trainable": record["parameters"]["trainable"],
        "total": record["parameters"]["total"],
        "tokens_per_second": record["tokens_per_second"],
        "peak_memory_bytes": max(record["peak_memory_bytes"]),
        **{kind: max(rank[kind] for rank in record["state_bytes"]) for kind in ("weights", "gradients", "optimizer")},
    }


def table(rows: list[dict]) -> Table:
    """One column per strategy, narrow enough for 80 characters; bytes are per rank, the largest."""
    mib = 2**20
    lines = {
        "processes": lambda row: str(row["processes"]),
        "loss, first step": lambda row: f"{row['first_loss']:.3f}",
        "loss, last step": lambda row: f"{row['final_loss']:.3f}",
        "difference to single": lambda row: f"{row['largest_difference']:.0e}",
        "validation before": lambda row: f"{row['validation_loss_before']:.3f}",
        "validation after": lambda row: f"{row['validation_loss']:.3f}",
        "tokens/s, all ranks": lambda row: f"{row['tokens_per_second']:,.0f}",
        "peak MiB": lambda row: f"{row['peak_memory_bytes'] / mib:.2f}",
        "weights MiB": lambda row: f"{row['weights'] / mib:.2f}",
        "gradients MiB": lambda row: f"{row['gradients'] / mib:.2f}",
        "optimizer MiB": lambda row: f"{row['optimizer'] / mib:.2f}",
    }
    title = f"LoRA on a hybrid model: {rows[0]['trainable']:,} of {rows[0]['total']:,} parameters are trained"
    result = Table("", *(row["row"] for row in rows), title=title, box=None)
    for column in result.columns[1:]:
        column.justify = "right"
    for name, show in lines.items():
        result.add_row(name, *(show(row) for row in rows))
    return result


if __name__ == "__main__":
    sys.exit(main())
