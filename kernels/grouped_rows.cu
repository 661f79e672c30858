// Grouped convolution, forward and data gradient, NHWC, on tensor cores (sm_80 and later).
//
//   fprop: out[n, p, q, k] = activation(bias[k] + residual[n, p, q, k]
//            + sum over r, s, c of in[n, p * stride - pad + r * dilation, q ..., c] * filter[k, r, s, c])
//   dgrad: out[n, p * stride - pad + r * dilation, q ..., c] = sum over r, s, k of in[n, p, q, k] * filter[k, r, s, c]
//
// where k and c run over the same group of GW channels. In dgrad `in` is the gradient of the layer's
// output and `out` that of its input: both directions read rows of `in` and write rows of `out`.
// Groups of fewer than 8 channels are computed 8 channels at a time, with a filter that is zero
// between different groups (so that a NaN or an infinity spreads over those 8).
//
// The layer's sizes are run-time arguments. Compile-time: the direction (DGRAD), the filter size
// R x S, the group width GW, STRIDE_H, STRIDE_W, DTYPE, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, and the
// config:
//
//   BLOCK_N, BLOCK_Q   images and columns of a block's tile: one *pixel row* is BLOCK_N * BLOCK_Q
//                      pixels, cut in 16-pixel tiles for the tensor cores (dgrad with stride 2: twice
//                      as many columns of the output, even and odd ones)
//   BLOCK_C            channels of a block
//   WARPS_C, WARPS_M   how the warps divide those channels and those pixel tiles
//   STAGES             input rows in flight in shared memory
//   FILTER_SHARED      the filter stays in shared memory (1) or in registers (0)
//
// A block walks down a band of output rows. Every step brings in one input row, which meets all R
// filter rows while it is in registers: it feeds the R output rows that it overlaps, kept in a
// circular buffer of accumulators. So an input row is read from shared memory once for each shift of columns, and not
// again for each of the R filter rows.
//
//        input row i ----+---- filter row 0 --> output row i        (opened by this step)
//                        +---- filter row 1 --> output row i - 1
//                        +---- filter row 2 --> output row i - 2    (finished by this step)
//
// Input rows outside the image are neither read nor multiplied. The finished row is staged in shared
// memory and written, 16 bytes a thread, coalesced over channels, during the next step: one barrier a
// step orders loads, arithmetic and stores.
//
// Changes that a stride makes (each axis by itself; the drawing's filter has R = 3):
//
//   fprop, stride 2: an input row meets every second filter row.
//        input row 2i     ----+---- filter rows 0, 2 --> output rows i, i - 1
//        input row 2i + 1 ----+---- filter row 1     --> output row i
//   dgrad, stride 1: fprop with the filter rotated by half a turn and transposed in each group.
//   dgrad, stride 2: an input row opens two output rows and finishes two; an input pixel feeds the
//        even output columns through one half of the filter columns and the odd ones through the
//        other. Nothing is multiplied with inserted zeros.
//        input row i      ----+---- filter rows 0, 1, 2 (rotated) --> output rows 2i + 1, 2i, 2i - 1
//
// Dilation changes only the grid: rows (and columns) of a dilated layer fall into interleaved lattices, each an
// undilated layer of its own. A block computes one lattice, in steps of two rows of the tensor.
//
// Parts:
//   block   BLOCK_C channels of BLOCK_N images by BLOCK_Q columns, down a band of rows
//   warp    WARP_CHANNELS channels of WARP_TILES tiles of 16 pixels
//   thread  fragments of mma.m16n8k16, and LOADS and STORES parts of 16 bytes
//
// Bound: bytes up to groups of 32 channels or so: a 3x3 filter does 4.5 GW FLOP for a byte, 144 in groups of 32 channels
// and 288 in groups of 64, and an H100 has 257 FLOP in the time of a byte.
//
// Instructions: mma.sync with 16 pixels by 8 channels is the smallest tensor-core product, so narrow groups waste
// least; wgmma starts at 64 pixels in a layout of its own, and not before sm_90. ldmatrix reads a shifted row at no
// cost, and cp.async brings rows without registers.
//
// Share of the floor:
//   grouped_dgrad on NVIDIA H100 80GB HBM3, 2026-11-23
//      83% of bytes: n=64 c=1024 h=50 w=76 k=1024 r=3 s=3 padding=1 groups=32 direction=dgrad
//      89% of bytes: n=64 c=256 h=63 w=63 k=256 r=3 s=3 stride=2 padding=1 groups=32 direction=dgrad
//      92% of bytes: n=128 c=960 h=44 w=44 k=960 r=3 s=3 stride=2 padding=1 groups=120 direction=dgrad
//   grouped_fprop on NVIDIA H100 80GB HBM3, 2026-11-23
//      74% of bytes: n=96 c=72 h=130 w=130 k=72 r=5 s=5 stride=2 padding=2 groups=72
//      87% of bytes: n=50 c=96 h=120 w=120 k=96 r=3 s=3 stride=2 padding=1 groups=6
//      92% of bytes: n=64 c=256 h=100 w=136 k=256 r=3 s=3 padding=1 groups=32 bias=true activation=relu
#include "common.cuh"

