// A stand-in for HIP on a CPU: the few names that generated sources use.
#pragma once

#define __host__
#define __device__

using hipStream_t = void *;
using hipError_t = int;

inline hipError_t hipGetLastError() { return 0; }
