// What the kernels of large depthwise filters share: BLOCK_C channels of a block, a warp each, and how two
// neighbouring pixels are moved between device memory, where the channels of a pixel lie together, and shared
// memory, where the columns of a channel lie together.
#pragma once
#include "common.cuh"

constexpr int GROUPS = BLOCK_C / 8;   // 16-byte pieces of a pixel
enum { THREADS = 32 * BLOCK_C };

static_assert(BLOCK_C % 8 == 0, "copies are of 8 channels");
static_assert(THREADS == HOST_THREADS, "the host launches other blocks");

// Loads 8 channels of the pixels x and x + 1 of a row of `width` pixels; zeros where there is no such pixel,
// or no such row.
__device__ __forceinline__ void load_pair(uint4 (&pixels)[2], const u16* row, int x, int width, int c, bool is_row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        pixels[i] = make_uint4(0, 0, 0, 0);
        if (is_row && x + i >= 0 && x + i < width)
            pixels[i] = *reinterpret_cast<const uint4*>(row + static_cast<i64>(x + i) * c);
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
