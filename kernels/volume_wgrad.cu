// Depthwise convolution of volumes, gradient of the filter and of the bias, NDHWC, in float32 arithmetic.
//
//   filter_grad[k, tap] = sum over n, o of out_grad[n, o, k] * in[n, STRIDE * o - pad + DILATION * tap, k / m]
//   bias_grad[k]        = sum over n, o of out_grad[n, o, k]
//
// where o and tap are positions on three axes, and m is the channel multiplier. The layer's sizes are run-time
// arguments. Compile-time, of each axis: WINDOW (the filter's size), STRIDE, DILATION; DTYPE, HAS_BIAS, REPEAT (output
// channels of a thread that share an input channel), MAX_REGISTERS (of a thread), and the config:
//
//   VEC             channels of a thread: one access to memory
//   TILE_P, TILE_Q  output rows and columns of a thread
//   PLANE_EACH      a thread has one plane of the filter (1) or all of them (0)
//   PLANE_AHEAD     the input is loaded a step (1) or a row (0) ahead of its arithmetic, into registers; out_grad
//                   always a step
//
// (The config also has lanes_c, threads, bands and splits, which the host makes a launch of.)
//
// A thread owns VEC channels and BLOCK_T planes of the filter, whose sums stay in its registers, and goes through
// tiles of the images: TILE_P x TILE_Q pixels of a band of output planes. It walks down such a tile, in steps of one
// output plane and STRIDE input planes. Each row of an input plane is loaded and converted once, and meets the DEPTH
// output planes that it overlaps, which slide through registers. Input planes are counted from the first one of the
// padding here. STRIDE = DILATION = 1, BLOCK_T = 3:
//
//        row of input plane i ----+---- window[0]: output plane i      --> sums of filter plane 0    (entered by this step)
//                                 +---- window[1]: output plane i - 1  --> sums of filter plane 1
//                                 +---- window[2]: output plane i - 2  --> sums of filter plane 2    (leaves after it)
//
// Threads of a block run along channels first (lanes_c of them), then planes of the filter, then tiles.
// At the end the block adds its threads' sums in shared memory. One block alone (splits = 1) writes the result;
// of several that share a channel, each writes its sums to `partials`, and depthwise_wgrad_sum.cu adds them up in a
// fixed order. So the bits are the same every time.
//
// Zeros stand for pixels outside of the images, and are multiplied, too: an infinity or NaN near a border may make NaN
// of sums that it is no part of, of its channel.
//
// Parts:
//   block   lanes_c neighbours along channels by PLANE_GROUPS by tiles_at_once tiles at a time, of one split of them
//   thread  BLOCK_T planes of the filter of VEC channels, whose sums are registers, of TILE_P x TILE_Q positions at a
//           time
//
// Bound: the floor is the time of the bytes, but the issue of instructions takes longer: at 3x3x3, 55 % of them are
// multiply-adds. With 27 sums or more a channel in registers, few threads fit to issue them.
//
// Instructions: float32 multiply-adds and loads of VEC channels straight to registers, as in depthwise_wgrad.cu.
//
// Share of the floor:
//   volume_wgrad on NVIDIA H200, 2026-11-27
//      16% of bytes: n=8 c=240 d=50 h=14 w=14 k=240 t=5 r=3 s=3 rank=3 padding=2x1x1 groups=240 dtype=bfloat16
//                    direction=wgrad
//      18% of bytes: n=1 c=64 d=127 h=127 w=127 k=64 t=5 r=5 s=5 rank=3 stride=2 padding=2 groups=64 dtype=bfloat16
//                    direction=wgrad
//      20% of bytes: n=8 c=64 d=8 h=56 w=56 k=64 t=3 r=3 s=3 rank=3 padding=1 groups=64 dtype=bfloat16
//                    direction=wgrad deterministic=true
#include "volume.cuh"

constexpr int BLOCK_T = PLANE_EACH ? 1 : WINDOW_D;
constexpr int PLANE_GROUPS = WINDOW_D / BLOCK_T;                 // threads that share a filter
constexpr int DEPTH = DILATION_D * (BLOCK_T - 1) / STRIDE_D + 1;  // output planes that an input plane meets
constexpr int IN_H = STRIDE_H * (TILE_P - 1) + DILATION_H * (WINDOW_H - 1) + 1;  // input rows of a tile
constexpr int IN_X = STRIDE_W * (TILE_Q - 1) + DILATION_W * (WINDOW_W - 1) + 1;  // input columns of a tile
constexpr int ROWS = STRIDE_D * IN_H;  // input rows of a step
constexpr int AHEAD = PLANE_AHEAD ? ROWS : 1;  // rows that are loaded ahead
constexpr int IN_VEC = VEC / REPEAT;
constexpr int TAPS = WINDOW_D * WINDOW_H * WINDOW_W;
enum { THREAD_FLOATS = WINDOW_W * VEC };  // of shared memory: a thread's sums of one filter row

