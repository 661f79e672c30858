"""Chains of linear layers with bias and ReLU in the epilogue of each product.

PyTorch's own operators add the bias in cuBLASLt's epilogue and make a second pass for the ReLU;
``torch._addmm_activation`` has both in the epilogue. Where cuBLASLt does not take the operands,
PyTorch makes the second pass there too.

A model does not offer it yet; ``CONFPRED_FAMILIES=confpred.products.epilogue`` has it sampled.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from confpred import products as chains
from confpred.families.protocol import Rows
from confpred.families.table import config_table
from confpred.problem.device import Device
from confpred.problem.limits import Limits
from confpred.problem.linear_chain import LINEAR_CHAIN, LinearChain
from confpred.problem.operation import SCRATCH, Launch, Product, View


class FusedEpilogue:
    """See the module. There is one way, so that its config has nothing to say."""

    name = "linear_epilogue"
    operation = LINEAR_CHAIN
    configs = config_table(("fused",), [(1,)])
    feature_names: tuple[str, ...] = (*LINEAR_CHAIN.feature_names, "log_estimate")

    def legal(self, problem: LinearChain, device: Device) -> NDArray[np.bool_]:
        p = problem
        return np.full(1, p.bias and p.activation in ("none", "relu"))

    def allowed(self, problem: LinearChain, rows: Rows, limits: Limits) -> NDArray[np.bool_]:
        launches = (self.launch(problem, int(row)) for row in rows)
        return chains.allowed(problem, launches, limits)

    def estimate_s(self, problem: LinearChain, device: Device, rows: Rows) -> NDArray[np.float64]:
        p = problem
        seconds = chains.product_s(p, device, p.flops, p.minimum_bytes)
        return np.full(len(rows), seconds + p.layers * chains.LAUNCH_S)

    def features(self, problem: LinearChain, device: Device, rows: Rows) -> NDArray[np.float32]:
        estimate = self.estimate_s(problem, device, rows)
        own = {"log_estimate": np.log2(estimate / device.roofline_s(problem))}
        return chains.matrix(problem, device, rows, own)

    def launch(self, problem: LinearChain, row: int) -> Launch:
        p = problem
        layout = chains.Layout(p.itemsize)
        between = p.widths[1:-1]
        # Layers take turns with two matrices, of which a chain of two layers needs one.
        starts = [layout.add(p.batch * max(between)) for _ in range(min(2, len(between)))]
        program = []
        source = View("in", (1, p.batch, p.inputs), (0, p.inputs, 1))
        for index, (before, after) in enumerate(pairwise(p.widths)):
            weight = View(f"weight{index}", (1, before, after), (0, 1, before))
            shape, strides = (1, p.batch, after), (0, after, 1)
            if index < p.layers - 1:
                out = View(SCRATCH, shape, strides, layout.elements(starts[index % 2]))
            else:
                out = View("out", shape, strides)
            relu = p.activated(index) == "relu"
            program.append(
                Product(out, source, weight, bias=f"bias{index}", relu=relu, tf32=p.tf32)
            )
            source = out
        error = chains.ordinary_error(p)
        return Launch.of_program(program, scratch_bytes=layout.bytes, error=error)


FAMILY = FusedEpilogue()
