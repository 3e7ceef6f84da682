"""References that are kept on disk are those of this code, and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.parity import harness, references
from tests.parity.harness import Cell, Outcome
from tests.parity.references import ROOT
from tests.test_architecture import imports

CELL = Cell("llama", "single", "lora")
OUTCOME = Outcome(
    [1.0, 0.1], [2.0], 3.0, {"a": torch.tensor([1.5, float("inf")])}, {"b": torch.ones(2, 3)}, {}
)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Cell]:
    """Which cells are computed, of a folder of references that is empty."""
    cells: list[Cell] = []

    def run_ranks(_world_size: int, _function: object, cell: Cell) -> list[Outcome]:
        cells.append(cell)
        return [OUTCOME]

    monkeypatch.setattr(references, "run_ranks", run_ranks)
    monkeypatch.setattr(references, "FOLDER", tmp_path / "kept")
    return cells


def ask(cell: Cell = CELL) -> Outcome:
    """As a process asks that has not asked before."""
    return references.reference.__wrapped__(cell)


def files() -> list[Path]:
    return [path for path in references.FOLDER.rglob("*") if path.is_file()]


def test_a_second_process_reads_what_the_first_computed(computed):
    for _ in range(2):
        found = ask()
        assert (found.losses, found.norms, found.eval_loss) == (
            OUTCOME.losses,
            OUTCOME.norms,
            OUTCOME.eval_loss,
        )
        assert torch.equal(found.grads["a"], OUTCOME.grads["a"])
        assert torch.equal(found.params["b"], OUTCOME.params["b"])
    assert computed == [CELL]


def test_what_is_computed_together_is_read_by_whoever_asks(computed, monkeypatch):
    other = Cell("llama", "single", "full")
    together: list[tuple[Cell, ...]] = []

    def run_together(cells):
        together.append(cells)
        return dict.fromkeys(cells, (OUTCOME,))

    monkeypatch.setattr(references, "run_together", run_together)
    ask()
    for _ in range(2):
        references.compute_together([CELL, other, other])
    assert ask(other).losses == OUTCOME.losses
    assert (computed, together) == ([CELL], [(other,)])


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-5], lambda content: content[:40] + b"!" + content[41:]]
)
def test_a_damaged_file_is_computed_again(computed, damage):
    ask()
    (file,) = files()
    file.write_bytes(damage(file.read_bytes()))
    ask()
    ask()
    assert computed == [CELL] * 2


@pytest.mark.parametrize("name", ["fingerprint", "_cpu"])
def test_other_code_or_another_cpu_is_another_reference(computed, name, monkeypatch):
    references._machine_and_code.cache_clear()
    ask()
    old = files()
    monkeypatch.setattr(references, name, lambda: "other")
    references._machine_and_code.cache_clear()
    ask()
    references._machine_and_code.cache_clear()
    assert computed == [CELL] * 2
    assert not set(old) & set(files())  # nor is the old one kept


def test_another_model_under_the_same_name_is_another_reference(computed, monkeypatch, tmp_path):
    model = json.loads((harness.CONFIGS / "tiny-llama" / "config.json").read_text())
    monkeypatch.setitem(harness.FAMILIES, "llama", str(tmp_path))
    for width in (64, 128):
        (tmp_path / "config.json").write_text(json.dumps(model | {"intermediate_size": width}))
        ask()
    assert len(computed) == 2


def test_no_cell_imports_what_its_fingerprint_leaves_out():
    left, seen = [ROOT / "tests" / "parity" / "harness.py"], set()
    while left:
        path = left.pop()
        # Of an imported name, the module is all of it or all but its end.
        names = [Path(ROOT, "src", *name.split(".")) for name in imports(path)]
        modules = [module for name in names for module in (name, name.parent)]
        paths = [path for at in modules for path in (at.with_suffix(".py"), at / "__init__.py")]
        files = {path for path in paths if "shardwise" in path.parts and path.exists()}
        files.discard(ROOT / "src" / "shardwise" / "__init__.py")  # imports names on demand
        left += files - seen
        seen |= files
    parts = {part for path in seen for part in path.relative_to(ROOT).parts}
    assert "parallel" in parts
    assert not parts & references.NOT_IN_A_CELL
