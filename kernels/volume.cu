// Depthwise convolution of volumes, forward and its input gradient, NDHWC, in float32 arithmetic.
//
//   out[n, o, k] = activation(residual[n, o, k] + bias[k] + sum over taps of in[n, y, k / m] * filter[k, tap])
//
// where o, y and tap are positions on three axes: input y meets output o at a tap when, along each of these,
//
//   UP * (y + origin) = DOWN * (o + shift) + DILATION * tap
//
// Forward: UP = 1, DOWN = the stride, origin = the padding, shift = 0; m is the channel multiplier.
// Input gradient: `in` is the output's gradient, the filter is rotated (FLIP), UP = the stride, DOWN = 1.
// Where UP > 1, an output meets every UP-th tap only. Tiles begin `shift` outputs, fewer than UP, before the first one,
// which is chosen so that tap 0 meets the first output of each tile. Then it is known at compile time which taps meet
// which output of a tile, and no product with zero is computed.
//
// The layer's sizes are run-time arguments. Compile-time, of each axis: WINDOW, UP, DOWN, DILATION; FLIP, DTYPE,
// ACTIVATION, HAS_BIAS, HAS_RESIDUAL, REPEAT (output channels of a thread that share an input channel),
// MAX_REGISTERS (of a thread), and the config:
//
//   VEC             channels of a thread: one access to memory
//   TILE_P, TILE_Q  output rows and columns of a thread
//   FILTER_SHARED   the filter stays in shared memory (1) or in registers (0), in float32
//   PLANE_AHEAD     the input is loaded a step, DOWN_D planes, (1) or a row (0) ahead of its arithmetic, into registers
//
// (The config also has threads, lanes_c and bands, which the host makes a launch of.)
//
// A thread owns VEC channels and TILE_P x TILE_Q pixels of a plane, and walks down a band of output planes. Each
// row of an input plane is loaded and converted once, and meets all outputs that it overlaps: those of the
// tile's rows in DEPTH sets of UP_D planes, a set of accumulators for each step that is still to be finished. When a
// step is finished, all sets move down by one. (The compiler moves nothing: the first product of the next step reads one
// set's register and writes the next one's.) Planes and rows are counted from the first one of the padding here.
// UP = DOWN = DILATION = 1, WINDOW = 3, TILE_P = 2:
//
//        input plane i, row 1 ----+---- filter plane 0, rows 1 and 0 --> acc[0]: output plane i, rows 0 and 1
//                                 +---- filter plane 1, rows 1 and 0 --> acc[1]: output plane i - 1
//                                 +---- filter plane 2, rows 1 and 0 --> acc[2]: output plane i - 2
//
// after rows 0 to 3 of input plane i, output plane i - 2 is finished. Threads of a block run along channels
// first (lanes_c of them), then along tiles: block_q in a row, and block_p such rows, so that what neighbouring
// tiles share comes out of the L1 cache.
//
// Parts:
//   block   lanes_c neighbours along channels by block_q by block_p tiles
//   thread  VEC channels of TILE_P x TILE_Q positions of a band of planes
//   warp    32 such threads, nothing more
//
// Bound: the floor is the time of the bytes, but the issue of instructions takes longer. At 3x3x3 some 45 are issued an
// output, 58 to 66 % of them multiply-adds: at four warp instructions a clock 0.35 clocks of a multiprocessor, where the
// 4 bytes, read and written in half precision, take 0.3 on an H100. A 3x5x5 filter takes 0.6 by its multiply-adds alone.
//
// Instructions: float32 multiply-adds, as in depthwise.cu: channels share nothing that tensor cores could multiply.
// __maxnreg__ instead of launch bounds, as blocks differ in size at run time.
//
// Share of the floor:
//   volume_dgrad on NVIDIA H200, 2026-11-27
//      31% of bytes: n=2 c=128 d=63 h=63 w=63 k=128 t=5 r=5 s=5 rank=3 stride=2 padding=2 groups=128 dtype=bfloat16
//                    direction=dgrad
//      38% of bytes: n=8 c=240 d=50 h=28 w=28 k=240 t=5 r=3 s=3 rank=3 stride=1x2x2 padding=2x1x1 groups=240
//                    dtype=bfloat16 direction=dgrad
//      41% of bytes: n=16 c=108 d=16 h=56 w=56 k=108 t=3 r=3 s=3 rank=3 stride=1x2x2 padding=1 groups=108
//                    direction=dgrad
//   volume_fprop on NVIDIA H200, 2026-11-27
//      35% of bytes: n=16 c=54 d=16 h=56 w=56 k=54 t=3 r=3 s=3 rank=3 padding=1 groups=54 bias=true
//      46% of bytes: n=32 c=96 d=8 h=28 w=28 k=96 t=3 r=3 s=3 rank=3 stride=1x2x2 padding=1 groups=96 dtype=bfloat16
//      60% of bytes: n=8 c=96 d=50 h=56 w=56 k=96 t=3 r=3 s=3 rank=3 stride=1x2x2 padding=1 groups=96 dtype=bfloat16
#include "volume.cuh"

