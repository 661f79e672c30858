// Depthwise convolution, both gradients in one pass, NHWC, in float32 arithmetic. As many filters as channels.
//
//   in_grad[n, y, x, c]  = sum over r, s of out_grad[n, p, q, c] * filter[c, r, s]
//   filter_grad[c, r, s] = sum over n, y, x of out_grad[n, p, q, c] * in[n, y, x, c]
//   bias_grad[c]         = sum over n, p, q of out_grad[n, p, q, c]
//
// where input pixel (y, x) meets output pixel (p, q) at tap (r, s) when, in each of the two dimensions,
//
//   STRIDE * p = y + pad - DILATION * r
//
// So the same pixel of out_grad is multiplied twice: by a tap, for the input's gradient, and by the input's
// pixel, for the tap's gradient. Apart, the two directions read out_grad twice and write or read one image each.
//
// The layer's sizes are run-time arguments. Compile-time: the window R x S, STRIDE, DILATION, DTYPE,
// HAS_BIAS, and the config:
//
//   VEC            channels of a thread: one access to memory
//   TILE_W         input columns of a thread
//   WINDOW         how the window of out_grad slides, and what it keeps: TURNED by renaming registers in a loop
//                  that is unrolled, MOVED by moves, PACKED too, with the elements as memory has them
//   FILTER_SHARED  the filter stays in shared memory (1) or in registers (0), in float32
//   PREFETCH       steps by which both images are loaded ahead of their arithmetic, into registers
//   MIN_BLOCKS     blocks of MAX_THREADS threads that a multiprocessor must hold: bounds the registers
//
// A thread owns VEC channels, and goes through tiles of the images: TILE_W columns of a band of input rows.
// It walks down such a tile. A step is a group of STRIDE_H input rows, which no other thread reads, and one row
// of out_grad with a halo of columns: it enters a sliding window of DEPTH rows in registers, which are all that
// the group meets. The sums of the taps stay in registers. STRIDE = DILATION = 1, R = 3:
//
//        window[0]: out_grad row i + pad      -- filter row 0 --+
//        window[1]: out_grad row i + pad - 1  -- filter row 1 --+-- row i of in and in_grad
//        window[2]: out_grad row i + pad - 2  -- filter row 2 --+
//
// Group 0 begins pad % STRIDE_H rows above the image, so that it is known at compile time which taps meet which
// row of a group; its newest row of out_grad is pad / STRIDE_H (`origin_h`). Columns are the same.
//
// Threads of a block run along channels first (lanes_c of them), then along tiles. At the end the block adds
// its threads' sums in shared memory, and the blocks (`splits` of them share a channel) add theirs in the way
// that `reduction` says, as those of depthwise_wgrad.cu do. All but ATOMIC give the same bits every time.
#include "depthwise.cuh"

enum { MAX_THREADS = 256 };  // of a block
constexpr int TAPS = R * S;
constexpr int DEPTH = DILATION_H * (R - 1) / STRIDE_H + 1;
constexpr int HALO = DILATION_W * (S - 1) / STRIDE_W;      // columns of out_grad to the left of a tile's own
constexpr int OUT_X = (TILE_W - 1) / STRIDE_W + 1 + HALO;  // columns of out_grad that a tile meets
enum { THREAD_FLOATS = S * VEC };  // of shared memory: a thread's sums of one filter row
// Lanes of a warp read their filters at a pitch of an odd number of accesses, so that they meet no bank twice.
constexpr int ACCESS = VEC < 4 ? VEC : 4;
constexpr int FILTER_PITCH = (TAPS * VEC / ACCESS | 1) * ACCESS;
// A turn of the window is unrolled as far as the instruction cache has room.
enum { TURNED, MOVED, PACKED };
constexpr int PRODUCTS = 2 * TAPS * TILE_W / STRIDE_W * VEC * PREFETCH;
constexpr int TURN = DEPTH * PRODUCTS <= 2048 ? DEPTH : PRODUCTS <= 1024 ? 2 : 1;
constexpr int UNROLL = PREFETCH * (WINDOW == TURNED ? TURN : 1);

