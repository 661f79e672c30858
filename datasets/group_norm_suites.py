"""Makes the suites of group, instance, layer and RMS norm, from the networks that
`group_norm_networks.py` writes down.

    python datasets/group_norm_suites.py    suites/group_norm/*.json

No network of the hold-out, and no layer of it, is in the training suite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from group_norm_networks import NETWORKS, Network
from make_suite import log_uniform

from confpred.data.suites import Entry, Suite, write_suite
from confpred.problem.activation import ACTIVATIONS
from confpred.problem.norm import DIRECTIONS
from confpred.problem.norm_of_groups import AFFINE, Norm

SUITES = Path(__file__).parent / "suites" / "group_norm"

#: Networks that are held out: some of each kind.
HELD_OUT = """
    sdxl_unet ldm_churches brain_diffusion wan_decoder var_decoder cogvideox_decoder
    cogvideox_encoder seg_resnet dyn_unet pix2pix_hd anime_gan swin_ir retinexformer raft mask_rcnn
    grid_rcnn
    convnext_nano poolformer_m36 hiera_large bit_r101x3 intern_vit next_dit
""".split()  # noqa: SIM905

MEASURED = ACTIVATIONS[:6]  # leaky ReLU came later
COUNTS = {"training": 620, "holdout": 72}  # problems of networks
COVERAGE = 32  # problems to train on that no network has
BACKWARD_SHARE = 0.45
DTYPES, DTYPE_SHARES = ("float16", "bfloat16", "float32"), (0.46, 0.44, 0.1)
#: Share of problems, by their direction, whose weights have the activations' dtype: autocast, which
#: training mostly uses, leaves them in float32.
OWN_SHARES = {"forward": 0.6, "backward": 0.3}
#: Bytes of the activations.
LEAST_BYTES, MOST_BYTES = 100_000, 768 * 2**20
WIDTHS = (1, 1, 2, 3, 5, 6, 7, 9, 12, 20, 33, 50)  # channels of a group, of coverage


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", default=SUITES, type=click.Path(path_type=Path), help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write suites/group_norm/*.json."""
    for suite in suites(seed):
        write_suite(suite, out / f"{suite.name.removeprefix('group-norm-')}.json")
        names = {name for entry in suite.entries for name in entry.networks}
        click.echo(f"{suite.name}: {len(suite.entries)} problems of {len(names)} networks")


def suites(seed: int) -> Iterator[Suite]:
    """Yield the training suite and the hold-out."""
    uses = {name: uses_of(network) for name, network in NETWORKS.items()}
    trained = {name: found for name, found in uses.items() if name not in HELD_OUT}
    known = {use.layer() for found in trained.values() for use in found}
    generator = np.random.default_rng([seed, 18])
    problems = drawn(trained, COUNTS["training"], generator)
    more = coverage(generator)
    yield Suite("group-norm-training", (*problems, *map(Entry, more)))
    known |= {problem.layer() for problem in more}
    apart = {name: [use for use in uses[name] if use.layer() not in known] for name in HELD_OUT}
    yield Suite("group-norm-holdout", tuple(drawn(apart, COUNTS["holdout"], generator)))


def uses_of(network: Network) -> list[Norm]:
    """Return the distinct norms of a network in each of its runs, in float16 and forward."""
    found: dict[Norm, None] = {}
    for batch, *size in network.runs:
        net = network.write(tuple(size * 2 if len(size) == 1 else size))
        found |= dict.fromkeys(replace(layer, n=batch * layer.n) for layer in net.layers)
    return list(found)


def drawn(
    uses: Mapping[str, Sequence[Norm]], count: int, generator: np.random.Generator
) -> list[Entry]:
    """Return `count` problems: turn by turn a norm of each network, none of them twice."""
    users: dict[Norm, list[str]] = defaultdict(list)
    for name, found in uses.items():
        for layer in dict.fromkeys(use.layer() for use in found):
            users[layer].append(name)
    left = {name: _problems(found, generator) for name, found in uses.items()}
    problems: dict[Norm, None] = {}
    while left:
        for name, some in [*left.items()]:
            if problem := next((p for p in some if p not in problems), None):
                problems[problem] = None
            else:
                del left[name]
            if len(problems) == count:
                return [Entry(p, tuple(users[p.layer()])) for p in problems]
    raise ValueError(f"{len(problems)} problems where {count} were asked for")


def coverage(generator: np.random.Generator) -> list[Norm]:
    """Return problems of no network: odd channels and groups, few pixels, log-uniform sizes."""
    found: dict[Norm, None] = {}
    while len(found) < COVERAGE:
        width, groups = int(generator.choice(WIDTHS)), log_uniform(generator, 1, 400)
        pixels = int(generator.choice((1, 2, 3, 5, 49, log_uniform(generator, 64, 65_536))))
        n = log_uniform(generator, 1, 64 if pixels > 49 else 8192)
        act, affine = str(generator.choice(MEASURED)), str(generator.choice(AFFINE))
        residual, adaptive = (generator.random(2) < 0.25).tolist()
        if pixels > 1 or width > 1:  # PyTorch's instance norm refuses one pixel
            use = Norm(
                n, pixels, width * groups, groups, activation=act, residual=residual, affine=affine,
                adaptive=adaptive and affine != "none",
            )  # fmt: skip
            found |= dict.fromkeys(_problems([use], generator))
    return list(found)


def _problems(uses: Sequence[Norm], generator: np.random.Generator) -> Iterator[Norm]:
    """Yield a problem of each norm, in random order, but for those too large or too small."""
    for i in generator.permutation(len(uses)):
        problem = _problem(uses[i], generator)
        if LEAST_BYTES <= problem.tensor_bytes <= MOST_BYTES:
            yield problem


def _problem(use: Norm, generator: np.random.Generator) -> Norm:
    """Return a norm in a dtype and a direction."""
    direction = DIRECTIONS[int(generator.random() < BACKWARD_SHARE)]
    dtype = str(generator.choice(DTYPES, p=DTYPE_SHARES))
    own = generator.random() < OWN_SHARES[direction] and use.affine != "none"
    fields: dict[str, Any] = {
        "dtype": dtype, "direction": direction, "weights": dtype if own else "float32",
    }  # fmt: skip
    if direction == "backward" and use.activation == "none":
        fields["residual"] = False  # its gradient is that of the output
    return replace(use, **fields)


if __name__ == "__main__":
    main()
