// Depthwise convolution, forward and its input gradient, NHWC, in float32 arithmetic.
//
//   out[n, p, q, k] = activation(residual[n, p, q, k] + bias[k] + sum over r, s of in[n, y, x, k / m] * filter[k, r, s])
//
// where input pixel (y, x) meets output pixel (p, q) at tap (r, s) when, in each of the two dimensions,
//
//   UP * (y + origin) = DOWN * (p + shift) + DILATION * r
//
// Forward: UP = 1, DOWN = the stride, origin = the padding, shift = 0; m is the channel multiplier.
// Input gradient: `in` is the output's gradient, the filter is rotated by 180 degrees (FLIP), UP = the
// stride, DOWN = 1, m = 1. Where UP > 1, an output meets only some of the taps. Tiles begin `shift` outputs, fewer than
// UP, before the first one, which is chosen so that tap 0 meets the first output of each tile. Then it is known at
// compile time which taps meet which output of a tile, and no product with zero is computed.
//
// The layer's sizes are run-time arguments. Compile-time: the filter R x S, UP, DOWN, DILATION, FLIP,
// DTYPE, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, REPEAT (output channels of a thread that share an input
// channel), and the config:
//
//   VEC            channels of a thread: one access to memory
//   TILE_Q         output columns of a thread
//   FILTER_SHARED  the filter stays in shared memory (1) or in registers (0), in float32
//   MIN_BLOCKS     blocks of MAX_THREADS threads that a multiprocessor must hold: bounds the registers
//   PREFETCH       steps by which the input is loaded ahead of its arithmetic, into registers
//
// (The config also has threads, lanes_c and bands, which the host makes a launch of.)
//
// A thread owns VEC channels and TILE_Q columns and walks down a band of output rows, in steps of DOWN input rows and
// UP output rows, a *group*. Each input row is loaded and converted once, and meets all the output rows that it
// overlaps: DEPTH groups of accumulators, one for each step that is still to be finished. When a step is finished, all
// groups move down by one. (The compiler moves nothing: the first product of the next step reads one group's register
// and writes the next one's.) Input rows are counted from the first one of the padding here. UP = DOWN = DILATION = 1,
// R = 3:
//
//        input row i ----+---- filter row 0 --> acc[0]: output row i        (opened by this step)
//                        +---- filter row 1 --> acc[1]: output row i - 1
//                        +---- filter row 2 --> acc[2]: output row i - 2    (finished by this step)
//
// The halo that neighbouring threads share is read again by each, out of the L1 cache. Threads of a
// block run along channels first (lanes_c of them), then along tiles (tiles_at_once): columns, bands
// and images in one count, so that no thread idles at a ragged edge.
//
// Parts:
//   block   lanes_c neighbours along channels by tiles_at_once tiles
//   thread  VEC channels of TILE_Q columns of a band of rows
//   warp    32 such threads, nothing more
//
// Bound: bytes up to 5x5 filters: an H100 does some 40 multiply-adds of float32 while it reads and writes the 4 bytes
// of an output of float16. Larger filters are bound by these multiply-adds; the floor counts them at a tensor core's
// rate.
//
// Instructions: float32 multiply-adds, since channels share no operand that tensor cores could multiply. (Where strides
// and channels allow, depthwise_banded.cu makes a product of matrices within each channel.) Loads go through the L1
// cache, which has the halo, straight to registers: a load of VEC channels is one instruction.
//
// Share of the floor:
//   depthwise_dgrad on NVIDIA H100 80GB HBM3, 2026-11-23
//      78% of bytes: n=7 c=336 h=150 w=150 k=336 r=3 s=3 padding=1 groups=336 dtype=bfloat16 direction=dgrad
//      85% of bytes: n=128 c=2544 h=19 w=19 k=2544 r=3 s=3 padding=1 groups=2544 direction=dgrad
//      90% of bytes: n=32 c=1536 h=48 w=48 k=1536 r=3 s=3 padding=1 groups=1536 direction=dgrad
//   depthwise_fprop on NVIDIA H100 80GB HBM3, 2026-11-23
//      58% of bytes: n=16 c=288 h=75 w=113 k=288 r=5 s=5 padding=2 groups=288
//      80% of bytes: n=20 c=1280 h=42 w=42 k=1280 r=3 s=3 padding=1 groups=1280 dtype=bfloat16
//      85% of bytes: n=96 c=72 h=130 w=130 k=72 r=5 s=5 stride=2 padding=2 groups=72
#include "depthwise.cuh"

