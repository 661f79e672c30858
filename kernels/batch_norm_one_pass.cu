// Batch norm with its activation in one launch a direction (batch_norm.cuh has the layout). All blocks run at once: those
// of a tile wait for one another between the statistics and the second pass over their rows. The second pass goes
// through a block's steps in reverse, so that what the L2 cache still holds is read first; the first `kept` steps are
// not read again at all, as their elements stay in shared memory, where each thread finds its own:
//
//   steps of a block     0 .. kept - 1     kept .. last
//   first pass           read, and kept    read
//   second pass          <- from shared    <- read again, the last one first
//
// Formulas: those of batch_norm.cu, with the mean and the deviation of a channel.
//
// Compile-time: BACKWARD, DTYPE, ACTIVATION, HAS_RESIDUAL, FROZEN, STREAM (tensors larger than the L2 cache), and of
// the config VECTOR, UNROLL, THREADS, MIN_BLOCKS (that a multiprocessor must hold).
//
// Parts:
//   block   a tile of columns and a split of the rows, as batch_norm.cuh draws them; the first `kept` steps of it
//           stay in shared memory
//   thread  one column of VECTOR channels, of which it has every at_once-th row
//
// Bound: bytes, between those of the floor, where all steps are kept, and those of batch_norm.cu, where none is.
// Blocks that wait for one another add a few microseconds.
//
// Instructions: counters in device memory instead of a second launch, which would forget shared memory. Loads and
// sums as in batch_norm.cu.
//
// Share of the floor:
//   batch_norm_one_pass on NVIDIA H100 80GB HBM3, 2026-11-25
//      56% of bytes: n=256 h=42 w=42 c=108 activation=relu
//      59% of bytes: n=256 h=21 w=21 c=672 activation=relu
//      65% of bytes: n=32 h=32 w=32 c=1536 dtype=float32
//   batch_norm_one_pass_backward on NVIDIA H100 80GB HBM3, 2026-11-25
//      55% of bytes: n=8 h=224 w=224 c=144 activation=silu direction=backward
//      56% of bytes: n=64 h=38 w=38 c=960 activation=silu direction=backward
//      56% of bytes: n=32 h=128 w=128 c=96 dtype=bfloat16 activation=relu direction=backward
#include "batch_norm.cuh"

extern __shared__ __align__(16) float shared[];

// A thread's accesses of kept steps: TENSORS of them for each row of a step.
template <int TENSORS>
struct Kept {
    int steps;

    __device__ __forceinline__ Access& at(int step, int u, int tensor) const {
        return reinterpret_cast<Access*>(shared + SUM_FLOATS)[((step * UNROLL + u) * TENSORS + tensor) * THREADS + threadIdx.x];
    }
};

#if !BACKWARD
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) batch_norm_one_pass(
    Element* __restrict__ out, const Element* __restrict__ in, const float* weight, const float* bias,
    const Element* __restrict__ residual, STATISTICS, u32* zeroed, float* scratch, LAYOUT, int kept) {
    const Place place(LAYOUT_ARGUMENTS);
    const Kept<1> keep = {kept};
    Distances distances;
    distances.begin(in, place);
    int own = 0;
    for (int step = place.first_step(); step < steps; step += splits, ++own) {
        const int row = place.row_of(step);
        Access x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (row + u * at_once < rows) x[u].load(in + place.offset_of(row + u * at_once));
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            if (own < keep.steps) keep.at(own, u, 0) = x[u];
            distances.add(x[u]);
        }
    }
    Pair pair;
    distances.end(pair);
    add_rows<true>(pair, place, shared);
    if (splits > 1) {
        put_partial(pair, place, scratch);
        meet(place, zeroed);
        add_splits<true>(pair, place, scratch, shared);
    }
    if (place.split == 0) store_statistics(pair, place, STATISTICS_ARGUMENTS);
    share_rows(pair, place, shared);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) pair.b[v] = inverse_deviation(pair.b[v] / static_cast<float>(rows), *eps);
    Normalise normalise;
    normalise.begin(pair, place, weight, bias);
    for (int step = place.last_step(); step >= 0; step -= splits) {
        const int row = place.row_of(step);
        const bool is_kept = --own < keep.steps;
        Access x[UNROLL], more[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            const i64 at = place.offset_of(row + u * at_once);
            x[u] = is_kept ? keep.at(own, u, 0) : load_last(in + at);
            if (HAS_RESIDUAL) more[u] = load_last(residual + at);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (row + u * at_once < rows) store_last(out + place.offset_of(row + u * at_once), normalise.of(x[u], more[u]));
    }
}
#else

