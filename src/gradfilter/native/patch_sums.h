// What a trained layer keeps of a map, taken while a tile of it is in the cache: of every patch the mean, and in how many
// of its pixels a gate is open (unless y <= low or y >= high; a bound that is NaN never shuts).

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct PatchSums {
  float *means = nullptr;  // channels-last, one per patch; null where nothing is kept
  uint8_t *open;
  long side_h, side_w;
  float low, high;
};

// A map of which some rows are at hand. Rows begin with that of a patch, and end with one or with the map.
struct Rows {
  const float *from;             // the first pixel of the first row, one vector of channels
  long row_step, column_step;    // in floats
  long image, first, count;      // rows at hand, of this image
  long height, width, channels;  // of the map
};

INLINE void sum_patch(const PatchSums &job, const float *from, const Rows &map, long rows, long columns, long at,
                      long lanes) {
  const Vec lows = job.low - Vec{}, highs = job.high - Vec{};
  Vec sum{};
  Ints open{};
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < columns; j++) {
      const Vec y = load(from + i * map.row_step + j * map.column_step);
      sum += y;
      open -= Ints(~((y <= lows) | (y >= highs)));
    }
  store_some(job.means + at, sum * (1.0f / float(rows * columns)), lanes);
  const Bytes counts = __builtin_convertvector(open, Bytes);
  std::memcpy(job.open + at, &counts, std::min(lanes, LANES));
}

// `vector`: which of the map's channels these are.
INLINE void sum_patches(const PatchSums &job, const Rows &map, long vector) {
  const long patches_h = (map.height + job.side_h - 1) / job.side_h, patches_w = (map.width + job.side_w - 1) / job.side_w;
  const long lanes = map.channels - vector * LANES;
  for (long i = 0; i < map.count; i += job.side_h) {
    const long rows = std::min(job.side_h, map.count - i);
    const float *line = map.from + i * map.row_step;
    long at = ((map.image * patches_h + (map.first + i) / job.side_h) * patches_w) * map.channels + vector * LANES;
    for (long j = 0; j < map.width; j += job.side_w, line += job.side_w * map.column_step, at += map.channels) {
      const long columns = std::min(job.side_w, map.width - j);
      if (rows == 2 && columns == 2)
        sum_patch(job, line, map, 2, 2, at, lanes);
      else
        sum_patch(job, line, map, rows, columns, at, lanes);
    }
  }
}