static_assert(IN_H <= 32 && IN_X <= 32, "validity bits are kept in a word each");

// Sizes that launches count on, as confpred/families/volume/volume_wgrad.py works it out. How many lanes share a
// pixel's channels, and with them the threads and the shared memory of a block, is known at run time only.
static_assert(PLANE_GROUPS == HOST_PLANE_GROUPS, "the host counts a block's threads by them");
static_assert(DEPTH == HOST_DEPTH && IN_H == HOST_IN_H && IN_X == HOST_IN_X, "the host counts a thread's work by them");
static_assert(THREAD_FLOATS == HOST_THREAD_FLOATS, "the host gives each thread so much shared memory");

// Images of d x h x w positions of `in` and z x p x q of `out_grad`, which has `k` channels. c_tiles blocks share a
// pixel's channels, lanes_c threads of a block each. A channel has `tiles` tiles: p_tiles by q_tiles pixels of each of
// `bands` bands, of band_planes output planes, of each image. `splits` blocks share them, each tiles_at_once in a turn.
extern "C" __global__ void __maxnreg__(MAX_REGISTERS) volume_wgrad(
    Element* __restrict__ filter_grad, Element* __restrict__ bias_grad, const Element* __restrict__ out_grad,
    const Element* __restrict__ in, float* partials, int k, int multiplier, int d, int h, int w, int z, int p, int q,
    int pad_d, int pad_h, int pad_w, int band_planes, int bands, int p_tiles, int q_tiles, int tiles, int c_tiles,
    int lanes_c, int tiles_at_once, int splits) {
    extern __shared__ __align__(16) float shared[];

    const int tid = threadIdx.x, lane_c = tid % lanes_c;
    const int c_tile = blockIdx.x % c_tiles, split = blockIdx.x / c_tiles;
    const int c_first = c_tile * lanes_c * VEC, k0 = c_first + lane_c * VEC;
    const int t0 = tid / lanes_c % PLANE_GROUPS * BLOCK_T;
    const int lanes = lanes_c * PLANE_GROUPS, lane_tile = tid / lanes;
    const int last_tile = lane_tile < tiles_at_once && k0 < k ? tiles : 0;  // idle threads only meet the barriers
    const int in_channels = k / multiplier;

    float acc[BLOCK_T][WINDOW_H][WINDOW_W][VEC] = {}, bias_acc[VEC] = {};
    for (int tile = split * tiles_at_once + lane_tile; tile < last_tile; tile += splits * tiles_at_once) {
        const int q0 = tile % q_tiles * TILE_Q, p0 = tile / q_tiles % p_tiles * TILE_P;
        const int z0 = tile / q_tiles / p_tiles % bands * band_planes, image = tile / q_tiles / p_tiles / bands;
        const int planes = min(band_planes, z - z0);
        const int x0 = q0 * STRIDE_W - pad_w, y0 = p0 * STRIDE_H - pad_h;
        const int plane0 = z0 * STRIDE_D - pad_d + DILATION_D * t0;
        u32 in_rows = 0, in_columns = 0, out_columns = 0;  // a bit for each that lies in the image
#pragma unroll
        for (int i = 0; i < IN_H; ++i) in_rows |= static_cast<u32>(y0 + i >= 0 && y0 + i < h) << i;
#pragma unroll
        for (int i = 0; i < IN_X; ++i) in_columns |= static_cast<u32>(x0 + i >= 0 && x0 + i < w) << i;
#pragma unroll
        for (int j = 0; j < TILE_Q; ++j) out_columns |= static_cast<u32>(q0 + j < q) << j;
        const Element* const in_image = in + static_cast<i64>(image) * d * h * w * in_channels + k0 / multiplier;
        const Element* const out_image = out_grad + static_cast<i64>(image) * z * p * q * k + k0;

        Vector<IN_VEC> ahead_in[AHEAD][IN_X];
        Vector<VEC> ahead_out[TILE_P][TILE_Q];
        // Row index % IN_H of the step's input plane index / IN_H.
        auto load_row = [&](Vector<IN_VEC> (&to)[IN_X], int step, int index) {
            const int plane = plane0 + STRIDE_D * step + index / IN_H;
            const u32 columns = plane >= 0 && plane < d && in_rows >> index % IN_H & 1 ? in_columns : 0;
            const Element* const row = pixel(in_image, (plane * h + y0 + index % IN_H) * w + x0, in_channels);
#pragma unroll
            for (int i = 0; i < IN_X; ++i) {
                to[i] = {};
                if (columns >> i & 1) to[i].load(pixel(row, i, in_channels));
            }
        };
        // The tile's pixels of the step's output plane; zeros outside of the band, too.
        auto load_plane = [&](int step) {
#pragma unroll
            for (int o = 0; o < TILE_P; ++o) {
                const u32 columns = step < planes && p0 + o < p ? out_columns : 0;
                const Element* const row = pixel(out_image, ((z0 + step) * p + p0 + o) * q + q0, k);
#pragma unroll
                for (int j = 0; j < TILE_Q; ++j) {
                    ahead_out[o][j] = {};
                    if (columns >> j & 1) ahead_out[o][j].load(pixel(row, j, k));
                }
            }
        };

        float window[DEPTH][TILE_P][TILE_Q][VEC] = {};
        load_plane(0);
#pragma unroll
        for (int index = 0; index < AHEAD; ++index) load_row(ahead_in[index], 0, index);
        // Steps below the image add nothing; but the bias needs every output plane.
        const int steps = max(min(planes + DEPTH - 1, ceil_div(d - plane0, STRIDE_D)), HAS_BIAS ? planes : 0);
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int o = 0; o < TILE_P; ++o)
#pragma unroll
                for (int j = 0; j < TILE_Q; ++j) {
#pragma unroll
                    for (int depth = DEPTH - 1; depth > 0; --depth)
#pragma unroll
                        for (int v = 0; v < VEC; ++v) window[depth][o][j][v] = window[depth - 1][o][j][v];
                    ahead_out[o][j].to_floats(window[0][o][j]);
                    if (HAS_BIAS)
#pragma unroll
                        for (int v = 0; v < VEC; ++v) bias_acc[v] += window[0][o][j][v];
                }
            load_plane(step + 1);
            unrolled<ROWS>([&](auto constant) {
                constexpr int index = constant;
                float x[IN_X][IN_VEC];
#pragma unroll
                for (int i = 0; i < IN_X; ++i) ahead_in[index % AHEAD][i].to_floats(x[i]);
                const int next = (index + AHEAD) % ROWS, next_step = step + (index + AHEAD) / ROWS;
                if (next_step < steps) load_row(ahead_in[index % AHEAD], next_step, next);
#pragma unroll
                for (int t = 0; t < BLOCK_T; ++t) {
                    if (DILATION_D * t % STRIDE_D != index / IN_H) continue;  // meets no output
#pragma unroll
                    for (int o = 0; o < TILE_P; ++o) {
                        const int dilated_r = index % IN_H - STRIDE_H * o;  // DILATION_H * r
                        if (dilated_r < 0 || dilated_r % DILATION_H || dilated_r / DILATION_H >= WINDOW_H) continue;
#pragma unroll
                        for (int j = 0; j < TILE_Q; ++j)
#pragma unroll
                            for (int s = 0; s < WINDOW_W; ++s)
#pragma unroll
                                for (int v = 0; v < VEC; ++v)
                                    acc[t][dilated_r / DILATION_H][s][v] += window[DILATION_D * t / STRIDE_D][o][j][v] *
                                                                            x[STRIDE_W * j + DILATION_W * s][v / REPEAT];
                    }
                }
            });
        }
    }

    // The block's sums: over the threads that go through different tiles.
    const i64 filter_elements = static_cast<i64>(k) * TAPS;
    const i64 elements = filter_elements + (HAS_BIAS ? k : 0);
    // Sum e of `lane` comes from tiles_at_once threads. Each plane group has sums of the bias; those of the first one
    // count. (? 0 and % VEC only keep indices legal in the branch that is not taken.)
