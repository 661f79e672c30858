"""Devices: found by key or by the driver's name; rooflines."""

from __future__ import annotations

import pytest

from confpred.errors import UnknownDevice
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device, get_device


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"),
        (" H100 ", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_found_by_key_and_by_the_drivers_name(name: str, key: str) -> None:
    device = get_device(name)
    assert device is KNOWN[key]
    assert get_device(device) is device


@pytest.mark.parametrize("name", ["", "h1000", "NVIDIA H100 PCIe", "cpu", None, 100, ["h100"]])
def test_an_unknown_device_is_named_with_those_known(name: object) -> None:
    with pytest.raises(UnknownDevice) as caught:
        get_device(name)  # type: ignore[arg-type]
    assert caught.value.field == "device"
    assert all(key in str(caught.value) for key in KNOWN)


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
