"""Train a small hybrid model from scratch, LoRA-tune it under nine strategies, and draw the
comparison.

`make demo` runs this from the repository's root, `make demo MODEL=FOLDER` on the model of another
config.json, which is to be as small. Everything else it reads comes with Python; it writes below
runs/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

RUNS = Path("runs/demo")
BENCH = RUNS / "bench"
MODEL = "configs/models/demo-hybrid"
# nats that the tuning takes off the validation loss of the demo's own model; another's has to fall
LEAST_GAIN = 0.2


def main() -> int:
    """Prepare, train, tune, compare; returns 1 if a strategy failed or did not learn, 2 if there is
    no such model.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default=MODEL, help=f"folder with a config.json (default: {MODEL})"
    )
    model = parser.parse_args().model
    if not Path(model, "config.json").is_file():
        print(
            f"error: {model}: no folder with a config.json; configs/models has some",
            file=sys.stderr,
        )
        return 2
    start = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # in all cells, on one process too
    shutil.rmtree(RUNS, ignore_errors=True)
    say("a corpus and a tokenizer from Python's own source")
    run("examples/corpus.py")
    say(f"base model, from scratch: {model}")
    run("-m", "shardwise", "train", "configs/demo/base.yaml", "--nproc=2", f"--model.path={model}")
    say("how long its layers take here, for the split of the pipeline")
    os.environ["SHARDWISE_CACHE"] = str((RUNS / "profiles").absolute())
    # A model that no pipeline takes has none, and the other strategies are compared all the same.
    profile = ["split", "configs/demo/lora.yaml", "--profile", "--parallel.pp=2"]
    run("-m", "shardwise", *profile, is_needed=False)
    say("LoRA on it, once under each strategy")
    run("-m", "shardwise", "bench", "configs/demo/sweep.yaml", f"--out={BENCH}")
    run("-m", "shardwise", "report", str(BENCH), "-o", str(RUNS / "report.html"))
    least = LEAST_GAIN if model == MODEL else 0.0
    failed = [
        folder.name
        for folder in sorted(BENCH.iterdir())
        if folder.is_dir() and not learned(folder, least)
    ]
    print(f"{time.monotonic() - start:.0f} s in all; the page: {RUNS / 'report.html'}")
    if failed:
        print(
            f"not ok, or validation loss did not fall by more than {least} nats: "
            f"{', '.join(failed)}"
        )
    return 1 if failed else 0


def say(line: str) -> None:
    """A heading between the outputs of commands."""
    print(f"\n== {line}", flush=True)


def run(*arguments: str, is_needed: bool = True) -> None:
    """Print a command as it would be typed and run it.

    Its message of a mistake ends the demo if it is needed.
    """
    shown = ["shardwise", *arguments[2:]] if arguments[0] == "-m" else ["python", *arguments]
    print("$", *shown, flush=True)
    code = subprocess.run([sys.executable, *arguments], check=False).returncode
    if code and is_needed:
        sys.exit(code)


def learned(cell: Path, least: float) -> bool:
    """Return whether a cell succeeded and its validation loss fell by more than `least` nats."""
    record = json.loads((cell / "record.json").read_text())
    return (
        record["status"] == "ok" and record["eval"][0]["loss"] - record["eval"][-1]["loss"] > least
    )


if __name__ == "__main__":
    sys.exit(main())
