from __future__ import annotations

import json
import math
import sys

import pytest

from shardwise.commands.cli import main
from shardwise.config import UserError
from shardwise.lab.report.folder import read_bench
from shardwise.lab.report.page import write_report
from shardwise.lab.report.summary import NO_COMPARISON
from shardwise.lab.report.tables import make_rows
from tests.report.conftest import record, strategies, write


def states(folder):
    return {row.plan.id: (row.state, row.reason) for row in make_rows(read_bench(folder))}


def test_what_is_written_is_read_back(strategies_folder):
    sweep, records = strategies()
    bench = read_bench(strategies_folder)
    assert bench.sweep == sweep
    assert bench.records == records
    assert bench.run_files["ddp"] == "parallel: {data: ddp}\n"


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (None, "folder that shardwise bench wrote"),
        ("", "JSON"),
        ('{"title": "ha', "JSON"),
        ("[]", "schema version None"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 1, "title": "a"}', "axes: "),
        ("[" * 100_000, "JSON"),
        ('{"schema_version": 1, "axes": [], "cells": [{"id": "a"}]}', "title: "),
    ],
)
def test_a_folder_without_a_sweep_is_one_clear_line(tmp_path, capfd, content, fragment):
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capfd.readouterr().err
    assert fragment in error
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_broken_cell_is_a_row_with_its_reason(strategies_folder):
    truncated = strategies_folder / "ddp" / "record.json"
    truncated.write_text(truncated.read_text()[:400])
    other = strategies_folder / "fsdp2" / "record.json"
    other.write_text(json.dumps({**json.loads(other.read_text()), "schema_version": 99}))
    (strategies_folder / "pp" / "round-1").mkdir(parents=True)
    state_of = states(strategies_folder)
    assert state_of["ddp"][0] == state_of["fsdp2"][0] == "unreadable"
    assert "JSON" in state_of["ddp"][1]
    assert "schema version 99" in state_of["fsdp2"][1]
    assert state_of["pp"][0] == "not run"
    assert "1 of 3 rounds begun" in state_of["pp"][1]
    page = write_report(strategies_folder).read_text()
    assert "schema version 99" in page
    assert "1 of 3 rounds begun" in page


@pytest.mark.parametrize(
    "given",
    [
        *({"losses": odd} for odd in (None, "abc", ["abc"] * 12, {})),
        *({"rounds": odd} for odd in (None, [1], {}, [{"tokens_per_second": 1.0}])),
        *(
            {"spread": odd}
            for odd in (None, {"tokens_per_second": [1]}, {"tokens_per_second": ["a", "b"]})
        ),
        *({"tokens_per_second": odd} for odd in ("nan", "fast")),
        *({"peak_memory_bytes": odd} for odd in (5, [None, 1], ["x"])),
        *({"environment": odd} for odd in (None, [])),
        *({"notes": odd} for odd in (None, [1])),
        *({"command": odd} for odd in (None, [1, 2], "x")),
        *({"status": odd} for odd in (None, "great")),
        {"config": None},
        {"step_seconds": [1]},
        {"mfu": "x"},
        *({"eval": odd} for odd in (None, [5], [{"loss": "x"}])),
        *({"grad_norms": odd} for odd in (None, ["x"])),
        *({"sent_bytes_per_step": odd} for odd in (5, ["x"])),
        {"first_step_seconds": "x"},
        {"reason": None},
        {"memory_parts": [{"weights": "x"}]},
        {"routing": {"layers": ["a"], "share": [[1.0]], "max_over_mean": "x", "entropy": [1.0]}},
        {"largest_round_difference": None},
        {"no such field": 1},
    ],
    ids=str,
)
def test_a_record_with_a_field_of_another_type_is_an_unreadable_row(strategies_folder, given):
    path = strategies_folder / "ddp" / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | given))
    state, reason = states(strategies_folder)["ddp"]
    assert state == "unreadable"
    assert str(path) in reason
    assert next(iter(given)) in reason or "record" in reason


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema_version":1}', b"\0"]
)
def test_a_file_that_is_no_record_is_an_unreadable_row(strategies_folder, content):
    (strategies_folder / "ddp" / "record.json").write_bytes(content)
    assert states(strategies_folder)["ddp"][0] == "unreadable"