static_assert(TILE_W % STRIDE_W == 0, "tiles begin at a column that tap 0 meets");
static_assert(OUT_X <= 32 && TILE_W <= 32, "validity bits are kept in one word");

// Launches count on these, which confpred/families/depthwise/depthwise_both.py works out too. How many lanes share a
// pixel's channels, and with them the threads and the shared memory of a block, is known at run time only.
static_assert(MAX_THREADS == HOST_MAX_THREADS, "blocks are no larger than the host believes");
static_assert(OUT_X == HOST_OUT_X && DEPTH == HOST_DEPTH, "the host counts a thread's work and registers by them");
static_assert(FILTER_PITCH == HOST_FILTER_PITCH, "the host gives each lane's filters so much shared memory");
static_assert(THREAD_FLOATS == HOST_THREAD_FLOATS, "the host gives each thread so much shared memory");

// A pixel's channels in the window.
template <bool IS_PACKED>
struct Pixel {
    float floats[VEC];
    __device__ __forceinline__ void set(const Vector<VEC>& x) { x.to_floats(floats); }
    __device__ __forceinline__ void get(float (&x)[VEC]) const {
#pragma unroll
        for (int v = 0; v < VEC; ++v) x[v] = floats[v];
    }
};
template <>
struct Pixel<true> {
    Vector<VEC> bits;
    __device__ __forceinline__ void set(const Vector<VEC>& x) { bits = x; }
    __device__ __forceinline__ void get(float (&x)[VEC]) const { bits.to_floats(x); }
};
typedef Pixel<WINDOW == PACKED> Kept;

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_BLOCKS) depthwise_both(
    Element* __restrict__ in_grad, Element* __restrict__ filter_grad, Element* __restrict__ bias_grad,
    const Element* __restrict__ out_grad, const Element* __restrict__ in, const Element* __restrict__ filter,
    float* sums, float* partials, int n, int c, int h, int w, int p, int q, int origin_h, int origin_w,
    int shift_h, int shift_w, int band_groups, int bands, int w_tiles, int c_tiles, int lanes_c,
    int tiles_at_once, int splits, int reduction) {
    extern __shared__ __align__(16) float shared[];  // the filter, and after the last tile the threads' sums

    const int tid = threadIdx.x, lane_c = tid % lanes_c, lane_tile = tid / lanes_c;
    const int c_tile = blockIdx.x % c_tiles, split = blockIdx.x / c_tiles;
    const int c_first = c_tile * lanes_c * VEC, c0 = c_first + lane_c * VEC;
    const int tiles = lane_tile < tiles_at_once && c0 < c ? n * bands * w_tiles : 0;

    // The tile that the thread is in, and what it has loaded ahead.
    int tile = split * tiles_at_once + lane_tile, group0 = 0, groups = 0, w_tile = 0, x0 = 0, y0 = 0, q0 = 0, p0 = 0;
    u32 in_columns = 0, out_columns = 0;
    i64 in_image = 0, out_image = 0;
    Vector<VEC> above[DEPTH][OUT_X], ahead_in[PREFETCH][STRIDE_H][TILE_W], ahead_out[PREFETCH][OUT_X];
    auto load_out = [&](Vector<VEC> (&to)[OUT_X], int step) {
        const int y = p0 + step;
        const u32 columns = y >= 0 && y < p ? out_columns : 0;
        const Element* const row = out_grad + out_image + (y * q + q0) * c;
#pragma unroll
        for (int i = 0; i < OUT_X; ++i) {
            to[i] = {};
            if (columns >> i & 1) to[i].load(pixel(row, i, c));
        }
    };
    auto columns_of = [&](int y) { return y >= 0 && y < h ? in_columns : 0; };
    auto load_in = [&](Vector<VEC> (&to)[STRIDE_H][TILE_W], int step) {
#pragma unroll
        for (int a = 0; a < STRIDE_H; ++a) {
            const int y = y0 + STRIDE_H * step + a;
            const u32 columns = columns_of(y);
            const Element* const row = in + in_image + (y * w + x0) * c;
#pragma unroll
            for (int j = 0; j < TILE_W; ++j) {
                to[a][j] = {};
                if (columns >> j & 1) to[a][j].load(pixel(row, j, c));
            }
        }
    };
    // The rows above the first step's are loaded at once with those ahead, so that their latency is one.
    auto enter_tile = [&] {
        if (tile >= tiles) return;
        w_tile = tile % w_tiles;
        group0 = tile / w_tiles % bands * band_groups;
        groups = min(band_groups, ceil_div(h + shift_h, STRIDE_H) - group0);
        x0 = w_tile * TILE_W - shift_w, y0 = group0 * STRIDE_H - shift_h;
        q0 = w_tile * (TILE_W / STRIDE_W) + origin_w - HALO, p0 = group0 + origin_h;
        in_columns = out_columns = 0;
#pragma unroll
        for (int j = 0; j < TILE_W; ++j) in_columns |= static_cast<u32>(x0 + j >= 0 && x0 + j < w) << j;
#pragma unroll
        for (int i = 0; i < OUT_X; ++i) out_columns |= static_cast<u32>(q0 + i >= 0 && q0 + i < q) << i;
        const i64 image = tile / w_tiles / bands;
        in_image = image * h * w * c + c0, out_image = image * p * q * c + c0;
#pragma unroll
        for (int d = 1; d < DEPTH; ++d) load_out(above[d], -d);
#pragma unroll
        for (int step = 0; step < PREFETCH; ++step) {
            load_out(ahead_out[step], step);
            load_in(ahead_in[step], step);
        }
    };
    enter_tile();

    {  // while the first rows are on their way
        const int count = min(lanes_c * VEC, c - c_first) * TAPS;
        const Element* const from = filter + static_cast<i64>(c_first) * TAPS;
        for (int e = tid; e < count; e += blockDim.x) {
            const int channel = e / TAPS, tap = e % TAPS;
            shared[channel / VEC * FILTER_PITCH + tap * VEC + channel % VEC] = element_to_float(from[e]);
        }
    }
    __syncthreads();
    const u32 taps_shared = shared_address(shared + lane_c * FILTER_PITCH);
    float taps[FILTER_SHARED ? 1 : TAPS][VEC] = {};
    // Volatile: else the compiler moves all taps out of the loop, into registers.
    auto load_tap = [&](int tap, float (&f)[VEC]) {
        const u32 from = taps_shared + tap * VEC * 4;
        if constexpr (VEC == 4)
            asm volatile("ld.volatile.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3]) : "r"(from));
        else if constexpr (VEC == 2)
            asm volatile("ld.volatile.shared.v2.f32 {%0,%1}, [%2];" : "=f"(f[0]), "=f"(f[1]) : "r"(from));
        else
            asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(f[0]) : "r"(from));
    };
    if (!FILTER_SHARED && c0 < c)
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) load_tap(tap, taps[FILTER_SHARED ? 0 : tap]);

    float acc[R][S][VEC] = {}, bias_acc[VEC] = {};
    // Each row of out_grad is new to one band, save those above the first one; columns are the same.
    auto add_bias = [&](const Kept (&row)[OUT_X]) {
#pragma unroll
        for (int i = 0; i < OUT_X; ++i) {
            float grad[VEC];
            row[i].get(grad);
#pragma unroll
            for (int v = 0; v < VEC; ++v) bias_acc[v] += i >= HALO || w_tile == 0 ? grad[v] : 0.0f;
        }
    };
    while (tile < tiles) {
        Kept window[DEPTH][OUT_X];  // row d is moved to d + 1 by the next step
#pragma unroll
        for (int d = 1; d < DEPTH; ++d) {
#pragma unroll
            for (int i = 0; i < OUT_X; ++i) window[d - 1][i].set(above[d][i]);
            if (HAS_BIAS && group0 == 0) add_bias(window[d - 1]);
        }

        for (int first = 0; first < groups; first += UNROLL) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int step = first + u, slot = u % PREFETCH;
                if (step >= groups) break;
#pragma unroll
                for (int i = 0; i < OUT_X; ++i) {
#pragma unroll
                    for (int d = DEPTH - 1; d > 0; --d) window[d][i] = window[d - 1][i];
                    window[0][i].set(ahead_out[slot][i]);
                }
                if (HAS_BIAS) add_bias(window[0]);
                float x[STRIDE_H][TILE_W][VEC], x_grad[STRIDE_H][TILE_W][VEC] = {};
#pragma unroll
                for (int a = 0; a < STRIDE_H; ++a)
#pragma unroll
                    for (int j = 0; j < TILE_W; ++j) ahead_in[slot][a][j].to_floats(x[a][j]);
                if (step + PREFETCH < groups) {
                    load_out(ahead_out[slot], step + PREFETCH);
                    load_in(ahead_in[slot], step + PREFETCH);
                }
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    const int a = DILATION_H * r % STRIDE_H;
                    float grad[OUT_X][VEC];
#pragma unroll
                    for (int i = 0; i < OUT_X; ++i) window[DILATION_H * r / STRIDE_H][i].get(grad[i]);
#pragma unroll
                    for (int s = 0; s < S; ++s) {
                        float f[VEC];
                        if (FILTER_SHARED) load_tap(r * S + s, f);
#pragma unroll
                        for (int j = 0; j < TILE_W; ++j) {
                            if ((j - DILATION_W * s) % STRIDE_W) continue;
                            const int i = (j - DILATION_W * s) / STRIDE_W + HALO;
#pragma unroll
                            for (int v = 0; v < VEC; ++v) {
                                x_grad[a][j][v] += grad[i][v] * (FILTER_SHARED ? f[v] : taps[FILTER_SHARED ? 0 : r * S + s][v]);
                                acc[r][s][v] += grad[i][v] * x[a][j][v];
                            }
                        }
                    }
                }
