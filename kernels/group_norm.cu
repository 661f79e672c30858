// Group norm with its activation in one launch a direction (group_norm.cuh has the layout). The blocks that share a
// sample's tile go over their rows twice, and wait for one another in between, where they add up their sums. The
// elements of a block's first `kept` steps stay in shared memory for the second loop, as batch_norm_one_pass.cu draws
// it. A tile of one block waits for none. Others meet
//
//   CLUSTER 0   in device memory, so that all blocks of the launch must be running;
//   CLUSTER n   in each other's shared memory: the n blocks of a tile are a cluster, which the hardware starts together
//               on neighbouring multiprocessors. A launch may have any number of clusters, one after the other.
//
//   forward    out = activation((in - mean) * invstd * weight + bias + residual)
//   backward   d = out_grad * slope of the activation, and with it
//              in_grad = invstd * (weight * d - mean of (weight * d)
//                                  - (in - mean) * invstd^2 * mean of (weight * d * (in - mean)))
//
// where all means, and invstd, are of a sample's group of channels.
//
// Compile-time: BACKWARD, DTYPE, ACTIVATION, HAS_RESIDUAL, ADAPTIVE (each sample has a weight and a bias of its own),
// OWN_WEIGHTS (weights in DTYPE), STREAM (tensors of more than 32 MiB, of which an L2 cache keeps little), and of the
// config VECTOR, UNROLL, THREADS, MIN_BLOCKS (that a multiprocessor must hold), CLUSTER. FROZEN, which batch_norm.cuh
// asks for, is 0.
//
// Parts:
//   block   a tile of columns and a split of the rows of one sample; batch_norm.cuh draws tiles and splits,
//           group_norm.cuh the groups in a tile
//   thread  one column of VECTOR channels, of which it has every at_once-th row
//
// Bound: bytes, those of the floor where the rows of each block fit its shared memory. Else up to 3/2 of them forward
// and 5/3 backward (with a residual 4/3 and 7/5), as the second loop reads again.
//
// Instructions: clusters (sm_90 on) let blocks read each other's sums in shared memory (mapa), instead of through
// device memory. Counters in device memory are for older devices, and for tiles of more blocks than a cluster may have.
//
// Share of the floor:
//   group_norm on NVIDIA H200, 2026-11-27
//      28% of bytes: n=2 p=28160 c=96 groups=96 dtype=bfloat16 activation=relu affine=none
//      47% of bytes: n=1 p=65536 c=320 groups=32 activation=silu
//      55% of bytes: n=8 p=65536 c=160 groups=32 activation=silu weights=float16
//   group_norm_backward on NVIDIA H200, 2026-11-27
//      45% of bytes: n=2 p=16384 c=960 groups=32 dtype=bfloat16 activation=silu direction=backward
//      51% of bytes: n=1 p=262144 c=96 groups=96 dtype=bfloat16 direction=backward
//      56% of bytes: n=1 p=2097152 c=64 groups=64 direction=backward weights=float16
#include "group_norm.cuh"

extern __shared__ __align__(16) float shared[];

#if CLUSTER
#define TOGETHER __cluster_dims__(1, 1, CLUSTER)
#else
#define TOGETHER
#endif

__device__ __forceinline__ Place place_of_block(LAYOUT) {
    Place place(LAYOUT_ARGUMENTS);
    if (CLUSTER) place.split = blockIdx.z;  // clusters lie along z; else blockIdx.x counts tiles and splits
    return place;
}

// How the blocks of a sample's tile show one another their sums: all threads of each call `give`, `take` and `leave`,
// once and in this order. Where a tile has one block, nobody calls them.
struct Meeting {
    const Place& place;
    float* sums;  // of this block, in its shared memory, or of all blocks, in device memory
    u32* counts;  // of the blocks that have given, and of those that have left; zero before and afterwards

    __device__ __forceinline__ Meeting(const Place& place, int sample, float* scratch, u32* zeroed)
        : place(place),
          sums(CLUSTER ? shared + SUM_FLOATS : scratch + sample * sample_floats(place)),
          counts(zeroed + 2 * (sample * place.tiles + place.tile)) {}

    // Floats of shared memory that `sums` takes, in 16-byte units, so that what lies behind is aligned.
    __device__ __forceinline__ static int floats(const Place& place) { return CLUSTER ? (2 * VECTOR * place.lanes + 3) / 4 * 4 : 0; }

    // Shows the sums that row 0 has.
    __device__ __forceinline__ void give(const Pair& pair) const {
#if CLUSTER
        if (place.row == 0) {
            put(sums + VECTOR * place.lane, pair.a);
            put(sums + VECTOR * (place.lanes + place.lane), pair.b);
        }
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#else
        put_partial(pair, place, sums);
        if (threadIdx.x == 0) atomicAdd(counts, 1u);
#endif
    }

