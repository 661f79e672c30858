// Depthwise convolution of unit stride, forward and its input gradient, NHWC, on tensor cores (sm_80
// and later).
//
//   out[n, y, x, c] = activation(residual[n, y, x, c] + bias[c]
//                       + sum over r, s of in[n, y + r - pad_h, x + s - pad_w, c] * filter[c, r, s])
//
// Input gradient: `in` is the output's gradient, the filter is rotated by half a turn (FLIP), and the
// padding is R - 1 and S - 1, each less the layer's padding. That may be negative.
//
// Within one channel and one filter row, eight neighbouring outputs are the product of the 16 input
// columns that they are made of (8 of S = 1, 24 from S = 10 on) with a banded matrix of the filter row's taps:
//
//                                        outputs 0 ... 7            of S = 3
//                              column 0 | f0                     |
//   strip 0   | in0 ... in15 |        1 | f1 f0                  |     B, in registers: SPAN of them for
//   strip 1   | in0 ... in15 |        2 | f2 f1 f0               |     a filter row, one for 8 columns
//   ...       |              |  x     3 |    f2 f1 f0            |
//   strip 15  | in0 ... in15 |        : |        .  .  .         |
//                                     9 |                     f2 |
//               A, by ldmatrix     : 15 |           0            |
//
// The 16 rows of A are *strips*: 8 output columns of a band of rows of an image. RUN neighbouring strips
// are a run: they lie in one row of columns in shared memory, where the rows of A overlap. Runs, bands and
// images are one count, so that 16 strips may be one row of a large image or rows of 16 small images.
//
// The layer's sizes are run-time arguments. Compile-time: the filter R x S, FLIP, DTYPE, ACTIVATION,
// HAS_BIAS, HAS_RESIDUAL, and the config:
//
//   BLOCK_C, STRIPS      channels and strips of a block
//   WARP_C, WARP_STRIPS  those of a warp
//   RUN                  strips of a run
//   ROWS                 input rows of a step
//   STAGES               steps that are copied ahead
//   MIN_BLOCKS           blocks that a multiprocessor must hold: bounds the registers
//
// (The config also has `bands`, into how many the host cuts an image.)
//
// A block walks down its strips. Each step brings in ROWS input rows; each row is read from shared memory
// once and meets all R filter rows, so feeds the R output rows that it overlaps, each in accumulators
// of its own:
//
//        input row i ----+---- filter row 0 --> output row i        (opened by this row)
//                        +---- filter row 1 --> output row i - 1
//                        +---- filter row 2 --> output row i - 2    (finished by this row)
//
// In device memory the channels of a pixel lie together; in A and in the accumulators the columns of a channel
// do. So a thread copies 8 channels of two neighbouring pixels into a stage of its own, STAGES steps ahead, and
// from there puts 8 pairs of pixels into planes of one channel each
//
//   [channel][run][column]
//
// and finished rows go back by way of such planes, but without a stage. In step i, between two barriers, a thread
// stores to device memory what step i - 1 has finished, puts step i + 1 into the planes, starts the copy of step
// i + 1 + STAGES, and multiplies. Every other four warps (a multiprocessor has four schedulers, to which warps go in
// turns) multiply first instead, so that neither memory nor the tensor cores wait for the other. Blocks of up to four
// warps all begin by storing.
//
// Zeros of the band are multiplied too: an infinity or NaN makes NaN of all outputs of its channel that have it
// among their 16 columns (8 or 24, as above).
//
// Parts:
//   block   BLOCK_C channels of STRIPS strips
//   warp    WARP_C channels of WARP_STRIPS strips, 16 of them a tile of the products
//   thread  fragments of mma.m16n8k16 and the filter's B in registers, and items of 8 channels by two columns of the
//           copies
//
// Bound: bytes. A 7x7 filter takes 112 multiply-adds of tensor cores an output, 0.11 clocks of a multiprocessor; by
// ordinary arithmetic 0.38. The 4 bytes that are read and written for an output take 0.3 on an H100.
//
// Instructions: mma with zeros in B, 16 R multiply-adds an output with S from 2 to 9, needs less of a multiprocessor's
// time than float32 multiply-adds from 3x3 filters on. cp.async goes to stages of a thread's own, because channels have
// to change positions with columns on the way, which no copy does by itself.
//
// Share of the floor:
//   depthwise_banded_dgrad on NVIDIA H100 80GB HBM3, 2026-11-23
//      83% of bytes: n=50 c=96 h=120 w=168 k=96 r=7 s=7 padding=3 groups=96 direction=dgrad
//      86% of bytes: n=128 c=768 h=32 w=32 k=768 r=7 s=7 padding=3 groups=768 dtype=bfloat16 direction=dgrad
//      89% of bytes: n=32 c=1536 h=48 w=48 k=1536 r=3 s=3 padding=1 groups=1536 direction=dgrad
//   depthwise_banded_fprop on NVIDIA H100 80GB HBM3, 2026-11-23
//      75% of bytes: n=100 c=912 h=20 w=20 k=912 r=3 s=3 padding=1 groups=912 dtype=bfloat16
//      78% of bytes: n=96 c=768 h=32 w=32 k=768 r=7 s=7 padding=3 groups=768 bias=true
//      83% of bytes: n=128 c=192 h=60 w=84 k=192 r=7 s=7 padding=3 groups=192 bias=true
#include "depthwise_banded.cuh"