constexpr int DOWN_H = DGRAD ? 1 : STRIDE_H, UP_H = DGRAD ? STRIDE_H : 1;
constexpr int DOWN_W = DGRAD ? 1 : STRIDE_W, UP_W = DGRAD ? STRIDE_W : 1;

constexpr int THREADS = 32 * WARPS_C * WARPS_M;
constexpr int CHUNKS = BLOCK_C / 8;              // 16-byte chunks of a pixel
constexpr int PIXEL_BYTES = 16 * (CHUNKS | 1);   // an odd number of chunks: ldmatrix meets no bank twice
// A shift is a distance, in input columns, between an output pixel and one that it is made from.
// With UP_W = 2 each serves two filter columns: one for the even output columns, one for the odd ones.
constexpr int SHIFTS = (S + UP_W - 1) / UP_W;
constexpr int ROW_X = DOWN_W * (BLOCK_Q - 1) + SHIFTS;  // input columns of a block's pixel row, an image
constexpr int EVEN_X = (ROW_X + 1) / 2;
constexpr int STAGE_BYTES = BLOCK_N * ROW_X * PIXEL_BYTES;
constexpr int M = BLOCK_N * BLOCK_Q;
constexpr int M_TILES = (M + 15) / 16;
constexpr int OUT_PIXELS = (UP_W - 1) * M_TILES * 16 + M;  // even columns of all tiles, then odd ones
constexpr int OUT_BYTES = UP_W * M_TILES * 16 * PIXEL_BYTES;
constexpr int OUT_ROWS = UP_H * (DOWN_H == 2 ? 1 : 2);  // fprop, stride 2: no step both stages a row and stores one
constexpr int WARP_TILES = M_TILES / WARPS_M;

constexpr int WIDTH = GW < 8 ? 8 : GW;           // channels of a group on the tensor cores
constexpr int WARP_CHANNELS = BLOCK_C / WARPS_C;  // of the output; several warps may divide a group
constexpr int WARP_GROUPS = (WARP_CHANNELS + WIDTH - 1) / WIDTH;
constexpr int N_TILES = WARP_CHANNELS / WARP_GROUPS / 8;  // tensor-core tiles of 8 output channels
constexpr int K_STEPS = (WIDTH + 15) / 16;       // steps of 16 input channels
// At width 8 two neighbouring shifts share a 16-deep step.
constexpr int TAPS = WIDTH == 8 ? (SHIFTS + 1) / 2 : SHIFTS;
// A filter that stays in registers comes through shared memory where that is the shorter way: where it is wide,
// and in dgrad, whose fragments are columns of the filter and would be loaded element by element.
constexpr bool FILTER_STAGED = FILTER_SHARED || GW >= (DGRAD ? 8 : 32);
constexpr int FILTER_CHUNKS = R * S * GW / 8;
constexpr int FILTER_BYTES = 16 * (FILTER_CHUNKS | 1);  // of one channel, in shared memory
// Input rows, finished rows, the residuals that come with input rows, the filter: in this order.
enum {
    SMEM_BYTES = STAGES * (STAGE_BYTES + (HAS_RESIDUAL ? OUT_BYTES : 0)) + OUT_ROWS * OUT_BYTES +
                 (FILTER_STAGED ? BLOCK_C * FILTER_BYTES : 0)
};
constexpr int PASS_BYTES = THREADS / CHUNKS * PIXEL_BYTES;  // between the chunks that a thread copies
constexpr int LOADS = (BLOCK_N * ROW_X * CHUNKS + THREADS - 1) / THREADS;
constexpr int STORES = (OUT_PIXELS * CHUNKS + THREADS - 1) / THREADS;

