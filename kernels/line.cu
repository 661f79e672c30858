// Depthwise 1-D convolution of contiguous rows, (N, C, W), in float32 arithmetic: the output, or the gradient of the
// input, which is the same with the filter rotated (FLIP).
//
//   out[n, k, o] = activation(bias[k] + residual[n, k, o] + sum over s of in[n, k / multiplier, y] * filter[k, s])
//
// where UP * y = DOWN * o + DILATION * s - pad (line.cuh, which has a drawing, says what is compiled in). Further
// compile-time names are FLIP, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, and the config:
//
//   TILE     outputs of a thread at a time, in registers
//   lanes    threads side by side along a row; the block's others take the next rows
//   turns    tiles of a thread, one after the other, `lanes` tiles apart
//   threads  about as many are a block, which decides how many rows it has
//
// A thread loads all inputs of a tile, then adds it up; neighbours read what they share from the L1 cache. What
// bounds it is memory: a row is read once and written once from there, in accesses of up to 16 bytes, as far as they
// divide a tile and the rows (OUT_VEC elements of the output). Outputs whose accesses have fewer than 8 bytes go through
// shared memory, so that neighbouring threads store neighbouring elements.
//
// Parts:
//   block   `lanes` tiles along a row, by as many rows as threads allow
//   thread  TILE outputs at a time, `turns` times
//   warp    32 such threads, nothing more
//
// Bound: bytes, up to some 40 taps in float16: so many multiply-adds of float32 an H100 does in the time of an output's 4
// bytes.
//
// Instructions: float32 multiply-adds on registers, whose indices are all compile-time; accesses of 16 bytes where a
// row's length allows. Tensor cores would need the band of depthwise_banded.cu, and memory is the bound without them.
//
// Share of the floor:
//   line_dgrad on NVIDIA H200, 2026-11-27
//      76% of bytes: n=1 c=2560 w=4096 k=2560 s=4 rank=1 padding=3 cut=3 groups=2560 layout=channels_first
//                    dtype=bfloat16 direction=dgrad
//      92% of bytes: n=4 c=10240 w=2048 k=10240 s=4 rank=1 padding=3 cut=3 groups=10240 layout=channels_first
//                    dtype=bfloat16 direction=dgrad
//      94% of bytes: n=1 c=3328 w=32768 k=3328 s=4 rank=1 padding=3 cut=3 groups=3328 layout=channels_first
//                    direction=dgrad
//   line_fprop on NVIDIA H200, 2026-11-27
//      91% of bytes: n=32 c=3072 w=512 k=3072 s=4 rank=1 padding=3 cut=3 groups=3072 layout=channels_first
//      92% of bytes: n=4 c=3072 w=8192 k=3072 s=4 rank=1 padding=3 cut=3 groups=3072 layout=channels_first bias=true
//                    activation=silu
//      93% of bytes: n=1 c=12288 w=8192 k=12288 s=3 rank=1 padding=2 cut=2 groups=12288 layout=channels_first
//                    dtype=bfloat16 bias=true
#include "line.cuh"

enum { MAX_THREADS = 256 };  // of a block
constexpr bool STAGED = OUT_VEC * sizeof(Element) < 8;

static_assert(MAX_THREADS == HOST_MAX_THREADS, "blocks are no larger than the host believes");
static_assert(VECTORS == HOST_VECTORS, "the host counts registers by them");
static_assert(STAGED == HOST_STAGED, "the host gives shared memory to blocks that stage their outputs");

extern "C" __global__ void __launch_bounds__(MAX_THREADS) line(
    Element* __restrict__ out, const Element* __restrict__ in, const Element* __restrict__ filter,
    const Element* __restrict__ bias, const Element* __restrict__ residual,
    int rows, int k, int multiplier, int w, int q,  // rows: images by k channels, of q outputs and w inputs
    int first, int lanes, int rows_at_once, int turns, int q_blocks) {
    extern __shared__ __align__(16) Element staged[];

    const int lane = threadIdx.x % lanes, lane_row = threadIdx.x / lanes;
    const int row = blockIdx.x / q_blocks * rows_at_once + lane_row, channel = row % k;
    const bool works = lane_row < rows_at_once && row < rows;
    const Element* const in_row = in + static_cast<i64>(row / k * (k / multiplier) + channel / multiplier) * w;
    const i64 out_row = static_cast<i64>(row) * q;

    float taps[S], offset = 0.0f;
    if (works) {
#pragma unroll
        for (int s = 0; s < S; ++s) taps[s] = element_to_float(filter[channel * S + (FLIP ? S - 1 - s : s)]);
        if (HAS_BIAS) offset = element_to_float(bias[channel]);
    }

    for (int turn = 0; turn < turns; ++turn) {
        const int tile0 = (blockIdx.x % q_blocks * turns + turn) * lanes, o0 = (tile0 + lane) * TILE;
        if (tile0 * TILE >= q) break;  // all of the block, which has barriers below
        float acc[TILE];
        if (works && o0 < q) {
            Window x;
            x.load(in_row, DOWN * (o0 / UP) + first, w);
#pragma unroll
            for (int j = 0; j < TILE; ++j) acc[j] = offset;
            if (HAS_RESIDUAL)
#pragma unroll
                for (int j = 0; j < TILE; j += OUT_VEC) {
                    if (o0 + j >= q) break;
                    Vector<OUT_VEC> packed;
                    float more[OUT_VEC];
                    packed.load(residual + out_row + o0 + j);
                    packed.to_floats(more);
#pragma unroll
                    for (int v = 0; v < OUT_VEC; ++v) acc[j + v] += more[v];
                }
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int j = 0; j < TILE; ++j) {
                    const int e = element_of(j, s);
                    if (e >= 0) acc[j] += x.at(e) * taps[s];
                }
#pragma unroll
            for (int j = 0; j < TILE; j += OUT_VEC) {
                float values[OUT_VEC];
#pragma unroll
                for (int v = 0; v < OUT_VEC; ++v) values[v] = activate<ACTIVATION>(acc[j + v]);
                Vector<OUT_VEC> packed;
                packed.from_floats(values);
                if (STAGED) packed.store(staged + threadIdx.x * TILE + j);
                else if (o0 + j < q) packed.store(out + out_row + o0 + j);
            }
        }
        if (STAGED) {
            __syncthreads();
            const int count = min(lanes * TILE, q - tile0 * TILE);
            if (works)
                for (int i = lane; i < count; i += lanes) out[out_row + tile0 * TILE + i] = staged[lane_row * lanes * TILE + i];
            __syncthreads();
        }
    }
}
