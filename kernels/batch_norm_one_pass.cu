// Batch norm with its activation in one launch for each direction, which goes over the rows twice. A drawing in
// batch_norm.cuh shows tiles, splits and steps: a block has one tile of columns and one split of the rows; a step is UNROLL
// times `at_once` rows, and at_once is how many rows the threads of a block cover side by side.
//
//   forward    first loop    sums of `in`          -> all blocks of a tile wait here (`meet`) ->
//              second loop   out = activation((in - mean) * invstd * weight + bias + residual)
//   backward   first loop    d = out_grad * slope of the activation; sums of d and of d * (in - mean)
//              second loop   in_grad, of `in` and d
//
// Blocks that wait for one another have to run at the same time: the host launches no more blocks than the GPU holds
// at once, for which a multiprocessor has to hold MIN_BLOCKS, and asks the driver for a cooperative launch, which waits
// for work of other streams to leave room. The first `kept` steps of a block stay in shared memory between the loops, where
// each thread finds its own elements. The others are read again, the last step first, as the L2 cache still holds it:
//
//   steps of a block     0 .. kept - 1       kept .. last
//   first loop           read, and kept      read
//   second loop          from shared memory  read again, from `last` down to `kept`
//
// Compile-time: BACKWARD, DTYPE, ACTIVATION, HAS_RESIDUAL, and of the config VECTOR, UNROLL, THREADS, MIN_BLOCKS;
// FROZEN and STREAM (tensors of more than 32 MiB, of which an L2 cache keeps little) are read by batch_norm.cuh. The
// macros STATISTICS and LAYOUT list parameters, of running statistics and of `Place`.
//
// Parts:
//   block   a tile of columns and a split of the rows
//   thread  one column of VECTOR neighbouring channels, of which it has every at_once-th row
//
// Bound: bytes. The floor has each tensor cross memory once, which holds where all steps are kept. Of a tensor that is
// larger than shared memory and the L2 cache together, most steps are read twice: then 2/3 of the floor can be reached
// forward, 3/5 backward (with a residual 3/4 and 5/7), as in batch_norm.cu.
//
// Instructions: blocks meet by counters in device memory, as a second launch would lose shared memory. Loads and sums as
// in batch_norm.cu: 16 bytes a load, float32 sums by ordinary arithmetic.
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

// The elements of kept steps: a vector of each of TENSORS tensors a row and thread. They lie in shared memory after the
// SUM_FLOATS floats of the sums.
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
    add_rows<true>(pair, place, shared);  // true: of means and squared distances, not plain sums
    if (splits > 1) {
        put_partial(pair, place, scratch);
        meet(place, zeroed);
        add_splits<true>(pair, place, scratch, shared);
    }
    if (place.split == 0) store_statistics(pair, place, STATISTICS_ARGUMENTS);
    share_rows(pair, place, shared);
    // From here on pair.b is not the sum of squared distances, but one over the standard deviation.
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

// With a residual, the gradient before the activation, d, is the residual's gradient: the first loop stores it, rounded to
// DTYPE, and the second one reads it. Otherwise out_grad is kept or read again, and the second loop makes d of it anew.
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
            gradient.of(distance, d, added);  // takes the mean from `distance`, and makes d of out_grad
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
