"""Devices: found by key or by the driver's name; rooflines."""

from __future__ import annotations

import pytest

from confpred.errors import UnknownDevice
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device, get_device

#: Every name with A100, H100 or H200 in the table of names of NVIDIA's open kernel modules, release
#: 595.45.04 (https://github.com/NVIDIA/open-gpu-kernel-modules,
#: src/nvidia/generated/g_nv_name_released.h), save those of virtual GPUs; and the one that
#: MareNostrum 5 reports. The multiprocessors and the memory's rate, in TB/s, are of data sheets.
BOARDS = [
    ("NVIDIA H100 80GB HBM3", "h100", 132, 3.35),
    ("NVIDIA H200", "h200", 132, 4.8),
    ("NVIDIA A100-SXM4-80GB", "a100", 108, 2.04),
    ("NVIDIA H100 PCIe", "h100-pcie", 114, 2.04),
    ("NVIDIA H100 NVL", "h100-nvl", 132, 3.94),
    ("NVIDIA H100", "h100-hbm2", 132, 2.0),
    ("NVIDIA H100 64GB HBM2", "h100-hbm2", 132, 2.0),
    ("NVIDIA H200 NVL", "h200-nvl", 132, 4.8),
    ("NVIDIA GH200 120GB", "gh200", 132, 4.0),
    ("NVIDIA GH200 480GB", "gh200", 132, 4.0),
    ("NVIDIA GH200 144G HBM3e", "gh200-144gb", 132, 4.9),
    ("NVIDIA A100 80GB PCIe", "a100", 108, 1.94),
    ("NVIDIA A100-SXM4-40GB", "a100-40gb", 108, 1.56),
    ("NVIDIA A100-PCIE-40GB", "a100-40gb", 108, 1.56),
    ("NVIDIA A100-PG509-200", "a100-40gb", 108, 1.56),
    ("NVIDIA A100-SXM-64GB", "a100-64gb", 124, 1.64),
]


@pytest.mark.parametrize(("name", "key", "sm_count", "tb_per_s"), BOARDS)
def test_every_board_is_the_device_that_it_is(
    name: str, key: str, sm_count: int, tb_per_s: float
) -> None:
    device = get_device(name)
    assert device is KNOWN[key]
    assert device.sm_count == sm_count
    assert 0.8 < device.dram_bytes_per_s / (tb_per_s * 1e12) < 0.95


def test_every_device_is_on_some_board() -> None:
    assert {key for _, key, _, _ in BOARDS} == set(KNOWN)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"),
        (" H100 ", "h100"),
        ("h100-pcie", "h100-pcie"),
        ("nvidia  h100  nvl", "h100-nvl"),
        ("A100-SXM4-40GB", "a100-40gb"),  # as drivers before version 460 say it
    ],
)
def test_found_by_key_and_by_the_drivers_name(name: str, key: str) -> None:
    device = get_device(name)
    assert device is KNOWN[key]
    assert get_device(device) is device


@pytest.mark.parametrize(
    "name",
    ["", "h1000", "NVIDIA H20", "NVIDIA H100 80GB", "NVIDIA A100", "NVIDIA H100-80C", None, 100],
)
def test_an_unknown_device_is_named_with_those_known(name: object) -> None:
    with pytest.raises(UnknownDevice) as caught:
        get_device(name)  # type: ignore[arg-type]
    assert caught.value.field == "device"
    assert all(key in str(caught.value) for key in KNOWN)


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 7g.40gb"]
)
def test_a_part_of_a_gpu_is_not_taken_for_the_whole(name: str) -> None:
    with pytest.raises(UnknownDevice, match="allowed: a whole GPU: h100 or"):
        get_device(name)


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_descriptions_are_coherent(device: Device) -> None:
    assert device.arch.startswith("sm_")
    # One block may take all of a multiprocessor's shared memory but the driver's own share.
    assert device.smem_per_block + device.smem_reserved_per_block == device.smem_per_sm
    # Half-precision products per byte: no GPU is built with fewer than 100 or more than 1,000.
    assert 100 < device.tensor_flops / device.dram_bytes_per_s < 1000


def test_a_roofline_is_the_larger_of_its_two_times() -> None:
    device = get_device("h100")
    thin = Problem.parse("n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1 groups=8")
    dense = Problem.parse("n=32 c=1024 h=56 w=56 k=1024 r=3 s=3 padding=1")
    assert device.roofline_s(thin) == thin.minimum_bytes / device.dram_bytes_per_s
    assert device.roofline_s(dense) == dense.flops / device.tensor_flops
