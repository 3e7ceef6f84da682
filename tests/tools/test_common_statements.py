"""Numbers of the page of common statements stand on the page or in the record that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "common-statements.md"
RECORD = ROOT / "results" / "study" / "cpu.json"
ROWS = [
    line.strip("| ").split(" | ")
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| what people say")
]
LINK = re.compile(r"\[[^]]*\]\(([^)]+)\)")
BACK = re.compile(r"common-statements\.md(?:#([\w-]+))?\)")
NO_FIGURES = re.compile(r"`[^`]*`|GPT-2|1F1B|H200")
FIGURE = re.compile(r"[-+]?\d[\d,]*(?:[./]\d+)?%?")


def in_record() -> set[str]:
    """Figures of the study's cells of 128 tokens, as the page writes them."""
    cells: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["cells"]

    def states(cell: str) -> dict[str, str]:
        of_rank = cells[cell]["state_bytes"][0]
        return {part: f"{held / 2**20:.2f}" for part, held in of_rank.items()}

    def sent(cell: str) -> str:
        return f"{max(cells[cell]['sent_bytes_per_step']):,}"

    naive, apart, whole = (
        states(f"{name}-128-lora") for name in ("fsdp1-naive", "fsdp1-separate", "single")
    )
    assert naive["weights"] == apart["weights"]
    parameters = cells["single-128-lora"]["parameters"]
    return {
        *(naive["weights"], whole["weights"], naive["gradients"], apart["gradients"]),
        *states("single-128-full").values(),
        *map(sent, ("ddp-128-lora", "zero2-128-lora", "ddp-128-full", "fsdp2-reshard-128-full")),
        *(f"{parameters[kind]:,}" for kind in ("trainable", "total")),
    }


def leads_to(*cells: str) -> set[Path]:
    """Files of the project that cells lead to."""
    links = {link.partition("#")[0] for cell in cells for link in LINK.findall(cell)}
    return {(PAGE.parent / link).resolve() for link in links if "://" not in link}


def pages_behind_rows() -> list[Path]:
    """The docs pages that measured or source cells lead to, sorted."""
    found = {path for row in ROWS for path in leads_to(*row[2:])}
    docs = ROOT / "docs"
    return sorted(path for path in found if path.is_relative_to(docs) and path.suffix == ".md")


def without_source(measured: str) -> set[str]:
    """Figures of a cell that stand neither on the pages nor in the record that it leads to."""
    targets = leads_to(measured)
    assert all(target == RECORD or target.suffix == ".md" for target in targets)
    texts = [path.read_text(encoding="utf-8") for path in targets if path.suffix == ".md"]
    known = {figure.strip("-+") for text in texts for figure in FIGURE.findall(text)}
    known |= in_record() if RECORD in targets else set()
    said = FIGURE.findall(NO_FIGURES.sub("", LINK.sub("", measured)))
    return {figure.strip("-+") for figure in said} - known


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0])[:50])
def test_a_number_stands_where_its_link_leads(row):
    _, holds, measured, source = row
    assert holds != "–"
    assert {measured, source} != {"–"}
    assert not without_source(measured)


@pytest.mark.parametrize("page", pages_behind_rows(), ids=lambda page: page.stem)
def test_a_page_behind_a_row_leads_back(page):
    assert BACK.search(page.read_text(encoding="utf-8"))


def test_links_back_lead_to_a_section():
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    sections = {heading.lower().replace(" ", "-") for heading in headings}
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    named = {section for text in texts for section in BACK.findall(text)} - {""}
    assert named == sections


def test_a_number_from_nowhere_is_found():
    assert without_source("4.81 and 4.82 ([record](../../results/study/cpu.json))") == {"4.82"}
    assert without_source("12.4 and 12.45 ([page](../guides/gpt2-large.md))") == {"12.45"}
    assert without_source("7 to 8") == {"7", "8"}


def test_the_page_has_rows_with_measured_numbers():
    assert all(len(row) == 4 for row in ROWS)
    assert sum(any(map(str.isdigit, LINK.sub("", row[2]))) for row in ROWS) >= 39


def test_autocast_of_torch_has_no_products_in_8_bits():
    linear, x = torch.nn.Linear(16, 16), torch.randn(2, 16)
    with (
        pytest.warns(UserWarning, match="not supported"),
        torch.autocast("cpu", dtype=torch.float8_e4m3fn),
    ):
        assert linear(x).dtype is torch.float32
