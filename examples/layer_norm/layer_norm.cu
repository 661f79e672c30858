// Layer norm over the last dimension of a (rows, columns) matrix.
//
//   out[i, j] = (in[i, j] - mean[i]) / sqrt(variance[i] + 1e-5) * weight[j] + bias[j]
//
// DTYPE is that of all tensors; AFFINE 0 leaves out weight and bias; sums are in float32. The config:
//
//   ROW_THREADS   threads that share a row: up to a warp, or whole warps that are then a block
//   VECTOR        neighbouring elements that a thread loads and stores at once
//   PIECES        vectors of its row that a thread keeps in registers; 0: none, it reads them twice
//
// A block is ROW_THREADS x blockDim.y threads, and each row of threads normalises one matrix row:
//
//   thread      0      1      2      3      0      1      2      3      ROW_THREADS 4,
//            |vector|vector|vector|vector|vector|vector|vector|      |  PIECES 2 for 7 vectors
//   piece    '----------- 0 -----------' '----------- 1 -----------'
typedef long long i64;

#define DTYPE_FLOAT16 0
#define DTYPE_BFLOAT16 1
#define DTYPE_FLOAT32 2
#if DTYPE == DTYPE_FLOAT32
typedef float Element;
__device__ __forceinline__ float load(Element x) { return x; }
__device__ __forceinline__ Element store(float x) { return x; }
#elif DTYPE == DTYPE_BFLOAT16
typedef unsigned short Element;
__device__ __forceinline__ float load(Element x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
__device__ __forceinline__ Element store(float x) {
    Element rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
}
#else
typedef unsigned short Element;
__device__ __forceinline__ float load(Element x) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
    return value;
}
__device__ __forceinline__ Element store(float x) {
    Element rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
}
#endif

#ifdef VECTOR  // a config; without one, the reference below is compiled
constexpr float EPSILON = 1e-5f;
constexpr int STRIDE = ROW_THREADS * VECTOR;  // from one piece of a thread to its next
constexpr int LANES = ROW_THREADS < 32 ? ROW_THREADS : 32;  // of a warp, that share a row
constexpr int WARPS = ROW_THREADS / LANES;                  // that share a row

struct alignas(VECTOR * sizeof(Element)) Vector {
    Element at[VECTOR];
};

// The sums of both values over the threads of a row, in each of them.
__device__ __forceinline__ float2 row_sums(float2 sums) {
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) {
        sums.x += __shfl_xor_sync(~0u, sums.x, lane);
        sums.y += __shfl_xor_sync(~0u, sums.y, lane);
    }
    if (WARPS > 1) {
        __shared__ float2 of_warp[WARPS];
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sums;
        __syncthreads();
        sums = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            sums.x += of_warp[warp].x;
            sums.y += of_warp[warp].y;
        }
    }
    return sums;
}

extern "C" __global__ void __launch_bounds__(512) layer_norm(
    Element* __restrict__ out, const Element* __restrict__ in, const Element* __restrict__ weight,
    const Element* __restrict__ bias, int rows, int columns) {
    // A row of threads past the matrix takes part in the shuffles of its warp with the last row.
    const i64 row = blockIdx.x * static_cast<i64>(blockDim.y) + threadIdx.y;
    const i64 start = (row < rows ? row : rows - 1) * columns;
    const int first = threadIdx.x * VECTOR;
    // Squares are summed about the row's first element: about zero they would cancel in the variance
    // where the mean is large, about the mean they would need the row once more.
    const float origin = load(in[start]);

    Vector kept[PIECES ? PIECES : 1];
    float2 sums = make_float2(0.0f, 0.0f);
    auto add = [&](const Vector& vector) {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const float x = load(vector.at[e]) - origin;
            sums.x += x;
            sums.y += x * x;
        }
    };
    auto read = [&](int column) { return *reinterpret_cast<const Vector*>(in + start + column); };
    if (PIECES) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)  // all loads before the first sum waits for one
            if (first + piece * STRIDE < columns) kept[piece] = read(first + piece * STRIDE);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (first + piece * STRIDE < columns) add(kept[piece]);
    } else {
#pragma unroll 4
        for (int column = first; column < columns; column += STRIDE) add(read(column));
    }
    sums = row_sums(sums);
    const float shift = sums.x / columns;
    const float scale = rsqrtf(fmaxf(sums.y / columns - shift * shift, 0.0f) + EPSILON);
    if (row >= rows) return;

    auto write = [&](int column, const Vector& vector) {
        Vector gain, offset, result;
        if (AFFINE) {
            gain = *reinterpret_cast<const Vector*>(weight + column);
            offset = *reinterpret_cast<const Vector*>(bias + column);
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            float x = (load(vector.at[e]) - origin - shift) * scale;
            if (AFFINE) x = x * load(gain.at[e]) + load(offset.at[e]);
            result.at[e] = store(x);
        }
        *reinterpret_cast<Vector*>(out + start + column) = result;
    };
    if (PIECES) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (first + piece * STRIDE < columns) write(first + piece * STRIDE, kept[piece]);
    } else {
#pragma unroll 4
        for (int column = first; column < columns; column += STRIDE) write(column, read(column));
    }
}

#else

// What every config is checked against: one thread a row, in float64.
extern "C" __global__ void reference_layer_norm(
    double* out, const Element* in, const Element* weight, const Element* bias, int rows, int columns) {
    const i64 row = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    if (row >= rows) return;
    in += row * columns;
    double mean = 0.0, variance = 0.0;
    for (int j = 0; j < columns; ++j) mean += load(in[j]) / static_cast<double>(columns);
    for (int j = 0; j < columns; ++j) variance += (load(in[j]) - mean) * (load(in[j]) - mean) / columns;
    const double scale = 1.0 / sqrt(variance + 1e-5);
    for (int j = 0; j < columns; ++j)
        out[row * columns + j] = (load(in[j]) - mean) * scale * (weight ? load(weight[j]) : 1.0) + (bias ? load(bias[j]) : 0.0);
}
#endif
