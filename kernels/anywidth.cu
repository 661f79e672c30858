// Grouped convolution of any group width, forward and data gradient, NHWC, on tensor cores (sm_80 and later).
//
//   fprop: out[n, p, q, k] = activation(bias[k] + residual[n, p, q, k]
//            + sum over r, s, c of in[n, p * stride - pad + r * dilation, q ..., c] * filter[k, r, s, c])
//   dgrad: out[n, p * stride - pad + r * dilation, q ..., c] = sum over r, s, k of in[n, p, q, k] * filter[k, r, s, c]
//
// where k and c run over the same group. In dgrad `in` is the gradient of the layer's output and `out` that of its
// input. In either direction a group has GIN channels of `in` and GOUT of `out`, any two numbers.
//
// The layer's other sizes are run-time arguments. Compile-time: the direction (DGRAD), GIN, GOUT, the filter R x S,
// DOWN and STEP of each axis (inputs from one position to the next, and from one tap to the next), HALVED of each axis
// (0: no; else how many classes of taps a lattice chooses from: 1 or 2), DTYPE, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, and
// the config:
//
//   BLOCK_N, BLOCK_P, BLOCK_Q   images, rows and columns of a tile of `out`
//   BLOCK_G                     groups of a block
//   BLOCK_K                     channels of `out` of each of them, at most: a group is cut in equal parts of so many
//   BLOCK_C                     channels of `in` that one pass brings in, at most: a group is cut as evenly
//   WARPS_M, WARPS_K            how the warps of a group divide the tile's pixels and the channels of `out`
//   STAGES                      passes in flight in shared memory
//
// A tile is a matrix product of each group: its pixels (rows) by taps and channels of `in` (the sum) by channels of
// `out` (columns). The pixels and their halo lie in shared memory once, and each tap reads them at another offset.
//
//      in: tile + halo           filter of a group            out: tile
//      8 channels a chunk        8 channels a chunk
//      +-----------+             r = 0: |s0 c0|s0 c1|s1 c0|s1 c1|s2 c0|s2 c1|        +-------+
//      | +-------+ |       x            \____ ____/ \____ ____/ \____ ____/    -->   |       | --> staged, written
//      | |       | |                       mma k16     mma k16     mma k16           +-------+     in whole vectors
//      +-----------+             r = 1: ...
//
// A tensor-core step takes 16 terms of the sum: two chunks, neighbours in this order, though they may be of two taps.
// ldmatrix gets the address of each chunk, so only a group's last chunk is padded; an odd chunk at the end
// of a filter row is a step of 8. A block goes through its tiles and, in each, through the passes. With one pass the
// filter stays in shared memory; else each pass brings its part of it.
//
// Data gradient, stride 2: rows (columns) of `out` of one parity, a *lattice*, meet every second filter row (column), or
// with even dilation all or none. A tile is of one lattice, and multiplies no inserted zeros.
//
// Parts:
//   block   BLOCK_G groups of a tile of pixels, tile after tile
//   warp    of one group WARP_M tiles of 16 pixels and WARP_N tiles of 8 channels of `out`, in registers
//   thread  fragments of mma.m16n8k16, and its share of the copies
//
// Bound: bytes for narrow groups, the tensor cores for wide ones: a 3x3 filter does 4.5 FLOP a byte and channel of a
// group, and an H100 has 257 FLOP in the time of a byte, which 57 channels reach.
//
// Instructions: mma.sync takes any number of channels in steps of 8 and runs from sm_80 on; wgmma needs tiles of 64
// rows in a layout of its own, which the taps would have to be copied into. ldmatrix names each row of a fragment by
// an address, so that taps and halo cost nothing. cp.async leaves the registers to the sums.
//
// Share of the floor:
//   anywidth_dgrad on NVIDIA H200, 2026-11-28
//      14% of arithmetic: n=64 c=256 h=96 w=96 k=256 r=3 s=3 stride=2 padding=1 groups=2 dtype=bfloat16
//                         direction=dgrad
//      26% of bytes: n=128 c=168 h=56 w=56 k=168 r=3 s=3 stride=2 padding=1 groups=7 dtype=bfloat16 direction=dgrad
//      30% of bytes: n=128 c=64 h=56 w=56 k=256 r=3 s=3 padding=1 groups=4 dtype=bfloat16 direction=dgrad
//   anywidth_fprop on NVIDIA H200, 2026-11-28
//      17% of arithmetic: n=128 c=4096 h=28 w=28 k=4096 r=3 s=3 stride=2 padding=1 groups=32 bias=true
//                         activation=relu residual=true
//      24% of arithmetic: n=64 c=4096 h=14 w=14 k=4096 r=3 s=3 padding=1 groups=32 bias=true activation=relu
//                         residual=true
//      35% of bytes: n=128 c=24 h=128 w=128 k=144 r=3 s=3 stride=2 padding=1 groups=2
#include "anywidth.cuh"

