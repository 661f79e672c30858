"""The attributes of launches, laid out as the driver reads them."""

from __future__ import annotations

import ctypes
from dataclasses import replace

from cuda.bindings import driver as cuda

from confpred.cuda import driver
from confpred.problem.operation import KernelSpec, Step

STEP = Step(KernelSpec("a.cu", "a", ()), (1, 1, 1), (32, 1, 1), 0, (), {})


def test_blocks_that_wait_for_one_another_are_launched_together():
    assert len(driver._attributes(STEP)) == 0
    (attribute,) = driver._attributes(replace(STEP, cooperative=True))
    assert attribute.id == cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert attribute.value[0] == 1
    assert ctypes.sizeof(attribute) == 8 + 64  # cuda.h: an id, padded, and a union
    assert driver._Attribute.value.offset == 8