// The circular buffer of output rows, and after how many steps its indices repeat.
constexpr int LIVE = (R - 1) / DOWN_H + 1;
constexpr int PERIOD = UP_H == 2 && LIVE % 2 == 0 ? LIVE / 2 : DOWN_H * LIVE;

static_assert(M_TILES % WARPS_M == 0 && BLOCK_C % WIDTH == 0, "warps must divide the tile");
static_assert(WARP_CHANNELS % WIDTH == 0 || WIDTH % WARP_CHANNELS == 0, "warps hold whole groups or divide one");
static_assert(WIDTH == 8 || N_TILES % 2 == 0, "filter fragments are fetched for two tiles at a time");
static_assert(LOADS <= 32 && STORES <= 32, "validity bits are kept in one word");

// Sizes that launches count on, as confpred/families/grouped/grouped_rows.py works it out.
static_assert(THREADS == HOST_THREADS && SMEM_BYTES == HOST_SMEM_BYTES, "the host launches other blocks");

using Accumulators = float[UP_W][WARP_GROUPS][WARP_TILES][N_TILES][4];

// Step `step` and filter row r make output row output_row(step, r), if they meet at all; it lives in
// live_row(step, r) of the circular buffer.
// (R * PERIOD rows more leave no remainder, and keep the row from being negative.)
__device__ __forceinline__ constexpr bool meets(int step, int r) { return (step + r) % DOWN_H == 0; }
__device__ __forceinline__ constexpr int output_row(int step, int r) { return (UP_H * step + UP_H - 1 - r) / DOWN_H; }
__device__ __forceinline__ constexpr int live_row(int step, int r) { return output_row(step + R * PERIOD, r) % LIVE; }
// The filter column by which `shift` feeds the output columns of `parity`; S or more means that there is none.
__device__ __forceinline__ constexpr int filter_column(int shift, int parity) { return UP_W * shift + UP_W - 1 - parity; }

// Like load_matrix_x4, but each matrix is transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&d)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}

// The same for one matrix, transposed or not.
template <bool TRANSPOSED>
__device__ __forceinline__ u32 load_matrix_x1(u32 from) {
    u32 d;
    if (TRANSPOSED) asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];\n" : "=r"(d) : "r"(from) : "memory");
    else asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];\n" : "=r"(d) : "r"(from) : "memory");
    return d;
}

// From global memory: the filter's elements between channel k of `out` and channels c (even) and
// c + 1 of `in`, counted from the first of k's WIDTH channels; zero between different groups.
__device__ __forceinline__ u32 filter_pair(const u16* filter, int k, int c, int tap) {
    constexpr int SPAN = GW == 1 ? 2 : GW;  // a pair of channels is two groups of one
    if (c / SPAN != k % WIDTH / SPAN) return 0;
    if (GW == 1) return static_cast<u32>(filter[k * R * S + tap]) << 16 * (k % 2);
    if (!DGRAD) return *reinterpret_cast<const u32*>(filter + (k * R * S + tap) * GW + c % GW);
    const u16* const from = filter + ((k / WIDTH * WIDTH + c) * R * S + tap) * GW + k % GW;
    return from[0] | static_cast<u32>(from[R * S * GW]) << 16;
}