// With HALVED = 2 a lattice has every second tap, with HALVED = 1 all or none.
constexpr int TAPS_H = HALVED_H == 2 ? (R + 1) / 2 : R, TAPS_W = HALVED_W == 2 ? (S + 1) / 2 : S;  // of a lattice, at most
typedef InputTile<TAPS_H, TAPS_W> In;

constexpr int IN_PIECES = (GIN + 7) / 8, OUT_PIECES = (GOUT + 7) / 8;  // of 8 channels, of a group
constexpr int PASSES = ceil_div(IN_PIECES, BLOCK_C / 8);
constexpr int PIECES = ceil_div(IN_PIECES, PASSES);                     // of a pass
constexpr int K_BLOCKS = ceil_div(OUT_PIECES, BLOCK_K / 8);
constexpr int N_TILES = ceil_div(OUT_PIECES, K_BLOCKS);                 // of a block's group
constexpr int WARP_N = ceil_div(N_TILES, WARPS_K);
constexpr int M_TILES = ceil_div(PIXELS, 16), WARP_M = ceil_div(M_TILES, WARPS_M);
constexpr int IN_VECTOR = vector_of(GIN), OUT_VECTOR = vector_of(GOUT);  // channels that are copied at once
constexpr int IN_VECTORS = PIECES * 8 / IN_VECTOR, OUT_VECTORS = N_TILES * 8 / OUT_VECTOR;  // of a block's group

constexpr int GROUP_WARPS = WARPS_M * WARPS_K;
constexpr int WARPS = BLOCK_G * GROUP_WARPS, THREADS = 32 * WARPS;
// Odd numbers of chunks of 16 bytes: ldmatrix meets no bank twice.
constexpr int PIXEL_BYTES = 16 * (BLOCK_G * PIECES | 1);
constexpr int OUT_BYTES = 16 * (BLOCK_G * N_TILES | 1);  // of a pixel
// The filter of a group. fprop: a row an output channel, of all taps with PIECES each. dgrad: a row an input channel of
// a tap, of N_TILES chunks, which ldmatrix transposes.
constexpr int ROW_BYTES = 16 * (DGRAD ? N_TILES | 1 : R * S * PIECES | 1);
constexpr int ROWS = DGRAD ? R * S * PIECES * 8 : N_TILES * 8;
constexpr int TAP_BYTES = DGRAD ? PIECES * 8 * ROW_BYTES : PIECES * 16, PIECE_BYTES = DGRAD ? 8 * ROW_BYTES : 16;
constexpr int TILE_BYTES = In::COUNT * PIXEL_BYTES;
constexpr int FILTER_BYTES = BLOCK_G * ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = TILE_BYTES + (PASSES > 1 ? FILTER_BYTES : 0);
enum { SMEM_BYTES = STAGES * STAGE_BYTES + (PASSES > 1 ? 0 : FILTER_BYTES) + PIXELS * OUT_BYTES };

