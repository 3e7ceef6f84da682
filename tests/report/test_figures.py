"""What the figures show: axes that begin at zero, a place for each cell, and captions that hold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from shardwise.drawing.svg import drawing
from shardwise.records.cell import CellRecord, SweepRecord
from shardwise.report.figures import draw_all
from shardwise.report.folder import read_bench
from shardwise.report.panels import Drawn
from shardwise.report.tables import make_rows
from tests.report.conftest import LOSSES, processes, strategies, write

BETTER = "For every hollow mark there is a better choice."


def figures(folder: Path, bench: tuple[SweepRecord, dict[str, CellRecord]]) -> dict[str, Drawn]:
    read = read_bench(write(folder, *bench))
    with drawing():
        return {drawn.name: drawn for drawn in draw_all(read, make_rows(read))}


def without_control() -> tuple[SweepRecord, dict[str, CellRecord]]:
    """A bench whose noise control has not run: nothing but the baseline is checked."""
    sweep, records = strategies()
    return sweep, {name: record for name, record in records.items() if name != "control-single"}


def test_every_axis_of_sizes_begins_at_zero(tmp_path):
    drawn = figures(tmp_path / "a", strategies()) | figures(tmp_path / "b", processes())
    assert {"throughput-memory", "memory-parts", "plane", "steps", "against-nproc"} <= drawn.keys()
    for name in ("throughput-memory", "memory-parts", "plane", "steps"):
        assert all(panel.get_xlim()[0] == 0 for panel in drawn[name].figure.axes), name
    for name in ("plane", "against-nproc"):
        assert all(panel.get_ylim()[0] == 0 for panel in drawn[name].figure.axes), name


def test_the_plane_promises_a_better_choice_only_where_there_is_one(tmp_path):
    assert figures(tmp_path / "all", strategies())["plane"].caption.endswith(BETTER)
    caption = figures(tmp_path / "some", without_control())["plane"].caption
    assert BETTER not in caption
    assert "Unchecked cells" in caption


@pytest.mark.parametrize(("loss", "end"), [(None, 105), (math.nan, None)])
def test_differences_have_a_place_for_each_cell_and_begin_at_zero(tmp_path, loss, end):
    sweep, records = strategies()
    if loss is not None:
        records["zero1"] = dataclasses.replace(records["zero1"], losses=[*LOSSES[:-1], loss])
    _, panel = figures(tmp_path, (sweep, records))["losses"].figure.axes
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert names == ["single", "ddp", "fsdp2", "✗ zero1", "control of single"]
    assert panel.get_xlim()[0] == 0
    shown = [text.get_text() for text in panel.texts]
    assert shown == ["the reference", "0.1", "0.2", "✗ wrong" if end is None else f"{end}", "0.1"]
    assert panel.get_xscale() == ("linear" if end is None else "symlog")
