// Products whose sums stay in registers: rows of numbers times panels of packed weights. In a panel lie up to three
// vectors of output channels, one input channel after the other.

#pragma once

#include "vectors.h"

constexpr long WIDEST = 3;  // vectors of a panel

// Channels as vectors, and vectors as panels of nearly equal width.
struct Panels {
  long vectors, count;
  explicit Panels(long channels) : vectors((channels + LANES - 1) / LANES), count((vectors + WIDEST - 1) / WIDEST) {}
  long begin(long panel) const { return vectors * panel / count; }
};

// sum[r] += a[r] x b, where b is one panel of packed weights.
template <int ROWS, int VECS>
INLINE void multiply(const float *const (&a)[ROWS], long depth, const float *b, Vec (&sum)[ROWS][VECS]) {
  for (long k = 0; k < depth; k++, b += VECS * LANES) {
    Vec weights[VECS];
    UNROLL for (int v = 0; v < VECS; v++) weights[v] = load(b + v * LANES);
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int v = 0; v < VECS; v++) sum[r][v] += a[r][k] * weights[v];
  }
}

// Rows at a time, so that sums fill the registers. Past the last row, that one is worked on several times.
template <int VECS>
constexpr int ROWS = (VECS == 1 ? 8 : VECS == 2 ? 6 : 4) * (MANY_REGISTERS ? 2 : 1);
