// Grouped convolution, forward, NHWC, on tensor cores (sm_80 and later).
//
//   out[n, p, q, k] = activation(bias[k] + sum over r, s, c of in[n, p - pad_h + r, q - pad_w + s, c] * filter[k, r, s, c])
//
// where k and c run over the same group of GW channels; unit stride and dilation.
//
// The layer's sizes are run-time arguments. Compile-time: the filter window R x S, the group width
// GW, DTYPE, ACTIVATION, HAS_BIAS, and the config:
//
//   BLOCK_N, BLOCK_Q   images and output columns of a block's tile: one *pixel row* is
//                      BLOCK_N * BLOCK_Q output pixels, cut in 16-pixel tiles for the tensor cores
//   BLOCK_C            channels of a block
//   WARPS_C, WARPS_M   how the warps divide those channels' groups and those pixel tiles
//   STAGES             input rows in flight in shared memory
//   FILTER_SHARED      the filter stays in shared memory (1) or in registers (0)
//
// A block walks down a band of output rows. Every step brings in one input row, which meets all R
// filter rows while it is in registers: it feeds the R output rows that it overlaps, kept in a
// circular buffer of accumulators. So an input row is read from shared memory once, not R times.
//
//        input row i ----+---- filter row 0 --> output row i        (opened by this step)
//                        +---- filter row 1 --> output row i - 1
//                        +---- filter row 2 --> output row i - 2    (finished by this step)
//
// The finished row is staged in shared memory and written, 16 bytes a thread, coalesced over
// channels, during the next step: one barrier a step orders loads, arithmetic and stores.
#include "common.cuh"

constexpr int THREADS = 32 * WARPS_C * WARPS_M;
constexpr int CHUNKS = BLOCK_C / 8;              // 16-byte pieces of a pixel
constexpr int PIXEL_BYTES = 16 * (CHUNKS | 1);   // an odd number of pieces: ldmatrix meets no bank twice
constexpr int ROW_X = BLOCK_Q + S - 1;           // input columns that BLOCK_Q outputs need
constexpr int STAGE_BYTES = BLOCK_N * ROW_X * PIXEL_BYTES;
constexpr int M = BLOCK_N * BLOCK_Q;
constexpr int M_TILES = (M + 15) / 16;
constexpr int OUT_BYTES = M_TILES * 16 * PIXEL_BYTES;
constexpr int WARP_TILES = M_TILES / WARPS_M;
constexpr int WARP_GROUPS = BLOCK_C / GW / WARPS_C;
constexpr int N_TILES = GW / 8;                  // tensor-core tiles of 8 output channels
constexpr int K_STEPS = (GW + 15) / 16;          // steps of 16 input channels
// A tap is one filter column; at width 8 two neighbouring taps share a 16-deep step.
constexpr int TAPS = GW == 8 ? (S + 1) / 2 : S;
constexpr int FILTER_CHUNKS = R * S * GW / 8;
constexpr int FILTER_BYTES = 16 * (FILTER_CHUNKS | 1);  // of one output channel, in shared memory
constexpr int LOADS = (BLOCK_N * ROW_X * CHUNKS + THREADS - 1) / THREADS;
constexpr int STORES = (M * CHUNKS + THREADS - 1) / THREADS;

static_assert(M_TILES % WARPS_M == 0 && (BLOCK_C / GW) % WARPS_C == 0, "warps must divide the tile");
static_assert(LOADS <= 32 && STORES <= 32, "validity bits are kept in one word");

using Accumulators = float[WARP_GROUPS][WARP_TILES][N_TILES][4];

