"""Which tests `make test` leaves out, and one line that says so.

Left out are the rest of full products (marked `slow`), and tests marked `pins`, which show what a
library does and import nothing of shardwise: they can change only with the library or with their
own file. `tests/pins.json` says with which versions and contents they were last green; where that
no longer holds they run.

`make test-quick` leaves out more: files that train, start commands or compile (`NOT_QUICK`), except
tests marked `quick`.

`python -m tests.left_out` (`make pins`) runs the pins whatever the file says, and writes it anew if
they are green.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Container, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LAST_GREEN = ROOT / "tests" / "pins.json"
RUN_ALL = "SHARDWISE_PINS"
"""Environment variable: if set, pins run."""
QUICK = "SHARDWISE_QUICK"
"""Environment variable: if set, tests of `NOT_QUICK` that are not marked `quick` do not run."""
NOT_QUICK = (
    *(
        "tests/benchmark/test_runner.py",
        "tests/gpu",
        "tests/assembly/test_moved.py",
        "tests/integration",
        "tests/parity",
        "tests/test_readme.py",
    ),
    *(
        f"tests/models/{name}.py"
        for name in ("adapters/test_writing", "patches/test_isolation", "test_stage")
    ),
    *(
        f"tests/parallel/test_{name}.py"
        for name in ("accumulate", "activation_checkpoint", "communication", "compile")
    ),
    *(
        f"tests/parallel/test_{name}.py"
        for name in ("fsdp2", "loading", "logits_memory", "state_bytes")
    ),
    *(f"tests/parallel/test_{name}.py" for name in ("tensor_options", "tensor_parallel", "zero")),
    *(
        f"tests/{name}.py"
        for name in (
            *("launch/test_local", "launch/test_torchrun", "training/test_measure"),
            *("process/test_watchdog", "test_library", "training/test_own_loop"),
        )
    ),
)
"""Folders and files of tests; `make test` prints what each costs."""
EXPENSIVE_FIRST = (
    *("parity", "integration", "parallel", "planner", "models", "training"),
    *("kernels", "gpu", "benchmark"),
)
"""Folders in this order, then the others: workers that take a file at a time then end at about the
same time."""


def installed(library: str) -> str:
    """The version without the build (`+cpu`)."""
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return "none"


def state(libraries: tuple[str, ...], file: Path) -> dict[str, str]:
    """All that the pins of a file depend on."""
    return {**{library: installed(library) for library in libraries}, "content": content_of(file)}


def content_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def key(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def libraries_of(item: pytest.Item) -> tuple[str, ...]:
    """The libraries whose behaviour a test pins; () for every other test."""
    marker = item.get_closest_marker("pins")
    return () if marker is None else marker.args


def some_now(every: Iterable[Any], now: Container[Any]) -> list[Any]:
    """Return a test's parameters: `make test` runs those in `now`, `make parity` the rest."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.slow] * (case not in now),
        )
        for case in every
    ]


def is_quick(item: pytest.Item) -> bool:
    return item.get_closest_marker("quick") is not None


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    return EXPENSIVE_FIRST.index(folder) if folder in EXPENSIVE_FIRST else len(EXPENSIVE_FIRST)


class LeftOut:
    """A plugin that deselects pins that hold, and counts what is deselected."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.last_green = json.loads(LAST_GREEN.read_text()) if LAST_GREEN.exists() else {}

    @pytest.hookimpl(trylast=True)  # after `-m` and `-k`
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        items.sort(key=_place)
        quick = os.environ.get(QUICK)
        later = [
            item
            for item in items
            if quick and key(item.path).startswith(NOT_QUICK) and not is_quick(item)
        ]
        self.reasons["train, start commands or compile; `make test` runs them"] += len(later)
        holding = [] if os.environ.get(RUN_ALL) else [item for item in items if self._holds(item)]
        for item in holding:
            libraries = " ".join(
                f"{library} {installed(library)}" for library in libraries_of(item)
            )
            self.reasons[
                f"show what {libraries} does and were green with it; `make pins` runs them"
            ] += 1
        if left := {*holding, *later}:
            config.hook.pytest_deselected(items=list(left))
            items[:] = [item for item in items if item not in left]

    def _holds(self, item: pytest.Item) -> bool:
        libraries = libraries_of(item)
        return bool(libraries) and self.last_green.get(key(item.path)) == state(
            libraries, item.path
        )

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        slow = sum(item.get_closest_marker("slow") is not None for item in items)
        self.reasons["are cells of full products; `make parity` runs them"] += slow

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = dict(self.reasons)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.reasons |= Counter(
            getattr(node, "workeroutput", {}).get("left_out", {})
        )  # every worker collects all

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for reason, count in sorted((+self.reasons).items()):
            terminalreporter.write_line(f"left out: {count} tests that {reason}")


def main() -> int:
    os.environ[RUN_ALL] = "1"
    noted = Noted()
    code = pytest.main(["-m", "pins", *sys.argv[1:]], plugins=[noted])
    if code == 0:
        LAST_GREEN.write_text(json.dumps(noted.states, indent=1, sort_keys=True) + "\n")
    return code


class Noted:
    """The states of the files whose pins run."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.states[key(item.path)] = state(libraries_of(item), item.path)


if __name__ == "__main__":
    sys.exit(main())
