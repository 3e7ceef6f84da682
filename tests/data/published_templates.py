"""Try every chat template of a folder, and print a table of which docs/guides/data.md has the sum.

TRL's package has copies of published templates:

    pip download --no-deps trl && unzip trl-*.whl
    python -m tests.data.published_templates trl/chat_templates
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.data.exact_turns import CASES, outcome


def main() -> int:
    rows, wrong = [], 0
    for file in sorted(Path(sys.argv[1]).glob("*.jinja")):
        if file.stem.endswith("_training"):
            continue  # TRL's own changes of published templates
        results = {name: outcome(file.read_text(), messages) for name, messages in CASES.items()}
        wrong += sum(result.startswith("WRONG") for result in results.values())
        rows.append([file.stem, *results.values()])
    print(f"| template | {' | '.join(CASES)} |\n|{'---|' * (len(CASES) + 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
