"""The pages of the service as a browser shows them: without scripts, and by the keyboard alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise

import pytest
from chromium import Tab, tab
from served import Server, running
from test_report import CONTRAST

from confpred.problem.conv2d import Problem
from confpred.service import tokens
from confpred.service.schema import EXAMPLE

LAYER = "n=32&c=64&h=56&w=56&k=64&r=3&s=3&padding=1&groups=8&device=h100&top=3"
PAGES = {
    "form": "/",
    "answer": f"/?{LAYER}#answer",
    "error": "/?n=32&c=65&groups=8",
    "api": "/docs",
}
FORM = [*("n", "c", "d", "h", "w", "k", "layout"),
        *("t", "r", "s", "stride", "padding", "dilation", "groups", "cut"),
        *("dtype", "direction", "activation", "bias", "residual", "deterministic"),
        *("device", "top")]  # fmt: skip


@pytest.fixture(scope="module")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def browser(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(chromium, tmp_path_factory.mktemp("profile")) as opened:
        opened.call("Emulation.setScriptExecutionDisabled", value=True)
        yield opened


@pytest.fixture
def page(browser: Tab) -> Tab:
    browser.requests.clear()
    browser.said.clear()
    return browser


def focused(page: Tab) -> str:
    """Return what has the focus: its id, or else its words."""
    script = "(({id, innerText}) => id || innerText)(document.activeElement)"
    return str(page.run(script)).strip()


def walk(page: Tab) -> list[str]:
    """Return what Tab leads to, in order, until it leaves the page; all has an outline then."""
    found: list[str] = []
    while len(found) < 200:
        page.press("Tab")
        if page.run("document.activeElement === document.body"):
            break
        found.append(focused(page))
        style, width = page.run(
            "(({outlineStyle, outlineWidth}) => [outlineStyle, parseFloat(outlineWidth)])"
            "(getComputedStyle(document.activeElement))"
        )
        assert style != "none", found[-1]
        assert width >= 2, found[-1]
    return found


@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES)
def test_no_other_host_is_asked_and_nothing_is_complained_of(
    page: Tab, server: Server, path: str
) -> None:
    page.open(f"{server.url}{path}")
    assert page.run("document.querySelectorAll('h1').length") == 1
    asked = [url for url in page.requests if not url.startswith("data:")]
    assert [url.partition("#")[0] for url in asked] == [f"{server.url}{path}".partition("#")[0]]
    # Chromium logs a reply of 422 as it does one of 404.
    complaints = [said for said in page.said if "422 (Unprocessable" not in said]
    assert complaints == []
    assert page.run("getComputedStyle(document.body).maxWidth") != "none"  # it has its style


def test_a_layer_is_asked_for_by_the_keyboard_alone(page: Tab, server: Server) -> None:
    page.open(f"{server.url}/")
    while focused(page) != "groups":
        page.press("Tab")
    page.type("64")
    while focused(page) != "device":
        page.press("Tab")
    page.press("ArrowDown")
    page.press("Tab")
    page.type("4")
    page.press("Tab")
    assert focused(page) == "Ask"
    page.press("Enter")
    page.wait()
    assert page.run("location.hash") == "#answer"
    assert "groups=64 " in page.run("document.querySelector('#answer code').innerText")
    assert " on h200" in page.run("document.querySelector('#answer p').innerText")
    rows = page.run(
        "[...document.querySelector('#answer table').tBodies[0].rows].map(r => r.innerText)"
    )
    assert [row.split("\t")[0] for row in rows] == ["1", "2", "3", "4"]
    asked = EXAMPLE.to_json() | {"groups": 64}
    choices = server.predict({"device": "h200", "problem": asked, "top": 4}).json()["choices"][0]
    assert [row.split("\t")[1] for row in rows] == [f"{c['predicted_ms']:.4f}" for c in choices]
    assert [row.split("\t")[4].split()[0] for row in rows] == [c["provider"] for c in choices]
    # The form has what was asked, for the next question.
    assert page.run("document.querySelector('#groups').value") == "64"


def test_tab_leads_through_links_and_form_in_order_and_is_seen(page: Tab, server: Server) -> None:
    page.open(f"{server.url}/")
    found = walk(page)
    assert found[0] == "Skip to the content"
    start = found.index("n")
    assert "The API" in found[:start]
    assert found[start : start + len(FORM) + 1] == [*FORM, "Ask"]
    assert {f.name for f in fields(Problem)} <= set(FORM)


def test_a_refused_field_has_the_focus_and_the_reason(page: Tab, server: Server) -> None:
    page.open(f"{server.url}/?{LAYER.replace('c=64', 'c=65')}")
    assert page.run("document.title") == "Error: confpred"
    assert focused(page) == "c"
    reason = "c=65 is not allowed; allowed: a multiple of groups=8"
    (node,) = [n for n in nodes(page, "textbox") if n["name"]["value"].startswith("input channels")]
    assert node["description"]["value"].startswith(reason)
    assert properties(node)["invalid"] == "true"
    assert page.run("document.querySelector('[role=alert] a').innerText") == reason
    assert page.run("document.querySelector('#answer')") is None


def nodes(page: Tab, role: str) -> list[dict[str, object]]:
    """Return what a screen reader sees of a role."""
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    return [n for n in tree if not n["ignored"] and n.get("role", {}).get("value") == role]


def properties(node: dict[str, object]) -> dict[str, object]:
    return {p["name"]: p["value"].get("value") for p in node["properties"]}  # type: ignore[attr-defined]


def test_a_screen_reader_finds_names_for_all(page: Tab, server: Server) -> None:
    page.open(f"{server.url}{PAGES['answer']}")
    assert page.run("document.documentElement.lang") == "en"
    for role, least in {"banner": 1, "main": 1, "navigation": 1}.items():
        assert len(nodes(page, role)) == least, role
    wanted = {"textbox": 12, "combobox": 4, "checkbox": 3, "button": 1, "group": 4}
    for role, least in (wanted | {"image": 4, "table": 4, "region": 4, "link": 5}).items():
        found = [node["name"]["value"] for node in nodes(page, role)]  # type: ignore[index]
        assert len(found) >= least, role
        assert all(found), role
    for image in nodes(page, "image"):
        assert " ms" in str(image["description"]) or "%" in str(image["description"])
    levels = page.run("[...document.querySelectorAll('h1,h2,h3')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    ids = page.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert (
        page.run(
            "[...document.querySelectorAll('a[href^=\"#\"]')]"
            ".filter(a => !document.getElementById(a.hash.slice(1))).length"
        )
        == 0
    )


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("path", ["answer", "error", "api"])
def test_texts_are_read_in_the_dark_and_in_the_light(
    page: Tab, server: Server, scheme: str, path: str
) -> None:
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    page.open(f"{server.url}{PAGES[path]}")
    found = page.run(f"""(() => {{ {CONTRAST}
      const all = "h1,h2,h3,p,td,th,dt,dd,a,label,legend,input,select,button,caption,pre";
      const texts = [...document.querySelectorAll(all)];
      const drawn = [...document.querySelectorAll("svg text")];
      return JSON.stringify([
        light(getComputedStyle(document.body).backgroundColor),
        Math.min(...texts.map((e) => contrast(e, "color"))),
        Math.min(21, ...drawn.map((e) => contrast(e, "fill"))),
      ]); }})()""")
    background, least, drawn = json.loads(found)
    assert (background < 0.05) == (scheme == "dark")
    assert least >= 4.5
    assert drawn >= 4.5


@pytest.mark.parametrize("width", [320, 1200])
def test_pages_fit_their_window(page: Tab, server: Server, width: int) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
        mobile=False,
    )  # fmt: skip
    for path in PAGES.values():
        page.open(f"{server.url}{path}")
        assert page.run("document.documentElement.scrollWidth") <= width, path
    page.call("Emulation.clearDeviceMetricsOverride")


def test_a_text_with_markup_stays_a_text(page: Tab, server: Server) -> None:
    attack = "%22%3E%3Cscript%3Edocument.title='in'%3C/script%3E%3Cimg src=x onerror=alert(1)%3E"
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    try:
        for name in ("n", "device", "dtype", "bias", "no-such-field", attack):
            page.open(f"{server.url}/?{LAYER}&{name}={attack}")
            assert page.run("document.title") == "Error: confpred"
            assert page.run("document.querySelectorAll('script, img').length") == 0
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=True)


def test_a_browser_sends_a_token_as_a_password(page: Tab, chromium: str, tmp_path) -> None:
    secret, kept = tokens.make("people", "read")
    tokens.write(tmp_path / "tokens.json", [kept])
    with running(tmp_path, "--tokens", str(tmp_path / "tokens.json")) as guarded:
        page.open(f"http://people:{secret}@127.0.0.1:{guarded.port}/?{LAYER}")
        assert page.run("document.querySelector('#answer h2').innerText") == "The answer"
