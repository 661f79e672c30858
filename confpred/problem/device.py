"""A *device*: the facts about a GPU that legality, features and rooflines need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from confpred.errors import UnknownDevice
from confpred.problem.record import Record


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
        simt_flops: float32 rate of ordinary arithmetic.
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
    simt_flops: float

    # Of sm_80 and sm_90 (CUDA C++ Programming Guide, "Compute Capabilities"): limits of a
    # multiprocessor, and the driver's part of each block's shared memory. A device of another
    # architecture may need a subclass that has others.
    regs_per_sm = 65_536
    warps_per_sm = 64
    blocks_per_sm = 32
    smem_reserved_per_block = 1_024

    def roofline_s(self, problem: Record) -> float:
        """Seconds below which no kernel can go: the larger of its memory and its arithmetic time,
        on tensor cores in half precision and without them in float32."""
        memory = problem.minimum_bytes / self.dram_bytes_per_s
        rate = self.simt_flops if problem.dtype == "float32" else self.tensor_flops
        return max(memory, problem.flops / rate)


# Sizes are from the vendor's data sheets and the CUDA Programming Guide. Of the rates, bandwidth
# and tensor rate of the H100 and H200 are measured (device copy at 3.0 and 4.3 TB/s, 8192^3
# half-precision products at 750 to 798 TFLOP/s); the others are 85 to 90 % of the data sheets.
_H100 = Device(
    key="h100",
    product="NVIDIA H100 80GB HBM3",
    arch="sm_90a",
    sm_count=132,
    l2_bytes=52_428_800,
    smem_per_sm=233_472,
    smem_per_block=232_448,
    dram_bytes_per_s=3.0e12,
    tensor_flops=770e12,
    simt_flops=60e12,
)
_H200 = replace(
    _H100,
    key="h200",
    product="NVIDIA H200",
    l2_bytes=62_914_560,
    dram_bytes_per_s=4.3e12,
    tensor_flops=790e12,
)
_A100 = Device(
    key="a100",
    product="NVIDIA A100",
    arch="sm_80",
    sm_count=108,
    l2_bytes=41_943_040,
    smem_per_sm=167_936,
    smem_per_block=166_912,
    dram_bytes_per_s=1.7e12,
    tensor_flops=265e12,
    simt_flops=17e12,
)
KNOWN: Mapping[str, Device] = MappingProxyType({d.key: d for d in (_H100, _H200, _A100)})


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