constexpr int PERIOD_D = UP_D * DOWN_D;  // by how much a step moves both sides of the equation above
constexpr int DEPTH = (DILATION_D * (WINDOW_D - 1) + (UP_D - 1) * DOWN_D) / PERIOD_D + 1;
constexpr int IN_H = (DOWN_H * (TILE_P - 1) + DILATION_H * (WINDOW_H - 1)) / UP_H + 1;  // input rows of a tile
constexpr int IN_X = (DOWN_W * (TILE_Q - 1) + DILATION_W * (WINDOW_W - 1)) / UP_W + 1;  // input columns of a tile
constexpr int ROWS = DOWN_D * IN_H;  // input rows of a step
constexpr int AHEAD = PLANE_AHEAD ? ROWS : 1;
constexpr int IN_VEC = VEC / REPEAT;
constexpr int TAPS = WINDOW_D * WINDOW_H * WINDOW_W;
// Lanes of a warp read their filters at a pitch of an odd number of accesses, so that they meet no bank twice.
constexpr int ACCESS = VEC < 4 ? VEC : 4;
constexpr int FILTER_PITCH = (TAPS * VEC / ACCESS | 1) * ACCESS;

static_assert(UP_D == 1 || DOWN_D == 1, "one of them is the stride");
static_assert(TILE_P % UP_H == 0 && TILE_Q % UP_W == 0, "tiles begin at a place that tap 0 meets");
static_assert(IN_H <= 32 && IN_X <= 32, "validity bits are kept in a word each");

// Sizes that launches count on, as confpred/families/volume/volume.py works it out. How many lanes share a
// pixel's channels, and with them the threads and the shared memory of a block, is known at run time only.
static_assert(DEPTH == HOST_DEPTH && IN_H == HOST_IN_H && IN_X == HOST_IN_X, "the host counts a thread's work by them");
static_assert(FILTER_PITCH == HOST_FILTER_PITCH, "the host gives each lane's filters so much shared memory");

