// Parts of the kernels of grouped convolution of any group width: copies of channels that lie at any alignment,
// tiles of images in shared memory, fragments.
//
// Channels of a group are brought into shared memory in parts of 8, the last of which zeros fill up. No tensor is
// padded in device memory: a thread copies as many channels at once as a group's width lets it.
#pragma once
#include "common.cuh"

// The most channels that lie at their own alignment at the start of every group of `width` of them.
__device__ __forceinline__ constexpr int vector_of(int width) { return width % 8 == 0 ? 8 : width % 4 == 0 ? 4 : width % 2 == 0 ? 2 : 1; }

// Copies ELEMENTS channels from global to shared memory, in the background unless there is just one; zeros where
// !valid (the source is then not read, but must still be a legal pointer value).
template <int ELEMENTS>
__device__ __forceinline__ void copy_channels(u32 to, const u16* from, bool valid) {
    if (ELEMENTS == 8) {
        copy_async_16(to, from, valid);
    } else if (ELEMENTS == 1) {
        const u16 value = valid ? *from : static_cast<u16>(0);
        asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(to), "h"(value) : "memory");
    } else {
        const int bytes = valid ? 2 * ELEMENTS : 0;
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(2 * ELEMENTS), "r"(bytes));
    }
}

// So many channels as one access takes them.
template <int ELEMENTS> struct Vector;
template <> struct Vector<1> { typedef u16 Type; };
template <> struct Vector<2> { typedef u32 Type; };
template <> struct Vector<4> { typedef uint2 Type; };
template <> struct Vector<8> { typedef uint4 Type; };
template <int ELEMENTS> using Channels = typename Vector<ELEMENTS>::Type;

// The first two registers of a fragment of four.
__device__ __forceinline__ void load_pair(u32 (&d)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n" : "=r"(d[0]), "=r"(d[1]) : "r"(from) : "memory");
}
#include "transposed.cuh"

// A block's tile: BLOCK_N images, BLOCK_P rows and BLOCK_Q columns of positions. Position m of it, counted columns
// first, is at (image_of(m), row_of(m), column_of(m)).
constexpr int PIXELS = BLOCK_N * BLOCK_P * BLOCK_Q;
__device__ __forceinline__ constexpr int image_of(int m) { return m / (BLOCK_P * BLOCK_Q); }
__device__ __forceinline__ constexpr int row_of(int m) { return m / BLOCK_Q % BLOCK_P; }
__device__ __forceinline__ constexpr int column_of(int m) { return m % BLOCK_Q; }

// The input of a tile with its halo, where neighbouring positions are DOWN inputs apart and neighbouring taps STEP.
// With DOWN_W = 2 the even columns lie before the odd ones: the pixels of a fragment are neighbours, and meet no bank
// twice.
template <int TAPS_H, int TAPS_W>
struct InputTile {
    static constexpr int H = DOWN_H * (BLOCK_P - 1) + STEP_H * (TAPS_H - 1) + 1;
    static constexpr int W = DOWN_W * (BLOCK_Q - 1) + STEP_W * (TAPS_W - 1) + 1;
    static constexpr int EVEN = DOWN_W == 2 ? (W + 1) / 2 : 0;
    static constexpr int COUNT = BLOCK_N * H * W;
    // Where column x lies in a row, and the reverse.
    static __device__ __forceinline__ constexpr int place(int x) { return DOWN_W == 1 ? x : x % 2 * EVEN + x / 2; }
    static __device__ __forceinline__ constexpr int column(int place) {
        return DOWN_W == 1 ? place : place < EVEN ? 2 * place : 2 * (place - EVEN) + 1;
    }
    // The pixel that the first tap of position m meets.
    static __device__ __forceinline__ constexpr int first(int m) {
        return (image_of(m) * H + row_of(m) * DOWN_H) * W + column_of(m);
    }
};

// Visits a tile in device memory vector by vector: ROWS rows of COLUMNS pixels of VECTORS vectors of BYTES bytes each. The
// block's warps share the rows, and a warp's lanes the vectors of a row, or of several short ones. All that depends on the
// column is worked out once.
//
//   column(x, vector), row(r)    elements from the start of the row, and of the tensor; negative outside of it
//   visit(at, element, inside)   `at`: bytes from the start of the tile in shared memory, PITCH from pixel to pixel and
//                                ROW_PITCH from row to row
template <int ROWS, int COLUMNS, int VECTORS, int BYTES, int PITCH, int ROW_PITCH, int WARPS, class Column, class Row, class Visit>
__device__ __forceinline__ void visit_tile(Column column, Row row, Visit visit) {
    constexpr int ITEMS = COLUMNS * VECTORS, EACH = (ITEMS + 31) / 32;  // of a row, and those of a lane
    constexpr int AT_ONCE = ITEMS > 16 ? 1 : 32 / ITEMS;                // rows of a warp
    const int lane = threadIdx.x % 32, first = AT_ONCE > 1 ? lane % ITEMS : lane;
    int from[EACH], to[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int item = first + 32 * i, x = item / VECTORS;
        from[i] = item < ITEMS ? column(x, item % VECTORS) : -1;
        to[i] = x * PITCH + item % VECTORS * BYTES;
    }
    if (AT_ONCE > 1 && lane >= AT_ONCE * ITEMS) return;
    for (int r = threadIdx.x / 32 * AT_ONCE + (AT_ONCE > 1 ? lane / ITEMS : 0); r < ROWS; r += WARPS * AT_ONCE) {
        const i64 start = row(r);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (32 * (i + 1) <= ITEMS || first + 32 * i < ITEMS)
                visit(r * ROW_PITCH + to[i], start + from[i], start >= 0 && from[i] >= 0);
    }
}
