// Depthwise convolution of unit stride, both gradients in one pass, NHWC, on tensor cores (sm_80 and later).
//
//   in_grad[n, y, x, c]  = sum over r, s of out_grad[n, y + r - pad_h, x + s - pad_w, c] * filter[c, R-1-r, S-1-s]
//   filter_grad[c, R-1-r, S-1-s] = sum over n, y, x of out_grad[n, y + r - pad_h, x + s - pad_w, c] * in[n, y, x, c]
//   bias_grad[c]         = sum over n, y, x of out_grad[n, y, x, c]
//
// The padding is R - 1 and S - 1 less the layer's. The first is the product of depthwise_banded.cu: 16 columns of
// out_grad of a strip with a banded matrix of taps. The second is that of depthwise_banded_wgrad.cu, in which
// out_grad is the operand with a halo and the sums are diagonals. Both read the same planes of out_grad, once as
// they lie and once transposed. Strips are 8 columns of `in`, and windows have 2 to 9 columns.
//
// Planes in shared memory, what a thread copies when, and the config (BLOCK_C, STRIPS, WARP_C, WARP_STRIPS, RUN,
// ROWS, STAGES, MIN_BLOCKS) are those of depthwise_banded.cu. A block goes through tiles of STRIPS strips, which
// `splits` blocks share, and walks down each. Row i of out_grad meets R rows of both other images:
//
//        out_grad row i ----+---- r = 0 --> sums of in_grad row i,     in row i        (entered by this row)
//                           +---- r = 1 --> sums of in_grad row i - 1, in row i - 1
//                           +---- r = 2 --> sums of in_grad row i - 2, in row i - 2    (finished by this row)
//
// Steps run through from one tile to the next, so that loads are always under way. At the end the blocks add
// their sums of the filter's gradient as `reduction` says, in the way of depthwise_banded_wgrad.cu. All but
// ATOMIC give the same bits every time. Sums and tickets are zero before the launch and after it.
//
// Zeros of the band are multiplied too: an infinity or NaN makes NaN of all of in_grad that has it among its 16
// columns, and of all taps.
#include "depthwise_banded.cuh"

constexpr int UNITS = RUN + 1;          // eights of columns of out_grad of a run; 16 bytes each in a plane
constexpr int OUT_X = 8 * RUN + S - 1;  // columns of out_grad that a run needs; the rest stay zero
constexpr int SUMS = R * S + HAS_BIAS;  // of a channel

typedef Planes<UNITS, OUT_X, IDLE ? IDLE + 1 : 0> Grad;  // idle strips are zeros, so add nothing
typedef Planes<RUN, 8 * RUN, IDLE> In;                   // of in, and of in_grad

constexpr int STAGE = Grad::STAGE + In::STAGE;  // bytes of a step's pairs as they come from memory
constexpr int MATRIX = 16 * 9;  // floats of a 16 x 8 matrix in shared memory, on whose diagonals banks differ

// Bytes of two steps' planes of the three images, of what is copied ahead and of the filter; and of what takes
// their place after the last step, a matrix a warp and the sums.
enum {
    PLANES = 2 * (Grad::BUFFER + 2 * In::BUFFER) + STAGES * STAGE + BLOCK_C * R * S * 2,
    RESULTS = 4 * (THREADS / 32 * MATRIX + STRIPS / WARP_STRIPS * BLOCK_C * SUMS),
    SMEM_BYTES = PLANES > RESULTS ? PLANES : RESULTS
};

static_assert(S >= 2 && S <= 9, "a diagonal has eight elements, and a band 16 columns");
static_assert(Grad::ITEMS <= 16, "validity bits are kept in one word");
static_assert(SMEM_BYTES == HOST_SMEM_BYTES, "the host gives a block so much shared memory");

// Like load_matrix_x4 of common.cuh, but each 8x8 matrix is transposed.
__device__ __forceinline__ void load_transposed_x4(u32 (&d)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed_x2(u32 (&d)[2], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(d[0]), "=r"(d[1]) : "r"(from) : "memory");
}

