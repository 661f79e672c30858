"""The report as a browser shows it."""

from __future__ import annotations

import json

import pytest

DARK, LIGHT = "--blink-settings=preferredColorScheme=0", "--blink-settings=preferredColorScheme=1"

#: The contrast of WCAG 2 between an element's text and what lies behind it.
CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = (colour) => {
  const [r, g, b] = rgb(colour).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const contrast = (element, property) => {
  const [a, b] = [light(getComputedStyle(element)[property]), light(behind(element))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
};
"""


def test_a_heading_sorts_its_table(browse, report):
    script = """
    const table = [...document.querySelectorAll("figure.table")]
      .find((f) => f.querySelector("figcaption").textContent === "By batch size")
      .querySelector("table");
    const heads = [...table.tHead.rows[0].cells];
    const column = heads.findIndex((h) => h.textContent.trim() === "geomean");
    const cells = () => [...table.tBodies[0].rows].map((r) => r.cells[column]);
    const values = () => cells().map((cell) => Number(cell.dataset.value));
    const state = () => heads[column].getAttribute("aria-sort");
    const found = [[state(), values()]];
    for (let i = 0; i < 2; i++) {
      heads[column].querySelector("button").click();
      found.push([state(), values()]);
    }
    heads[1].querySelector("button").click();
    const names = [...table.tBodies[0].rows].map((r) => r.cells[1].textContent);
    return JSON.stringify([found, names, state()]);
    """
    found, names, after = json.loads(browse(report, script))
    (before, original), (down, falling), (up, rising) = found
    assert (before, down, up, after) == (None, "descending", "ascending", None)
    assert len(set(original)) > 2
    assert falling == sorted(original, reverse=True)
    assert rising == sorted(original)
    assert names == sorted(names, key=lambda name: int(name.split()[0]))


@pytest.mark.parametrize(("scheme", "dark"), [(DARK, True), (LIGHT, False)])
def test_text_is_read_in_the_dark_and_in_the_light(browse, report, scheme, dark):
    script = f"""{CONTRAST}
    const texts = [...document.querySelectorAll("h1, h2, p, td, th, dt, dd, a, summary, code")];
    const drawn = [...document.querySelectorAll("svg text")];
    return JSON.stringify([
      light(getComputedStyle(document.body).backgroundColor),
      Math.min(...texts.map((e) => contrast(e, "color"))),
      Math.min(...drawn.map((e) => contrast(e, "fill"))),
    ]);
    """
    background, least, least_drawn = json.loads(browse(report, script, scheme))
    assert (background < 0.05) == dark
    assert least >= 4.5
    assert least_drawn >= 4.5


@pytest.mark.parametrize("width", [500, 1200])
def test_the_page_fits_its_window(browse, report, width):
    script = """
    document.querySelectorAll("details").forEach((d) => { d.open = true; });
    const root = document.documentElement;
    return JSON.stringify([root.scrollWidth, root.clientWidth]);
    """
    content, window = json.loads(browse(report, script, f"--window-size={width},900"))
    assert content <= window


def test_nothing_is_asked_of_a_network(browse, report):
    script = """
    return JSON.stringify([
      performance.getEntriesByType("resource").map((r) => r.name),
      document.querySelectorAll("svg").length,
      [...document.querySelectorAll("svg")].every((s) => s.getBBox().width > 0
        || s.closest("details:not([open])")),
    ]);
    """
    asked, drawings, drawn = json.loads(browse(report, script))
    assert asked == []
    assert drawings >= 5
    assert drawn


def test_links_lead_to_sections(browse, report):
    script = """
    return JSON.stringify([...document.querySelectorAll("nav a")]
      .map((a) => document.querySelector(a.getAttribute("href"))?.tagName));
    """
    found = json.loads(browse(report, script))
    assert len(found) >= 6
    assert set(found) == {"SECTION"}