// Along each axis, where `lattice` is the number of the lattice, 0 where there is one only:
//   output index = out_origin + lattice + position * out_step, out_step being also the number of lattices (1 or 2,
//   so that & (out_step - 1) and >> (out_step - 1) are the remainder and the quotient)
//   input index of the first shift at position 0 = in_origin + lattice * in_lattice; then onwards by in_step
extern "C" __global__ void __launch_bounds__(THREADS) grouped_rows(
    u16* __restrict__ out, const u16* __restrict__ in, const u16* __restrict__ filter,
#if !DGRAD
    const u16* __restrict__ bias, const u16* __restrict__ residual,
#endif
    int n, int c, int h, int w, int p, int q,  // h x w: of `in`; p x q: of `out`
    int in_origin_h, int in_lattice_h, int in_step_h, int out_origin_h, int out_step_h,
    int in_origin_w, int in_lattice_w, int in_step_w, int out_origin_w, int out_step_w,
    int band_rows, int bands, int q_tiles, int c_tiles) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 in_shared = shared_address(shared);
    u8* const out_shared = shared + STAGES * STAGE_BYTES;
    u8* const residual_shared = out_shared + OUT_ROWS * OUT_BYTES;
    const u32 filter_shared = shared_address(residual_shared + (HAS_RESIDUAL ? STAGES * OUT_BYTES : 0));

    // ---- Position of the block
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int warp_c = warp % WARPS_C, warp_m = warp / WARPS_C;

    // Neighbouring blocks take neighbouring channels, then columns, then bands: what they share of
    // a DRAM page or of a halo is then still in L2.
    int rest = blockIdx.x;
    const int c0 = rest % c_tiles * BLOCK_C; rest /= c_tiles;
    const int lattice_w = rest & (out_step_w - 1); rest >>= out_step_w - 1;
    const int q0 = rest % q_tiles * BLOCK_Q; rest /= q_tiles;
    const int lattice_h = rest & (out_step_h - 1); rest >>= out_step_h - 1;
    const int p0 = rest % bands * band_rows; rest /= bands;  // a multiple of UP_H
    const int n0 = rest * BLOCK_N;
    const int out_y0 = out_origin_h + lattice_h + p0 * out_step_h;
    const int out_x0 = out_origin_w + lattice_w + UP_W * q0 * out_step_w;
    const int in_y0 = in_origin_h + lattice_h * in_lattice_h + p0 * DOWN_H / UP_H * in_step_h;
    const int in_x0 = in_origin_w + lattice_w * in_lattice_w + DOWN_W * q0 * in_step_w;
    const int rows = min(band_rows, (p - out_y0 + out_step_h - 1) >> (out_step_h - 1));
    if (rows <= 0) return;
    const int steps = UP_H == 2 ? (rows + R - 1) / 2 : DOWN_H * (rows - 1) + R;

    // ---- Copies
    // This thread's copies of each step: LOADS parts of 16 bytes, always of the same channels.
    const int piece = tid % CHUNKS;
    const bool piece_valid = c0 + 8 * piece < c;
    const u16* const in_block = in + static_cast<i64>(n0) * h * w * c + c0 + 8 * piece;
    int load_offset[LOADS];
    u32 load_valid = 0;
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
        const int pixel = tid / CHUNKS + l * (THREADS / CHUNKS);
        const int image = pixel / ROW_X, position = pixel % ROW_X;
        // With stride 2 the even columns lie before the odd ones, so that the pixels of a fragment
        // are neighbours and meet no bank twice.
        const int column = DOWN_W == 1 ? position : position < EVEN_X ? 2 * position : 2 * (position - EVEN_X) + 1;
        const int x = in_x0 + column * in_step_w;
        const bool valid = piece_valid && image < BLOCK_N && n0 + image < n && x >= 0 && x < w;
        load_offset[l] = valid ? (image * h * w + x) * c : 0;
        load_valid |= static_cast<u32>(valid) << l;
    }
    const u32 load_to = in_shared + tid / CHUNKS * PIXEL_BYTES + piece * 16;

    // This thread's stores of a finished row.
    const i64 out_first = (static_cast<i64>(n0) * p + out_y0) * q * c + c0 + 8 * piece;
    int store_offset[STORES];
    u32 store_valid = 0;
