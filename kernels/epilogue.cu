// Bias, residual and activation of a convolution in place, whose sums another library's kernel made:
//
//   out[row][k] = activation(out[row][k] + bias[k] + residual[row][k])      row = n, p, q
//
// in float32, rounded once. It is bound by memory, so a thread keeps IN_FLIGHT loads of VECTOR channels
// under way (16 bytes each, or one element where K is no multiple of that):
//
//                 one step of the whole grid
//      |<----------------------------------------->|
//      block 0     block 1    ...    last block      block 0 ...
//      [t0 t1 ..]  [t0 t1 ..]        [.. t255]       [t0 t1 ..]
//
// The launch makes the step a multiple of K, so that a thread meets the same channels all the way: it keeps
// their bias in registers, and divides once. Indices are of 64 bits; only rows, channels and the step have
// to fit in 31.
//
// Compile-time: DTYPE, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, VECTOR, IN_FLIGHT.
//
// Parts:
//   block   THREADS neighbouring vectors of a step
//   thread  the same VECTOR channels of one vector a step, IN_FLIGHT of them at once
//   warp    no part of its own
//
// Bound: bytes, the sums are read and written once, a residual is read once.
//
// Instructions: loads and stores of 16 bytes, many under way; there is nothing to share, so shared memory stays
// unused.
//
// Share of the floor: not measured yet.
#include "depthwise.cuh"

enum { THREADS = 256, BLOCKS_PER_SM = 4 };

// Sizes that launches count on, as confpred/cuda/epilogue.py has it.
static_assert(THREADS == HOST_THREADS && BLOCKS_PER_SM == HOST_BLOCKS_PER_SM, "the host launches other blocks");
static_assert(VECTOR == 1 || VECTOR * sizeof(Element) == 16, "an access is of one element or of 16 bytes");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) epilogue(
    Element* __restrict__ out, const Element* __restrict__ bias, const Element* __restrict__ residual, int rows, int channels) {
    const int columns = channels / VECTOR;
    const i64 vectors = static_cast<i64>(rows) * columns;
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    const int first = blockIdx.x * THREADS + threadIdx.x;
    if (first >= vectors) return;

    float offset[VECTOR] = {};
    if (HAS_BIAS) {
        const Element* const from = bias + first % columns * VECTOR;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) offset[v] = element_to_float(from[v]);  // read once: any alignment will do
    }
    for (i64 i = first; i < vectors; i += IN_FLIGHT * step) {
        Vector<VECTOR> sums[IN_FLIGHT], added[IN_FLIGHT];
#pragma unroll
        for (int f = 0; f < IN_FLIGHT; ++f) {
            const i64 at = i + f * step;
            if (at >= vectors) continue;
            sums[f].load(out + at * VECTOR);
            if (HAS_RESIDUAL) added[f].load(residual + at * VECTOR);
        }
#pragma unroll
        for (int f = 0; f < IN_FLIGHT; ++f) {
            const i64 at = i + f * step;
            if (at >= vectors) continue;
            float x[VECTOR], y[VECTOR] = {};
            sums[f].to_floats(x);
            if (HAS_RESIDUAL) added[f].to_floats(y);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                if (HAS_BIAS) x[v] += offset[v];
                if (HAS_RESIDUAL) x[v] += y[v];
                x[v] = activate<ACTIVATION>(x[v]);
            }
            sums[f].from_floats(x);
            sums[f].store(out + at * VECTOR);
        }
    }
}