// Where a thread's items of one image lie in a tile, and which of their columns there are.
template <int ITEMS>
struct Items {
    int offset[ITEMS], row[ITEMS];  // elements from the tile's first image; the row at step 0
    int rows[ITEMS];                // rows from 0 are there up to this one
    u32 valid;                      // two columns an item
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_banded_both(
    u16* __restrict__ in_grad, u16* __restrict__ filter_grad, u16* __restrict__ bias_grad,
    const u16* __restrict__ out_grad, const u16* __restrict__ in, const u16* __restrict__ filter,
    float* sums, float* partials, int n, int c, int h, int w, int p, int q, int pad_h, int pad_w,
    int band_rows, int bands, int w_tiles, int c_tiles, int tiles, int splits, int reduction) {
    extern __shared__ __align__(16) u8 shared[];
    u8* const grad_shared = shared;
    u8* const in_shared = grad_shared + 2 * Grad::BUFFER;
    u8* const result_shared = in_shared + 2 * In::BUFFER;
    u8* const stages = result_shared + 2 * In::BUFFER;
    u8* const filter_shared = stages + STAGES * STAGE;

    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int c_tile = blockIdx.x % c_tiles, split = blockIdx.x / c_tiles;
    const int c0 = c_tile * BLOCK_C;

    // With one band all runs agree which rows of out_grad are above and below the image: no products then.
    const int all = band_rows + R - 1;
    const int first = bands == 1 ? min(max(pad_h, 0), all) : 0;
    const int last = bands == 1 ? min(max(p + pad_h, first), all) : all;
    const int tile_steps = ceil_div(all, ROWS);
    const int steps = (tiles - split + splits - 1) / splits * tile_steps;

    const auto place_in = [&](int tile, int item, int pairs) {
        const int run0 = tile * RUNS, image0 = run0 / w_tiles / bands;
        return place_of(item, pairs, run0, image0, n, c - c0, band_rows, bands, w_tiles);
    };
    const auto image_of = [&](int tile) { return static_cast<i64>(tile * RUNS / w_tiles / bands); };
    // Items of in, or of in_grad, whose rows come `late` rows after those of the same step.
    const auto enter_in = [&](Items<In::ITEMS>& items, int tile, int late) {
        items.valid = 0;
#pragma unroll
        for (int l = 0; l < In::ITEMS; ++l) {
            const Place at = place_in(tile, l, In::PAIRS);
            const int x = at.q0 + 2 * at.pair;
            items.row[l] = at.row - late;
            items.rows[l] = at.valid ? min(band_rows, h - at.p0) : 0;
            items.offset[l] = ((at.image * h + at.p0 + items.row[l]) * w + x) * c + 8 * at.piece;
#pragma unroll
            for (int i = 0; i < 2; ++i) items.valid |= static_cast<u32>(at.valid && x + i < w) << (2 * l + i);
        }
    };

    // The tile and step that are loaded next, and the places of this thread's items in that tile.
    int load_tile = split, load_step = 0;
    const u16 *grad_step = out_grad, *in_step = in;  // its rows, of the tile's first image
    Items<Grad::ITEMS> grads;
    Items<In::ITEMS> ins;
    auto enter_tile = [&] {
        grad_step = out_grad + image_of(load_tile) * p * q * c + c0;
        in_step = in + image_of(load_tile) * h * w * c + c0;
        enter_in(ins, load_tile, 0);
        grads.valid = 0;
#pragma unroll
        for (int l = 0; l < Grad::ITEMS; ++l) {
            const Place at = place_in(load_tile, l, Grad::PAIRS);
            const int x = at.q0 - pad_w + 2 * at.pair;
            grads.row[l] = at.p0 - pad_h + at.row;
            grads.offset[l] = ((at.image * p + grads.row[l]) * q + x) * c + 8 * at.piece;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                grads.valid |= static_cast<u32>(at.valid && 2 * at.pair + i < OUT_X && x + i >= 0 && x + i < q) << (2 * l + i);
        }
    };
    int grad_to[Grad::ITEMS], in_to[In::ITEMS];
#pragma unroll
    for (int l = 0; l < Grad::ITEMS; ++l) {
        const Place at = place_of(l, Grad::PAIRS, 0, 0, n, c, 1, 1, 1);
        grad_to[l] = at.row * Grad::ROW + at.piece * Grad::GROUP + at.run * Grad::PITCH + at.pair * 4;
    }
#pragma unroll
    for (int l = 0; l < In::ITEMS; ++l) {
        const Place at = place_of(l, In::PAIRS, 0, 0, n, c, 1, 1, 1);
        in_to[l] = at.row * In::ROW + at.piece * In::GROUP + at.run * In::PITCH + at.pair * 4;
    }

    auto load = [&](int step, u8* stage) {
        if (step < steps) {
            if (load_step == 0) enter_tile();
            const int row = load_step * ROWS;
#pragma unroll
            for (int l = 0; l < Grad::ITEMS; ++l)
                if (is_item(l, Grad::TOTAL)) {
                    const u32 y = row + grads.row[l];
                    Grad::copy(stage, l, grad_step + grads.offset[l], c, y < p ? grads.valid >> 2 * l : 0);
                }
#pragma unroll
            for (int l = 0; l < In::ITEMS; ++l)
                if (is_item(l, In::TOTAL))
                    In::copy(stage + Grad::STAGE, l, in_step + ins.offset[l], c,
                             row + ins.row[l] < ins.rows[l] ? ins.valid >> 2 * l : 0);
            grad_step += static_cast<i64>(ROWS * q) * c;
            in_step += static_cast<i64>(ROWS * w) * c;
            if (++load_step == tile_steps) {
                load_step = 0;
                load_tile += splits;
            }
        }
        copy_async_commit();
    };
    auto put = [&](int step, const u8* stage) {
        copy_async_wait<STAGES - 1>();  // for what this thread itself has copied
#pragma unroll
        for (int l = 0; l < Grad::ITEMS; ++l)
            if (is_item(l, Grad::TOTAL)) Grad::put(grad_shared + step % 2 * Grad::BUFFER + grad_to[l], stage, l);
#pragma unroll
        for (int l = 0; l < In::ITEMS; ++l)
            if (is_item(l, In::TOTAL)) In::put(in_shared + step % 2 * In::BUFFER + in_to[l], stage + Grad::STAGE, l);
    };

    // The same of what is stored next.
    int store_tile = split, store_step = 0;
    u16* result_step = in_grad;
    Items<In::ITEMS> results;
    auto store = [&](int step) {
        if (store_step == 0) {
            result_step = in_grad + image_of(store_tile) * h * w * c + c0;
            enter_in(results, store_tile, R - 1);
        }
#pragma unroll
        for (int l = 0; l < In::ITEMS; ++l) {
            const int row = store_step * ROWS + results.row[l];
            if (!is_item(l, In::TOTAL) || row < 0 || row >= results.rows[l]) continue;
            uint4 pixels[2];
            In::get(result_shared + step % 2 * In::BUFFER + in_to[l], pixels);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (results.valid >> (2 * l + i) & 1) *reinterpret_cast<uint4*>(result_step + results.offset[l] + i * c) = pixels[i];
        }
        result_step += static_cast<i64>(ROWS * w) * c;
        if (++store_step == tile_steps) {
            store_step = 0;
            store_tile += splits;
        }
    };

    constexpr int FILTER_PIECES = BLOCK_C * R * S / 8;  // of 16 bytes
    for (int e = tid; e < FILTER_PIECES; e += THREADS) {
        const bool valid = e * 8 < (c - c0) * R * S;
        const u16* const from = filter + static_cast<i64>(c0) * R * S + e * 8;
        copy_async_16(shared_address(filter_shared) + e * 16, valid ? from : filter, valid);
    }
#pragma unroll
    for (int step = 0; step < STAGES; ++step) load(step, stages + step * STAGE);
    if (2 * Grad::PAIRS < 8 * UNITS || IDLE) {  // columns that are read, but that nothing is ever put into
        for (int e = tid; e < 2 * (Grad::BUFFER + (IDLE ? In::BUFFER : 0)) / 16; e += THREADS)
            reinterpret_cast<uint4*>(grad_shared)[e] = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    put(0, stages);
    load(STAGES, stages);
    __syncthreads();

    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16".
    const int channel0 = warp % (BLOCK_C / WARP_C) * WARP_C, warp_n = warp / (BLOCK_C / WARP_C);
    u32 taps[WARP_C][R][2];
#pragma unroll
    for (int channel = 0; channel < WARP_C; ++channel) {
        const u16* const from = reinterpret_cast<const u16*>(filter_shared) + (channel0 + channel) * R * S;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int unit = 0; unit < 2; ++unit) {
                taps[channel][r][unit] = 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int s = 8 * unit + lane % 4 * 2 + i - lane / 4;
                    if (s >= 0 && s < S)
                        taps[channel][r][unit] |= static_cast<u32>(from[R * S - 1 - (r * S + s)]) << 16 * i;
                }
            }
    }
    const u32 grad_planes = shared_address(grad_shared) + channel0 / 8 * Grad::GROUP + channel0 % 8 * Grad::CHANNEL;
    const u32 in_planes = shared_address(in_shared) + channel0 / 8 * In::GROUP + channel0 % 8 * In::CHANNEL;
    u32 rows_from[TILES], columns_from[TILES], in_from[TILES];  // strips are rows of the first product
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int strip = warp_n * WARP_STRIPS + tile * 16;
        rows_from[tile] = grad_planes + Grad::strip(strip + lane % 16) + lane / 16 * 16;
        columns_from[tile] = grad_planes + Grad::strip(strip + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 16;
        in_from[tile] = in_planes + (strip + lane % 16) * 16;
    }
    u8* const result_to = result_shared + channel0 / 8 * In::GROUP + channel0 % 8 * In::CHANNEL +
                          (warp_n * WARP_STRIPS + lane / 4) * 16 + lane % 4 * 4;
    constexpr u32 ONES = DTYPE == DTYPE_BFLOAT16 ? 0x3F803F80 : 0x3C003C00;

