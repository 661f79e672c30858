// Parts that the row norm kernels share: layer norm and RMS norm of a matrix of `rows` by `channels`, each row by its own
// mean and variance. LANES threads share a row and read it once, into registers: each has ACCESSES accesses of VECTOR
// neighbouring channels. A block has THREADS / LANES rows at once, and goes on to those behind the rows of all blocks:
//
//              access 0               access 1               access 2
//   row 0    [t0   t1   t2   t3 ]   [t0   t1   t2   t3 ]   [t0   t1   -    -  ]      LANES = 4, ACCESSES = 3:
//   row 1    [t4   t5   t6   t7 ]   [t4   t5   t6   t7 ]   [t4   t5   -    -  ]      10 columns of VECTOR channels
//    ...
//
// Sums of a row go through the lanes of its warp and, where it has several, through shared memory; their order never
// changes.
//
//   AHEAD         the next row is read before the sums of this one are known
//   FULL          no lane is idle
//   AFFINE        0: nothing, 1: a weight, 2: a weight and a bias
//
// The kernels use the accesses, formulas and activations of batch_norm.cuh, but not its layout; the first three macros
// below only let it compile.
#define UNROLL 1
#define FROZEN 0
#define HOST_SUM_BYTES ((2 * VECTOR + 1) * (THREADS / 2) * 4)
#include "batch_norm.cuh"
#include "norm_weights.cuh"

static_assert(!ADAPTIVE, "all rows have the same weight and bias");

constexpr int AT_ONCE = THREADS / LANES;                 // rows of a block
constexpr int WARP_LANES = LANES < 32 ? LANES : 32;      // of a warp, that share a row
constexpr int ROW_WARPS = LANES / WARP_LANES;            // that share a row
constexpr int WARPS = THREADS / 32;
// Floats of shared memory: two sums of each warp, and as many again, as sums take turns between two parts (add_row).
enum { TURN_FLOATS = 2 * WARPS, SUMS_FLOATS = 2 * TURN_FLOATS };

struct __align__(sizeof(Weight) * VECTOR > 16 ? 16 : sizeof(Weight) * VECTOR) WeightAccess {
    Weight of[VECTOR];
};

extern __shared__ __align__(16) float shared[];

// Where a thread is: `lane` of the threads that share `row`, its first row; the next one is `step` rows on. Only the
// last of its accesses may lie behind the row's end (unless `inside`), and none if the row is FULL.
struct Lane {
    int rows, channels, lane, row, step;
    bool inside;

    __device__ __forceinline__ Lane(int rows, int channels) : rows(rows), channels(channels) {
        lane = threadIdx.x % LANES;
        row = blockIdx.x * AT_ONCE + threadIdx.x / LANES;
        step = gridDim.x * AT_ONCE;
        inside = channel(ACCESSES - 1) < channels;
    }
    __device__ __forceinline__ bool is_first() const { return lane == 0 && row < rows; }
    __device__ __forceinline__ int channel(int access) const { return (access * LANES + lane) * VECTOR; }
    __device__ __forceinline__ bool has(int access) const { return FULL || access < ACCESSES - 1 || inside; }
    __device__ __forceinline__ i64 offset(int access, int row) const { return static_cast<i64>(row) * channels + channel(access); }
};

// A thread's accesses of a row of several tensors, zeros where it has none.
template <int TENSORS>
struct Row {
    Access of[TENSORS][ACCESSES];

    __device__ __forceinline__ void load(const Element* const* from, const Lane& lane, int row) {
#pragma unroll
        for (int t = 0; t < TENSORS; ++t)
#pragma unroll
            for (int a = 0; a < ACCESSES; ++a) of[t][a] = {};
        if (row >= lane.rows) return;
#pragma unroll
        for (int t = 0; t < TENSORS; ++t)
#pragma unroll
            for (int a = 0; a < ACCESSES; ++a)
                if (lane.has(a)) of[t][a] = load_last(from[t] + lane.offset(a, row));
    }
};

// VECTOR channels of a weight or bias, those of access `a`; `absent` where the norm has none (not `has`). A lane that
// is idle in this access gets values that nobody uses.
__device__ __forceinline__ void load_weights(float (&to)[VECTOR], const Weight* from, float absent, bool has, const Lane& lane, int a) {
    WeightAccess found;
    if (has && lane.has(a)) found = *reinterpret_cast<const WeightAccess*>(from + lane.channel(a));
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) to[v] = has ? weight_to_float(found.of[v]) : absent;
}

// The sum over COUNT neighbouring lanes, in each of them.
template <int COUNT>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
    for (int apart = COUNT / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    return value;
}

// The sums of COUNT values (1 or 2) over the threads of a row, in each of them. `turn` alternates between two parts of
// shared memory, so one barrier is enough: a thread at the next sum's barrier has read this sum.
template <int COUNT>
__device__ __forceinline__ void add_row(float (&values)[COUNT], int& turn) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = sum_of_lanes<WARP_LANES>(values[i]);
    if (ROW_WARPS == 1) return;
    float* const sums = shared + turn;
    turn = TURN_FLOATS - turn;
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i * WARPS + threadIdx.x / 32] = values[i];
    __syncthreads();
    const int from = threadIdx.x / LANES * ROW_WARPS + threadIdx.x % ROW_WARPS;  // each warp reads its row's sums again
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = sum_of_lanes<ROW_WARPS>(sums[i * WARPS + from]);
}
