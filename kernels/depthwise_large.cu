// Depthwise convolution of unit stride with a large filter, forward and its input gradient, NHWC, on tensor
// cores (sm_80 and later).
//
//   out[n, y, x, c] = activation(residual[n, y, x, c] + bias[c]
//                       + sum over r, s of in[n, y + r - pad_h, x + s - pad_w, c] * filter[c, r, s])
//
// Input gradient: `in` is the output's gradient, the filter is rotated by half a turn (FLIP), and the
// padding is R - 1 and S - 1, each less the layer's padding.
//
// Within one channel and one filter row, eight neighbouring outputs of 16 rows are the product of the input
// columns that they are made of with a banded matrix of the filter row's taps. The columns come in *units* of
// eight; SPAN units make eight outputs:
//
//            columns of the input              outputs 0 ... 7 of a row
//                unit 0        unit 1
//   row 0   | in0 ... in7 | in8 ... in15 |     | f0                |
//   row 1   | in0 ... in7 | in8 ... in15 |     | f1 f0             |  unit 0 of B
//   ...     |             |              |  x  |  :  :  .          |
//   row 15  | in0 ... in7 | in8 ... in15 |     | f8 f7 f6 ...  f1  |  unit 1
//                A, by ldmatrix                |  :  :  :       :  |
//
// Two units are one product. A unit of A serves all of a warp's TILES_N eights of columns that reach it, and B is
// read from the filter row in shared memory, which has zeros on both sides.
//
// A warp has one channel, and TILES_M tiles of 16 output rows. The rows of a tile are TILES_M apart, so that the
// tiles read the same rows of input, one filter row later each:
//
//        output row  0  1  2  3  4  5 ...     of TILES_M = 2; row i of A of step t is input row 2 i + t
//        tile        0  1  0  1  0  1
//
//        step t ----+---- filter row t      --> tile 0      (enters the registers in this step)
//                   +---- filter row t - 1  --> tile 1      (leaves them after it)
//
// A tile may have rows of IMAGES images, 16 / IMAGES of each, for small images.
//
// The layer's sizes are run-time arguments. Compile-time: the filter's size R x S, FLIP, DTYPE, ACTIVATION,
// HAS_BIAS, HAS_RESIDUAL, and the config:
//
//   BLOCK_C           channels of a block
//   VEC               channels that one instruction loads or stores
//   IMAGES            images of a block
//   TILES_M, TILES_N  tiles of 16 rows and of 8 columns
//   PART              filter rows, and so input rows, that are brought in at once
//   MIN_BLOCKS        blocks that a multiprocessor must hold: bounds the registers
//
// Input rows lie in planes of one channel each, in a ring with room for what PART steps read:
//
//   [channel][image][t % TILES_M][t / TILES_M % RING][column]
//
// A block goes through all filter rows in parts. Between two barriers it brings in the next PART rows of the input
// and of the filter; then its warps multiply. Other blocks of the multiprocessor multiply meanwhile. Steps and
// columns in which the whole block reads padding are left out. At the end the results replace the
// ring, to be stored with the channels of a pixel together.
//
// Zeros of the band are multiplied too, and so are filter rows before the first and behind the last one: an infinity or
// NaN makes NaN of outputs of its channel within 16 columns of those that it is part of and, with several TILES_M, fewer
// than 2 TILES_M rows above and below them.
//
// Parts:
//   block   BLOCK_C channels, a warp each, of IMAGES images
//   warp    one channel of 16 TILES_M rows by 8 TILES_N columns, in registers
//   thread  fragments of mma.m16n8k16, and accesses of VEC channels
//
// Bound: the tensor cores from 13x13 filters on: 8 SPAN R multiply-adds an output, about (S + 8) R, of 1,024 or more
// that a multiprocessor does in a clock; the 4 bytes of an output take 0.3 clocks.
//
// Instructions: mma, as ordinary arithmetic does 128 multiply-adds in a clock: 961 of a 31x31 filter take 7.5, the
// band's 1,240 take 1.2. Loads go through registers, not cp.async, because they spread channels over planes.
//
// Share of the floor:
//   depthwise_large_dgrad on NVIDIA H200, 2026-11-28
//      14% of bytes: n=64 c=128 h=28 w=28 k=128 r=13 s=13 padding=6 groups=128 direction=dgrad
//      15% of bytes: n=32 c=80 h=56 w=56 k=80 r=17 s=17 padding=8 groups=80 direction=dgrad
//      31% of bytes: n=32 c=128 h=64 w=64 k=128 r=1 s=21 padding=0x10 groups=128 direction=dgrad
//   depthwise_large_fprop on NVIDIA H200, 2026-11-28
//      12% of bytes: n=37 c=166 h=56 w=56 k=166 r=5 s=51 padding=2x25 groups=166
//      28% of bytes: n=8 c=64 h=256 w=256 k=64 r=19 s=1 padding=9x0 groups=64 dtype=bfloat16 bias=true
//      29% of bytes: n=8 c=64 h=128 w=128 k=64 r=1 s=21 padding=0x10 groups=64 dtype=bfloat16 bias=true
#include "depthwise_large.cuh"