constexpr int SPAN = (S + 14) / 8;     // eights of input columns that eight outputs are made of
constexpr int UNITS = RUN + SPAN - 1;  // eights of input columns of a run; 16 bytes each in a plane
constexpr int IN_X = 8 * RUN + S - 1;  // input columns that a run needs; the others stay zero

typedef Planes<UNITS, IN_X, IDLE ? IDLE + SPAN - 1 : 0> In;
typedef Planes<RUN, 8 * RUN, IDLE> Out;

// Two steps' planes of either kind, what is copied ahead, the filter: in this order.
enum { SMEM_BYTES = 2 * (In::BUFFER + Out::BUFFER) + STAGES * In::STAGE + BLOCK_C * R * S * 2 };

static_assert(In::ITEMS <= 16, "validity bits are kept in one word");
static_assert(SMEM_BYTES == HOST_SMEM_BYTES, "the host gives a block so much shared memory");

// The runs of all images count q_tiles columns of runs fastest, then `bands` bands of band_rows output rows, then
// images. c_tiles blocks share a pixel's `c` channels.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_banded(
    u16* __restrict__ out, const u16* __restrict__ in, const u16* __restrict__ filter,
    const u16* __restrict__ bias, const u16* __restrict__ residual,
    int n, int c, int h, int w, int p, int q,  // h x w: of `in`; p x q: of `out`
    int pad_h, int pad_w, int band_rows, int bands, int q_tiles, int c_tiles) {
    extern __shared__ __align__(16) u8 shared[];
    u8* const in_shared = shared;
    u8* const out_shared = in_shared + 2 * In::BUFFER;
    u8* const stages = out_shared + 2 * Out::BUFFER;
    u8* const filter_shared = stages + STAGES * In::STAGE;

    // ---- Position of the block
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    // Neighbouring blocks take neighbouring channels, then columns, then bands: what they share of a
    // DRAM page or of a halo is then still in L2.
    const int c0 = blockIdx.x % c_tiles * BLOCK_C;
    const int run0 = blockIdx.x / c_tiles * RUNS;
    const int image0 = run0 / q_tiles / bands;
    const u16* const in_block = in + static_cast<i64>(image0) * h * w * c + c0;
    const i64 out_block = static_cast<i64>(image0) * p * q * c + c0;

    // Row `i` of a run is the input row that filter row 0 multiplies for output row i of the band; R - 1 rows more
    // finish it. With one band all runs agree which rows are padding above and below the image: steps begin at row
    // `first`, and those from `last` on multiply nothing, but finish outputs.
    const int first = bands == 1 ? min(max(pad_h, 0), R - 1) : 0, all = band_rows + R - 1;
    const int last = bands == 1 ? min(max(h + pad_h, first), all) : all;
    const int steps = ceil_div(all - first, ROWS), computed = ceil_div(last - first, ROWS);

    // ---- Items of this thread
    const auto place = [&](int item, int pairs) {
        return place_of(item, pairs, run0, image0, n, c - c0, band_rows, bands, q_tiles);
    };
    // In step 0: elements from in_block, the input row, bytes from where a step's planes begin.
    int in_offset[In::ITEMS], in_y[In::ITEMS], in_to[In::ITEMS];
    u32 in_valid = 0;  // two columns an item
#pragma unroll
    for (int l = 0; l < In::ITEMS; ++l) {
        const Place at = place(l, In::PAIRS);
        const int x = at.q0 - pad_w + 2 * at.pair;
        in_y[l] = at.p0 - pad_h + first + at.row;
        in_offset[l] = ((at.image * h + in_y[l]) * w + x) * c + 8 * at.piece;
        in_to[l] = at.row * In::ROW + at.piece * In::GROUP + at.run * In::PITCH + at.pair * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            in_valid |= static_cast<u32>(at.valid && 2 * at.pair + i < IN_X && x + i >= 0 && x + i < w) << (2 * l + i);
    }
    // In step 0: elements from out_block, the row of the band, how many rows the band has in the image, bytes.
    int out_offset[Out::ITEMS], out_row[Out::ITEMS], out_rows[Out::ITEMS], out_from[Out::ITEMS];
    u32 out_valid = 0;
#pragma unroll
    for (int l = 0; l < Out::ITEMS; ++l) {
        const Place at = place(l, Out::PAIRS);
        const int x = at.q0 + 2 * at.pair;
        out_row[l] = first - (R - 1) + at.row;
        out_rows[l] = at.valid ? min(band_rows, p - at.p0) : 0;
        out_offset[l] = ((at.image * p + at.p0 + out_row[l]) * q + x) * c + 8 * at.piece;
        out_from[l] = at.row * Out::ROW + at.piece * Out::GROUP + at.run * Out::PITCH + at.pair * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) out_valid |= static_cast<u32>(at.valid && x + i < q) << (2 * l + i);
    }
    const auto is_stored = [&](int step, int l) {
        const int row = step * ROWS + out_row[l];
        return row >= 0 && row < out_rows[l];
    };

    // ---- Copies: device memory, stages, planes
    uint4 added[HAS_RESIDUAL ? Out::ITEMS : 1][2];
    auto load_residual = [&](int step) {
        if (!HAS_RESIDUAL) return;
        const u16* const rows = residual + out_block + static_cast<i64>(step * ROWS) * q * c;
#pragma unroll
        for (int l = 0; l < Out::ITEMS; ++l) {
            const u32 columns = is_stored(step, l) ? out_valid >> 2 * l : 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                added[l][i] = make_uint4(0, 0, 0, 0);
                if (columns >> i & 1) added[l][i] = *reinterpret_cast<const uint4*>(rows + out_offset[l] + i * c);
            }
        }
    };
    const u16* in_step = in_block;  // rows of the step that is loaded next
    auto load = [&](int step, int stage) {
        if (step < computed)
#pragma unroll
            for (int l = 0; l < In::ITEMS; ++l)
                if (is_item(l, In::TOTAL)) {
                    const u32 y = step * ROWS + in_y[l];  // unsigned, so that rows above the image are too large
                    In::copy(stages + stage * In::STAGE, l, in_step + in_offset[l], c, y < h ? in_valid >> 2 * l : 0);
                }
        copy_async_commit();
        in_step += static_cast<i64>(ROWS * w) * c;
    };
    auto put = [&](int step, int stage) {
        copy_async_wait<STAGES - 1>();  // for what this thread itself has copied; the first time also of the filter
        if (step < computed)
#pragma unroll
            for (int l = 0; l < In::ITEMS; ++l)
                if (is_item(l, In::TOTAL))
                    In::put(in_shared + step % 2 * In::BUFFER + in_to[l], stages + stage * In::STAGE, l);
        // The residual goes where the results will be. This thread has just read from there what was finished
        // two steps before.
        if (HAS_RESIDUAL)
#pragma unroll
            for (int l = 0; l < Out::ITEMS; ++l)
                if (is_item(l, Out::TOTAL))
                    Out::put(out_shared + step % 2 * Out::BUFFER + out_from[l], added[l]);
    };
    u16* out_step = out + out_block;  // rows of the step that is stored next
    auto store = [&](int step) {
#pragma unroll
        for (int l = 0; l < Out::ITEMS; ++l) {
            if (!is_stored(step, l)) continue;
            uint4 pixels[2];
            Out::get(out_shared + step % 2 * Out::BUFFER + out_from[l], pixels);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (out_valid >> (2 * l + i) & 1) *reinterpret_cast<uint4*>(out_step + out_offset[l] + i * c) = pixels[i];
        }
        out_step += static_cast<i64>(ROWS * q) * c;
    };

    // ---- First copies
    constexpr int FILTER_PIECES = BLOCK_C * R * S / 8;  // of 16 bytes
    for (int e = tid; e < FILTER_PIECES; e += THREADS) {
        const bool valid = e * 8 < (c - c0) * R * S;
        const u16* const from = filter + static_cast<i64>(c0) * R * S + e * 8;
        copy_async_16(shared_address(filter_shared) + e * 16, valid ? from : filter, valid);
    }
