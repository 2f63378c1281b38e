// Marks a function that both CPU and GPU code call.
#pragma once

#if defined(__CUDACC__)
#define FASTACT_HOST_DEVICE __host__ __device__
#else
#define FASTACT_HOST_DEVICE
#endif
