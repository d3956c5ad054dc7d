// Vectors of floats, for products whose sums have to stay in registers.

#pragma once

#include <cstring>

#include "parallel.h"

typedef float Vec __attribute__((vector_size(32)));
constexpr long LANES = 8;  // floats of a vector
#define UNROLL _Pragma("GCC unroll 8")  // sums stay in registers only where their indices are constants

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