#pragma unroll
    for (int l = 0; l < STORES; ++l) {
        const int pixel = tid / CHUNKS + l * (THREADS / CHUNKS);
        const int parity = UP_W == 1 ? 0 : pixel / (M_TILES * 16), m = UP_W == 1 ? pixel : pixel % (M_TILES * 16);
        const int image = m / BLOCK_Q, column = out_x0 + (UP_W * (m % BLOCK_Q) + parity) * out_step_w;
        const bool valid = piece_valid && parity < UP_W && m < M && n0 + image < n && column >= 0 && column < q;
        store_offset[l] = valid ? (image * p * q + column) * c : 0;
        store_valid |= static_cast<u32>(valid) << l;
    }
    const i64 out_row_elements = static_cast<i64>(out_step_h) * q * c;
    const int out_from = tid / CHUNKS * PIXEL_BYTES + piece * 16;
#if HAS_RESIDUAL
    const u32 residual_to = shared_address(residual_shared) + out_from;
#endif

    const auto input_row = [&](int step) { return in_y0 + step * in_step_h; };
    const auto inside = [&](int y) { return y >= 0 && y < h; };
    auto load_row = [&](int step, int slot) {
        if (step < steps) {
            const int y = input_row(step);
            if (inside(y)) {
                const u16* const row = in_block + static_cast<i64>(y) * w * c;
#pragma unroll
                for (int l = 0; l < LOADS; ++l)
                    if ((l + 1) * THREADS <= BLOCK_N * ROW_X * CHUNKS || tid + l * THREADS < BLOCK_N * ROW_X * CHUNKS) {
                        const bool valid = load_valid >> l & 1;
                        copy_async_16(load_to + slot * STAGE_BYTES + l * PASS_BYTES,
                                      valid ? row + load_offset[l] : in, valid);
                    }
            }
#if HAS_RESIDUAL
            // The residual of the row that this step will finish comes along.
            if (step >= R - 1 && meets(step, R - 1)) {
                const u16* const from = residual + out_first + output_row(step, R - 1) * out_row_elements;
#pragma unroll
                for (int l = 0; l < STORES; ++l)
                    if (store_valid >> l & 1)
                        copy_async_16(residual_to + slot * OUT_BYTES + l * PASS_BYTES, from + store_offset[l], true);
            }
#endif
        }
        copy_async_commit();  // an empty group keeps the count of pending groups in step
    };

    // ---- Filter and first rows
    if (FILTER_STAGED)
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
    const int warp_channel = warp_c * WARP_CHANNELS;           // within the block
    const int warp_group = warp_channel / WIDTH * WIDTH;       // the first channel of its first group

    u32 filter_regs[FILTER_SHARED ? 1 : WARP_GROUPS][FILTER_SHARED ? 1 : R][UP_W][FILTER_SHARED ? 1 : TAPS]
                   [FILTER_SHARED ? 1 : K_STEPS][FILTER_SHARED ? 1 : N_TILES][2];
    if (!FILTER_SHARED) {
        if (FILTER_STAGED) {
            copy_async_wait<STAGES - 2>();  // the filter came with the first row
            __syncthreads();
        }
#pragma unroll
        for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
            for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int parity = 0; parity < UP_W; ++parity)
#pragma unroll
                        for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
                            for (int ks = 0; ks < K_STEPS; ++ks)
#pragma unroll
                                for (int half = 0; half < 2; ++half) {
                                    const int s = filter_column(WIDTH == 8 ? 2 * tap + half : tap, parity);
                                    const int turned = DGRAD ? (R - 1 - r) * S + S - 1 - s : r * S + s;
                                    const int to = (warp_channel - warp_group) + nt * 8;  // channels, in the group
                                    const int from = WIDTH == 8 ? 0 : 16 * ks + 8 * half;
                                    u32& regs = filter_regs[g][r][parity][tap][ks][nt][half];
                                    if (s >= S) {
                                        regs = 0;
                                    } else if (FILTER_STAGED) {
                                        const int row = warp_group + g * WIDTH + (DGRAD ? from : to) + lane % 8;
                                        const int column = turned * GW + (DGRAD ? to : from);
                                        regs = load_matrix_x1<DGRAD>(filter_shared + row * FILTER_BYTES + column * 2);
                                    } else {
                                        const int k = c0 + warp_channel + g * WIDTH + nt * 8 + fragment_row;
                                        regs = k < c ? filter_pair(filter, k, from + fragment_column, turned) : 0;
                                    }
                                }
    }
