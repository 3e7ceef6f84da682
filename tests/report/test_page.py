"""The page as a reader meets it: in a real browser, from disk, without a network."""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardwise.base.records.cell import Axis, CellPlan
from shardwise.lab.report.folder import read_bench
from shardwise.lab.report.page import page_templates, write_report
from tests.report.conftest import (
    HOSTILE,
    hostile,
    large,
    pipelines,
    processes,
    record,
    seeds,
    strategies,
    sweep_of,
    write,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        if os.environ.get("SHARDWISE_NEEDS_BROWSER") == "1":
            pytest.fail("SHARDWISE_NEEDS_BROWSER is 1, but there is no chromium or chrome on PATH")
        pytest.skip("no chromium or chrome on PATH: the page is not looked at")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """A page with a cell in every state."""
    sweep, records = strategies()
    return write_report(write(tmp_path_factory.mktemp("page") / "bench", sweep, records))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory) -> Path:
    """A page of which every text tries to be more."""
    return write_report(hostile(tmp_path_factory.mktemp("hostile") / "bench"))


@pytest.fixture(scope="module")
def large_page(tmp_path_factory) -> Path:
    """A page with many groups of cells."""
    return write_report(write(tmp_path_factory.mktemp("large") / "bench", *large()))


@pytest.fixture
def opened(browser, page_file):
    """The open page. At the end no error must have been reported and no other file requested."""
    with open_page(browser, page_file) as page:
        yield page


class open_page:
    def __init__(self, browser, path: Path, **options) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **options}
        )
        self.page, self.path = self.context.new_page(), path
        self.trouble: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: self.trouble.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def __enter__(self):
        self.page.goto(self.path.as_uri())
        return self.page

    def __exit__(self, kind, error, trace) -> None:
        self.context.close()
        if kind is None:
            assert self.trouble == []
            assert self.requests == [self.path.as_uri()]


def column(page, table: str, number: int) -> list[str]:
    return page.eval_on_selector_all(
        f"{table} tbody tr:first-child > :nth-child({number})",
        "cells => cells.map(cell => cell.firstChild.textContent)",
    )


def test_tables_sort_by_click_and_by_key(opened):
    cells = "#all-cells"
    assert column(opened, cells, 8) == ["100 MiB", "80 MiB", "60 MiB", "–", "–", "–", "–"]
    button = opened.locator(cells).get_by_role("button", name="Peak memory")
    header = opened.locator("#all-cells thead th").nth(7)
    assert header.get_attribute("aria-sort") is None
    button.click()
    assert header.get_attribute("aria-sort") == "ascending"
    # As text, 100 would come first.
    assert column(opened, cells, 8) == ["60 MiB", "80 MiB", "100 MiB", "–", "–", "–", "–"]
    button.focus()
    opened.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    assert column(opened, cells, 8) == ["100 MiB", "80 MiB", "60 MiB", "–", "–", "–", "–"]
    opened.locator("#all-cells").get_by_role("button", name="Cell").click()
    assert header.get_attribute("aria-sort") is None
    assert column(opened, cells, 1) == sorted(column(opened, cells, 1))


