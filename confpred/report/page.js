// A heading sorts its table: numbers downwards first, texts upwards, and the other way at the next
// click. Rows that are alike keep their order.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const numeric = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[column];
      return numeric ? Number(cell.dataset.value ?? NaN) : cell.textContent;
    };
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (!numeric) return x.localeCompare(y, "en", { numeric: true });
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return x - y;
    };
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => (down ? order(b, a) : order(a, b)));
    table.tBodies[0].append(...rows);
  }));
}
