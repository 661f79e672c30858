"""Rates as they are measured on the GPU at hand."""

from __future__ import annotations

import pytest

from confpred.cuda import driver
from confpred.cuda.discovery import Facts, device_with, measure_rates
from confpred.errors import UnknownDevice
from confpred.problem.device import Device, get_device


def test_the_rates_of_a_board_of_the_table_come_out_as_it_says(device: Device) -> None:
    cuda_device = driver.make_current(0)
    facts = Facts.of(cuda_device, driver.describe(0)[1])
    rates = measure_rates(cuda_device, facts)
    assert (facts.arch, facts.sm_count) == (device.arch, device.sm_count)
    # A clock that is held back may halve a rate; twice the rate is an error of ours.
    assert 0.5 < rates.dram_bytes_per_s / device.dram_bytes_per_s < 1.3
    assert 0.5 < rates.tensor_flops / device.tensor_flops < 1.5
    assert 0.5 < rates.simt_flops / device.simt_flops < 1.3


def test_a_board_of_no_table_is_measured(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CONFPRED_CACHE_DIR", str(tmp_path))
    cuda_device = driver.make_current(0)
    facts = Facts.of(cuda_device, "0")
    described = device_with(
        Facts(**{n: getattr(facts, n) for n in Facts.__slots__} | {"name": "NVIDIA Unheard-of 1"}),
        lambda arch: measure_rates(cuda_device, facts),
    )
    assert described.key == "unheard-of-1"
    assert get_device("unheard-of-1") == described
    with pytest.raises(UnknownDevice):
        get_device("unheard-of-2")
