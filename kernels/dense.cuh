// Parts of the kernels of dense convolution of few channels, for both directions (DGRAD): how fragments of the filter
// come from shared memory, and which taps an output meets.
#pragma once
// Matrices of 8 x 8, transposed where rows are of channels of `in`: the B of two tiles (x4), or one (x2), of 8 channels
// of `out`.
__device__ __forceinline__ void load_filter_x4(u32 (&d)[4], u32 from) {
    if (!DGRAD) load_matrix_x4(d, from);
    else asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_filter_x2(u32 (&d)[4], u32 from) {
    if (!DGRAD) load_matrix_x2(d, from);
    else asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
                      : "=r"(d[0]), "=r"(d[1]) : "r"(from) : "memory");
}

// Which taps of an axis a lattice meets, and where: tap i meets the i-th input from `origin` on. In dgrad the filter's
// rows come in reverse, so that inputs come in order. `window` is the filter's size, and an axis without lattices is
// one.
struct Lattice {
    int first;   // the filter row of its tap 0
    int step;    // from there to that of tap 1
    int taps;    // how many it has
    int origin;  // the input row that tap 0 of the lattice's output position 0 meets
};
__device__ __forceinline__ Lattice lattice_of(bool halved, int window, int pad, int parity) {
    if (!DGRAD) return {0, 1, window, -pad};
    if (!halved) return {window - 1, -1, window, pad - window + 1};
    const int first = (parity + pad) & 1, taps = (window - first + 1) / 2;
    return {first + 2 * (taps - 1), -2, taps, (parity + pad - first) / 2 - taps + 1};
}
