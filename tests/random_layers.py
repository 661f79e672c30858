"""Layers drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from confpred.problem.conv2d import Problem

WINDOWS = (
    (3, 3), (3, 3), (3, 3), (5, 5), (7, 7), (9, 9), (1, 7), (11, 1), (11, 11), (2, 3), (1, 1),
)  # fmt: skip
LARGE_WINDOWS = ((13, 13), (21, 21), (3, 19), (21, 5), (1, 21))


def problems(
    direction: str, seed: int = 0, windows: Sequence[tuple[int, int]] = WINDOWS, times: int = 1
) -> Iterator[Problem]:
    """Without end: half of them depthwise, with all that a rule or a feature looks at: sizes,
    `windows`, steps, dtypes, epilogues. Gradients have `times` as many outputs as inputs."""
    rng = random.Random(f"{direction} {seed}")
    while True:
        depthwise = rng.random() < 0.5
        width = 1 if depthwise else rng.choice((2, 8, 16, 24, 32, 64))
        c = width * rng.choice((8, 24, 32, 40, 56, 96, 100, 160)) // rng.choice((1, width))
        c = max(width, c // width * width)
        r, s = rng.choice(windows)
        plain = rng.random() < 0.5  # unit steps
        yield Problem(
            n=rng.choice((1, 2, 3, 8, 32, 100, 256)), c=c,
            h=rng.randint(22, 70) + max(2 * r - 22, 0), w=rng.randint(22, 70) + max(2 * s - 22, 0),
            k=c * (rng.choice((1, 1, 1, 2)) if depthwise and direction == "fprop" else times),
            r=r, s=s, stride=1 if plain else (rng.choice((1, 2)), rng.choice((1, 2))),
            padding=(rng.randint(0, r // 2 + 1), rng.randint(0, s // 2)),
            dilation=1 if plain else rng.choice((1, 2)),
            groups=c // width, dtype=rng.choice(("float16", "bfloat16", "float32")),
            direction=direction, bias=direction != "dgrad" and rng.random() < 0.3,
            residual=direction == "fprop" and rng.random() < 0.3,
            activation=rng.choice(("none", "silu")) if direction == "fprop" else "none",
            deterministic=direction == "wgrad" and rng.random() < 0.3,
        )  # fmt: skip
