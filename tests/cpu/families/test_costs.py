"""The formulas of the analytic costs."""

from __future__ import annotations

import numpy as np
import pytest
from layers import H100

from confpred.families import costs
from confpred.families.common import ATOMIC, DIRECT, TWO_KERNELS


def test_few_bytes_in_flight_bound_the_rate_of_memory() -> None:
    fast, slow = costs.memory_s(10**9, H100, np.array([1e6, 1e3]))
    assert fast == 1e9 / H100.dram_bytes_per_s
    assert slow == pytest.approx(1e9 * costs.LOAD_S / (H100.sm_count * 1e3))
    assert slow > fast


def test_rates_are_parts_of_the_devices() -> None:
    assert costs.l2_s(1e9, H100) == pytest.approx(1e9 / H100.dram_bytes_per_s / 2)
    flops = 2 * 16 * 8 * 16
    assert costs.products_s(1e9, H100) == pytest.approx(1e9 * flops / H100.tensor_flops * 2)
    whole, usual = (costs.instructions_s(1e9, H100, part) for part in (1.0, costs.ISSUED))
    assert whole == pytest.approx(2e9 / H100.simt_flops)
    assert usual == pytest.approx(whole / costs.ISSUED)


def test_each_wave_that_is_begun_costs_its_steps() -> None:
    waves, steps = np.array([0.2, 1.0, 2.1]), np.array([10, 10, 20])
    assert costs.waves_s(waves, 2e-6, steps, 1e-7) == pytest.approx([3e-6, 3e-6, 12e-6])


def test_a_second_kernel_reads_what_the_first_has_written() -> None:
    ways = np.array([DIRECT, TWO_KERNELS, ATOMIC])
    direct, second, atomic = costs.depthwise_adding_s(ways, np.full(3, 3e6), H100)
    assert direct == atomic == costs.DEPTHWISE_ADDING_S
    assert second == costs.DEPTHWISE_SECOND_KERNEL_S + 6e6 / H100.dram_bytes_per_s
