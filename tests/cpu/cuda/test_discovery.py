"""The description of whichever GPU is at hand: which facts decide, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ptxas import resources

from confpred.cuda import discovery, driver
from confpred.cuda.cache import KernelCache
from confpred.cuda.compiler import compile_kernel
from confpred.cuda.discovery import (
    Facts,
    Rates,
    device_with,
    measure_rates,
    part_of,
    rate_kernel,
)
from confpred.errors import LaunchError, UnknownDevice
from confpred.problem.device import KNOWN, Device, get_device

#: The driver's words on a laptop's GPU, which is in no table.
LAPTOP = Facts(
    name="NVIDIA GeForce RTX 4090 Laptop GPU", driver="580.1", capability=(8, 9), sm_count=76,
    l2_bytes=67_108_864, smem_per_sm=102_400, smem_per_block=101_376, warps_per_sm=48,
    blocks_per_sm=24, regs_per_sm=65_536, smem_reserved_per_block=1_024,
)  # fmt: skip
RATES = Rates(dram_bytes_per_s=0.5e12, tensor_flops=80e12, simt_flops=40e12)


class Gpu:
    """A measurement of the rates that counts its calls."""

    def __init__(self, rates: Rates = RATES) -> None:
        self.rates, self.asked = rates, []

    def __call__(self, arch: str) -> Rates:
        self.asked.append(arch)
        return self.rates


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("key", ["h100", "a100-40gb", "rtx-4090", "b200"])
def test_a_board_of_the_table_is_not_measured(key: str) -> None:
    board = KNOWN[key]
    gpu, facts = Gpu(), replace(LAPTOP, name=board.product, sm_count=board.sm_count)
    assert device_with(facts, gpu) is board
    assert not gpu.asked


def test_any_other_is_measured_once_a_driver_and_found_by_its_key() -> None:
    gpu = Gpu()
    device = device_with(LAPTOP, gpu)
    assert device == Device(
        key="rtx-4090-laptop-gpu", product=LAPTOP.name, arch="sm_89", sm_count=76,
        l2_bytes=67_108_864, smem_per_sm=102_400, smem_per_block=101_376, dram_bytes_per_s=0.5e12,
        tensor_flops=80e12, simt_flops=40e12, warps_per_sm=48, blocks_per_sm=24,
    )  # fmt: skip
    assert device_with(LAPTOP, gpu) == get_device("rtx-4090-laptop-gpu") == device
    assert gpu.asked == ["sm_89"]
    gpu.rates = replace(RATES, dram_bytes_per_s=0.6e12)
    assert device_with(replace(LAPTOP, driver="590.2"), gpu).dram_bytes_per_s == 0.6e12
    assert len(gpu.asked) == 2


def test_a_board_with_other_multiprocessors_than_its_namesake_is_its_own() -> None:
    """The RTX 3080 of 12 GB has 70, that of 10 GB 68, and both have one name."""
    facts = replace(LAPTOP, name="NVIDIA GeForce RTX 3080", capability=(8, 6), sm_count=70)
    device = device_with(facts, Gpu())
    assert (device.key, device.sm_count) == ("rtx-3080-70sm", 70)
    assert get_device("rtx-3080-70sm") == device
    assert get_device("NVIDIA GeForce RTX 3080").sm_count == 68


def test_a_part_of_a_gpu_is_described_as_what_it_is() -> None:
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    device = device_with(replace(LAPTOP, name=name, capability=(9, 0), sm_count=16), Gpu())
    assert (device.key, device.arch) == ("h100-80gb-hbm3-mig-1g-10gb", "sm_90a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "Tesla V100", "capability": (7, 0)}, "capability 7.0"),
        ({"regs_per_sm": 32_768}, "65,536 registers"),
        ({"smem_reserved_per_block": 2_048}, "1,024 bytes reserved"),
    ],
)
def test_a_gpu_that_the_kernels_cannot_count_on_is_refused(change: dict, said: str) -> None:
    gpu = Gpu()
    with pytest.raises(UnknownDevice, match=said):
        device_with(replace(LAPTOP, **change), gpu)
    assert not gpu.asked


def test_a_gpu_that_cannot_be_measured_is_refused_with_the_reason(cache: Path) -> None:
    def broken(arch: str) -> Rates:
        raise LaunchError("out of memory")

    with pytest.raises(UnknownDevice, match="out of memory"):
        device_with(LAPTOP, broken)
    assert not list(cache.rglob("*.json"))


def test_a_gpu_that_refuses_a_stream_is_an_error_of_ours() -> None:
    class Refusing:
        def create_stream(self) -> None:
            raise RuntimeError("no context")

    with pytest.raises(LaunchError, match="Laptop GPU cannot be measured: no context"):
        measure_rates(Refusing(), LAPTOP)


def test_facts_are_read_from_the_drivers_properties() -> None:
    told = SimpleNamespace(
        compute_capability_major=8,
        compute_capability_minor=9,
        multiprocessor_count=76,
        l2_cache_size=67_108_864,
        max_shared_memory_per_multiprocessor=102_400,
        max_shared_memory_per_block_optin=101_376,
        max_threads_per_multiprocessor=1_536,
        max_blocks_per_multiprocessor=24,
        max_registers_per_multiprocessor=65_536,
        reserved_shared_memory_per_block=1_024,
    )
    device = SimpleNamespace(name=LAPTOP.name, properties=told)
    assert Facts.of(device, "580.1") == LAPTOP


@pytest.mark.slow(reason="two compiles for each known target")
@pytest.mark.parametrize("arch", sorted({device.arch for device in KNOWN.values()}))
@pytest.mark.parametrize("entry", ["products", "arithmetic"])
def test_the_kernels_that_measure_rates_compute_in_registers(
    entry: str, arch: str, tmp_path: Path
) -> None:
    assert compile_kernel(rate_kernel(entry), arch, KernelCache(tmp_path)).cubin
    registers, stack = resources(rate_kernel(entry), arch)
    assert registers <= 128
    assert stack == 0


@pytest.mark.parametrize("told", [32, 132, 0])
def test_a_part_of_a_gpu_is_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, told: int) -> None:
    """As the driver says of a thread in a green context; 0 where it does not say."""
    h100 = get_device("h100")
    monkeypatch.setattr(driver, "_describe_device", lambda _: h100)  # there is no driver
    monkeypatch.setattr(driver, "_context_sm_count", lambda _: told)
    device = driver.device_of(0)
    if told != 32:
        assert device is h100
        return
    assert (device.key, device.sm_count, device.l2_bytes) == ("h100-32sm", 32, h100.l2_bytes)
    assert device.tensor_flops == pytest.approx(h100.tensor_flops * 32 / 132)
    assert device.dram_bytes_per_s == pytest.approx(0.70 * h100.dram_bytes_per_s, rel=0.01)
    assert get_device("h100-32sm") is device is part_of(h100, 32)


def test_without_a_driver_a_context_has_no_part() -> None:
    assert driver._context_sm_count(0) == 0


# A clock that is not the one that was measured.

H100 = KNOWN["h100"]
FREE = Rates(H100.dram_bytes_per_s * 1.01, H100.tensor_flops * 1.3, H100.simt_flops * 1.08)


class Clock:
    """Measurements of an H100 one after the other, the last one for good, and their count."""

    def __init__(self, *rates: Rates) -> None:
        self.rates, self.count = list(rates), 0

    def __call__(self) -> Rates:
        self.count += 1
        return self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]


def runs(clock: Clock, driver: str = "580.1", uuid: str = "5ee7") -> Device:
    return discovery.as_it_runs(H100, uuid, driver, clock)


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the boot's id, in place of Linux's, which tests cannot change."""
    file = tmp_path / "boot_id"
    file.write_text("first\n")
    monkeypatch.setattr(discovery, "_BOOT_ID", file)  # see above
    return file


