// Parts of the kernels of large depthwise filters: BLOCK_C channels of a block, a warp each, and how two
// neighbouring pixels are moved between device memory, where the channels of a pixel lie together, and shared
// memory, where the columns of a channel lie together. One instruction moves VEC channels, which divides those of
// the layer.
#pragma once
#include "common.cuh"

constexpr int GROUPS = BLOCK_C / 8;  // chunks of 8 channels of a pixel
enum { THREADS = 32 * BLOCK_C };

static_assert(BLOCK_C % 8 == 0 && 8 % VEC == 0, "8 channels are a row of a transposed block");
static_assert(THREADS == HOST_THREADS, "the host launches other blocks");

// Loads 8 channels of a pixel, of which there are only `channels`, a multiple of VEC; zeros for the others.
__device__ __forceinline__ uint4 load_pixel(const u16* from, int channels) {
    u32 words[4] = {};
#pragma unroll
    for (int v = 0; v < 8; v += VEC) {
        if (v >= channels) continue;
        if (VEC == 8) {
            return *reinterpret_cast<const uint4*>(from);
        } else if (VEC == 4) {
            const uint2 two = *reinterpret_cast<const uint2*>(from + v);
            words[v / 2] = two.x;
            words[(v / 2 + 1) % 4] = two.y;
        } else if (VEC == 2) {
            words[v / 2] = *reinterpret_cast<const u32*>(from + v);
        } else {
            words[v / 2] |= static_cast<u32>(from[v]) << v % 2 * 16;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
// Stores those of 8 channels of a pixel that there are.
__device__ __forceinline__ void store_pixel(u16* to, const uint4& pixel, int channels) {
    const u32 words[4] = {pixel.x, pixel.y, pixel.z, pixel.w};
#pragma unroll
    for (int v = 0; v < 8; v += VEC) {
        if (v >= channels) continue;
        if (VEC == 8) *reinterpret_cast<uint4*>(to) = pixel;
        else if (VEC == 4) *reinterpret_cast<uint2*>(to + v) = make_uint2(words[v / 2], words[(v / 2 + 1) % 4]);
        else if (VEC == 2) *reinterpret_cast<u32*>(to + v) = words[v / 2];
        else to[v] = static_cast<u16>(words[v / 2] >> v % 2 * 16);
    }
}

// Loads the pixels x and x + 1 of a row of `width` pixels of `c` channels; zeros where there is no such pixel.
__device__ __forceinline__ void load_pair(uint4 (&pixels)[2], const u16* row, int x, int width, int c, int channels) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool is_pixel = x + i >= 0 && x + i < width;
        pixels[i] = load_pixel(row + static_cast<i64>(x + i) * c, is_pixel ? channels : 0);
    }
}

// Two pixels of 8 channels each <-> a pair of columns in each of 8 planes, which are CHANNEL bytes apart.
template <int CHANNEL>
__device__ __forceinline__ void put_pair(u8* to, const uint4 (&pixels)[2]) {
    const u32 left[4] = {pixels[0].x, pixels[0].y, pixels[0].z, pixels[0].w};
    const u32 right[4] = {pixels[1].x, pixels[1].y, pixels[1].z, pixels[1].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        *reinterpret_cast<u32*>(to + 2 * e * CHANNEL) = __byte_perm(left[e], right[e], 0x5410);
        *reinterpret_cast<u32*>(to + (2 * e + 1) * CHANNEL) = __byte_perm(left[e], right[e], 0x7632);
    }
}
template <int CHANNEL>
__device__ __forceinline__ void get_pair(const u8* from, uint4 (&pixels)[2]) {
    u32 words[2][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const u32 even = *reinterpret_cast<const u32*>(from + 2 * e * CHANNEL);
        const u32 odd = *reinterpret_cast<const u32*>(from + (2 * e + 1) * CHANNEL);
        words[0][e] = __byte_perm(even, odd, 0x5410);
        words[1][e] = __byte_perm(even, odd, 0x7632);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) pixels[i] = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
}
