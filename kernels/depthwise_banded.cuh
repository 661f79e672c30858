// Parts of the depthwise kernels on tensor cores: how a block's warps and threads divide its channels and
// strips, and how pixels are moved between device memory, where the channels of a pixel lie together, and
// shared memory, where the columns of a channel lie together. A strip is 8 output columns of a band of rows of
// an image. RUN neighbouring strips are a run, in which they share input columns.
#pragma once
#include "common.cuh"

constexpr int TILES = WARP_STRIPS / 16;  // tiles of a warp: 16 strips are a tensor-core operand
constexpr int THREADS = BLOCK_C / WARP_C * (STRIPS / WARP_STRIPS) * 32;
constexpr int GROUPS = BLOCK_C / 8;      // 16-byte chunks of a pixel
constexpr int RUNS = STRIPS / RUN;       // of a block
constexpr int IDLE = STRIPS % RUN;       // strips left over: they compute what nobody reads

static_assert(BLOCK_C % 8 == 0 && 8 % WARP_C == 0, "warps divide planes of 8 channels");
static_assert(STRIPS % WARP_STRIPS == 0 && WARP_STRIPS % 16 == 0, "warps divide strips");
// Sizes that launches count on, as confpred/families/depthwise/depthwise_banded.py works it out; the shared memory is
// compared where the kernels divide it.
static_assert(THREADS == HOST_THREADS && RUNS == HOST_RUNS, "the host launches other blocks");

// Two pixels of 8 channels each <-> 8 channels of two pixels each.
__device__ __forceinline__ void split(const uint4 (&pixels)[2], u32 (&pairs)[8]) {
    const u32 left[4] = {pixels[0].x, pixels[0].y, pixels[0].z, pixels[0].w};
    const u32 right[4] = {pixels[1].x, pixels[1].y, pixels[1].z, pixels[1].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        pairs[2 * e] = __byte_perm(left[e], right[e], 0x5410);
        pairs[2 * e + 1] = __byte_perm(left[e], right[e], 0x7632);
    }
}
__device__ __forceinline__ void join(const u32 (&pairs)[8], uint4 (&pixels)[2]) {
    u32 words[2][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        words[0][e] = __byte_perm(pairs[2 * e], pairs[2 * e + 1], 0x5410);
        words[1][e] = __byte_perm(pairs[2 * e], pairs[2 * e + 1], 0x7632);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) pixels[i] = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
}

// The planes of a step's rows: [row][8 channels][channel][run][column], with UNITS eights of columns for each
// run. Planes of 8 channels follow one another at 32 / GROUPS words more than a multiple of all banks, so that
// the threads of a warp, which store neighbouring pairs of GROUPS chunks, meet no bank twice. Neither does
// ldmatrix where runs are of 1 or 8 strips; with other runs two strips of eight may share banks. Behind all
// runs there are SPARE eights of columns, which idle strips read.
template <int UNITS, int COLUMNS, int SPARE>
struct Planes {
    static constexpr int PAIRS = (COLUMNS + 1) / 2;                    // pairs of pixels of a run
    static constexpr int PITCH = 16 * (RUN == 1 ? UNITS | 1 : UNITS);  // bytes of a run
    static constexpr int CHANNEL = RUNS * PITCH + SPARE * 16;
    static constexpr int GROUP = 8 * CHANNEL + 128 / GROUPS;
    static constexpr int ROW = GROUPS * GROUP;
    static constexpr int BUFFER = ROWS * ROW;
    static constexpr int TOTAL = ROWS * RUNS * PAIRS * GROUPS;         // pairs of 8 channels in a step
    static constexpr int ITEMS = (TOTAL + THREADS - 1) / THREADS;      // of these pairs, how many a thread has
    static constexpr int STAGE = ITEMS * THREADS * 32;                 // bytes of these pairs, as memory has them

    // Where a strip's columns begin.
    static __device__ __forceinline__ int strip(int index) { return index / RUN * PITCH + index % RUN * 16; }

