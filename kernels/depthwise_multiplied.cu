// Input gradient of a depthwise convolution with a channel multiplier, NHWC, in float32 arithmetic: each input
// channel has MULTIPLIER output channels.
//
//   in_grad[n, y, x, c] = sum over j, r, s of out_grad[n, p, q, k] * filter[k, r, s],   k = c * MULTIPLIER + j
//
// where y + pad_h = STRIDE_H * p + r and x + pad_w = STRIDE_W * q + s. So the taps that meet an input pixel are
// every STRIDE_H-th row and STRIDE_W-th column of the filter, and neighbouring taps meet neighbouring outputs:
//
//   STRIDE_W = 2, S = 3           q - 1       q       q + 1
//                                /  |  \   /  |  \   /  |  \
//   tap                         0   1   2 0   1   2 0   1   2
//   x + pad_w          2 q - 2          2 q       2 q + 2          even x + pad_w: taps 0 and 2, odd: tap 1
//
// The layer's sizes are run-time arguments. Compile-time: the filter's size R x S, the strides, MULTIPLIER, DTYPE,
// and the config:
//
//   VEC  input channels of a thread
//
// A thread owns VEC channels of a pixel; it loads the VEC * MULTIPLIER output channels of a tap in one access or a
// few. Threads of a block run along channels first (lanes_c of them), then along pixels, columns and rows and
// images in one count. A block goes through `rounds` times as many pixels as it has threads for, with the filters
// of its channels in shared memory, in float32:
//
//   [tap][output channel]
//
// Parts:
//   block   lanes_c neighbours along channels by tiles_at_once pixels, `rounds` times
//   thread  VEC channels of a pixel of `in_grad`
//   warp    no part of its own
//
// Bound: bytes, R S MULTIPLIER / (STRIDE_H STRIDE_W) multiply-adds an input pixel, and 2 + 2 MULTIPLIER / (STRIDE_H
// STRIDE_W) bytes in float16.
//
// Instructions: float32 multiply-adds: outputs of a channel share no filter, so tensor cores have nothing to
// multiply. Data that neighbours read again comes out of the L1 cache.
//
// Share of the floor:
//   depthwise_multiplied_dgrad on NVIDIA H200, 2026-11-29
//       7% of bytes: n=128 c=256 h=48 w=48 k=512 r=7 s=7 stride=2 padding=3 groups=256 direction=dgrad
//       8% of bytes: n=64 c=512 h=24 w=24 k=1024 r=7 s=7 stride=2 padding=3 groups=512 direction=dgrad
//       8% of bytes: n=128 c=128 h=96 w=96 k=256 r=7 s=7 stride=2 padding=3 groups=128 direction=dgrad
#include "depthwise.cuh"

enum { MAX_THREADS = 256 };  // of a block
constexpr int OUT_VEC = VEC * MULTIPLIER;
constexpr int ACCESS = OUT_VEC * sizeof(Element) > 16 || (OUT_VEC & OUT_VEC - 1) ? VEC : OUT_VEC;  // channels

static_assert(MAX_THREADS == HOST_MAX_THREADS, "blocks are no larger than the host believes");

extern "C" __global__ void __launch_bounds__(MAX_THREADS) depthwise_multiplied(
    Element* __restrict__ in_grad, const Element* __restrict__ out_grad, const Element* __restrict__ filter,
    int n, int c, int h, int w, int p, int q, int pad_h, int pad_w, int c_tiles, int lanes_c, int tiles_at_once,
    int rounds) {
    extern __shared__ __align__(16) float filter_shared[];
    const int k = c * MULTIPLIER, width = lanes_c * OUT_VEC, k0 = blockIdx.x % c_tiles * width;
    for (int e = threadIdx.x; e < R * S * width; e += blockDim.x) {
        const int channel = e / (R * S), tap = e % (R * S);
        if (k0 + channel < k)
            filter_shared[tap * width + channel] = element_to_float(filter[(k0 + channel) * (R * S) + tap]);
    }
    __syncthreads();

    const int lane_c = threadIdx.x % lanes_c, lane_tile = threadIdx.x / lanes_c;
    const int channel = k0 + lane_c * OUT_VEC;  // of the output
    if (lane_tile >= tiles_at_once || channel >= k) return;
    const float* const taps = filter_shared + lane_c * OUT_VEC;
    for (int round = 0; round < rounds; ++round) {
        const i64 pixel = (static_cast<i64>(blockIdx.x / c_tiles) * rounds + round) * tiles_at_once + lane_tile;
        if (pixel >= static_cast<i64>(n) * h * w) return;
        const int x = static_cast<int>(pixel % w) + pad_w, y = static_cast<int>(pixel / w % h) + pad_h;
        const Element* const image = out_grad + pixel / w / h * p * q * k + channel;
        float acc[VEC] = {};
#pragma unroll 1
        for (int i = 0; i < (R + STRIDE_H - 1) / STRIDE_H; ++i) {
            const int r = y % STRIDE_H + STRIDE_H * i, row = y / STRIDE_H - i;
            if (r >= R || row < 0 || row >= p) continue;
#pragma unroll
            for (int j = 0; j < (S + STRIDE_W - 1) / STRIDE_W; ++j) {
                const int s = x % STRIDE_W + STRIDE_W * j, column = x / STRIDE_W - j;
                if (s >= S || column < 0 || column >= q) continue;
                const Element* const from = image + (static_cast<i64>(row) * q + column) * k;
                const float* const tap = taps + (r * S + s) * width;
#pragma unroll
                for (int part = 0; part < OUT_VEC; part += ACCESS) {
                    Vector<ACCESS> loaded;
                    loaded.load(from + part);
                    float values[ACCESS];
                    loaded.to_floats(values);
#pragma unroll
                    for (int v = 0; v < ACCESS; ++v) acc[(part + v) / MULTIPLIER] += values[v] * tap[part + v];
                }
            }
        }
        Vector<VEC> result;
        result.from_floats(acc);
        result.store(in_grad + pixel * c + channel / MULTIPLIER);
    }
}
