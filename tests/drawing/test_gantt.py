from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from shardwise.base.schedule.timeline import Timeline
from shardwise.config import UserError
from shardwise.lab.drawing.gantt import COLOURS, IDLE, draw_gantt, gantt_file, gantt_svg
from shardwise.lab.drawing.svg import colour, drawing
from tests.drawing.conftest import INSTANT, two_timelines

SVG = "{http://www.w3.org/2000/svg}"


def drawn(timelines: dict[str, Timeline]) -> Figure:
    with drawing():
        return draw_gantt(timelines)


def bars(figure: Figure) -> list[tuple[float, float, float, str, float]]:
    """Return begin, end, middle of the row, colour and opacity of each bar."""
    (axes,) = figure.axes
    shown = []
    for collection in axes.collections:
        fill = collection.get_facecolor()[0]
        for path in collection.get_paths():
            box = path.get_extents()
            place = box.x0, box.x1, round((box.y0 + box.y1) / 2, 6)
            shown.append((*place, to_hex(fill), float(fill[3])))
    return shown


def test_every_action_is_a_bar_in_its_ranks_row_on_one_time_axis():
    timelines = two_timelines()
    figure = drawn(timelines)
    (axes,) = figure.axes
    rows = [round(float(y), 6) for y in axes.get_yticks()]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"] * 2
    longest = max(timeline.seconds for timeline in timelines.values())
    assert axes.get_xlim() == (0.0, longest)
    expected = Counter()
    for number, timeline in enumerate(timelines.values()):
        for event in timeline.events:
            if event.end > event.start:
                fill = colour(COLOURS[event.kind])
                # Chunks 0 and 3 are rank 0's: the further one is paler.
                opacity = 1.0 if event.chunk < 2 else 0.725
                place = round(event.start, 6), rows[2 * number + event.rank]
                expected[*place, fill, opacity] += 1
        for rank in (0, 1):
            expected[0.0, rows[2 * number + rank], colour(IDLE), 1.0] += 1
    shown = bars(figure)
    assert Counter((round(x0, 6), y, fill, a) for x0, _, y, fill, a in shown) == expected
    ends = {x1 for _, x1, *_ in shown}
    assert max(ends) == longest
    # The gap before the next bar is thin. Actions take whole seconds, and bars end a bit earlier.
    seconds = [x1 - x0 for x0, x1, _, fill, _ in shown if fill != colour(IDLE)]
    assert all(length % 1 > 0.95 or length % 1 < 0.001 for length in seconds)


def test_titles_bubbles_and_numbers_are_written():
    timelines = two_timelines()
    texts = [text.get_text() for text in drawn(timelines).axes[0].texts]
    for name, timeline in timelines.items():
        assert name in texts
        assert any(f"bubble {timeline.bubble():.1%}" in text for text in texts)
        for rank in (0, 1):
            assert f"{timeline.bubble(rank):.1%} idle" in texts
    assert any("less time" in text for text in texts)
    assert {"0", "1", "2", "3"} <= set(texts)


def test_a_predicted_step_is_not_compared_with_a_measured_one():
    timelines = two_timelines()
    for predicted in timelines:
        with drawing():
            figure = draw_gantt(timelines, [predicted])
        assert not any("less time" in text.get_text() for text in figure.axes[0].texts)


def test_the_legend_names_what_is_drawn():
    def legend(timelines: dict[str, Timeline]) -> list[str]:
        return [text.get_text() for text in drawn(timelines).legends[0].texts]

    assert legend(two_timelines()) == [
        "forward",
        "backward, inputs",
        "backward, weights",
        "idle",
        "paler: further chunks of a rank",
    ]
    assert legend({"nothing": INSTANT}) == ["forward", "idle"]


def test_the_svg_has_the_palette_s_colours_and_ids_of_its_own():
    svg = gantt_svg(two_timelines(), "timelines")
    root = ElementTree.fromstring(svg)
    assert "uniform: " in root.findtext(f"{SVG}title", "")
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"uniform", "<balanced> & 'more'", "rank 1"} <= texts
    assert all(colour(name) in svg for name in ("c1", "c2", "c3", "line", "ink"))
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert all(name.startswith("timelines-") for name in ids)


def test_a_step_that_takes_no_time_is_drawn():
    assert ElementTree.fromstring(gantt_file({"nothing": INSTANT})) is not None


def test_without_matplotlib_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install matplotlib$"):
        gantt_file(two_timelines())
