"""The documentation: its links and paths lead somewhere, its map is whole, decisions are found."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from confpred import __version__

ROOT = Path(__file__).parents[3]
#: Made here by builds and runs, and ignored by git.
MADE = {"build", "dist", "out", "runs"}
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "datasets/**/*.md", "tests/**/*.md", "kernels/**/*.md")
    for page in ROOT.glob(pattern)
)
DECISIONS = ROOT / "docs" / "decisions"
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_REFERENCE = re.compile(
    r"\b(?:[Dd]ecision|[Ee]ntry|[Dd]ecisions|[Ee]ntries)\s+(\d+)(?:\s+and\s+(\d+))?"
)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_found_from_the_readme() -> None:
    found, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in found or page.suffix != ".md":
            continue
        found.add(page)
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        left += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) - found == set()


def named() -> list[str]:
    """Return the code spans of docs/architecture.md that look like a path."""
    text = _FENCED.sub("", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    spans = re.findall(r"`([^`\n]+)`", text)
    return [s for s in spans if re.fullmatch(r"[\w.][\w./-]*", s) and ("/" in s or s.count("."))]


def test_every_path_on_the_map_exists() -> None:
    paths = [path for path in named() if path not in {"confpred.conv2d", "card.json"}]
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


_PATH = re.compile(r"(?<![\w./{<$*:-])((?:[\w.-]+/)*[\w-]+\.(?:cuh?|py|md|json|toml))(?![\w/*{])")
#: Files in examples of commands and folders, which a reader makes.
EXAMPLES = {"FILE.py", "folder/name.json", "mine.py", "name.cu"}


def comments(path: Path) -> Iterator[str]:
    """Yield the comments of a source, and of Python the docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from re.findall(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL)
        return
    for found in tokenize.generate_tokens(io.StringIO(text).readline):
        if found.type == tokenize.COMMENT:
            yield found.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_every_path_in_a_comment_exists() -> None:
    """A path with a folder is of the repository, one without of a source anywhere in it; what is
    in capitals stands for any name."""
    tops = ("kernels", "confpred", "service", "benchmarks", "datasets", "examples", "tests")
    sources = [p for top in tops for p in (ROOT / top).rglob("*") if p.suffix[:3] in (".py", ".cu")]
    names, read, missing = {path.name for path in sources}, 0, []
    for path in sources:
        for word in _PATH.findall("\n".join(comments(path))):
            anywhere = "/" not in word
            if word in EXAMPLES or (anywhere and word.endswith((".md", ".json", ".toml"))):
                continue
            pattern = re.sub(r"\b[A-Z]+\b", "*", word)
            bases = (ROOT, path.parent, ROOT / "tests")
            read += 1
            if not (word in names if anywhere else any([*b.glob(pattern)] for b in bases)):
                missing.append(f"{path.relative_to(ROOT)}: {word}")
    assert missing == []
    assert read > 200


def folders(parent: Path) -> Iterator[str]:
    for path in sorted(parent.iterdir()):
        hidden = path.name.startswith((".", "_")) and path.name != ".ci"
        made = path.name in MADE or path.name.endswith(".egg-info")
        if path.is_dir() and not hidden and not made:
            yield f"{path.relative_to(ROOT).as_posix()}/"


def test_every_folder_and_every_room_is_on_the_map() -> None:
    rooms = list(folders(ROOT / "confpred"))
    assert "confpred/problem/" in rooms
    assert [*folders(ROOT), *rooms] == [
        path for path in [*folders(ROOT), *rooms] if path in named()
    ]


def test_rooms_are_shown_in_the_order_of_imports() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^layers = \[\n(.*?)^\]", settings, re.DOTALL | re.MULTILINE)
    layers = re.findall(r'"(.*)"', listed)
    place = {name.strip(): i for i, layer in enumerate(layers) for name in layer.split("|")}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| `confpred/(\w+)/` \|", text, re.MULTILINE)
    order = [place[room] for room in rooms]
    assert order == sorted(order, reverse=True)


def decisions() -> list[int]:
    """Return the numbers of all decisions, page by page."""
    found = []
    for page in sorted(DECISIONS.glob("*.md")):
        heads = re.findall(r"^## (\d+)\. ", page.read_text(encoding="utf-8"), re.MULTILINE)
        numbers = [int(number) for number in heads]
        assert numbers == sorted(set(numbers)), page.name  # a removed one leaves a gap
        found += numbers
    return found


def test_a_number_is_of_one_decision() -> None:
    numbers = decisions()
    assert len(numbers) > 50
    assert len(numbers) == len(set(numbers))


def test_what_refers_to_a_decision_finds_it() -> None:
    known = set(decisions())
    suffixes = {".py", ".md", ".cu", ".cuh", ".toml"}
    sources = [
        path
        for folder in folders(ROOT)
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
    ]
    wrong = {}
    for path in [*sources, *ROOT.glob("*.md"), *ROOT.glob("*.toml")]:
        for match in _REFERENCE.finditer(path.read_text(encoding="utf-8")):
            if not {int(number) for number in match.groups() if number} <= known:
                wrong[str(path)] = match[0]
    assert wrong == {}
    assert any(_REFERENCE.search(path.read_text(encoding="utf-8")) for path in sources)


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, *releases = re.findall(r"^## \[(.*?)\](?: - (\S+))?$", text, re.MULTILINE)
    assert unreleased == ("Unreleased", "")
    assert __version__ in [version for version, _ in releases]
    dates = [date for _, date in releases]
    assert dates == sorted(dates, reverse=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
