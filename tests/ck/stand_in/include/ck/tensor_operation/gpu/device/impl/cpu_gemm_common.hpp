// A stand-in: what both GEMMs share.
#pragma once

#include "ck/ck.hpp"
#include "ck/stream_config.hpp"
#include "ck/tensor_operation/gpu/device/gemm_specialization.hpp"
#include "ck/tensor_operation/gpu/device/tensor_layout.hpp"
#include <array>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace ck::tensor_operation::device {

struct BaseArgument {};

template <typename T> struct First { using type = float; };
template <typename T> struct First<Tuple<T>> { using type = T; };

}  // namespace ck::tensor_operation::device