#pragma unroll
    for (int step = 0; step < STAGES; ++step) load(step, step);
    load_residual(0);
    if (2 * In::PAIRS < 8 * UNITS || IDLE) {  // columns that are read, but that nothing is ever put into
        for (int e = tid; e < 2 * In::BUFFER / 16; e += THREADS)
            reinterpret_cast<uint4*>(in_shared)[e] = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    put(0, 0);
    load(STAGES, 0);
    load_residual(1);
    __syncthreads();

    // ---- Filter and fragments
    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16".
    const int channel0 = warp % (BLOCK_C / WARP_C) * WARP_C, warp_strip = warp / (BLOCK_C / WARP_C) * WARP_STRIPS;
    u32 taps[WARP_C][R][SPAN];
    float bias_values[WARP_C];
#pragma unroll
    for (int channel = 0; channel < WARP_C; ++channel) {
        const u16* const from = reinterpret_cast<const u16*>(filter_shared) + (channel0 + channel) * R * S;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int unit = 0; unit < SPAN; ++unit) {
                taps[channel][r][unit] = 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int s = 8 * unit + lane % 4 * 2 + i - lane / 4;  // input column less output column
                    const int tap = r * S + s;
                    if (s >= 0 && s < S)
                        taps[channel][r][unit] |= static_cast<u32>(from[FLIP ? R * S - 1 - tap : tap]) << 16 * i;
                }
            }
        if (HAS_BIAS) {
            const int k = c0 + channel0 + channel;
            bias_values[channel] = k < c ? to_float(bias[k]) : 0.0f;
        }
    }
    u32 fragment_from[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        fragment_from[tile] = shared_address(in_shared) + channel0 / 8 * In::GROUP + channel0 % 8 * In::CHANNEL +
                              In::strip(warp_strip + tile * 16 + lane % 16) + lane / 16 * 16;
    // Strips of results lie 16 bytes apart.
    u8* const result_to = out_shared + channel0 / 8 * Out::GROUP + channel0 % 8 * Out::CHANNEL +
                          (warp_strip + lane / 4) * 16 + lane % 4 * 4;

    // ---- Products of a row
    float acc[WARP_C][R][TILES][4] = {};
    // Multiplies row t (of a period, compile-time) of a channel and tile by all filter rows.
    auto multiply = [&](u32 from, int channel, int tile, int t) {
        u32 a[SPAN / 2 + 1][4];
#pragma unroll
        for (int unit = 0; unit < SPAN; unit += 2) {
            if (unit + 1 < SPAN) load_matrix_x4(a[unit / 2], from + unit * 16);
            else load_matrix_x2(a[unit / 2], from + unit * 16);
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const u32 (&b)[SPAN] = taps[channel][r];
            float (&d)[4] = acc[channel][ring(r, t)][tile];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (r == 0) d[e] = 0.0f;
            if (SPAN == 1) mma_k8(d, a[0], b[0]);  // which reads the first two words of a[0]
            else mma_k16(d, a[0], b[0], b[SPAN > 1 ? 1 : 0]);  // [1]; SPAN 1 only has to compile
            if (SPAN == 3) mma_k8(d, a[SPAN / 2], b[SPAN - 1]);
        }
    };
    // Puts the results of the output row that row t finishes into a step's planes.
    auto finish = [&](u8* to, int t) {
#pragma unroll
        for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
            for (int half = 0; half < 2 * TILES; ++half) {  // 8 strips
                u32* const word = reinterpret_cast<u32*>(to + channel * Out::CHANNEL + half * 8 * 16);
                const u32 plus = HAS_RESIDUAL ? *word : 0;
                float x[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    x[e] = acc[channel][ring(R - 1, t)][half / 2][half % 2 * 2 + e];
                    if (HAS_BIAS) x[e] += bias_values[channel];
                    if (HAS_RESIDUAL) x[e] += to_float(static_cast<u16>(plus >> 16 * e));  // before the only rounding
                    x[e] = activate<ACTIVATION>(x[e]);
                }
                *word = pack(x[0], x[1]);
            }
    };
    auto skip = [&](int t) {  // opens an output row with zeros, as products with a row of padding would
#pragma unroll
        for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int e = 0; e < 4; ++e)  // volatile: else this is done in every row, before the branch
                    asm volatile("mov.b32 %0, 0;" : "=f"(acc[channel][ring(0, t)][tile][e]));
    };
    auto compute = [&](int step, auto phase) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int t = decltype(phase)::first_row + row;
            if (step < computed) {
                const u32 offset = step % 2 * In::BUFFER + row * In::ROW;
#pragma unroll
                for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        multiply(fragment_from[tile] + offset + channel * In::CHANNEL, channel, tile, t);
            } else {
                skip(t);
            }
            if (first + step * ROWS + row >= R - 1) finish(result_to + step % 2 * Out::BUFFER + row * Out::ROW, t);
        }
    };

    // ---- Steps
    int stage = STAGES > 1 ? 1 : 0;  // of the step that is put next
    const auto exchange = [&](int step) {
        if (step > 0) store(step - 1);
        if (step + 1 < steps) {
            put(step + 1, stage);
            load(step + 1 + STAGES, stage);
            if (step + 2 < steps) load_residual(step + 2);
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    };
    const bool exchanges_first = warp / 4 % 2 == 0;
    int phase = 0;
    for (int step = 0; step < steps; ++step) {
        if (step > 0) __syncthreads();
        if (exchanges_first) exchange(step);
        in_phase(phase, [&](auto constant) { compute(step, constant); });
        phase = phase + 1 == PERIOD ? 0 : phase + 1;
        if (!exchanges_first) exchange(step);
    }
    __syncthreads();
    store(steps - 1);
}
