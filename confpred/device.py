"""A *device*: the facts about a GPU that legality, features and rooflines need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from confpred.errors import UnknownDevice
from confpred.problem import Problem


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU model.

    Attributes:
        key: short name, as users type it and as models are filed under.
        product: start of the name that the driver reports.
        arch: NVRTC target.
        sm_count: multiprocessors.
        l2_bytes: level-2 cache.
        smem_per_sm: shared memory of a multiprocessor, bytes.
        smem_per_block: largest shared memory of one block (opt-in), bytes.
        dram_bytes_per_s: copy bandwidth, bytes read plus bytes written.
        tensor_flops: dense half-precision matrix rate with float32 accumulation.
    """

    key: str
    product: str
    arch: str
    sm_count: int
    l2_bytes: int
    smem_per_sm: int
    smem_per_block: int
    dram_bytes_per_s: float
    tensor_flops: float

    # The same on every architecture from sm_80 to sm_90 (CUDA C++ Programming Guide, "Compute
    # Capabilities"): limits of a multiprocessor, and what the driver takes of each block's share.
    regs_per_sm = 65_536
    warps_per_sm = 64
    blocks_per_sm = 32
    smem_reserved_per_block = 1_024

    def roofline_s(self, problem: Problem) -> float:
        """Seconds below which no kernel can go: the larger of its memory and its matrix time."""
        memory = problem.minimum_bytes / self.dram_bytes_per_s
        return max(memory, problem.flops / self.tensor_flops)


# Sizes are from the vendor's data sheets and the CUDA Programming Guide. The H100's and H200's two
# rates are measured (device copy at 3.0 and 4.3 TB/s, 8192^3 half-precision products at 750 to
# 798 TFLOP/s); the A100's are 85 % of its data sheet.
KNOWN: Mapping[str, Device] = MappingProxyType(
    {
        d.key: d
        for d in (
            Device(
                "h100",
                "NVIDIA H100 80GB HBM3",
                "sm_90a",
                132,
                52_428_800,
                233_472,
                232_448,
                3.0e12,
                770e12,
            ),
            Device(
                "h200", "NVIDIA H200", "sm_90a", 132, 62_914_560, 233_472, 232_448, 4.3e12, 790e12
            ),
            Device(
                "a100", "NVIDIA A100", "sm_80", 108, 41_943_040, 167_936, 166_912, 1.7e12, 265e12
            ),
        )
    }
)


def get_device(name: str | Device) -> Device:
    """The device called `name` (a key such as ``h100``, or the name that the driver reports).

    Raises:
        UnknownDevice: no description matches.
    """
    if isinstance(name, Device):
        return name
    if isinstance(name, str):
        wanted = name.strip().lower()
        for device in KNOWN.values():
            if wanted == device.key or wanted.startswith(device.product.lower()):
                return device
    raise UnknownDevice("device", name, " or ".join(KNOWN))