// With a residual, the gradient before the activation is the residual's gradient: the first pass stores it, and the
// second one reads it. Otherwise that of the output is kept or read again.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) batch_norm_one_pass_backward(
    Element* __restrict__ in_grad, Element* residual_grad, float* weight_grad, float* bias_grad,
    const Element* __restrict__ out_grad, const Element* __restrict__ in, const float* weight, const float* bias,
    const Element* __restrict__ residual, const float* mean, const float* invstd, u32* zeroed, float* scratch, LAYOUT,
    int kept) {
    const Place place(LAYOUT_ARGUMENTS);
    const Kept<2> keep = {kept};
    Gradient gradient;
    gradient.begin(place, weight, bias, mean, invstd, nullptr);
    Pair pair;
    pair.clear();
    int own = 0;
    for (int step = place.first_step(); step < steps; step += splits, ++own) {
        const int row = place.row_of(step);
        Access x[UNROLL], grads[UNROLL], more[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            const i64 at = place.offset_of(row + u * at_once);
            x[u].load(in + at);
            grads[u].load(out_grad + at);
            if (HAS_RESIDUAL) more[u] = load_last(residual + at);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            float distance[VECTOR], d[VECTOR], added[VECTOR] = {};
            x[u].to_floats(distance);
            grads[u].to_floats(d);
            if (HAS_RESIDUAL) more[u].to_floats(added);
            gradient.of(distance, d, added);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                pair.a[v] += d[v];
                pair.b[v] += d[v] * distance[v];
            }
            if (HAS_RESIDUAL) {
                grads[u].from_floats(d);
                grads[u].store(residual_grad + place.offset_of(row + u * at_once));
            }
            if (own < keep.steps) {
                keep.at(own, u, 0) = x[u];
                keep.at(own, u, 1) = grads[u];
            }
        }
    }
    add_rows<false>(pair, place, shared);
    if (splits > 1) {
        put_partial(pair, place, scratch);
        meet(place, zeroed);
        add_splits<false>(pair, place, scratch, shared);
    }
    if (place.split == 0) store_gradients(pair, place, invstd, nullptr, weight_grad, bias_grad);
    share_rows(pair, place, shared);
    InputGradient input;
    input.begin(pair, place, gradient, invstd);
    const Element* const again = HAS_RESIDUAL ? residual_grad : out_grad;
    for (int step = place.last_step(); step >= 0; step -= splits) {
        const int row = place.row_of(step);
        const bool is_kept = --own < keep.steps;
        Access x[UNROLL], grads[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            const i64 at = place.offset_of(row + u * at_once);
            x[u] = is_kept ? keep.at(own, u, 0) : load_last(in + at);
            grads[u] = is_kept ? keep.at(own, u, 1) : load_last(again + at);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            float distance[VECTOR], d[VECTOR];
            const float added[VECTOR] = {};
            x[u].to_floats(distance);
            grads[u].to_floats(d);
            if (HAS_RESIDUAL) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) distance[v] -= gradient.centre[v];
            } else {
                gradient.of(distance, d, added);
            }
            store_last(in_grad + place.offset_of(row + u * at_once), input.of(distance, d));
        }
    }
}
#endif