    // The offset in a stage of pixel `i` of an item of this thread; those of neighbouring threads lie side by
    // side.
    static __device__ __forceinline__ int staged(int item, int i) { return ((2 * item + i) * THREADS + threadIdx.x) * 16; }

    // Copies an item in the background: pixels where the bits of `columns` are set, zeros where they are not.
    static __device__ __forceinline__ void copy(u8* stage, int item, const u16* from, int channels, u32 columns) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            copy_async_16(shared_address(stage) + staged(item, i), from + i * channels, columns >> i & 1);
    }

    // 8 channels of a pair of pixels are put into the planes, from a stage or from registers, and got out of them.
    static __device__ __forceinline__ void put(u8* to, const u8* stage, int item) {
        uint4 pixels[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) pixels[i] = *reinterpret_cast<const uint4*>(stage + staged(item, i));
        put(to, pixels);
    }
    static __device__ __forceinline__ void put(u8* to, const uint4 (&pixels)[2]) {
        u32 pairs[8];
        split(pixels, pairs);
#pragma unroll
        for (int e = 0; e < 8; ++e) *reinterpret_cast<u32*>(to + e * CHANNEL) = pairs[e];
    }
    static __device__ __forceinline__ void get(const u8* from, uint4 (&pixels)[2]) {
        u32 pairs[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) pairs[e] = *reinterpret_cast<const u32*>(from + e * CHANNEL);
        join(pairs, pixels);
    }
};

// Parts that a thread copies at once: 8 channels (`piece`) of a pair of columns of a row of a run.
struct Place {
    int piece, pair, run, row;
    int image, p0, q0;  // where the run begins: its image, counted from image0, and its first row and column
    bool valid;         // is there such a run, and are there such channels?
};
// Item `item` of this thread, where a run has `pairs` of columns. The block begins at run `run0`, which is of image
// `image0`, and at a channel from which on there are `channels`.
__device__ __forceinline__ Place place_of(int item, int pairs, int run0, int image0, int n, int channels,
                                          int band_rows, int bands, int q_tiles) {
    Place at;
    int rest = threadIdx.x + item * THREADS;
    at.piece = rest % GROUPS; rest /= GROUPS;
    at.pair = rest % pairs; rest /= pairs;
    at.run = rest % RUNS;
    at.row = rest / RUNS;
    rest = run0 + at.run;
    at.q0 = rest % q_tiles * 8 * RUN; rest /= q_tiles;
    at.p0 = rest % bands * band_rows; rest /= bands;
    at.image = rest - image0;
    at.valid = at.row < ROWS && rest < n && 8 * at.piece < channels;
    return at;
}

// Does this thread have item `item`? Some threads lack the last one.
__device__ __forceinline__ bool is_item(int item, int total) {
    return (item + 1) * THREADS <= total || threadIdx.x + item * THREADS < total;
}

// A row of input overlaps R rows; what belongs to them lies in a ring of R slots, so that nothing moves from
// row to row. Row t finds at ring(r, t) what belongs to filter row r. Code in which t is a constant repeats
// every PERIOD steps; each of these is a phase.
constexpr int PERIOD = ROWS % 2 == 0 && R % 2 == 0 ? R / 2 : R;
static_assert(ROWS <= 2, "the period is that of one or two rows a step");

__device__ __forceinline__ constexpr int ring(int r, int t) { return ((r - t) % R + R) % R; }

template <int VALUE>
struct Phase {
    static constexpr int first_row = VALUE * ROWS;
};
// Calls run(Phase<phase>()).
template <int VALUE = 0, class Run>
__device__ __forceinline__ void in_phase(int phase, const Run& run) {
    if constexpr (VALUE + 1 < PERIOD) {
        if (phase != VALUE) return in_phase<VALUE + 1>(phase, run);
    }
    run(Phase<VALUE>());
}
