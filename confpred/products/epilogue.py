"""Chains of linear layers with bias and ReLU in the epilogue of each product.

PyTorch's own operators add the bias in cuBLASLt's epilogue and make a second pass for the ReLU;
``torch._addmm_activation`` has both in the epilogue. Where cuBLASLt does not take the operands,
PyTorch makes the second pass there too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from confpred import products as chains
from confpred.families.protocol import Rows
from confpred.families.table import config_table
from confpred.problem.device import Device
from confpred.problem.linear_chain import LINEAR_CHAIN, LinearChain
from confpred.problem.operation import SCRATCH, Launch


class FusedEpilogue(chains.ChainFamily):
    """See the module. It has one config, so its one field is constant."""

    name = "linear_epilogue"
    configs = config_table(("fused",), [(1,)])
    feature_names = (*LINEAR_CHAIN.feature_names, "log_estimate")

    def legal(self, problem: LinearChain, device: Device) -> NDArray[np.bool_]:
        return np.full(1, problem.bias and problem.activation in ("none", "relu"))

    def _derived(
        self, problem: LinearChain, device: Device, rows: Rows
    ) -> dict[str, NDArray[np.float64]]:
        p = problem
        seconds = chains.product_s(p, device, p.flops, p.minimum_bytes)
        return {"estimate": np.full(len(rows), seconds + p.layers * chains.LAUNCH_S)}

    def launch(self, problem: LinearChain, row: int) -> Launch:
        p = problem
        layout = chains.Layout(p.itemsize)
        between = p.widths[1:-1]
        # Layers take turns with two matrices, of which a chain of two layers needs one.
        starts = [layout.add(p.batch * max(between)) for _ in range(min(2, len(between)))]
        program = []
        source = chains.matrix("in", p.batch, p.inputs)
        for index, after in enumerate(p.widths[1:]):
            out = chains.matrix("out", p.batch, after)
            if index < p.layers - 1:
                start = layout.elements(starts[index % 2])
                out = replace(out, operand=SCRATCH, offset=start)
            program.append(chains.layer_of(p, index, out, source))
            source = out
        error = chains.ordinary_error(p)
        return Launch.of_program(program, scratch_bytes=layout.bytes, error=error)


FAMILY = FusedEpilogue()
