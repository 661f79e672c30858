// Adds the partial sums of a weight gradient, always in the same order, and rounds them to DTYPE.
//
//   sums[parts][elements]   float32; `elements` are [tap][k][c of its group], then the bias gradient [k]
//   filter_grad[k][tap][c of its group],  bias_grad[k]
//
// A lane owns four neighbouring elements, the warps of a block share the parts: warp i adds parts i,
// i + WARPS, i + 2 * WARPS ..., and warp 0 adds what the warps found.
#include "common.cuh"

constexpr int WARPS = 8;
enum { THREADS = 32 * WARPS, COLUMNS = 32 * 4 };  // of a block; columns are neighbouring elements

// Sizes that launches count on, as confpred/families/grouped/grouped_wgrad.py has it.
static_assert(THREADS == HOST_THREADS && THREADS * sizeof(float4) == HOST_SMEM_BYTES, "the host launches other blocks");
static_assert(COLUMNS == HOST_COLUMNS, "the host launches a block for so many elements");

extern "C" __global__ void __launch_bounds__(THREADS) grouped_wgrad_sum(
    u16* __restrict__ filter_grad, u16* __restrict__ bias_grad, const float* __restrict__ sums,
    int parts, int elements, int taps, int channels, int group_width) {
    extern __shared__ float4 found[];  // [WARPS][32]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = (blockIdx.x * 32 + lane) * 4;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    auto add = [&](float4 x) { total = make_float4(total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w); };
    if (first < elements)
#pragma unroll 8
        for (int part = warp; part < parts; part += WARPS)
            add(*reinterpret_cast<const float4*>(sums + static_cast<i64>(part) * elements + first));
    found[threadIdx.x] = total;
    __syncthreads();
    if (warp > 0 || first >= elements) return;
#pragma unroll
    for (int i = 1; i < WARPS; ++i) add(found[32 * i + lane]);

    const u32 packed[2] = {pack(total.x, total.y), pack(total.z, total.w)};
    const int tap_elements = channels * group_width;
    const int tap = first / tap_elements, element = first % tap_elements;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const u16 value = static_cast<u16>(packed[e / 2] >> 16 * (e % 2));
        const int k = (element + e) / group_width, channel = (element + e) % group_width;
        if (tap < taps) filter_grad[(k * taps + tap) * group_width + channel] = value;
        else bias_grad[element + e] = value;
    }
}
