// Parts of the group norm kernels. A sample is a matrix of pixels by channels, cut as batch_norm.cuh cuts its
// rows and channels; `blockIdx.y` says which sample. A group is `width` neighbouring channels, and a tile has whole
// groups of them:
//
//            tile 0: 3 groups of 40 channels       tile 1
//   pixel 0  [- - - - -|- - - - -|- - - - -]       ...       an access is 8 channels here, so the sums of a channel come
//   pixel 1  [- - - - -|- - - - -|- - - - -]                 first, as in batch norm, and then those of a group, in
//    ...                                                     shared memory: groups need not fit accesses
//
// so that blocks of different tiles have nothing to say to each other. Weights' gradients are sums over the samples.
#include "batch_norm.cuh"
#include "norm_weights.cuh"

#define GROUPS LAYOUT, int width, int samples

// The sample of a block within a tensor of activations; null stays null.
template <typename T>
__device__ __forceinline__ T* of_sample(T* tensor, int sample, const Place& place) {
    return tensor ? tensor + static_cast<i64>(sample) * place.rows * place.channels : tensor;
}

// Floats of `scratch` of a sample: partial sums of the splits, and the two sums of all of them.
__device__ __forceinline__ i64 sample_floats(const Place& place) { return 2 * static_cast<i64>(place.splits + 1) * place.channels; }

// A column's parameters.
__device__ __forceinline__ void load_weights(float (&to)[VECTOR], const Weight* from, int sample, const Place& place, float absent) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v)
        to[v] = place.active ? weight_or(absent, from, (ADAPTIVE ? static_cast<i64>(sample) * place.channels : 0) + place.channel + v) : absent;
}

// The mean and 1 over the deviation of a column's groups, as forward stored them.
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

// Joins the sums of channels, which row 0 has, to those of their groups, for all rows: their moments, or plain sums.
// `segment` neighbouring lanes of a warp have a group, and go through its channels.
template <bool MOMENTS>
__device__ __forceinline__ void join_groups(Pair& pair, int width, const Place& place, float* shared) {
    const int tile_channels = place.lanes * VECTOR, own = min(tile_channels, place.channels - place.tile * tile_channels);
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
        const float mean = MOMENTS ? first / static_cast<float>(width) : first;
        for (int i = begin + member; i < end; i += segment) {
            const float apart = a[i] - mean;
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

// Makes the joined moments of groups their mean and 1 over their deviation.
__device__ __forceinline__ void end_moments(Pair& pair, int width, float eps, const Place& place) {
    const float count = static_cast<float>(place.rows) * static_cast<float>(width);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) pair.b[v] = inverse_deviation(pair.b[v] / count, eps);
}

// Stores the statistics of a tile's groups, each by the thread of its first channel.
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

// Parameters of a column: its weights, and then its groups' statistics, too.
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

// A column's sums of d and of d times the distance from the mean, as the gradients of bias and weight.
__device__ __forceinline__ void store_weights(const Pair& sums, Weight* weight_grad, Weight* bias_grad, i64 first, const Place& place) {
    if (place.row != 0 || !place.active) return;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        if (weight_grad) weight_grad[first + place.channel + v] = weight_from_float(sums.b[v]);
        if (bias_grad) bias_grad[first + place.channel + v] = weight_from_float(sums.a[v]);
    }
}

// The gradients of weight and bias are sums over the samples: each sample of a tile gives the sums of its channels, which
// row 0 has, and the last one to come adds up what all gave. `scratch` and `tickets` are those of no sample.
struct Samples {
    Weight *weight_grad, *bias_grad;
    int sample, samples;
    float* scratch;
    u32* tickets;

    __device__ __forceinline__ Place place_of(const Place& place) const {
        Place all = place;  // the samples in place of splits
        all.splits = samples;
        all.split = sample;
        return all;
    }
    __device__ __forceinline__ void give(Pair sums, const Pair& known, const Place& place) const {
        if (!weight_grad) return;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sums.b[v] *= known.b[v];
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

// Turns the sums of a tile's channels into those of its groups: of w * d, and of w * d times the distance.
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

// The input's gradient, given the sums of a column's groups: in_grad = scale * d - constant - distance * factor.
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
