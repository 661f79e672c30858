// Layer norm and RMS norm with their activation (row_norm.cuh has the layout). The mean comes first, then the squares of
// the distances from it, both from registers: no digits are lost however far the mean is from zero.
//
//   out = activation((in - mean) * invstd * weight + bias + residual)
//
// HELD: weight and bias stay in registers over all rows of a block; otherwise a block has one round of rows.
//
// Compile-time, beside what row_norm.cuh lists: DTYPE, ACTIVATION, HAS_RESIDUAL, CENTRED (a mean is subtracted),
// OWN_WEIGHTS (weights in DTYPE), STREAM (tensors of more than 32 MiB, of which an L2 cache keeps little).
//
// Parts:
//   block   THREADS / LANES rows at once, and further rows
//   row     LANES neighbouring threads, within a warp or several
//   thread  ACCESSES accesses of VECTOR channels, in registers
//
// Bound: bytes, each tensor crosses memory once, as in the floor.
//
// Instructions: a row stays in registers between its two sums, so nothing is read twice; shuffles (shfl.sync.bfly) add
// within a warp. AHEAD has the next row under way while this one waits for its sums.
//
// Share of the floor:
//   row_norm on NVIDIA H200, 2026-11-27
//      73% of bytes: n=100352 p=1 c=144 weights=float16
//      76% of bytes: n=4096 p=1 c=2304 affine=weight weights=float16 centred=false
//      85% of bytes: n=200704 p=1 c=80 dtype=float32
#include "row_norm.cuh"

static_assert(SUMS_FLOATS * sizeof(float) == HOST_SMEM_BYTES, "the host sizes shared memory otherwise");

struct Weights {
    float weight[ACCESSES][VECTOR], bias[ACCESSES][VECTOR];

    __device__ __forceinline__ void load(const Weight* from_weight, const Weight* from_bias, const Lane& lane) {
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            load_weights(weight[a], from_weight, 1.0f, AFFINE > 0, lane, a);
            load_weights(bias[a], from_bias, 0.0f, AFFINE > 1, lane, a);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) row_norm(
    Element* __restrict__ out, float* __restrict__ mean, float* __restrict__ invstd, const Element* __restrict__ in,
    const Weight* __restrict__ weight, const Weight* __restrict__ bias, const Element* __restrict__ residual,
    const float* __restrict__ eps, int rows, int channels) {
    const Element* const from[] = {in, residual};
    Lane lane(rows, channels);
    Row<1 + HAS_RESIDUAL> row, next;
    if (AHEAD || !HELD) row.load(from, lane, lane.row);  // the first row, or the only one; else the loop loads each
    Weights weights;
    if (HELD) weights.load(weight, bias, lane);
    const float count = static_cast<float>(channels), added = *eps;
    int turn = 0;
    for (int block_row = blockIdx.x * AT_ONCE; block_row < rows; block_row += lane.step, lane.row += lane.step) {
        if (HELD) (AHEAD ? next : row).load(from, lane, AHEAD ? lane.row + lane.step : lane.row);
        float x[ACCESSES][VECTOR], sum[1] = {}, squares[1] = {};
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            row.of[0][a].to_floats(x[a]);
            float part = 0.0f;  // a sum for each access, so that additions need not wait for one another
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) part += x[a][v];
            sum[0] += part;
        }
        if (CENTRED) add_row(sum, turn);
        const float centre = CENTRED ? sum[0] / count : 0.0f;
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            float part = 0.0f;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                x[a][v] -= centre;
                part += x[a][v] * x[a][v];
            }
            if (lane.has(a)) squares[0] += part;  // zeros of the others are not at the mean
        }
        add_row(squares, turn);
        // One over the deviation.
        const float deviation = inverse_deviation(squares[0] / count, added);
        if (CENTRED && lane.is_first()) mean[lane.row] = centre;
        if (lane.is_first()) invstd[lane.row] = deviation;
        if (!HELD) weights.load(weight, bias, lane);  // so late, as until here registers are few
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            if (!lane.has(a) || lane.row >= rows) continue;
            float more[VECTOR];
            if (HAS_RESIDUAL) row.of[HAS_RESIDUAL][a].to_floats(more);  // that is row.of[1]
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                float z = argument(x[a][v], __fmul_rn(weights.weight[a][v], deviation), weights.bias[a][v]);
                if (HAS_RESIDUAL) z = __fadd_rn(z, more[v]);
                x[a][v] = activate<ACTIVATION>(z);
            }
            Access result;
            result.from_floats(x[a]);
            store_last(out + lane.offset(a, lane.row), result);
        }
        if (!HELD) break;
        if (AHEAD) row = next;
    }
}
