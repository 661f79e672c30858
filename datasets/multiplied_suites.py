"""Makes the suites of depthwise layers with more outputs than channels: those of timm's networks.

    python datasets/multiplied_suites.py    suites/multiplied/*.json, from networks.json

Variants, batches and sizes are drawn as for any group width (`any_width_suites`). No layer of the
hold-out, at any batch, is in the training suite.
"""

from __future__ import annotations

from pathlib import Path

import click
from any_width_suites import FACTORS, _entries, layers_of_networks, split

from confpred.data.suites import Suite, write_suite
from confpred.problem.conv2d import Problem

SUITES = Path(__file__).parent / "suites" / "multiplied"
#: Networks to train on: of each kind some.
TRAINED = (
    *(f"fastvit_{size}" for size in ("t8", "t12", "s12", "sa12", "sa24", "sa36", "mci0", "mci1")),
    *(f"maxxvit_rmlp_{size}_rw_256" for size in ("nano", "small", "tiny")),
    *("maxxvitv2_nano_rw_256", "maxxvitv2_rmlp_base_rw_224", "edgenext_small_rw"),
    *("coatnext_nano_rw_224", "pit_ti_224", "pit_s_224", "pit_b_224"),
)
#: Problems of each direction.
COUNTS = {"training": 80, "holdout": 32}


def is_multiplied(layer: Problem) -> bool:
    """Return whether `layer` gives several outputs a channel."""
    return layer.groups == layer.c > 1 and layer.k > layer.c


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of every random choice.")
@click.option("--out", default=SUITES, type=click.Path(path_type=Path), help="Folder to write to.")
def main(seed: int, out: Path) -> None:
    """Write training.json and holdout.json from networks.json."""
    trained, held, never = split(layers_of_networks(is_multiplied), TRAINED)
    for index, (name, networks) in enumerate((("training", trained), ("holdout", held))):
        counts = dict.fromkeys(("fprop", "dgrad", "wgrad"), (COUNTS[name], 0))
        sizes, apart_from = (FACTORS, never) if name == "training" else ((1.0,), set())
        entries = _entries(networks, counts, apart_from, sizes, [seed, 2 + index])
        write_suite(Suite(f"multiplied-{name}", entries), out / f"{name}.json")
        used = {name for entry in entries for name in entry.networks}
        click.echo(f"multiplied-{name}: {len(entries)} problems of {len(used)} networks")


if __name__ == "__main__":
    main()
