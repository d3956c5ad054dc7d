// An inverted residual in one pass: 1x1 convolution to many hidden channels, depthwise convolution, 1x1
// convolution back, and the sum with another map. The hidden maps are several times as large as the rest; here they
// never reach memory. A tile of output rows is worked on at a time, and of its hidden channels a chunk, small enough
// that both convolutions find it in the cache. Where it trains, what is kept of the hidden maps is taken there too.
//
// Weights are packed, with their norms: output channels in panels of up to three vectors, within a panel by input
// channel. Channels are filled up with zeros to whole vectors.

#include <algorithm>
#include <cstdint>

#include "patch_sums.h"
#include "products.h"

namespace {
struct Activation {
  enum Kind { BOUNDED, LEAKY, HARDSWISH } kind;
  float low, high;  // bounds; of LEAKY, low is the slope
};

// The kind is known where a loop is compiled: asking at every vector took a tenth of a block's time.
template <Activation::Kind KIND>
INLINE Vec activated(Vec x, const Activation &with) {
  if (KIND == Activation::BOUNDED) return bounded(x, with.low, with.high);
  if (KIND == Activation::LEAKY) return x < Vec{} ? x * with.low : x;
  return x * bounded(x + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f);
}

struct Axis {
  long size, outputs, kernel, stride, padding;
};

// ------------------------------------------------------------------------------------------------- what fits the cache

constexpr long PANELS_PER_CHUNK = 2, CHUNK = PANELS_PER_CHUNK * WIDEST * LANES;
constexpr long HIDDEN_FLOATS = 64 * 1024;  // of a tile: well inside an L2 cache, with room for x and y
constexpr long STRIP_PIXELS = 96;          // between depthwise and project: inside an L1 cache
constexpr long COLUMNS = 8;                // of a depthwise row at a time

struct Shape {
  long batch, inputs, hidden, outputs;  // the last three in channels
  bool expands;                         // else x is the hidden map
  Axis h, w;
};

struct Plan {
  long group, groups;                 // output rows that stay together, and how many such there are
  long tiles, strip;                  // tiles of an image; output rows of a strip
  long line, plane;                   // floats of a hidden row of one vector, with its padding, and of all of a tile
  long hidden_floats, strip_floats;
};

// group: tiles, and strips of them, begin at multiples of so many rows.
Plan plan_of(const Shape &job, long group, int threads) {
  Plan made;
  made.group = group, made.groups = (job.h.outputs + group - 1) / group;
  made.line = (job.w.size + 2 * job.w.padding) * LANES;
  const long chunk = std::min(CHUNK, Panels(job.hidden).vectors * LANES) / LANES;
  const long fitting = std::max(((HIDDEN_FLOATS / (made.line * chunk) - job.h.kernel) / job.h.stride + 1) / group, 1L);
  made.tiles = (made.groups + fitting - 1) / fitting;
  while (made.tiles < made.groups && job.batch * made.tiles < 4 * threads && job.batch * made.tiles % threads)
    made.tiles++;
  const long rows = (made.groups + made.tiles - 1) / made.tiles * group;
  made.plane = ((rows - 1) * job.h.stride + job.h.kernel) * made.line;
  made.strip = std::min(rows, std::max(1L, STRIP_PIXELS / (job.w.outputs * group)) * group);
  // Columns past the end of a row are computed too: they read and write a little more.
  made.hidden_floats = made.plane * chunk + (COLUMNS * job.w.stride + job.w.kernel) * LANES;
  made.strip_floats = (made.strip * job.w.outputs + COLUMNS) * chunk * LANES;
  return made;
}

struct Block : Job, Shape {
  Plan plan;
  const float *x, *other;  // other: null where nothing is added
  float *y;
  const float *expand, *expand_bias, *depthwise, *depthwise_bias, *project, *project_bias;
  Activation first, second;
  PatchSums of_expand, of_depthwise;
  float *scratch;
};

// ------------------------------------------------------------------------------------------------- products

// One panel of hidden channels of `count` pixels, into planes of one vector each whose rows are padded.
template <int VECS, Activation::Kind KIND>
INLINE void expand_panel(const Block &job, const float *x, long count, long vector, float *hidden) {
  const float *weights = job.expand + vector * LANES * job.inputs, *bias = job.expand_bias + vector * LANES;
  long column = 0;
  for (long pixel = 0; pixel < count;) {
    const float *from[ROWS<VECS>];
    float *to[ROWS<VECS>];
    UNROLL for (int r = 0; r < ROWS<VECS>; r++) {
      from[r] = x, to[r] = hidden;
      if (++pixel >= count) continue;
      x += job.inputs, hidden += LANES;
      if (++column == job.w.size) column = 0, hidden += 2 * job.w.padding * LANES;
    }
    Vec sum[ROWS<VECS>][VECS];
    UNROLL for (int r = 0; r < ROWS<VECS>; r++)
      UNROLL for (int v = 0; v < VECS; v++) sum[r][v] = load(bias + v * LANES);
    multiply<ROWS<VECS>, VECS>(from, job.inputs, weights, sum);
    UNROLL for (int r = 0; r < ROWS<VECS>; r++)
      UNROLL for (int v = 0; v < VECS; v++) store(to[r] + v * job.plan.plane, activated<KIND>(sum[r][v], job.first));
  }
}

// `count` pixels of one panel of outputs, from `depth` hidden channels of which `start` is the first.
template <int VECS>
INLINE void project_panel(const Block &job, const float *strip, long depth, long start, long count, long vector,
                          const float *other, float *y) {
  const long at = vector * LANES, lanes = job.outputs - at - (VECS - 1) * LANES;
  const float *weights = job.project + at * Panels(job.hidden).vectors * LANES + start * VECS * LANES;
  const float *bias = job.project_bias + at;
  const long real = std::min(depth, job.hidden - start);  // without those filled up, which infinite inputs make NaN
  for (long pixel = 0; pixel < count; pixel += ROWS<VECS>) {
    const float *from[ROWS<VECS>];
    long to[ROWS<VECS>];
    Vec sum[ROWS<VECS>][VECS];
    UNROLL for (int r = 0; r < ROWS<VECS>; r++) {
      const long here = std::min(pixel + r, count - 1);
      from[r] = strip + here * depth, to[r] = here * job.outputs + at;
      UNROLL for (int v = 0; v < VECS; v++) {
        const long left = v == VECS - 1 ? lanes : LANES;
        sum[r][v] = start ? load_some(y + to[r] + v * LANES, left) : load(bias + v * LANES);
        if (!start && other) sum[r][v] += load_some(other + to[r] + v * LANES, left);
      }
    }
    multiply<ROWS<VECS>, VECS>(from, real, weights, sum);
    UNROLL for (int r = 0; r < ROWS<VECS>; r++)
      UNROLL for (int v = 0; v < VECS; v++)
        store_some(y + to[r] + v * LANES, sum[r][v], v == VECS - 1 ? lanes : LANES);
  }
}

// Each a function of its own, which has all registers to itself.
#define EXPAND(NAME, VECS)                                                                                         \
  EACH_PROCESSOR void NAME(const Block &job, const float *x, long count, long vector, float *hidden) {             \
    if (job.first.kind == Activation::BOUNDED)                                                                     \
      expand_panel<VECS, Activation::BOUNDED>(job, x, count, vector, hidden);                                      \
    else if (job.first.kind == Activation::LEAKY)                                                                  \
      expand_panel<VECS, Activation::LEAKY>(job, x, count, vector, hidden);                                        \
    else                                                                                                           \
      expand_panel<VECS, Activation::HARDSWISH>(job, x, count, vector, hidden);                                    \
  }
#define PROJECT(NAME, VECS)                                                                                        \
  EACH_PROCESSOR void NAME(const Block &job, const float *strip, long depth, long start, long count, long vector,  \
                           const float *other, float *y) {                                                         \
    project_panel<VECS>(job, strip, depth, start, count, vector, other, y);                                        \
  }
EXPAND(expand_1, 1)
EXPAND(expand_2, 2)
EXPAND(expand_3, 3)
PROJECT(project_1, 1)
PROJECT(project_2, 2)
PROJECT(project_3, 3)

// ------------------------------------------------------------------------------------------------- depthwise

constexpr int ANY = 0;  // a kernel of any size

template <int STRIDE, int KERNEL, Activation::Kind KIND, int COUNT>
INLINE void depthwise_columns(const Block &job, const float *hidden, long line, const float *weight, Vec bias, float *to,
                              long step) {
  const long height = KERNEL == ANY ? job.h.kernel : KERNEL, width = KERNEL == ANY ? job.w.kernel : KERNEL;
  Vec sum[COUNT];
  UNROLL for (int c = 0; c < COUNT; c++) sum[c] = bias;
  for (long a = 0; a < height; a++, hidden += line)
    for (long b = 0; b < width; b++, weight += LANES) {
      const Vec tap = load(weight);
      UNROLL for (int c = 0; c < COUNT; c++) sum[c] += tap * load(hidden + (b + c * STRIDE) * LANES);
    }
  UNROLL for (int c = 0; c < COUNT; c++) store(to + c * step, activated<KIND>(sum[c], job.second));
}

// `rows` rows of the strip, one vector of channels. What is written past the end of a row is overwritten by the next.
template <int STRIDE, int KERNEL, Activation::Kind KIND>
INLINE void depthwise_rows(const Block &job, const float *hidden, long vector, long rows, float *to, long step) {
  const float *weight = job.depthwise + vector * LANES * job.h.kernel * job.w.kernel;
  const Vec bias = load(job.depthwise_bias + vector * LANES);
  for (long i = 0; i < rows; i++, hidden += STRIDE * job.plan.line, to += job.w.outputs * step) {
    long j = 0;
    for (; j + COLUMNS / 2 < job.w.outputs; j += COLUMNS)
      depthwise_columns<STRIDE, KERNEL, KIND, COLUMNS>(job, hidden + j * STRIDE * LANES, job.plan.line, weight, bias,
                                                       to + j * step, step);
    if (j < job.w.outputs)
      depthwise_columns<STRIDE, KERNEL, KIND, COLUMNS / 2>(job, hidden + j * STRIDE * LANES, job.plan.line, weight, bias,
                                                           to + j * step, step);
  }
}

template <int STRIDE, int KERNEL>
INLINE void depthwise_kind(const Block &job, const float *hidden, long vector, long rows, float *to, long step) {
  if (job.second.kind == Activation::BOUNDED)
    depthwise_rows<STRIDE, KERNEL, Activation::BOUNDED>(job, hidden, vector, rows, to, step);
  else if (job.second.kind == Activation::LEAKY)
    depthwise_rows<STRIDE, KERNEL, Activation::LEAKY>(job, hidden, vector, rows, to, step);
  else
    depthwise_rows<STRIDE, KERNEL, Activation::HARDSWISH>(job, hidden, vector, rows, to, step);
}

template <int STRIDE>
INLINE void depthwise_kernel(const Block &job, const float *hidden, long vector, long rows, float *to, long step) {
  if (job.h.kernel == 3 && job.w.kernel == 3)
    depthwise_kind<STRIDE, 3>(job, hidden, vector, rows, to, step);
  else
    depthwise_kind<STRIDE, ANY>(job, hidden, vector, rows, to, step);
}

EACH_PROCESSOR void depthwise(const Block &job, const float *hidden, long vector, long rows, float *to, long step) {
  if (job.w.stride == 1)
    depthwise_kernel<1>(job, hidden, vector, rows, to, step);
  else
    depthwise_kernel<2>(job, hidden, vector, rows, to, step);
}

// ------------------------------------------------------------------------------------------------- a tile

// Hidden channels that are worked on together: vectors from begin to end.
struct Chunk {
  long first_panel, end_panel, begin, end;
  Chunk(const Panels &panels, long panel)
      : first_panel(panel),
        end_panel(std::min(panel + PANELS_PER_CHUNK, panels.count)),
        begin(panels.begin(first_panel)),
        end(panels.begin(end_panel)) {}
  long channels() const { return (end - begin) * LANES; }
};

struct Tile {
  long image;
  long first, rows;          // of the output
  long inner, inner_rows;    // of x, inside the map
  long above;                // rows of zeros before those
  const float *x, *other;
  float *y;
};

INLINE Tile tile_of(const Block &job, long item) {
  const long n = item / job.plan.tiles, number = item % job.plan.tiles;
  Tile made;
  made.image = n;
  made.first = job.plan.groups * number / job.plan.tiles * job.plan.group;
  made.rows = std::min(job.plan.groups * (number + 1) / job.plan.tiles * job.plan.group, job.h.outputs) - made.first;
  const long top = made.first * job.h.stride - job.h.padding;
  const long bottom = top + (made.rows - 1) * job.h.stride + job.h.kernel;
  made.inner = std::min(std::max(top, 0L), job.h.size);
  made.inner_rows = std::max(std::min(bottom, job.h.size) - made.inner, 0L);
  made.above = std::min(std::max(made.inner - top, 0L), bottom - top);
  made.x = job.x + (n * job.h.size + made.inner) * job.w.size * job.inputs;
  const long at = (n * job.h.outputs + made.first) * job.w.outputs * job.outputs;
  made.other = job.other ? job.other + at : nullptr;
  made.y = job.y + at;
  return made;
}

INLINE void clear_padding(const Block &job, const Tile &tile, float *plane) {
  const long side = job.w.padding * LANES;
  const long above = tile.above * job.plan.line, inner = tile.inner_rows * job.plan.line;
  std::fill(plane, plane + above, 0.0f);
  for (float *row = plane + above; row < plane + above + inner; row += job.plan.line) {
    std::fill(row, row + side, 0.0f);
    std::fill(row + job.plan.line - side, row + job.plan.line, 0.0f);
  }
  std::fill(plane + above + inner, plane + job.plan.plane, 0.0f);
}

INLINE void copy_vector(const Block &job, const Tile &tile, long vector, float *to) {
  const long lanes = job.inputs - vector * LANES;
  const float *from = tile.x + vector * LANES;
  for (long i = 0; i < tile.inner_rows; i++, to += 2 * job.w.padding * LANES)
    for (long j = 0; j < job.w.size; j++, from += job.inputs, to += LANES) store(to, load_some(from, lanes));
}

// Of the chunk's channels, all that its tile of outputs will read.
INLINE void fill_hidden(const Block &job, const Tile &tile, const Chunk &chunk, float *hidden) {
  const Panels panels(job.hidden);
  const long count = tile.inner_rows * job.w.size;
  float *inside = hidden + tile.above * job.plan.line + job.w.padding * LANES;
  for (long panel = chunk.first_panel; panel < chunk.end_panel; panel++) {
    const long v = panels.begin(panel), width = panels.begin(panel + 1) - v;
    float *to = inside + (v - chunk.begin) * job.plan.plane;
    if (!job.expands)
      for (long i = 0; i < width; i++) copy_vector(job, tile, v + i, to + i * job.plan.plane);
    else if (width == 3)
      expand_3(job, tile.x, count, v, to);
    else if (width == 2)
      expand_2(job, tile.x, count, v, to);
    else
      expand_1(job, tile.x, count, v, to);
  }
}

// Of the hidden rows, those that no other tile has as its own.
EACH_PROCESSOR void sum_hidden(const Block &job, const Tile &tile, const Chunk &chunk, const float *hidden) {
  const long first = tile.first * job.h.stride;
  const bool is_last = tile.first + tile.rows == job.h.outputs;
  // With much padding, outputs reach beyond the map.
  const long end = is_last ? job.h.size : std::min(first + tile.rows * job.h.stride, job.h.size), count = end - first;
  for (long v = chunk.begin; v < chunk.end; v++) {
    const float *from = hidden + (v - chunk.begin) * job.plan.plane + job.h.padding * job.plan.line;
    const Rows rows = {from + job.w.padding * LANES, job.plan.line, LANES, tile.image, first, count, job.h.size,
                       job.w.size, job.hidden};
    sum_patches(job.of_expand, rows, v);
  }
}

EACH_PROCESSOR void sum_strip(const Block &job, long image, const Chunk &chunk, long first, long count,
                              const float *strip) {
  const long depth = chunk.channels();
  for (long v = chunk.begin; v < chunk.end; v++) {
    const Rows rows = {strip + (v - chunk.begin) * LANES, job.w.outputs * depth, depth, image, first, count,
                       job.h.outputs, job.w.outputs, job.hidden};
    sum_patches(job.of_depthwise, rows, v);
  }
}

INLINE void project_strip(const Block &job, const float *strip, const Chunk &chunk, long count, const float *other,
                          float *y) {
  const Panels panels(job.outputs);
  const long depth = chunk.channels(), start = chunk.begin * LANES;
  for (long panel = 0; panel < panels.count; panel++) {
    const long v = panels.begin(panel), width = panels.begin(panel + 1) - v;
    if (width == 3)
      project_3(job, strip, depth, start, count, v, other, y);
    else if (width == 2)
      project_2(job, strip, depth, start, count, v, other, y);
    else
      project_1(job, strip, depth, start, count, v, other, y);
  }
}

INLINE void run_strips(const Block &job, const Tile &tile, const Chunk &chunk, const float *hidden, float *strip) {
  for (long i = 0; i < tile.rows; i += job.plan.strip) {
    const long rows = std::min(job.plan.strip, tile.rows - i), at = i * job.w.outputs * job.outputs;
    for (long v = chunk.begin; v < chunk.end; v++) {
      const float *from = hidden + (v - chunk.begin) * job.plan.plane + i * job.h.stride * job.plan.line;
      depthwise(job, from, v, rows, strip + (v - chunk.begin) * LANES, chunk.channels());
    }
    if (job.of_depthwise.means) sum_strip(job, tile.image, chunk, tile.first + i, rows, strip);
    const float *other = tile.other ? tile.other + at : nullptr;
    project_strip(job, strip, chunk, rows * job.w.outputs, other, tile.y + at);
  }
}

EACH_PROCESSOR void block_share(void *given) {
  const Block &job = *static_cast<Block *>(given);
  const Plan &plan = job.plan;
  float *hidden = job.scratch + (job.alone ? 0 : thread_number()) * (plan.hidden_floats + plan.strip_floats);
  float *strip = hidden + plan.hidden_floats;
  const Panels panels(job.hidden);
  const Share mine = my_share(job, job.batch * plan.tiles);
  for (long item = mine.begin; item < mine.end; item++) {
    const Tile tile = tile_of(job, item);
    for (float *plane = hidden; plane + plan.plane <= strip; plane += plan.plane) clear_padding(job, tile, plane);
    for (long panel = 0; panel < panels.count; panel += PANELS_PER_CHUNK) {
      const Chunk chunk(panels, panel);
      fill_hidden(job, tile, chunk, hidden);
      if (job.of_expand.means) sum_hidden(job, tile, chunk, hidden);
      run_strips(job, tile, chunk, hidden, strip);
    }
  }
}

// batch, channels of x, hidden and of y, whether there is an expansion; then each axis.
Shape shape_of(const int64_t *s) {
  return {s[0], s[1], s[2], s[3], s[4] != 0, {s[5], s[6], s[7], s[8], s[9]}, {s[10], s[11], s[12], s[13], s[14]}};
}

Activation activation_of(const float *a) { return {Activation::Kind(int(a[0])), a[1], a[2]}; }

// Of the two hidden maps: where to put what is kept, the sides of patches, the bounds of gates. All null if it is frozen.
struct Kept {
  void *const *pointers;  // means and open pixels, twice; of the first null where there is no expansion
  const int64_t *sides;
  const float *bounds;
  PatchSums of(int map) const {
    if (!pointers) return {};
    return {static_cast<float *>(pointers[2 * map]), static_cast<uint8_t *>(pointers[2 * map + 1]), sides[2 * map],
            sides[2 * map + 1], bounds[2 * map], bounds[2 * map + 1]};
  }
  long group() const { return sides ? sides[2] : 1; }
};

// ------------------------------------------------------------------------------------------------- weights

// A stage as its layer has it: rows of `inputs` weights; scale and bias null where they are one and zero.
struct Stage {
  const float *weight, *scale, *bias;
  long inputs, outputs;
};

struct Packing : Job, Shape {
  Stage expand, depthwise, project;
  float *packed;
};

// The floats of a stage's packed bias and weight, of which the latter has `depth` per output.
long packed_floats(long outputs, long depth) { return Panels(outputs).vectors * LANES * (1 + depth); }

INLINE float weight_at(const Stage &stage, long output, long input) {
  if (output >= stage.outputs || input >= stage.inputs) return 0.0f;
  return stage.weight[output * stage.inputs + input] * (stage.scale ? stage.scale[output] : 1.0f);
}

INLINE void pack_bias(const Stage &stage, float *to) {
  for (long o = 0; o < Panels(stage.outputs).vectors * LANES; o++)
    to[o] = stage.bias && o < stage.outputs ? stage.bias[o] : 0.0f;
}

// Of each panel, the inputs of one thread's share of `depth`.
INLINE void pack_panels(const Job &job, const Stage &stage, long depth, float *to) {
  const Panels panels(stage.outputs);
  const Share mine = my_share(job, depth);
  for (long panel = 0; panel < panels.count; panel++) {
    const long begin = panels.begin(panel) * LANES, width = panels.begin(panel + 1) * LANES - begin;
    for (long k = mine.begin; k < mine.end; k++)
      for (long o = 0; o < width; o++) to[begin * depth + k * width + o] = weight_at(stage, begin + o, k);
  }
}

INLINE void pack_taps(const Job &job, const Stage &stage, float *to) {
  const Share mine = my_share(job, Panels(stage.outputs).vectors);
  for (long v = mine.begin; v < mine.end; v++)
    for (long tap = 0; tap < stage.inputs; tap++)
      for (long o = 0; o < LANES; o++)
        to[(v * stage.inputs + tap) * LANES + o] = weight_at(stage, v * LANES + o, tap);
}

EACH_PROCESSOR void pack_share(void *given) {
  const Packing &job = *static_cast<Packing *>(given);
  const long hidden = Panels(job.hidden).vectors * LANES, outputs = Panels(job.outputs).vectors * LANES;
  float *to = job.packed;
  const bool is_first = job.alone || thread_number() == 0;
  if (job.expands) {
    if (is_first) pack_bias(job.expand, to);
    pack_panels(job, job.expand, job.inputs, to + hidden);
    to += packed_floats(job.hidden, job.inputs);
  }
  if (is_first) pack_bias(job.depthwise, to);
  pack_taps(job, job.depthwise, to + hidden);
  to += packed_floats(job.hidden, job.depthwise.inputs);
  if (is_first) pack_bias(job.project, to);
  pack_panels(job, job.project, hidden, to + outputs);
}
}  // namespace

