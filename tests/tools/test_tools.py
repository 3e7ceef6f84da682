"""The arithmetic of the tools that compare, and that what they compare is alike."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import statistics
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise.assembly.describe import describe
from shardwise.base.records.cell import Axis, CellPlan
from shardwise.base.records.record import RunRecord
from shardwise.config.run_file import parse_config
from shardwise.lab.benchmark.sweep import read_sweep
from shardwise.lab.drawing.svg import drawing
from shardwise.lab.planner.peak import memory_of_run
from shardwise.lab.report.folder import BenchFolder, read_bench
from shardwise.lab.report.tables import Row, make_rows
from tests.parity.layouts import CONTEXT, EXPERTS, PROVEN
from tests.report.conftest import mixtures, pipelines, record, strategies, sweep_of, write

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"tools.{request.param}")


@pytest.mark.parametrize("tool", ["communication"], indirect=True)
def test_the_page_of_communication_is_what_the_formulas_say(tool):
    result = json.loads(tool.RESULTS.read_text(encoding="utf-8"))
    assert result == tool.compute(), "run python -m tools.communication"
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(result)
    layouts = {row["layout"] for row in result["rows"]}
    assert layouts - {*CONTEXT, *EXPERTS} == set(PROVEN) - {"single"}
    few = {name for name in (*CONTEXT, *EXPERTS) if len({*name.split("-")} - {"ep", "sp"}) <= 2}
    assert layouts & {*CONTEXT, *EXPERTS} == few


def test_the_page_of_cores_says_what_was_measured():
    root = TOOLS.parent
    page = (root / "docs" / "concepts" / "cores.md").read_text(encoding="utf-8")
    alone = []
    for name in ("amd", "intel", "cpu-mamba2-kda"):
        file = root / "results" / "cores" / f"{name}.json"
        for family, row in json.loads(file.read_text(encoding="utf-8"))["rows"].items():
            cells = []
            for side in ("eager", "compiled"):
                speeds = row["speed"][side]["rounds"]
                flushing = row["speed"]["trainer_flushing"]["rounds"]
                ratio = statistics.median(a / b for a, b in zip(speeds, flushing, strict=True))
                cells.append(f"{row['speed'][side]['median']:.2f} ({ratio:.2f})")
            over = row.get("over_products")
            cells += [f"{over[s]['median']:.2f}" if over else "–" for s in ("eager", "compiled")]
            cells += [f"{row['peak_ratio'][side]:.2f}" for side in ("eager", "compiled")]
            assert f"`{family}` | {' | '.join(cells)} |" in page
            eager, compiled = (row["speed"][side]["rounds"] for side in ("eager", "compiled"))
            alone.append(statistics.median(b / a for a, b in zip(eager, compiled, strict=True)))
    gain = f"{min(alone):.2f} to {max(alone):.2f} times as fast"
    assert f"makes our step {gain}" in page


@pytest.mark.parametrize("tool", ["study_table"], indirect=True)
def test_the_page_of_the_study_says_what_was_measured(tool):
    """The tables; figures are drawn anew by the tool alone."""
    (page,) = tool.PAGES
    results = TOOLS.parent / "results"
    studies = tool.read_studies(results)
    pattern = r"<!-- tools/study_table\.py (\w+) ([\w-]+) -->\n\n?(.*?)\n?<!-- end -->"
    places = re.findall(pattern, page.read_text(encoding="utf-8"), flags=re.DOTALL)
    tables = [place for place in places if place[0] != "figure"]
    assert len(tables) > 10
    for kind, name, text in tables:
        expected = tool.content(kind, name, studies, {}, page, results)
        assert text.strip() == expected.strip(), "run python -m tools.study_table"


PLACES = ("ran cpu", "speed cpu", "sent cpu", "speed models")
FIGURES = ("strategies", "memory", "losses", "sent", "lengths", "models")


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["study_table"], indirect=True)
def test_the_tables_and_figures_of_a_study_go_into_its_page(tool, tmp_path):
    sweep, records = strategies()
    cells = tuple(replace(plan, timed=plan.id != "fsdp2") for plan in sweep.cells)
    runs, page = tmp_path / "runs", tmp_path / "page.md"
    names = (*PLACES, *(f"figure {name}" for name in FIGURES))
    page.write_text("Before\n" + "".join(f"{tool.BEGIN.format(n)}old\n{tool.END}" for n in names))
    results = tmp_path / "results"
    write(runs / "study-cpu", replace(sweep, cells=cells), records)
    arguments = ["--results", str(results), "--pages", str(page), "--runs", str(runs)]
    tool.main(arguments)  # a cell has no record, so nothing is copied
    assert page.read_text().count("was not run yet") == len(names)
    for plan in cells:
        if plan.id in records:
            records[plan.id] = replace(records[plan.id], cell=asdict(plan))
    bench = write(tmp_path / "bench", replace(sweep, cells=cells), records)
    tool.write(tool.pack(bench), results / "study" / "cpu.json")
    tool.main(arguments)
    parts = re.findall(r"table.py ([\w -]+) -->\n\n(.*?)\n\n<!-- end", page.read_text(), re.DOTALL)
    found = dict(parts)
    assert [*found] == [*names]
    assert found["speed cpu"].splitlines()[1:5] == [
        "| --- | --- |",
        "| `single` | 1.00 · 100.0 |",
        "| `ddp` | 1.50 · 80.0 |",
        "| `fsdp2` | not timed · 60.0 |",
    ]
    assert found["speed cpu"].splitlines()[5:] == [
        "| `zero1` | – |",
        "| `fsdp1` | – |",
        "| `pp` | – |",
    ]
    assert "| `ddp` | 2 |  | 80 MiB | 3 MiB | 3 MiB | 1.00 (1.00 to 1.00) |" in found["sent cpu"]
    assert "Not ok: ✗ zero1 and fsdp1." in found["ran cpu"]
    assert "the sweep has 88 cells now" in found["ran cpu"]
    drawn = {name for name in FIGURES if f"results/study/{name}.svg" in found[f"figure {name}"]}
    assert drawn == {"strategies", "memory", "losses", "sent"}
    assert "since it was changed" in found["figure lengths"]
    assert "was not run yet" in found["speed models"]
    assert {path.stem for path in (results / "study").glob("*.svg")} == drawn


def rounds_of(folder: Path, name: str, one: RunRecord) -> None:
    """Write three rounds of a cell, whose bubbles are 1, 3 and 0.5 times the record's."""
    assert one.pipeline is not None
    measured = one.pipeline["measured"]
    run = {entry.name: getattr(one, entry.name) for entry in fields(RunRecord)}
    for place, times in enumerate((1.0, 3.0, 0.5), start=1):
        bubble = {"measured": measured | {"bubble": times * measured["bubble"]}}
        (folder / name / f"round-{place}").mkdir(parents=True)
        round_record = RunRecord(**run | {"pipeline": one.pipeline | bubble})
        round_record.write(folder / name / f"round-{place}" / "record.json")


