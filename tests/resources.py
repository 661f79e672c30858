"""What the compiler says of a kernel, on a machine without a GPU."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

from cuda.core import Program, ProgramOptions

from confpred.cuda.compiler import source_text, supported_archs
from confpred.families import KernelSource

#: The oldest target that we support, the one that was measured, and the newest that NVRTC knows.
ARCHS = ("sm_80", "sm_90a", supported_archs()[-1])


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one thread: registers, and bytes of local memory that registers are spilled to."""

    registers: int
    spilled_bytes: int


def resources_of(source: KernelSource, arch: str) -> Resources:
    """Compile `source` for `arch`, past the cache, with the options that the library uses.

    Raises:
        Exception: the compiler refused; the text is its log.
    """
    log = io.StringIO()
    options = ProgramOptions(arch=arch, std="c++17", name=source.entry, ptxas_options=["-v"])
    Program(source_text(source), "c++", options).compile("cubin", logs=log)
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    stores = re.search(r"(\d+) bytes spill stores", log.getvalue())
    if registers is None or stores is None:
        raise RuntimeError(f"no resources in the compiler's log: {log.getvalue()!r}")
    return Resources(int(registers[1]), int(stores[1]))