// Floats of packed weights.
EXPORT long gf_inverted_residual_packed(const int64_t *shape) {
  const Shape job = shape_of(shape);
  return (job.expands ? packed_floats(job.hidden, job.inputs) : 0) +
         packed_floats(job.hidden, job.h.kernel * job.w.kernel) +
         packed_floats(job.outputs, Panels(job.hidden).vectors * LANES);
}

// stages: weight, scale and bias of each; null where there is none.
EXPORT void gf_inverted_residual_pack(const float *const *stages, const int64_t *shape, float *packed, int threads) {
  Packing job;
  static_cast<Shape &>(job) = shape_of(shape);
  job.packed = packed;
  job.expand = {stages[0], stages[1], stages[2], job.inputs, job.hidden};
  job.depthwise = {stages[3], stages[4], stages[5], job.h.kernel * job.w.kernel, job.hidden};
  job.project = {stages[6], stages[7], stages[8], job.hidden, job.outputs};
  run(pack_share, job, job.hidden * (job.inputs + job.outputs), threads);
}

// Floats of working memory. sides: of the patches of both hidden maps where it trains, else null.
EXPORT long gf_inverted_residual_scratch(const int64_t *shape, const int64_t *sides, int threads) {
  const Plan plan = plan_of(shape_of(shape), sides ? sides[2] : 1, threads);
  return threads * (plan.hidden_floats + plan.strip_floats);
}

