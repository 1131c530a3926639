// A stand-in for CK's universal GEMM.
#pragma once

#define CK_STAND_IN DeviceGemmMultiD_Xdl_CShuffle_V3
#include "ck/tensor_operation/gpu/device/impl/cpu_gemm.hpp"
#undef CK_STAND_IN