@pytest.mark.parametrize("tool", ["study_table"], indirect=True)
def test_the_summary_of_a_finished_study_has_all_that_its_bench_shows(tool, tmp_path):
    runs, results = tmp_path / "runs", tmp_path / "results"
    sweep, records = pipelines()
    folder = write(runs / "study-microbatches", sweep, records)
    for name, one in records.items():
        rounds_of(folder, name, one)
    write(runs / "demo" / "bench", *mixtures())
    (runs / tool.CALIBRATION).write_text("{}")
    tool.keep_runs(runs, results)
    assert {path.relative_to(results).as_posix() for path in results.rglob("*.*")} == {
        "study/calibration.json",
        "study/demo.json",
        "study/microbatches.json",
    }
    summary = json.loads((results / "study" / "microbatches.json").read_text())
    assert [*summary["pipelines"]] == [*records]
    assert {len(rounds) for rounds in summary["pipelines"].values()} == {3}
    tool.unpack(summary, tmp_path / "again")
    before, after = read_bench(folder), read_bench(tmp_path / "again")
    assert (before.sweep, before.records) == (after.sweep, after.records)
    assert tool.read_studies(results)["demo"].bench.records == mixtures()[1]


@pytest.mark.parametrize("tool", ["study_summary"], indirect=True)
def test_what_all_cells_have_stands_once_and_only_if_it_is_of_one_type(tool):
    records = [
        {"same": [1], "type": 1, "part": {"a": 1, "b": 2}, "own": 1, "whole": {"a": 1}},
        {"same": [1], "type": 1.0, "part": {"a": 1, "b": 3}, "part-of": 1, "whole": {"a": 1}},
    ]
    shared = tool.in_common(records)
    assert shared == {"same": [1], "part": {"a": 1}, "whole": {"a": 1}}
    left = [tool.without(one, shared) for one in records]
    assert left[0] == {"type": 1, "part": {"b": 2}, "own": 1}
    for whole, rest in zip(records, left, strict=True):
        assert tool.merged(shared, rest) == whole