extern "C" __global__ void __maxnreg__(MAX_REGISTERS) volume(
    Element* __restrict__ out, const Element* __restrict__ in, const Element* __restrict__ filter,
    const Element* __restrict__ bias, const Element* __restrict__ residual, int k, int multiplier,
    int d, int h, int w, int z, int p, int q, int origin_d, int origin_h, int origin_w,
    int shift_d, int shift_h, int shift_w, int band_groups, int q_blocks, int c_tiles,
    int lanes_c, int block_p, int block_q) {
    extern __shared__ __align__(16) float filter_shared[];

    // ---- Position of the thread
    const int lane_c = threadIdx.x % lanes_c, lane_tile = threadIdx.x / lanes_c;
    const int c_tile = blockIdx.x % c_tiles, block = blockIdx.x / c_tiles;
    const int k0 = (c_tile * lanes_c + lane_c) * VEC;
    const int q0 = (block % q_blocks * block_q + lane_tile % block_q) * TILE_Q - shift_w;
    const int p0 = (block / q_blocks * block_p + lane_tile / block_q) * TILE_P - shift_h;
    const int group0 = blockIdx.y * band_groups;
    const bool active = lane_tile < block_p * block_q && k0 < k && p0 < p && q0 < q;
    const int groups = min(band_groups, (z + shift_d + UP_D - 1) / UP_D - group0);
    const int in_channels = k / multiplier;

    // Column j of the tile needs the input columns that UP_W * i = DOWN_W * j + DILATION_W * s gives.
    const int x0 = (q0 + shift_w) * DOWN_W / UP_W - origin_w, y0 = (p0 + shift_h) * DOWN_H / UP_H - origin_h;
    u32 in_rows = 0, in_columns = 0, out_columns = 0;
#pragma unroll
    for (int i = 0; i < IN_H; ++i) in_rows |= static_cast<u32>(y0 + i >= 0 && y0 + i < h) << i;
#pragma unroll
    for (int i = 0; i < IN_X; ++i) in_columns |= static_cast<u32>(active && x0 + i >= 0 && x0 + i < w) << i;
#pragma unroll
    for (int j = 0; j < TILE_Q; ++j) out_columns |= static_cast<u32>(q0 + j >= 0 && q0 + j < q) << j;
    const Element* const in_image = in + static_cast<i64>(blockIdx.z) * d * h * w * in_channels + k0 / multiplier;
    const i64 out_offset = static_cast<i64>(blockIdx.z) * z * p * q * k + k0;

    // ---- Loads
    auto load_row = [&](Vector<IN_VEC> (&to)[IN_X], int group, int index) {
        const int plane = DOWN_D * group + index / IN_H - origin_d;
        const u32 columns = plane >= 0 && plane < d && in_rows >> index % IN_H & 1 ? in_columns : 0;
        const Element* const row = pixel(in_image, (plane * h + y0 + index % IN_H) * w + x0, in_channels);
#pragma unroll
        for (int i = 0; i < IN_X; ++i) {
            to[i] = {};
            if (columns >> i & 1) to[i].load(pixel(row, i, in_channels));
        }
    };

    // Planes of padding add nothing: the steps above the image, with which no output is finished, are
    // left out, and those below it only finish outputs.
    const int steps = groups + DEPTH - 1;
    const int first_step = min(max(origin_d / DOWN_D - group0, 0), DEPTH - 1);
    const int last_step = min(max((d + origin_d + DOWN_D - 1) / DOWN_D - group0, first_step), steps);
    Vector<IN_VEC> ahead[AHEAD][IN_X];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_row(ahead[i], group0 + first_step, i);

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
    if (!FILTER_SHARED)
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) load_tap(tap, taps[FILTER_SHARED ? 0 : tap]);
    float bias_values[VEC];
    if (HAS_BIAS) {
        Vector<VEC> b;
        b.load(bias + k0);
        b.to_floats(bias_values);
    }

    // ---- Finished planes
    float acc[DEPTH][UP_D][TILE_P][TILE_Q][VEC] = {};
    Vector<VEC> added[UP_D][TILE_P][TILE_Q];
    auto plane_of = [&](int step, int e) { return UP_D * (group0 + step - (DEPTH - 1)) - shift_d + e; };
    // Plane e and row o of the tile that a step finishes: which columns lie in the image, and the first one's pixel.
    auto columns_of = [&](int step, int e, int o) {
        const int plane = plane_of(step, e), row = p0 + o;
        return step >= DEPTH - 1 && plane >= 0 && plane < z && row >= 0 && row < p ? out_columns : 0;
    };
    auto first_of = [&](int step, int e, int o) { return (plane_of(step, e) * p + p0 + o) * q + q0; };
    auto load_residual = [&](int step) {
#pragma unroll
        for (int e = 0; e < UP_D; ++e)
#pragma unroll
            for (int o = 0; o < TILE_P; ++o) {
                const u32 columns = columns_of(step, e, o);
                const Element* const row = pixel(residual + out_offset, first_of(step, e, o), k);
#pragma unroll
                for (int j = 0; j < TILE_Q; ++j)
                    if (columns >> j & 1) added[e][o][j].load(pixel(row, j, k));
            }
    };
    auto finish_planes = [&](int step) {
#pragma unroll
        for (int e = 0; e < UP_D; ++e)
#pragma unroll
            for (int o = 0; o < TILE_P; ++o) {
                const u32 columns = columns_of(step, e, o);
                if (columns == 0) continue;
                Element* const row = pixel(out + out_offset, first_of(step, e, o), k);
#pragma unroll
                for (int j = 0; j < TILE_Q; ++j) {
                    float sum[VEC], plus[VEC];
                    if (HAS_RESIDUAL) added[e][o][j].to_floats(plus);
#pragma unroll
                    for (int v = 0; v < VEC; ++v) {
                        sum[v] = acc[DEPTH - 1][e][o][j][v];
                        if (HAS_BIAS) sum[v] += bias_values[v];
                        if (HAS_RESIDUAL) sum[v] += plus[v];
                        sum[v] = activate<ACTIVATION>(sum[v]);
                    }
                    Vector<VEC> packed;
                    packed.from_floats(sum);
                    if (columns >> j & 1) packed.store(pixel(row, j, k));
                }
            }
#pragma unroll
        for (int depth = DEPTH - 1; depth >= 0; --depth)
#pragma unroll
            for (int e = 0; e < UP_D; ++e)
#pragma unroll
                for (int o = 0; o < TILE_P; ++o)
#pragma unroll
                    for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
                        for (int v = 0; v < VEC; ++v)
                            acc[depth][e][o][j][v] = depth ? acc[depth - 1][e][o][j][v] : 0.0f;
    };

    // ---- Steps
    for (int step = first_step; step < last_step; ++step) {
        if (HAS_RESIDUAL) load_residual(step);
        unrolled<ROWS>([&](auto constant) {
            constexpr int index = constant;
            float x[IN_X][IN_VEC];
#pragma unroll
            for (int i = 0; i < IN_X; ++i) ahead[index % AHEAD][i].to_floats(x[i]);
            const int next = (index + AHEAD) % ROWS, next_step = step + (index + AHEAD) / ROWS;
            if (next_step < last_step) load_row(ahead[index % AHEAD], group0 + next_step, next);
#pragma unroll
            for (int depth = DEPTH - 1; depth >= 0; --depth)
#pragma unroll
                for (int e = 0; e < UP_D; ++e) {
                    // DILATION_D * tap, of the equation above, where input plane index / IN_H of this step meets plane e of
                    // the outputs that began `depth` steps ago.
                    const int dilated_t = PERIOD_D * depth + UP_D * (index / IN_H) - DOWN_D * e;
                    if (dilated_t < 0 || dilated_t % DILATION_D || dilated_t / DILATION_D >= WINDOW_D) continue;
#pragma unroll
                    for (int o = 0; o < TILE_P; ++o) {
                        const int dilated_r = UP_H * (index % IN_H) - DOWN_H * o;
                        if (dilated_r < 0 || dilated_r % DILATION_H || dilated_r / DILATION_H >= WINDOW_H) continue;
#pragma unroll
                        for (int s = 0; s < WINDOW_W; ++s) {
                            const int tap = (dilated_t / DILATION_D * WINDOW_H + dilated_r / DILATION_H) * WINDOW_W + s;
                            float f[VEC];
                            if (FILTER_SHARED) load_tap(tap, f);
#pragma unroll
                            for (int j = 0; j < TILE_Q; ++j) {
                                if ((DOWN_W * j + DILATION_W * s) % UP_W) continue;
#pragma unroll
                                for (int v = 0; v < VEC; ++v)
                                    acc[depth][e][o][j][v] += x[(DOWN_W * j + DILATION_W * s) / UP_W][v / REPEAT] *
                                                              (FILTER_SHARED ? f[v] : taps[FILTER_SHARED ? 0 : tap][v]);
                            }
                        }
                    }
                }
        });
        finish_planes(step);
    }
    for (int step = last_step; step < steps; ++step) {
        if (HAS_RESIDUAL) load_residual(step);
        finish_planes(step);
    }
}