extern "C" __global__ void __launch_bounds__(THREADS) grouped_fprop(
    u16* __restrict__ out, const u16* __restrict__ in, const u16* __restrict__ filter,
    const u16* __restrict__ bias, int n, int c, int h, int w, int p, int q, int pad_h, int pad_w,
    int band_rows, int bands, int q_tiles, int c_tiles) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 in_shared = shared_address(shared);
    u8* const out_shared = shared + STAGES * STAGE_BYTES;
    const u32 filter_shared = in_shared + STAGES * STAGE_BYTES + 2 * OUT_BYTES;

    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int warp_c = warp % WARPS_C, warp_m = warp / WARPS_C;

    // Neighbouring blocks take neighbouring channels, then columns, then bands: what they share of
    // a DRAM page or of a halo is then still in L2.
    int rest = blockIdx.x;
    const int c0 = rest % c_tiles * BLOCK_C; rest /= c_tiles;
    const int q0 = rest % q_tiles * BLOCK_Q; rest /= q_tiles;
    const int p0 = rest % bands * band_rows; rest /= bands;
    const int n0 = rest * BLOCK_N;
    const int rows = min(band_rows, p - p0);
    if (rows <= 0) return;
    const int steps = rows + R - 1;

    // What this thread copies each step: LOADS pieces of 16 bytes, always of the same channels.
    const int piece = tid % CHUNKS;
    const bool piece_valid = c0 + 8 * piece < c;
    const u16* const in_block = in + static_cast<i64>(n0) * h * w * c + c0 + 8 * piece;
    int load_offset[LOADS];
    u32 load_valid = 0;
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
        const int pixel = tid / CHUNKS + l * (THREADS / CHUNKS);
        const int image = pixel / ROW_X, x = q0 - pad_w + pixel % ROW_X;
        const bool valid = piece_valid && image < BLOCK_N && n0 + image < n && x >= 0 && x < w;
        load_offset[l] = valid ? (image * h * w + x) * c : 0;
        load_valid |= static_cast<u32>(valid) << l;
    }
    const u32 load_to = in_shared + tid / CHUNKS * PIXEL_BYTES + piece * 16;
    auto load_row = [&](int step, int slot) {
        if (step < steps) {
            const int y = p0 - pad_h + step;
            const bool inside = y >= 0 && y < h;
            const u16* const row = in_block + static_cast<i64>(inside ? y : 0) * w * c;
#pragma unroll
            for (int l = 0; l < LOADS; ++l)
                if ((l + 1) * THREADS <= BLOCK_N * ROW_X * CHUNKS || tid + l * THREADS < BLOCK_N * ROW_X * CHUNKS) {
                    const bool valid = inside && (load_valid >> l & 1);
                    copy_async_16(load_to + slot * STAGE_BYTES + l * (THREADS / CHUNKS) * PIXEL_BYTES,
                                  valid ? row + load_offset[l] : in, valid);
                }
        }
        copy_async_commit();  // an empty group keeps the count of pending groups in step
    };

    if (FILTER_SHARED)
        for (int e = tid; e < BLOCK_C * FILTER_CHUNKS; e += THREADS) {
            const int channel = e / FILTER_CHUNKS, chunk = e % FILTER_CHUNKS;
            const bool valid = c0 + channel < c;
            const i64 offset = valid ? (static_cast<i64>(c0 + channel) * FILTER_CHUNKS + chunk) * 8 : 0;
            copy_async_16(filter_shared + channel * FILTER_BYTES + chunk * 16, filter + offset, valid);
        }
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) load_row(s, s);

    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16".
    const int fragment_row = lane / 4, fragment_column = lane % 4 * 2;
    const int warp_channel = warp_c * WARP_GROUPS * GW;  // within the block

    u32 filter_regs[FILTER_SHARED ? 1 : WARP_GROUPS][FILTER_SHARED ? 1 : R][FILTER_SHARED ? 1 : TAPS]
                   [FILTER_SHARED ? 1 : K_STEPS][FILTER_SHARED ? 1 : N_TILES][2];
    if (!FILTER_SHARED) {
#pragma unroll
        for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
            for (int nt = 0; nt < N_TILES; ++nt) {
                const int k = c0 + warp_channel + g * GW + nt * 8 + fragment_row;
                const u16* const row = filter + static_cast<i64>(k) * (R * S * GW) + fragment_column;
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
                        for (int ks = 0; ks < K_STEPS; ++ks)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int s = GW == 8 ? 2 * tap + half : tap;
                                const int channel = GW == 8 ? 0 : 16 * ks + 8 * half;
                                filter_regs[g][r][tap][ks][nt][half] =
                                    k < c && s < S ? *reinterpret_cast<const u32*>(row + (r * S + s) * GW + channel) : 0;
                            }
            }
    }
    float bias_regs[WARP_GROUPS][N_TILES][2];
    if (HAS_BIAS)
#pragma unroll
        for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
            for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int k = c0 + warp_channel + g * GW + nt * 8 + fragment_column + e;
                    bias_regs[g][nt][e] = k < c ? to_float(bias[k]) : 0.0f;
                }

    // Where this lane's row of each 16-pixel input fragment starts (for tap 0 of the warp's first group).
    u32 fragment_from[WARP_TILES];
#pragma unroll
    for (int t = 0; t < WARP_TILES; ++t) {
        int m = (warp_m * WARP_TILES + t) * 16 + lane % 16;
        if (m >= M) m = 0;  // rows past the tile compute garbage that is never stored
        fragment_from[t] = in_shared + (m / BLOCK_Q * ROW_X + m % BLOCK_Q) * PIXEL_BYTES + warp_channel * 2 +
                           (GW == 8 ? 0 : lane / 16 * 16);
    }
    const u32 filter_from = filter_shared + (warp_channel + lane % 8 + lane / 16 * 8) * FILTER_BYTES + lane / 8 % 2 * 16;

    // What this thread writes of a finished row.
    u16* const out_block = out + (static_cast<i64>(n0) * p + p0) * q * c + c0 + 8 * piece;
    int store_offset[STORES];
    u32 store_valid = 0;
