// Depthwise convolution, gradient of the filter and of the bias, NHWC, in float32 arithmetic.
//
//   filter_grad[c, r, s] = sum over n, p, q of out_grad[n, p, q, c] * in[n, STRIDE * p - pad + DILATION * r, ..., c]
//   bias_grad[c]         = sum over n, p, q of out_grad[n, p, q, c]
//
// The layer's sizes are run-time arguments. Compile-time: the filter R x S, STRIDE, DILATION, DTYPE,
// HAS_BIAS, and the config:
//
//   VEC       channels of a thread: one access to memory
//   TILE_Q    output columns of a thread
//   BLOCK_R   filter rows of a thread; ROW_GROUPS threads share a filter that has more
//   PREFETCH  steps by which both images are loaded ahead of their arithmetic, into registers
//
// A thread owns VEC channels and BLOCK_R x S taps, whose sums stay in its registers, and goes through
// tiles of the images: TILE_Q columns of a band of output rows. It walks down such a tile; each input row
// is loaded and converted once, and meets the DEPTH output rows that it overlaps, a sliding window
// in registers. STRIDE = DILATION = 1, BLOCK_R = 3:
//
//        input row i ----+---- window[0]: output row i      --> sums of filter row 0    (entered by this step)
//                        +---- window[1]: output row i - 1  --> sums of filter row 1
//                        +---- window[2]: output row i - 2  --> sums of filter row 2    (leaves after it)
//
// Threads of a block run along channels first (lanes_c of them), then row groups, then tiles.
// At the end the block adds its threads' sums in shared memory, and the blocks (`splits` of them
// share a channel) add their sums as the argument `reduction` says:
//
//   DIRECT       one block has all: it writes the result
//   TWO_KERNELS  each writes its sums to `partials`; depthwise_wgrad_sum adds them up in a fixed order
//   ATOMIC       each adds its sums atomically to `sums`, and the last block to finish writes the result;
//                a ticket for each tile of channels, behind the sums, tells which that is
//
// All but ATOMIC give the same bits every time. Sums and tickets are zero before the launch and after it.
//
// Parts:
//   block   lanes_c neighbours along channels by ROW_GROUPS by tiles_at_once, of a split of the tiles
//   thread  BLOCK_R filter rows of VEC channels, whose sums are registers, of TILE_Q columns at a time
//   warp    no part of its own
//
// Bound: bytes for filters up to 5x5, as in depthwise.cu. BLOCK_R S VEC sums are in registers, so that large filters
// leave few threads to wait for memory together.
//
// Instructions: float32 multiply-adds and loads of VEC channels straight to registers; depthwise_banded_wgrad.cu has
// the tensor cores' way, where strides and channels allow.
//
// Share of the floor:
//   depthwise_wgrad on NVIDIA H100 80GB HBM3, 2026-11-23
//      53% of bytes: n=128 c=48 h=96 w=96 k=48 r=5 s=5 padding=2 groups=48 direction=wgrad
//      85% of bytes: n=20 c=1024 h=48 w=48 k=1024 r=3 s=3 padding=1 groups=1024 direction=wgrad deterministic=true
//      91% of bytes: n=32 c=4096 h=28 w=28 k=4096 r=3 s=3 stride=2 padding=1 groups=4096 direction=wgrad
#include "depthwise.cuh"

enum { MAX_THREADS = 256 };  // of a block
constexpr int TAPS = R * S;
constexpr int ROW_GROUPS = ceil_div(R, BLOCK_R);
constexpr int DEPTH = DILATION_H * (BLOCK_R - 1) / STRIDE_H + 1;
constexpr int IN_X = STRIDE_W * (TILE_Q - 1) + DILATION_W * (S - 1) + 1;  // input columns of a tile
enum { THREAD_FLOATS = S * VEC };  // of shared memory: a thread's sums of one filter row
// The sliding window moves by renaming registers within an unrolled turn, and by moves from one to the next.
constexpr int PRODUCTS = BLOCK_R * S * TILE_Q * VEC * PREFETCH;
constexpr int UNROLL = PREFETCH * (DEPTH * PRODUCTS <= 1024 ? DEPTH : PRODUCTS <= 512 ? 2 : 1);

static_assert(IN_X <= 32, "validity bits are kept in one word");

