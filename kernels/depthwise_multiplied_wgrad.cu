// Filter gradient of a depthwise convolution with a channel multiplier, and the bias's, NHWC, in float32 arithmetic:
// each input channel has MULTIPLIER output channels.
//
//   filter_grad[k, r, s] = sum over n, p, q of out_grad[n, p, q, k] * in[n, y, x, k / MULTIPLIER]
//   bias_grad[k]         = sum over n, p, q of out_grad[n, p, q, k]
//
// where y = STRIDE_H * p + r - pad_h and x = STRIDE_W * q + s - pad_w.
//
// The layer's sizes are run-time arguments. Compile-time: the filter's size R x S, the strides, MULTIPLIER, DTYPE,
// HAS_BIAS, and the config:
//
//   VEC  output channels of a thread, which share input channels or fall into whole groups that each share one
//
// A thread owns one filter row of VEC channels, S * VEC sums, and goes through output rows: it keeps the S input
// columns of an output in registers, and loads STRIDE_W new ones for the next:
//
//   q       x0 x1 x2            S = 3, STRIDE_W = 1
//   q + 1      x1 x2 x3
//
// Threads of a block run along channels first (lanes_c of them), then along the R filter rows, then along output
// rows, images and rows in one count, which `splits` blocks share. At the end the block adds the sums of its output
// rows in shared memory, filter column by filter column, and the blocks add their sums as `reduction` says:
//
//   DIRECT       one block has all: it writes the result
//   TWO_KERNELS  each writes its sums to `partials`; depthwise_wgrad_sum adds them up in a fixed order
//
// Both give the same bits every time.
//
// Parts:
//   block   channels by R filter rows by output rows, of a split of these
//   thread  one filter row of VEC channels, S VEC sums in registers
//   warp    no part of its own
//
// Bound: bytes; the R threads of a column read the same gradient out of the L1 cache.
//
// Instructions: float32 multiply-adds, one filter row a thread, so that its sums fit registers at any multiplier.
//
// Share of the floor:
//   depthwise_multiplied_wgrad on NVIDIA H200, 2026-11-29
//      15% of bytes: n=128 c=128 h=96 w=96 k=256 r=7 s=7 stride=2 padding=3 groups=128 direction=wgrad
//      26% of bytes: n=128 c=304 h=16 w=16 k=608 r=3 s=3 stride=2 padding=1 groups=304 direction=wgrad
//                    deterministic=true
//      29% of bytes: n=128 c=96 h=27 w=27 k=192 r=3 s=3 stride=2 padding=1 groups=96 direction=wgrad bias=true
#include "depthwise.cuh"

enum { MAX_THREADS = 256 };  // of a block
constexpr int IN_VEC = VEC > MULTIPLIER ? VEC / MULTIPLIER : 1;
constexpr int SHARED_BY = VEC / IN_VEC;  // output channels of a thread that share an input channel

static_assert(MAX_THREADS == HOST_MAX_THREADS, "blocks are no larger than the host believes");
static_assert(VEC % MULTIPLIER == 0 || MULTIPLIER % VEC == 0, "input channels of a thread are whole");

extern "C" __global__ void __launch_bounds__(MAX_THREADS) depthwise_multiplied_wgrad(
    Element* __restrict__ filter_grad, Element* __restrict__ bias_grad, const Element* __restrict__ out_grad,
    const Element* __restrict__ in, float* sums, float* partials, int n, int k, int h, int w, int p, int q,
    int pad_h, int pad_w, int c_tiles, int lanes_c, int tiles_at_once, int splits, int reduction) {
    extern __shared__ __align__(16) float shared[];
    const int c = k / MULTIPLIER, lane_c = threadIdx.x % lanes_c, rest = threadIdx.x / lanes_c;
    const int r = rest % R, lane_tile = rest / R, split = blockIdx.x / c_tiles;
    const int k0 = (blockIdx.x % c_tiles * lanes_c + lane_c) * VEC;
    const bool active = lane_tile < tiles_at_once && k0 < k;

    float acc[S][VEC] = {}, bias_acc[VEC] = {};
    const int rows = active ? n * p : 0;
#pragma unroll 1
    for (int row = split * tiles_at_once + lane_tile; row < rows; row += splits * tiles_at_once) {
        const int image = row / p, y = row % p * STRIDE_H + r - pad_h;
        const bool inside = y >= 0 && y < h;
        if (!inside && !HAS_BIAS) continue;
        const Element* const in_row = in + (static_cast<i64>(image) * h + y) * w * c + k0 / MULTIPLIER;
        const Element* const grad_row = out_grad + static_cast<i64>(row) * q * k + k0;
        float window[S][IN_VEC];
        const auto load = [&](float (&to)[IN_VEC], int x) {
            Vector<IN_VEC> loaded = {};
            if (inside && x >= 0 && x < w) loaded.load(in_row + static_cast<i64>(x) * c);
            loaded.to_floats(to);
        };
#pragma unroll
        for (int s = 0; s + STRIDE_W < S; ++s) load(window[s + STRIDE_W], s - pad_w);
#pragma unroll 2
        for (int column = 0; column < q; ++column) {
#pragma unroll
            for (int s = 0; s < S; ++s) {
                if (s + STRIDE_W < S) {
#pragma unroll
                    for (int v = 0; v < IN_VEC; ++v) window[s][v] = window[(s + STRIDE_W) % S][v];
                } else {
                    load(window[s], STRIDE_W * column + s - pad_w);
                }
            }
            Vector<VEC> loaded;
            loaded.load(grad_row + static_cast<i64>(column) * k);
            float values[VEC];
            loaded.to_floats(values);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
#pragma unroll
                for (int s = 0; s < S; ++s) acc[s][v] += values[v] * window[s][v / SHARED_BY];
                if (HAS_BIAS) bias_acc[v] += values[v];
            }
        }
    }

    const int filter_elements = k * R * S, elements = filter_elements + (HAS_BIAS ? k : 0);
    const auto add = [&](const float (&own)[VEC], int stride, int offset, bool writes) {
        __syncthreads();
#pragma unroll
        for (int v = 0; v < VEC; ++v) shared[v * blockDim.x + threadIdx.x] = own[v];
        __syncthreads();
        if (!writes || !active || lane_tile != 0) return;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            float sum = 0.0f;
            for (int tile = 0; tile < tiles_at_once; ++tile) sum += shared[v * blockDim.x + threadIdx.x + tile * R * lanes_c];
            const int element = (k0 + v) * stride + offset;
            if (reduction == TWO_KERNELS) partials[static_cast<i64>(split) * elements + element] = sum;
            else if (element < filter_elements) filter_grad[element] = element_from_float(sum);
            else bias_grad[element - filter_elements] = element_from_float(sum);
        }
    };
#pragma unroll
    for (int s = 0; s < S; ++s) add(acc[s], R * S, r * S + s, true);
    if (HAS_BIAS) add(bias_acc, 1, filter_elements, r == 0);
}
