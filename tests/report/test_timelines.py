"""Pipelines in a report: the order of cells in a chart, and the table below it."""

from __future__ import annotations

import dataclasses
import json
from xml.etree import ElementTree

import pytest

from shardwise.lab.report.folder import BenchFolder, read_bench
from shardwise.lab.report.page import write_report
from shardwise.lab.report.tables import make_rows
from shardwise.lab.report.timelines import charts
from tests.report.conftest import pipelines, strategies, write


def drawn(sweep, records):
    bench = BenchFolder(sweep, records)
    return charts(bench, make_rows(bench))


def test_cells_that_differ_in_their_split_alone_stand_together_uniform_on_top():
    two, four = drawn(*pipelines())
    assert [run.row.plan.id for run in two.runs] == ["2-uniform", "2-parameters", "2-balanced"]
    assert [run.row.plan.id for run in four.runs] == ["4-uniform", "4-parameters", "4-balanced"]
    assert (two.name, two.title, four.name, four.title) == (
        "timelines",
        "2 ranks",
        "timelines-2",
        "4 ranks",
    )
    sweep, records = pipelines()
    for name in ("uniform", "balanced"):  # of another schedule in the same group
        records[f"2-{name}"].config["parallel"]["schedule"] = "gpipe"
    two, _ = drawn(sweep, records)
    assert [run.row.plan.id for run in two.runs] == ["2-uniform", "2-balanced", "2-parameters"]


def test_a_row_of_the_table():
    (run, *_), _ = (chart.runs for chart in drawn(*pipelines()))
    pipeline = run.pipeline
    assert run.texts == ["2 ranks · uniform", "1f1b", "uniform: 9 + 9"]
    # The second of the splits: measured as 1.03 times what was predicted, so -2.9 %.
    simulated, measured = pipeline.simulated, pipeline.measured
    assert measured.seconds == pytest.approx(1.03 * simulated.seconds, abs=1e-6)
    step = [f"{one.seconds:.1f} s" for one in (simulated, measured)]
    bubble = f"{100 * run.timeline.bubble():.1f}%"
    assert run.numbers == [*step, "-2.9% (-4.0 to -1.0)", bubble, bubble]
    without = dataclasses.replace(
        pipeline, simulated=None, simulator_error_percent=None, split=[9, 9]
    )
    record = dataclasses.replace(run.row.record, spread={})
    run = dataclasses.replace(
        run, pipeline=without, row=dataclasses.replace(run.row, record=record)
    )
    assert run.texts[2] == "given: 9 + 9"
    assert run.numbers == ["–", step[1], "–", "–", bubble]


def test_nothing_is_shown_of_cells_that_are_wrong_or_without_a_timeline():
    sweep, records = pipelines()
    untimed = {**records["2-uniform"].pipeline, "measured": None, "events": None}
    records["2-uniform"] = dataclasses.replace(records["2-uniform"], pipeline=untimed)
    records["2-parameters"] = dataclasses.replace(records["2-parameters"], losses=[9.0] * 12)
    two, _ = drawn(sweep, records)
    assert [run.row.plan.id for run in two.runs] == ["2-balanced"]
    assert drawn(*strategies()) == []


def test_the_predicted_step_stands_below_the_measured_one():
    sweep, records = pipelines()
    del records["2-uniform"].pipeline["simulated_events"]
    (uniform, parameters, _), _ = (chart.runs for chart in drawn(sweep, records))
    assert uniform.simulated is None
    assert parameters.simulated is not None
    simulated, measured = parameters.simulated.seconds, parameters.timeline.seconds
    assert measured == pytest.approx(1.04 * simulated, rel=1e-4)
    two, _ = drawn(sweep, records)
    title = two.svg().partition("<title>")[2].partition("</title>")[0]
    names = [part.partition(": ")[0] for part in title.split("; ")]
    assert names == [
        "2 ranks · uniform",
        "2 ranks · parameters",
        "2 ranks · parameters, as the simulator predicts it",
        "2 ranks · balanced",
        "2 ranks · balanced, as the simulator predicts it",
    ]


def test_page_table_and_files(tmp_path, strategies_folder):
    page = write_report(write(tmp_path / "pipelines", *pipelines()), tmp_path / "report.html")
    text, table = page.read_text(), page.with_suffix(".md").read_text()
    assert all(f'id="{name}-figure_1"' in text for name in ("timelines", "timelines-2"))
    assert 'href="#timelines-title"' in text
    assert "![What each rank did in a step](figures/timelines-2.svg)" in table
    assert "| 2 ranks · balanced | 1f1b | balanced: 12 + 6 |" in table
    for name in ("timelines", "timelines-2"):
        svg = ElementTree.parse(tmp_path / "figures" / f"{name}.svg").getroot()
        assert "bubble" in svg.findtext("{http://www.w3.org/2000/svg}title", "")
    page = write_report(strategies_folder, tmp_path / "report.html")
    assert "imeline" not in page.read_text().partition("</style>")[2]
    assert list((tmp_path / "figures").glob("timelines*")) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": "many"}, "pipeline.layers"),
        ({"events": ["F 0 0 1"]}, "pipeline.events"),
        ({"simulated_events": ["F 0 0 1"]}, "pipeline.simulated_events"),
        ({"measured": {"seconds": 1.0}}, "pipeline.measured.bubble"),
    ],
)
def test_a_broken_pipeline_is_a_broken_record(tmp_path, change, field):
    sweep, records = pipelines()
    folder = write(tmp_path / "bench", sweep, records)
    path = folder / "2-uniform" / "record.json"
    content = json.loads(path.read_text())
    content["pipeline"] |= change
    path.write_text(json.dumps(content))
    assert f"{field}: " in read_bench(folder).problems["2-uniform"]