    // Waits for all, and leaves the sums of all with row 0.
    template <bool MOMENTS>
    __device__ __forceinline__ void take(Pair& pair) const {
#if CLUSTER
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
        pair.clear();
        for (int split = place.active ? place.row : CLUSTER; split < CLUSTER; split += place.at_once) {
            Pair other;
            other.count = static_cast<float>(place.rows_of(split));
            look(other.a, VECTOR * place.lane, split);
            look(other.b, VECTOR * (place.lanes + place.lane), split);
            add<MOMENTS>(pair, other);
        }
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
        add_rows<MOMENTS>(pair, place, shared);
#else
        if (threadIdx.x == 0) {
            while (*static_cast<volatile u32*>(counts) < static_cast<u32>(place.splits)) {}
            __threadfence();
        }
        __syncthreads();
        add_splits<MOMENTS>(pair, place, sums, shared);
#endif
    }

    // Waits until the whole cluster has read the sums, as a block's shared memory ends with it. Without a cluster
    // nothing is waited for: the last block to leave makes the first count zero again; the second one wraps around by
    // itself.
    __device__ __forceinline__ void leave() const {
#if CLUSTER
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
        if (threadIdx.x == 0 && atomicInc(counts + 1, place.splits - 1) == place.splits - 1) *static_cast<volatile u32*>(counts) = 0u;
#endif
    }

#if CLUSTER
    // Reads VECTOR floats, from `at` on, of the sums that the block of a split shows.
    __device__ __forceinline__ void look(float (&to)[VECTOR], int at, int split) const {
        u32 from;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(static_cast<u32>(__cvta_generic_to_shared(sums + at))), "r"(split));
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(to[v]) : "r"(from + 4 * v) : "memory");
    }
#endif
};

// A thread's accesses of kept steps: TENSORS of them for each row of a step. They lie in shared memory behind the
// SUM_FLOATS floats, in which a block's sums meet, and those of `Meeting`.
template <int TENSORS>
struct Kept {
    int steps;
    float* memory;

    __device__ __forceinline__ Kept(int steps, const Place& place) : steps(steps), memory(shared + SUM_FLOATS + Meeting::floats(place)) {}

    __device__ __forceinline__ Access& at(int step, int u, int tensor) const {
        return reinterpret_cast<Access*>(memory)[((step * UNROLL + u) * TENSORS + tensor) * THREADS + threadIdx.x];
    }
};

#if !BACKWARD
extern "C" __global__ void TOGETHER __launch_bounds__(THREADS, MIN_BLOCKS) group_norm(
    Element* __restrict__ out, const Element* __restrict__ in, const Weight* weight, const Weight* bias,
    const Element* __restrict__ residual, float* mean, float* invstd, const float* eps, u32* zeroed, float* scratch,
    GROUPS, int kept) {
    const Place place = place_of_block(LAYOUT_ARGUMENTS);
    const Kept<1> keep(kept, place);
    const int sample = blockIdx.y;
    out = of_sample(out, sample, place);
    in = of_sample(in, sample, place);
    residual = of_sample(residual, sample, place);
    Distances distances = {};
    int own = 0;  // this block's steps so far
    for (int step = place.first_step(); step < steps; step += splits, ++own) {
        const int row = place.row_of(step);
        Access x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (row + u * at_once < rows) x[u].load(in + place.offset_of(row + u * at_once));
        if (own == 0 && row < rows) x[0].to_floats(distances.first);  // Distances::begin would read it twice
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
    const Meeting meeting(place, sample, scratch, zeroed);
    if (splits > 1) meeting.give(pair);
    Normalise normalise;  // its weights come while the others are waited for
    begin_column(normalise, weight, bias, sample, place);
    const float epsilon = *eps;
    if (splits > 1) meeting.take<true>(pair);
    join_groups<true>(pair, width, place, shared);
    end_moments(pair, width, epsilon, place);
    if (place.split == 0) store_groups(pair, mean, invstd, sample, width, place);
    end_column(normalise, pair);
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
    if (splits > 1) meeting.leave();
}
#else

// With a residual, the gradient before the activation, d, is the residual's gradient: the first loop stores it, rounded
// to DTYPE, and the second one uses that, kept or read. Otherwise out_grad is kept or read again, and the second loop
// makes d of it anew.
extern "C" __global__ void TOGETHER __launch_bounds__(THREADS, MIN_BLOCKS) group_norm_backward(
    Element* __restrict__ in_grad, Element* residual_grad, Weight* weight_grad, Weight* bias_grad,
    const Element* __restrict__ out_grad, const Element* __restrict__ in, const Weight* weight, const Weight* bias,
    const Element* __restrict__ residual, const float* mean, const float* invstd, u32* zeroed, float* scratch,
    GROUPS, int kept) {
    const Place place = place_of_block(LAYOUT_ARGUMENTS);
    const Kept<2> keep(kept, place);
    const int sample = blockIdx.y;
    in_grad = of_sample(in_grad, sample, place);
    residual_grad = of_sample(residual_grad, sample, place);
    out_grad = of_sample(out_grad, sample, place);
    in = of_sample(in, sample, place);
    residual = of_sample(residual, sample, place);
    Pair known, pair;
    load_statistics(known, mean, invstd, sample, width, place);
    Gradient gradient;
    begin_column(gradient, weight, bias, sample, place);
    end_column(gradient, known);
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
    const Meeting meeting(place, sample, scratch, zeroed);
    if (splits > 1) {
        meeting.give(pair);
        meeting.take<false>(pair);
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
    if (splits > 1) meeting.leave();
    __syncthreads();  // all threads have read the groups' sums from shared memory
    if (place.split == 0) all.end(place, shared);
}
#endif