enum { MAX_THREADS = 256 };  // of a block
constexpr int PERIOD_H = UP_H * DOWN_H;  // by how much a step moves both sides of the equation above
constexpr int DEPTH = (DILATION_H * (R - 1) + (UP_H - 1) * DOWN_H) / PERIOD_H + 1;
constexpr int IN_X = (DOWN_W * (TILE_Q - 1) + DILATION_W * (S - 1)) / UP_W + 1;  // input columns of a tile
constexpr int IN_VEC = VEC / REPEAT;
constexpr int TAPS = R * S;
// Lanes of a warp read their filters at a pitch of an odd number of accesses, so that they meet no bank twice.
constexpr int ACCESS = VEC < 4 ? VEC : 4;
constexpr int FILTER_PITCH = (TAPS * VEC / ACCESS | 1) * ACCESS;

static_assert(UP_H == 1 || DOWN_H == 1, "one of them is the stride");
static_assert(TILE_Q % UP_W == 0, "tiles begin at a column that tap 0 meets");
static_assert(IN_X <= 32, "validity bits are kept in one word");

// Sizes that launches count on, as confpred/families/depthwise/depthwise.py works it out. How many lanes share a
// pixel's channels, and with them the threads and the shared memory of a block, is known at run time only.
static_assert(MAX_THREADS == HOST_MAX_THREADS, "blocks are no larger than the host believes");
static_assert(IN_X == HOST_IN_X && DEPTH == HOST_DEPTH, "the host counts a thread's work and registers by them");
static_assert(FILTER_PITCH == HOST_FILTER_PITCH, "the host gives each lane's filters so much shared memory");

