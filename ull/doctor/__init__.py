"""Is this machine fit to serve tokens without jitter? Checks of the kernel, the processors, limits and the GPU."""