#if HAS_BIAS
    float bias_regs[WARP_GROUPS][N_TILES][2];
#pragma unroll
    for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
        for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int k = c0 + warp_channel + g * WIDTH + nt * 8 + fragment_column + e;
                bias_regs[g][nt][e] = k < c ? to_float(bias[k]) : 0.0f;
            }
#endif

    // ---- Fragments
    // Where this lane's row of each 16-pixel input fragment starts (for shift 0 of the warp's first
    // group). The upper half of the lanes fetches the upper half of the 16-deep step: at width 8 the
    // next shift, which with stride 2 lies among the odd columns.
    constexpr int NEXT_SHIFT = DOWN_W == 2 ? EVEN_X : 1;
    u32 fragment_from[WARP_TILES];
#pragma unroll
    for (int t = 0; t < WARP_TILES; ++t) {
        int m = (warp_m * WARP_TILES + t) * 16 + lane % 16;
        if (m >= M) m = 0;  // rows past the tile repeat pixel 0, and are never stored
        fragment_from[t] = in_shared + (m / BLOCK_Q * ROW_X + m % BLOCK_Q) * PIXEL_BYTES + warp_group * 2 +
                           lane / 16 * (WIDTH == 8 ? NEXT_SHIFT * PIXEL_BYTES : 16);
    }
    // The filter in shared memory lies as in global memory, channel by channel of the layer's output:
    // in dgrad those are the channels of `in`, and ldmatrix transposes.
    const u32 filter_from =
        DGRAD ? filter_shared + (warp_group + lane % 16) * FILTER_BYTES + (warp_channel - warp_group) * 2 + lane / 16 * 16
              : filter_shared + (warp_channel + lane % 8 + lane / 16 * 8) * FILTER_BYTES + lane / 8 % 2 * 16;

    // ---- Finished rows
    auto store_row = [&](int row, int buffer) {
        u16* const to = out + out_first + row * out_row_elements;
        const u8* const from = out_shared + buffer * OUT_BYTES + out_from;
#pragma unroll
        for (int l = 0; l < STORES; ++l)
            if (store_valid >> l & 1)
                *reinterpret_cast<uint4*>(to + store_offset[l]) =
                    *reinterpret_cast<const uint4*>(from + l * PASS_BYTES);
    };
    auto store_rows = [&](int step) {  // what `step` has finished
#pragma unroll
        for (int r = R - UP_H; r < R; ++r) {
            const int row = output_row(step, r), buffer = (step * UP_H + r - (R - UP_H)) % OUT_ROWS;
            // Two rows a step may begin before the image and end behind the band.
            const bool valid = UP_H == 1 ? step >= R - 1 : UP_H * step + 1 >= r && row < rows && out_y0 + row >= 0;
            if (valid) store_row(row, buffer);
        }
    };
    auto stage_row = [&](const Accumulators& acc, int buffer, int slot) {
#pragma unroll
        for (int parity = 0; parity < UP_W; ++parity)
#pragma unroll
            for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
                for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
                    for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int m = (parity * M_TILES + warp_m * WARP_TILES + t) * 16 + fragment_row + 8 * half;
                            const int at = m * PIXEL_BYTES + 2 * (warp_channel + g * WIDTH + nt * 8 + fragment_column);
                            const u8* const added_from = residual_shared + slot * OUT_BYTES + at;
                            const u32 added = HAS_RESIDUAL ? *reinterpret_cast<const u32*>(added_from) : 0;
                            float x[2];
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                x[e] = acc[parity][g][t][nt][2 * half + e];
#if HAS_BIAS
                                x[e] += bias_regs[g][nt][e];
#endif
                                // Before the only rounding.
                                if (HAS_RESIDUAL) x[e] += to_float(static_cast<u16>(added >> 16 * e));
                                x[e] = activate<ACTIVATION>(x[e]);
                            }
                            *reinterpret_cast<u32*>(out_shared + buffer * OUT_BYTES + at) = pack(x[0], x[1]);
                        }
    };

    // ---- Steps
    Accumulators acc[LIVE];
    int slot = 0;
    for (int first = 0; first < steps; first += PERIOD) {
#pragma unroll
        for (int j = 0; j < PERIOD; ++j) {  // unrolled, so that the circular buffer's indices are constants
            const int step = first + j;
            if (step >= steps) break;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            load_row(step + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
            if (step > 0 && meets(j + PERIOD - 1, R - 1)) store_rows(step - 1);

#pragma unroll
            for (int r = 0; r < UP_H; ++r)
                if (meets(j, r))
#pragma unroll
                    for (int parity = 0; parity < UP_W; ++parity)
#pragma unroll
                        for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
                            for (int t = 0; t < WARP_TILES; ++t)
#pragma unroll
                                for (int nt = 0; nt < N_TILES; ++nt)
#pragma unroll
                                    for (int e = 0; e < 4; ++e) acc[live_row(j, r)][parity][g][t][nt][e] = 0.0f;

            // ---- Products of the input row
            if (inside(input_row(step))) {
#pragma unroll
                for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
                    for (int g = 0; g < WARP_GROUPS; ++g)
#pragma unroll
                        for (int ks = 0; ks < K_STEPS; ++ks) {
                            const int shift = WIDTH == 8 ? 2 * tap : tap;
                            const int column = DOWN_W == 2 ? shift % 2 * EVEN_X + shift / 2 : shift;
                            u32 a[WARP_TILES][4];
#pragma unroll
                            for (int t = 0; t < WARP_TILES; ++t) {
                                const u32 from = fragment_from[t] + slot * STAGE_BYTES + column * PIXEL_BYTES +
                                                 g * WIDTH * 2 + ks * 32;
                                if (WIDTH > 8 || shift + 1 < SHIFTS) load_matrix_x4(a[t], from);
                                else load_matrix_x2(a[t], from);
                            }
#pragma unroll
                            for (int r = 0; r < R; ++r)
#pragma unroll
                                for (int parity = 0; parity < UP_W; ++parity) {
                                    const int s = filter_column(shift, parity);
                                    // At width 8, does this parity have both shifts?
                                    const bool pair = WIDTH == 8 && shift + 1 < SHIFTS && filter_column(shift + 1, parity) < S;
                                    if (!meets(j, r) || s >= S) continue;
#pragma unroll
                                    for (int nt = 0; nt < N_TILES; nt += (WIDTH == 8 ? 1 : 2)) {
                                        u32 b[4];  // of output-channel tiles nt and nt + 1
                                        if (!FILTER_SHARED) {
#pragma unroll
                                            for (int e = 0; e < (WIDTH == 8 ? 2 : 4); ++e)
                                                b[e] = filter_regs[g][r][parity][tap][ks][nt + e / 2][e % 2];
                                        } else if (DGRAD) {
                                            const int turned = (R - 1 - r) * S + S - 1 - s;
                                            load_matrix_x4_transposed(b, filter_from + (g * GW + ks * 16) * FILTER_BYTES +
                                                                             (turned * GW + nt * 8) * 2);
                                        } else {
                                            load_matrix_x4(b, filter_from + (g * GW + nt * 8) * FILTER_BYTES +
                                                                  ((r * S + s) * GW + ks * 16) * 2);
                                        }
#pragma unroll
                                        for (int t = 0; t < WARP_TILES; ++t) {
                                            auto& row = acc[live_row(j, r)][parity][g][t];
                                            if (WIDTH == 8 && !pair) mma_k8(row[nt], a[t], b[0]);
                                            else mma_k16(row[nt], a[t], b[0], b[1]);
                                            if (WIDTH > 8) mma_k16(row[nt + (WIDTH == 8 ? 0 : 1)], a[t], b[2], b[3]);
                                        }
                                    }
                                }
                        }
            }

            if (meets(j, R - 1))
#pragma unroll
                for (int r = R - UP_H; r < R; ++r)
                    if (UP_H * step + UP_H - 1 >= r)
                        stage_row(acc[live_row(j, r)], (step * UP_H + r - (R - UP_H)) % OUT_ROWS, slot);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
    }
    __syncthreads();
    store_rows(steps - 1);
}
