"""Plain words: the word list in CONTRIBUTING.md, short sentences, and budgets of words.

Pages are read whole; of Python modules docstrings, comments and messages, of kernels comments.
"""

from __future__ import annotations

import ast
import inspect
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "datasets/*.md", "tests/*.md")
    for page in ROOT.glob(pattern)
)
#: Words in all pages of docs/ and at the top of the repository, and in the decisions.
BUDGETS = {"*.md": 30_000, "docs/decisions/*.md": 8_000}
_SOURCES = {".py", ".cu", ".cuh"}
#: Words of a sentence, on average over a page.
LONGEST_AVERAGE = 20
_OF_CODE = re.compile(r"^(?!\s*#).*\n\s*(#:? (?:What|Of) .*)", re.MULTILINE)  # its first line
_NOT_FIRST = re.compile(r"(?:^|[.:?!]\s+|\n\s*\n\s*)(What|Of)\s")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SPAN = re.compile(r"`[^`\n]*`")
_TARGET = re.compile(r"\]\([^)\s]*\)")
#: A line that is no sentence: of a table, a heading, an indented block.
_NO_SENTENCE = re.compile(r"^(?:\||#| {4}).*$", re.MULTILINE)
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ", re.MULTILINE)
#: Names of code in its prose: spans, attributes before a colon, macros and elements of arrays.
_NAMES = re.compile(r"``.*?``|`.*?`|^ *\w+(?:, \w+)*: |\b[A-Z_]{2,}\b|\w+(?=\[)", re.M | re.DOTALL)
#: The field's own: registers that slide over rows, units in the last place, an operating system.
_OF_THE_FIELD = re.compile(r"sliding\s+window|last place|Windows")
#: The list forbids it for a part of a suite; charts and random numbers are drawn, too.
_ALLOWED_IN_CODE = {"draw"}


def prose(text: str) -> str:
    """Return a page without code, comments and the targets of links."""
    for pattern, instead in (
        (_FENCED, "\n\n"),
        (_COMMENT, "\n\n"),
        (_SPAN, "code"),
        (_TARGET, "]"),
    ):
        text = pattern.sub(instead, text)
    return text


def sentences(text: str) -> list[str]:
    """Return the sentences of a page; tables and headings have none."""
    text = _ITEM.sub("\n\n", _NO_SENTENCE.sub("\n\n", prose(text)))
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [s for part in paragraphs for s in re.split(r"(?<=[.?!])[)*]*\s+", part) if s]


def not_to_use() -> list[str]:
    """Return the words in the last column of the word list."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, section = page.partition("\n## Words\n")
    rows = re.findall(r"^\|(?!---)[^|]*\|[^|]*\|([^|]*)\|$", section.partition("\n## ")[0], re.M)
    return [word.strip() for row in rows[1:] for word in row.split(",") if word.strip()]


def forbidden(words: list[str], text: str) -> list[str]:
    """Return those of `words` that are in `text`, in the plural too."""
    listed = "|".join(map(re.escape, words))
    return re.findall(rf"\b(?<!in )(?:{listed})s?\b", text, re.IGNORECASE)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_word_list_is_read() -> None:
    words = not_to_use()
    assert {"donor", "sitting", "ours", "what serves"} <= set(words)
    assert len(words) == len(set(words))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_has_no_word_that_the_list_forbids(page: Path) -> None:
    # The list itself names them.
    text = re.sub(r"\n## Words\n.*?(?=\n## )", "", page.read_text(encoding="utf-8"), flags=re.S)
    assert forbidden(not_to_use(), prose(text)) == []
    assert [s for s in sentences(text) if re.match(r"\W*(What|Of)\s", s)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_sentences_are_short(page: Path) -> None:
    lengths = [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert lengths
    assert sum(lengths) / len(lengths) <= LONGEST_AVERAGE


@pytest.mark.parametrize("pattern", BUDGETS)
def test_pages_keep_within_their_budget(pattern: str) -> None:
    folders = (ROOT, ROOT / "docs", ROOT / "docs" / "decisions") if pattern == "*.md" else (ROOT,)
    pages = [page for folder in folders for page in folder.glob(pattern)]
    assert len(pages) > 3
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= BUDGETS[pattern]


def docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) is not None:
            yield text


def messages(path: Path) -> Iterator[str]:
    """Yield the texts of a module that have several words: errors, log lines, help, docstrings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = inspect.cleandoc(node.value)
            if len(text.split()) > 2:
                yield text


def comments(path: Path) -> str:
    """Return the comments of a module or a kernel, line by line."""
    if path.suffix != ".py":
        return "\n".join(re.findall(r"//(.*)", path.read_text(encoding="utf-8")))
    with path.open("rb") as file:
        tokens = [t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT]
    return "\n".join(token.lstrip("#: ") for token in tokens)


def words_of_code(text: str) -> list[str]:
    """Return the words of the list in prose that stands in code."""
    words = [word for word in not_to_use() if word not in _ALLOWED_IN_CODE]
    return forbidden(words, _OF_THE_FIELD.sub("", _NAMES.sub("code ", text)))


@pytest.mark.parametrize("folder", ["benchmarks", "confpred", "datasets", "kernels", "service"])
def test_code_has_no_word_that_the_list_forbids(folder: str) -> None:
    wrong = {}
    for path in sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in _SOURCES):
        texts = [comments(path), *(messages(path) if path.suffix == ".py" else ())]
        if found := [word for text in texts for word in words_of_code(text)]:
            wrong[named(path)] = found
    assert wrong == {}


def test_no_docstring_and_no_comment_begins_with_what_or_of() -> None:
    folders = ("benchmarks", "confpred", "datasets", "examples", "service", "tests")
    wrong = []
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        wrong += [f"{named(path)}: {t[:60]}" for t in docstrings(path) if _NOT_FIRST.search(t)]
        wrong += [f"{named(path)}: {t}" for t in _OF_CODE.findall(path.read_text())]
    assert wrong == []


def test_what_the_checks_look_for_is_found() -> None:
    page = "# Head\n\nOne two three.\nFour (five). Six\n\n- Seven `a b` eight\n\n| a | b |\n"
    assert sentences(page) == ["One two three.", "Four (five).", "Six", "Seven code eight"]
    assert _NOT_FIRST.search("What serves a layer.")
    assert _NOT_FIRST.search("Return it. Of these, two.")
    assert not _NOT_FIRST.search("Return what of it is there.")
    assert words_of_code("donor: the `window` of a sliding\nwindow, BOARD, window[0]") == []
    assert words_of_code("Put it in place of the donor's window.") == ["donor", "window"]
