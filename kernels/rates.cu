// Most that a GPU can do, for one whose data sheet nobody has typed in: its rate of half-precision products
// with float32 sums (`products`), and of float32 multiply-adds (`arithmetic`). Both compute in registers alone.
//
// A warp has CHAINS sums under way, none of which waits for another, and goes round them STEPS times. The
// launch (confpred/cuda/discovery.py) counts CHAINS * STEPS products of m16n8k16 a warp, or as many
// multiply-adds a thread. The result is stored only where it is a number that it cannot be, so that the
// compiler keeps the work and memory sees none of it.
//
// Compiled for DTYPE (common.cuh) and:
//   THREADS  threads of a block
//   CHAINS   sums that a warp, or a thread, has under way
//   STEPS    rounds
#include "common.cuh"

constexpr float NEVER = -1.0f;  // sums of products that are not negative

extern "C" __global__ void __launch_bounds__(THREADS) products(float* __restrict__ out) {
    // Halves of 0.0 and 2^-14, by lane, so that the compiler cannot know the sums.
    const u32 value = threadIdx.x & 1 ? 0x04000400u : 0u;
    const u32 a[4] = {value, value, value, value};
    float sums[CHAINS][4];
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain)  // from different numbers, or they would all be one
        for (int i = 0; i < 4; ++i) sums[chain][i] = static_cast<float>(chain);
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) mma_k16(sums[chain], a, value, value);
    }
    float total = 0.0f;
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain)
        for (int i = 0; i < 4; ++i) total += sums[chain][i];
    if (total == NEVER) out[threadIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) arithmetic(float* __restrict__ out) {
    const float factor = threadIdx.x & 1 ? 0.5f : 0.25f;
    float sums[CHAINS];
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = static_cast<float>(threadIdx.x + chain);
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = sums[chain] * factor + factor;
    }
    float total = 0.0f;
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) total += sums[chain];
    if (total == NEVER) out[threadIdx.x] = total;
}