constexpr int STRIP = 16 / IMAGES;                // rows of a tile in an image
constexpr int ROWS = STRIP * TILES_M;             // output rows of a block in an image
constexpr int SPAN = (S + 14) / 8;                // units that eight outputs are made of
constexpr int PAIRS = (TILES_N + SPAN) / 2;       // pairs of units of a row
constexpr int PITCH = 32 * PAIRS + 16;            // bytes of a row; ldmatrix meets no bank twice in eight neighbours
constexpr int RING = STRIP + PART / TILES_M - 1;  // rows of one remainder of TILES_M
constexpr int IMAGE = TILES_M * RING * PITCH;     // bytes
constexpr int CHANNEL = IMAGES * IMAGE;
constexpr int GROUP = 8 * CHANNEL + 128 / GROUPS;  // neighbouring chunks of a pixel meet no bank twice
constexpr int TAPS = 8 * SPAN + 8;                // of a filter row with zeros on both sides
constexpr int OUT_PITCH = 16 * (TILES_N | 1);     // bytes of a row of results

enum { SMEM_BYTES = GROUPS * GROUP + BLOCK_C * PART * TAPS * 2 };

static_assert(16 % IMAGES == 0 && PART % TILES_M == 0, "tiles divide into images, parts into rounds of tiles");
static_assert(16 * TILES_M * OUT_PITCH <= CHANNEL, "results have room where the ring was");
static_assert(SMEM_BYTES == HOST_SMEM_BYTES, "the host gives a block so much shared memory");

typedef u32 Taps[TILES_M][SPAN];              // filter row t is in [t % TILES_M]
typedef float Sums[TILES_M][TILES_N][4];

// Multiplies a pair of units, in step t of a round, with the filter rows that are in registers.
__device__ __forceinline__ void multiply(Sums& acc, const Taps& taps, const u32 (&a)[4], int pair, int t) {
#pragma unroll
    for (int tile = 0; tile < TILES_N; ++tile) {
        const int unit = 2 * pair - tile;  // of B, for the left half of the pair
        const bool has_left = unit >= 0 && unit < SPAN, has_right = unit >= -1 && unit + 1 < SPAN;
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
            const u32 (&b)[SPAN] = taps[(t - m + TILES_M) % TILES_M];
            const u32 b_left = b[has_left ? unit : 0], b_right = b[has_right ? unit + 1 : 0];
            const u32 right[4] = {a[2], a[3], 0, 0};
            if (has_left && has_right) mma_k16(acc[m][tile], a, b_left, b_right);
            else if (has_left) mma_k8(acc[m][tile], a, b_left);  // which reads the first two words
            else if (has_right) mma_k8(acc[m][tile], right, b_right);
        }
    }
}

