// The gradient of a convolution's kernel: for each tap, gradient^T times the input shifted by that tap. No copy of the
// input per tap is made: a piece of it is packed once, with its padding, and every tap reads it from another start.

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "vectors.h"

namespace {
constexpr long ROWS = MANY_REGISTERS ? 12 : 6, VECS = 2, STRIP = VECS * LANES;  // output channels and input channels of a tile of sums
constexpr long PIXELS = 256;                              // of a piece: its tiles stay in an L1 cache
constexpr long PACKED = 64 * 1024;                        // floats of a packed piece: half an L2 cache

struct Axis {
  long size, outputs, kernel, stride, padding, dilation;
  long span(long count) const { return (count - 1) * stride + (kernel - 1) * dilation + 1; }  // what outputs read
};

struct Shape {
  long batch, inputs, outputs;  // the last two in channels
  Axis h, w;
};

// What is packed at a time: some rows of one image, or several whole images.
struct Pieces {
  long images, rows, strips;         // images and rows of outputs at a time; strips of input channels
  long plane, strip_floats, floats;  // floats of an image in a strip, of a strip, of all that a thread packs
};

Pieces pieces_of(const Shape &job) {
  Pieces made;
  const long width = job.w.span(job.w.outputs);
  made.strips = (job.inputs + STRIP - 1) / STRIP;
  // How full a piece would be: of pixels, or of packed floats in the same measure.
  const auto load_of = [&](long rows) {
    return std::max(rows * job.w.outputs, job.h.span(rows) * width * made.strips * STRIP * PIXELS / PACKED);
  };
  long per_image = 1;
  made.rows = job.h.outputs;
  while (made.rows > 1 && load_of(made.rows) > PIXELS) {
    per_image++;
    made.rows = (job.h.outputs + per_image - 1) / per_image;
  }
  made.images = per_image > 1 ? 1 : std::max(1L, std::min(job.batch, PIXELS / std::max(1L, load_of(made.rows))));
  made.plane = job.h.span(made.rows) * width * STRIP;
  made.strip_floats = made.images * made.plane;
  const long packed_rows = (made.images * made.rows * job.w.outputs * ROWS + STRIP - 1) / STRIP * STRIP;
  made.floats = made.strips * made.strip_floats + packed_rows;
  return made;
}

struct KernelGradient : Job, Shape {
  Pieces pieces;
  const float *grad, *x;
  float *result, *scratch;
};

// One piece: images from `image` on, of each `rows` rows of outputs from `row` on.
struct Piece {
  long image, images, row, rows;
};

// The sums of one tap over a piece: ROWS output channels by STRIP input channels.
EACH_PROCESSOR void tile(const KernelGradient &job, const Piece &piece, const float *grad, const float *x, float *to,
                         long rows, long columns, bool first) {
  const long width = job.w.span(job.w.outputs) * STRIP, step = job.w.stride * STRIP;
  const long to_row = job.h.kernel * job.w.kernel * job.inputs;
  Vec sum[ROWS][VECS] = {};
  for (long n = 0; n < piece.images; n++)
    for (long i = 0; i < piece.rows; i++) {
      const float *from = x + n * job.pieces.plane + i * job.h.stride * width;
      for (long j = 0; j < job.w.outputs; j++, grad += ROWS, from += step) {
        Vec input[VECS];
        UNROLL for (int v = 0; v < VECS; v++) input[v] = load(from + v * LANES);
        UNROLL for (int r = 0; r < ROWS; r++)
          UNROLL for (int v = 0; v < VECS; v++) sum[r][v] += grad[r] * input[v];
      }
    }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int v = 0; v < VECS; v++) {
      const long lanes = columns - v * LANES;
      if (r >= rows || lanes <= 0) continue;
      float *at = to + r * to_row + v * LANES;
      store_some(at, first ? sum[r][v] : sum[r][v] + load_some(at, lanes), lanes);
    }
}

