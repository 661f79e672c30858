"""Devices: found by key or by the driver's name; rooflines."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from shared import closed

from confpred.errors import DataError, UnknownDevice
from confpred.problem import device as devices
from confpred.problem.conv2d import Problem
from confpred.problem.device import KNOWN, Device, device_from, get_device

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


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No description that this user's machines gave."""
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("name", "key", "sm_count", "tb_per_s"), BOARDS)
def test_every_board_is_the_device_that_it_is(
    name: str, key: str, sm_count: int, tb_per_s: float
) -> None:
    device = get_device(name)
    assert device is KNOWN[key]
    assert device.sm_count == sm_count
    assert 0.8 < device.dram_bytes_per_s / (tb_per_s * 1e12) < 0.95


@pytest.mark.parametrize("row", devices.read_table(), ids=lambda row: row["key"])
def test_rates_are_a_share_of_the_data_sheets(row: dict) -> None:
    device, sheet = KNOWN[row["key"]], row["sheet"]
    assert 0.78 < device.dram_bytes_per_s / (sheet["dram_gb_per_s"] * 1e9) <= 0.97
    assert 0.75 < device.tensor_flops / (sheet["tensor_tflops"] * 1e12) < 0.95
    assert 0.85 < device.simt_flops / (sheet["simt_tflops"] * 1e12) < 0.95
    assert row["source"]
    assert devices.key_of(row["key"]) == row["key"]


@pytest.mark.parametrize(
    ("arch", "smem_kb", "warps", "blocks"),
    [
        # CUDA Programming Guide, "Compute Capabilities": of a multiprocessor.
        ("sm_80", 164, 64, 32),
        ("sm_86", 100, 48, 16),
        ("sm_89", 100, 48, 24),
        ("sm_90a", 228, 64, 32),
        ("sm_100", 228, 64, 32),
        ("sm_120", 100, 48, 24),
    ],
)
def test_limits_of_each_architecture(arch: str, smem_kb: int, warps: int, blocks: int) -> None:
    found = [device for device in KNOWN.values() if device.arch == arch]
    assert found
    for d in found:
        assert (d.smem_per_sm, d.warps_per_sm, d.blocks_per_sm) == (smem_kb * 1024, warps, blocks)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"),
        (" H100 ", "h100"),
        ("h100-pcie", "h100-pcie"),
        ("nvidia  h100  nvl", "h100-nvl"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("A100-SXM4-40GB", "a100-40gb"),  # as drivers before version 460 say it
    ],
)
def test_found_by_key_and_by_the_drivers_name(name: str, key: str) -> None:
    device = get_device(name)
    assert device is KNOWN[key]
    assert get_device(device) is device


@pytest.mark.parametrize("name", [
    "", "h1000", "NVIDIA H20", "../h100", "NVIDIA H100 80GB", "NVIDIA A100", "NVIDIA H100-80C",
    None, 100,
])  # fmt: skip
def test_an_unknown_device_is_named_with_those_known(name: object) -> None:
    with pytest.raises(UnknownDevice) as caught:
        get_device(name)  # type: ignore[arg-type]
    assert caught.value.field == "device"
    near = [key for key in KNOWN if key in str(caught.value)]
    assert 1 <= len(near) <= 4
    assert str(caught.value).endswith("or another one of `confpred devices`")


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 7g.40gb"]
)
def test_a_part_of_a_gpu_is_not_taken_for_the_whole(name: str) -> None:
    with pytest.raises(UnknownDevice, match="allowed: a whole GPU, such as h100, "):
        get_device(name)


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
def test_descriptions_are_coherent(device: Device) -> None:
    assert device.arch.startswith("sm_")
    # One block may take all of a multiprocessor's shared memory but the driver's own share.
    assert device.smem_per_block + device.smem_reserved_per_block == device.smem_per_sm
    # Half-precision products per byte: no GPU is built with fewer than 50 or more than 1,000.
    assert 50 < device.tensor_flops / device.dram_bytes_per_s < 1000


def test_what_a_driver_told_is_found_by_key_and_by_name(cache: Path) -> None:
    told = replace(KNOWN["rtx-3090"], key="rtx-a2000", product="NVIDIA RTX A2000", sm_count=26)
    devices.remember("580.1", asdict(told))
    assert get_device("rtx-a2000") == get_device("NVIDIA RTX A2000") == told


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: text.replace('"sm_count": 82', '"sm_count": -82'),
        lambda text: text.replace('"sm_count": 82', '"sm_count": "82"'),
        lambda text: text.replace('"tensor_flops"', '"flops"'),
        lambda text: text.replace("confpred-device/1", "confpred-device/0"),
        lambda text: text.replace('"key": "odd"', '"key": "even"'),
    ],
)
def test_a_damaged_description_is_none_and_is_told(cache: Path, damage, caplog) -> None:
    devices.remember("580.1", asdict(replace(KNOWN["rtx-3090"], key="odd", product="Odd")))
    path = cache / "devices" / "odd.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(UnknownDevice):
        get_device("odd")
    assert "odd" in caplog.text


def test_a_description_that_nobody_may_see_is_none(cache: Path) -> None:
    devices.remember("580.1", asdict(replace(KNOWN["rtx-3090"], key="odd", product="Odd")))
    with closed(cache), pytest.raises(UnknownDevice):
        get_device("odd")
    assert get_device("odd").product == "Odd"


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setenv("CONFPRED_CACHE_DIR", "/proc/none")
    devices.remember("580.1", asdict(replace(KNOWN["rtx-3090"], key="odd")))
    assert "is not kept" in caplog.text


def test_a_roofline_is_the_larger_of_its_two_times() -> None:
    device = get_device("h100")
    thin = Problem.parse("n=32 c=64 h=56 w=56 k=64 r=3 s=3 padding=1 groups=8")
    dense = Problem.parse("n=32 c=1024 h=56 w=56 k=1024 r=3 s=3 padding=1")
    assert device.roofline_s(thin) == thin.minimum_bytes / device.dram_bytes_per_s
    assert device.roofline_s(dense) == dense.flops / device.tensor_flops


def test_a_field_that_is_missing_is_named() -> None:
    fields = asdict(get_device("h100"))
    assert device_from(fields) == get_device("h100")
    del fields["sm_count"]
    with pytest.raises(DataError, match=r"^a device's sm_count is missing$"):
        device_from(fields)
    with pytest.raises(DataError, match="a device's sm_count is 0, not int above 0"):
        device_from(fields | {"sm_count": 0})
