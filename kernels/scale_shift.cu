// Batch norm by known statistics, with what follows it, in one pass over a channels-last tensor:
//
//   out[row][k] = activation(x[row][k] * scale[k] + shift[k] + residual[row][k])      row = n, h, w
//
// in float32, rounded once. `out` may be `x`. The loop is that of epilogue.cu: a thread keeps IN_FLIGHT loads of
// VECTOR channels under way, and the step of the grid is a multiple of the channels, so that a thread meets the
// same channels all the way and keeps their scale and shift in registers.
#include "depthwise.cuh"

enum { THREADS = 256, BLOCKS_PER_SM = 4 };

// Sizes that launches count on, as confpred/pytorch/run/pointwise.py has it.
static_assert(THREADS == HOST_THREADS && BLOCKS_PER_SM == HOST_BLOCKS_PER_SM, "the host launches other blocks");
static_assert(VECTOR == 1 || VECTOR * sizeof(Element) == 16, "an access is of one element or of 16 bytes");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) scale_shift(
    Element* out, const Element* x, const float* __restrict__ scale, const float* __restrict__ shift,
    const Element* __restrict__ residual, int rows, int channels) {
    const int columns = channels / VECTOR;
    const i64 vectors = static_cast<i64>(rows) * columns;
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    const int first = blockIdx.x * THREADS + threadIdx.x;
    if (first >= vectors) return;

    float factor[VECTOR], offset[VECTOR];
    const int channel = first % columns * VECTOR;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        factor[v] = scale[channel + v];
        offset[v] = shift[channel + v];
    }
    for (i64 i = first; i < vectors; i += IN_FLIGHT * step) {
        Vector<VECTOR> values[IN_FLIGHT], added[IN_FLIGHT];
#pragma unroll
        for (int f = 0; f < IN_FLIGHT; ++f) {
            const i64 at = i + f * step;
            if (at >= vectors) continue;
            values[f].load(x + at * VECTOR);
            if (HAS_RESIDUAL) added[f].load(residual + at * VECTOR);
        }
#pragma unroll
        for (int f = 0; f < IN_FLIGHT; ++f) {
            const i64 at = i + f * step;
            if (at >= vectors) continue;
            float a[VECTOR], b[VECTOR] = {};
            values[f].to_floats(a);
            if (HAS_RESIDUAL) added[f].to_floats(b);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) a[v] = activate<ACTIVATION>(a[v] * factor[v] + offset[v] + b[v]);
            values[f].from_floats(a);
            values[f].store(out + at * VECTOR);
        }
    }
}
