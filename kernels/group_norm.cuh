// Parts of the group norm kernels. A sample is a matrix of pixels by channels, cut as batch_norm.cuh cuts its
// rows and channels; `blockIdx.y` says which sample. A group is `width` neighbouring channels, and a tile has whole
// groups of them:
//
//            tile 0: 3 groups of 40 channels       tile 1
//   pixel 0  [- - - - -|- - - - -|- - - - -]       ...       each `-` is an access, of 8 channels here
//   pixel 1  [- - - - -|- - - - -|- - - - -]
//    ...
//
// so that blocks of different tiles need nothing of each other. The sums of each channel come first, as in batch norm.
// Those of a group's channels are then added in shared memory, as a group may begin or end within an access. The
// gradients of weight and bias are sums over the samples, too.
//
// d is the gradient before the activation, and the distance is that of an element from its group's mean, as in
// batch_norm.cuh. A `Pair` called `known` has the mean (a) and 1 over the standard deviation (b) of a channel's group.
#include "batch_norm.cuh"
#include "norm_weights.cuh"

// Parameters of the kernels: batch norm's (its rows are the pixels of a sample), channels of a group, samples.
#define GROUPS LAYOUT, int width, int samples

// The sample of a block within a tensor of activations; null stays null.
template <typename T>
__device__ __forceinline__ T* of_sample(T* tensor, int sample, const Place& place) {
    return tensor ? tensor + static_cast<i64>(sample) * place.rows * place.channels : tensor;
}

// Floats of `scratch` of a sample: two sums of each split, for each channel. (As many again as one split has are for
// totals in batch norm; nothing uses them here.)
__device__ __forceinline__ i64 sample_floats(const Place& place) { return 2 * static_cast<i64>(place.splits + 1) * place.channels; }

// A column's weights or biases; `absent` where the norm has none.
__device__ __forceinline__ void load_weights(float (&to)[VECTOR], const Weight* from, int sample, const Place& place, float absent) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v)
        to[v] = place.active ? weight_or(absent, from, (ADAPTIVE ? static_cast<i64>(sample) * place.channels : 0) + place.channel + v) : absent;
}

// The mean (a) and 1 over the standard deviation (b) of a column's groups, as forward stored them.
__device__ __forceinline__ void load_statistics(Pair& pair, const float* mean, const float* invstd, int sample, int width, const Place& place) {
    pair.clear();
    const int groups = place.channels / width;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        if (!place.active) continue;
        const i64 at = static_cast<i64>(sample) * groups + (place.channel + v) / width;
        pair.a[v] = mean[at];
        pair.b[v] = invstd[at];
    }
}

// Joins the sums of channels, which row 0 has, to those of their groups, and gives these to all rows: plain sums, or
// MOMENTS (a mean, and a sum of squared distances from it; each channel has `rows` values). `segment` neighbouring
// lanes of a warp go through the channels of a group, and the block has at_once groups in each turn. All threads take
// every turn, as shuffles need whole warps: those without a group have an empty one. A group's sums replace those of
// its first channel.
template <bool MOMENTS>
__device__ __forceinline__ void join_groups(Pair& pair, int width, const Place& place, float* shared) {
    const int tile_channels = place.lanes * VECTOR, own = min(tile_channels, place.channels - place.tile * tile_channels);
    // `own`: channels of this tile, of which the last tile may have fewer.
    const int column = place.lane * VECTOR, rows = place.rows;
    float* const a = shared;
    float* const b = shared + tile_channels;
    __syncthreads();
    if (place.row == 0) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            a[column + v] = pair.a[v];
            b[column + v] = pair.b[v];
        }
    }
    __syncthreads();
    int segment = 1;
    while (segment < width && segment < 32) segment *= 2;
    const int at_once = blockDim.x / segment, member = threadIdx.x % segment;
    for (int group = threadIdx.x / segment, turn = 0; turn * at_once * width < own; ++turn, group += at_once) {
        const int begin = group * width, end = begin < own ? begin + width : begin;
        float first = 0.0f, second = 0.0f;
        for (int i = begin + member; i < end; i += segment) first += a[i];
        for (int lanes = segment / 2; lanes > 0; lanes /= 2) first += __shfl_xor_sync(~0u, first, lanes);
        const float mean = MOMENTS ? first / static_cast<float>(width) : first;  // or the first of two plain sums
        for (int i = begin + member; i < end; i += segment) {
            const float apart = a[i] - mean;  // `add` of batch_norm.cuh, for channels of equally many values
            second += MOMENTS ? b[i] + static_cast<float>(rows) * (apart * apart) : b[i];
        }
        for (int lanes = segment / 2; lanes > 0; lanes /= 2) second += __shfl_xor_sync(~0u, second, lanes);
        __syncwarp();
        if (member == 0 && begin < own) {
            a[begin] = mean;
            b[begin] = second;
        }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        const int begin = place.active ? (column + v) / width * width : 0;
        pair.a[v] = a[begin];
        pair.b[v] = b[begin];
    }
}

