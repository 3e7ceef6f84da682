"""The diagrams of the docs are what the code computes, fit their frame, and are shown."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.pictures.canvas import DARK, SIZES, WIDTH, Canvas, text_width
from tools.pictures.house import draw_house
from tools.pictures.layers import cell_of, strip_of
from tools.pictures.ranks import PARTS
from tools.pictures.steps import ring_steps, scan_rounds

from shardwise.base.words import size
from shardwise.config import Parallel
from shardwise.lab.drawing.svg import PALETTE
from shardwise.lab.report.figures import PARTS as PARTS_OF_A_REPORT
from tools import diagrams

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "diagrams"
TEXTS = "{http://www.w3.org/2000/svg}text"
DDP = {"data": "ddp"}
FILES = sorted(FOLDER.glob("*.svg"))


def test_every_diagram_is_what_the_code_says():
    tool = runpy.run_path(str(ROOT / "tools" / "diagrams.py"))
    committed = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
    drawn = dict(tool["diagrams"]())
    assert drawn.keys() == committed.keys()
    stale = [name for name, svg in drawn.items() if svg != committed[name]]
    assert stale == [], "run python -m tools.diagrams, and look at what changed"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_diagram_is_small_has_a_title_and_is_shown_with_a_text(path):
    root = ElementTree.parse(path).getroot()
    assert path.stat().st_size < 60_000
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = re.compile(r"!\[([^\]]{30,})\]\([./a-z]*diagrams/" + path.name + r"\)\n\n(\S)")
    assert any(shown.search(page.read_text(encoding="utf-8")) for page in pages)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_texts_of_a_diagram_do_not_overlap(path):
    boxes = [*boxes_of(ElementTree.parse(path).getroot())]
    assert boxes
    for i, (left, right, y, text) in enumerate(boxes):
        for other_left, other_right, other_y, other in boxes[i + 1 :]:
            is_beside = right <= other_left or other_right <= left
            assert is_beside or abs(y - other_y) >= 11, (text, other)


def boxes_of(root: ElementTree.Element) -> Iterator[tuple[float, float, float, str]]:
    """Yield the left and right edge, the baseline and the content of each text."""
    for element in root.iter(TEXTS):
        text = element.text or ""
        styles = set(element.attrib["class"].split()) & SIZES.keys()
        # A reader's font is narrower than the one that fits are estimated with.
        width = 0.85 * text_width(text, *styles)
        shift = {"middle": 0.5, "end": 1.0}.get(element.attrib.get("text-anchor", ""), 0.0)
        left = float(element.attrib["x"]) - shift * width
        yield left, left + width, float(element.attrib["y"]), text


def test_a_text_that_may_not_fit_is_refused():
    canvas = Canvas()
    canvas.text(0, 12, "fits")
    with pytest.raises(AssertionError, match="too wide"):
        canvas.text(WIDTH - 10, 12, "does not fit")


def test_texts_can_be_read_on_light_and_on_dark_paper():
    assert DARK.keys() == PALETTE.keys()
    for palette in (PALETTE, DARK):
        for name in ("ink", "muted"):
            assert contrast(palette[name], palette["paper"]) >= 4.5
        for name in ("c1", "c2", "c3", "c4", "c5", "c7"):
            assert contrast(palette[name], palette["paper"]) >= 2.7


def contrast(one: str, other: str) -> float:
    """The contrast of WCAG 2: 21 of black and white."""
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_parts_have_the_colours_of_a_report():
    common = PARTS.keys() & PARTS_OF_A_REPORT.keys()
    assert common >= {"weights", "gradients", "optimizer", "activations"}
    assert {part: PARTS[part] for part in common} == {p: PARTS_OF_A_REPORT[p] for p in common}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_a_ring_adds_every_summand_once_and_ends_complete(num_ranks):
    states = [*ring_steps(num_ranks)]
    everyone = frozenset(range(num_ranks))
    assert len(states) == 1 + 2 * (num_ranks - 1)
    scattered = states[num_ranks - 1].pieces
    assert all(sum(piece == everyone for piece in own) == 1 for own in scattered)
    assert all(piece == everyone for own in states[-1].pieces for piece in own)
    for before, after in pairwise(states):
        for rank, piece in enumerate(after.arrived):
            assert piece is not None
            was, sent = before.pieces[rank][piece], before.pieces[rank - 1][piece]
            # A sum that has a summand already would count it twice.
            assert not was & sent or sent == everyone
            assert after.pieces[rank][piece] == was | sent


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8])
def test_after_a_scan_every_rank_knows_all_before_it(num_ranks):
    rounds = [*scan_rounds(num_ranks)]
    assert [distance for distance, _ in rounds] == [
        2**i for i in range((num_ranks - 1).bit_length())
    ]
    assert rounds[-1][1] == [frozenset(range(rank)) for rank in range(num_ranks)]


def test_a_house_leaves_out_arrows_that_follow_from_others():
    arrows = {"top": frozenset("ab"), "a": frozenset("b"), "b": frozenset()}
    svg = draw_house("house", arrows, "the top", "ground", "note").svg("house")
    heads = re.findall(r'<path class="f-faint"', svg)
    assert len(heads) == 2  # from the top to a, from a to b


@pytest.mark.parametrize(("data", "share"), [("ddp", 1.0), ("fsdp2", 0.5)])
def test_a_cell_has_layers_of_their_kind_with_what_is_frozen_and_held(data, share):
    parallel, layers = Parallel(data=data), ["recurrent"] * 3 + ["attention"]
    for subject, kinds in ((diagrams.DENSE, ["attention"] * 4), (diagrams.HYBRID, layers)):
        one = diagrams.placed(subject, Parallel(), 1)
        cell = cell_of(diagrams.placed(subject, parallel, 2), one, "")
        has_lora = subject is diagrams.HYBRID
        assert [bar.kind for bar in cell.bars[::2]] == kinds  # as config.json lists them
        assert {bar.kind for bar in cell.bars[1::2]} == {"feed-forward"}
        assert {bar.is_frozen for bar in cell.bars} == {has_lora}
        for bar in cell.bars:
            assert bar.held == pytest.approx([share] * 2, abs=1e-3)
            assert bar.adapters == pytest.approx([share] * 2 if has_lora else [], abs=1e-3)


def test_a_cell_counts_what_full_training_holds_and_sends():
    one, job = (diagrams.placed(diagrams.DENSE, Parallel(**p), n) for p, n in (({}, 1), (DDP, 2)))
    # 8,030,261,248 parameters (the model's card), each 4 bytes: weight, gradient, two states.
    assert [text for _, text in cell_of(job, one, "").lines] == [
        f"each holds {size(16 * 8_030_261_248)}",
        "sends in a step",
        f"gradients {size(4 * 8_030_261_248)}",
    ]


def test_a_strip_is_as_wide_as_units_cost_and_is_cut_where_the_split_says():
    canvas = Canvas()
    base = Parallel(pp=4, split="uniform")
    job = diagrams.placed(diagrams.HYBRID, base, 4)
    strip_of("model", diagrams.placed(diagrams.HYBRID, Parallel(), 1), [("uniform", job)])(
        canvas, 0
    )
    svg = ElementTree.fromstring(canvas.svg("strip"))
    rects = [r.attrib for r in svg.iter("{http://www.w3.org/2000/svg}rect")]
    costs = [float(r["width"]) for r in rects if r["height"] == "20" and "c7" in r["class"]]
    assert len(costs) == 8  # every fourth of 32 layers is attention
    shares = [text for *_, text in boxes_of(svg) if text.endswith("%")]
    total = sum(unit.seconds for unit in job.units)
    cut = job.split.boundaries
    of_ranks = [sum(u.seconds for u in job.units[a:b]) / total for a, b in pairwise(cut)]
    assert shares == [f"{share:.0%}" for share in of_ranks]
