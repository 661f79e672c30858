"""Launches single configs of kernel families on PyTorch's tensors, with poison around them."""

from __future__ import annotations

import references
import torch

from confpred.families.protocol import Family
from confpred.launch.runner import bound, workspaces
from confpred.problem.conv2d import Problem
from confpred.problem.operation import SCRATCH, ZEROED, Launch

GUARD = 4096  # bytes before and behind each operand
POISON = 0xFF  # every byte: NaN in all the dtypes


class Guarded:
    """Device memory of `size` bytes, poisoned, with poison before and behind it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")

    @property
    def inside(self) -> torch.Tensor:
        return self.memory[GUARD : GUARD + self.size]

    def intact(self) -> bool:
        ends = torch.cat((self.memory[:GUARD], self.memory[GUARD + self.size :]))
        return bool((ends == POISON).all())


class Config:
    """One config of one problem, loaded, with operands of its own.

    Args:
        inputs: by operand name, in the shapes and dtype of the operation's operands.
    """

    def __init__(
        self, family: Family, problem: Problem, row: int, inputs: dict[str, torch.Tensor]
    ) -> None:
        self.launch: Launch = family.launch(problem, row)
        operands = {o.name: o for o in family.operation.operands(problem)}
        self.outputs = [o for o in operands.values() if o.terms]
        sizes = {name: operand.bytes for name, operand in operands.items()}
        sizes |= workspaces(self.launch)
        self.operands = {name: Guarded(size) for name, size in sizes.items()}
        for name, tensor in inputs.items():
            self.operands[name].inside.copy_(tensor.cuda().view(torch.uint8).flatten())
        if self.launch.zeroed_bytes:
            self.operands[ZEROED].inside.zero_()
        self._enqueue = bound(self.launch, list(self.operands), 0)

    def enqueue(self) -> None:
        """Launch on the current stream."""
        addresses = [guarded.inside.data_ptr() for guarded in self.operands.values()]
        self._enqueue(torch.cuda.current_stream().cuda_stream, addresses)

    def poison_outputs(self) -> None:
        for output in self.outputs:
            self.operands[output.name].inside.fill_(POISON)
        if SCRATCH in self.operands:
            self.operands[SCRATCH].inside.fill_(POISON)

    def results(self) -> dict[str, torch.Tensor]:
        """Return the outputs, on the CPU, in the shapes of the operation's operands.

        Raises:
            AssertionError: something was written outside of an operand, or the zeroed workspace is
                not zero again.
        """
        torch.cuda.synchronize()
        assert [name for name, guarded in self.operands.items() if not guarded.intact()] == []
        if ZEROED in self.operands:
            assert not self.operands[ZEROED].inside.any(), "the zeroed workspace is left dirty"
        return {
            o.name: self.operands[o.name].inside.cpu().view(getattr(torch, o.dtype)).view(o.shape)
            for o in self.outputs
        }


def assert_repeats(config: Config, times: int, told: str) -> None:
    """Assert that results repeat to the bit, also while other work keeps the multiprocessors from
    starting blocks in the usual order."""
    noise, side = torch.rand(2048, 2048, device="cuda"), torch.cuda.Stream()
    first: dict[str, torch.Tensor] = {}
    for repeat in range(times):
        config.poison_outputs()
        if repeat % 2:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    noise @ noise
        config.enqueue()
        results = {name: x.view(torch.uint8) for name, x in config.results().items()}
        first = first or results
        for name, result in results.items():
            assert torch.equal(result, first[name]), f"{name}: {told}"


def outside(config: Config, expected: dict[str, torch.Tensor]) -> dict[str, int]:
    """How many elements of each of its outputs are not what is `expected`."""
    return references.outside(config.outputs, config.results(), expected)