def test_every_figure_is_there(opened, page_file):
    names = ["losses", "training", "throughput-memory", "memory-parts", "plane", "steps", "sent"]
    assert opened.eval_on_selector_all("figure", "all => all.map(figure => figure.id)") == names
    for name in names:
        box = opened.locator(f"figure#{name} svg").bounding_box()
        assert box["width"] > 300
        assert box["height"] > 100
        svg = (page_file.parent / "figures" / f"{name}.svg").read_text()
        assert svg.count("<svg") == 1
        assert (page_file.parent / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    ids = opened.eval_on_selector_all("[id]", "all => all.map(element => element.id)")
    assert len(ids) == len(set(ids))
    links = opened.eval_on_selector_all(
        "a[href^='#']", "all => all.map(a => a.getAttribute('href').slice(1))"
    )
    assert set(links) <= set(ids)


def test_details_hold_command_config_and_record(opened):
    cell = opened.locator("#all-cells tbody", has=opened.locator("th", has_text=re.compile("^ddp")))
    assert not cell.locator("pre.command").is_visible()
    cell.locator("summary").click()
    assert cell.locator("pre.command").inner_text() == "shardwise train ddp/run.yaml --nproc 2"
    assert cell.locator("pre.config").inner_text().strip() == "parallel: {data: ddp}"
    assert '"tokens_per_second": 1500.0' in cell.locator("pre.record").inner_text()


def test_every_cell_has_a_row_and_states_are_words(opened):
    text = opened.locator("#all-cells").inner_text()
    assert "out of memory on rank 1 of 2" in text
    assert "… not run" in text
    assert "1.0e-03, more than 9.5e-06" in text
    assert "✗ zero1" in opened.locator("figure#losses").inner_text()
    assert "✗ wrong" in opened.locator("figure#throughput-memory").inner_text()
    assert "oom" in opened.locator("figure#throughput-memory").inner_text()
    assert "9,000" not in opened.content()  # the wrong cell's speed, other than in its own record
    assert "with the figures of a wrong cell" in opened.content()


def test_what_was_sent_and_validated_has_tables_below_its_figures(opened):
    for figure, heading, text in (
        ("training", "Validation loss", "6.2500 → 5.5000"),
        ("sent", "Sent, counted", "3 MiB"),
    ):
        section = opened.locator(f"section:has(figure#{figure})")
        number = section.locator("thead th").all_inner_texts().index(heading)
        ddp = section.locator("tbody", has=opened.locator("th", has_text=re.compile("^ddp")))
        assert ddp.locator("th, td").nth(number).inner_text() == text


def test_seeds_are_one_row_on_a_page_as_wide_as_a_phone(browser, tmp_path):
    path = write_report(write(tmp_path / "bench", *seeds()))
    with open_page(browser, path, viewport={"width": 390, "height": 800}) as page:
        rows = page.locator("section:has(figure#seeds) table tbody tr").all_inner_texts()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert [row.split("\t")[:2] for row in rows] == [["single", "3"], ["ddp", "2 of 3"]]
    assert "5.7500 (5.5000 – 6.5000)" in rows[0]
    markdown = path.with_suffix(".md").read_text()
    assert "| ddp | 2 of 3 | 5.5750 (5.4500 – 5.7000) |" in markdown


def test_the_best_cells_stand_on_top(opened):
    fastest, leanest = opened.locator(".best td").all_inner_texts()
    assert fastest.startswith("ddp: 1,500 tokens/s")
    assert leanest.startswith("fsdp2: 60 MiB")


@pytest.mark.slow
def test_light_and_dark(browser, page_file):
    read = """() => [getComputedStyle(document.documentElement).backgroundColor,
                     getComputedStyle(document.body).color,
                     getComputedStyle(document.querySelector('figure#losses svg')).filter]"""
    with open_page(browser, page_file, color_scheme="light") as page:
        assert page.evaluate(read) == ["rgb(255, 255, 255)", "rgb(27, 31, 36)", "none"]
    with open_page(browser, page_file, color_scheme="dark") as page:
        paper, ink, figure_filter = page.evaluate(read)
    assert (paper, ink) == ("rgb(23, 23, 23)", "rgb(233, 236, 239)")
    # The figure's white becomes the page's paper: 255 x (1 - 0.91) is 23.
    assert "invert(0.91)" in figure_filter


@pytest.mark.slow  # the other figures do
def test_pipelines_follow_the_theme(browser, tmp_path):
    path = write_report(write(tmp_path / "bench", *pipelines()))
    read = "() => getComputedStyle(document.querySelector('figure#timelines svg')).filter"
    with open_page(browser, path, color_scheme="light") as page:
        assert page.evaluate(read) == "none"
    small = {"width": 390, "height": 800}
    with open_page(browser, path, color_scheme="dark", viewport=small) as page:
        assert "invert(0.91)" in page.evaluate(read)
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_phone_scrolls_tables_and_figures_but_not_the_page(browser, page_file):
    with open_page(browser, page_file, viewport={"width": 390, "height": 800}) as page:
        for summary in page.locator("#all-cells summary").all():
            summary.click()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("document.querySelector('figure .scroll').scrollWidth") > 390


@pytest.mark.slow  # a page of few groups does
def test_a_page_of_many_groups_is_as_wide_as_a_phone(browser, large_page):
    with open_page(browser, large_page, viewport={"width": 390, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
def test_on_paper_tables_are_unfolded_and_figures_of_many_panels_are_wide(browser, large_page):
    with open_page(browser, large_page) as page:
        page.emulate_media(media="print")
        folded = page.locator(".fold:not([open]) table")
        assert folded.count()
        assert all(box["height"] > 50 for box in map(rectangle, folded.all()))
        figure = page.locator("#losses svg")
        assert rectangle(figure)["width"] > 0.8 * rectangle(page.locator("#losses"))["width"]


def rectangle(found):
    """Return the place and the size of an element in pixels."""
    return found.evaluate("element => element.getBoundingClientRect().toJSON()")


@pytest.mark.slow
def test_lines_along_an_axis_of_numbers(browser, tmp_path):
    with open_page(browser, write_report(write(tmp_path / "bench", *processes()))) as page:
        assert "processes" in page.locator("figure#against-nproc").inner_text()
        caption = page.locator("figure#against-nproc figcaption").inner_text()
        assert "ideal strong scaling" in caption


def test_hostile_names_are_text(browser, hostile_page):
    with open_page(browser, hostile_page) as page:
        assert page.title() == " ".join(HOSTILE.split())
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.scripts.length") == 1
        assert "49" not in page.locator("h1").inner_text()
        assert "$\\frac{1}{0}$" in page.locator("figure#throughput-memory").inner_text()
    markdown = hostile_page.with_suffix(".md").read_text()
    assert "<script" not in markdown
    assert "<img" not in markdown
    widths = {
        line.replace("\\|", "").count("|") for line in markdown.splitlines() if line.startswith("|")
    }
    assert widths == {13}


class Seen(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_what_records_say_is_text_on_the_page_and_in_its_figures(hostile_page):
    seen = Seen()
    seen.feed(hostile_page.read_text(encoding="utf-8"))
    assert seen.tags.count("script") == 1
    assert not {"img", "iframe", "object", "embed", "base", "form", "foreignobject"} & {*seen.tags}
    for name, value in seen.attributes:
        assert not name.startswith("on")
        assert "javascript:" not in (value or "").lower().replace(" ", "")
    figures = list((hostile_page.parent / "figures").glob("*.svg"))
    assert figures
    for figure in figures:
        for element in ElementTree.parse(figure).iter():
            assert not element.tag.endswith(("script", "foreignObject", "image"))
            assert not any(name.startswith("on") for name in element.attrib)


def test_both_pages_escape_by_their_templates():
    templates = page_templates()
    for name in ("template.html.j2", "plan.html.j2"):
        assert templates.autoescape(name), name
        folder = importlib.resources.files("shardwise.lab.report")
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count("|safe") == text.count("{{ style|safe }}")


def test_nothing_points_outside(page_file):
    text = page_file.read_text()
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?\s*(?:https?:)?//""", text) == []
    assert "@import" not in text


@pytest.mark.slow
def test_the_same_records_give_the_same_files(strategies_folder, tmp_path):
    first = write_report(strategies_folder, tmp_path / "a" / "page.html")
    second = write_report(strategies_folder, tmp_path / "b" / "page.html")
    names = [path.relative_to(first.parent) for path in first.parent.rglob("*") if path.is_file()]
    assert len(names) == 16  # the page, its table, seven figures twice
    for name in names:
        assert (first.parent / name).read_bytes() == (second.parent / name).read_bytes(), name
    assert read_bench(strategies_folder).sweep.title in (first.parent / "page.md").read_text()


def test_two_pages_in_one_folder_keep_their_figures(strategies_folder, tmp_path):
    first = write_report(strategies_folder, tmp_path / "a.html")
    figure = tmp_path / "a-figures" / "throughput-memory.png"
    before = figure.read_bytes()
    other = write_report(write(tmp_path / "other", *processes()), tmp_path / "b c.html")
    assert figure.read_bytes() == before
    assert 'href="a-figures/plane.svg"' in first.read_text()
    assert 'href="b%20c-figures/plane.svg"' in other.read_text()
    assert "(b%20c-figures/plane.png)" in other.with_suffix(".md").read_text()


@pytest.mark.slow
def test_figures_that_a_report_no_longer_has_are_gone_and_other_files_stay(
    strategies_folder, tmp_path
):
    figures = tmp_path / "figures"
    write_report(write(tmp_path / "other", *processes()), tmp_path / "report.html")
    (figures / "mine.svg").write_text("")
    assert (figures / "against-nproc.svg").exists()
    write_report(strategies_folder, tmp_path / "report.html")
    assert sorted(path.stem for path in figures.glob("*.svg")) == [
        "losses",
        "memory-parts",
        "mine",
        "plane",
        "sent",
        "steps",
        "throughput-memory",
        "training",
    ]


def test_axes_with_names_alike_have_figures_of_their_own(tmp_path):
    axes = tuple(Axis(name, ("1", "2"), (f"training.{name}",), True) for name in ("a b", "a-b"))
    plans = [CellPlan(f"{i}-{j}", {"a b": i, "a-b": j}, 1, "all", None) for i in "12" for j in "12"]
    page = write_report(
        write(tmp_path / "bench", sweep_of(axes, plans), {plan.id: record(plan) for plan in plans})
    ).read_text()
    assert 'id="against-a-b"' in page
    assert 'id="against-a-b--2"' in page


@pytest.mark.slow
def test_the_lead_counts_the_rounds_that_there_are(browser, page_file, tmp_path):
    with open_page(browser, page_file) as page:
        lead = page.locator(".lead").inner_text()
    assert [part in lead for part in ("6 cells", "3 rounds", "interleaved", "EPYC")] == [True] * 4
    sweep, records = strategies()
    records["ddp"] = dataclasses.replace(records["ddp"], rounds=[{"status": "ok"}])
    with open_page(
        browser, write_report(write(tmp_path / "short", sweep, records), tmp_path / "b.html")
    ) as page:
        lead = page.locator(".lead").inner_text()
    assert "1 to 3 rounds" in lead
    assert "interleaved" not in lead


@pytest.mark.slow
def test_a_phone_has_a_hint_that_figures_scroll(browser, page_file):
    with open_page(browser, page_file, viewport={"width": 390, "height": 800}) as page:
        assert page.locator("figure#losses .hint").is_visible()
    with open_page(browser, page_file) as page:
        assert not page.locator("figure#losses .hint").is_visible()


def test_a_standalone_figure_is_a_valid_file(page_file):
    for path in (page_file.parent / "figures").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
