// Depthwise 1-D convolution of contiguous rows, (N, C, W): gradient of the filter and of the bias, in float32
// arithmetic.
//
//   filter_grad[k, s] = sum over n, o of out_grad[n, k, o] * in[n, k / multiplier, DOWN * o + DILATION * s - pad]
//   bias_grad[k]      = sum over n, o of out_grad[n, k, o]
//
// DOWN is the stride, and UP is 1 (line.cuh, which has a drawing, says what is compiled in). Further compile-time names
// are HAS_BIAS, OUT_VEC (elements of an access to out_grad), and the config:
//
//   TILE     outputs of a thread at a time
//   threads  of a block, which has one channel
//   splits   blocks that share a channel
//
// A thread goes through tiles of the channel's rows, of all images, and keeps the S sums (and the bias's behind them)
// in registers. At the end the block adds up its threads' sums, by shuffles within a warp and then in shared memory. If
// `splits` is 1, the block writes the result; otherwise blocks write their sums to `partials`, (splits, K S sums of the
// filter and K of the bias), which depthwise_wgrad_sum.cu adds up. The order of all sums is fixed.
//
// Zeros stand for inputs outside of a row and for outputs behind its end, and are multiplied, too: an infinity or NaN
// in the same tile may make NaN of sums that it is no part of, of its channel.
//
// Parts:
//   block   one channel, and a split of its tiles
//   warp    32 such threads, whose sums shuffles add up at the end
//   thread  TILE outputs at a time; S sums in registers
//
// Bound: bytes, as in line.cu, which has as many multiply-adds and bytes: here both tensors are read.
//
// Instructions: float32 multiply-adds on registers; shuffles add the sums of a warp without shared memory, and so
// without barriers.
//
// Share of the floor:
//   line_wgrad on NVIDIA H200, 2026-11-27
//      92% of bytes: n=32 c=2560 w=512 k=2560 s=4 rank=1 padding=3 cut=3 groups=2560 layout=channels_first
//                    dtype=bfloat16 direction=wgrad bias=true
//      96% of bytes: n=1 c=10240 w=8192 k=10240 s=4 rank=1 padding=3 cut=3 groups=10240 layout=channels_first
//                    dtype=bfloat16 direction=wgrad bias=true deterministic=true
//      99% of bytes: n=1 c=12288 w=8192 k=12288 s=3 rank=1 padding=2 cut=2 groups=12288 layout=channels_first
//                    direction=wgrad bias=true
#include "line.cuh"

enum { MAX_THREADS = 256, WARP = 32 };
constexpr int SUMS = S + HAS_BIAS;

static_assert(MAX_THREADS == HOST_MAX_THREADS, "blocks are no larger than the host believes");
static_assert(VECTORS == HOST_VECTORS, "the host counts registers by them");
static_assert(SUMS == HOST_SUMS, "the host gives each warp shared memory for its sums");

// `n` images of `k` channels of the output, each a row of `q` outputs and of `w` inputs; `q_tiles` tiles make a row.
// `first` is where the inputs of tile 0 begin (line.cuh).
extern "C" __global__ void __launch_bounds__(MAX_THREADS) line_wgrad(
    Element* __restrict__ filter_grad, Element* __restrict__ bias_grad, const Element* __restrict__ out_grad,
    const Element* __restrict__ in, float* __restrict__ partials, int n, int k, int multiplier, int w, int q, int first,
    int q_tiles, int splits) {
    extern __shared__ __align__(16) float shared[];

    const int channel = blockIdx.x % k, split = blockIdx.x / k, channels = k / multiplier;
    float sums[SUMS] = {};
    for (int tile = split * blockDim.x + threadIdx.x; tile < n * q_tiles; tile += splits * blockDim.x) {
        const int image = tile / q_tiles, o0 = tile % q_tiles * TILE;
        const Element* const out_row = out_grad + (static_cast<i64>(image) * k + channel) * q + o0;
        Window x;
        x.load(in + (static_cast<i64>(image) * channels + channel / multiplier) * w, DOWN * o0 + first, w);
        float grad[TILE];
#pragma unroll
        for (int j = 0; j < TILE; j += OUT_VEC) {
            Vector<OUT_VEC> packed = {};
            if (o0 + j < q) packed.load(out_row + j);  // whole accesses, as OUT_VEC divides q
            float values[OUT_VEC];
            packed.to_floats(values);
#pragma unroll
            for (int v = 0; v < OUT_VEC; ++v) grad[j + v] = values[v];
        }
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int j = 0; j < TILE; ++j) {
                const int e = element_of(j, s);
                if (e >= 0) sums[s] += x.at(e) * grad[j];
            }
        if (HAS_BIAS)
#pragma unroll
            for (int j = 0; j < TILE; ++j) sums[SUMS - 1] += grad[j];
    }

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        for (int distance = WARP / 2; distance > 0; distance /= 2)
            sums[i] += __shfl_down_sync(~0u, sums[i], distance);
        if (lane == 0) shared[warp * SUMS + i] = sums[i];
    }
    __syncthreads();
    const i64 filter_elements = static_cast<i64>(k) * S, elements = filter_elements + (HAS_BIAS ? k : 0);
    for (int i = threadIdx.x; i < SUMS; i += blockDim.x) {
        float sum = 0.0f;
        for (int other = 0; other < static_cast<int>(blockDim.x) / WARP; ++other) sum += shared[other * SUMS + i];
        const i64 element = i < S ? static_cast<i64>(channel) * S + i : filter_elements + channel;
        if (splits > 1) partials[split * elements + element] = sum;
        else if (i < S) filter_grad[element] = element_from_float(sum);
        else bias_grad[channel] = element_from_float(sum);
    }
}
