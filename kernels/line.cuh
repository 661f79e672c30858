// Parts of the kernels of depthwise 1-D convolution: the part of an input row that a tile of outputs reads, as one
// thread holds it. Rows are contiguous, (N, C, W), and filters (K, S).
//
// Compile-time, beside DTYPE: the filter's taps S, its DILATION, and which input y an output o reads at tap s:
//
//   UP * y = DOWN * o + DILATION * s - pad      forward: UP 1, DOWN the stride; gradient of the input: the other way round
//
// A tile has TILE outputs from o0 on, a multiple of TILE. The span of its inputs begins at an access of IN_VEC
// elements that does not cross a row's end, as IN_VEC divides the rows: at y0 = DOWN * o0 / UP + first. With a pad of 3,
// with 4 elements an access, 4 taps and 8 outputs (UP = DOWN = DILATION = 1):
//
//   y                 -4 -3 -2 -1 | 0  1  2  3 | 4  5  6  7      VECTORS = 3, first = -4, PHASE = 1
//   output 0 reads        ^  ^  ^   ^
//   output 7 reads                                ^  ^  ^  ^
//
// PHASE is the element of the span at which output 0 meets tap 0, times UP: -pad without its whole accesses. So layers
// whose pads differ by whole accesses share a kernel.
#pragma once
#include "depthwise.cuh"

constexpr int LAST = (DOWN * (TILE - 1) + DILATION * (S - 1) + PHASE) / UP;  // element of the span
constexpr int VECTORS = LAST / IN_VEC + 1;

// The element of the span that output `j` of the tile reads at a tap; -1 for none.
__device__ __forceinline__ constexpr int element_of(int j, int tap) {
    const int reached = DOWN * j + DILATION * tap + PHASE;
    return reached % UP ? -1 : reached / UP;
}

// Whether some output reads an element of access `v`: not so between the taps of a large dilation.
__device__ __forceinline__ constexpr bool is_read(int v) {
    for (int tap = 0; tap < S; ++tap)
        for (int j = 0; j < TILE; ++j)
            if (element_of(j, tap) >= 0 && element_of(j, tap) / IN_VEC == v) return true;
    return false;
}

// Each access is known at compile time, so that what is not read takes no register.
template <int V = 0, typename Visit>
__device__ __forceinline__ void for_each_read(const Visit& visit) {
    if constexpr (V < VECTORS) {
        if constexpr (is_read(V)) visit(V);
        for_each_read<V + 1>(visit);
    }
}

struct Window {
    Vector<IN_VEC> parts[VECTORS];

    __device__ __forceinline__ float at(int element) const {
        return element_to_float(reinterpret_cast<const Element*>(&parts[element / IN_VEC])[element % IN_VEC]);
    }

    // `y0` is of the span's first element in a `row` of `w` elements; zeros stand for what lies outside.
    __device__ __forceinline__ void load(const Element* row, int y0, int w) {
        for_each_read([&](int v) {
            const int y = y0 + v * IN_VEC;
            parts[v] = {};
            if (y >= 0 && y < w) parts[v].load(row + y);
        });
    }
};
