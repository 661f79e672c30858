"""A *bundle*: a plan and its compiled kernels in one folder, for starts without a compiler.

    plan.json       what is launched (`confpred.predict.plans`)
    manifest.json   what the kernels were made of, and for which architecture
    kernels/        the kernels (`confpred.cuda.bundles`)

Nothing in it says where it lies, so that it can be copied to any machine with that kind of GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from confpred.cuda.bundles import bundle_files, open_kernels
from confpred.cuda.compiler import nvrtc_version
from confpred.cuda.compiling import compile_all
from confpred.files import write_folder
from confpred.predict.plans import Plan, plan_text
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device, get_device
from confpred.problem.operation import KernelSpec

PLAN = "plan.json"


def write_bundle(plan: Plan, folder: Path, extra: Iterable[KernelSpec] = ()) -> None:
    """Compile all kernels of `plan`, and `extra`, for its device, and write the bundle, whole or
    not at all. Needs no GPU.

    Raises:
        CompileError: NVRTC refused a kernel.
        MissingExtra: the compiler is not installed.
        StorageError: the file system refused, or the folder exists and is not empty.
    """
    arch = plan.device.arch
    compiled = compile_all([*plan.specs(), *extra], arch)
    cubins = {spec: kernel.cubin for spec, kernel in compiled.items()}
    files = bundle_files(cubins, arch, nvrtc_version())
    write_folder(folder, {PLAN: plan_text(plan), **files})


def open_bundle(folder: Path, device: str | Device) -> Predictor:
    """Take kernels from the bundle at `folder` from now on, and choose by its plan.

    Returns:
        A predictor that makes the plan's choices; for other problems it asks the newest model, and
        their kernels are compiled as ever.

    Raises:
        DataError: it is no bundle, is damaged, or was made for other kernels.
        InvalidInput: it was made for another device or architecture; the error names the file.
    """
    known = get_device(device)
    predictor = Predictor.load(pins=folder / PLAN, device=known)
    open_kernels(folder, known.arch)
    return predictor
