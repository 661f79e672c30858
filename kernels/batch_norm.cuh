// Parts that the batch norm kernels share. Activations are a matrix of `rows` (images times pixels) by `channels`.
//
// A thread accesses VECTOR neighbouring channels at once, a column. The columns are cut into `tiles`, the rows into
// `splits`, and a block has one of each. Its threads lie flat over `at_once` rows of the `lanes` columns of its tile:
//
//            tile 0 (18 lanes)       tile 1             THREADS = 256, at_once = 256 / 18 = 14
//   row 0    [t0  t1  ...   t17]     (another block)
//   row 1    [t18 t19 ...   t35]                        a step is UNROLL times at_once rows: as many loads
//    ...                                                of a thread are under way together
//   row 13   [t234 ...     t251]                        steps go to the splits in turns
//
// so that any number of channels leaves few threads idle. A thread keeps its column, and sums in registers. Sums of a
// block meet in shared memory, those of the splits in device memory (`scratch` of the kernels, `partials` here); both
// are added up in an order that never changes.
//
// Names: d is the gradient before the activation; the distance is in - mean; invstd, and `deviation` in the code, is
// 1 / sqrt(variance + eps).
#include "depthwise.cuh"

typedef Vector<VECTOR> Access;
constexpr int HALF_THREADS = THREADS / 2;
// Floats of shared memory in which the sums of a block meet: half of the threads hand their sums to the others.
enum { SUM_FLOATS = (2 * VECTOR + 1) * HALF_THREADS };
static_assert(SUM_FLOATS * sizeof(float) == HOST_SUM_BYTES, "the host sizes shared memory otherwise");

// Parameters of every kernel: the members of `Place` that are the same for all threads.
#define LAYOUT int rows, int channels, int lanes, int tiles, int at_once, int steps, int splits
#define LAYOUT_ARGUMENTS rows, channels, lanes, tiles, at_once, steps, splits

// Where a thread is. It has rows `row + u * at_once` of a step; one without a column has no step.
struct Place {
    int rows, channels, lanes, tiles, at_once, steps, splits;
    int tile, split, lane, row, channel;
    bool active;

    __device__ __forceinline__ Place(LAYOUT)
        : rows(rows), channels(channels), lanes(lanes), tiles(tiles), at_once(at_once), steps(steps), splits(splits) {
        tile = blockIdx.x % tiles;
        split = blockIdx.x / tiles;
        row = threadIdx.x / lanes;
        lane = threadIdx.x % lanes;
        channel = (tile * lanes + lane) * VECTOR;
        active = row < at_once && channel < channels;
    }
    __device__ __forceinline__ int first_step() const { return active ? split : steps; }
    __device__ __forceinline__ int last_step() const { return active ? split + (steps - 1 - split) / splits * splits : -1; }
    __device__ __forceinline__ int row_of(int step) const { return step * (UNROLL * at_once) + row; }
    __device__ __forceinline__ i64 offset_of(int row) const { return static_cast<i64>(row) * channels + channel; }
    // Rows of all steps of a split.
    __device__ __forceinline__ int rows_of(int split) const {
        const int step_rows = UNROLL * at_once, own = (steps - 1 - split) / splits + 1;
        return own * step_rows - ((steps - 1) % splits == split ? steps * step_rows - rows : 0);
    }
};

// The last access to an element. STREAM: the tensors have more than 32 MiB, of which an L2 cache keeps little. Then
// what is not read again should leave the caches first.
__device__ __forceinline__ Access load_last(const Element* from) {
    Access found;
    if (STREAM) found.bits = __ldcs(reinterpret_cast<const Access::Bits*>(from));
    else found.load(from);
    return found;
}
__device__ __forceinline__ void store_last(Element* to, const Access& value) {
    if (STREAM) __stcs(reinterpret_cast<Access::Bits*>(to), value.bits);
    else value.store(to);
}

// VECTOR floats, four at a time where VECTOR allows. They are read past the L1 cache, which does not see what other
// blocks store. (% VECTOR keeps indices legal in the branch that fewer floats never take.)
__device__ __forceinline__ void put(float* to, const float (&values)[VECTOR]) {
#pragma unroll
    for (int v = 0; v < VECTOR; v += VECTOR % 4 ? 1 : 4) {
        if (VECTOR % 4) to[v] = values[v];
        else *reinterpret_cast<float4*>(to + v) = make_float4(values[v], values[(v + 1) % VECTOR], values[(v + 2) % VECTOR], values[(v + 3) % VECTOR]);
    }
}
__device__ __forceinline__ void get(float (&values)[VECTOR], const float* from) {
#pragma unroll
    for (int v = 0; v < VECTOR; v += VECTOR % 4 ? 1 : 4) {
        if (VECTOR % 4) {
            values[v] = __ldcg(from + v);
        } else {
            const float4 four = __ldcg(reinterpret_cast<const float4*>(from + v));
            values[v] = four.x;
            values[(v + 1) % VECTOR] = four.y;
            values[(v + 2) % VECTOR] = four.z;
            values[(v + 3) % VECTOR] = four.w;
        }
    }
}

