"""Makes ``suites/linear_chains.json``: chains of linear layers of real networks, and sizes between.

    python datasets/chain_suite.py

The networks are written down: those whose linear layers follow one another with an activation
between, and one width between the first and the last. Coverage is log-uniform.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from confpred.data.suites import Entry, Suite, write_suite
from confpred.problem.linear_chain import LinearChain

FILE = Path(__file__).parent / "suites" / "linear_chains.json"
#: Inputs, hidden, outputs, layers, and what differs from a chain with bias and ReLU after each
#: layer.
NETWORKS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "mnist_mlp": ((784, 512, 10, 3), {"last": False}),
    "mnist_mlp_wide": ((784, 2048, 10, 3), {"last": False}),
    "cifar_mlp": ((3072, 4096, 10, 4), {"last": False}),
    "nerf_trunk": ((63, 256, 256, 8), {}),
    "mip_nerf_trunk": ((96, 256, 256, 8), {}),
    "instant_ngp_density": ((32, 64, 16, 2), {"last": False, "bias": False}),
    "instant_ngp_color": ((32, 64, 3, 3), {"last": False, "bias": False}),
    "deepsdf": ((259, 512, 512, 8), {}),
    "occupancy_decoder": ((259, 256, 1, 6), {"last": False}),
    "sac_actor": ((376, 256, 34, 3), {"last": False}),
    "td3_critic": ((23, 256, 1, 3), {"last": False}),
    "redq_critic": ((393, 1024, 1, 4), {"last": False}),
    "wide_and_deep": ((1024, 1024, 256, 3), {}),
    "dlrm_top": ((479, 1024, 1, 4), {"last": False}),
    "dcn_deep": ((1024, 768, 768, 3), {}),
    "two_tower": ((512, 1024, 128, 3), {"last": False}),
    "moco_head": ((2048, 4096, 256, 3), {"last": False, "bias": False}),
    "simclr_head": ((2048, 2048, 128, 2), {"last": False}),
    "vgg_classifier": ((12_544, 4096, 1000, 3), {"last": False}),
    "alexnet_classifier": ((9216, 4096, 1000, 3), {"last": False}),
    "faster_rcnn_box_head": ((12_544, 1024, 1024, 2), {}),
    "detr_box_head": ((256, 256, 4, 3), {"last": False}),
    "opt_125m_ffn": ((768, 3072, 768, 2), {"last": False}),
    "opt_1.3b_ffn": ((2048, 8192, 2048, 2), {"last": False}),
    "t5_base_ffn": ((768, 3072, 768, 2), {"last": False, "bias": False}),
    "vit_base_ffn": ((768, 3072, 768, 2), {"last": False, "activation": "gelu"}),
    "mixer_channel": ((512, 2048, 512, 2), {"last": False, "activation": "gelu"}),
    "gpt2_ffn": ((768, 3072, 768, 2), {"last": False, "activation": "gelu"}),
    "pinn": ((3, 128, 1, 8), {"last": False, "activation": "silu"}),
    "schnet_readout": ((128, 128, 1, 2), {"last": False, "activation": "silu"}),
}
BATCHES = (1, 4, 16, 64, 197, 512, 2048)
PRECISIONS: tuple[dict[str, Any], ...] = (
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"dtype": "float32"},
    {"dtype": "float32", "tf32": True},
)
SQUARE_WIDTHS, SQUARE_BATCHES, SQUARE_LAYERS = (128, 512, 1024, 2048, 4096), (1, 32, 512), (1, 4, 8)
COVERAGE = 160
_SEED = 0


def of_networks() -> Iterator[Entry]:
    """Every network at two batches in each precision, so that none is measured for long."""
    rng = np.random.default_rng(_SEED)
    for name, ((inputs, hidden, outputs, layers), others) in NETWORKS.items():
        for precision in PRECISIONS:
            for batch in rng.choice(BATCHES, 2, replace=False):
                yield Entry(
                    LinearChain(int(batch), inputs, hidden, outputs, layers, **others, **precision),
                    (name,),
                )


def square() -> Iterator[Entry]:
    """Chains of one width, as `benchmarks/kernels/linear_chains.py` times them."""
    rng = np.random.default_rng(_SEED + 1)
    for width, batch, layers in product(SQUARE_WIDTHS, SQUARE_BATCHES, SQUARE_LAYERS):
        precision = PRECISIONS[rng.integers(len(PRECISIONS))]
        yield Entry(LinearChain(batch, width, width, width, layers, **precision))


def coverage() -> Iterator[Entry]:
    rng = np.random.default_rng(_SEED + 2)

    def width(most: int) -> int:
        size = int(2 ** rng.uniform(5, np.log2(most)))
        step = int(rng.choice((1, 2, 8, 64)))  # odd ones, and those that accesses fit
        return max(16, size // step * step)

    for _ in range(COVERAGE):
        layers = int(rng.choice((1, 2, 3, 4, 6, 8)))
        outputs = width(4096)
        yield Entry(
            LinearChain(
                int(2 ** rng.uniform(0, 10)),
                width(4096),
                outputs if layers == 1 else width(4096),
                outputs,
                layers,
                activation=str(rng.choice(("relu", "relu", "relu", "gelu", "none"))),
                bias=bool(rng.random() < 0.85),
                last=bool(rng.random() < 0.5),
                **PRECISIONS[rng.integers(len(PRECISIONS))],
            )
        )


def suite() -> Suite:
    entries = {e.problem: e for e in (*coverage(), *square(), *of_networks())}
    return Suite("linear_chains", tuple(reversed(entries.values())))


if __name__ == "__main__":
    write_suite(suite(), FILE)
    print(f"{len(suite().entries)} problems: {FILE}")