    float result[WARP_C][R][TILES][4] = {}, acc[WARP_C][R][4] = {}, bias_acc[WARP_C][4] = {};
    u32 window[WARP_C][R][TILES][2] = {};
    auto multiply = [&](u32 grad_offset, int channel, int tile, int t, bool is_own) {
        u32 a[4];
        load_matrix_x4(a, rows_from[tile] + grad_offset);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float (&d)[4] = result[channel][ring(r, t)][tile];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (r == 0) d[e] = 0.0f;
            mma_k16(d, a, taps[channel][r][0], taps[channel][r][1]);
        }
        load_transposed_x4(a, columns_from[tile] + grad_offset);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const u32 (&b)[2] = window[channel][ring(r, t)][tile];
            mma_k16(acc[channel][r], a, b[0], b[1]);
        }
        if (HAS_BIAS && is_own) mma_k16(bias_acc[channel], a, ONES, ONES);
    };
    int step_of_tile = 0;
    auto compute = [&](int step, auto phase) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int t = decltype(phase)::first_row + row, row_of_tile = step_of_tile * ROWS + row;
            const bool computed = row_of_tile >= first && row_of_tile < last;
            // A row of out_grad is counted for the bias where the input has the same row.
            const bool is_own = row_of_tile >= pad_h && row_of_tile < pad_h + band_rows;
