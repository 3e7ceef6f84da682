"""`make gpu-jet-nemotron`: LoRA steps of Jet-Nemotron-2B's shape on a CUDA device."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from tests.gpu import suite  # noqa: E402
from tests.gpu.__main__ import Program  # noqa: E402
from tests.gpu.suite import Suite, fla_or_torch  # noqa: E402

NAME = "jet_nemotron"
PUBLISHED = {
    "tokens_per_second": 28275,
    "device": "one H100",
    "sequence_length": 4096,
    "differs": "only device and length are known; model code, rows, LoRA and software may differ",
}
"""What a study of others has published of fine-tuning Jet-Nemotron-2B with LoRA."""


def main() -> int:
    return suite.main("tests.gpu.jet_nemotron", __doc__, run)


def run(device: str, folder: Path, scratch: Path) -> int:
    """Time before the tests, which then find fla's kernels tuned."""
    gdn = fla_or_torch() if device == "cuda" else "torch"
    limits = {"draw": 60, "warm": 100, f"timing {gdn}": 200, f"tests {gdn}": 100}
    this = Suite(device, folder, scratch, limits, NAME)
    program = Program(this, NAME, ("shardwise",), only=NAME, more={"published": PUBLISHED})
    return program.run((("timing", gdn), ("tests", gdn)))


if __name__ == "__main__":
    sys.exit(main())
