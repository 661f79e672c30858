"""Launches with matrix products in them, ready for tensors of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from confpred.cuda import driver
from confpred.cuda.launch import NoContext
from confpred.predict.choice import Choice
from confpred.problem.operation import PREPARED, SCRATCH, Launch, Step
from confpred.products.run import Bound, Operands, Program, by_driver
from confpred.pytorch.kernels import loaded
from confpred.pytorch.ready import NAMES, ReadyLaunch, aligned, layout_of, shapes_of
from confpred.pytorch.streams import current_device, empty


class LoadedProgram:
    """A launch whose kernels are compiled and loaded on CUDA device `ordinal`.

    Raises:
        CompileError, LaunchError, MissingExtra: a kernel cannot be had.
    """

    def __init__(self, launch: Launch, ordinal: int) -> None:
        def bind(step: Step) -> Bound:
            return by_driver(step, loaded(step.kernel, step.smem_bytes, ordinal))

        self._program = Program(launch, bind)
        self._prepare = [bind(step) for step in launch.prepare]
        self._scratch, self._prepared = launch.scratch_bytes, launch.prepared_bytes
        self._ordinal = ordinal
        self._device = torch.device("cuda", ordinal)

    def prepared(self, operands: Operands) -> Tensor:
        """The operand ``prepared`` for these inputs, made on the current stream."""
        made = self._bytes(self._prepared)
        self._in_context(lambda: [run({**operands, PREPARED: made}) for run in self._prepare])
        return made

    def __call__(self, operands: Operands) -> None:
        """Enqueue all of it on the current stream of the launch's device, which is the current one.
        The scratch is from PyTorch's allocator, so that streams and graphs share none."""
        if self._scratch:
            operands = {**operands, SCRATCH: self._bytes(self._scratch)}
        self._in_context(lambda: self._program(operands))

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _in_context(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except NoContext:  # a thread's first use of the GPU, as in the backward pass
            driver.make_current(self._ordinal)
            run()


class ReadyProgram(ReadyLaunch):
    """A convolution by a launch with products; see `ReadyLaunch`."""

    __slots__ = ()

    def __init__(self, choice: Choice, launch: Launch, ordinal: int) -> None:
        problem: Any = choice.problem
        program = LoadedProgram(launch, ordinal)
        name, *inputs = (n for n in NAMES[problem.direction] if n != "bias_grad")
        size, stride = layout_of(shapes_of(problem)[name])
        dtype: torch.dtype = getattr(torch, problem.dtype)
        alone = problem.direction != "wgrad"

        def run(*given: Tensor | None) -> Any:
            if current_device() != ordinal:
                with torch.cuda.device(ordinal):
                    return run(*given)
            out: Tensor = empty(size, stride, dtype)
            operands = {name: out}
            for role, tensor in zip(inputs, given, strict=False):
                if tensor is not None:
                    operands[role] = aligned(tensor)
            program(operands)
            return out if alone else (out, None)

        self.choice, self.tf32 = choice, launch.tf32
        self.run = run