#pragma unroll
            for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    load_transposed_x2(window[channel][ring(0, t)][tile],
                                       in_from[tile] + step % 2 * In::BUFFER + row * In::ROW + channel * In::CHANNEL);
            if (computed) {
#pragma unroll
                for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        multiply(step % 2 * Grad::BUFFER + row * Grad::ROW + channel * Grad::CHANNEL, channel, tile, t, is_own);
            } else {
#pragma unroll
                for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                        for (int e = 0; e < 4; ++e)  // volatile: else this is done in every row, before the branch
                            asm volatile("mov.b32 %0, 0;" : "=f"(result[channel][ring(0, t)][tile][e]));
            }
            if (row_of_tile < R - 1) continue;
            u8* const to = result_to + step % 2 * In::BUFFER + row * In::ROW;
#pragma unroll
            for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
                for (int half = 0; half < 2 * TILES; ++half) {
                    const float* const d = result[channel][ring(R - 1, t)][half / 2] + half % 2 * 2;
                    *reinterpret_cast<u32*>(to + channel * In::CHANNEL + half * 8 * 16) = pack(d[0], d[1]);
                }
        }
    };
    auto clear_window = [&] {
#pragma unroll
        for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int i = 0; i < 2; ++i)  // volatile: else the compiler selects between old and new in every step
                        asm volatile("mov.b32 %0, 0;" : "=r"(window[channel][r][tile][i]));
    };
    u8* stage = stages + (STAGES > 1 ? STAGE : 0);  // of the next step
    const auto exchange = [&](int step) {
        if (step > 0) store(step - 1);
        if (step + 1 < steps) {
            put(step + 1, stage);
            load(step + 1 + STAGES, stage);
        }
        stage = stage == stages + (STAGES - 1) * STAGE ? stages : stage + STAGE;
    };
    const bool exchanges_first = warp / 4 % 2 == 0;
    int phase = 0;
    for (int step = 0; step < steps; ++step) {
        if (step > 0) __syncthreads();
        if (exchanges_first) exchange(step);
        if (step_of_tile == 0) clear_window();
        in_phase(phase, [&](auto constant) { compute(step, constant); });
        step_of_tile = step_of_tile + 1 == tile_steps ? 0 : step_of_tile + 1;
        phase = phase + 1 == PERIOD ? 0 : phase + 1;
        if (!exchanges_first) exchange(step);
    }
    __syncthreads();
    if (steps > 0) store(steps - 1);

    // The sums of a warp's diagonals, then of the warps of a channel, in shared memory.
    __syncthreads();
    float* const matrix = reinterpret_cast<float*>(shared) + warp * MATRIX;
    float* const block_sums = reinterpret_cast<float*>(shared) + THREADS / 32 * MATRIX;
