// Group norm with its activation in one launch a direction for some samples (group_norm.cuh has the layout): the blocks
// of a sample's tile wait for one another between the statistics and the second pass over their rows, and keep the
// elements of their first `kept` steps in shared memory, as batch_norm_one_pass.cu draws it. A tile of one block waits
// for none, so that any number of samples is in a launch.
#include "group_norm.cuh"

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
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) group_norm_one_pass(
    Element* __restrict__ out, const Element* __restrict__ in, const Weight* weight, const Weight* bias,
    const Element* __restrict__ residual, float* mean, float* invstd, const float* eps, u32* zeroed, float* scratch,
    GROUPS, int kept) {
    const Place place(LAYOUT_ARGUMENTS);
    const Kept<1> keep = {kept};
    const int sample = SAMPLE;
    out = of_sample(out, sample, place);
    in = of_sample(in, sample, place);
    residual = of_sample(residual, sample, place);
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
        scratch += sample * sample_floats(place);
        put_partial(pair, place, scratch);
        meet(place, zeroed + 2 * sample * tiles);
        add_splits<true>(pair, place, scratch, shared);
    }
    join_groups<true>(pair, width, place, shared);
    end_moments(pair, width, eps, place);
    if (place.split == 0) store_groups(pair, mean, invstd, sample, width, place);
    Normalise normalise;
    begin_column(normalise, pair, weight, bias, sample, place);
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
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) group_norm_one_pass_backward(
    Element* __restrict__ in_grad, Element* residual_grad, Weight* weight_grad, Weight* bias_grad,
    const Element* __restrict__ out_grad, const Element* __restrict__ in, const Weight* weight, const Weight* bias,
    const Element* __restrict__ residual, const float* mean, const float* invstd, u32* zeroed, float* scratch,
    GROUPS, int kept) {
    const Place place(LAYOUT_ARGUMENTS);
    const Kept<2> keep = {kept};
    const int sample = SAMPLE;
    in_grad = of_sample(in_grad, sample, place);
    residual_grad = of_sample(residual_grad, sample, place);
    out_grad = of_sample(out_grad, sample, place);
    in = of_sample(in, sample, place);
    residual = of_sample(residual, sample, place);
    Pair known, pair;
    load_statistics(known, mean, invstd, sample, width, place);
    Gradient gradient;
    begin_column(gradient, known, weight, bias, sample, place);
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
        float* const partials = scratch + sample * sample_floats(place);
        put_partial(pair, place, partials);
        meet(place, zeroed + 2 * sample * tiles);
        add_splits<false>(pair, place, partials, shared);
    }
    const Samples all = {weight_grad, bias_grad, sample, samples, scratch + samples * sample_floats(place), zeroed + 2 * samples * tiles};
    if (place.split == 0) all.give(pair, known, place);
    join_weighted(pair, weight, sample, width, place, shared);
    InputGradient input;
    begin_gradient(input, pair, known, gradient, width, place);
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
    __syncthreads();
    if (place.split == 0) all.end(place, shared);
}
#endif