// `n` images of h x w pixels of `in` and p x q of `out`, which has `k` channels; `in` has k / multiplier. c_tiles
// blocks share a pixel's channels. A band has band_groups groups of rows; `bands` bands make an image, and q_tiles
// tiles its width.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_BLOCKS) depthwise(
    Element* __restrict__ out, const Element* __restrict__ in, const Element* __restrict__ filter,
    const Element* __restrict__ bias, const Element* __restrict__ residual, int n, int k, int multiplier,
    int h, int w, int p, int q, int origin_h, int origin_w, int shift_h, int shift_w,
    int band_groups, int bands, int q_tiles, int c_tiles, int lanes_c, int tiles_at_once) {
    extern __shared__ __align__(16) float filter_shared[];

    // ---- Position of the thread
    const int lane_c = threadIdx.x % lanes_c, c_tile = blockIdx.x % c_tiles;
    const int k0 = (c_tile * lanes_c + lane_c) * VEC;
    const int lane_tile = threadIdx.x / lanes_c;
    int tile = blockIdx.x / c_tiles * tiles_at_once + lane_tile;
    const int column0 = tile % q_tiles * TILE_Q - shift_w; tile /= q_tiles;
    const int group0 = tile % bands * band_groups; tile /= bands;  // from here on `tile` is the image
    const bool active = lane_tile < tiles_at_once && tile < n && k0 < k;
    const int groups = min(band_groups, (p + shift_h + UP_H - 1) / UP_H - group0);
    const int in_channels = k / multiplier;

    // Column j of the tile needs the input columns x0 + i that UP_W * i = DOWN_W * j + DILATION_W * s gives. Bits of
    // words say which columns are in the image.
    const int x0 = (column0 + shift_w) * DOWN_W / UP_W - origin_w;
    u32 in_columns = 0, out_columns = 0;
#pragma unroll
    for (int i = 0; i < IN_X; ++i) in_columns |= static_cast<u32>(active && x0 + i >= 0 && x0 + i < w) << i;
#pragma unroll
    for (int j = 0; j < TILE_Q; ++j) out_columns |= static_cast<u32>(column0 + j >= 0 && column0 + j < q) << j;
    const Element* const in_image = in + static_cast<i64>(tile) * h * w * in_channels + k0 / multiplier;
    const i64 out_offset = static_cast<i64>(tile) * p * q * k + k0;

    // ---- Loads
    // The DOWN_H input rows at which a group of output rows begins.
    auto load_rows = [&](Vector<IN_VEC> (&to)[DOWN_H][IN_X], int group) {
#pragma unroll
        for (int a = 0; a < DOWN_H; ++a) {
            const int y = DOWN_H * group + a - origin_h;
            const u32 columns = y >= 0 && y < h ? in_columns : 0;
            const Element* const row = in_image + (y * w + x0) * in_channels;
#pragma unroll
            for (int i = 0; i < IN_X; ++i) {
                to[a][i] = {};
                if (columns >> i & 1) to[a][i].load(pixel(row, i, in_channels));
            }
        }
    };

    // Rows of padding add nothing: the steps above the image, with which no output is finished, are
    // left out, and those below it only finish outputs.
    const int steps = groups + DEPTH - 1;
    const int first_step = min(max(origin_h / DOWN_H - group0, 0), DEPTH - 1);
    const int last_step = min(max((h + origin_h + DOWN_H - 1) / DOWN_H - group0, first_step), steps);
    Vector<IN_VEC> ahead[PREFETCH][DOWN_H][IN_X];
#pragma unroll
    for (int i = 0; i < PREFETCH; ++i) load_rows(ahead[i], group0 + first_step + i);

    {  // while the first rows are on their way
        const int first = c_tile * lanes_c * VEC, count = min(lanes_c * VEC, k - first) * TAPS;
        const Element* const from = filter + static_cast<i64>(first) * TAPS;
        for (int e = threadIdx.x; e < count; e += blockDim.x) {
            const int channel = e / TAPS, tap = FLIP ? TAPS - 1 - e % TAPS : e % TAPS;
            filter_shared[channel / VEC * FILTER_PITCH + tap * VEC + channel % VEC] = element_to_float(from[e]);
        }
    }
    __syncthreads();

    if (!active) return;

    // ---- Filter and bias
    const float* const taps_shared = filter_shared + lane_c * FILTER_PITCH;
    float taps[FILTER_SHARED ? 1 : TAPS][VEC];
    auto load_tap = [&](int tap, float (&f)[VEC]) {
#pragma unroll
        for (int v = 0; v < VEC; v += ACCESS) {
            const float* const from = taps_shared + tap * VEC + v;
            if (ACCESS == 4) *reinterpret_cast<float4*>(f + v) = *reinterpret_cast<const float4*>(from);
            else if (ACCESS == 2) *reinterpret_cast<float2*>(f + v) = *reinterpret_cast<const float2*>(from);
            else f[v] = *from;
        }
    };
    if (!FILTER_SHARED)  // the other index, here and below, only lets the branch that goes unused compile
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) load_tap(tap, taps[FILTER_SHARED ? 0 : tap]);
    float bias_values[VEC];
    if (HAS_BIAS) {
        Vector<VEC> b;
        b.load(bias + k0);
        b.to_floats(bias_values);
    }

    // ---- Finished rows
    float acc[DEPTH][UP_H][TILE_Q][VEC] = {};
    // A step finishes the rows from row_of(step) on, UP_H of them, of which some may lie outside of the image.
    auto row_of = [&](int step) { return UP_H * (group0 + step - (DEPTH - 1)) - shift_h; };
    auto row_valid = [&](int step, int e) { return step >= DEPTH - 1 && row_of(step) + e >= 0 && row_of(step) + e < p; };
    Vector<VEC> added[UP_H][TILE_Q];
    auto load_residual = [&](int step) {
#pragma unroll
        for (int e = 0; e < UP_H; ++e) {
            const u32 columns = row_valid(step, e) ? out_columns : 0;
            const Element* const row = residual + out_offset + ((row_of(step) + e) * q + column0) * k;
#pragma unroll
            for (int j = 0; j < TILE_Q; ++j)
                if (columns >> j & 1) added[e][j].load(pixel(row, j, k));
        }
    };
    auto finish_rows = [&](int step) {
#pragma unroll
        for (int e = 0; e < UP_H; ++e) {
            if (!row_valid(step, e)) continue;
            Element* const row = out + out_offset + ((row_of(step) + e) * q + column0) * k;
#pragma unroll
            for (int j = 0; j < TILE_Q; ++j) {
                float sum[VEC], plus[VEC];
                if (HAS_RESIDUAL) added[e][j].to_floats(plus);
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
                    sum[v] = acc[DEPTH - 1][e][j][v];
                    if (HAS_BIAS) sum[v] += bias_values[v];
                    if (HAS_RESIDUAL) sum[v] += plus[v];
                    sum[v] = activate<ACTIVATION>(sum[v]);
                }
                Vector<VEC> packed;
                packed.from_floats(sum);
                if (out_columns >> j & 1) packed.store(pixel(row, j, k));
            }
        }
