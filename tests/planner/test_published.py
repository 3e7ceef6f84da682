"""Plans beside runs that others published: results/plan/published.md, which
`python -m tools.plan_published` writes and of which a few rows are planned here.
"""

from __future__ import annotations

import statistics

from tests.planner.published import KINDS, RUNS, compared, each, published_runs

PLANNED = {
    "mpt-7b-2k",
    "llama2-7b-96",
    "titan-8b-64k-cp2",
    "trainy-8b-fp8-32",
    "qwen2.5-7b-lora",
    "gpt-oss-20b-ep8",
    "qwen3.5-9b-fused",
}


def ratios() -> dict[str, float]:
    lines = RUNS.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return {row[0]: float(row[4]) for row in rows[2:]}


def test_each_run_has_a_source_and_says_what_it_does_otherwise():
    runs = published_runs()
    assert len(runs) >= 50
    assert ratios().keys() == runs.keys()
    for name, run in runs.items():
        assert all(run[key] for key in ("source", "unlike")), name
        assert run["use"] in ("set", "check"), name
        assert run["kind"] in KINDS, name
    kept_back = [run["use"] == "check" for run in runs.values()]
    assert 0.45 < statistics.mean(kept_back) < 0.65


def test_plans_are_as_far_from_published_runs_as_is_said():
    """Of programs that do nearly the same work half are within a tenth, most within 30 %."""
    runs, of_all = published_runs(), ratios()
    alike = {name: of_all[name] for name, run in runs.items() if run.get("alike", True)}
    errors = [abs(ratio - 1) for ratio in alike.values()]
    assert statistics.median(errors) <= 0.1
    assert statistics.mean(error <= 0.3 for error in errors) >= 0.85
    assert 0.95 < statistics.median(alike.values()) < 1.1
    assert all(0.8 < ratio < 1.6 for ratio in alike.values())
    assert all(0.45 < ratio < 3 for name, ratio in of_all.items() if name not in alike)


def test_the_page_has_what_is_planned():
    lines = RUNS.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    header = len("\n".join(each([])).splitlines())
    planned = "\n".join(each([*compared(PLANNED)])).splitlines()[header:]
    assert len(planned) == len(PLANNED)
    assert set(planned) <= set(lines), "run python -m tools.plan_published"
