// Small wrappers over PTX shared by the kernels. No headers: NVRTC compiles this in milliseconds.
//
// The host works out the threads and the shared memory of blocks by the same formulas as a kernel. It gives kernels its
// values as macros called HOST_..., and kernels assert that they come to the same. A value that only such assertions and
// launch bounds read is an enumerator: NVRTC would make a constexpr int a variable of the module.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define DTYPE_FLOAT16 0
#define DTYPE_BFLOAT16 1
#define DTYPE_FLOAT32 2

#define ACTIVATION_NONE 0
#define ACTIVATION_RELU 1
#define ACTIVATION_SILU 2
#define ACTIVATION_GELU 3
#define ACTIVATION_RELU6 4
#define ACTIVATION_HARDSWISH 5

// How the blocks that share sums of a filter's gradient add them up, by the argument `reduction`; the
// numbers are those of confpred/families/common.py.
enum { DIRECT, TWO_KERNELS, LAST_BLOCK, ATOMIC };

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory in the background; writes zeros where !valid
// (the source is then not read, but must still be a legal pointer value).
__device__ __forceinline__ void copy_async_16(u32 to, const void* from, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// Loads 8x8 matrices of 16-bit elements; each lane names one 16-byte row.
__device__ __forceinline__ void load_matrix_x4(u32 (&d)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_matrix_x2(u32 (&d)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(d[0]), "=r"(d[1]) : "r"(from) : "memory");
}

// d += a * b on tensor cores, float32 accumulation: 16 rows, 8 columns, inner extent 16 or 8.
#if DTYPE == DTYPE_BFLOAT16
#define MMA_TYPES "f32.bf16.bf16.f32"
#else
#define MMA_TYPES "f32.f16.f16.f32"
#endif
__device__ __forceinline__ void mma_k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_k8(float (&d)[4], const u32 (&a)[4], u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col." MMA_TYPES " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
}

__device__ __forceinline__ float to_float(u16 bits) {
#if DTYPE == DTYPE_BFLOAT16
    return __uint_as_float(static_cast<u32>(bits) << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

// Two floats rounded to nearest-even and packed, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
#if DTYPE == DTYPE_BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

template <int KIND>
__device__ __forceinline__ float activate(float x) {
    if (KIND == ACTIVATION_RELU) return x < 0.0f ? 0.0f : x;  // written so that NaN stays NaN
    if (KIND == ACTIVATION_SILU) return __fdividef(x, 1.0f + __expf(-x));  // an exact division would cost more than the convolution
    if (KIND == ACTIVATION_GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    if (KIND == ACTIVATION_RELU6) return x < 0.0f ? 0.0f : x > 6.0f ? 6.0f : x;
    if (KIND == ACTIVATION_HARDSWISH) {
        const float y = x + 3.0f;
        return x * ((y < 0.0f ? 0.0f : y > 6.0f ? 6.0f : y) * (1.0f / 6.0f));
    }
    return x;
}
