// A 3x3 convolution with stride 1 by Winograd's F(2x2, 3x3): four outputs from a tile of 4x4 inputs cost 16 products
// per pair of channels instead of 36. Its rounding is no larger than that of the plain sum; larger tiles would save
// more, but lose a digit. Tiles are worked on in groups: their inputs transformed, one product of matrices for each of
// the 16 points, the outputs transformed back, with bias, sum and limits.

#include <algorithm>
#include <cstdint>

#include "products.h"

namespace {
constexpr int SIDE = 4, OUT = 2, POINTS = SIDE * SIDE;  // of a tile: inputs, outputs
constexpr long DEPTH = 256;                             // input channels at a time: a panel of them stays in an L1 cache
constexpr long SPREAD = 16;  // floats between points: else all would fall on the same lines of a cache

struct Shape {
  long batch, inputs, outputs;  // the last two in channels
  long height, width, padding_h, padding_w;
  long out_height() const { return height + 2 * padding_h - 2; }
  long out_width() const { return width + 2 * padding_w - 2; }
  long tiles_h() const { return (out_height() + OUT - 1) / OUT; }
  long tiles_w() const { return (out_width() + OUT - 1) / OUT; }
  // Tiles of a group: few where all weights stay in an L2 cache, many where they are read again for each group.
  long group() const { return inputs * outputs > 128 * 128 ? 64 : 32; }
};

// Transformed tiles: points, in each the tiles of a group, in each the channels.
struct Plane {
  long row, floats;  // of a tile, of a point
  Plane(long group, long channels) : row(Panels(channels).vectors * LANES), floats(group * row + SPREAD) {}
};

long scratch_floats(const Shape &job) {
  return POINTS * (Plane(job.group(), job.inputs).floats + Plane(job.group(), job.outputs).floats);
}

struct Winograd : Job, Shape {
  const float *x, *other, *weights, *bias;  // other: null where nothing is added; bias: whole vectors
  float *y, *scratch;
  float low, high;
};

struct Place {
  long image, top, left;  // of the outputs of a tile
};

INLINE Place place_of(const Winograd &job, long tile) {
  const long columns = job.tiles_w(), tiles = job.tiles_h() * columns, at = tile % tiles;
  return {tile / tiles, at / columns * OUT, at % columns * OUT};
}

// ------------------------------------------------------------------------------------------------- transforms

INLINE void into_points(Vec *d, int step) {
  const Vec a = d[0], b = d[step], c = d[2 * step], e = d[3 * step];
  d[0] = a - c, d[step] = b + c, d[2 * step] = c - b, d[3 * step] = b - e;
}

INLINE void out_of_points(Vec *d, int step) {
  const Vec a = d[0], b = d[step], c = d[2 * step], e = d[3 * step];
  d[0] = a + b + c, d[step] = b - c - e;
}

EACH_PROCESSOR void transform_inputs(const Winograd &job, const Plane &plane, long first, long count, float *to) {
  for (long t = 0; t < count; t++, to += plane.row) {
    const Place place = place_of(job, first + t);
    const long top = place.top - job.padding_h, left = place.left - job.padding_w;
    const bool inside = top >= 0 && left >= 0 && top + SIDE <= job.height && left + SIDE <= job.width;
    const long corner = (place.image * job.height + top) * job.width + left;  // may lie in the padding
    for (long c = 0; c < job.inputs; c += LANES) {
      Vec d[POINTS];
      for (int i = 0; i < SIDE; i++)
        UNROLL for (int j = 0; j < SIDE; j++) {
          const bool real = inside || (top + i >= 0 && top + i < job.height && left + j >= 0 && left + j < job.width);
          const long pixel = corner + i * job.width + j;
          d[i * SIDE + j] = real ? load_some(job.x + pixel * job.inputs + c, job.inputs - c) : Vec{};
        }
      UNROLL for (int j = 0; j < SIDE; j++) into_points(d + j, SIDE);
      UNROLL for (int i = 0; i < SIDE; i++) into_points(d + i * SIDE, 1);
      UNROLL for (int k = 0; k < POINTS; k++) store(to + k * plane.floats + c, d[k]);
    }
  }
}

EACH_PROCESSOR void transform_outputs(const Winograd &job, const Plane &plane, long first, long count,
                                      const float *from) {
  for (long t = 0; t < count; t++, from += plane.row) {
    const Place place = place_of(job, first + t);
    const long corner = (place.image * job.out_height() + place.top) * job.out_width() + place.left;
    const long rows = job.out_height() - place.top, columns = job.out_width() - place.left;
    for (long c = 0; c < job.outputs; c += LANES) {
      Vec d[POINTS];
      UNROLL for (int k = 0; k < POINTS; k++) d[k] = load(from + k * plane.floats + c);
      UNROLL for (int j = 0; j < SIDE; j++) out_of_points(d + j, SIDE);
      const Vec bias = load(job.bias + c);
      UNROLL for (int i = 0; i < OUT; i++) {
        out_of_points(d + i * SIDE, 1);
        UNROLL for (int j = 0; j < OUT; j++) {
          if (i >= rows || j >= columns) continue;
          const long at = (corner + i * job.out_width() + j) * job.outputs + c, lanes = job.outputs - c;
          Vec value = d[i * SIDE + j] + bias;
          if (job.other) value += load_some(job.other + at, lanes);
          store_some(job.y + at, bounded(value, job.low, job.high), lanes);
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------- products

// A panel of output channels of `count` tiles, at one point, from `depth` input channels.
struct Product {
  const float *from, *weights;
  float *to;
  long from_row, to_row, count, depth;
  bool first;  // else it is added to what is there
};

template <int VECS>
INLINE void multiply_panel(const Product &job) {
  for (long t = 0; t < job.count; t += ROWS<VECS>) {
    const float *from[ROWS<VECS>];
    float *to[ROWS<VECS>];
    Vec sum[ROWS<VECS>][VECS];
    UNROLL for (int r = 0; r < ROWS<VECS>; r++) {
      const long here = std::min(t + r, job.count - 1);
      from[r] = job.from + here * job.from_row, to[r] = job.to + here * job.to_row;
      UNROLL for (int v = 0; v < VECS; v++) sum[r][v] = job.first ? Vec{} : load(to[r] + v * LANES);
    }
    multiply<ROWS<VECS>, VECS>(from, job.depth, job.weights, sum);
    UNROLL for (int r = 0; r < ROWS<VECS>; r++)
      UNROLL for (int v = 0; v < VECS; v++) store(to[r] + v * LANES, sum[r][v]);
  }
}

// Each a function of its own, which has all registers to itself.
EACH_PROCESSOR void multiply_1(const Product &job) { multiply_panel<1>(job); }
EACH_PROCESSOR void multiply_2(const Product &job) { multiply_panel<2>(job); }
EACH_PROCESSOR void multiply_3(const Product &job) { multiply_panel<3>(job); }

void multiply_points(const Winograd &job, const Plane &in, const Plane &out, long count, const float *from, float *to) {
  const Panels panels(job.outputs);
  for (long k = 0; k < POINTS; k++)
    for (long start = 0; start < job.inputs; start += DEPTH)
      for (long panel = 0; panel < panels.count; panel++) {
        const long v = panels.begin(panel), width = panels.begin(panel + 1) - v;
        const float *weights = job.weights + ((k * panels.vectors + v) * job.inputs + start * width) * LANES;
        const long depth = std::min(DEPTH, job.inputs - start);
        (width == 3 ? multiply_3 : width == 2 ? multiply_2 : multiply_1)(
            {from + k * in.floats + start, weights, to + k * out.floats + v * LANES, in.row, out.row, count, depth,
             start == 0});
      }
}

void winograd_share(void *given) {
  const Winograd &job = *static_cast<Winograd *>(given);
  const Plane in(job.group(), job.inputs), out(job.group(), job.outputs);
  float *inputs = job.scratch + (job.alone ? 0 : thread_number()) * scratch_floats(job);
  float *outputs = inputs + POINTS * in.floats;
  const Share mine = my_share(job, job.batch * job.tiles_h() * job.tiles_w());
  const long tiles = mine.end - mine.begin, groups = (tiles + job.group() - 1) / job.group();
  for (long g = 0; g < groups; g++) {
    const long first = mine.begin + tiles * g / groups, count = mine.begin + tiles * (g + 1) / groups - first;
    transform_inputs(job, in, first, count, inputs);
    multiply_points(job, in, out, count, inputs, outputs);
    transform_outputs(job, out, first, count, outputs);
  }
}

// ------------------------------------------------------------------------------------------------- weights

struct Packing : Job {
  long inputs, outputs;
  const float *weight;
  long by_output, by_input, by_row, by_column;  // strides
  float *packed;
};

INLINE void weights_into_points(const Vec *from, int step, Vec *to, int to_step) {
  const Vec a = from[0], b = from[step], c = from[2 * step];
  to[0] = a, to[to_step] = 0.5f * (a + b + c), to[2 * to_step] = 0.5f * (a - b + c), to[3 * to_step] = c;
}

// The weights from one input channel to a vector of output channels; those past the last are zeros.
INLINE void pack_vector(const Packing &job, long output, long input, float *to, long point) {
  Vec taps[9], columns[3 * SIDE], made[POINTS];
  const float *from = job.weight + output * job.by_output + input * job.by_input;
  const long lanes = std::min(LANES, job.outputs - output);
  for (int t = 0; t < 9; t++) {
    float gathered[LANES] = {};
    for (long o = 0; o < lanes; o++) gathered[o] = from[o * job.by_output + t / 3 * job.by_row + t % 3 * job.by_column];
    taps[t] = load(gathered);
  }
  UNROLL for (int j = 0; j < 3; j++) weights_into_points(taps + j, 3, columns + j, 3);
  UNROLL for (int i = 0; i < SIDE; i++) weights_into_points(columns + i * 3, 1, made + i * SIDE, 1);
  UNROLL for (int k = 0; k < POINTS; k++) store(to + k * point, made[k]);
}

EACH_PROCESSOR void pack_share(void *given) {
  const Packing &job = *static_cast<Packing *>(given);
  const Panels panels(job.outputs);
  const long point = panels.vectors * LANES * job.inputs;
  const Share mine = my_share(job, job.inputs);
  for (long panel = 0; panel < panels.count; panel++) {
    const long begin = panels.begin(panel) * LANES, width = panels.begin(panel + 1) * LANES - begin;
    for (long input = mine.begin; input < mine.end; input++)
      for (long o = 0; o < width; o += LANES)
        pack_vector(job, begin + o, input, job.packed + begin * job.inputs + input * width + o, point);
  }
}

// batch, channels of x and of y, height and width of x, padding of each.
Shape shape_of(const int64_t *s) { return {s[0], s[1], s[2], s[3], s[4], s[5], s[6]}; }
}  // namespace

// Floats of working memory.
EXPORT long gf_winograd_scratch(const int64_t *shape, int threads) { return threads * scratch_floats(shape_of(shape)); }

// Floats of packed weights.
EXPORT long gf_winograd_packed(long inputs, long outputs) { return POINTS * Panels(outputs).vectors * LANES * inputs; }

EXPORT void gf_winograd_pack(const float *weight, long inputs, long outputs, const int64_t *strides, float *packed,
                             int threads) {
  Packing job;
  job.inputs = inputs, job.outputs = outputs, job.weight = weight, job.packed = packed;
  job.by_output = strides[0], job.by_input = strides[1], job.by_row = strides[2], job.by_column = strides[3];
  run(pack_share, job, inputs * outputs * POINTS, threads);
}

EXPORT void gf_winograd(const float *x, const float *other, float *y, const float *weights, const float *bias,
                        const int64_t *shape, double low, double high, float *scratch, int threads) {
  Winograd job;
  static_cast<Shape &>(job) = shape_of(shape);
  job.x = x, job.other = other, job.y = y, job.weights = weights, job.bias = bias, job.scratch = scratch;
  job.low = float(low), job.high = float(high);
  run(winograd_share, job, job.batch * job.height * job.width * job.inputs * job.outputs, threads);
}