// A column's part of a tensor of one float a channel; `absent` where there is no such tensor.
__device__ __forceinline__ void load_column(float (&to)[VECTOR], const float* from, const Place& place, float absent) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) to[v] = absent;
    if (from && place.active) get(to, from + place.channel);
}

__device__ __forceinline__ float inverse_deviation(float variance, float eps) { return rsqrtf(variance + eps); }

// The activation's argument, in an order of roundings that the reference repeats, so that both decide alike where the
// slope jumps.
__device__ __forceinline__ float argument(float centred, float scale, float offset) { return __fmaf_rn(centred, scale, offset); }

template <int KIND>
__device__ __forceinline__ float slope(float z) {
    if (KIND == ACTIVATION_RELU) return z <= 0.0f ? 0.0f : 1.0f;
    if (KIND == ACTIVATION_SILU) {
        const float s = __fdividef(1.0f, 1.0f + __expf(-z));
        return s + s * (z - z * s);
    }
    if (KIND == ACTIVATION_GELU) return 0.5f + 0.5f * erff(z * 0.70710678118654752f) + z * (0.39894228040143268f * __expf(-0.5f * z * z));
    if (KIND == ACTIVATION_RELU6) return z <= 0.0f || z >= 6.0f ? 0.0f : 1.0f;
    if (KIND == ACTIVATION_HARDSWISH) return z <= -3.0f ? 0.0f : z < 3.0f ? z * (1.0f / 3.0f) + 0.5f : 1.0f;
    return 1.0f;
}

// Two sums for each channel of a column. As moments: the mean (a) of `count` values, and the sum of the squares of
// their distances from it (b), which loses no digits however far the mean is from zero. Kernels also keep a mean (a)
// and invstd (b) in a Pair.
struct Pair {
    float count, a[VECTOR], b[VECTOR];

    __device__ __forceinline__ void clear() {
        count = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) a[v] = b[v] = 0.0f;
    }
};

// Adds y to x, as moments or as plain sums. Moments: Chan, Golub and LeVeque, "Updating formulae and a pairwise
// algorithm for computing sample variances", 1979.
template <bool MOMENTS>
__device__ __forceinline__ void add(Pair& x, const Pair& y) {
    const float total = x.count + y.count;
    const float share = total > 0.0f ? y.count / total : 0.0f;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        if (MOMENTS) {
            const float apart = y.a[v] - x.a[v];
            x.a[v] += apart * share;
            x.b[v] += y.b[v] + apart * apart * (x.count * share);
        } else {
            x.a[v] += y.a[v];
            x.b[v] += y.b[v];
        }
    }
    x.count = total;
}

// Leaves the sums over a block's rows with the threads of row 0. In each turn the rows from `half` on hand their sums
// to those `half` rows before them. Values of a thread lie HALF_THREADS floats apart, so that neighbouring threads meet
// no bank twice.
template <bool MOMENTS>
__device__ __forceinline__ void add_rows(Pair& pair, const Place& place, float* shared) {
    int half = 1;
    while (2 * half < place.at_once) half *= 2;
    for (half = place.at_once > 1 ? half : 0; half > 0; half /= 2) {
        const int given = place.row - half;
        __syncthreads();
        if (given >= 0 && given < half && place.row < place.at_once) {
            float* const to = shared + given * place.lanes + place.lane;
            to[2 * VECTOR * HALF_THREADS] = pair.count;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                to[v * HALF_THREADS] = pair.a[v];
                to[(VECTOR + v) * HALF_THREADS] = pair.b[v];
            }
        }
        __syncthreads();
        if (place.row < half && place.row + half < place.at_once) {
            const float* const from = shared + place.row * place.lanes + place.lane;
            Pair other;
            other.count = from[2 * VECTOR * HALF_THREADS];
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                other.a[v] = from[v * HALF_THREADS];
                other.b[v] = from[(VECTOR + v) * HALF_THREADS];
            }
            add<MOMENTS>(pair, other);
        }
    }
}

// Gives what row 0 has to all rows.
__device__ __forceinline__ void share_rows(Pair& pair, const Place& place, float* shared) {
    if (place.at_once == 1) return;
    __syncthreads();
    if (place.row == 0) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            shared[v * HALF_THREADS + place.lane] = pair.a[v];
            shared[(VECTOR + v) * HALF_THREADS + place.lane] = pair.b[v];
        }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        pair.a[v] = shared[v * HALF_THREADS + place.lane];
        pair.b[v] = shared[(VECTOR + v) * HALF_THREADS + place.lane];
    }
}

