"""What the figures show: axes that begin at zero, a place for each cell, and captions that hold."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import pytest

from shardwise.base.records.cell import Axis, CellPlan, CellRecord, SweepRecord
from shardwise.lab.drawing.svg import colour, drawing
from shardwise.lab.report.figures import draw_all
from shardwise.lab.report.folder import BenchFolder, read_bench
from shardwise.lab.report.learned import changes_losses, lowest
from shardwise.lab.report.losses import LEAST_RANGE, MOST_DOTS
from shardwise.lab.report.panels import Drawn
from shardwise.lab.report.tables import make_rows
from tests.report.conftest import (
    LOSSES,
    MIB,
    NOISE,
    STEPS,
    mixtures,
    processes,
    record,
    seeds,
    shifted,
    strategies,
    sweep_of,
    write,
)


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
    for name in ("throughput-memory", "memory-parts", "plane", "steps", "sent"):
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


def test_what_each_expert_was_given_is_drawn_once_for_equal_cells(tmp_path):
    sweep, records = mixtures()
    panels = figures(tmp_path, (sweep, records))["experts"].figure.axes
    shown = [panel for panel in panels if panel.get_visible()]
    assert len(shown) == 2  # two groups of cells, in each of which the routing is the same
    for panel in shown:
        assert panel.get_ylim()[0] == 0
        *layers, equal = panel.lines
        assert [*equal.get_ydata()] == [1, 1]
        loads = [list(line.get_ydata()) for line in layers]
        assert loads == [pytest.approx([2.0, 1.2, 0.4, 0.4]), pytest.approx([1.6, 0.8, 0.8, 0.8])]
    assert "and 1 more" in shown[0].get_title(loc="left")
    assert "more" not in shown[1].get_title(loc="left")


def test_cells_whose_experts_were_given_something_else_are_drawn_apart(tmp_path):
    sweep, records = mixtures()
    routing = records["fsdp2-ep"].routing
    assert routing is not None
    routing["share"][0] = [0.1, 0.5, 0.3, 0.1]
    panels = figures(tmp_path, (sweep, records))["experts"].figure.axes
    assert sum(panel.get_visible() for panel in panels) == 3


def test_models_without_experts_have_no_such_figure(tmp_path):
    assert not {"routing", "experts"} & figures(tmp_path, strategies()).keys()


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


@pytest.mark.parametrize(("loss", "of_wrong"), [(None, "1.0e-03"), (math.nan, "✗ wrong")])
def test_differences_have_a_place_for_each_cell_and_begin_at_zero(tmp_path, loss, of_wrong):
    sweep, records = strategies()
    if loss is not None:
        records["zero1"] = dataclasses.replace(records["zero1"], losses=[*LOSSES[:-1], loss])
    _, panel = figures(tmp_path, (sweep, records))["losses"].figure.axes
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert names == ["single", "ddp", "fsdp2", "✗ zero1", "control of single"]
    assert panel.get_xlim()[0] == 0
    shown = [text.get_text() for text in panel.texts]
    # NOISE is two spacings of float32 between 4 and 8, where the losses lie.
    noise, twice = "9.5e-07, 2 roundings", "1.9e-06, 4 roundings"
    assert shown == ["the reference", noise, twice, of_wrong, noise]


def test_differences_of_one_rounding_are_apart_from_none_and_from_the_tolerance(tmp_path):
    sweep, records = strategies()
    records["ddp"] = dataclasses.replace(records["ddp"], losses=LOSSES)
    records["fsdp2"] = dataclasses.replace(records["fsdp2"], losses=shifted(NOISE / 2))
    del records["zero1"]
    _, panel = figures(tmp_path, (sweep, records))["losses"].figure.axes
    shown = [text.get_text() for text in panel.texts]
    one = "4.8e-07, 1 rounding"
    assert shown == ["the reference", "0, bit for bit", one, "9.5e-07, 2 roundings"]
    # Places on the axis, as shares of its length: none, one rounding, the noise, the tolerance.
    values = (0.0, NOISE / 2, NOISE, 10 * NOISE)
    length = panel.bbox.width
    places = [(panel.transData.transform((x, 0))[0] - panel.bbox.x0) / length for x in values]
    assert places[0] == pytest.approx(0)
    assert all(later - place > 0.08 for place, later in pairwise(places))
    bands = {tuple(band.get_paths()[0].get_extents().intervalx) for band in panel.collections}
    assert bands == {(0.0, NOISE)}
    limits = {line.get_xdata()[0] for line in panel.lines if line.get_color() == colour("bad")}
    assert limits == {10 * NOISE}
    # A dot for each step, from the first on top: eleven without a difference, and the eighth.
    (dots,) = (line for line in panel.lines if list(line.get_xdata())[7:8] == [NOISE / 2])
    assert [*dots.get_xdata()] == [0.0] * 7 + [NOISE / 2] + [0.0] * 4
    assert [*dots.get_ydata()] == sorted(dots.get_ydata())


def test_many_steps_have_a_dot_for_the_largest_difference_of_each_span(tmp_path):
    sweep, records = strategies()
    for name, one in records.items():
        records[name] = dataclasses.replace(one, losses=one.losses * 10)
    records["ddp"].losses[117] += 2 * NOISE
    _, panel = figures(tmp_path, (sweep, records))["losses"].figure.axes
    numbers = [len(line.get_xdata()) for line in panel.lines if line.get_marker() == "o"]
    assert max(numbers) == MOST_DOTS
    largest = [max(line.get_xdata()) for line in panel.lines if len(line.get_xdata()) == MOST_DOTS]
    assert largest[0] == 2 * NOISE


def test_validation_losses_and_gradient_norms_are_curves(tmp_path):
    sweep, records = strategies()
    evals = [{"step": 0, "loss": 6.25}, {"step": STEPS, "loss": 5.75}]
    records["ddp"] = dataclasses.replace(records["ddp"], eval=evals)
    left, right = figures(tmp_path, (sweep, records))["training"].figure.axes
    curves = [(list(line.get_xdata()), list(line.get_ydata())) for line in left.lines]
    assert ([0, STEPS], [6.25, 5.75]) in curves
    assert len(curves) == 5  # of each cell that ran, the control too
    # The first and the last one, with the smallest and the largest of all cells.
    assert [text.get_text() for text in left.texts] == ["6.2500", "5.5000 – 5.7500"]
    assert {tuple(line.get_xdata()) for line in right.lines} == {tuple(range(1, STEPS + 1))}
    assert right.get_ylim()[0] == 0


def test_losses_a_rounding_apart_do_not_look_apart(tmp_path):
    sweep, records = strategies()
    for i, (name, one) in enumerate(records.items()):
        records[name] = dataclasses.replace(one, eval=[{"step": STEPS, "loss": 5.5 + i * 1e-7}])
    panel, _ = figures(tmp_path, (sweep, records))["training"].figure.axes
    low, high = panel.get_ylim()
    assert high - low == pytest.approx(LEAST_RANGE)
    assert [text.get_text() for text in panel.texts] == ["5.5000"]


def test_runs_without_validation_have_norms_alone_and_without_both_no_figure(tmp_path):
    sweep, records = strategies()
    bare = {name: dataclasses.replace(one, eval=[]) for name, one in records.items()}
    drawn = figures(tmp_path / "a", (sweep, bare))["training"]
    (panel,) = drawn.figure.axes
    assert panel.get_title("left") == drawn.title[:-1] == "Gradient norm"
    bare = {name: dataclasses.replace(one, grad_norms=[]) for name, one in bare.items()}
    assert "training" not in figures(tmp_path / "b", (sweep, bare))


def test_cells_that_are_not_timed_have_memory_alone(tmp_path):
    sweep, records = strategies()
    plans = tuple(dataclasses.replace(plan, timed=False) for plan in sweep.cells)
    untimed = {
        name: dataclasses.replace(one, tokens_per_second=None) for name, one in records.items()
    }
    drawn = figures(tmp_path, (dataclasses.replace(sweep, cells=plans), untimed))
    (panel,) = drawn["throughput-memory"].figure.axes
    assert drawn["throughput-memory"].title == "Peak memory"
    assert panel.get_title("left") == "Peak memory, MiB"
    assert any(bar.get_width() for bar in panel.patches)
    assert "Whiskers" not in drawn["throughput-memory"].caption


def test_bytes_sent_are_bars_with_a_tick_at_what_the_formulas_say(tmp_path):
    sweep, records = strategies()
    records["ddp"] = dataclasses.replace(records["ddp"], sent_bytes_by_formula=[MIB, 2 * MIB])
    records["fsdp2"] = dataclasses.replace(records["fsdp2"], sent_bytes_per_step=None)
    (panel,) = figures(tmp_path, (sweep, records))["sent"].figure.axes
    assert [bar.get_width() for bar in panel.patches] == [0, 3]  # single, ddp
    ticks = [line.get_xdata()[0] for line in panel.lines if line.get_marker() == "|"]
    assert ticks == [0, 2, 3]  # the rank that sends most
    assert [text.get_text() for text in panel.texts][:3] == ["0 bytes", "3 MiB", "3 MiB by formula"]
    bare = {
        name: dataclasses.replace(one, sent_bytes_per_step=None, sent_bytes_by_formula=None)
        for name, one in records.items()
    }
    assert "sent" not in figures(tmp_path / "bare", (sweep, bare))


def test_seeds_are_dots_of_one_row(tmp_path):
    drawn = figures(tmp_path / "a", seeds())
    assert "against-training-seed" not in drawn  # a seed is no quantity
    left, right = drawn["seeds"].figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["single", "ddp"]
    dots = [list(line.get_xdata()) for line in left.lines if line.get_marker() == "o"]
    last = LOSSES[-1]
    assert dots == [[last, last + 0.25, last + 1.0], [last, last + 0.25]]
    medians = [line.get_xdata()[0] for line in right.lines if line.get_marker() == "|"]
    assert medians == [5.75, 5.625]
    assert "seeds" not in figures(tmp_path / "b", strategies())


def rates(has_validation: bool = True) -> tuple[SweepRecord, dict[str, CellRecord]]:
    """Three learning rates. The lowest loss of the second one is lowest, and not its last one."""
    axis = Axis("optimizer.lr", ("0.001", "0.01", "0.1"), ("optimizer.lr",), False)
    plans, made = [], {}
    for name, losses in zip(axis.values, ((6.0, 5.5), (4.9759, 5.25), (7.0, 6.5)), strict=True):
        plan = CellPlan(name, {"optimizer.lr": name}, 1, f"optimizer.lr={name}", None)
        evals = [{"step": 0, "loss": 4.0}]
        evals += [{"step": 1 + i, "loss": loss} for i, loss in enumerate(losses)]
        made[name] = record(plan, losses=[*losses], eval=evals if has_validation else [])
        plans.append(plan)
    return sweep_of((axis,), plans, "Rates"), made


@pytest.mark.parametrize(("has_validation", "kind"), [(True, "validation"), (False, "training")])
def test_a_learning_rate_is_told_by_losses(has_validation, kind, tmp_path):
    sweep, records = rates(has_validation)
    left, right = figures(tmp_path, (sweep, records))["against-optimizer-lr"].figure.axes
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in (left, right)]
    assert titles == [f"Last {kind} loss", f"Lowest {kind} loss"]
    drawn = [sorted(y for line in axes.lines for y in line.get_ydata()) for axes in (left, right)]
    assert [sorted(set(ys)) for ys in drawn] == [[5.25, 5.5, 6.5], [4.9759, 5.5, 6.5]]
    rows = make_rows(BenchFolder(sweep, records))
    assert lowest(sweep, rows) == [f"Lowest {kind} loss: lr 0.01 (4.9759)."]
    assert lowest(strategies()[0], make_rows(BenchFolder(*strategies()))) == []


@pytest.mark.parametrize(
    ("keys", "is_so"),
    [
        (("optimizer.lr",), True),
        (("optimizer.lr", "optimizer.name"), True),
        (("training.global_batch_size",), False),
        (("training.seed",), False),
        (("data.sequence_length",), False),
        (("nproc", "parallel.data"), False),
        (("training.micro_batch_size",), False),
    ],
)
def test_axes_that_change_the_losses_and_no_speed(keys, is_so):
    assert changes_losses(Axis("a", ("1", "2"), keys, False)) == is_so
