"""`make gpu-kernels`: LoRA linears, the loss and LoRA steps, with shardwise's kernels and without.
See README.md.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from tests.gpu.__main__ import Files, begin, child_environment  # noqa: E402
from tests.gpu.kernels_page import page  # noqa: E402
from tests.gpu.timing import Deadline, comparisons, run_limited, start_side, time_pair, with_figures  # noqa: E402
from tests.gpu.workload import LORA_STEP, REHEARSAL  # noqa: E402

TOTAL_SECONDS = 460
LIMITS = {"lora": 190, "loss": 60, "draw": 60, "step": 200}
"""Seconds each stage may take, as far as the total has them left; the first compiles and tunes the
kernels.
"""
STEP_SIDES = ("shardwise", "shardwise:cuda", "shardwise:peft", "transformers")
"""`shardwise`: with what `lora.kernel: auto` takes; after a colon, what else it is told to take."""
AIMS = {
    "lora": {"times_floor": 1.10, "times_faster_than_peft": 1.35},
    "loss": {"times_less_memory": 4.8, "times_faster": 1.3},
}
"""Of forward and backward together; of the loss with a frozen head, against all logits and torch's
cross entropy.
"""


def main() -> int:
    begun = begin("tests.gpu.kernels_bench", __doc__)
    if begun is None:
        return 2
    device, files = begun
    with tempfile.TemporaryDirectory(prefix="gpu-kernels-") as scratch:
        run = Run(device, files, Path(scratch))
        try:
            run.all()
        finally:
            run.save()
    print((files.folder / "kernels.md").read_text(encoding="utf-8"))
    return run.exit_code()


class Run:
    """The stages, and what has come out so far."""

    def __init__(self, device: str, files: Files, scratch: Path) -> None:
        self.device, self.files, self.scratch = device, files, scratch
        self.deadline = Deadline(TOTAL_SECONDS)
        self.stages: dict[str, dict[str, str]] = {
            name: {"status": "skipped", "reason": "not reached"}
            for name in ("lora", "loss", "step")
        }
        self.facts: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.gdn = "torch" if importlib.util.find_spec("fla") is None else "fla"

    def all(self) -> None:
        """In the order of what is worth most should time run out."""
        for name in ("lora", "loss"):
            self.command(name, f"tests.gpu.{name}_rows", str(self.lines_file(name)), self.device)
            self.save()
        self.step()

    def limit(self, name: str) -> float:
        """Seconds for a stage that begins now."""
        print(f"--- {name} ({self.deadline.left():.0f} s left)", flush=True)
        return self.deadline.left(LIMITS[name])

    def command(self, stage: str, module: str, *arguments: str) -> None:
        """Run a module to its end or to its limit."""
        log = self.scratch / f"{stage}.log"
        command = [sys.executable, "-m", module, *arguments]
        status, reason = run_limited(command, child_environment(), log, self.limit(stage))
        print(log.read_text(errors="replace")[-3000:], flush=True)
        self.stages[stage] = {"status": status, "reason": reason}

    def lines_file(self, stage: str) -> Path:
        return self.scratch / f"{stage}.jsonl"

    def lines(self, stage: str) -> list[dict[str, Any]]:
        """What a stage has written so far; a line that was cut off is left out."""
        path = self.lines_file(stage)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def gate(self, side: str) -> str:
        """Whether LoRA linears came out right with a side's kernels wherever they were compared:
        green, or why not.
        """
        lora = self.lines("lora")
        name = side.partition(":")[2] or next(
            (line["auto"] for line in lora if line["kind"] == "environment"), "auto"
        )
        if name == "peft" or side == "transformers":
            return "green"
        rows = [line for line in lora if line.get("side") == name]
        loss = [
            line
            for line in self.lines("loss")
            if line["side"] == "triton" and line["status"] != "skipped"
        ]
        wrong = [line["reason"] for line in rows + loss if line["status"] not in ("ok", "green")]
        return (wrong or ["green"])[0] if rows else f"{name} was compared nowhere"

    def step(self) -> None:
        """Whole LoRA steps, all sides in turns; a side whose kernels are wrong or cannot run here
        is left out.
        """
        drawn = self.scratch / "model"
        drawn.mkdir()
        self.command("draw", "tests.gpu.draw", str(drawn), self.device)
        if self.stages.pop("draw")["status"] != "ok":
            self.stages["step"] = {"status": "failed", "reason": "the model was not drawn"}
            return
        self.facts = json.loads((drawn / "facts.json").read_text())
        sides = [side for side in STEP_SIDES if self.gate(side) == "green"]
        left_out = [
            {
                "side": side,
                "gdn": self.gdn,
                "checkpointing": "none",
                "status": "skipped",
                "reason": self.gate(side),
            }
            for side in STEP_SIDES
            if side not in sides
        ]

        def keep(rows: list[dict[str, Any]]) -> None:
            self.steps = rows + left_out
            self.save()

        env = child_environment()
        time_pair(
            self.gdn,
            LORA_STEP if self.device == "cuda" else REHEARSAL,
            lambda side, gdn: start_side(side, gdn, drawn, self.device, env),
            self.deadline,
            self.limit("step"),
            keep,
            sides,
            ("none",),
        )
        self.stages["step"] = {"status": "ok", "reason": ""}

    def save(self) -> None:
        """Write every file anew."""
        lora, loss = self.lines("lora"), self.lines("loss")
        head = next((line for line in lora if line["kind"] == "environment"), {})
        common = {"environment": head.get("environment"), "method": head.get("method")}
        workload = LORA_STEP if self.device == "cuda" else REHEARSAL
        content: dict[str, dict[str, Any]] = {
            "lora": {
                "ceilings": next((line for line in lora if line["kind"] == "ceilings"), None),
                "tokens": head.get("tokens"),
                "aims": AIMS["lora"],
                "gates": [line for line in lora if line["kind"] == "gate"],
                "rows": with_ratios([line for line in lora if line["kind"] == "row"]),
            },
            "loss": {"aims": AIMS["loss"], "rows": with_gains(loss)},
            "step": {
                **self.facts,
                "workload": vars(workload),
                "dtype": "weights bfloat16, adapters float32, autocast bfloat16",
                "rows": [with_figures(row, workload, self.facts) for row in self.steps],
                "comparisons": [
                    {"side": side, **entry}
                    for side in STEP_SIDES[:-1]
                    if side in {row["side"] for row in self.steps if row["status"] != "skipped"}
                    for entry in comparisons(
                        [row for row in self.steps if row["status"] != "skipped"],
                        self.gate(side),
                        (side, "transformers"),
                    )
                ],
            },
        }
        content = {name: {**self.stages[name], **common, **what} for name, what in content.items()}
        for name, what in content.items():
            self.files.write(f"kernels-{name}.json", what)
        (self.files.folder / "kernels.md").write_text(
            page(self.device, common, content), encoding="utf-8"
        )

    def exit_code(self) -> int:
        """0 if nothing failed; a stage that ran out of time has not failed."""
        rows = [*self.lines("lora"), *self.lines("loss"), *self.steps]
        statuses = [row.get("status", "ok") for row in rows] + [
            stage["status"] for stage in self.stages.values()
        ]
        return 1 if {"failed", "red"} & set(statuses) else 0


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """LoRA rows with what follows from their times: against the floor and against both of PEFT's.
    """

    def seconds(row: dict[str, Any]) -> float:
        return row["forward"]["median"] + row["backward"]["median"]

    timed = {
        (json.dumps(row["setting"]), row["side"]): seconds(row)
        for row in rows
        if row["status"] == "ok"
    }
    found = []
    for row in rows:
        ratios = {}
        if row["status"] == "ok":
            ratios["times_floor"] = seconds(row) / sum(row["floor"].values())
            for side in ("frozen", "peft", "peft bfloat16"):
                other = timed.get((json.dumps(row["setting"]), side))
                if other is not None:
                    ratios[f"times_faster_than_{side.replace(' ', '_')}"] = other / seconds(row)
        found.append({**row, **ratios})
    return found


def with_gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss rows with how much less memory and time they take than the eager one of the same head.
    """
    eager = {
        json.dumps(row["head"]): row
        for row in rows
        if row["side"] == "eager" and row["status"] == "ok"
    }
    found = []
    for row in rows:
        gains = {}
        other = eager.get(json.dumps(row["head"]))
        if row["status"] == "ok" and other is not None:
            gains["times_less_memory"] = other["peak_bytes"] / row["peak_bytes"]
            gains["times_faster"] = other["seconds"]["median"] / row["seconds"]["median"]
        found.append({**row, **gains})
    return found


if __name__ == "__main__":
    sys.exit(main())
