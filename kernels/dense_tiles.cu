// Dense convolution of few channels, forward and data gradient, NHWC, on tensor cores (sm_80 and later).
//
//   fprop: out[n, p, q, k] = activation(bias[k] + residual[n, p, q, k]
//            + sum over r, s, c of in[n, p * stride - pad + r, q * stride - pad + s, c] * filter[k, r, s, c])
//   dgrad: out[n, y, x, c] = sum over r, s, k of in[n, p, q, k] * filter[k, r, s, c]
//            for the p and q with y = p * stride - pad + r and x = q * stride - pad + s
//
// In dgrad `in` is the gradient of the layer's output and `out` that of its input. The formulas have the layer's names.
// The code has those of the kernel: in both directions `in` has n x h x w pixels of CIN channels, and `out` p x q of
// `k`.
//
// The layer's other sizes are run-time arguments. Compile-time: the direction (DGRAD), CIN, the filter R x S, the
// strides STRIDE_H and STRIDE_W, DTYPE, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, and the config:
//
//   BLOCK_N, BLOCK_P, BLOCK_Q   images, rows and columns of a tile of `out`
//   BLOCK_K                     channels of `out` that a block computes
//   WARPS_M, WARPS_K            how the warps divide a tile's pixels and those channels
//   BUFFERS                     tiles of `in` in shared memory: 2 where a block computes several of them, else 1
//
// The filter of a block's channels is brought into shared memory once, and stays there while the block goes from tile
// to tile. All of `in` that a tile needs, all channels and the halo around it, is brought there at once too, and
// each tap of the filter reads it at another position: so an input pixel is read from L2 once for a tile, not R * S
// times.
//
//      in, tile + halo      filter row by row        out, tile
//      +-----------+        +---+---+---+            +-------+
//      | +-------+ |   x    |   |   |   |     -->    |       |  -> staged, written 16 bytes a thread
//      | |       | |        +---+---+---+            +-------+
//      +-----------+
//
// The data gradient of a layer of stride 2 falls into lattices: rows (columns) of `out` of one parity meet every second
// filter row (column) only. A tile is of one lattice, and multiplies no inserted zeros.
//
// Parts:
//   block   BLOCK_K channels of `out`, of tile after tile
//   warp    WARP_TILES tiles of 16 pixels by WARP_CHANNELS channels, in registers
//   thread  fragments of mma.m16n8k16, and parts of 16 bytes of the copies
//
// Bound: bytes for 1x1 filters and few channels, the tensor cores for 3x3 filters of 64 channels. A fragment of `in`
// serves the N_TILES products of a warp, so warps of many channels read shared memory less.
//
// Instructions: mma.sync, as each tap reads a tile at another position, a plain address for ldmatrix; wgmma would
// need a tile in its own layout for each tap, and libraries have such kernels for many channels. With two buffers
// cp.async brings the next tile while this one is multiplied.
//
// Share of the floor:
//   dense_dgrad on NVIDIA H100 80GB HBM3, 2026-11-25
//      30% of arithmetic: n=4 c=64 h=368 w=656 k=64 r=3 s=3 padding=1 direction=dgrad
//      32% of arithmetic: n=21 c=64 h=184 w=384 k=64 r=3 s=3 padding=1 direction=dgrad
//      49% of bytes: n=64 c=64 h=184 w=384 k=96 r=1 s=1 stride=2 direction=dgrad
//   dense_fprop on NVIDIA H100 80GB HBM3, 2026-11-25
//      30% of bytes: n=128 c=64 h=120 w=120 k=64 r=3 s=3 padding=1 bias=true residual=true
//      36% of arithmetic: n=16 c=64 h=180 w=320 k=256 r=3 s=3 padding=1 dtype=bfloat16
//      48% of bytes: n=16 c=128 h=96 w=96 k=256 r=1 s=1
#include "common.cuh"

constexpr bool HALVED_H = DGRAD && STRIDE_H == 2, HALVED_W = DGRAD && STRIDE_W == 2;
// From an output to the next, so many inputs of a tile. In fprop along an axis with one tap, no output meets the inputs
// in between: a tile leaves them out, and in_step_h (in_step_w) is the stride. It is 1 in all other cases.
constexpr int DOWN_H = DGRAD || R == 1 ? 1 : STRIDE_H, DOWN_W = DGRAD || S == 1 ? 1 : STRIDE_W;
constexpr int TAPS_H = HALVED_H ? (R + 1) / 2 : R, TAPS_W = HALVED_W ? (S + 1) / 2 : S;  // of a lattice, at most