def test_the_results_are_small():
    """A summary of each study, the figures that pages show and what others published."""
    files = [path for path in (TOOLS.parent / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000
    kinds = {path.suffix for path in files}
    assert kinds <= {".json", ".md", ".svg", ".yaml"}, "pages and bitmaps can be made again"


@pytest.mark.parametrize("tool", ["study_figures"], indirect=True)
def test_the_figure_of_bubbles_has_the_medians_of_the_rounds_and_the_simulated_ones(tool, tmp_path):
    sweep, records = pipelines()
    rounds = {}
    summary = importlib.import_module("tools.study_summary")
    for name, one in records.items():
        one.config["training"] = {
            "global_batch_size": 32,
            "micro_batch_size": 1 + int(name[0] == "4"),
        }
        rounds_of(tmp_path, name, one)
        rounds[name] = summary.rounds_of(tmp_path / name)
    rows = make_rows(BenchFolder(sweep, records))
    study = tool.Study(BenchFolder(sweep, records), rows, {}, rounds)
    points = tool.bubbles(study)
    assert {(point.microbatches, round(point.formula, 4)) for point in points} == {
        (32, round(1 / 33, 4)),
        (16, round(3 / 35, 4)),
    }
    for point in points:
        assert point.simulated == pytest.approx(point.measured)
        assert point.range == pytest.approx((0.5 * point.measured, 3 * point.measured))
    with drawing():
        assert tool.microbatches(study).name == "microbatches"


@pytest.mark.parametrize("tool", ["study_figures"], indirect=True)
def test_the_figure_of_processes_has_a_line_from_one_process_for_each_strategy(tool):
    sizes = {"single": (1, 100), "ddp-2": (2, 90), "ddp-4": (4, 80), "tp-2": (2, 50)}
    plans = {
        name: CellPlan(name, {"strategy": name}, nproc, "lora", None, timed=False)
        for name, (nproc, _) in sizes.items()
    }
    axis = Axis("strategy", tuple(plans), ("nproc", "parallel.data"), True)
    records = {
        name: record(plan, peak=sizes[name][1] * 2**20, data="ddp") for name, plan in plans.items()
    }
    bench = BenchFolder(sweep_of((axis,), [*plans.values()]), records)
    with drawing():
        drawn = tool.processes(tool.Study(bench, make_rows(bench), {}, {}))
        upper, lower = drawn.figure.axes
        ddp, tp = upper.lines
        assert [*ddp.get_xdata()] == [1, 2, 4]
        assert [*ddp.get_ydata()] == [1, 0.9, 0.8]
        assert [*tp.get_ydata()] == [1, 0.5]
        assert [*lower.lines[0].get_ydata()] == [0, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["study_lengths"], indirect=True)
def test_the_longest_row_is_that_whose_planned_peak_is_in_the_memory(tool):
    cells = read_sweep(TOOLS.parent / "configs" / "study-cpu.yaml", TOOLS).cells
    for name in ("single-128-lora", "pp-uniform-128-full"):
        (cell,) = (cell for cell in cells if cell.plan.id == name)
        cut = {"boundaries": [0, 2, 10]} if "pp" in name else None  # not that of the run file
        row = Row(cell.plan, name, "ok", record=record(cell.plan, pipeline=cut))
        peak = tool.peak_by_length(cell.run, row)
        assert tool.longest_row(peak, peak(256)) == 256
        assert tool.longest_row(peak, peak(256) - 1) == 256 - tool.STEP
    cfg = parse_config({**cell.run, "model": {**cell.run["model"], "tokenizer": None}}, name)
    assert memory_of_run(cfg, describe(cfg, 2)).total < peak(128)


@pytest.mark.parametrize("tool", ["diagrams"], indirect=True)
def test_the_ring_has_the_times_of_the_largest_messages(tool, tmp_path):
    path = tmp_path / "calibration.json"
    assert tool.measured_messages(["send"], path) == ""
    sizes = {2**10: 0.001, 2**25: 0.5}
    row = {"kind": "send", "num_ranks": 2}
    rows = [{**row, "num_bytes": size, "seconds": time} for size, time in sizes.items()]
    machine = {"cpu_count": 2, "device": "a CPU"}
    path.write_text(json.dumps({"collectives": rows, "environment": machine}))
    expected = "on 2 cores of a CPU, 32 MiB among 2 CPU processes over gloo: send 500 ms"
    assert expected in tool.measured_messages(["send"], path)


def test_the_pages_of_the_planner_say_what_it_says(monkeypatch):
    """The smallest rows of each; `python -m tools.plan_pages --check` computes all of them."""
    tool = runpy.run_path(str(TOOLS / "plan_pages.py"))
    needs = tool["needs"]
    monkeypatch.setitem(needs.__globals__, "CASES", needs.__globals__["CASES"][:1])
    pages = {name: (tool["DOCS"] / name).read_text(encoding="utf-8") for name in tool["TABLES"]}
    lines = [*needs(lora=True), *needs(lora=False), *tool["sizes"]()]
    assert all(f"\n{line}\n" in pages["what-do-i-need.md"] for line in lines)
    in_words = {name for name, run in tool["published_runs"]().items() if "preset" not in run}
    rows = tool["published"]({"gpt2-large-zero3-tp", *in_words})
    assert all(f"\n{line}\n" in pages["published-layouts.md"] for line in rows)


def test_each_family_has_the_page_that_its_code_says():
    """All but memory, of which the smallest published shape alone is planned; `python -m
    tools.model_pages --check` plans every one."""
    tool = runpy.run_path(str(TOOLS / "model_pages.py"))
    families, folder = tool["FAMILIES"], tool["FOLDER"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    stale = {tool["INDEX"], *(f"{name}.md" for name in families)} ^ texts.keys()
    stale |= {tool["INDEX"]} if texts.get(tool["INDEX"]) != tool["index"]() else set()
    parts = ("special", "run", "serving", "proven")
    for name, family in families.items():
        lines = [
            line for part in parts for line in tool[part](family if part == "special" else name)
        ]
        lines += tool["memory"](name) if name == "lfm2" else []
        lines += tool["layers"](name) if name == "lfm2" or not tool["shapes_of"](name) else []
        if not all(line in texts.get(f"{name}.md", "") for line in lines):
            stale.add(f"{name}.md")
    assert not stale, "run python -m tools.model_pages"


def test_the_page_on_planning_says_how_far_times_were_off():
    root = TOOLS.parent
    page = (root / "docs" / "concepts" / "planning.md").read_text(encoding="utf-8")
    errors = {}
    for name in ("times", "times-intel"):
        times = json.loads((root / "results" / "plan" / f"{name}.json").read_text())
        errors[name] = error = times["error"]
        assert error["cases"] == len(times["rows"])
        rounds = [[of["measured"] for of in row["rounds"]] for row in times["rows"]]
        apart = [100 * (max(seconds) / min(seconds) - 1) for seconds in rounds]
        cells = [str(error["cases"]), str(len(rounds[0]))]
        cells += [f"{statistics.median(apart):.0f} % in the median, up to {max(apart):.0f} %"]
        cells += [f"{100 * error[key]:.1f} %" for key in ("median", "worst")]
        assert f" | {' | '.join(cells)} |" in page
        assert all(choice["regret"] <= 0.05 for choice in times["choices"])
    # On the other machine two rounds of one run differ by 10 % in the median.
    assert errors["times-intel"]["median"] <= 0.05
    assert errors["times-intel"]["worst"] <= 0.12
    grid = json.loads((root / "results" / "plan" / "grid.json").read_text())["summary"]
    one, several = grid["one process"], grid["distributed"]
    said = [f"{one['cells'] + several['cells']} measured runs of small models"]
    said += [f"{100 * one['median']:.2f} % on one process"]
    said += [f"{100 * several['median']:.2f} % on several"]
    assert all(text in " ".join(page.split()) for text in said), said


def test_the_page_of_bases_says_what_was_measured():
    root = TOOLS.parent
    result = json.loads((root / "results" / "bases" / "quality.json").read_text())
    page = (root / "docs" / "guides" / "quantised-bases.md").read_text(encoding="utf-8")
    for by_seed in result["validation_loss"].values():
        row = " | ".join(f"{by_seed[seed]:.3f}" for seed in sorted(by_seed))
        assert f"| {row} |" in page
    most = result["largest_difference_to_none"]
    assert f"more than {max(map(abs, most.values())):.3f}" in page
    assert f"rounding alone by {abs(most['nudged']):.3f}" in page


CHECKED = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "odd", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize("tool", ["audit"], indirect=True)
@pytest.mark.parametrize(
    ("packages", "code", "fragments"),
    [
        ([CHECKED], 0, ["1 of 1 versions checked: 0 vulnerabilities"]),
        ([CHECKED, BAD], 1, ["bad 2: CVE-1, mended in 3", "2 of 2 versions checked: 1 vuln"]),
        ([CHECKED, UNKNOWN], 1, ["not checked", "odd", "1 of 2"]),
        ([UNKNOWN], 2, ["nothing was checked"]),
    ],
)
def test_an_audit_counts_what_was_not_checked(tool, packages, code, fragments, monkeypatch, capsys):
    answer = SimpleNamespace(stdout=json.dumps({"dependencies": packages}), stderr="")
    monkeypatch.setattr(tool.subprocess, "run", lambda *_, **__: answer)
    assert tool.main() == code
    printed = capsys.readouterr().out
    assert all(fragment in printed for fragment in fragments)


@pytest.mark.parametrize("tool", ["audit"], indirect=True)
def test_an_audit_without_an_index_is_one_line(tool, monkeypatch, capsys):
    answer = SimpleNamespace(stdout="", stderr="Traceback\nProxyError: refused")
    monkeypatch.setattr(tool.subprocess, "run", lambda *_, **__: answer)
    assert tool.main() == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "nothing was checked" in line
    assert "ProxyError: refused" in line


def test_every_version_is_pinned_and_the_checkers_are_no_requirement():
    pins = [
        line
        for line in (TOOLS.parent / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    project = (TOOLS.parent / "pyproject.toml").read_text()
    assert "pip-audit" not in project
    assert "cyclonedx" not in project


def test_the_page_of_peers_is_drawn_from_its_data():
    """The committed page, and one of made-up rows, of the sides and the work of today."""
    page = importlib.import_module("tools.peers.page")
    sides = importlib.import_module("tools.peers.sides")
    folder = TOOLS.parent / "results" / "peers"
    result = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
    today = json.loads(json.dumps(sides.definition()))
    assert {key: result[key] for key in today} == today, "run make peers"
    assert (folder / "peers.md").read_text(encoding="utf-8") == page.page(result)
    own = {"single", "ddp", "zero1", "zero2", "fsdp2"}
    assert {n for n, side in sides.SIDES.items() if side.beside is None} == own
    assert {side.beside for side in sides.SIDES.values()} == {*own, None}

    def row(step: float, **changed: Any) -> dict[str, Any]:
        numbers = {"losses": [2.0, 2.0, 2.0], "norms": [1.0], "load_average": 0.5}
        return {**numbers, "seconds": [9.0] * 2 + [step] * 7, "peak_bytes": [2**20]} | changed

    result |= {"rounds": 1, "untimed": False, "rows": {}}
    for mode in sides.MODES:
        for name in sides.SIDES:
            result["rows"][f"checks/{mode}/{name}"] = row(1.0)
            result["rows"][f"round-0/{mode}/{name}"] = row(1.0, weight_bytes=[100])
    wrong = row(1.0, losses=[2.2, 2.0, 2.5], norms=[0.5])
    result["rows"]["checks/lora/deepspeed_1"] = wrong
    result["rows"]["round-0/lora/deepspeed_1"] = row(0.5, weight_bytes=[50])
    result["rows"]["round-0/full/torchtitan"] = {"error": "E: no", "load_average": 0.5}
    lines = page.page(result).splitlines()
    speeds = "2048 (2048–2048) | 0.50 (0.50–0.50) | 1.0 | 50% | 0.0e+00"
    checks = "loss +10.00%, gradient norm -50.00% | leak: loss +0.5000"
    assert f"| DeepSpeed ZeRO-1 | {speeds} | {checks} |" in lines
    assert "- DeepSpeed ZeRO-1, LoRA: 0.500 (0.500–0.500), in all rounds" in lines
    assert "- torchtitan, all weights: `E: no`" in lines


def test_the_page_of_preferences_has_what_was_measured_beside_trl():
    pairs = importlib.import_module("tools.peers.pairs")
    result = json.loads((TOOLS.parent / "results" / "peers" / "pairs.json").read_text())
    rows = result["rows"]
    assert result["complete"]
    assert result["work"]["shapes"] == json.loads(json.dumps(pairs.SHAPES))
    for case in (case for case in rows if case.endswith("/trl")):
        ours = rows[case.replace("/trl", "/dpo")]["losses"]
        assert ours == pytest.approx(rows[case]["losses"], rel=1e-4)
    table = pairs.lines(rows)
    page = pairs.PAGE.read_text(encoding="utf-8")
    assert pairs.with_table(page, [table], pairs.START) == page
    for line in table.splitlines()[2:]:
        time, by_trl, by_sft = (float(cell.split()[0]) for cell in line.split("|")[3:6])
        assert (time <= 0.8, by_trl <= 0.6, by_sft <= 1.35) == (True,) * 3, line
