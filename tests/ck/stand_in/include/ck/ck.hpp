// A stand-in for Composable Kernel on a CPU: its names, and numbers of its types.
#pragma once

#include "ck/config.h"
#include <cstdint>
#include <cstring>

#ifndef CK_ENABLE_FP16
#error "ck/config.h does not enable the types that are used"
#endif

namespace ck {

using index_t = int32_t;

template <index_t... Is> struct Sequence {
  static constexpr index_t data[sizeof...(Is) + 1] = {Is..., 0};
  static constexpr index_t At(int k) { return data[k]; }
  static constexpr index_t Size() { return sizeof...(Is); }
};

template <typename... Ts> struct Tuple {
  static constexpr index_t Size() { return sizeof...(Ts); }
};

using half_t = _Float16;
struct bhalf_t { uint16_t bits; };
struct f8_t { uint8_t bits; };  // E4M3 with one zero and one NaN, as on gfx942

enum struct BlockGemmPipelineScheduler { Intrawave, Interwave };
enum struct BlockGemmPipelineVersion { v1, v2, v3, v4, v5 };

inline float to_float(float x) { return x; }
inline float to_float(half_t x) { return static_cast<float>(x); }
inline float to_float(bhalf_t x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float to_float(f8_t x) {
  if (x.bits == 0x80) return __builtin_nanf("");
  int exponent = (x.bits >> 3) & 15, mantissa = x.bits & 7;
  float value = exponent ? (8 + mantissa) * __builtin_ldexpf(1, exponent - 11)
                         : mantissa * __builtin_ldexpf(1, -10);
  return x.bits & 0x80 ? -value : value;
}

template <typename T> struct Rounded {
  static T of(float x) { return static_cast<T>(x); }
};
template <> struct Rounded<bhalf_t> {
  static bhalf_t of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {static_cast<uint16_t>(0x7fc0)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  }
};

template <typename To, typename From> To type_convert(From x) { return Rounded<To>::of(to_float(x)); }

}  // namespace ck
