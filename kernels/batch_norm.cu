// Batch norm with its activation in two launches a direction, over channels-last activations (batch_norm.cuh):
//
//   forward    batch_norm_statistics    reads `in`; the last block of a tile adds up the splits
//              batch_norm_apply         out = activation((in - mean) * invstd * weight + bias + residual)
//   backward   batch_norm_sums          d = out_grad * slope of the activation; adds up d, and d * (in - mean)
//              batch_norm_gradient      in_grad = weight * invstd * (d - mean of d
//                                                   - (in - mean) * invstd^2 * mean of (d * (in - mean)))
//
// The normalised tensor is never stored: backward computes the activation's argument again. With a residual d is its
// gradient, so the first launch stores it, rounded to DTYPE, and the second one reads it. The second launch of a
// direction goes through the rows in reverse: those that the first one read last are still in the L2 cache. The
// statistics of a frozen layer are given, so it needs the second launch forward alone, and the first one backward,
// which then stores in_grad too.
//
// Compile-time: KERNEL, one of the four; DTYPE, ACTIVATION, HAS_RESIDUAL, FROZEN, STREAM (tensors of more than 32 MiB,
// of which an L2 cache keeps little), and of the config VECTOR, UNROLL, THREADS. The macros STATISTICS and LAYOUT list
// parameters, of running statistics and of `Place`. `zeroed` counts the blocks of each tile that have stored their
// sums.
//
// Parts:
//   block   a tile of columns and a split of the rows (batch_norm.cuh draws them)
//   thread  one column of VECTOR channels, of which it has every at_once-th row
//   warp    32 such threads, of one row or of several, as `lanes` need not divide 32
//
// Bound: bytes. The floor has each tensor cross memory once; forward two launches read `in` twice, so that a tensor
// larger than the L2 cache allows 2/3 of it, and 3/5 backward (with a residual 3/4 and 5/7).
//
// Instructions: loads of 16 bytes and float32 sums by ordinary arithmetic, a few operations an element. Streaming
// loads and stores (STREAM: ld.cs, st.cs) leave the L2 cache to what the second launch reads again.
//
// Share of the floor:
//   batch_norm_two_pass on NVIDIA H100 80GB HBM3, 2026-11-25
//      52% of bytes: n=256 h=42 w=42 c=108 activation=relu
//      56% of bytes: n=256 h=21 w=21 c=672 activation=relu
//      62% of bytes: n=32 h=32 w=32 c=1536 dtype=float32
//   batch_norm_two_pass_backward on NVIDIA H100 80GB HBM3, 2026-11-25
//      53% of bytes: n=8 h=224 w=224 c=144 activation=silu direction=backward
//      54% of bytes: n=64 h=38 w=38 c=960 activation=silu direction=backward
//      55% of bytes: n=128 h=56 w=56 c=336 dtype=bfloat16 activation=relu direction=backward
#include "batch_norm.cuh"

#define KERNEL_STATISTICS 0
#define KERNEL_APPLY 1
#define KERNEL_SUMS 2
#define KERNEL_GRADIENT 3

extern __shared__ __align__(16) float shared[];

#if KERNEL == KERNEL_STATISTICS
extern "C" __global__ void __launch_bounds__(THREADS) batch_norm_statistics(
    const Element* __restrict__ in, STATISTICS, u32* zeroed, float* scratch, LAYOUT) {
    const Place place(LAYOUT_ARGUMENTS);
    Distances distances;
    distances.begin(in, place);
    for (int step = place.first_step(); step < steps; step += splits) {
        const int row = place.row_of(step);
        Access x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (row + u * at_once < rows) x[u].load(in + place.offset_of(row + u * at_once));
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (row + u * at_once < rows) distances.add(x[u]);
    }
    Pair pair;
    distances.end(pair);
    add_rows<true>(pair, place, shared);  // true: of means and squared distances, not plain sums
    if (splits > 1) {
        put_partial(pair, place, scratch);
        if (!is_last(place, zeroed, shared)) return;
        add_splits<true>(pair, place, scratch, shared);
    }
    store_statistics(pair, place, STATISTICS_ARGUMENTS);
}
#endif