// Puts a warp's results, of which `to` is this lane's first word, with the bias, the residual that is there, and the activation.
__device__ __forceinline__ void finish(u8* to, const Sums& acc, float bias_value) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int tile = 0; tile < TILES_N; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32* const word = reinterpret_cast<u32*>(to + (16 * m + 8 * half) * OUT_PITCH + tile * 16);
                const u32 plus = HAS_RESIDUAL ? *word : 0;
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    x[e] = acc[m][tile][2 * half + e];
                    if (HAS_BIAS) x[e] += bias_value;
                    if (HAS_RESIDUAL) x[e] += to_float(static_cast<u16>(plus >> 16 * e));  // before the only rounding
                    x[e] = activate<ACTIVATION>(x[e]);
                }
                *word = pack(x[0], x[1]);
            }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_large(
    u16* __restrict__ out, const u16* __restrict__ in, const u16* __restrict__ filter,
    const u16* __restrict__ bias, const u16* __restrict__ residual,
    int n, int c, int h, int w, int p, int q,  // h x w: of `in`; p x q: of `out`
    int pad_h, int pad_w, int bands, int q_tiles, int c_tiles) {
    extern __shared__ __align__(16) u8 shared[];
    u16* const filter_shared = reinterpret_cast<u16*>(shared + GROUPS * GROUP);

    // ---- Position of the block
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    // Neighbouring blocks take neighbouring channels, then columns, then rows: what they share of a sector or
    // of a halo is then still in L2.
    int rest = blockIdx.x;
    const int c0 = rest % c_tiles * BLOCK_C; rest /= c_tiles;
    const int x0 = rest % q_tiles * (8 * TILES_N); rest /= q_tiles;
    const int y0 = rest % bands * ROWS;
    const int image0 = rest / bands * IMAGES;
    const int channels = min(BLOCK_C, c - c0);

    // Output row y0 meets input row t - top in step t. Steps in which all rows are padding are left out, but
    // the filter rows of TILES_M - 1 steps before the first one have to enter.
    const int top = pad_h - y0, left = pad_w - x0;
    const int above = max(top - (ROWS - TILES_M), 0);
    const int first = max(above - (TILES_M - 1), 0) / TILES_M * TILES_M;
    const int last = ceil_div(min(R + TILES_M - 1, h + top), TILES_M) * TILES_M;
    const int first_pair = max(left, 0) / 16, last_pair = ceil_div(w + left, 16);

    // ---- Copies of a part
    const auto put_rows = [&](int from, int to) {
        const int items = (to - from) * IMAGES * 8 * PAIRS * GROUPS;
#pragma unroll 2
        for (int item = tid; item < items; item += THREADS) {
            int rest = item;
            const int piece = rest % GROUPS; rest /= GROUPS;
            const int pair = rest % (8 * PAIRS); rest /= 8 * PAIRS;
            const int image = rest % IMAGES, t = from + rest / IMAGES;
            const int y = t - top, place = t - first;
            const bool is_row = y >= 0 && y < h && image0 + image < n;
            const u16* const row = in + (static_cast<i64>(image0 + image) * h + y) * w * c + c0 + 8 * piece;
            uint4 pixels[2];
            load_pair(pixels, row, 2 * pair - left, w, c, is_row ? channels - 8 * piece : 0);
            put_pair<CHANNEL>(shared + piece * GROUP + image * IMAGE + pair * 4 +
                                  (place % TILES_M * RING + place / TILES_M % RING) * PITCH, pixels);
        }
    };
    const auto put_filter = [&](int from) {
        for (int e = tid; e < BLOCK_C * PART * S; e += THREADS) {
            const int s = e % S, row = e / S % PART, channel = e / S / PART;
            const int tap = (from + row) * S + s;
            const u16* const taps = filter + static_cast<i64>(c0 + channel) * (R * S);
            u16 value = 0;
            if (channel < channels && from + row < R) value = taps[FLIP ? R * S - 1 - tap : tap];
            filter_shared[(channel * PART + row) * TAPS + 8 + s] = value;
        }
    };
    for (int e = tid; e < BLOCK_C * PART * TAPS / 2; e += THREADS) reinterpret_cast<u32*>(filter_shared)[e] = 0;

    // ---- Fragments
    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16".
    const u32 plane = shared_address(shared) + warp / 8 * GROUP + warp % 8 * CHANNEL + lane % 16 / STRIP * IMAGE +
                      lane / 16 * 16;
    const u16* const taps_from = filter_shared + warp * PART * TAPS + 8 + lane % 4 * 2 - lane / 4;
    Taps taps = {};
    Sums acc = {};

    // ---- Parts
    for (int part = first; part < last; part += PART) {
        const int steps = min(PART, last - part);
        __syncthreads();
        put_rows(part == first ? first : part + ROWS - TILES_M, part + steps + ROWS - TILES_M);
        put_filter(part);
        __syncthreads();
        int slot = ((part - first) / TILES_M + lane % STRIP) % RING;
#pragma unroll 1
        for (int step = 0; step < steps; step += TILES_M) {
#pragma unroll
            for (int t = 0; t < TILES_M; ++t) {
#pragma unroll
                for (int unit = 0; unit < SPAN; ++unit) {
                    const u16* const from = taps_from + (step + t) * TAPS + 8 * unit;
                    taps[t][unit] = from[0] | static_cast<u32>(from[1]) << 16;
                }
                const u32 from = plane + (t * RING + slot) * PITCH;
                u32 a[2][4];
                load_matrix_x4(a[0], from);
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    if (pair + 1 < PAIRS) load_matrix_x4(a[(pair + 1) % 2], from + 32 * (pair + 1));
                    if (pair >= first_pair && pair < last_pair) multiply(acc, taps, a[pair % 2], pair, t);
                }
            }
            slot = slot + 1 == RING ? 0 : slot + 1;
        }
    }
    __syncthreads();

    // ---- Results
    // Calls run(a pair of results in the first of its 8 planes, offset of its pixels, its channels, whether there is a
    // second pixel).
    const auto for_results = [&](const auto& run) {
        for (int item = tid; item < GROUPS * 4 * TILES_N * 16 * TILES_M; item += THREADS) {
            int rest = item;
            const int piece = rest % GROUPS; rest /= GROUPS;
            const int pair = rest % (4 * TILES_N); rest /= 4 * TILES_N;
            const int row = rest % 16, image = image0 + row / STRIP;
            const int y = y0 + row % STRIP * TILES_M + rest / 16, x = x0 + 2 * pair;
            if (image >= n || y >= p || x >= q) continue;
            const i64 pixel = (static_cast<i64>(image) * p + y) * q + x;
            run(shared + piece * GROUP + rest * OUT_PITCH + pair * 4, pixel * c + c0 + 8 * piece, channels - 8 * piece, x + 1 < q);
        }
    };
    if (HAS_RESIDUAL) {  // it goes where the results will be
        for_results([&](u8* at, i64 offset, int existing, bool both) {
            uint4 pixels[2];
            load_pair(pixels, residual + offset, 0, both ? 2 : 1, c, existing);
            put_pair<CHANNEL>(at, pixels);
        });
        __syncthreads();
    }
    float bias_value = 0.0f;
    if (HAS_BIAS && warp < channels) bias_value = to_float(bias[c0 + warp]);
    u8* const results = shared + warp / 8 * GROUP + warp % 8 * CHANNEL + lane / 4 * OUT_PITCH + lane % 4 * 4;
    finish(results, acc, bias_value);
    __syncthreads();
    for_results([&](u8* at, i64 offset, int existing, bool both) {
        uint4 pixels[2];
        get_pair<CHANNEL>(at, pixels);
        store_pixel(out + offset, pixels[0], existing);
        store_pixel(out + offset + c, pixels[1], both ? existing : 0);
    });
}
