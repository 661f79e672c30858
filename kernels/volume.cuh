// Parts of the kernels of volumes: loops over rows whose number the compiler knows in each turn.
#include "depthwise.cuh"

template <int VALUE>
struct Constant {
    __device__ __forceinline__ constexpr operator int() const { return VALUE; }
};

// Calls body(Constant<0>()), body(Constant<1>()), ... Turns that meet few of many taps are small in this way from
// the start: as a loop, which would have all taps until it is unrolled, the compiler would leave it a loop.
template <int COUNT, int INDEX = 0, typename Body>
__device__ __forceinline__ void unrolled(const Body& body) {
    if constexpr (INDEX < COUNT) {
        body(Constant<INDEX>());
        unrolled<COUNT, INDEX + 1>(body);
    }
}
