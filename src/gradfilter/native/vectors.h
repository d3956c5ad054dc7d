// Vectors of floats, for products whose sums have to stay in registers.

#pragma once

#include <cstring>

#include "parallel.h"

#ifdef __AVX512F__  // build.py's second library: 32 registers of 16 floats
constexpr long LANES = 16;  // floats of a vector
constexpr bool MANY_REGISTERS = true;
#else
constexpr long LANES = 8;
constexpr bool MANY_REGISTERS = false;
#endif
typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
#define UNROLL _Pragma("GCC unroll 16")  // sums stay in registers only where their indices are constants

INLINE Vec load(const float *from) {
  Vec made;
  std::memcpy(&made, from, sizeof(Vec));
  return made;
}

INLINE void store(float *to, Vec value) { std::memcpy(to, &value, sizeof(Vec)); }

// The first `lanes` of a vector, where a map has no more channels.
INLINE Vec load_some(const float *from, long lanes) {
  if (lanes >= LANES) return load(from);
  Vec made = {};
  if (lanes > 0) std::memcpy(&made, from, lanes * sizeof(float));
  return made;
}

INLINE void store_some(float *to, Vec value, long lanes) {
  if (lanes >= LANES)
    store(to, value);
  else
    std::memcpy(to, &value, lanes * sizeof(float));
}

INLINE Vec bounded(Vec x, float low, float high) {
  const Vec lows = low - Vec{}, highs = high - Vec{};
  x = x < lows ? lows : x;  // NaN stays
  return x > highs ? highs : x;
}
