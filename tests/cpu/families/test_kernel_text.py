"""A kernel's digest is of what the compiler sees."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from confpred.families import kernel_text
from confpred.families.kernel_text import file_text, meaning, source_digest

KERNEL = """\
// A kernel.
#define TWICE(x) \\
    ((x) + (x))
extern "C" __global__ void scale(float* out, int n) {
    const int i = threadIdx.x;  // one element
    if (i < n) out[i] = TWICE(out[i]) - -1.0f;
    asm("mov.b32 %0, 1; // kept");
}
"""
SAME = [
    ("// A kernel.", "/* Another\n   comment. */"),
    ("  // one element", ""),
    (" // one", "\n\n    // one"),
    ("    if (i < n) ", "if(i<n)\n"),
    ("(float* out, int n)", "( float *out,\n  int n )"),
    ("TWICE(x) \\\n    ((x)", "TWICE(x) ((x)"),
]
OTHER = [
    ("int i", "inti"),
    ("- -1.0f", "--1.0f"),
    ("-1.0f", "-1.5f"),
    ("1; // kept", "1;"),
    ("1; // kept", "1;  // kept"),
    ("#define TWICE(x) \\\n", "#define TWICE(x)\n"),
    ("out[i]) -", "out [i] )\n-+"),
]


@pytest.mark.parametrize(("before", "after"), SAME)
def test_comments_and_blanks_mean_nothing(before: str, after: str) -> None:
    assert before in KERNEL
    assert meaning(KERNEL.replace(before, after)) == meaning(KERNEL)


@pytest.mark.parametrize(("before", "after"), OTHER)
def test_every_token_means_something(before: str, after: str) -> None:
    assert before in KERNEL
    assert meaning(KERNEL.replace(before, after)) != meaning(KERNEL)


def test_a_directive_stays_on_a_line_of_its_own() -> None:
    assert meaning("int a;\n#if X\nint b;\n#endif") == "int a ; \n# if X\n int b ; \n# endif\n"


def test_includes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_a_test.cuh").write_text("#pragma once\nint a;\n")
    (tmp_path / "of_a_test.cu").write_text('#include "of_a_test.cuh"\nint b;\n')
    first = source_digest("of_a_test.cu")
    assert first == hashlib.sha256(b"int a ; int b ;").hexdigest()[:16]
    (tmp_path / "of_a_test.cuh").write_text("int c;\n")
    for cached in (file_text, source_digest):
        cached.cache_clear()
    assert source_digest("of_a_test.cu") != first


def test_no_kernel_of_ours_has_what_the_rule_does_not_know(repository: Path) -> None:
    """Raw texts and line breaks within a text would be taken for something else."""
    sources = [*repository.glob("kernels/*.cu*"), *repository.glob("examples/*/*.cu")]
    assert len(sources) > 8
    for path in sources:
        assert 'R"' not in path.read_text()
        assert kernel_text.meaning(path.read_text()).count('"') % 2 == 0