// `partials` are (2, splits, channels); behind them the two sums of all splits.
__device__ __forceinline__ float* partial(float* partials, const Place& place, int which, int split) {
    return partials + (static_cast<i64>(which) * place.splits + split) * place.channels + place.channel;
}
__device__ __forceinline__ float* total(float* partials, const Place& place, int which) {
    return partials + (2 * static_cast<i64>(place.splits) + which) * place.channels + place.channel;
}

// Stores a split's sums, which row 0 has. Blocks that learn afterwards, by a counter, that this one came here see them.
__device__ __forceinline__ void put_partial(const Pair& pair, const Place& place, float* partials) {
    if (place.row == 0 && place.active) {
        put(partial(partials, place, 0, place.split), pair.a);
        put(partial(partials, place, 1, place.split), pair.b);
    }
    __threadfence();
    __syncthreads();
}

// Leaves the sums of all splits with row 0.
template <bool MOMENTS>
__device__ __forceinline__ void add_splits(Pair& pair, const Place& place, float* partials, float* shared) {
    pair.clear();
#pragma unroll 4
    for (int split = place.active ? place.row : place.splits; split < place.splits; split += place.at_once) {
        Pair other;
        other.count = static_cast<float>(place.rows_of(split));
        get(other.a, partial(partials, place, 0, split));
        get(other.b, partial(partials, place, 1, split));
        add<MOMENTS>(pair, other);
    }
    add_rows<MOMENTS>(pair, place, shared);
}

// Whether this block is the last one of its tile to come here; the tickets are zero again afterwards.
__device__ __forceinline__ bool is_last(const Place& place, u32* tickets, float* shared) {
    if (threadIdx.x == 0) shared[0] = atomicInc(tickets + place.tile, place.splits - 1) == place.splits - 1 ? 1.0f : 0.0f;
    __syncthreads();
    const bool last = shared[0] == 1.0f;
    __threadfence();
    return last;
}

// Waits for all blocks of the tile, which must be running. `counts` has two words a tile: how many have come, and how
// many have gone on; the last one to go leaves both zero.
__device__ __forceinline__ void meet(const Place& place, u32* counts) {
    if (threadIdx.x == 0) {
        u32* const come = counts + 2 * place.tile;
        atomicAdd(come, 1u);
        while (*static_cast<volatile u32*>(come) < static_cast<u32>(place.splits)) {}
        if (atomicInc(come + 1, place.splits - 1) == place.splits - 1) *static_cast<volatile u32*>(come) = 0u;
        __threadfence();
    }
    __syncthreads();
}

// Moments of the values that a thread meets in its column: distances from the thread's first value are added up, which
// loses few digits where the mean is far from zero.
struct Distances {
    int count;
    float first[VECTOR], sum[VECTOR], squares[VECTOR];

    __device__ __forceinline__ void begin(const Element* in, const Place& place) {
        count = 0;
        Access access = {};
        const int row = place.row_of(place.split);
        if (place.active && row < place.rows) access.load(in + place.offset_of(row));
        access.to_floats(first);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sum[v] = squares[v] = 0.0f;
    }
    __device__ __forceinline__ void add(const Access& access) {
        float x[VECTOR];
        access.to_floats(x);
        ++count;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            const float apart = x[v] - first[v];
            sum[v] += apart;
            squares[v] += apart * apart;
        }
    }
    __device__ __forceinline__ void end(Pair& pair) const {
        pair.count = static_cast<float>(count);
        const float share = count ? 1.0f / pair.count : 0.0f;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            const float mean = sum[v] * share;
            pair.a[v] = first[v] + mean;
            pair.b[v] = fmaxf(squares[v] - sum[v] * mean, 0.0f);
        }
    }
};

// Stores a tile's statistics, which row 0 has as moments, and the running ones as PyTorch updates them.
#define STATISTICS                                                                                              \
    float *mean, float *invstd, float *new_running_mean, float *new_running_var, const float *running_mean,    \
        const float *running_var, const float *eps, const float *momentum
#define STATISTICS_ARGUMENTS mean, invstd, new_running_mean, new_running_var, running_mean, running_var, eps, momentum
__device__ __forceinline__ void store_statistics(const Pair& pair, const Place& place, STATISTICS) {
    if (place.row != 0 || !place.active) return;
    const float count = static_cast<float>(place.rows), factor = new_running_mean ? *momentum : 0.0f;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        const int at = place.channel + v;
        mean[at] = pair.a[v];
        invstd[at] = inverse_deviation(pair.b[v] / count, *eps);
        if (!new_running_mean) continue;  // a layer without running statistics
        new_running_mean[at] = (1.0f - factor) * running_mean[at] + factor * pair.a[v];
        new_running_var[at] = (1.0f - factor) * running_var[at] + factor * (pair.b[v] / (count - 1.0f));
    }
}