#pragma unroll
    for (int row = 0; row < BLOCK_T * WINDOW_H + HAS_BIAS; ++row) {  // a filter row at a time, then the bias
        const bool is_bias = row == BLOCK_T * WINDOW_H;
        const int count = is_bias ? VEC : THREAD_FLOATS;
        __syncthreads();  // the last turn has read what it left in shared memory
#pragma unroll
        for (int e = 0; e < count; ++e)
            shared[e * blockDim.x + tid] =
                is_bias ? bias_acc[e % VEC] : acc[is_bias ? 0 : row / WINDOW_H][row % WINDOW_H][e / VEC][e % VEC];
        __syncthreads();
        for (int o = tid; o < count * lanes; o += blockDim.x) {
            const int e = o / lanes, lane = o % lanes, filter_row = lane / lanes_c * BLOCK_T * WINDOW_H + row;
            const int channel = c_first + lane % lanes_c * VEC + e % VEC;
            if (channel >= k || (is_bias && lane >= lanes_c)) continue;
            const i64 element =
                is_bias ? filter_elements + channel : static_cast<i64>(channel) * TAPS + filter_row * WINDOW_W + e / VEC;
            float sum = 0.0f;
            for (int t = 0; t < tiles_at_once; ++t) sum += shared[e * blockDim.x + t * lanes + lane];
            if (splits > 1) partials[split * elements + element] = sum;
            else if (is_bias) bias_grad[channel] = element_from_float(sum);
            else filter_grad[element] = element_from_float(sum);
        }
    }
}