constexpr int THREADS = 32 * WARPS_M * WARPS_K;
constexpr int CHUNKS = CIN / 8;                         // 16-byte chunks of a pixel of `in`
constexpr int K_STEPS = (CIN + 15) / 16;                // steps of 16 channels
constexpr int PIXEL_BYTES = 16 * (2 * K_STEPS | 1);     // an odd number of chunks: ldmatrix meets no bank twice
constexpr int TILE_H = DOWN_H * (BLOCK_P - 1) + TAPS_H, TILE_W = DOWN_W * (BLOCK_Q - 1) + TAPS_W;
constexpr int TILE_PIXELS = BLOCK_N * TILE_H * TILE_W;
constexpr int TILE_BYTES = TILE_PIXELS * PIXEL_BYTES;

constexpr int M = BLOCK_N * BLOCK_P * BLOCK_Q;          // pixels of a tile of `out`
constexpr int M_TILES = (M + 15) / 16;
constexpr int WARP_TILES = (M_TILES + WARPS_M - 1) / WARPS_M;
constexpr int WARP_CHANNELS = BLOCK_K / WARPS_K;
constexpr int N_TILES = WARP_CHANNELS / 8;
constexpr int OUT_CHUNKS = BLOCK_K / 8;
constexpr int OUT_PIXEL_BYTES = 16 * (OUT_CHUNKS | 1);
constexpr int OUT_BYTES = M_TILES * 16 * OUT_PIXEL_BYTES;

// The filter in shared memory. fprop: a row for each channel of `out`, of all taps with 16 * K_STEPS channels each.
// dgrad: a row for each tap and channel of `in`, of BLOCK_K channels, which ldmatrix transposes.
constexpr int FILTER_ROW_BYTES = DGRAD ? 16 * (OUT_CHUNKS | 1) : 16 * (R * S * K_STEPS * 2 | 1);
constexpr int FILTER_ROWS = DGRAD ? R * S * K_STEPS * 16 : BLOCK_K;
constexpr int FILTER_BYTES = FILTER_ROWS * FILTER_ROW_BYTES;
enum { SMEM_BYTES = BUFFERS * TILE_BYTES + OUT_BYTES + FILTER_BYTES };

static_assert(CIN % 8 == 0 && BLOCK_K % (8 * WARPS_K) == 0, "channels come in pieces of 8");
static_assert(THREADS == HOST_THREADS && SMEM_BYTES == HOST_SMEM_BYTES, "the host launches other blocks");

#include "dense.cuh"

