"""From a kernel's text to a launch: NVRTC, the cache of compiled kernels, the CUDA driver."""