#pragma unroll
        for (int depth = DEPTH - 1; depth >= 0; --depth)
#pragma unroll
            for (int e = 0; e < UP_H; ++e)
#pragma unroll
                for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) acc[depth][e][j][v] = depth ? acc[depth - 1][e][j][v] : 0.0f;
    };

    // ---- Steps
    for (int first = first_step; first < last_step; first += PREFETCH)
#pragma unroll
        for (int u = 0; u < PREFETCH; ++u) {  // unrolled, so that what is loaded ahead is not moved
            const int step = first + u;
            if (step >= last_step) break;
            float x[DOWN_H][IN_X][IN_VEC];
#pragma unroll
            for (int a = 0; a < DOWN_H; ++a)
#pragma unroll
                for (int i = 0; i < IN_X; ++i) ahead[u][a][i].to_floats(x[a][i]);
            if (step + PREFETCH < last_step) load_rows(ahead[u], group0 + step + PREFETCH);
            if (HAS_RESIDUAL) load_residual(step);
#pragma unroll
            for (int a = 0; a < DOWN_H; ++a)
#pragma unroll
                for (int depth = DEPTH - 1; depth >= 0; --depth)
#pragma unroll
                    for (int e = 0; e < UP_H; ++e) {
                        // DILATION_H * r, of the equation above, where input row a of this step meets row e of the
                        // outputs that began `depth` steps ago.
                        const int dilated_r = PERIOD_H * depth + UP_H * a - DOWN_H * e;
                        if (dilated_r < 0 || dilated_r % DILATION_H || dilated_r / DILATION_H >= R) continue;
#pragma unroll
                        for (int s = 0; s < S; ++s) {
                            const int tap = dilated_r / DILATION_H * S + s;
                            float f[VEC];
                            if (FILTER_SHARED) load_tap(tap, f);
#pragma unroll
                            for (int j = 0; j < TILE_Q; ++j) {
                                if ((DOWN_W * j + DILATION_W * s) % UP_W) continue;
#pragma unroll
                                for (int v = 0; v < VEC; ++v)
                                    acc[depth][e][j][v] += x[a][(DOWN_W * j + DILATION_W * s) / UP_W][v / REPEAT] *
                                                           (FILTER_SHARED ? f[v] : taps[FILTER_SHARED ? 0 : tap][v]);
                            }
                        }
                    }
            finish_rows(step);
        }
    for (int step = last_step; step < steps; ++step) {
        if (HAS_RESIDUAL) load_residual(step);
        finish_rows(step);
    }
}
