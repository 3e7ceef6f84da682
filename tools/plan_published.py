"""Write planned over published tokens per second: `python -m tools.plan_published`."""

from tests.planner.published import RUNS, compared, each, sums
from tools.plan_pages import DOCS, START, with_table

if __name__ == "__main__":
    rows, page = [*compared()], DOCS / "published-layouts.md"
    text = with_table(page.read_text(encoding="utf-8"), sums(rows), START.format("times"))
    page.write_text(text, encoding="utf-8")
    RUNS.with_suffix(".md").write_text("\n".join(each(rows)) + "\n", encoding="utf-8")
    print(*sums(rows), sep="\n")