// weights: packed. kept, sides, bounds: see Kept.
EXPORT void gf_inverted_residual(const float *x, const float *other, float *y, const float *weights,
                                 const int64_t *shape, const float *activations, void *const *kept,
                                 const int64_t *sides, const float *bounds, float *scratch, int threads) {
  Block job;
  static_cast<Shape &>(job) = shape_of(shape);
  const Kept keep{kept, sides, bounds};
  job.of_expand = keep.of(0), job.of_depthwise = keep.of(1);
  job.plan = plan_of(job, keep.group(), threads);
  job.x = x, job.other = other, job.y = y, job.scratch = scratch;
  job.first = activation_of(activations), job.second = activation_of(activations + 3);
  const long hidden = Panels(job.hidden).vectors * LANES, outputs = Panels(job.outputs).vectors * LANES;
  job.expand_bias = weights;
  job.expand = job.expand_bias + (job.expands ? hidden : 0);
  job.depthwise_bias = job.expand + (job.expands ? hidden * job.inputs : 0);
  job.depthwise = job.depthwise_bias + hidden;
  job.project_bias = job.depthwise + hidden * job.h.kernel * job.w.kernel;
  job.project = job.project_bias + outputs;
  run(block_share, job, job.batch * job.h.outputs * job.w.outputs * hidden, threads);
}