def test_a_clock_as_described_is_kept_for_a_boot_a_driver_and_a_gpu(boot: Path) -> None:
    clock = Clock(FREE)
    assert runs(clock) is runs(clock) is H100
    assert clock.count == 1
    assert discovery.slowness(H100, H100) == ""
    runs(clock, driver="590.2")
    runs(clock, driver="590.2", uuid="a9b1")
    assert clock.count == 3
    boot.write_text("second\n")
    runs(clock, driver="590.2")
    assert clock.count == 4


def test_without_a_boot_id_each_process_measures(boot: Path, cache: Path) -> None:
    boot.unlink()
    clock = Clock(FREE)
    runs(clock)
    runs(clock)
    assert (clock.count, [*cache.glob("clocks/*")]) == (2, [])


@pytest.mark.parametrize("content", ["", "[]", '{"format": "confpred-clock/2"}', "\0\1"])
def test_a_damaged_mark_is_measured_again(boot: Path, cache: Path, content: str) -> None:
    clock = Clock(FREE)
    runs(clock)
    (mark,) = cache.glob("clocks/*.json")
    mark.write_text(content)
    assert runs(clock) is runs(clock) is H100
    assert clock.count == 2


def test_a_cache_that_cannot_be_written_stops_nothing(boot: Path, cache: Path) -> None:
    (cache / "clocks").write_text("a file where the folder is to be")
    clock = Clock(FREE)
    assert runs(clock) is runs(clock) is H100
    assert clock.count == 2