static_assert(BLOCK_C % 8 == 0 && BLOCK_K % 8 == 0, "channels come in pieces of 8");
static_assert(THREADS == HOST_THREADS && SMEM_BYTES == HOST_SMEM_BYTES, "the host launches other blocks");
static_assert(K_BLOCKS == HOST_K_BLOCKS && PASSES == HOST_PASSES, "the host cuts groups otherwise");

// Which taps of an axis a lattice meets, and where.
struct Lattice {
    int first;   // the filter row of its tap 0
    int step;    // from there to that of tap 1
    int taps;    // how many it has
    int origin;  // the input row that tap 0 of position 0 meets
};
__device__ __forceinline__ Lattice lattice_of(int halved, int window, int tap_step, int pad, int parity) {
    if (!DGRAD) return {0, 1, window, -pad};
    if (halved == 0) return {window - 1, -1, window, pad - tap_step * (window - 1)};
    const int odd = (parity + pad) & 1;
    if (halved == 1) return {window - 1, -1, odd ? 0 : window, ((parity + pad) >> 1) - tap_step * (window - 1)};
    // The layer's dilation is odd, and is the distance of two taps of a lattice too.
    const int taps = (window - odd + 1) / 2;
    return {odd + 2 * (taps - 1), -2, taps, ((parity + pad - tap_step * odd) >> 1) - tap_step * (taps - 1)};
}

// Copies the filters of a block's groups, from output channel k0 and input channel c0 of each on.
__device__ __forceinline__ void load_filter(u32 to, const u16* filter, int groups, int g0, int k0, int c0) {
    const auto copy = [&](int at, i64 element, bool inside) {
        copy_channels<(DGRAD ? OUT_VECTOR : IN_VECTOR)>(to + at, inside ? filter + element : filter, inside);
    };
    if (DGRAD)
        visit_tile<BLOCK_G * ROWS, 1, OUT_VECTORS, 2 * OUT_VECTOR, 0, ROW_BYTES, WARPS>(
            [&](int, int vector) { return k0 + vector * OUT_VECTOR < GOUT ? k0 + vector * OUT_VECTOR : -1; },
            [&](int r) -> i64 {
                const int g = g0 + r / ROWS, tap = r % ROWS / (PIECES * 8), c = c0 + r % (PIECES * 8);
                return g < groups && c < GIN ? (static_cast<i64>(g * GIN + c) * (R * S) + tap) * GOUT : -1;
            },
            copy);
    else
        visit_tile<BLOCK_G * ROWS, R * S, IN_VECTORS, 2 * IN_VECTOR, TAP_BYTES, ROW_BYTES, WARPS>(
            [&](int tap, int vector) {
                const int channel = c0 + vector * IN_VECTOR;
                return channel < GIN ? tap * GIN + channel : -1;
            },
            [&](int r) -> i64 {
                const int g = g0 + r / ROWS, k = k0 + r % ROWS;
                return g < groups && k < GOUT ? static_cast<i64>(g * GOUT + k) * (R * S * GIN) : -1;
            },
            copy);
}

