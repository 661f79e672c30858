// Dense convolution of volumes of few channels, forward and data gradient, NDHWC, on tensor cores (sm_80 and later).
//
//   fprop: out[n, z, p, q, k] = activation(bias[k] + residual[n, z, p, q, k]
//            + sum over t, r, s, c of in[n, z * stride - pad + t, p * stride - pad + r, q * stride - pad + s, c]
//                                     * filter[k, t, r, s, c])
//   dgrad: out[n, d, y, x, c] = activation(bias[c] + residual[n, d, y, x, c]
//            + sum over t, r, s, k of in[n, z, p, q, k] * filter[k, t, r, s, c])
//            for the z, p and q with d = z * stride - pad + t, y = p * stride - pad + r and x = q * stride - pad + s
//
// In dgrad `in` is the gradient of the layer's output and `out` that of its input, or these are input and output of a
// transposed layer. The formulas have the layer's names. The code has those of the kernel: in both directions `in` has
// n x d x h x w pixels of CIN channels, and `out` z x p x q of `k`.
//
// The layer's other sizes are run-time arguments. Compile-time: the direction (DGRAD), CIN, the filter TAPS_D x R x S,
// the strides STRIDE_D, STRIDE_H and STRIDE_W, DTYPE, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, and the config:
//
//   BLOCK_P, BLOCK_Q   rows and columns of a tile of an output plane
//   BLOCK_K            channels of `out` that a block computes
//   WARPS_M, WARPS_K   how the warps divide a tile's pixels and those channels
//
// (The config also has bands, which the host makes a launch of.)
//
// A block brings the filter of its channels into shared memory once, and walks down a band of output planes with the
// same tile of each. An input plane's part, with the halo around it, comes into a ring of shared memory once, stays
// there for all output planes that it meets, and the next ones are brought while a plane is multiplied:
//
//      `in`, a ring of parts        filter plane by plane, row by row       `out`, a tile
//      | z - 1 | z | z + 1 | next |          x                       -->    z  -> staged, written 16 bytes a thread
//
// Planes of the padding are neither brought nor multiplied. The data gradient of a layer of stride 2 falls into
// lattices: rows (columns) of `out` of one parity meet every second filter row (column) only. A tile is of one lattice.
// Along the depth an output plane meets those filter planes alone that lead to an input plane.
//
// Parts:
//   block   BLOCK_K channels of `out`, of a tile of plane after plane
//   warp    WARP_TILES tiles of 16 pixels by WARP_CHANNELS channels, in registers
//   thread  fragments of mma.m16n8k16, and parts of 16 bytes of the copies
//
// Bound: the tensor cores, and shared memory nearly as much: at 32 channels a warp's 16 products of 64 pixels by 32
// channels need 6 fragments, which take as long.
//
// Instructions: mma.sync and cp.async, as in dense_tiles.cu.
//
// Share of the floor:
//   dense_volume_dgrad on NVIDIA H200, 2026-11-30
//      14% of arithmetic: n=6 c=16 d=32 h=28 w=28 k=32 t=3 r=3 s=3 rank=3 padding=1 dtype=bfloat16 direction=dgrad
//      23% of bytes: n=2 c=8 d=32 h=256 w=320 k=16 t=3 r=3 s=3 rank=3 stride=2 padding=1 direction=dgrad
//      35% of arithmetic: n=2 c=32 d=96 h=96 w=96 k=16 t=3 r=3 s=3 rank=3 padding=1 dtype=bfloat16 direction=dgrad
//   dense_volume_fprop on NVIDIA H200, 2026-11-30
//      22% of bytes: n=2 c=16 d=16 h=128 w=160 k=32 t=3 r=3 s=3 rank=3 stride=2 padding=1 dtype=bfloat16
//      26% of bytes: n=2 c=16 d=32 h=256 w=320 k=8 t=3 r=3 s=3 rank=3 padding=1 dtype=bfloat16 bias=true
//                    activation=relu
#include "common.cuh"

constexpr bool HALVED_H = DGRAD && STRIDE_H == 2, HALVED_W = DGRAD && STRIDE_W == 2;
// From an output to the next, so many inputs of a tile.
constexpr int DOWN_H = DGRAD ? 1 : STRIDE_H, DOWN_W = DGRAD ? 1 : STRIDE_W;
constexpr int TAPS_H = HALVED_H ? (R + 1) / 2 : R, TAPS_W = HALVED_W ? (S + 1) / 2 : S;  // of a lattice, at most
// Input planes that an output plane and the next one meet, at most.
constexpr int RING = DGRAD ? TAPS_D / STRIDE_D + 1 : TAPS_D + STRIDE_D;

