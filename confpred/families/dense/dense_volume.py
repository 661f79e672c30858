"""Families of ``kernels/dense_volume.cu`` and ``dense_volume_wgrad.cu``: configs, legality,
features, launch.

They serve dense channels-last layers of rank 3 of few channels: multiples of 8, in or out at most
``FEW``, as cuDNN's plans win beyond (decision 241), or 32 where the others are no multiple of 16.
Those summed over (the layer's input, and in dgrad its output) are at most ``MOST_SUMMED``, as the
filter of a block's channels and some planes of ``in`` have to stay in shared memory; for a filter's
gradient at most ``MOST_CHANNELS``. The filter is at most 7x7x7, the stride 1 or 2 along each axis,
without dilation, float16 or bfloat16.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confpred.families import common, depthwise, volume
from confpred.families.common import Occupancy, ceil_div
from confpred.families.protocol import Array, Mask, Rows
from confpred.families.table import Described, config_columns, config_table, crossed
from confpred.problem.conv import CONV, MAX_RANK, ConvNd
from confpred.problem.conv2d import dtype_macro
from confpred.problem.device import Device
from confpred.problem.operation import Launch

DTYPES = ("float16", "bfloat16")
#: Channels in or out, at most, where cuDNN's plans lose (H200).
FEW = {"fprop": 24, "dgrad": 24, "wgrad": 32}
MOST_SUMMED, MOST_CHANNELS = 64, 128
MAX_WINDOW = 7
MAX_STRIDE = 2

_COMPILED = ("block_p", "block_q", "block_k", "warps_k", "warps_m")
_FIELDS = (*_COMPILED, "bands")
_WGRAD_COMPILED = ("block_p", "block_q", "block_k", "block_c", "warps_k", "warps_u")
_WGRAD_FIELDS = (*_WGRAD_COMPILED, "splits")
#: (rows, columns) of a tile of a plane.
_WGRAD_TILES = ((4, 8), (8, 8), (4, 16), (8, 16))
_TILES = (
    (4, 8), (7, 7), (8, 8), (4, 16), (7, 14), (8, 16), (4, 32), (14, 14), (16, 16), (8, 32),
)  # fmt: skip
#: (channels, warps along them) of a block.
_CHANNELS = (
    (8, 1), (16, 1), (24, 1), (32, 1), (32, 2), (48, 1), (48, 3), (64, 1), (64, 2), (64, 4),
)  # fmt: skip
#: Warps of a block of the filter's gradient: along channels, and along units.
_WARPS = ((1, 2), (1, 3), (1, 4), (1, 6), (1, 9), (1, 12), (2, 2), (2, 3), (2, 4), (2, 6))
_LEAST_TILE, _LEAST_K, _LEAST_C = 32, 16, 8
#: Blocks of the filter's gradient: of a multiprocessor, at most; tiles of one, where blocks do not
#: fill half of the device; and products of a warp for 16 pixels, all of which are registers.
_MOST_BLOCKS, _MOST_TILES, _MOST_PRODUCTS = 16, 16, 48


def _config_table() -> NDArray[np.void]:
    """Return the config space: blocks of two to eight warps, each with two to 32 tensor-core tiles
    of 16 pixels x 8 channels."""
    rows = crossed(_TILES, _CHANNELS, (1, 2, 4, 8), (1, 2, 4, 8, 16))
    tile_p, tile_q, block_k, warps_k, warps_m, _ = rows.T
    m_tiles = -(-tile_p * tile_q // 16)
    warp_tiles = -(-m_tiles // warps_m)
    work, warps = warp_tiles * (block_k // warps_k // 8), warps_m * warps_k
    kept = (warps >= 2) & (warps <= 8) & (work >= 2) & (work <= 32) & (warp_tiles <= 8)
    kept &= 4 * (warp_tiles * warps_m - m_tiles) <= m_tiles  # few warps are idle
    return config_table(_FIELDS, rows[kept])


def _wgrad_table() -> NDArray[np.void]:
    splits = (1, 16, 64, 128, 256, 512)
    rows = crossed(_WGRAD_TILES, (16, 32, 64), (8, 16, 24, 32), _WARPS, splits)
    block_k, block_c, warps_k, warps_u = rows.T[2:6]
    sums = (block_k // 16) * (block_c // 8)  # of a tap
    warps = warps_k * warps_u
    kept = (block_k // 16 % warps_k == 0) & (8 * sums <= 24 * warps) & (27 * sums >= 4 * warps)
    units = 9 * (block_c // 8)  # of 3x3 taps, which warps share almost evenly
    kept &= 4 * (warps_u * -(-units // warps_u) - units) <= units
    return config_table(_WGRAD_FIELDS, rows[kept])


class DenseVolume(Described):
    """One direction of ``kernels/dense_volume.cu``."""

    operation = CONV
    configs = _config_table()

    def __init__(self, name: str, direction: str, operands: tuple[str, ...]) -> None:
        self.name, self.direction, self.operands = name, direction, operands
        self.feature_names: tuple[str, ...] = (
            *CONV.feature_names, *_FIELDS,
            "block_threads", "warp_tiles", "work", "smem_bytes", "registers", "blocks_per_sm",
            "warps_per_sm", "log_blocks", "waves", "wave_waste", "rounds", "p_waste", "q_waste",
            "k_waste", "k_blocks", "halo", "band_planes", "bands_cut", "bytes_in_flight",
            "log_load_bytes", "log_filter_bytes", "log_products", "log_estimate",
        )  # fmt: skip

    def legal(self, problem: ConvNd, device: Device) -> Mask:
        p = problem
        if p.direction != self.direction or not (handles(p) and has_few_channels(p)):
            return np.zeros(len(self.configs), np.bool_)
        t, (_, height, width) = self._layout(p), _results(p)
        lattices = _lattices(p)
        legal: Mask = (
            (t["registers"] <= common.MOST_ESTIMATED_REGISTERS)
            & (t["registers"] * t["block_threads"] <= device.regs_per_sm)
            & (t["smem_bytes"] <= device.smem_per_block)
            & (t["blocks"] <= common.MAX_INT)
            & common.well_filled(
                _LEAST_TILE,
                (t["block_p"], ceil_div(height, lattices[0])),
                (t["block_q"], ceil_div(width, lattices[1])),
            )
            & ((t["block_k"] < 2 * _channels(p)[1]) | (t["block_k"] <= _LEAST_K))
            & common.distinct_bands(_results(p)[0], t["bands"])
        )
        return legal

    def launch(self, problem: ConvNd, row: int) -> Launch:
        p, (read, written) = problem, _channels(problem)
        t = common.one(self._layout(p, np.array([row])))
        defines = (
            *common.macros(DGRAD=int(p.direction == "dgrad"), CIN=read),
            *common.macros(TAPS_D=p.t, R=p.r, S=p.s),
            *volume.axis_macros(stride=p.stride),
            dtype_macro(p),
            *common.epilogue_macros(p),
            *common.config_macros(self.configs[row], _COMPILED),
            *common.agreed_macros(threads=t["block_threads"], smem_bytes=t["smem_bytes"]),
        )
        scalars = {
            "n": p.n,
            **dict(zip("dhw", _images(p), strict=True)),
            **dict(zip("zpq", _results(p), strict=True)),
            "k": written,
            **volume.axis_scalars(pad=p.padding),
            **{name: t[name] for name in ("k_blocks", "p_tiles", "q_tiles")},
            "bands": t["bands_cut"],
            "band_planes": t["band_planes"],
        }
        step = common.kernel_step(
            "dense_volume", self.operands, defines, t["blocks"], t["block_threads"],
            t["smem_bytes"], scalars,
        )  # fmt: skip
        return Launch((step,))

    def _layout(self, problem: ConvNd, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, how they cut the problem, and the resources and the
        work of a block, by name."""
        p, dgrad = problem, problem.direction == "dgrad"
        (read, written), (depth, *sizes) = _channels(p), _results(p)
        t = config_columns(self.configs, rows)
        lattices = _lattices(p)
        tiles, reach, taps = [], [], []
        for axis, (size, block) in enumerate(zip(sizes, "pq", strict=True)):
            window, halved = p.filter_shape[axis + 1], lattices[axis]
            tiles.append(ceil_div(ceil_div(size, halved), t[f"block_{block}"]))
            taps.append(ceil_div(window, halved))
            down = 1 if dgrad else p.stride[axis + 1]
            reach.append(down * (t[f"block_{block}"] - 1) + taps[-1])
        t["p_tiles"], t["q_tiles"] = tiles
        t["k_blocks"] = ceil_div(written, t["block_k"])
        t["band_planes"], t["bands_cut"] = common.cut(depth, t["bands"])
        cut = t["k_blocks"] * t["p_tiles"] * t["q_tiles"] * t["bands_cut"]
        t["blocks"] = cut * (p.n * prod(lattices))
        t["block_threads"] = 32 * t["warps_m"] * t["warps_k"]
        steps, out_chunks = ceil_div(read, 16), t["block_k"] // 8
        m_tiles = ceil_div(t["block_p"] * t["block_q"], 16)
        t["warp_tiles"] = ceil_div(m_tiles, t["warps_m"])
        warp_columns = t["block_k"] // t["warps_k"] // 8
        t["work"] = t["warp_tiles"] * warp_columns  # tensor-core tiles of a warp
        t["tile_pixels"] = reach[0] * reach[1]  # of a plane of `in`, with the halo
        t["plane_bytes"] = t["tile_pixels"] * (16 * (2 * steps | 1))
        ring = p.t // p.stride[0] + 1 if dgrad else p.t + p.stride[0]
        out_bytes = m_tiles * 16 * 16 * (out_chunks | 1)
        if dgrad:
            t["filter_bytes"] = p.taps * steps * 16 * 16 * (out_chunks | 1)
        else:
            t["filter_bytes"] = t["block_k"] * (16 * (p.taps * steps * 2 | 1))
        t["smem_bytes"] = ring * t["plane_bytes"] + out_bytes + t["filter_bytes"]
        # An estimate: accumulators, fragments, addresses.
        t["registers"] = 4 * t["work"] + 5 * t["warp_tiles"] + 4 * warp_columns + 44
        # Tensor-core instructions of a block for a plane of `out`, about.
        met = p.t / p.stride[0] if dgrad else p.t
        warps = t["warps_m"] * t["warps_k"]
        t["products"] = t["work"] * warps * np.int64(np.ceil(steps * taps[0] * taps[1] * met))
        return t

    def _derived(self, problem: ConvNd, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Estimate seconds as the largest of three times, stretched by the waste of the last wave:
        those of device memory, of the copies from L2 into shared memory with their halos, and of
        the tensor cores; plus a fixed latency for each plane of a block."""
        p, t = problem, self._layout(problem, rows)
        (read, written), (_, height, width) = _channels(p), _results(p)
        registers = np.minimum(t["registers"], common.MAX_REGISTERS)
        filled = Occupancy.of(device, t["blocks"], t["block_threads"], registers, t["smem_bytes"])
        lattices = _lattices(p)
        if p.direction == "dgrad":
            planes = ceil_div(t["band_planes"] + p.t - 1, p.stride[0])
        else:
            planes = (t["band_planes"] - 1) * p.stride[0] + p.t
        planes = np.minimum(planes, _images(p)[0])
        loaded = t["blocks"] * (t["filter_bytes"] + planes * t["tile_pixels"] * (read * 2.0))
        products = t["blocks"] * t["band_planes"] * t["products"]
        seconds = common.largest(
            p.minimum_bytes / device.dram_bytes_per_s,
            common.l2_s(loaded, device),
            common.products_s(products, device),
            device.roofline_s(p),
        )
        down = (1, 1) if p.direction == "dgrad" else p.stride[1:]
        pixels = t["block_p"] * t["block_q"] * prod(down)
        return {
            **t,
            "registers": registers,
            **filled.features(),
            "rounds": filled.rounds,
            "p_waste": t["p_tiles"] * t["block_p"] * lattices[0] / height,
            "q_waste": t["q_tiles"] * t["block_q"] * lattices[1] / width,
            "k_waste": t["k_blocks"] * t["block_k"] / written,
            "halo": t["tile_pixels"] / pixels,
            "bytes_in_flight": filled.resident * t["plane_bytes"],
            "log_load_bytes": np.log2(loaded / p.minimum_bytes),
            "log_filter_bytes": np.log2(t["filter_bytes"]),
            "log_products": np.log2(products),
            "estimate": seconds * filled.wave_waste
            + common.waves_s(
                filled.waves, common.WAVE_AND_LAUNCH_S, t["band_planes"], common.STEP_S
            ),
        }


class DenseVolumeWgrad(Described):
    """``kernels/dense_volume_wgrad.cu``."""

    operation = CONV
    name, direction = "dense_volume_wgrad", "wgrad"
    configs = _wgrad_table()
    feature_names = (
        *CONV.feature_names, *_WGRAD_FIELDS,
        "block_threads", "work", "smem_bytes", "registers", "blocks_per_sm", "warps_per_sm",
        "log_blocks", "waves", "wave_waste", "p_waste", "q_waste", "k_waste", "c_waste", "u_waste",
        "halo", "band_planes", "bands", "rounds", "round_waste", "bytes_in_flight",
        "log_load_bytes", "log_sum_bytes", "log_products", "log_estimate",
    )  # fmt: skip

    def legal(self, problem: ConvNd, device: Device) -> Mask:
        p = problem
        if p.direction != self.direction or not (handles(p) and has_few_channels(p)):
            return np.zeros(len(self.configs), np.bool_)
        t = self._layout(p)
        legal: Mask = (
            (t["registers"] <= common.MOST_ESTIMATED_REGISTERS)
            & (t["registers"] * t["block_threads"] <= device.regs_per_sm)
            & (t["smem_bytes"] <= device.smem_per_block)
            & (t["work"] <= _MOST_PRODUCTS)
            & common.well_filled(_LEAST_TILE, (t["block_p"], p.p), (t["block_q"], p.q))
            & ((t["block_k"] < 2 * p.k) | (t["block_k"] == _LEAST_K))
            & ((t["block_c"] < 2 * p.c) | (t["block_c"] == _LEAST_C))
            # Warps share the units almost evenly.
            & (4 * (t["warps_u"] * t["warp_units"] - t["units"]) <= t["units"])
            # Blocks that share sums: enough for half of the device, or of few tiles, and not too
            # many.
            & (
                (t["splits"] == 1)
                | ((t["splits"] < 2 * t["tiles"]) & (t["blocks"] <= _MOST_BLOCKS * device.sm_count))
            )
            & ((2 * t["blocks"] >= device.sm_count) | (t["tiles"] <= _MOST_TILES * t["splits"]))
            & (t["tiles"] + t["splits"] <= common.MAX_INT)
        )
        return legal

    def launch(self, problem: ConvNd, row: int) -> Launch:
        p = problem
        t = common.one(self._layout(p, np.array([row])))
        defines = (
            *common.macros(TAPS_D=p.t, R=p.r, S=p.s),
            *volume.axis_macros(stride=p.stride),
            dtype_macro(p),
            ("HAS_BIAS", int(p.bias)),
            *common.config_macros(self.configs[row], _WGRAD_COMPILED),
            *common.agreed_macros(threads=t["block_threads"], smem_bytes=t["smem_bytes"]),
        )
        names = ("c_blocks", "k_blocks", "p_tiles", "q_tiles", "bands", "band_planes", "tiles")
        scalars = {
            **common.named(p, "d h w c z p q k"),
            **volume.axis_scalars(pad=p.padding),
            **{name: t[name] for name in (*names, "splits")},
        }
        return depthwise.wgrad_launch(self.name, p, defines, t["block_threads"], t, scalars)

    def _layout(self, problem: ConvNd, rows: Rows | slice = slice(None)) -> dict[str, Array]:
        """Return the fields of some configs, how they cut the problem, and the resources and the
        work of a block, by name."""
        p = problem
        t = config_columns(self.configs, rows)
        t["p_tiles"], t["q_tiles"] = ceil_div(p.p, t["block_p"]), ceil_div(p.q, t["block_q"])
        t["k_blocks"], t["c_blocks"] = ceil_div(p.k, t["block_k"]), ceil_div(p.c, t["block_c"])
        # As few bands as give each split a tile, of two planes or more.
        columns = p.n * t["p_tiles"] * t["q_tiles"]
        bands = np.minimum(ceil_div(t["splits"], columns), max(p.z // 2, 1))
        t["band_planes"], t["bands"] = common.cut(p.z, bands)
        t["tiles"] = columns * t["bands"]
        t["blocks"] = t["c_blocks"] * t["k_blocks"] * t["splits"]
        t["block_threads"] = 32 * t["warps_k"] * t["warps_u"]
        k_tiles, pieces = t["block_k"] // 16, t["block_c"] // 8
        t["units"] = p.r * p.s * pieces
        t["warp_units"], warp_k = ceil_div(t["units"], t["warps_u"]), k_tiles // t["warps_k"]
        t["work"] = p.t * t["warp_units"] * warp_k  # tensor-core tiles of a warp
        tile_h = p.stride[1] * (t["block_p"] - 1) + p.r
        tile_w = p.stride[2] * (t["block_q"] - 1) + p.s
        pixels = t["block_p"] * t["block_q"]
        t["tile_pixels"] = tile_h * tile_w  # of a plane of `in`, with the halo
        t["plane_bytes"] = t["tile_pixels"] * (16 * (pieces | 1))
        t["grad_bytes"] = pixels * (16 * (2 * k_tiles | 1))
        t["smem_bytes"] = (p.t + p.stride[0]) * t["plane_bytes"] + 2 * t["grad_bytes"]
        # An estimate: sums, fragments, addresses.
        t["registers"] = 4 * t["work"] + 8 * warp_k + t["warp_units"] + 48
        # Tensor-core instructions of a block for a plane of `out_grad`.
        t["products"] = t["work"] * t["warps_k"] * t["warps_u"] * (pixels // 16)
        return t

    def _derived(self, problem: ConvNd, device: Device, rows: Rows) -> dict[str, NDArray[Any]]:
        """Estimate seconds as the largest of three times, stretched by the waste of the last wave
        and of the blocks' last tile: those of device memory, of the copies from L2 into shared
        memory with their halos, and of the tensor cores; plus a fixed latency for each plane of a
        block, and the time to add the blocks' sums."""
        p, t = problem, self._layout(problem, rows)
        registers = np.minimum(t["registers"], common.MAX_REGISTERS)
        filled = Occupancy.of(device, t["blocks"], t["block_threads"], registers, t["smem_bytes"])
        ideal_rounds = t["tiles"] / t["splits"]
        rounds = np.ceil(ideal_rounds)
        planes = np.minimum((t["band_planes"] - 1) * p.stride[0] + p.t, p.d)
        pixels = t["block_p"] * t["block_q"]
        elements = planes * t["tile_pixels"] * t["block_c"]  # of a tile, and of its gradient
        elements += t["band_planes"] * pixels * t["block_k"]
        parts = t["c_blocks"] * t["k_blocks"] * t["tiles"]
        loaded, products = parts * (elements * 2.0), parts * t["band_planes"] * t["products"]
        seconds = common.largest(
            p.minimum_bytes / device.dram_bytes_per_s,
            common.l2_s(loaded, device),
            common.products_s(products, device),
            device.roofline_s(p),
        )
        sum_bytes = 4.0 * p.filter_elements * t["splits"]
        reduction = np.where(t["splits"] == 1, common.DIRECT, common.TWO_KERNELS)
        steps = rounds * t["band_planes"]
        return {
            **t,
            "registers": registers,
            **filled.features(),
            "p_waste": t["p_tiles"] * t["block_p"] / p.p,
            "q_waste": t["q_tiles"] * t["block_q"] / p.q,
            "k_waste": t["k_blocks"] * t["block_k"] / p.k,
            "c_waste": t["c_blocks"] * t["block_c"] / p.c,
            "u_waste": t["warps_u"] * t["warp_units"] / t["units"],
            "halo": t["tile_pixels"] / (pixels * p.stride[1] * p.stride[2]),
            "rounds": rounds,
            "round_waste": rounds / ideal_rounds,
            "bytes_in_flight": filled.resident * (t["plane_bytes"] + t["grad_bytes"]),
            "log_load_bytes": np.log2(loaded / p.minimum_bytes),
            "log_sum_bytes": np.log2(sum_bytes),
            "log_products": np.log2(products),
            "estimate": seconds * filled.wave_waste * (rounds / ideal_rounds)
            + common.waves_s(filled.waves, common.WAVE_AND_LAUNCH_S, steps, common.STEP_S)
            + common.depthwise_adding_s(reduction, sum_bytes, device),
        }


def handles(problem: ConvNd) -> bool:
    """Return whether `problem` is a layer that the kernels compute, though plans may be faster."""
    p = problem
    staying = max(p.c, p.k) if p.direction == "wgrad" else _channels(p)[0]  # in shared memory
    axes = zip(p.filter_shape, p.dilation, strict=True)
    return (
        p.rank == MAX_RANK
        and p.is_channels_last
        and p.groups == 1
        and p.dtype in DTYPES
        and p.c % 8 == 0
        and p.k % 8 == 0
        and staying <= (MOST_CHANNELS if p.direction == "wgrad" else MOST_SUMMED)
        and max(p.filter_shape) <= MAX_WINDOW
        and max(p.stride) <= MAX_STRIDE
        and max(prod(p.input_shape[1:]), prod(p.output_shape[1:])) <= common.MAX_INT
        and all(window == 1 or dilation == 1 for window, dilation in axes)
    )


def has_few_channels(p: ConvNd) -> bool:
    """Return whether so few channels go in or out that cuDNN's plans lose; they pad channels that
    are no multiple of 16."""
    few, more = sorted((p.c, p.k))
    return few <= FEW[p.direction] or (few == 32 and more % 16 != 0)


def _channels(p: ConvNd) -> tuple[int, int]:
    """Return the channels that the kernel reads, and sums over, and those that it writes."""
    return (p.c, p.k) if p.direction == "fprop" else (p.k, p.c)


def _images(p: ConvNd) -> tuple[int, ...]:
    """Return depth, height and width of what the kernel reads."""
    return p.input_shape if p.direction == "fprop" else p.output_shape


def _results(p: ConvNd) -> tuple[int, ...]:
    """Return depth, height and width of what the kernel writes."""
    return p.output_shape if p.direction == "fprop" else p.input_shape


def _lattices(p: ConvNd) -> tuple[int, ...]:
    """Return into how many lattices of positions, which meet different taps, rows and columns
    fall."""
    return (1, 1) if p.direction == "fprop" else p.stride[1:]


_EPILOGUE = ("filter", "bias", "residual")
FAMILIES = (
    DenseVolume("dense_volume_fprop", "fprop", ("out", "in", *_EPILOGUE)),
    DenseVolume("dense_volume_dgrad", "dgrad", ("in_grad", "out_grad", *_EPILOGUE)),
    DenseVolumeWgrad(),
)