// STRIP input channels of all that the piece reads, with zeros for the padding. These are multiplied like all else, so
// that a gradient of infinity or NaN there makes NaN of taps that oneDNN would not have touched.
EACH_PROCESSOR void pack_strip(const KernelGradient &job, const Piece &piece, long channel, float *to) {
  const long left = std::min(STRIP, job.inputs - channel), width = job.w.span(job.w.outputs);
  const long before = std::min(job.w.padding, width), inside = std::min(job.w.size, width - before);
  for (long n = 0; n < piece.images; n++) {
    float *line = to + n * job.pieces.plane;
    for (long i = 0; i < job.h.span(piece.rows); i++, line += width * STRIP) {
      const long row = piece.row * job.h.stride - job.h.padding + i;
      if (row < 0 || row >= job.h.size) {
        std::fill(line, line + width * STRIP, 0.0f);
        continue;
      }
      const float *from = job.x + ((piece.image + n) * job.h.size + row) * job.w.size * job.inputs + channel;
      float *pixel = line + before * STRIP;
      std::fill(line, pixel, 0.0f);
      for (long j = 0; j < inside; j++, from += job.inputs, pixel += STRIP)
        UNROLL for (int v = 0; v < VECS; v++) store(pixel + v * LANES, load_some(from + v * LANES, left - v * LANES));
      std::fill(pixel, line + width * STRIP, 0.0f);
    }
  }
}

// ROWS channels of the piece's gradient, pixel by pixel.
EACH_PROCESSOR void pack_gradient(const KernelGradient &job, const Piece &piece, long channel, long rows, float *to) {
  const long pixels = piece.images * piece.rows * job.w.outputs;
  const float *from =
      job.grad + (piece.image * job.h.outputs + piece.row) * job.w.outputs * job.outputs + channel;
  for (long p = 0; p < pixels; p++, from += job.outputs, to += ROWS)
    for (long r = 0; r < ROWS; r++) to[r] = r < rows ? from[r] : 0.0f;
}

// Each thread has some of the tiles: taps of panels of output channels.
void add_piece(const KernelGradient &job, const Piece &piece, const Share &mine, float *packed) {
  const long taps = job.h.kernel * job.w.kernel, width = job.w.span(job.w.outputs);
  float *gradient = packed + job.pieces.strips * job.pieces.strip_floats;
  const bool first = piece.image == 0 && piece.row == 0;
  for (long s = 0; s < job.pieces.strips; s++) pack_strip(job, piece, s * STRIP, packed + s * job.pieces.strip_floats);
  for (long item = mine.begin; item < mine.end; item++) {
    const long channel = item / taps * ROWS, tap = item % taps, rows = std::min(ROWS, job.outputs - channel);
    if (item == mine.begin || tap == 0) pack_gradient(job, piece, channel, rows, gradient);
    const long down = tap / job.w.kernel * job.h.dilation, right = tap % job.w.kernel * job.w.dilation;
    for (long s = 0; s < job.pieces.strips; s++)
      tile(job, piece, gradient, packed + s * job.pieces.strip_floats + (down * width + right) * STRIP,
           job.result + (channel * taps + tap) * job.inputs + s * STRIP, rows, job.inputs - s * STRIP, first);
  }
}

void kernel_gradient_share(void *given) {
  const KernelGradient &job = *static_cast<KernelGradient *>(given);
  const Pieces &pieces = job.pieces;
  float *packed = job.scratch + (job.alone ? 0 : thread_number()) * pieces.floats;
  const Share mine = my_share(job, (job.outputs + ROWS - 1) / ROWS * job.h.kernel * job.w.kernel);
  for (long n = 0; n < job.batch; n += pieces.images)
    for (long row = 0; row < job.h.outputs; row += pieces.rows)
      add_piece(job, {n, std::min(pieces.images, job.batch - n), row, std::min(pieces.rows, job.h.outputs - row)}, mine,
                packed);
}

// batch, channels of x and of y; then each axis.
Shape shape_of(const int64_t *s) {
  return {s[0], s[1], s[2], {s[3], s[4], s[5], s[6], s[7], s[8]}, {s[9], s[10], s[11], s[12], s[13], s[14]}};
}
}  // namespace

// Floats of working memory.
EXPORT long gf_kernel_gradient_scratch(const int64_t *shape, int threads) {
  return threads * pieces_of(shape_of(shape)).floats;
}

// result: (output channels, height, width, input channels).
EXPORT void gf_kernel_gradient(const float *grad, const float *x, float *result, const int64_t *shape, float *scratch,
                               int threads) {
  KernelGradient job;
  static_cast<Shape &>(job) = shape_of(shape);
  job.pieces = pieces_of(job);
  job.grad = grad, job.x = x, job.result = result, job.scratch = scratch;
  run(kernel_gradient_share, job, job.batch * job.h.outputs * job.w.outputs * job.outputs * job.inputs, threads);
}