// `n`, `h`, `w` are the sizes of `in`, and `p`, `q`, `k` of `out`. k_blocks blocks share a tile's channels. A tile's
// number, below `tiles`, counts columns fastest (q_tiles), then rows (p_tiles), images (n_tiles) and lattices. A block
// computes tiles_a_block tiles, one after the other.
extern "C" __global__ void __launch_bounds__(THREADS) dense_tiles(
    u16* __restrict__ out, const u16* __restrict__ in, const u16* __restrict__ filter,
#if !DGRAD
    const u16* __restrict__ bias, const u16* __restrict__ residual,
#endif
    int n, int h, int w, int p, int q, int k, int pad_h, int pad_w, int in_step_h, int in_step_w, int k_blocks,
    int p_tiles, int q_tiles, int n_tiles, int tiles, int tiles_a_block) {
    extern __shared__ __align__(16) u8 shared[];
    u8* const out_shared = shared + BUFFERS * TILE_BYTES;
    const u32 in_shared = shared_address(shared), filter_shared = shared_address(out_shared + OUT_BYTES);

    // ---- Position of the block and of a tile
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int warp_m = warp / WARPS_K, warp_k = warp % WARPS_K;
    const int k0 = blockIdx.x % k_blocks * BLOCK_K;
    const int first_tile = blockIdx.x / k_blocks * tiles_a_block;
    const int end_tile = min(first_tile + tiles_a_block, tiles);

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
    auto load_tile = [&](int tile, int buffer) {
        const Place at = place_of(tile);
        const int y0 = at.p0 * DOWN_H * in_step_h + lattice_of(HALVED_H, R, pad_h, at.parity_h).origin;
        const int x0 = at.q0 * DOWN_W * in_step_w + lattice_of(HALVED_W, S, pad_w, at.parity_w).origin;
        for (int e = tid; e < TILE_PIXELS * CHUNKS; e += THREADS) {
            const int chunk = e % CHUNKS, pixel = e / CHUNKS;
            const int image = at.n0 + pixel / (TILE_H * TILE_W);
            const int y = y0 + pixel / TILE_W % TILE_H * in_step_h, x = x0 + pixel % TILE_W * in_step_w;
            const bool valid = image < n && y >= 0 && y < h && x >= 0 && x < w;
            const u16* const from = in + (static_cast<i64>(image) * h * w + y * w + x) * CIN + 8 * chunk;
            copy_async_16(in_shared + buffer * TILE_BYTES + pixel * PIXEL_BYTES + 16 * chunk, valid ? from : in, valid);
        }
    };

    // The filter: the first loop is of fprop, the second one of dgrad.
    for (int e = tid; e < FILTER_ROWS * R * S * CHUNKS && !DGRAD; e += THREADS) {
        const int chunk = e % CHUNKS, tap = e / CHUNKS % (R * S), channel = e / (CHUNKS * R * S);
        const bool valid = k0 + channel < k;
        const i64 offset = (static_cast<i64>(k0 + channel) * R * S + tap) * CIN + 8 * chunk;
        copy_async_16(filter_shared + channel * FILTER_ROW_BYTES + (tap * K_STEPS * 2 + chunk) * 16,
                      valid ? filter + offset : filter, valid);
    }
    for (int e = tid; e < CIN * R * S * OUT_CHUNKS && DGRAD; e += THREADS) {
        const int chunk = e % OUT_CHUNKS, tap = e / OUT_CHUNKS % (R * S), channel = e / (OUT_CHUNKS * R * S);
        const bool valid = k0 + 8 * chunk < k;
        const i64 offset = (static_cast<i64>(channel) * R * S + tap) * k + k0 + 8 * chunk;
        copy_async_16(filter_shared + (tap * K_STEPS * 16 + channel) * FILTER_ROW_BYTES + chunk * 16,
                      valid ? filter + offset : filter, valid);
    }
    // The last step of 16 channels may have 8 only; zeros stand for the others, in `in` and in the filter.
    if (CIN % 16) {
        for (int e = tid; e < BUFFERS * TILE_PIXELS; e += THREADS)
            *reinterpret_cast<uint4*>(shared + e * PIXEL_BYTES + 16 * CHUNKS) = make_uint4(0, 0, 0, 0);
        u8* const rows = out_shared + OUT_BYTES;
        if (DGRAD)
            for (int e = tid; e < R * S * 8 * OUT_CHUNKS; e += THREADS) {
                const int row = e / OUT_CHUNKS / 8 * K_STEPS * 16 + CIN + e / OUT_CHUNKS % 8;
                *reinterpret_cast<uint4*>(rows + row * FILTER_ROW_BYTES + e % OUT_CHUNKS * 16) = make_uint4(0, 0, 0, 0);
            }
        else
            for (int e = tid; e < BLOCK_K * R * S; e += THREADS)
                *reinterpret_cast<uint4*>(rows + e / (R * S) * FILTER_ROW_BYTES +
                                          (e % (R * S) * K_STEPS * 2 + CHUNKS) * 16) = make_uint4(0, 0, 0, 0);
    }
    load_tile(first_tile, 0);
    copy_async_commit();

    // ---- Fragments
    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16".
    const int fragment_row = lane / 4, fragment_column = lane % 4 * 2;
    u32 fragment_from[WARP_TILES];
#pragma unroll
    for (int t = 0; t < WARP_TILES; ++t) {
        int m = (warp_m * WARP_TILES + t) * 16 + lane % 16;
        if (m >= M) m = 0;  // rows past the tile repeat pixel 0, and are never stored
        const int image = m / (BLOCK_P * BLOCK_Q), y = m / BLOCK_Q % BLOCK_P, x = m % BLOCK_Q;
        fragment_from[t] = in_shared + ((image * TILE_H + y * DOWN_H) * TILE_W + x * DOWN_W) * PIXEL_BYTES + lane / 16 * 16;
    }
    const u32 filter_from =
        DGRAD ? filter_shared + lane % 16 * FILTER_ROW_BYTES + (warp_k * WARP_CHANNELS + lane / 16 * 8) * 2
              : filter_shared + (warp_k * WARP_CHANNELS + lane % 8 + lane / 16 * 8) * FILTER_ROW_BYTES + lane / 8 % 2 * 16;
#if HAS_BIAS
    float bias_regs[N_TILES][2];
#pragma unroll
    for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int channel = k0 + warp_k * WARP_CHANNELS + nt * 8 + fragment_column + e;
            bias_regs[nt][e] = channel < k ? to_float(bias[channel]) : 0.0f;
        }
