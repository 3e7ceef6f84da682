"use strict";
// A click (or Enter) on a header sorts a table by that column, a second one in reverse. Cells
// without a value stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const headers = [...table.tHead.rows[0].cells];
  for (const [column, header] of headers.entries()) {
    const button = header.querySelector("button");
    if (!button) continue;
    button.addEventListener("click", () => {
      const descending = header.getAttribute("aria-sort") === "ascending";
      for (const other of headers) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const value = (body) => {
        const cell = body.rows[0].cells[column];
        const text = cell.dataset.value ?? cell.textContent.trim();
        return header.dataset.kind === "number" ? (text === "" ? null : Number(text)) : text;
      };
      const sign = descending ? -1 : 1;
      const bodies = [...table.tBodies].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true }));
      });
      table.append(...bodies);
    });
  }
}