// Sizes that launches count on, as confpred/families/depthwise/depthwise_wgrad.py works it out. How many lanes share a
// pixel's channels, and with them the threads and the shared memory of a block, is known at run time only.
static_assert(MAX_THREADS == HOST_MAX_THREADS, "blocks are no larger than the host believes");
static_assert(ROW_GROUPS == HOST_ROW_GROUPS, "the host counts a block's threads by them");
static_assert(IN_X == HOST_IN_X && DEPTH == HOST_DEPTH, "the host counts a thread's work and registers by them");
static_assert(THREAD_FLOATS == HOST_THREAD_FLOATS, "the host gives each thread so much shared memory");

extern "C" __global__ void __launch_bounds__(MAX_THREADS) depthwise_wgrad(
    Element* __restrict__ filter_grad, Element* __restrict__ bias_grad, const Element* __restrict__ out_grad,
    const Element* __restrict__ in, float* sums, float* partials, int n, int c, int h, int w, int p, int q,
    int pad_h, int pad_w, int band_rows, int bands, int q_tiles, int c_tiles, int lanes_c, int tiles_at_once,
    int splits, int reduction) {
    extern __shared__ __align__(16) float shared[];

    const int tid = threadIdx.x, lane_c = tid % lanes_c;
    const int c_tile = blockIdx.x % c_tiles, split = blockIdx.x / c_tiles;
    const int c_first = c_tile * lanes_c * VEC, c0 = c_first + lane_c * VEC;
    const int r0 = tid / lanes_c % ROW_GROUPS * BLOCK_R;
    const int lanes = lanes_c * ROW_GROUPS, lane_tile = tid / lanes;
    const int tiles = lane_tile < tiles_at_once && c0 < c ? n * bands * q_tiles : 0;

    float acc[BLOCK_R][S][VEC] = {}, bias_acc[VEC] = {};
    for (int tile = split * tiles_at_once + lane_tile; tile < tiles; tile += splits * tiles_at_once) {
        const int q0 = tile % q_tiles * TILE_Q, band = tile / q_tiles % bands, image = tile / q_tiles / bands;
        const int p0 = band * band_rows, rows = min(band_rows, p - p0);
        const int x0 = q0 * STRIDE_W - pad_w, y0 = p0 * STRIDE_H - pad_h + DILATION_H * r0;
        u32 in_columns = 0, out_columns = 0;
#pragma unroll
        for (int i = 0; i < IN_X; ++i) in_columns |= static_cast<u32>(x0 + i >= 0 && x0 + i < w) << i;
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j) out_columns |= static_cast<u32>(q0 + j < q) << j;
        const Element* const in_image = in + static_cast<i64>(image) * h * w * c + c0;
        const Element* const out_image = out_grad + static_cast<i64>(image) * p * q * c + c0;

        Vector<VEC> ahead_in[PREFETCH][STRIDE_H][IN_X], ahead_out[PREFETCH][TILE_Q];
        auto load_rows = [&](Vector<VEC> (&in_rows)[STRIDE_H][IN_X], Vector<VEC> (&out_row)[TILE_Q], int step) {
#pragma unroll
            for (int a = 0; a < STRIDE_H; ++a) {
                const int y = y0 + STRIDE_H * step + a;
                const u32 columns = y >= 0 && y < h ? in_columns : 0;
                const Element* const row = in_image + (y * w + x0) * c;
#pragma unroll
                for (int i = 0; i < IN_X; ++i) {
                    in_rows[a][i] = {};
                    if (columns >> i & 1) in_rows[a][i].load(pixel(row, i, c));
                }
            }
            const u32 columns = step < rows ? out_columns : 0;
            const Element* const row = out_image + ((p0 + step) * q + q0) * c;
#pragma unroll
            for (int j = 0; j < TILE_Q; ++j) {
                out_row[j] = {};
                if (columns >> j & 1) out_row[j].load(pixel(row, j, c));
            }
        };

        float window[DEPTH][TILE_Q][VEC] = {};
#pragma unroll
        for (int step = 0; step < PREFETCH; ++step) load_rows(ahead_in[step], ahead_out[step], step);
        // Steps below the image add nothing; but the bias needs every output row.
        const int steps = max(min(rows + DEPTH - 1, ceil_div(h - y0, STRIDE_H)), HAS_BIAS ? rows : 0);
        for (int first = 0; first < steps; first += UNROLL) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int step = first + u, slot = u % PREFETCH;
                if (step >= steps) break;
                float x[STRIDE_H][IN_X][VEC];
#pragma unroll
                for (int a = 0; a < STRIDE_H; ++a)
#pragma unroll
                    for (int i = 0; i < IN_X; ++i) ahead_in[slot][a][i].to_floats(x[a][i]);
#pragma unroll
                for (int j = 0; j < TILE_Q; ++j) {
#pragma unroll
                    for (int depth = DEPTH - 1; depth > 0; --depth)
#pragma unroll
                        for (int v = 0; v < VEC; ++v) window[depth][j][v] = window[depth - 1][j][v];
                    ahead_out[slot][j].to_floats(window[0][j]);
                    if (HAS_BIAS)
#pragma unroll
                        for (int v = 0; v < VEC; ++v) bias_acc[v] += window[0][j][v];
                }
                if (step + PREFETCH < steps) load_rows(ahead_in[slot], ahead_out[slot], step + PREFETCH);
#pragma unroll
                for (int a = 0; a < STRIDE_H; ++a)
#pragma unroll
                    for (int r = 0; r < BLOCK_R; ++r) {
                        if (DILATION_H * r % STRIDE_H != a) continue;
#pragma unroll
                        for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
                            for (int s = 0; s < S; ++s)
#pragma unroll
                                for (int v = 0; v < VEC; ++v)
                                    acc[r][s][v] += window[DILATION_H * r / STRIDE_H][j][v] *
                                                    x[a][STRIDE_W * j + DILATION_W * s][v];
                    }
            }
        }
    }

    // The block's sums: over the threads that go through different tiles.
    const i64 filter_elements = static_cast<i64>(c) * TAPS;
    const i64 elements = filter_elements + (HAS_BIAS ? c : 0);
    auto write = [&](i64 element, float value) {
        if (element < filter_elements) filter_grad[element] = element_from_float(value);
        else bias_grad[element - filter_elements] = element_from_float(value);
    };