// A column of the forward pass, given its statistics.
struct Normalise {
    float centre[VECTOR], scale[VECTOR], offset[VECTOR];

    __device__ __forceinline__ void begin(const Pair& mean_and_invstd, const Place& place, const float* weight, const float* bias) {
        load_column(scale, weight, place, 1.0f);
        load_column(offset, bias, place, 0.0f);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            centre[v] = mean_and_invstd.a[v];
            scale[v] = __fmul_rn(scale[v], mean_and_invstd.b[v]);
        }
    }
    __device__ __forceinline__ Access of(const Access& in, const Access& residual) const {
        float x[VECTOR], more[VECTOR];
        in.to_floats(x);
        if (HAS_RESIDUAL) residual.to_floats(more);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            float z = argument(x[v] - centre[v], scale[v], offset[v]);
            if (HAS_RESIDUAL) z += more[v];
            x[v] = activate<ACTIVATION>(z);
        }
        Access out;
        out.from_floats(x);
        return out;
    }
};

// A column's invstd, of which a frozen layer is given the running variance instead. Kernels load it where they need it,
// as registers are few.
__device__ __forceinline__ void load_deviation(float (&to)[VECTOR], const float* invstd, const Place& place, const float* eps) {
    load_column(to, invstd, place, 1.0f);
    if (FROZEN)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) to[v] = inverse_deviation(to[v], *eps);
}

// Makes d of a column. Kernels add up two sums of it in a Pair: of d (a), and of d times the distance from the mean
// (b).
struct Gradient {
    float centre[VECTOR], scale[VECTOR], offset[VECTOR];

    __device__ __forceinline__ void begin(const Place& place, const float* weight, const float* bias, const float* mean,
                                          const float* invstd, const float* eps) {
        float deviation[VECTOR];
        load_column(scale, weight, place, 1.0f);
        load_column(offset, bias, place, 0.0f);
        load_column(centre, mean, place, 0.0f);
        load_deviation(deviation, invstd, place, eps);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) scale[v] = __fmul_rn(scale[v], deviation[v]);
    }
    // `x`, an input, becomes its distance from the mean; `d`, an output's gradient, becomes that before the activation.
    __device__ __forceinline__ void of(float (&x)[VECTOR], float (&d)[VECTOR], const float (&residual)[VECTOR]) const {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            x[v] -= centre[v];
            if (ACTIVATION == ACTIVATION_NONE) continue;
            float z = argument(x[v], scale[v], offset[v]);
            if (HAS_RESIDUAL) z = __fadd_rn(z, residual[v]);
            d[v] *= slope<ACTIVATION>(z);
        }
    }
};

// Stores a tile's gradients of weight and bias, if the layer has any, of the sums of d that row 0 has.
__device__ __forceinline__ void store_gradients(const Pair& pair, const Place& place, const float* invstd, const float* eps,
                                                float* weight_grad, float* bias_grad) {
    if (place.row != 0 || !place.active || !weight_grad) return;
    float deviation[VECTOR];
    load_deviation(deviation, invstd, place, eps);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        bias_grad[place.channel + v] = pair.a[v];
        weight_grad[place.channel + v] = pair.b[v] * deviation[v];
    }
}

// The input's gradient: in_grad = scale * d - constant - distance * factor, where scale = weight * invstd,
// constant = scale * mean of d, and factor = scale * invstd^2 * mean of (d * distance). A frozen layer has scale alone.
struct InputGradient {
    float scale[VECTOR], constant[VECTOR], factor[VECTOR];

    __device__ __forceinline__ void begin(const Pair& sums, const Place& place, const Gradient& gradient, const float* invstd) {
        float deviation[VECTOR];
        load_column(deviation, invstd, place, 1.0f);
        const float share = FROZEN ? 0.0f : 1.0f / static_cast<float>(place.rows);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            scale[v] = gradient.scale[v];
            constant[v] = scale[v] * (sums.a[v] * share);
            factor[v] = scale[v] * (deviation[v] * deviation[v]) * (sums.b[v] * share);
        }
    }
    __device__ __forceinline__ Access of(const float (&x)[VECTOR], const float (&d)[VECTOR]) const {
        float found[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) found[v] = FROZEN ? scale[v] * d[v] : scale[v] * d[v] - constant[v] - x[v] * factor[v];
        Access out;
        out.from_floats(found);
        return out;
    }
};