def test_a_busy_moment_does_not_count(boot: Path) -> None:
    """The memory is busy in one measurement, and the multiprocessors in the next one."""
    clock = Clock(
        replace(FREE, dram_bytes_per_s=1e12),
        replace(FREE, simt_flops=2e13, tensor_flops=2e14),
        FREE,
    )
    assert runs(clock) is H100
    assert clock.count == 2  # the fastest of both are right
    assert runs(clock) is H100
    assert clock.count == 2


def test_what_is_slow_is_lowered_and_measured_by_each_process(boot: Path, cache: Path) -> None:
    slow = replace(FREE, simt_flops=H100.simt_flops / 1.5)  # the products may be described as slow
    clock = Clock(replace(slow, dram_bytes_per_s=1e12), slow)
    now = runs(clock)
    assert (clock.count, [*cache.glob("clocks/*")]) == (3, [])
    assert now.dram_bytes_per_s == H100.dram_bytes_per_s
    assert now.simt_flops == pytest.approx(H100.simt_flops / 1.5)
    assert now.tensor_flops == pytest.approx(H100.tensor_flops / 1.5)
    said = "arithmetic takes 1.50 times as long as on the h100 that was measured"
    assert discovery.slowness(H100, now) == said
    halved = Clock(replace(FREE, dram_bytes_per_s=H100.dram_bytes_per_s / 2))
    assert discovery.slowness(H100, runs(halved)).startswith("memory takes 2.00 times as long as")
    both = replace(slow, dram_bytes_per_s=H100.dram_bytes_per_s / 2)
    assert " as long and arithmetic takes 1.50" in discovery.slowness(H100, runs(Clock(both)))


def test_rates_of_a_data_sheet_are_no_measure(boot: Path) -> None:
    clock = Clock(RATES)
    a100 = KNOWN["a100"]
    assert discovery.as_it_runs(a100, "5ee7", "580.1", clock) is a100
    assert clock.count == 0
    laptop = device_with(LAPTOP, Gpu())  # its rates were measured
    assert discovery.as_it_runs(laptop, "5ee7", "580.1", clock) is laptop
    assert clock.count == 1


def test_a_few_percent_are_not_worth_a_word(boot: Path) -> None:
    little = Rates(*(rate / 1.1 for rate in (3.0e12, 770e12, 60e12)))
    assert runs(Clock(little)) is H100