#pragma unroll
    for (int r = 0; r < BLOCK_R + HAS_BIAS; ++r) {  // a filter row at a time, then the bias
        const bool is_bias = r == BLOCK_R;
        const int count = is_bias ? VEC : THREAD_FLOATS;
        __syncthreads();  // the last turn has read what it left in shared memory
#pragma unroll
        for (int e = 0; e < count; ++e)
            shared[e * blockDim.x + tid] = is_bias ? bias_acc[e % VEC] : acc[is_bias ? 0 : r][e / VEC][e % VEC];
        __syncthreads();
        for (int o = tid; o < count * lanes; o += blockDim.x) {
            const int e = o / lanes, lane = o % lanes, row = lane / lanes_c * BLOCK_R + r;
            const int channel = c_first + lane % lanes_c * VEC + e % VEC;
            if (channel >= c || (is_bias ? lane >= lanes_c : row >= R)) continue;
            const i64 element = is_bias ? filter_elements + channel : static_cast<i64>(channel) * TAPS + row * S + e / VEC;
            float sum = 0.0f;
            for (int t = 0; t < tiles_at_once; ++t) sum += shared[e * blockDim.x + t * lanes + lane];
            if (reduction == DIRECT) write(element, sum);
            else if (reduction == ATOMIC) atomicAdd(sums + element, sum);
            else partials[split * elements + element] = sum;
        }
    }
    if (reduction != ATOMIC) return;

    __threadfence();
    __syncthreads();
    if (tid == 0) {
        u32* const tickets = reinterpret_cast<u32*>(sums + elements);
        const u32 ticket = atomicInc(tickets + c_tile, splits - 1);  // the last one leaves it zero again
        shared[0] = ticket == splits - 1 ? 1.0f : 0.0f;
    }
    __syncthreads();
    if (shared[0] == 0.0f) return;
    __threadfence();
    const int channels = min(lanes_c * VEC, c - c_first);
    for (int o = tid; o < channels * (TAPS + HAS_BIAS); o += blockDim.x) {
        const i64 element = o < channels * TAPS ? static_cast<i64>(c_first) * TAPS + o
                                                : filter_elements + c_first + (o - channels * TAPS);
        write(element, __ldcg(sums + element));
        sums[element] = 0.0f;
    }
}
