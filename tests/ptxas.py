"""The report of the assembler on a kernel."""

from __future__ import annotations

import io
import re

from cuda.core import Program

from confpred.cuda.compiler import options, program_text, supported_archs
from confpred.problem.operation import KernelSpec

#: The oldest target that we support, the one that was measured, and the newest that NVRTC knows.
ARCHS = ("sm_80", "sm_90a", supported_archs()[-1])


def resources(spec: KernelSpec, arch: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which is where spilled registers go."""
    log = io.StringIO()
    told = options(arch, ptxas_options=["-v"])
    Program(program_text(spec), "c++", told).compile("cubin", logs=log)
    found = [
        re.search(pattern, log.getvalue())
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack frame")
    ]
    registers, stack = (int(match[1]) for match in found if match)
    return registers, stack