#pragma unroll
    for (int channel = 0; channel < WARP_C; ++channel) {
        float* const to = block_sums + (warp_n * BLOCK_C + channel0 + channel) * SUMS;
#pragma unroll
        for (int r = 0; r < R + HAS_BIAS; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                matrix[(lane / 4 + e / 2 * 8) * 9 + lane % 4 * 2 + e % 2] = r < R ? acc[channel][r < R ? r : 0][e] : bias_acc[channel][e];
            __syncwarp();
            if (lane < (r < R ? S : 1)) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; ++j) sum += matrix[(r < R ? lane + j : pad_w + j) * 9 + j];
                to[r < R ? R * S - 1 - (r * S + lane) : R * S] = sum;
            }
            __syncwarp();
        }
    }
    __syncthreads();
    const int filter_elements = c * R * S, elements = filter_elements + (HAS_BIAS ? c : 0);
    const auto element_of = [&](int o) {
        const int channel = c0 + o / SUMS, tap = o % SUMS;
        return tap < R * S ? channel * R * S + tap : filter_elements + channel;
    };
    const auto write = [&](int element, float value) {
        const u16 rounded = static_cast<u16>(pack(value, 0.0f));
        if (element < filter_elements) filter_grad[element] = rounded;
        else bias_grad[element - filter_elements] = rounded;
    };
    const int count = min(BLOCK_C, c - c0) * SUMS;
    for (int o = tid; o < count; o += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < STRIPS / WARP_STRIPS; ++other) sum += block_sums[other * BLOCK_C * SUMS + o];
        const int element = element_of(o);
        if (reduction == DIRECT) write(element, sum);
        else if (reduction == ATOMIC) atomicAdd(sums + element, sum);
        else partials[static_cast<i64>(split) * elements + element] = sum;
    }
    if (reduction != ATOMIC) return;

    u32& is_last = *reinterpret_cast<u32*>(shared);
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        u32* const tickets = reinterpret_cast<u32*>(sums + elements);
        is_last = atomicInc(tickets + c_tile, splits - 1) == splits - 1;  // the last one leaves it zero again
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int o = tid; o < count; o += THREADS) {
        const int element = element_of(o);
        write(element, __ldcg(sums + element));
        sums[element] = 0.0f;
    }
}
