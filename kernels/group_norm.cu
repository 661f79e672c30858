// Group norm with its activation in two launches a direction (group_norm.cuh has the layout):
//
//   forward    group_norm_statistics    reads `in`; the last block of a sample's tile adds up the splits, joins groups
//              group_norm_apply         out = activation((in - mean) * invstd * weight + bias + residual)
//   backward   group_norm_sums          d = out_grad * slope of the activation; adds up d, and d * (in - mean)
//              group_norm_gradient      in_grad, of `in` and d
//
// As in batch_norm.cu, the second launch of a direction goes through the rows in reverse, and with a residual d is its
// gradient, stored by the first launch and read by the second.
#include "group_norm.cuh"

#define KERNEL_STATISTICS 0
#define KERNEL_APPLY 1
#define KERNEL_SUMS 2
#define KERNEL_GRADIENT 3

extern __shared__ __align__(16) float shared[];

#if KERNEL == KERNEL_STATISTICS
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_statistics(
    const Element* __restrict__ in, float* mean, float* invstd, const float* eps, u32* zeroed, float* scratch, GROUPS) {
    const Place place(LAYOUT_ARGUMENTS);
    const int sample = SAMPLE;
    in = of_sample(in, sample, place);
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
    add_rows<true>(pair, place, shared);
    if (splits > 1) {
        scratch += sample * sample_floats(place);
        put_partial(pair, place, scratch);
        if (!is_last(place, zeroed + sample * tiles, shared)) return;
        add_splits<true>(pair, place, scratch, shared);
    }
    join_groups<true>(pair, width, place, shared);
    end_moments(pair, width, eps, place);
    store_groups(pair, mean, invstd, sample, width, place);
}
#endif

#if KERNEL == KERNEL_APPLY
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_apply(
    Element* __restrict__ out, const Element* __restrict__ in, const Weight* weight, const Weight* bias,
    const Element* __restrict__ residual, const float* mean, const float* invstd, GROUPS) {
    const Place place(LAYOUT_ARGUMENTS);
    const int sample = SAMPLE;
    out = of_sample(out, sample, place);
    in = of_sample(in, sample, place);
    residual = of_sample(residual, sample, place);
    Pair known;
    load_statistics(known, mean, invstd, sample, width, place);
    Normalise normalise;
    begin_column(normalise, known, weight, bias, sample, place);
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
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_sums(
    Element* __restrict__ residual_grad, Weight* weight_grad, Weight* bias_grad, const Element* __restrict__ out_grad,
    const Element* __restrict__ in, const Weight* weight, const Weight* bias, const Element* __restrict__ residual,
    const float* mean, const float* invstd, u32* zeroed, float* scratch, GROUPS) {
    const Place place(LAYOUT_ARGUMENTS);
    const int sample = SAMPLE;
    residual_grad = of_sample(residual_grad, sample, place);
    out_grad = of_sample(out_grad, sample, place);
    in = of_sample(in, sample, place);
    residual = of_sample(residual, sample, place);
    Pair known;
    load_statistics(known, mean, invstd, sample, width, place);
    Gradient gradient;
    begin_column(gradient, known, weight, bias, sample, place);
    Pair pair;
    pair.clear();
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
                more[u].from_floats(d);
                more[u].store(residual_grad + place.offset_of(row + u * at_once));
            }
        }
    }
    add_rows<false>(pair, place, shared);
    float* const own = scratch + sample * sample_floats(place);
    if (splits > 1) {
        put_partial(pair, place, own);
        if (!is_last(place, zeroed + sample * tiles, shared)) return;
        add_splits<false>(pair, place, own, shared);
    }
    const Samples all = {weight_grad, bias_grad, sample, samples, scratch + samples * sample_floats(place), zeroed + samples * tiles};
    all.give(pair, known, place);
    join_weighted(pair, weight, sample, width, place, shared);
    if (place.row == 0 && place.active) {
        put(total(own, place, 0), pair.a);
        put(total(own, place, 1), pair.b);
    }
    __syncthreads();
    all.end(place, shared);
}
#endif

// With a residual, `out_grad` is the residual's gradient, and nothing is left to do about the activation.
#if KERNEL == KERNEL_GRADIENT
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_gradient(
    Element* __restrict__ in_grad, const Element* __restrict__ out_grad, const Element* __restrict__ in,
    const Weight* weight, const Weight* bias, const float* mean, const float* invstd, float* scratch, GROUPS) {
    const Place place(LAYOUT_ARGUMENTS);
    const int sample = SAMPLE;
    in_grad = of_sample(in_grad, sample, place);
    out_grad = of_sample(out_grad, sample, place);
    in = of_sample(in, sample, place);
    scratch += sample * sample_floats(place);
    Pair known, sums;
    load_statistics(known, mean, invstd, sample, width, place);
    Gradient gradient;
    begin_column(gradient, known, weight, bias, sample, place);
    sums.clear();
    if (place.active) {
        get(sums.a, total(scratch, place, 0));
        get(sums.b, total(scratch, place, 1));
    }
    InputGradient input;
    begin_gradient(input, sums, known, gradient, width, place);
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