#if KERNEL == KERNEL_APPLY
extern "C" __global__ void __launch_bounds__(THREADS) batch_norm_apply(
    Element* __restrict__ out, const Element* __restrict__ in, const float* weight, const float* bias,
    const Element* __restrict__ residual, const float* mean, const float* invstd, const float* eps, LAYOUT) {
    const Place place(LAYOUT_ARGUMENTS);
    Pair known;
    load_column(known.a, mean, place, 0.0f);
    load_deviation(known.b, invstd, place, eps);
    Normalise normalise;
    normalise.begin(known, place, weight, bias);
    for (int step = place.last_step(); step >= 0; step -= splits) {
        const int row = place.row_of(step);
        Access x[UNROLL], more[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            const i64 at = place.offset_of(row + u * at_once);
            x[u] = load_last(in + at);
            if (HAS_RESIDUAL) more[u] = load_last(residual + at);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (row + u * at_once < rows) store_last(out + place.offset_of(row + u * at_once), normalise.of(x[u], more[u]));
    }
}
#endif

#if KERNEL == KERNEL_SUMS
extern "C" __global__ void __launch_bounds__(THREADS) batch_norm_sums(
    Element* __restrict__ in_grad, Element* __restrict__ residual_grad, float* weight_grad, float* bias_grad,
    const Element* __restrict__ out_grad, const Element* __restrict__ in, const float* weight, const float* bias,
    const Element* __restrict__ residual, const float* mean, const float* invstd, const float* eps, u32* zeroed,
    float* scratch, LAYOUT) {
    const Place place(LAYOUT_ARGUMENTS);
    Gradient gradient;
    gradient.begin(place, weight, bias, mean, invstd, eps);
    Pair pair;
    pair.clear();
    InputGradient input;
    if (FROZEN) input.begin(pair, place, gradient, invstd);  // in_grad needs no sums then
    for (int step = place.first_step(); step < steps; step += splits) {
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
            const i64 at = place.offset_of(row + u * at_once);
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
                more[u].from_floats(d);
                more[u].store(residual_grad + at);
            }
            if (FROZEN) store_last(in_grad + at, input.of(distance, d));
        }
    }
    add_rows<false>(pair, place, shared);
    if (splits > 1) {
        put_partial(pair, place, scratch);
        if (!is_last(place, zeroed, shared)) return;
        add_splits<false>(pair, place, scratch, shared);
    }
    store_gradients(pair, place, invstd, eps, weight_grad, bias_grad);
    if (!FROZEN && place.row == 0 && place.active) {
        put(total(scratch, place, 0), pair.a);
        put(total(scratch, place, 1), pair.b);
    }
}
#endif

// With a residual, `out_grad` is the residual's gradient, and the kernel is compiled without an activation, as that is
// d already. (A frozen layer has no such launch, so nothing reads eps.)
#if KERNEL == KERNEL_GRADIENT
extern "C" __global__ void __launch_bounds__(THREADS) batch_norm_gradient(
    Element* __restrict__ in_grad, const Element* __restrict__ out_grad, const Element* __restrict__ in,
    const float* weight, const float* bias, const float* mean, const float* invstd, float* scratch, LAYOUT) {
    const Place place(LAYOUT_ARGUMENTS);
    Gradient gradient;
    gradient.begin(place, weight, bias, mean, invstd, nullptr);
    Pair sums;
    sums.clear();
    if (place.active) {
        get(sums.a, total(scratch, place, 0));
        get(sums.b, total(scratch, place, 1));
    }
    InputGradient input;
    input.begin(sums, place, gradient, invstd);
    for (int step = place.last_step(); step >= 0; step -= splits) {
        const int row = place.row_of(step);
        Access x[UNROLL], grads[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            const i64 at = place.offset_of(row + u * at_once);
            x[u] = load_last(in + at);
            grads[u] = load_last(out_grad + at);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (row + u * at_once >= rows) continue;
            float distance[VECTOR], d[VECTOR];
            const float added[VECTOR] = {};
            x[u].to_floats(distance);
            grads[u].to_floats(d);
            gradient.of(distance, d, added);
            store_last(in_grad + place.offset_of(row + u * at_once), input.of(distance, d));
        }
    }
}
#endif