#pragma unroll
    for (int l = 0; l < STORES; ++l) {
        const int m = tid / CHUNKS + l * (THREADS / CHUNKS);
        const int image = m / BLOCK_Q, column = q0 + m % BLOCK_Q;
        const bool valid = piece_valid && m < M && n0 + image < n && column < q;
        store_offset[l] = valid ? (image * p * q + column) * c : 0;
        store_valid |= static_cast<u32>(valid) << l;
    }
    auto store_row = [&](int row, int buffer) {
        u16* const to = out_block + static_cast<i64>(row) * q * c;
        const u8* const from = out_shared + buffer * OUT_BYTES + tid / CHUNKS * PIXEL_BYTES + piece * 16;
#pragma unroll
        for (int l = 0; l < STORES; ++l)
            if (store_valid >> l & 1)
                *reinterpret_cast<uint4*>(to + store_offset[l]) =
                    *reinterpret_cast<const uint4*>(from + l * (THREADS / CHUNKS) * PIXEL_BYTES);
    };
    auto stage_row = [&](const Accumulators& acc, int buffer) {
#pragma unroll
        for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
            for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
                for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int m = (warp_m * WARP_TILES + t) * 16 + fragment_row + 8 * half;
                        float x[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            x[e] = acc[g][t][nt][2 * half + e];
                            if (HAS_BIAS) x[e] += bias_regs[g][nt][e];
                            x[e] = activate<ACTIVATION>(x[e]);
                        }
                        *reinterpret_cast<u32*>(out_shared + buffer * OUT_BYTES + m * PIXEL_BYTES +
                                                2 * (warp_channel + g * GW + nt * 8 + fragment_column)) = pack(x[0], x[1]);
                    }
    };

    float acc[R][WARP_GROUPS][WARP_TILES][N_TILES][4];
    int slot = 0;
    for (int first = 0; first < steps; first += R) {
#pragma unroll
        for (int j = 0; j < R; ++j) {  // unrolled, so that the circular buffer's indices are constants
            const int step = first + j;
            if (step >= steps) break;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            load_row(step + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
            if (step >= R) store_row(step - R, (step - 1) & 1);

#pragma unroll
            for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
                for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
                    for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                        for (int e = 0; e < 4; ++e) acc[j][g][t][nt][e] = 0.0f;

#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
                for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
                    for (int ks = 0; ks < K_STEPS; ++ks) {
                        const bool pair = GW == 8 && 2 * tap + 1 < S;  // two taps in one 16-deep step
                        u32 a[WARP_TILES][4];
#pragma unroll
                        for (int t = 0; t < WARP_TILES; ++t) {
                            const u32 from = fragment_from[t] + slot * STAGE_BYTES + g * GW * 2 + ks * 32;
                            if (GW > 8) load_matrix_x4(a[t], from + tap * PIXEL_BYTES);
                            else if (pair) load_matrix_x4(a[t], from + 2 * tap * PIXEL_BYTES + lane / 16 * PIXEL_BYTES);
                            else load_matrix_x2(a[t], from + 2 * tap * PIXEL_BYTES);
                        }
#pragma unroll
                        for (int r = 0; r < R; ++r)
#pragma unroll
                            for (int nt = 0; nt < N_TILES; nt += (GW == 8 ? 1 : 2)) {
                                u32 b[4];  // of output-channel tiles nt and nt + 1
                                if (FILTER_SHARED) {
                                    load_matrix_x4(b, filter_from + (g * GW + nt * 8) * FILTER_BYTES + ((r * S + tap) * GW + ks * 16) * 2);
                                } else {
#pragma unroll
                                    for (int e = 0; e < (GW == 8 ? 2 : 4); ++e) b[e] = filter_regs[g][r][tap][ks][nt + e / 2][e % 2];
                                }
#pragma unroll
                                for (int t = 0; t < WARP_TILES; ++t) {
                                    auto& row = acc[(j - r + R) % R][g][t];
                                    if (GW == 8 && !pair) mma_k8(row[nt], a[t], b[0]);
                                    else mma_k16(row[nt], a[t], b[0], b[1]);
                                    if (GW > 8) mma_k16(row[nt + (GW == 8 ? 0 : 1)], a[t], b[2], b[3]);
                                }
                            }
                    }

            if (step >= R - 1) stage_row(acc[(j + 1) % R], step & 1);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
    }
    __syncthreads();
    store_row(rows - 1, (steps - 1) & 1);
}
