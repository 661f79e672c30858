"""Features of a problem alone, whatever kernel serves it: what PyTorch's own time depends on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from confpred.device import Device
from confpred.problem import ACTIVATIONS, DTYPES, Problem

PROBLEM_FEATURES = (
    *("log_n", "log_c", "log_k", "log_p", "log_q", "r", "s", "group_width", "log_groups"),
    *("stride_h", "stride_w", "dilation_h", "dilation_w", "padding_h", "padding_w"),
    *("bfloat16", "bias", "activation", "log_bytes", "log_intensity", "log_roofline"),
)


def problem_features(problem: Problem, device: Device) -> NDArray[np.float32]:
    """The ``(1, len(PROBLEM_FEATURES))`` matrix of `problem`; logarithms are to base 2."""
    sizes = (problem.n, problem.c, problem.k, problem.p, problem.q)
    scale = (
        problem.minimum_bytes,
        problem.flops / problem.minimum_bytes,
        device.roofline_s(problem),
    )
    row = (
        *np.log2(sizes),
        *(problem.r, problem.s, problem.group_width, np.log2(problem.groups)),
        *(*problem.stride, *problem.dilation, *problem.padding),
        *(DTYPES.index(problem.dtype), problem.bias, ACTIVATIONS.index(problem.activation)),
        *np.log2(scale),
    )
    return np.array([row], np.float32)