constexpr int THREADS = 32 * WARPS_M * WARPS_K;
constexpr int CHUNKS = CIN / 8;                         // 16-byte chunks of a pixel of `in`
constexpr int K_STEPS = (CIN + 15) / 16;                // steps of 16 channels
constexpr int PIXEL_BYTES = 16 * (2 * K_STEPS | 1);     // an odd number of chunks: ldmatrix meets no bank twice
constexpr int TILE_H = DOWN_H * (BLOCK_P - 1) + TAPS_H, TILE_W = DOWN_W * (BLOCK_Q - 1) + TAPS_W;
constexpr int TILE_PIXELS = TILE_H * TILE_W;
constexpr int PLANE_BYTES = TILE_PIXELS * PIXEL_BYTES;

constexpr int M = BLOCK_P * BLOCK_Q;                    // pixels of a tile of `out`
constexpr int M_TILES = (M + 15) / 16;
constexpr int WARP_TILES = (M_TILES + WARPS_M - 1) / WARPS_M;
constexpr int WARP_CHANNELS = BLOCK_K / WARPS_K;
constexpr int N_TILES = WARP_CHANNELS / 8;
constexpr int OUT_CHUNKS = BLOCK_K / 8;
constexpr int OUT_PIXEL_BYTES = 16 * (OUT_CHUNKS | 1);
constexpr int OUT_BYTES = M_TILES * 16 * OUT_PIXEL_BYTES;

// The filter in shared memory. fprop: a row for each channel of `out`, of all taps with 16 * K_STEPS channels each.
// dgrad: a row for each tap and channel of `in`, of BLOCK_K channels, which ldmatrix transposes.
constexpr int TAPS = TAPS_D * R * S;
constexpr int FILTER_ROW_BYTES = DGRAD ? 16 * (OUT_CHUNKS | 1) : 16 * (TAPS * K_STEPS * 2 | 1);
constexpr int FILTER_ROWS = DGRAD ? TAPS * K_STEPS * 16 : BLOCK_K;
constexpr int FILTER_BYTES = FILTER_ROWS * FILTER_ROW_BYTES;
enum { SMEM_BYTES = RING * PLANE_BYTES + OUT_BYTES + FILTER_BYTES };

static_assert(CIN % 8 == 0 && BLOCK_K % (8 * WARPS_K) == 0, "channels come in pieces of 8");
static_assert(THREADS == HOST_THREADS && SMEM_BYTES == HOST_SMEM_BYTES, "the host launches other blocks");

#include "dense.cuh"

