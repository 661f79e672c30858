"""Engines and knobs by name.

cuDNN's front end names a plan by its engine and the value of each knob, both by number:
``eng22_k2=5_k13=1``. The numbers of knobs are those of ``cudnnBackendKnobType_t`` in
``cudnn_graph.h`` (cuDNN 9); knobs that are called deprecated there still occur. What an engine's
number stands for may change with every release.
"""

from __future__ import annotations

import re

ENGINE = "engine"
#: By number.
KNOBS = (
    "split_k", "swizzle", "tile_size", "use_tex", "edge", "kblock", "ldga", "ldgb", "chunk_k",
    "split_h", "wino_tile", "multiply", "split_k_buf", "tilek", "stages", "reduction_mode",
    "cta_split_k_mode", "split_k_slc", "idx_mode", "sliced", "split_rs", "singlebuffer", "ldgc",
    "specfilt", "kernel_cfg", "workspace", "tile_cga", "tile_cga_m", "tile_cga_n", "block_size",
    "occupancy", "array_size_per_thread", "num_c_per_block", "split_cols", "tile_rows",
    "tile_cols", "load_size", "cta_count", "stream_k", "split_p_slc", "tile_m", "tile_n",
    "warp_spec_cfg", "swap_ab",
)  # fmt: skip
#: How many slices a sum is split into. It follows from the problem and the other knobs in all but a
#: few of the plans that cuDNN offers, and takes a hundred values; so a config leaves it to cuDNN.
_SLICES = "split_k_slc"
_NAME = re.compile(r"eng(\d+)((?:_k\d+=-?\d+)*)")
_KNOB = re.compile(r"_k(\d+)=(-?\d+)")


def config_of(name: str) -> dict[str, int] | None:
    """Engine and knobs of the plan that the front end calls `name`; None for a knob that is newer
    than this module, or a name of another form."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    config = {ENGINE: int(found[1])}
    for number, value in _KNOB.findall(found[2]):
        if int(number) >= len(KNOBS):
            return None
        config[KNOBS[int(number)]] = int(value)
    config.pop(_SLICES, None)
    return config
