// Kernels that do something wrong, and their like that do not: what the interpreter must tell apart.
// One block of 64 threads; `in` has 64 words, `out` 64.
#define DTYPE 0
#include "common.cuh"

extern "C" __global__ void case_(u32* out, const u32* in, u32* zeroed, u32* scratch, int count) {
    extern __shared__ __align__(16) u32 shared[];
    const int tid = threadIdx.x;
    const u32 to = shared_address(shared + 4 * tid);
    u32 result = tid;
#if CASE_exchange || CASE_exchange_without_barrier
    shared[tid] = in[tid];
#if CASE_exchange
    __syncthreads();
#endif
    result = shared[63 - tid];
#elif CASE_overwrite || CASE_overwrite_without_barrier
    shared[tid] = in[tid];
    __syncthreads();
    result = shared[63 - tid];
#if CASE_overwrite
    __syncthreads();
#endif
    shared[tid] = result;
#elif CASE_warp_exchange || CASE_warp_exchange_without_barrier
    shared[tid] = in[tid];
#if CASE_warp_exchange
    __syncwarp();
#endif
    result = *(volatile u32*)(shared + (tid ^ 1));
#elif CASE_copy || CASE_copy_without_wait || CASE_copy_without_barrier
    copy_async_16(to, in + 4 * (tid % 16), true);
    copy_async_commit();
#if !CASE_copy_without_wait
    copy_async_wait<0>();
#endif
#if !CASE_copy_without_barrier
    __syncthreads();
#endif
    result = shared[4 * (63 - tid)];
#elif CASE_late_copy
    shared[4 * tid] = 1;
    copy_async_16(to, in + 4 * (tid % 16), true);
    copy_async_commit();
    copy_async_16(shared_address(shared + 4 * (64 + tid)), in, true);
    copy_async_commit();
    copy_async_wait<1>();
    result = shared[4 * tid];
#elif CASE_beyond
    result = in[tid + 1];
#elif CASE_misaligned
    const uint2 pair = reinterpret_cast<const uint2*>(in + 1)[tid % 16];
    result = pair.x + pair.y;
#elif CASE_nowhere
    result = *(const u32*)(unsigned long long)tid;
#elif CASE_beyond_shared
    result = shared[count + tid];
#elif CASE_unwritten
    scratch[tid] = tid;
    __syncthreads();
    result = scratch[tid + 1];
#elif CASE_same_place
    out[tid / 2] = tid;
    return;
#elif CASE_two_barriers
    if (tid < 40) {
        __syncthreads();
        result = 1;
    } else {
        asm volatile("bar.sync 0;");
        result = in[tid];
    }
#elif CASE_some_threads
    if (tid >= 40) return;  // those that have ended are not waited for
    shared[tid] = tid;
    __syncthreads();
    out[tid] = shared[39 - tid];
    return;
#elif CASE_half_warp
    if (tid < 48) result = __shfl_xor_sync(0xffffffff, result, 1);
#elif CASE_dirty
    atomicAdd(zeroed, 1u);
#elif CASE_last_block
    if (atomicInc(zeroed, 63) == 63) result = 1000;
#elif CASE_parting
    // Ways that part, in a loop whose threads leave it at different times, and meet again.
    result = 0;
    for (int i = 0; i < tid % 7; ++i) result += i % 2 ? in[tid] : tid;
#endif
    out[tid] = result;
}

// Each word of `out` is what one instruction makes of two words of `in`.
extern "C" __global__ void operations(u32* out, const u32* in) {
    const int tid = threadIdx.x;
    const u32 a = in[tid], b = in[64 + tid];
    u32* const to = out + tid;
    u32 d;
    int i = 0;
#define RECORD to[64 * i++] = d
#define BINARY(op) asm(op " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); RECORD
    BINARY("mul.hi.u32");
    BINARY("mul.hi.s32");
    BINARY("div.s32");
    BINARY("rem.s32");
    BINARY("shl.b32");
    BINARY("shr.u32");
    BINARY("shr.s32");
    BINARY("min.s32");
    BINARY("max.u32");
    asm("bfe.u32 %0, %1, 5, 11;" : "=r"(d) : "r"(a)); RECORD;
    asm("bfe.s32 %0, %1, 5, 11;" : "=r"(d) : "r"(a)); RECORD;
    asm("bfi.b32 %0, %1, %2, 9, 7;" : "=r"(d) : "r"(a), "r"(b)); RECORD;
    asm("prmt.b32 %0, %1, %2, 0x5d06;" : "=r"(d) : "r"(a), "r"(b)); RECORD;
    asm("shf.l.wrap.b32 %0, %1, %2, 39;" : "=r"(d) : "r"(a), "r"(b)); RECORD;
    asm("shf.r.clamp.b32 %0, %1, %2, 13;" : "=r"(d) : "r"(a), "r"(b)); RECORD;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(a), "r"(b), "r"(tid * 0x01010101)); RECORD;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(static_cast<int>(a) * 1e-7f), "f"(b * 1e-9f)); RECORD;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(static_cast<int>(a) * 1e-7f), "f"(b * 1e-9f)); RECORD;
    asm("cvt.sat.f32.f32 %0, %1;" : "=r"(d) : "f"(static_cast<int>(a) * 1e-9f)); RECORD;
    asm("fma.rm.f32 %0, %1, %2, %3;" : "=r"(d) : "f"(static_cast<int>(a) * 1e-7f), "f"(b * 1e-9f), "f"(12582912.0f)); RECORD;
    d = __shfl_xor_sync(0xffffffff, a, 5); RECORD;
    d = __shfl_up_sync(0xffffffff, a, 3); RECORD;
    d = __shfl_down_sync(0xffffffff, a, 3, 8); RECORD;
    d = __shfl_sync(0xffffffff, a, b, 16); RECORD;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a)); RECORD;
}