#pragma unroll
                for (int a = 0; a < STRIDE_H; ++a) {
                    const int y = y0 + STRIDE_H * step + a;
                    const u32 columns = columns_of(y);
                    Element* const row = in_grad + in_image + (y * w + x0) * c;
#pragma unroll
                    for (int j = 0; j < TILE_W; ++j) {
                        Vector<VEC> packed;
                        packed.from_floats(x_grad[a][j]);
                        if (columns >> j & 1) packed.store(pixel(row, j, c));
                    }
                }
            }
        }
        tile += splits * tiles_at_once;
        enter_tile();
    }

    // The block's sums: over the threads that go through different tiles.
    const i64 filter_elements = static_cast<i64>(c) * TAPS;
    const i64 elements = filter_elements + (HAS_BIAS ? c : 0);
    auto write = [&](i64 element, float value) {
        if (element < filter_elements) filter_grad[element] = element_from_float(value);
        else bias_grad[element - filter_elements] = element_from_float(value);
    };
#pragma unroll
    for (int r = 0; r < R + HAS_BIAS; ++r) {  // a filter row at a time, then the bias
        const bool is_bias = r == R;
        const int count = is_bias ? VEC : THREAD_FLOATS;
        __syncthreads();  // the filter, and what the last turn has left in shared memory, are read
#pragma unroll
        for (int e = 0; e < count; ++e)
            shared[e * blockDim.x + tid] = is_bias ? bias_acc[e % VEC] : acc[is_bias ? 0 : r][e / VEC][e % VEC];
        __syncthreads();
        for (int o = tid; o < count * lanes_c; o += blockDim.x) {
            const int e = o / lanes_c, lane = o % lanes_c, channel = c_first + lane * VEC + e % VEC;
            if (channel >= c) continue;
            const i64 element = is_bias ? filter_elements + channel : static_cast<i64>(channel) * TAPS + r * S + e / VEC;
            float sum = 0.0f;
            for (int t = 0; t < tiles_at_once; ++t) sum += shared[e * blockDim.x + t * lanes_c + lane];
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
