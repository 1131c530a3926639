// The vector library of every generated C++ kernel. This file is the order of its parts: each part uses the ones
// above it only, so a kernel may take a prefix of the list, and a generator may paste the texts one after another.
#pragma once
#include "simd_vec.h"
#include "simd_native.h"
#include "simd_convert.h"
#include "simd_memory.h"
#include "simd_divide.h"
#include "simd_double.h"
#include "simd_math.h"
#include "simd_special.h"
#include "simd_random.h"
#include "simd_transpose.h"
