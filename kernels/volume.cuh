// Parts of the kernels of volumes: loops over rows whose number the compiler knows in each turn.
#include "depthwise.cuh"

template <int VALUE>
struct Constant {
    __device__ __forceinline__ constexpr operator int() const { return VALUE; }
};

// Calls body(Constant<0>()), body(Constant<1>()), ... The compiler decides by the size of a loop's body whether to unroll
// it, and the body that this is for is large: all taps, of which a turn meets few. A call with a constant has those alone.
template <int COUNT, int INDEX = 0, typename Body>
__device__ __forceinline__ void unrolled(const Body& body) {
    if constexpr (INDEX < COUNT) {
        body(Constant<INDEX>());
        unrolled<COUNT, INDEX + 1>(body);
    }
}