// `n`, `h`, `w` are the sizes of `in`, and `p`, `q` of `out`. Blocks count parts of groups fastest, then groups, then
// tiles. A tile's number counts columns fastest, then rows, images and lattices.
extern "C" __global__ void __launch_bounds__(THREADS) anywidth(
    u16* __restrict__ out, const u16* __restrict__ in, const u16* __restrict__ filter,
#if !DGRAD
    const u16* __restrict__ bias, const u16* __restrict__ residual,
#endif
    int n, int h, int w, int p, int q, int groups, int pad_h, int pad_w, int in_step_h, int in_step_w, int group_blocks,
    int p_tiles, int q_tiles, int n_tiles, int tiles, int tiles_a_block) {
    extern __shared__ __align__(16) u8 shared[];
    u8* const out_shared = shared + STAGES * STAGE_BYTES + (PASSES > 1 ? 0 : FILTER_BYTES);
    const u32 stages = shared_address(shared);
    const u32 kept_filter = stages + STAGES * STAGE_BYTES;  // of one pass

    // ---- Position of the block and of a tile
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_g = warp / GROUP_WARPS, warp_m = warp / WARPS_K % WARPS_M, warp_k = warp % WARPS_K;
    const int part = blockIdx.x % (K_BLOCKS * group_blocks);
    const int k0 = part % K_BLOCKS * N_TILES * 8;  // within each group
    const int g0 = part / K_BLOCKS * BLOCK_G;
    const int first_tile = blockIdx.x / (K_BLOCKS * group_blocks) * tiles_a_block;
    const int steps = (min(first_tile + tiles_a_block, tiles) - first_tile) * PASSES;
    const int in_channels = groups * GIN, out_channels = groups * GOUT;

    struct Place {
        int n0, p0, q0;  // of the tile, in positions of its lattice
        int parity_h, parity_w;
    };
    const auto place_of = [&](int tile) {
        Place at;
        at.q0 = tile % q_tiles * BLOCK_Q;
        tile /= q_tiles;
        at.p0 = tile % p_tiles * BLOCK_P;
        tile /= p_tiles;
        at.n0 = tile % n_tiles * BLOCK_N;
        tile /= n_tiles;
        at.parity_w = HALVED_W ? tile % 2 : 0;
        at.parity_h = HALVED_W ? tile / 2 : tile;
        return at;
    };

    // ---- Copies
    const auto load_step = [&](int step, int slot) {
        const int c0 = step % PASSES * PIECES * 8;
        const Place at = place_of(first_tile + step / PASSES);
        const int y0 = at.p0 * DOWN_H * in_step_h + lattice_of(HALVED_H, R, STEP_H, pad_h, at.parity_h).origin;
        const int x0 = at.q0 * DOWN_W * in_step_w + lattice_of(HALVED_W, S, STEP_W, pad_w, at.parity_w).origin;
        const u32 to = stages + slot * STAGE_BYTES;
        const auto column = [&](int place, int vector) {
            const int x = x0 + In::column(place) * in_step_w, g = vector / IN_VECTORS, channel = c0 + vector % IN_VECTORS * IN_VECTOR;
            const bool valid = x >= 0 && x < w && g0 + g < groups && channel < GIN;
            return valid ? x * in_channels + (g0 + g) * GIN + channel : -1;
        };
        const auto row = [&](int r) -> i64 {
            const int image = at.n0 + r / In::H, y = y0 + r % In::H * in_step_h;
            return image < n && y >= 0 && y < h ? (static_cast<i64>(image) * h + y) * w * in_channels : -1;
        };
        visit_tile<BLOCK_N * In::H, In::W, BLOCK_G * IN_VECTORS, 2 * IN_VECTOR, PIXEL_BYTES, In::W * PIXEL_BYTES, WARPS>(
            column, row, [&](int at, i64 element, bool inside) {
                copy_channels<IN_VECTOR>(to + at, inside ? in + element : in, inside);
            });
        if (PASSES > 1) load_filter(to + TILE_BYTES, filter, groups, g0, k0, c0);
    };

    if (PASSES == 1) load_filter(kept_filter, filter, groups, g0, k0, 0);
#pragma unroll
    for (int s = 0; s < (STAGES > 1 ? STAGES - 1 : 1); ++s) {
        if (s < steps) load_step(s, s);
        copy_async_commit();  // an empty group keeps the count of pending groups in step
    }

    // ---- Fragments
    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16". A step takes two parts:
    // the upper half of the lanes fetches the second one of the pixels, and each second eight that of the filter.
    const int fragment_row = lane / 4, fragment_column = lane % 4 * 2;
    const bool second_in = lane / 16, second_filter = lane / 8 % 2;
    u32 in_from[WARP_M];
#pragma unroll
    for (int t = 0; t < WARP_M; ++t) {
        int m = (warp_m * WARP_M + t) * 16 + lane % 16;
        if (m >= PIXELS) m = 0;  // rows past the tile compute garbage that is never stored
        in_from[t] = In::first(m) * PIXEL_BYTES + warp_g * PIECES * 16;
    }
    const int warp_channel = warp_k * WARP_N * 8;  // of the block's, in its group
    const u32 filter_from = warp_g * ROWS * ROW_BYTES +
                            (DGRAD ? lane % 8 * ROW_BYTES + (warp_channel + lane / 16 * 8) * 2
                                   : (warp_channel + lane % 8 + lane / 16 * 8) * ROW_BYTES);

    // ---- Results of a tile
    // Calls `visit` with where each of this thread's vectors of a tile of `out` lies in shared memory, and which element
    // it is.
    const auto visit_out = [&](const Place& at, auto visit) {
        const auto column = [&](int position, int vector) {
            const int x = (at.q0 + position) * (HALVED_W ? 2 : 1) + at.parity_w;
            const int g = vector / OUT_VECTORS, channel = k0 + vector % OUT_VECTORS * OUT_VECTOR;
            return x < q && g0 + g < groups && channel < GOUT ? x * out_channels + (g0 + g) * GOUT + channel : -1;
        };
        const auto row = [&](int r) -> i64 {
            const int image = at.n0 + r / BLOCK_P, y = (at.p0 + r % BLOCK_P) * (HALVED_H ? 2 : 1) + at.parity_h;
            return image < n && y < p ? (static_cast<i64>(image) * p + y) * q * out_channels : -1;
        };
        visit_tile<BLOCK_N * BLOCK_P, BLOCK_Q, BLOCK_G * OUT_VECTORS, 2 * OUT_VECTOR, OUT_BYTES, BLOCK_Q * OUT_BYTES, WARPS>(
            column, row, [&](int at, i64 element, bool inside) {
                if (inside) visit(out_shared + at, element);
            });
    };

    // ---- Passes
    float acc[WARP_M][WARP_N][4];
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
        const Place at = place_of(first_tile + step / PASSES);
        const bool is_last = step % PASSES == PASSES - 1;
#if HAS_RESIDUAL
        // It comes where the result will lie, while the last pass is computed.
        if (is_last)
            visit_out(at, [&](u8* to, i64 from) { copy_channels<OUT_VECTOR>(shared_address(to), residual + from, true); });
        copy_async_commit();
#endif
        if (STAGES > 1) {
            if (step + STAGES - 1 < steps) load_step(step + STAGES - 1, (step + STAGES - 1) % STAGES);
            copy_async_commit();
        }
        if (step % PASSES == 0)
#pragma unroll
            for (int t = 0; t < WARP_M; ++t)
#pragma unroll
                for (int nt = 0; nt < WARP_N; ++nt)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[t][nt][e] = 0.0f;

        // ---- Products of a pass
        const u32 stage = stages + step % STAGES * STAGE_BYTES;
        const u32 filter_stage = (PASSES > 1 ? stage + TILE_BYTES : kept_filter) + filter_from;
        const Lattice rows = lattice_of(HALVED_H, R, STEP_H, pad_h, at.parity_h);
        const Lattice columns = lattice_of(HALVED_W, S, STEP_W, pad_w, at.parity_w);
        // Where a chunk of a filter row lies: `u` counts taps, and the chunks of a tap fastest.
        const auto in_piece = [&](int u) -> u32 { return In::place(u / PIECES * STEP_W) * PIXEL_BYTES + u % PIECES * 16; };
        const auto filter_piece = [&](int u) -> u32 {
            return (columns.first + u / PIECES * columns.step) * TAP_BYTES + u % PIECES * PIECE_BYTES;
        };
        const int pieces = columns.taps * PIECES;
#pragma unroll 1
        for (int i = 0; i < rows.taps; ++i) {
            const u32 in_row = stage + i * STEP_H * In::W * PIXEL_BYTES;
            const u32 filter_row = filter_stage + (rows.first + i * rows.step) * S * TAP_BYTES;
#pragma unroll
            for (int u = 0; u < TAPS_W * PIECES; u += 2) {
                if (HALVED_W && u >= pieces) break;
                const bool pair = u + 1 < TAPS_W * PIECES;                    // known to the compiler
                const bool both = pair && (!HALVED_W || u + 1 < pieces);  // and for this lattice
                // There are few distances of two neighbours: registers have these, and the others are constant.
                const u32 in_at = in_row + in_piece(u) + (second_in && both ? in_piece(u + 1) - in_piece(u) : 0);
                const u32 filter_at = filter_row + filter_piece(u) + (second_filter && both ? filter_piece(u + 1) - filter_piece(u) : 0);
                u32 a[WARP_M][4];
#pragma unroll
                for (int t = 0; t < WARP_M; ++t) load_matrix_x4(a[t], in_from[t] + in_at);
#pragma unroll
                for (int nt = 0; nt < WARP_N; nt += 2) {
                    // Channels past the block's are computed where the warps do not divide them, from what is there.
                    const bool inside = WARPS_K * WARP_N == N_TILES || warp_k * WARP_N + nt < N_TILES;
                    if (!inside) break;
                    const bool two = nt + 1 < WARP_N && (WARPS_K * WARP_N == N_TILES || warp_k * WARP_N + nt + 1 < N_TILES);
                    const u32 from = filter_at + nt * 8 * (DGRAD ? 2 : ROW_BYTES);
                    u32 b[4];  // of tiles nt and nt + 1 of output channels
                    if (two) {
                        if (DGRAD) load_transposed_x4(b, from);
                        else load_matrix_x4(b, from);
                    } else {
                        if (DGRAD) load_transposed_x2(b, from);
                        else load_pair(b, from);
                    }
#pragma unroll
                    for (int t = 0; t < WARP_M; ++t)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (e == 0 || (nt + 1 < WARP_N && two)) {
                                float(&sums)[4] = acc[t][e == 0 ? nt : nt + 1 < WARP_N ? nt + 1 : nt];
                                if (both) mma_k16(sums, a[t], b[2 * e], b[2 * e + 1]);
                                else mma_k8(sums, a[t], b[2 * e]);
                            }
                }
            }
        }
        if (!is_last) continue;

        // ---- Results
#if HAS_RESIDUAL
        copy_async_wait<(STAGES > 1 ? 1 : 0)>();  // all but what was asked for later
        __syncthreads();
#endif
#pragma unroll
        for (int nt = 0; nt < WARP_N; ++nt) {
            if (WARPS_K * WARP_N != N_TILES && warp_k * WARP_N + nt >= N_TILES) break;
            const int channel = warp_channel + nt * 8 + fragment_column;
            float bias_of[2] = {};
#if HAS_BIAS
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (k0 + channel + e < GOUT && g0 + warp_g < groups)
                    bias_of[e] = to_float(bias[(g0 + warp_g) * GOUT + k0 + channel + e]);
#endif
#pragma unroll
            for (int t = 0; t < WARP_M; ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int m = (warp_m * WARP_M + t) * 16 + fragment_row + 8 * half;
                    if (m >= PIXELS) continue;
                    u32* const to = reinterpret_cast<u32*>(out_shared + m * OUT_BYTES + warp_g * N_TILES * 16 + 2 * channel);
                    const u32 added = HAS_RESIDUAL ? *to : 0;
                    float x[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        x[e] = acc[t][nt][2 * half + e] + bias_of[e];
                        if (HAS_RESIDUAL) x[e] += to_float(static_cast<u16>(added >> 16 * e));  // before the only rounding
                        x[e] = activate<ACTIVATION>(x[e]);
                    }
                    *to = pack(x[0], x[1]);
                }
        }
        __syncthreads();
        visit_out(at, [&](u8* from, i64 to) {
            *reinterpret_cast<Channels<OUT_VECTOR>*>(out + to) = *reinterpret_cast<const Channels<OUT_VECTOR>*>(from);
        });
    }
}
