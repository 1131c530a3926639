// A stand-in: where a kernel runs. On a CPU there are no streams.
#pragma once

#include <hip/hip_runtime.h>

struct StreamConfig {
  hipStream_t stream_id_ = nullptr;
  bool time_kernel_ = false;
  int log_level_ = 0;
};
