"""A stand-in for `shardwise train`: writes a record at once, or ends as `training.sample` says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml


def main() -> None:
    cfg = yaml.safe_load(Path(sys.argv[1]).read_text())
    (option,) = (a for a in sys.argv[2:] if a.startswith("--training.output_dir="))
    out = Path(yaml.safe_load(option.partition("=")[2]))
    print("starting")
    end = cfg["training"]["sample"] or "ok"
    number = int(out.name.removeprefix("round-"))
    slept = out.parent / "slept"
    if end == "sleep" or (end == "sleep once" and not slept.exists()):
        slept.touch()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (out / "pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    if end.startswith("exit"):
        print(f"error: {end}", file=sys.stderr)
        sys.exit(int(end.split()[1]))
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "later" and number == 2:
        sys.exit(1)
    record = {
        "status": "ok",
        "config": cfg,
        "schema_version": 1,
        "losses": [2.0, 1.0],
        "tokens_per_second": 100.0 * number,
        "peak_memory_bytes": None if "--measure.memory=false" in sys.argv else [2**20],
    }
    (out / "record.json").write_text(json.dumps(record))
    sys.exit(1 if end == "late" else 0)


main()