#endif

    // Where pixel m of a tile lies in `out`, counted in pixels; -1 outside of it.
    const auto out_pixel = [&](const Place& at, int m) -> i64 {
        const int image = at.n0 + m / (BLOCK_P * BLOCK_Q);
        const int y = (at.p0 + m / BLOCK_Q % BLOCK_P) * (HALVED_H ? 2 : 1) + at.parity_h;
        const int x = (at.q0 + m % BLOCK_Q) * (HALVED_W ? 2 : 1) + at.parity_w;
        const bool valid = m < M && image < n && y < p && x < q;
        return valid ? static_cast<i64>(image) * p * q + y * q + x : -1;
    };

    // ---- Tiles
    for (int tile = first_tile; tile < end_tile; ++tile) {
        const int buffer = BUFFERS == 2 ? (tile - first_tile) % 2 : 0;
        copy_async_wait<0>();
        __syncthreads();
        if (BUFFERS == 2 && tile + 1 < end_tile) load_tile(tile + 1, buffer ^ 1);
        copy_async_commit();

        const Place at = place_of(tile);
        const Lattice rows = lattice_of(HALVED_H, R, pad_h, at.parity_h);
        const Lattice columns = lattice_of(HALVED_W, S, pad_w, at.parity_w);
        float acc[WARP_TILES][N_TILES][4];
#pragma unroll
        for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
            for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[t][nt][e] = 0.0f;

#pragma unroll
        for (int i = 0; i < TAPS_H; ++i)
#pragma unroll
            for (int j = 0; j < TAPS_W; ++j) {
                if ((HALVED_H && i >= rows.taps) || (HALVED_W && j >= columns.taps)) continue;
                const int tap = (rows.first + i * rows.step) * S + columns.first + j * columns.step;
                const u32 shift = buffer * TILE_BYTES + (i * TILE_W + j) * PIXEL_BYTES;
#pragma unroll
                for (int ks = 0; ks < K_STEPS; ++ks) {
                    u32 a[WARP_TILES][4];
#pragma unroll
                    for (int t = 0; t < WARP_TILES; ++t) load_matrix_x4(a[t], fragment_from[t] + shift + ks * 32);
#pragma unroll
                    for (int nt = 0; nt < N_TILES; nt += 2) {
                        const u32 from = DGRAD ? filter_from + (tap * K_STEPS + ks) * 16 * FILTER_ROW_BYTES + nt * 16
                                               : filter_from + nt * 8 * FILTER_ROW_BYTES + (tap * K_STEPS + ks) * 32;
                        u32 b[4];  // of tiles nt and nt + 1 of output channels
                        if (nt + 1 < N_TILES) load_filter_x4(b, from);
                        else load_filter_x2(b, from);
#pragma unroll
                        for (int t = 0; t < WARP_TILES; ++t) {
                            mma_k16(acc[t][nt], a[t], b[0], b[1]);
                            if (nt + 1 < N_TILES) mma_k16(acc[t][nt + 1], a[t], b[2], b[3]);
                        }
                    }
                }
            }

#pragma unroll
        for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int m = (warp_m * WARP_TILES + t) * 16 + fragment_row + 8 * half;
                if (m >= M_TILES * 16) continue;
#if HAS_RESIDUAL
                const i64 pixel = out_pixel(at, m);
#endif
#pragma unroll
                for (int nt = 0; nt < N_TILES; ++nt) {
                    const int channel = warp_k * WARP_CHANNELS + nt * 8 + fragment_column;
                    float x[2] = {acc[t][nt][2 * half], acc[t][nt][2 * half + 1]};
#if HAS_BIAS
                    x[0] += bias_regs[nt][0];
                    x[1] += bias_regs[nt][1];
#endif
#if HAS_RESIDUAL
                    // Before the only rounding.
                    if (pixel >= 0 && k0 + channel < k) {
                        const u32 added = *reinterpret_cast<const u32*>(residual + pixel * k + k0 + channel);
                        x[0] += to_float(static_cast<u16>(added));
                        x[1] += to_float(static_cast<u16>(added >> 16));
                    }
#endif
                    *reinterpret_cast<u32*>(out_shared + m * OUT_PIXEL_BYTES + 2 * channel) =
                        pack(activate<ACTIVATION>(x[0]), activate<ACTIVATION>(x[1]));
                }
            }
        __syncthreads();
        for (int e = tid; e < M * OUT_CHUNKS; e += THREADS) {
            const int m = e / OUT_CHUNKS, chunk = e % OUT_CHUNKS;
            const i64 pixel = out_pixel(at, m);
            if (pixel >= 0 && k0 + 8 * chunk < k)
                *reinterpret_cast<uint4*>(out + pixel * k + k0 + 8 * chunk) =
                    *reinterpret_cast<const uint4*>(out_shared + m * OUT_PIXEL_BYTES + 16 * chunk);
        }
    }
}
