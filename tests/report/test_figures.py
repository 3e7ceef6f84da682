"""What the figures show: axes that begin at zero, a place for each cell, and captions that hold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from shardwise.drawing.svg import colour, drawing
from shardwise.records.cell import CellRecord, SweepRecord
from shardwise.report.figures import draw_all
from shardwise.report.folder import read_bench
from shardwise.report.panels import Drawn
from shardwise.report.tables import make_rows
from tests.report.conftest import LOSSES, STEPS, mixtures, processes, strategies, write


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


def test_loads_of_experts_are_drawn_over_the_steps(tmp_path):
    panels = figures(tmp_path, mixtures())["routing"].figure.axes
    assert len(panels) == 6  # two groups of cells, three numbers
    for panel in panels:
        assert panel.get_ylim()[0] == 0
    assert [len(panel.lines) for panel in panels] == [2] * 3 + [1] * 3
    assert list(panels[0].lines[0].get_xdata()) == [*range(1, STEPS + 1)]
    assert list(panels[5].lines[0].get_ydata()) == pytest.approx([0.1] * STEPS)


def test_models_without_experts_have_no_such_figure(tmp_path):
    assert "routing" not in figures(tmp_path, strategies())


def test_the_plane_has_filled_marks_on_the_front_and_a_list_of_cells(tmp_path):
    plane, beside = figures(tmp_path, strategies())["plane"].figure.axes
    paper = colour("paper")
    marks = [line for line in plane.lines if line.get_linestyle() == "None"]
    points = {
        (line.get_xdata()[0], line.get_ydata()[0]): line.get_markerfacecolor() != paper
        for line in marks
    }
    # MiB and tokens/s: fsdp2 needs the least memory, ddp is fastest, and single is neither.
    assert points == {(100.0, 1000.0): False, (80.0, 1500.0): True, (60.0, 1250.0): True}
    names = [text.get_text() for text in beside.get_legend().get_texts()]
    assert [name.partition("\n")[0] for name in names] == ["fsdp2", "ddp", "single"]
    assert names[0].endswith("60 MiB, 1,250 tokens/s")


def test_unchecked_cells_beside_checked_ones_are_hollow(tmp_path):
    plane, _ = figures(tmp_path, without_control())["plane"].figure.axes
    filled = {
        (line.get_xdata()[0], line.get_ydata()[0])
        for line in plane.lines
        if line.get_linestyle() == "None" and line.get_markerfacecolor() != colour("paper")
    }
    assert filled == {(100.0, 1000.0)}  # the baseline


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