def test_odd_values_of_the_right_type_have_a_page(strategies_folder):
    path = strategies_folder / "ddp" / "record.json"
    odd = {
        "config": {"parallel": None, "training": 5},
        "environment": {"cpu_count": "two", "device": ["a", {}]},
        "memory_parts": [{}],
        "spread": {"tokens_per_second": [0.0, 0.0]},
        "eval": [{}, {"step": 3}, {"step": 0, "loss": "nan"}],
        "grad_norms": ["inf", 0.0],
        "sent_bytes_per_step": [],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    assert write_report(strategies_folder).exists()
    assert main(["report", "--compare", str(strategies_folder), str(strategies_folder)]) == 0


@pytest.mark.parametrize(
    "given",
    [
        {"title": 5},
        {"rounds": "3"},
        {"equal": []},
        {"cells": None},
        {"cells": ["a"]},
        {"command": None},
        {"timeout_seconds": "x"},
        *({"cell": {"id": odd}} for odd in (5, "a\0b", "../ddp", "..", "a" * 300, "", "single")),
        {"cell": {"values": None}},
        {"cell": {"nproc": "2"}},
    ],
    ids=lambda given: str(given)[:40],
)
def test_a_sweep_with_a_field_of_another_type_is_one_clear_line(strategies_folder, capfd, given):
    path = strategies_folder / "sweep.json"
    content = json.loads(path.read_text())
    content["cells"][1] |= given.pop("cell", {})
    path.write_text(json.dumps(content | given))
    assert main(["report", str(strategies_folder)]) == 2
    error = capfd.readouterr().err
    assert "shardwise bench" in error
    assert error.count("\n") == 1


def test_a_bench_that_has_only_begun_has_a_page(tmp_path):
    sweep, _ = strategies()
    page = write_report(write(tmp_path / "bench", sweep, {})).read_text()
    assert NO_COMPARISON in page
    assert "… 6 not run" in page


def test_no_cell_ok(tmp_path):
    sweep, records = strategies()
    page = write_report(write(tmp_path / "bench", sweep, {"fsdp1": records["fsdp1"]})).read_text()
    assert "out of memory on rank 1 of 2" in page


def test_odd_losses_have_a_page(tmp_path):
    sweep, records = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    odd = {"ddp": [math.nan] * 3, "fsdp2": [math.inf, 1.0], "zero1": [], "fsdp1": [5.0]}
    records |= {name: record(plans[name], losses=losses) for name, losses in odd.items()}
    records["pp"] = record(plans["pp"], status="failed", losses=[6.0, 5.9], reason="died")
    folder = write(tmp_path / "bench", sweep, records)
    write_report(folder)
    assert [states(folder)[name][0] for name in (*odd, "pp")] == ["wrong"] * 4 + ["failed"]


def test_figures_that_were_not_measured_are_no_zeros(tmp_path):
    sweep, _ = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    given = {
        "tokens_per_second": None,
        "peak_memory_bytes": None,
        "step_seconds": None,
        "memory_parts": None,
        "mfu": None,
        "sent_bytes_per_step": None,
        "sent_bytes_by_formula": None,
        "first_step_seconds": None,
        "eval": [],
        "grad_norms": [],
    }
    bare = {
        name: record(plans[name], **given, spread={})
        for name in ("single", "ddp", "control-single")
    }
    page = write_report(write(tmp_path / "bench", sweep, bare))
    assert NO_COMPARISON in page.read_text()
    cells = ["ddp", "ok", "2", *["–"] * 8, "0"]
    assert f"| {' | '.join(cells)} |" in page.with_suffix(".md").read_text()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_one_line_with_the_command(strategies_folder, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"needs {package}, .* pip install {package}$"):
        write_report(strategies_folder)
    assert not (strategies_folder / "report.html").exists()


def test_a_page_is_html(strategies_folder, tmp_path):
    with pytest.raises(UserError, match=r"\.html"):
        write_report(strategies_folder, tmp_path / "report.md")


def test_a_place_that_cannot_be_written(strategies_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"-o$"):
        write_report(strategies_folder, tmp_path / "file" / "page.html")