// The second moment of groups, which join_groups left in `b`, becomes 1 over their standard deviation; `a` is their
// mean.
__device__ __forceinline__ void end_moments(Pair& pair, int width, float eps, const Place& place) {
    const float count = static_cast<float>(place.rows) * static_cast<float>(width);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) pair.b[v] = inverse_deviation(pair.b[v] / count, eps);
}

// Stores the statistics of a tile's groups (a: mean, b: invstd), each by the thread of its first channel.
__device__ __forceinline__ void store_groups(const Pair& pair, float* mean, float* invstd, int sample, int width, const Place& place) {
    if (place.row != 0 || !place.active) return;
    const int groups = place.channels / width;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        if ((place.channel + v) % width) continue;
        const i64 at = static_cast<i64>(sample) * groups + (place.channel + v) / width;
        mean[at] = pair.a[v];
        invstd[at] = pair.b[v];
    }
}

// Parameters of a column, a Normalise or a Gradient: first its weight and bias, and then its groups' statistics, too.
template <typename T>
__device__ __forceinline__ void begin_column(T& column, const Weight* weight, const Weight* bias, int sample, const Place& place) {
    load_weights(column.scale, weight, sample, place, 1.0f);
    load_weights(column.offset, bias, sample, place, 0.0f);
}
template <typename T>
__device__ __forceinline__ void end_column(T& column, const Pair& known) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        column.centre[v] = known.a[v];
        column.scale[v] = __fmul_rn(column.scale[v], known.b[v]);
    }
}

// Stores a column's gradients of bias and weight, which row 0 has: the sums of d, and of d times the normalised value.
// `first` is the first element of the sample, if each has a weight of its own, or 0.
__device__ __forceinline__ void store_weights(const Pair& sums, Weight* weight_grad, Weight* bias_grad, i64 first, const Place& place) {
    if (place.row != 0 || !place.active) return;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        if (weight_grad) weight_grad[first + place.channel + v] = weight_from_float(sums.b[v]);
        if (bias_grad) bias_grad[first + place.channel + v] = weight_from_float(sums.a[v]);
    }
}

// The gradients of weight and bias are sums over the samples. One block of each sample and tile stores the sums of its
// channels, which row 0 has (`give`). The last of these blocks to come to `end` adds up those of all samples. If each
// sample has a weight of its own (ADAPTIVE), or there is one sample, `give` stores the gradients themselves. `scratch`
// and `tickets` begin behind those that samples have for their splits.
struct Samples {
    Weight *weight_grad, *bias_grad;
    int sample, samples;
    float* scratch;
    u32* tickets;

    __device__ __forceinline__ Place place_of(const Place& place) const {
        Place all = place;  // the samples in place of splits; its rows_of means nothing, and plain sums ignore it
        all.splits = samples;
        all.split = sample;
        return all;
    }
    __device__ __forceinline__ void give(Pair sums, const Pair& known, const Place& place) const {
        if (!weight_grad) return;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sums.b[v] *= known.b[v];  // a distance times invstd is the normalised value
        if (ADAPTIVE || samples == 1) store_weights(sums, weight_grad, bias_grad, static_cast<i64>(sample) * place.channels, place);
        else put_partial(sums, place_of(place), scratch);
    }
    __device__ __forceinline__ void end(const Place& place, float* shared) const {
        if (!weight_grad || ADAPTIVE || samples == 1) return;
        const Place all = place_of(place);
        if (!is_last(all, tickets, shared)) return;
        Pair sums;
        add_splits<false>(sums, all, scratch, shared);
        store_weights(sums, weight_grad, bias_grad, 0, place);
    }
};

// Turns the sums of a tile's channels into those of its groups: of weight * d, and of weight * d * distance.
__device__ __forceinline__ void join_weighted(Pair& pair, const Weight* weight, int sample, int width, const Place& place, float* shared) {
    float factor[VECTOR];
    load_weights(factor, weight, sample, place, 1.0f);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        pair.a[v] *= factor[v];
        pair.b[v] *= factor[v];
    }
    join_groups<false>(pair, width, place, shared);
}

// The input's gradient, given the sums of a column's groups: in_grad = scale * d - constant - distance * factor, where
// scale = weight * invstd, constant = invstd * mean of (weight * d), and factor = invstd^3 * mean of (weight * d *
// distance).
__device__ __forceinline__ void begin_gradient(InputGradient& input, const Pair& sums, const Pair& known, const Gradient& gradient, int width,
                                               const Place& place) {
    const float share = 1.0f / (static_cast<float>(place.rows) * static_cast<float>(width));
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        input.scale[v] = gradient.scale[v];
        input.constant[v] = known.b[v] * (sums.a[v] * share);
        input.factor[v] = known.b[v] * (known.b[v] * known.b[v]) * (sums.b[v] * share);
    }
}
