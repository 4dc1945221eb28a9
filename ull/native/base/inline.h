// Function attributes that host compilers and CUDA share.
#pragma once

#ifdef __CUDACC__
#define ULL_HOST_DEVICE __host__ __device__
#define ULL_INLINE __forceinline__
#else
#define ULL_HOST_DEVICE
#ifndef ULL_INLINE
#define ULL_INLINE inline __attribute__((always_inline))
#endif
#endif
