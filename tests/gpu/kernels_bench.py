"""`make gpu-kernels`: LoRA linears, the loss and LoRA steps, with and without our kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from tests.gpu import suite  # noqa: E402
from tests.gpu.kernels_page import page  # noqa: E402
from tests.gpu.suite import DTYPE, Rows, Suite, fla_or_torch, python  # noqa: E402
from tests.gpu.timing import comparisons, with_figures  # noqa: E402

GDN = fla_or_torch()
LIMITS = {"lora": 170, "loss": 60, "draw": 30, "warm": 80, f"timing {GDN}": 140}
"""Seconds of each stage. The first one compiles and tunes the kernels."""
STEP_SIDES = ("shardwise", "shardwise:peft", "transformers")
"""`shardwise`: with the kernel of `lora.kernel: auto`; after a colon stands another kernel."""
AIMS = {
    "lora": {"times_floor": 1.10, "times_faster_than_peft": 1.35},
    "loss": {"times_less_memory": 4.8, "times_faster": 1.3},
}
"""Of forward and backward together; of the loss with a frozen head, against all logits and torch's
cross entropy."""
NOT_REACHED = {"status": "skipped", "reason": "not reached"}


def main() -> int:
    return suite.main("tests.gpu.kernels_bench", __doc__, body)


def body(device: str, folder: Path, scratch: Path) -> int:
    run = Run(Suite(device, folder, scratch, LIMITS))
    try:
        run.all()
    finally:
        run.save()
    print((folder / "kernels.md").read_text(encoding="utf-8"))
    return run.exit_code()


class Run:
    """The stages, and their results so far."""

    def __init__(self, this: Suite) -> None:
        self.suite = this
        self.stages = dict.fromkeys(("lora", "loss", "step"), NOT_REACHED)
        self.steps: Rows = []

    def all(self) -> None:
        """Run the stages in the order of what is worth most if time runs out."""
        for name in ("lora", "loss"):
            self.stages[name] = self.rows_stage(name)
            self.save()
        self.stages["step"] = self.step()

    def rows_stage(self, name: str) -> dict[str, str]:
        """Let a process measure rows until its limit."""
        command = python(f"tests.gpu.{name}_rows", str(self.file(name)), self.suite.device)
        return self.suite.run(name, command)

    def file(self, name: str) -> Path:
        return self.suite.scratch / f"{name}.json"

    def measured(self, name: str) -> dict[str, Any]:
        """Return what a stage has written so far."""
        path = self.file(name)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": {}}

    def rows(self, name: str, kind: str | None = None) -> Rows:
        rows = self.measured(name)["rows"].values()
        return [row for row in rows if kind is None or row["kind"] == kind]

    def gate(self, side: str) -> str:
        """Return green if linears and loss were right with a side's kernels; else why not."""
        name = side.partition(":")[2] or self.measured("lora").get("auto", "auto")
        if name == "peft" or side == "transformers":
            return "green"
        linears = [row for row in self.rows("lora") if row["side"] == name]
        losses = [row for row in self.rows("loss") if row["side"] == "triton"]
        losses = [row for row in losses if row["status"] != "skipped"]
        wrong = [row for row in linears + losses if row["status"] not in ("ok", "green")]
        if wrong:
            return wrong[0]["reason"]
        return "green" if linears else f"{name} was compared nowhere"

    def step(self) -> dict[str, str]:
        """Time whole LoRA steps, without the sides whose kernels are wrong or cannot run here."""
        if not self.suite.draw():
            return {"status": "failed", "reason": "the model was not drawn"}
        self.suite.warm()
        sides, left_out = [], []
        for side in STEP_SIDES:
            if (gate := self.gate(side)) == "green":
                sides.append(side)
            else:
                row = {"side": side, "gdn": GDN, "checkpointing": "none"}
                left_out.append({**row, "status": "skipped", "reason": gate})

        def keep(rows: Rows) -> None:
            self.steps = rows + left_out
            self.save()

        self.suite.time_steps(GDN, sides, keep, modes=("none",))
        return {"status": "ok", "reason": ""}

    def save(self) -> None:
        """Write every file again."""
        lora = self.measured("lora")
        common = {key: lora.get(key) for key in ("environment", "method")}
        linears = with_ratios(self.rows("lora", "row"))
        content: dict[str, dict[str, Any]] = {
            "lora": {
                **{key: lora.get(key) for key in ("ceilings", "tokens")},
                "aims": AIMS["lora"],
                "gates": self.rows("lora", "gate"),
                "rows": linears,
            },
            "loss": {"aims": AIMS["loss"], "rows": with_gains(self.rows("loss"))},
            "step": self.step_content(),
        }
        for name, entries in content.items():
            content[name] = {**self.stages[name], **common, **entries}
            self.suite.write(f"kernels-{name}", content[name])
        text = page(self.suite.device, common, content)
        (self.suite.folder / "kernels.md").write_text(text, encoding="utf-8")

    def step_content(self) -> dict[str, Any]:
        """Return the rows of whole steps, and a comparison with Trainer for each kernel."""
        workload, facts = self.suite.workload, self.suite.facts
        timed = [row for row in self.steps if row["status"] != "skipped"]
        compared = []
        for side in dict.fromkeys(row["side"] for row in timed):
            if side != "transformers":
                (entry,) = comparisons(timed, self.gate(side), (side, "transformers"))
                compared.append({"side": side, **entry})
        rows = [with_figures(row, workload, facts) for row in self.steps]
        work = {"workload": vars(workload), "dtype": DTYPE}
        return {**facts, **work, "rows": rows, "comparisons": compared}

    def exit_code(self) -> int:
        """Return 0 if nothing failed; a stage that ran out of time has not failed."""
        rows = [*self.rows("lora"), *self.rows("loss"), *self.steps, *self.stages.values()]
        return 1 if {"failed", "red"} & {row["status"] for row in rows} else 0


def with_ratios(rows: Rows) -> Rows:
    """Return LoRA rows with the ratios of their times to the floor and to the frozen and PEFT's."""

    def seconds(row: dict[str, Any]) -> float:
        return row["forward"]["median"] + row["backward"]["median"]

    def key(row: dict[str, Any], side: str) -> tuple[str, str]:
        return json.dumps(row["setting"]), side

    timed = {key(row, row["side"]): seconds(row) for row in rows if row["status"] == "ok"}
    results = []
    for row in rows:
        ratios = {}
        if row["status"] == "ok":
            ratios["times_floor"] = seconds(row) / sum(row["floor"].values())
            for side in ("frozen", "peft", "peft bfloat16"):
                if key(row, side) in timed:
                    name = f"times_faster_than_{side.replace(' ', '_')}"
                    ratios[name] = timed[key(row, side)] / seconds(row)
        results.append({**row, **ratios})
    return results


def with_gains(rows: Rows) -> Rows:
    """Return loss rows with how many times less memory and time they take than all logits."""
    ok = [row for row in rows if row["status"] == "ok"]
    eager = {json.dumps(row["head"]): row for row in ok if row["side"] == "eager"}
    results = []
    for row in rows:
        gains = {}
        other = eager.get(json.dumps(row["head"]))
        if row in ok and other is not None:
            gains["times_less_memory"] = other["peak_bytes"] / row["peak_bytes"]
            gains["times_faster"] = other["seconds"]["median"] / row["seconds"]["median"]
        results.append({**row, **gains})
    return results


if __name__ == "__main__":
    sys.exit(main())
