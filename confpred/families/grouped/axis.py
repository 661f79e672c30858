"""How the kernels of ``grouped_rows.cu`` walk a layer's rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from confpred.problem.conv2d import Problem


@dataclass(frozen=True, slots=True)
class Axis:
    """How the kernel walks a layer's rows, or its columns; the names are the kernel's.

    A position of a tile is an output of the kernel, or two neighbouring ones where an input feeds
    twice as many outputs (``up``).

    Attributes:
        taps: R or S.
        down, up: how many inputs the walk goes on for an output, and how many outputs an input
            feeds: 1 or 2, and one of the two is 1.
        in_origin, in_lattice, in_step: the input that the first tap of position 0 meets, how far
            it moves from one lattice to the next, and the distance of one step.
        out_origin, out_step: the output of position 0, and the distance of one step, which is
            also the number of lattices.
        positions: how many positions one lattice has.
    """

    taps: int
    down: int
    up: int
    in_origin: int
    in_lattice: int
    in_step: int
    out_origin: int
    out_step: int
    positions: int

    def scalars(self, side: str) -> dict[str, int]:
        """The kernel's scalars for its rows (`side` is ``h``) or its columns (``w``), by name."""
        return {
            f"in_origin_{side}": self.in_origin,
            f"in_lattice_{side}": self.in_lattice,
            f"in_step_{side}": self.in_step,
            f"out_origin_{side}": self.out_origin,
            f"out_step_{side}": self.out_step,
        }


def axes_of(problem: Problem) -> tuple[Axis, Axis]:
    """The rows and the columns of `problem`."""
    return axis_of(problem, 0), axis_of(problem, 1)


def axis_of(problem: Problem, axis: int) -> Axis:
    """The rows (0) or the columns (1) of `problem`."""
    taps = (problem.r, problem.s)[axis]
    inputs, outputs = ((problem.h, problem.p), (problem.w, problem.q))[axis]
    stride, padding = problem.stride[axis], problem.padding[axis]
    # With one tap any dilation is right; taking the stride's leaves the kernel no stride to handle.
    dilation = problem.dilation[axis] if taps > 1 else stride
    if problem.direction == "fprop":
        # input = stride * output + dilation * tap - padding
        common = gcd(stride, dilation)
        lattices = dilation // common
        return Axis(
            taps=taps,
            down=stride // common,
            up=1,
            in_origin=-padding,
            in_lattice=stride,
            in_step=common * lattices,
            out_origin=0,
            out_step=lattices,
            positions=-(-outputs // lattices),
        )
    # The kernel reads the gradient of the layer's output and writes that of its input, with its
    # taps turned: w = stride * q + dilation * (taps - 1 - tap) - padding.
    if stride == 1:
        return Axis(
            taps=taps,
            down=1,
            up=1,
            in_origin=padding - dilation * (taps - 1),
            in_lattice=1,
            in_step=dilation,
            out_origin=0,
            out_step=dilation,
            positions=-(-inputs // dilation),
        )
    if dilation == stride:
        # Taps meet every second column only, as in a layer of unit stride. The other lattice reads
        # from behind the last column, where there are only zeros.
        live = padding % 2
        met = (live + padding) // 2 - (taps - 1)
        return Axis(
            taps=taps,
            down=1,
            up=1,
            in_origin=outputs if live else met,
            in_lattice=met - outputs if live else outputs - met,
            in_step=1,
            out_origin=0,
            out_step=2,
            positions=-(-inputs // 2),
        )
    # Pairs of outputs begin where the last tap meets the first of a pair.
    out_origin = -((padding + taps) % 2)
    return Axis(
        taps=taps,
        down=1,
        up=2,
        in_origin=(out_origin + padding + 2 - taps) // 2,
        in_lattice=0,
        in_step=1,
        out_origin=out_origin,
        out_step=1,
        positions=-(-(inputs - out_origin) // 2),
    )
