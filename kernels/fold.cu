// Batch norm by known statistics as a scale and a shift, for many layers in one launch:
//
//   scale[k] = gamma[k] / sqrt(variance[k] + eps)
//   shift[k] = beta[k] + (bias[k] - mean[k]) * scale[k]             bias: of the convolution before the norm
//
// A layer with a filter gets the filter times the scale, as (K, R, S, C / groups), and the shift, both in the dtype
// of its activations. A layer without one gets scale and shift in float32.
//
//   blockIdx.y    one layer                blockIdx.x, warp    one output channel k at a time
//                                          lane                every 32nd element of the channel's filter, or,
//                                                              where filters lie as they are to be written, every
//                                                              32nd group of VECTOR elements
//
// The bound is memory: a filter is read and written once. So that the loads of a lane do not wait for one another,
// it asks for UNROLL groups before it stores the first.
//
// Compile-time: LAYERS, of a launch.
//
// Parts:
//   block   a layer (y), and channels of it
//   warp    one output channel
//   lane    groups of VECTOR elements of its filter
//
// Bound: bytes, of all layers of a network together; its launch takes longer for small networks.
//
// Instructions: a warp a channel, as filters of a channel lie together: its loads are whole lines. One launch for all
// layers, since a launch for each takes longer than its bytes.
//
// Share of the floor: not measured yet.
#define DTYPE DTYPE_FLOAT16  // of the shared wrappers, none of which is used for elements here
#include "common.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, VECTOR = 8, UNROLL = 4, STEP = 32 * VECTOR };

// As confpred/pytorch/run/fold.py lays it out. A dtype is one of DTYPE_...; `types` has four bits for each.
struct Layer {
    const void *gamma, *beta, *mean, *variance, *bias, *filter;
    void *first, *second;  // scale and shift, or filter and bias
    float eps;
    int channels, width, filter_rows, filter_columns;
    int stride_k, stride_c, stride_r, stride_s;
    u32 types;     // and, at bit 20, whether a filter lies as it is to be written, in whole vectors
};
struct Layers {
    Layer layer[LAYERS];
};

__device__ __forceinline__ float read(const void* from, i64 at, u32 type) {
    if (type == DTYPE_FLOAT32) return static_cast<const float*>(from)[at];
    const u16 bits = static_cast<const u16*>(from)[at];
    if (type == DTYPE_BFLOAT16) return __uint_as_float(static_cast<u32>(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ void write(void* to, i64 at, float value, u32 type) {
    u16 bits;
    if (type == DTYPE_FLOAT32) {
        static_cast<float*>(to)[at] = value;
        return;
    }
    if (type == DTYPE_BFLOAT16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    }
    static_cast<u16*>(to)[at] = bits;
}

// Eight elements from `at` on, which is a multiple of eight: 16 bytes, or 32 of float32.
struct Group {
    uint4 low, high;
};

__device__ __forceinline__ Group read_group(const void* from, i64 at, u32 type) {
    Group group = {};
    const bool wide = type == DTYPE_FLOAT32;
    const uint4* places = reinterpret_cast<const uint4*>(static_cast<const u16*>(from) + (wide ? 2 * at : at));
    group.low = places[0];
    if (wide) group.high = places[1];
    return group;
}

__device__ __forceinline__ void write_scaled(void* to, i64 at, const Group& group, float scale, u32 from, u32 type) {
    Group scaled = {};
    for (int i = 0; i < VECTOR; ++i) write(&scaled, i, read(&group, i, from) * scale, type);
    const bool wide = type == DTYPE_FLOAT32;
    uint4* places = reinterpret_cast<uint4*>(static_cast<u16*>(to) + (wide ? 2 * at : at));
    places[0] = scaled.low;
    if (wide) places[1] = scaled.high;
}

extern "C" __global__ void __launch_bounds__(THREADS) fold(const __grid_constant__ Layers layers) {
    const Layer& layer = layers.layer[blockIdx.y];
    const u32 lane = threadIdx.x % 32;
    const u32 affine = layer.types & 15, statistics = layer.types >> 4 & 15, bias = layer.types >> 8 & 15;
    const u32 filter = layer.types >> 12 & 15, result = layer.types >> 16 & 15;
    const int elements = layer.width * layer.filter_rows * layer.filter_columns;
    for (int k = blockIdx.x * WARPS + threadIdx.x / 32; k < layer.channels; k += gridDim.x * WARPS) {
        float scale = 1.0f / sqrtf(read(layer.variance, k, statistics) + layer.eps);
        if (layer.gamma) scale *= read(layer.gamma, k, affine);
        float shift = -read(layer.mean, k, statistics);
        if (layer.bias) shift += read(layer.bias, k, bias);
        shift *= scale;
        if (layer.beta) shift += read(layer.beta, k, affine);
        if (lane == 0) {
            if (!layer.filter) write(layer.first, k, scale, result);
            write(layer.second, k, shift, result);
        }
        if (!layer.filter) continue;
        if (layer.types >> 20 & 1) {
            const i64 first = static_cast<i64>(k) * elements;
            for (int start = lane * VECTOR; start < elements; start += UNROLL * STEP) {
                Group groups[UNROLL];
#pragma unroll
                for (int i = 0; i < UNROLL; ++i)
                    if (start + i * STEP < elements) groups[i] = read_group(layer.filter, first + start + i * STEP, filter);
#pragma unroll
                for (int i = 0; i < UNROLL; ++i)
                    if (start + i * STEP < elements)
                        write_scaled(layer.first, first + start + i * STEP, groups[i], scale, filter, result);
            }
            continue;
        }
        for (int e = lane; e < elements; e += 32) {
            const int c = e % layer.width, s = e / layer.width % layer.filter_columns;
            const int r = e / layer.width / layer.filter_columns;
            const i64 from = static_cast<i64>(k) * layer.stride_k + static_cast<i64>(c) * layer.stride_c +
                             static_cast<i64>(r) * layer.stride_r + static_cast<i64>(s) * layer.stride_s;
            write(layer.first, static_cast<i64>(k) * elements + e, read(layer.filter, from, filter) * scale, result);
        }
    }
}