// `n`, `d`, `h`, `w` are the sizes of `in`, and `z`, `p`, `q`, `k` of `out`. A block's number counts channels fastest
// (k_blocks), then columns (q_tiles), rows (p_tiles), bands of band_planes planes, images, and lattices.
extern "C" __global__ void __launch_bounds__(THREADS) dense_volume(
    u16* __restrict__ out, const u16* __restrict__ in, const u16* __restrict__ filter, const u16* __restrict__ bias,
    const u16* __restrict__ residual, int n, int d, int h, int w, int z, int p, int q, int k, int pad_d, int pad_h,
    int pad_w, int k_blocks, int p_tiles, int q_tiles, int bands, int band_planes) {
    extern __shared__ __align__(16) u8 shared[];
    u8* const out_shared = shared + RING * PLANE_BYTES;
    const u32 in_shared = shared_address(shared), filter_shared = shared_address(out_shared + OUT_BYTES);

    // ---- Position of the block
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int warp_m = warp / WARPS_K, warp_k = warp % WARPS_K;
    int block = blockIdx.x;
    const int k0 = block % k_blocks * BLOCK_K;
    block /= k_blocks;
    const int q0 = block % q_tiles * BLOCK_Q;  // in positions of the lattice, as p0
    block /= q_tiles;
    const int p0 = block % p_tiles * BLOCK_P;
    block /= p_tiles;
    const int first_plane = block % bands * band_planes, end_plane = min(first_plane + band_planes, z);
    block /= bands;
    const int image = block % n;
    block /= n;
    const int parity_w = HALVED_W ? block % 2 : 0, parity_h = HALVED_W ? block / 2 : block;
    const Lattice rows = lattice_of(HALVED_H, R, pad_h, parity_h), columns = lattice_of(HALVED_W, S, pad_w, parity_w);

    // Along the depth, the first and the last input plane that output plane `at` may meet.
    const auto first_met = [&](int at) {
        const int before = DGRAD ? at + pad_d - TAPS_D + STRIDE_D : at * STRIDE_D - pad_d;
        return max(DGRAD ? (before < 0 ? 0 : before / STRIDE_D) : before, 0);
    };
    const auto last_met = [&](int at) {
        const int last = DGRAD ? (at + pad_d) / STRIDE_D : at * STRIDE_D - pad_d + TAPS_D - 1;
        return min(last, d - 1);
    };

    // ---- Copies
    const int y0 = p0 * DOWN_H + rows.origin, x0 = q0 * DOWN_W + columns.origin;
    int next_plane = 0;  // before which all planes that are still to be met are brought
    const auto bring_planes = [&](int at) {
        for (next_plane = max(next_plane, first_met(at)); next_plane <= last_met(at); ++next_plane) {
            const u16* const plane = in + (static_cast<i64>(image) * d + next_plane) * h * w * CIN;
            const u32 to = in_shared + next_plane % RING * PLANE_BYTES;
            for (int e = tid; e < TILE_PIXELS * CHUNKS; e += THREADS) {
                const int chunk = e % CHUNKS, pixel = e / CHUNKS;
                const int y = y0 + pixel / TILE_W, x = x0 + pixel % TILE_W;
                const bool valid = y >= 0 && y < h && x >= 0 && x < w;
                const u16* const from = plane + (static_cast<i64>(y) * w + x) * CIN + 8 * chunk;
                copy_async_16(to + pixel * PIXEL_BYTES + 16 * chunk, valid ? from : in, valid);
            }
        }
    };

    // The filter: the first loop is of fprop, the second one of dgrad.
    for (int e = tid; e < FILTER_ROWS * TAPS * CHUNKS && !DGRAD; e += THREADS) {
        const int chunk = e % CHUNKS, tap = e / CHUNKS % TAPS, channel = e / (CHUNKS * TAPS);
        const bool valid = k0 + channel < k;
        const i64 offset = (static_cast<i64>(k0 + channel) * TAPS + tap) * CIN + 8 * chunk;
        copy_async_16(filter_shared + channel * FILTER_ROW_BYTES + (tap * K_STEPS * 2 + chunk) * 16,
                      valid ? filter + offset : filter, valid);
    }
    for (int e = tid; e < CIN * TAPS * OUT_CHUNKS && DGRAD; e += THREADS) {
        const int chunk = e % OUT_CHUNKS, tap = e / OUT_CHUNKS % TAPS, channel = e / (OUT_CHUNKS * TAPS);
        const bool valid = k0 + 8 * chunk < k;
        const i64 offset = (static_cast<i64>(channel) * TAPS + tap) * k + k0 + 8 * chunk;
        copy_async_16(filter_shared + (tap * K_STEPS * 16 + channel) * FILTER_ROW_BYTES + chunk * 16,
                      valid ? filter + offset : filter, valid);
    }
    // The last step of 16 channels may have 8 only; zeros stand for the others, in `in` and in the filter.
    if (CIN % 16) {
        for (int e = tid; e < RING * TILE_PIXELS; e += THREADS)
            *reinterpret_cast<uint4*>(shared + e * PIXEL_BYTES + 16 * CHUNKS) = make_uint4(0, 0, 0, 0);
        u8* const filter_rows = out_shared + OUT_BYTES;
        for (int e = tid; e < TAPS * 8 * OUT_CHUNKS && DGRAD; e += THREADS) {
            const int row = e / OUT_CHUNKS / 8 * K_STEPS * 16 + CIN + e / OUT_CHUNKS % 8;
            *reinterpret_cast<uint4*>(filter_rows + row * FILTER_ROW_BYTES + e % OUT_CHUNKS * 16) =
                make_uint4(0, 0, 0, 0);
        }
        for (int e = tid; e < BLOCK_K * TAPS && !DGRAD; e += THREADS)
            *reinterpret_cast<uint4*>(filter_rows + e / TAPS * FILTER_ROW_BYTES +
                                      (e % TAPS * K_STEPS * 2 + CHUNKS) * 16) = make_uint4(0, 0, 0, 0);
    }
    bring_planes(first_plane);
    copy_async_commit();

    // ---- Fragments
    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16".
    const int fragment_row = lane / 4, fragment_column = lane % 4 * 2;
    u32 fragment_from[WARP_TILES];
#pragma unroll
    for (int t = 0; t < WARP_TILES; ++t) {
        int m = (warp_m * WARP_TILES + t) * 16 + lane % 16;
        if (m >= M) m = 0;  // rows past the tile repeat pixel 0, and are never stored
        const int y = m / BLOCK_Q, x = m % BLOCK_Q;
        fragment_from[t] = in_shared + (y * DOWN_H * TILE_W + x * DOWN_W) * PIXEL_BYTES + lane / 16 * 16;
    }
    const u32 filter_from =
        DGRAD ? filter_shared + lane % 16 * FILTER_ROW_BYTES + (warp_k * WARP_CHANNELS + lane / 16 * 8) * 2
              : filter_shared + (warp_k * WARP_CHANNELS + lane % 8 + lane / 16 * 8) * FILTER_ROW_BYTES + lane / 8 % 2 * 16;
    float bias_regs[N_TILES][2];
#pragma unroll
    for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int channel = k0 + warp_k * WARP_CHANNELS + nt * 8 + fragment_column + e;
            bias_regs[nt][e] = HAS_BIAS && channel < k ? to_float(bias[channel]) : 0.0f;
        }

    // Where pixel m of the tile lies in a plane of `out`, counted in pixels; -1 outside of it.
    const auto out_pixel = [&](int m) {
        const int y = (p0 + m / BLOCK_Q) * (HALVED_H ? 2 : 1) + parity_h;
        const int x = (q0 + m % BLOCK_Q) * (HALVED_W ? 2 : 1) + parity_w;
        return m < M && y < p && x < q ? y * q + x : -1;
    };

    // ---- Planes
    for (int at = first_plane; at < end_plane; ++at) {
        copy_async_wait<0>();
        __syncthreads();
        if (at + 1 < end_plane) bring_planes(at + 1);
        copy_async_commit();

        float acc[WARP_TILES][N_TILES][4];
#pragma unroll
        for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
            for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[t][nt][e] = 0.0f;

#pragma unroll 1
        for (int from = first_met(at); from <= last_met(at); ++from) {
            const int tap_d = DGRAD ? at + pad_d - from * STRIDE_D : from + pad_d - at * STRIDE_D;
            const u32 plane = from % RING * PLANE_BYTES;
#pragma unroll
            for (int i = 0; i < TAPS_H; ++i)
#pragma unroll
                for (int j = 0; j < TAPS_W; ++j) {
                    if ((HALVED_H && i >= rows.taps) || (HALVED_W && j >= columns.taps)) continue;
                    const int row = rows.first + i * rows.step, column = columns.first + j * columns.step;
                    const int tap = (tap_d * R + row) * S + column;
                    const u32 shift = plane + (i * TILE_W + j) * PIXEL_BYTES;
#pragma unroll
                    for (int ks = 0; ks < K_STEPS; ++ks) {
                        u32 a[WARP_TILES][4];
#pragma unroll
                        for (int t = 0; t < WARP_TILES; ++t) load_matrix_x4(a[t], fragment_from[t] + shift + ks * 32);
#pragma unroll
                        for (int nt = 0; nt < N_TILES; nt += 2) {
                            const u32 b_from = DGRAD
                                ? filter_from + (tap * K_STEPS + ks) * 16 * FILTER_ROW_BYTES + nt * 16
                                : filter_from + nt * 8 * FILTER_ROW_BYTES + (tap * K_STEPS + ks) * 32;
                            u32 b[4];  // of tiles nt and nt + 1 of output channels
                            if (nt + 1 < N_TILES) load_filter_x4(b, b_from);
                            else load_filter_x2(b, b_from);
#pragma unroll
                            for (int t = 0; t < WARP_TILES; ++t) {
                                mma_k16(acc[t][nt], a[t], b[0], b[1]);
                                if (nt + 1 < N_TILES) mma_k16(acc[t][nt + 1], a[t], b[2], b[3]);
                            }
                        }
                    }
                }
        }

        const i64 plane_pixel = (static_cast<i64>(image) * z + at) * p * q;
#pragma unroll
        for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int m = (warp_m * WARP_TILES + t) * 16 + fragment_row + 8 * half;
                if (m >= M_TILES * 16) continue;
                const int pixel = HAS_RESIDUAL ? out_pixel(m) : -1;
#pragma unroll
                for (int nt = 0; nt < N_TILES; ++nt) {
                    const int channel = warp_k * WARP_CHANNELS + nt * 8 + fragment_column;
                    float x[2] = {acc[t][nt][2 * half] + bias_regs[nt][0], acc[t][nt][2 * half + 1] + bias_regs[nt][1]};
                    if (HAS_RESIDUAL && pixel >= 0 && k0 + channel < k) {  // before the only rounding
                        const u32 added =
                            *reinterpret_cast<const u32*>(residual + (plane_pixel + pixel) * k + k0 + channel);
                        x[0] += to_float(static_cast<u16>(added));
                        x[1] += to_float(static_cast<u16>(added >> 16));
                    }
                    *reinterpret_cast<u32*>(out_shared + m * OUT_PIXEL_BYTES + 2 * channel) =
                        pack(activate<ACTIVATION>(x[0]), activate<ACTIVATION>(x[1]));
                }
            }
        __syncthreads();
        for (int e = tid; e < M * OUT_CHUNKS; e += THREADS) {
            const int m = e / OUT_CHUNKS, chunk = e % OUT_CHUNKS, pixel = out_pixel(m);
            if (pixel >= 0 && k0 + 8 * chunk < k)
                *reinterpret_cast<uint4*>(out + (plane_pixel + pixel) * k + k0 + 8 * chunk) =
                    *reinterpret_cast<const uint4*>(out_shared + m * OUT_PIXEL_BYTES + 16 * chunk);
        }
    }
}
