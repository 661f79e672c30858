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
        product: the name that the driver reports (others: ``_OTHER_NAMES``).
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

    def memory_s(self, problem: Record) -> float:
        """Seconds that device memory takes for what must cross it."""
        return problem.minimum_bytes / self.dram_bytes_per_s

    def arithmetic_s(self, problem: Record) -> float:
        """Seconds of the problem's arithmetic: on tensor cores in half precision, and without them
        in float32."""
        rate = self.simt_flops if problem.dtype == "float32" else self.tensor_flops
        return problem.flops / rate

    def roofline_s(self, problem: Record) -> float:
        """Seconds below which no kernel can go: the larger of the two above."""
        return max(self.memory_s(problem), self.arithmetic_s(problem))


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
    product="NVIDIA A100-SXM4-80GB",
    arch="sm_80",
    sm_count=108,
    l2_bytes=41_943_040,
    smem_per_sm=167_936,
    smem_per_block=166_912,
    dram_bytes_per_s=1.7e12,
    tensor_flops=265e12,
    simt_flops=17e12,
)
#: The other boards with these processors. A board with fewer multiprocessors, slower memory or a
#: lower clock is a device of its own: a model's times are of one device, and so is the order of
#: configs. None of these has been measured, so their answers are estimates. They are of the data
#: sheets, save those of the boards that were made for one buyer, which have none: ``h100-hbm2`` and
#: ``a100-64gb``.
_BOARDS = (
    replace(
        _H100,
        key="h100-pcie",
        product="NVIDIA H100 PCIe",
        sm_count=114,
        dram_bytes_per_s=1.8e12,
        tensor_flops=590e12,
        simt_flops=46e12,
    ),
    replace(
        _H100,
        key="h100-nvl",
        product="NVIDIA H100 NVL",
        l2_bytes=62_914_560,
        dram_bytes_per_s=3.5e12,
        tensor_flops=650e12,
        simt_flops=54e12,
    ),
    replace(
        _H100,
        key="h100-hbm2",
        product="NVIDIA H100",
        l2_bytes=41_943_040,
        dram_bytes_per_s=1.8e12,
    ),
    replace(
        _H200,
        key="h200-nvl",
        product="NVIDIA H200 NVL",
        tensor_flops=650e12,
        simt_flops=54e12,
    ),
    replace(
        _H200,
        key="gh200",
        product="NVIDIA GH200 480GB",
        dram_bytes_per_s=3.6e12,
    ),
    replace(
        _H200,
        key="gh200-144gb",
        product="NVIDIA GH200 144G HBM3e",
        dram_bytes_per_s=4.4e12,
    ),
    replace(
        _A100,
        key="a100-40gb",
        product="NVIDIA A100-SXM4-40GB",
        dram_bytes_per_s=1.3e12,
    ),
    replace(
        _A100,
        key="a100-64gb",
        product="NVIDIA A100-SXM-64GB",
        sm_count=124,
        l2_bytes=33_554_432,
        dram_bytes_per_s=1.4e12,
        tensor_flops=304e12,
        simt_flops=19.5e12,
    ),
)
_DEVICES = (_H100, _H200, _A100, *_BOARDS)
KNOWN: Mapping[str, Device] = MappingProxyType({d.key: d for d in _DEVICES})

#: Names of boards whose figures are those of another one, all but equal in what counts here.
_OTHER_NAMES = {
    "NVIDIA H100 64GB HBM2": "h100-hbm2",
    "NVIDIA GH200 120GB": "gh200",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-PG509-200": "a100-40gb",
}


def get_device(name: str | Device) -> Device:
    """The device called `name` (a key such as ``h100``, or the name that the driver reports).

    Raises:
        UnknownDevice: no description is of that name. Neither is one of a part of a GPU (MIG), or
            of a virtual GPU: these have fewer multiprocessors than the board.
    """
    if isinstance(name, Device):
        return name
    if isinstance(name, str):
        wanted = _plain(name)
        device = KNOWN.get(wanted) or KNOWN.get(_KEYS.get(wanted, ""))
        if device is not None:
            return device
        if " mig " in wanted:
            raise UnknownDevice("device", name, f"a whole GPU: {' or '.join(KNOWN)}")
    raise UnknownDevice("device", name, " or ".join(KNOWN))


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


#: Device key by what its boards are called; drivers before version 460 leave out the vendor.
_KEYS = {
    _plain(name).removeprefix(vendor): key
    for vendor in ("", "nvidia ")
    for name, key in ({d.product: d.key for d in KNOWN.values()} | _OTHER_NAMES).items()
}
