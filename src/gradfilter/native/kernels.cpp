// Passes for which torch's operators need several sweeps over memory, or several calls, made in one.
//
// No torch headers: pointers in, pointers out, so that any C++ compiler builds this in seconds, for any torch.
// Maps are channels-last, (batch, height, width, channels); the compiler turns each loop over channels into vector
// instructions, and one binary holds a version for each generation of processors.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "vectors.h"

Parallel gf_parallel = nullptr;
Number thread_number = nullptr, thread_count = nullptr;

EXPORT void gf_use_threads(void *parallel, void *number, void *count) {
  gf_parallel = reinterpret_cast<Parallel>(parallel);
  thread_number = reinterpret_cast<Number>(number);
  thread_count = reinterpret_cast<Number>(count);
}

// Whether this processor has the registers that products.h was made for; else oneDNN is faster.
EXPORT int gf_has_vectors() {
#if defined(__AVX512F__)
  return 1;  // Python loads this library where the processor does
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__x86_64__) && !defined(__AVX2__)
  return 0;  // compiled once, for the oldest processor
#else
  return 1;
#endif
}

// Whether it has none that are wider.
EXPORT int gf_has_widest() {
#if defined(__x86_64__) && !defined(__AVX512F__)
  return !__builtin_cpu_supports("avx512f");
#else
  return 1;
#endif
}

EXPORT long gf_lanes() { return LANES; }

// ------------------------------------------------------------------------------------------------- patches of a map
// One sweep over a map: the mean of every patch, and in how many of its pixels a gate is open. A gate is open unless
// y <= low or y >= high; a bound that is NaN never shuts.

namespace {
template <class T>
struct Patches : Job {
  const T *y;
  T *means;
  uint8_t *open;
  long batch, height, width, channels, side_h, side_w;
  T low, high;
};

template <class T>
INLINE int is_open(T y, T low, T high) {
  return !(y <= low) & !(y >= high);
}

template <class T>
INLINE void pool_two_by_two(const Patches<T> &job, const T *a, const T *b, T *means, uint8_t *open) {
  const long channels = job.channels;
  const T low = job.low, high = job.high;
  for (long c = 0; c < channels; c++)
    means[c] = ((a[c] + a[channels + c]) + (b[c] + b[channels + c])) * T(0.25);
  for (long c = 0; c < channels; c++)
      open[c] = uint8_t(is_open(a[c], low, high) + is_open(a[channels + c], low, high) + is_open(b[c], low, high) +
                        is_open(b[channels + c], low, high));
}

template <class T>
INLINE void pool_any(const Patches<T> &job, const T *first, long rows, long columns, T *means, uint8_t *open) {
  const long channels = job.channels, line = job.width * channels;
  const T low = job.low, high = job.high;
  std::fill(means, means + channels, T(0));
  std::fill(open, open + channels, uint8_t(0));
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < columns; j++) {
      const T *y = first + i * line + j * channels;
      for (long c = 0; c < channels; c++) means[c] += y[c];
      for (long c = 0; c < channels; c++) open[c] += uint8_t(is_open(y[c], low, high));
    }
  const T share = T(1) / T(rows * columns);
  for (long c = 0; c < channels; c++) means[c] *= share;
}

// The rows of a map that one row of patches covers.
struct Band {
  long offset, rows;
};

template <class T>
INLINE Band band_of(const Patches<T> &job, long number) {
  const long patches_h = (job.height + job.side_h - 1) / job.side_h;
  const long top = number % patches_h * job.side_h;
  const long offset = (number / patches_h * job.height + top) * job.width * job.channels;
  return {offset, std::min(job.side_h, job.height - top)};
}

template <class T>
INLINE Share my_bands(const Patches<T> &job) {
  return my_share(job, job.batch * ((job.height + job.side_h - 1) / job.side_h));
}

template <class T>
INLINE void pool_band(const Patches<T> &job, long number) {
  const Band band = band_of(job, number);
  const long patches_w = (job.width + job.side_w - 1) / job.side_w;
  for (long j = 0; j < patches_w; j++) {
    const long left = j * job.side_w, columns = std::min(job.side_w, job.width - left);
    const long patch = (number * patches_w + j) * job.channels;
    T *means = job.means + patch;
    uint8_t *open = job.open + patch;
    const T *first = job.y + band.offset + left * job.channels;
    if (band.rows == 2 && columns == 2)
      pool_two_by_two(job, first, first + job.width * job.channels, means, open);
    else
      pool_any(job, first, band.rows, columns, means, open);
  }
}

template <class T>
INLINE void pool_share(void *given) {
  const Patches<T> &job = *static_cast<Patches<T> *>(given);
  const Share mine = my_bands(job);
  for (long number = mine.begin; number < mine.end; number++) pool_band(job, number);
}

// The same behind a norm and a gate, y = min(max(y * scale + shift, least), most), while y is in the cache.
template <class T>
struct Finish : Patches<T> {
  T *written;  // y
  const T *scale, *shift;
  T least, most;
};

template <class T>
INLINE void finish_band(const Finish<T> &job, long number) {
  const Band band = band_of(job, number);
  const T *scale = job.scale, *shift = job.shift;
  const T least = job.least, most = job.most;
  for (long pixel = 0; pixel < band.rows * job.width; pixel++) {
    T *y = job.written + band.offset + pixel * job.channels;
    for (long c = 0; c < job.channels; c++) {
      const T value = y[c] * scale[c] + shift[c];
      const T above = value < least ? least : value;  // NaN stays
      y[c] = above > most ? most : above;
    }
  }
}

template <class T>
INLINE void finish_share(void *given) {
  const Finish<T> &job = *static_cast<Finish<T> *>(given);
  const Share mine = my_bands(job);
  for (long number = mine.begin; number < mine.end; number++) {
    finish_band(job, number);
    pool_band(job, number);
  }
}

EACH_PROCESSOR void pool_float(void *job) { pool_share<float>(job); }
EACH_PROCESSOR void pool_double(void *job) { pool_share<double>(job); }
EACH_PROCESSOR void finish_float(void *job) { finish_share<float>(job); }
EACH_PROCESSOR void finish_double(void *job) { finish_share<double>(job); }
}  // namespace

#define PATCHES(NAME, T, BODY)                                                                                     \
  EXPORT void NAME(const T *y, T *means, uint8_t *open, long batch, long height, long width, long channels,        \
                   long side_h, long side_w, double low, double high, int threads) {                               \
    Patches<T> job{{}, y, means, open, batch, height, width, channels, side_h, side_w, T(low), T(high)};           \
    run(BODY, job, batch * height * width * channels, threads);                                                    \
  }
PATCHES(gf_patches_float, float, pool_float)
PATCHES(gf_patches_double, double, pool_double)

#define FINISH(NAME, T, BODY)                                                                                      \
  EXPORT void NAME(T *y, const T *scale, const T *shift, T *means, uint8_t *open, long batch, long height,         \
                   long width, long channels, long side_h, long side_w, double low, double high, double least,     \
                   double most, int threads) {                                                                     \
    Patches<T> patches{{}, y, means, open, batch, height, width, channels, side_h, side_w, T(low), T(high)};       \
    Finish<T> job{patches, y, scale, shift, T(least), T(most)};                                                    \
    run(BODY, job, batch * height * width * channels, threads);                                                    \
  }
FINISH(gf_finish_float, float, finish_float)
FINISH(gf_finish_double, double, finish_double)

// ------------------------------------------------------------------------------------------------- two gates in a row
// In how many pixels of each patch both y and `term` are inside their bounds.

namespace {
template <class T>
struct Both : Job {
  const T *y, *term;
  uint8_t *open;
  long batch, height, width, channels, side_h, side_w;
  T low, high, term_low, term_high;
};

template <class T>
INLINE void both_share(void *given) {
  const Both<T> &job = *static_cast<Both<T> *>(given);
  const long channels = job.channels;
  const T low = job.low, high = job.high, term_low = job.term_low, term_high = job.term_high;
  const long patches_h = (job.height + job.side_h - 1) / job.side_h;
  const long patches_w = (job.width + job.side_w - 1) / job.side_w;
  const Share mine = my_share(job, job.batch * patches_h);
  for (long item = mine.begin; item < mine.end; item++) {
    const long top = item % patches_h * job.side_h, bottom = std::min(top + job.side_h, job.height);
    for (long j = 0; j < patches_w; j++) {
      const long left = j * job.side_w, right = std::min(left + job.side_w, job.width);
      uint8_t *open = job.open + (item * patches_w + j) * channels;
      std::fill(open, open + channels, uint8_t(0));
      for (long h = top; h < bottom; h++)
        for (long w = left; w < right; w++) {
          const long at = ((item / patches_h * job.height + h) * job.width + w) * channels;
          const T *y = job.y + at, *term = job.term + at;
          for (long c = 0; c < channels; c++)
            open[c] += uint8_t(is_open(y[c], low, high) & is_open(term[c], term_low, term_high));
        }
    }
  }
}

EACH_PROCESSOR void both_float(void *job) { both_share<float>(job); }
EACH_PROCESSOR void both_double(void *job) { both_share<double>(job); }
}  // namespace

#define BOTH(NAME, T, BODY)                                                                                        \
  EXPORT void NAME(const T *y, const T *term, uint8_t *open, long batch, long height, long width, long channels,   \
                   long side_h, long side_w, double low, double high, double term_low, double term_high,           \
                   int threads) {                                                                                  \
    Both<T> job{{},     y,      term,   open,    batch,       height,      width, channels,                        \
                side_h, side_w, T(low), T(high), T(term_low), T(term_high)};                                       \
    run(BODY, job, batch *height *width *channels, threads);                                                       \
  }
BOTH(gf_both_float, float, both_float)
BOTH(gf_both_double, double, both_double)

// ------------------------------------------------------------------------------------------------- max pooling
// The maximum of every window, and for each patch of the output and each input patch near it: how many maxima lie
// there. Behind a gate only maxima inside its bounds count. The first of equal pixels is the maximum, as in torch.

namespace {
struct PoolAxis {
  int64_t size, outputs, kernel, stride, padding, dilation;
  int64_t side_in, side_out, first, reach;  // patches; neighbours of output patch p: p * stride + first, `reach` many
};

template <class T>
struct MaxPool : Job {
  const T *x;
  T *y;
  uint8_t *counts;  // (neighbours, batch, patches, channels)
  long batch, channels;
  PoolAxis h, w;
  T low, high;
};

template <class T>
INLINE void pool_pixel(const MaxPool<T> &job, const T *map, long i, long j, long start, long width, T *best, T *where) {
  bool any = false;
  for (long c = 0; c < width; c++) best[c] = -std::numeric_limits<T>::infinity(), where[c] = T(-1);
  const long patch_h = i / job.h.side_out * job.h.stride + job.h.first;
  const long patch_w = j / job.w.side_out * job.w.stride + job.w.first;
  for (long a = 0; a < job.h.kernel; a++) {
    const long row = i * job.h.stride - job.h.padding + a * job.h.dilation;
    if (row < 0 || row >= job.h.size) continue;
    for (long b = 0; b < job.w.kernel; b++) {
      const long column = j * job.w.stride - job.w.padding + b * job.w.dilation;
      if (column < 0 || column >= job.w.size) continue;
      const T *x = map + (row * job.w.size + column) * job.channels + start;
      const T here = T((row / job.h.side_in - patch_h) * job.w.reach + column / job.w.side_in - patch_w);
      if (!any) {
        for (long c = 0; c < width; c++) best[c] = x[c], where[c] = here;
        any = true;
        continue;
      }
      for (long c = 0; c < width; c++) {
        const bool larger = (x[c] > best[c]) | (x[c] != x[c]);
        best[c] = larger ? x[c] : best[c];
        where[c] = larger ? here : where[c];
      }
    }
  }
}

template <class T>
INLINE void max_pool_share(void *given) {
  const MaxPool<T> &job = *static_cast<MaxPool<T> *>(given);
  constexpr long WIDE = 64;
  const long patches_h = (job.h.outputs + job.h.side_out - 1) / job.h.side_out;
  const long patches_w = (job.w.outputs + job.w.side_out - 1) / job.w.side_out;
  const long neighbours = job.h.reach * job.w.reach, plane = job.batch * patches_h * patches_w * job.channels;
  const Share mine = my_share(job, job.batch * patches_h);
  for (long item = mine.begin; item < mine.end; item++) {
    const long n = item / patches_h, top = item % patches_h * job.h.side_out;
    const T *map = job.x + n * job.h.size * job.w.size * job.channels;
    for (long k = 0; k < neighbours; k++)
      std::fill_n(job.counts + k * plane + item * patches_w * job.channels, patches_w * job.channels, uint8_t(0));
    for (long i = top; i < std::min(top + job.h.side_out, job.h.outputs); i++)
      for (long j = 0; j < job.w.outputs; j++)
        for (long start = 0; start < job.channels; start += WIDE) {
          const long width = std::min(WIDE, job.channels - start);
          T best[WIDE], where[WIDE];
          pool_pixel(job, map, i, j, start, width, best, where);
          std::copy_n(best, width, job.y + ((n * job.h.outputs + i) * job.w.outputs + j) * job.channels + start);
          uint8_t *counts = job.counts + (item * patches_w + j / job.w.side_out) * job.channels + start;
          for (long k = 0; k < neighbours; k++)
            for (long c = 0; c < width; c++)
              counts[k * plane + c] += uint8_t((where[c] == T(k)) & is_open(best[c], job.low, job.high));
        }
  }
}

EACH_PROCESSOR void max_pool_float(void *job) { max_pool_share<float>(job); }
EACH_PROCESSOR void max_pool_double(void *job) { max_pool_share<double>(job); }
}  // namespace

#define MAX_POOL(NAME, T, BODY)                                                                                    \
  EXPORT void NAME(const T *x, T *y, uint8_t *counts, long batch, long channels, const PoolAxis *h,                \
                   const PoolAxis *w, double low, double high, int threads) {                                      \
    MaxPool<T> job{{}, x, y, counts, batch, channels, *h, *w, T(low), T(high)};                                    \
    run(BODY, job, batch *channels *h->size *w->size, threads);                                                    \
  }
MAX_POOL(gf_max_pool_float, float, max_pool_float)
MAX_POOL(gf_max_pool_double, double, max_pool_double)

// ------------------------------------------------------------------------------------------------- back through max pooling
// To each input patch, from every output patch near it, the gradient for each maximum that lies there; as a mean over
// the patch's pixels, or behind a gate over its open ones.

namespace {
template <class T>
struct MaxPoolBack : Job {
  const T *grad;
  const uint8_t *counts, *open;  // open: null without a gate
  T *result;
  long batch, channels;
  PoolAxis h, w;
};

// The output patches of which input patch q is a neighbour.
struct Readers {
  long first, last;
  Readers(const PoolAxis &axis, long q) {
    const long patches = (axis.outputs + axis.side_out - 1) / axis.side_out, end = q - axis.first;
    first = end < axis.reach ? 0 : (end - axis.reach + axis.stride) / axis.stride;
    last = end < 0 ? -1 : std::min<long>(end / axis.stride, patches - 1);
  }
};

template <class T>
INLINE void max_pool_back_share(void *given) {
  const MaxPoolBack<T> &job = *static_cast<MaxPoolBack<T> *>(given);
  const PoolAxis &h = job.h, &w = job.w;
  const long channels = job.channels;
  const long out_h = (h.outputs + h.side_out - 1) / h.side_out, out_w = (w.outputs + w.side_out - 1) / w.side_out;
  const long in_h = (h.size + h.side_in - 1) / h.side_in, in_w = (w.size + w.side_in - 1) / w.side_in;
  const long plane = job.batch * out_h * out_w * channels;
  const Share mine = my_share(job, job.batch * in_h);
  for (long item = mine.begin; item < mine.end; item++) {
    const long n = item / in_h, i = item % in_h;
    const Readers down(h, i);
    for (long j = 0; j < in_w; j++) {
      const Readers right(w, j);
      T *result = job.result + (item * in_w + j) * channels;
      std::fill(result, result + channels, T(0));
      for (long a = down.first; a <= down.last; a++)
        for (long b = right.first; b <= right.last; b++) {
          const long at = ((n * out_h + a) * out_w + b) * channels;
          const long neighbour = (i - h.first - a * h.stride) * w.reach + j - w.first - b * w.stride;
          const T *grad = job.grad + at;
          const uint8_t *counts = job.counts + neighbour * plane + at;
          for (long c = 0; c < channels; c++) result[c] += grad[c] * T(counts[c]);
        }
      if (job.open) {
        const uint8_t *open = job.open + (item * in_w + j) * channels;
        for (long c = 0; c < channels; c++) result[c] /= open[c] ? T(open[c]) : T(1);
      } else {
        const long rows = std::min<long>(h.side_in, h.size - i * h.side_in);
        const T pixels = T(rows * std::min<long>(w.side_in, w.size - j * w.side_in));
        for (long c = 0; c < channels; c++) result[c] /= pixels;
      }
    }
  }
}

EACH_PROCESSOR void max_pool_back_float(void *job) { max_pool_back_share<float>(job); }
EACH_PROCESSOR void max_pool_back_double(void *job) { max_pool_back_share<double>(job); }
}  // namespace

#define MAX_POOL_BACK(NAME, T, BODY)                                                                               \
  EXPORT void NAME(const T *grad, const uint8_t *counts, const uint8_t *open, T *result, long batch,               \
                   long channels, const PoolAxis *h, const PoolAxis *w, int threads) {                             \
    MaxPoolBack<T> job{{}, grad, counts, open, result, batch, channels, *h, *w};                                   \
    run(BODY, job, batch *channels *h->size *w->size, threads);                                                    \
  }
MAX_POOL_BACK(gf_max_pool_back_float, float, max_pool_back_float)
MAX_POOL_BACK(gf_max_pool_back_double, double, max_pool_back_double)

// ------------------------------------------------------------------------------------------------- back through a gate
// gradient * (share of open pixels, shut ones passing `shut` of it) * scale of the norm before the gate.

namespace {
template <class T>
struct Gate : Job {
  const T *grad;
  const uint8_t *open;
  const T *scale;        // one per channel, or null
  const T *per_pixel;    // 1 / pixels of each patch of a map
  T *result;
  long maps, patches, channels;
  T shut;
  bool grad_per_map;     // one number per channel for all patches of a map
};

template <class T>
INLINE void gate_share(void *given) {
  const Gate<T> &job = *static_cast<Gate<T> *>(given);
  const long channels = job.channels;
  const Share mine = my_share(job, job.maps * job.patches);
  for (long p = mine.begin; p < mine.end; p++) {
    const T *grad = job.grad + (job.grad_per_map ? p / job.patches : p) * channels;
    const uint8_t *open = job.open + p * channels;
    const T *scale = job.scale;
    T *result = job.result + p * channels;
    const T per_pixel = job.per_pixel[p % job.patches] * (T(1) - job.shut), shut = job.shut;
    if (scale)
      for (long c = 0; c < channels; c++) result[c] = grad[c] * scale[c] * (T(open[c]) * per_pixel + shut);
    else
      for (long c = 0; c < channels; c++) result[c] = grad[c] * (T(open[c]) * per_pixel + shut);
  }
}

EACH_PROCESSOR void gate_float(void *job) { gate_share<float>(job); }
EACH_PROCESSOR void gate_double(void *job) { gate_share<double>(job); }
}  // namespace

#define GATE(NAME, T, BODY)                                                                                        \
  EXPORT void NAME(const T *grad, const uint8_t *open, const T *scale, const T *per_pixel, T *result, long maps,   \
                   long patches, long channels, double shut, int grad_per_map, int threads) {                      \
    Gate<T> job{{}, grad, open, scale, per_pixel, result, maps, patches, channels, T(shut), grad_per_map != 0};    \
    run(BODY, job, maps *patches *channels, threads);                                                              \
  }
GATE(gf_gate_float, float, gate_float)
GATE(gf_gate_double, double, gate_double)

// ------------------------------------------------------------------------------------------------- gates of every pixel
// One bit per value says where a gate is open: bit k of byte i is that of value k * plane + i, in the order of memory.

namespace {
constexpr long PIECE = 4096;  // bytes at a time, so that the bits stay in the cache

template <class T>
struct OpenBits : Job {
  const T *y;
  uint8_t *bits;
  long total, plane;
  T low, high;
};

template <class T>
struct ThroughBits : Job {
  const T *grad, *scale;  // the scale of each channel, or null
  const uint8_t *bits;
  T *made;
  long total, plane, channels;
  T shut;
};

template <class T>
INLINE void open_bits_share(void *given) {
  const OpenBits<T> &job = *static_cast<OpenBits<T> *>(given);
  const T low = job.low, high = job.high;
  const Share mine = my_share(job, job.plane);
  for (long begin = mine.begin; begin < mine.end; begin += PIECE) {
    const long count = std::min(PIECE, mine.end - begin);
    uint8_t bits[PIECE] = {};  // its own, so that the compiler knows that writing to it changes nothing else
    for (int bit = 0; bit < 8; bit++) {
      const T *y = job.y + bit * job.plane + begin;
      const uint8_t set = uint8_t(1 << bit);
      const long known = std::min(count, job.total - bit * job.plane - begin);
      for (long i = 0; i < known; i++) bits[i] |= is_open(y[i], low, high) ? set : uint8_t(0);
    }
    std::copy(bits, bits + count, job.bits + begin);
  }
}

template <class T>
INLINE void through_bits_share(void *given) {
  const ThroughBits<T> &job = *static_cast<ThroughBits<T> *>(given);
  const T shut = job.shut, open = T(1) - job.shut;
  const Share mine = my_share(job, job.plane);
  for (long begin = mine.begin; begin < mine.end; begin += PIECE) {
    for (int bit = 0; bit < 8; bit++) {
      const long first = bit * job.plane;
      const long end = std::min(std::min(begin + PIECE, mine.end), job.total - first);
      for (long at = begin, next; at < end; at = next) {
        const long channel = (first + at) % job.channels;
        next = std::min(end, at + job.channels - channel);
        const T *grad = job.grad + first + at;
        T *made = job.made + first + at;
        const uint8_t *bits = job.bits + at;
        if (job.scale) {
          const T *scale = job.scale + channel;
          for (long i = 0; i < next - at; i++) made[i] = grad[i] * (T(bits[i] >> bit & 1) * open + shut) * scale[i];
        } else {
          for (long i = 0; i < next - at; i++) made[i] = grad[i] * (T(bits[i] >> bit & 1) * open + shut);
        }
      }
    }
  }
}

EACH_PROCESSOR void open_bits_float(void *job) { open_bits_share<float>(job); }
EACH_PROCESSOR void open_bits_double(void *job) { open_bits_share<double>(job); }
EACH_PROCESSOR void through_bits_float(void *job) { through_bits_share<float>(job); }
EACH_PROCESSOR void through_bits_double(void *job) { through_bits_share<double>(job); }
}  // namespace

#define BITS(T)                                                                                                    \
  EXPORT void gf_open_bits_##T(const T *y, uint8_t *bits, long total, double low, double high, int threads) {      \
    OpenBits<T> job{{}, y, bits, total, (total + 7) / 8, T(low), T(high)};                                         \
    run(open_bits_##T, job, total, threads);                                                                       \
  }                                                                                                                \
  EXPORT void gf_through_bits_##T(const T *grad, const T *scale, const uint8_t *bits, T *made, long total,         \
                                  long channels, double shut, int threads) {                                       \
    ThroughBits<T> job{{}, grad, scale, bits, made, total, (total + 7) / 8, channels, T(shut)};                    \
    run(through_bits_##T, job, total, threads);                                                                    \
  }
BITS(float)
BITS(double)

// ------------------------------------------------------------------------------------------------- depthwise backward
// Per axis, input patch q is linked with a few output patches p; what a link weighs per tap is one of a few kinds.
//   x_grad[q]  = sum over links (p, kind): kernel[kind] * grad[p], per pixel of q
//   w_grad[k]  = sum over kinds: weighs[kind][k] * (sum over links of that kind: x[q] * grad[p])
// Both in one walk over the links, a block of channels at a time, so that sums stay in the cache and no two threads
// write to the same place.

namespace {
struct Axis {
  long patches_in, patches_out, taps, kinds;
  const int32_t *first;   // links of input patch q: first[q] .. first[q + 1]
  const int32_t *patch;   // of each link: the output patch
  const int32_t *kind;    // of each link: its kind
  const double *weighs;   // (kinds, taps)
};

template <class T>
struct Depthwise : Job {
  const T *grad, *x, *weight;  // x: null if no weight gradient is wanted
  T *x_grad, *weight_grad;     // null if not wanted
  const T *per_pixel;
  long maps, channels;
  Axis h, w;
  T *scratch;  // per thread: kernels and sums of every pair of kinds
};

constexpr long BLOCK = 32;

template <class T>
INLINE void make_kernels(const Depthwise<T> &job, long start, long width, T *kernels) {
  const long taps = job.h.taps * job.w.taps;
  for (long a = 0; a < job.h.kinds; a++)
    for (long b = 0; b < job.w.kinds; b++) {
      T *kernel = kernels + (a * job.w.kinds + b) * BLOCK;
      std::fill(kernel, kernel + BLOCK, T(0));
      for (long i = 0; i < job.h.taps; i++)
        for (long j = 0; j < job.w.taps; j++) {
          const T weighs = T(job.h.weighs[a * job.h.taps + i] * job.w.weighs[b * job.w.taps + j]);
          if (weighs != T(0))
            for (long c = 0; c < width; c++)
              kernel[c] += weighs * job.weight[(start + c) * taps + i * job.w.taps + j];
        }
    }
}

template <class T>
INLINE void write_weight_gradient(const Depthwise<T> &job, long start, long width, const T *sums) {
  const long taps = job.h.taps * job.w.taps;
  for (long i = 0; i < job.h.taps; i++)
    for (long j = 0; j < job.w.taps; j++) {
      T total[BLOCK] = {};
      for (long a = 0; a < job.h.kinds; a++)
        for (long b = 0; b < job.w.kinds; b++) {
          const T weighs = T(job.h.weighs[a * job.h.taps + i] * job.w.weighs[b * job.w.taps + j]);
          const T *sum = sums + (a * job.w.kinds + b) * BLOCK;
          if (weighs != T(0))
            for (long c = 0; c < BLOCK; c++) total[c] += weighs * sum[c];
        }
      for (long c = 0; c < width; c++) job.weight_grad[(start + c) * taps + i * job.w.taps + j] = total[c];
    }
}

template <class T, bool FULL>
INLINE void walk_links(const Depthwise<T> &job, long start, long width_given, const T *kernels, T *sums) {
  const long width = FULL ? BLOCK : width_given;
  for (long n = 0; n < job.maps; n++)
    for (long qh = 0; qh < job.h.patches_in; qh++)
      for (long qw = 0; qw < job.w.patches_in; qw++) {
        const long q = qh * job.w.patches_in + qw;
        const long at = (n * job.h.patches_in * job.w.patches_in + q) * job.channels + start;
        T total[BLOCK] = {};
        for (long a = job.h.first[qh]; a < job.h.first[qh + 1]; a++)
          for (long b = job.w.first[qw]; b < job.w.first[qw + 1]; b++) {
            const long p = (n * job.h.patches_out + job.h.patch[a]) * job.w.patches_out + job.w.patch[b];
            const long pair = (job.h.kind[a] * job.w.kinds + job.w.kind[b]) * BLOCK;
            const T *grad = job.grad + p * job.channels + start;
            if (job.x_grad)
              for (long c = 0; c < width; c++) total[c] += kernels[pair + c] * grad[c];
            if (job.x) {
              const T *x = job.x + at;
              for (long c = 0; c < width; c++) sums[pair + c] += x[c] * grad[c];
            }
          }
        if (job.x_grad)
          for (long c = 0; c < width; c++) job.x_grad[at + c] = total[c] * job.per_pixel[q];
      }
}

template <class T>
INLINE void depthwise_share(void *given) {
  const Depthwise<T> &job = *static_cast<Depthwise<T> *>(given);
  const long pairs = job.h.kinds * job.w.kinds * BLOCK;
  T *kernels = job.scratch + (job.alone ? 0 : thread_number()) * 2 * pairs, *sums = kernels + pairs;
  const Share mine = my_share(job, (job.channels + BLOCK - 1) / BLOCK);
  for (long block = mine.begin; block < mine.end; block++) {
    const long start = block * BLOCK, width = std::min(BLOCK, job.channels - start);
    if (job.x_grad) make_kernels(job, start, width, kernels);
    if (job.x) std::fill(sums, sums + pairs, T(0));
    if (width == BLOCK)
      walk_links<T, true>(job, start, width, kernels, sums);
    else
      walk_links<T, false>(job, start, width, kernels, sums);
    if (job.x) write_weight_gradient(job, start, width, sums);
  }
}

EACH_PROCESSOR void depthwise_float(void *job) { depthwise_share<float>(job); }
EACH_PROCESSOR void depthwise_double(void *job) { depthwise_share<double>(job); }
}  // namespace

// `axis` of either: patches_in, patches_out, taps, kinds, links, then first, patch and kind.
namespace {
Axis axis_of(const int32_t *axis, const double *weighs) {
  const int32_t *first = axis + 5, *patch = first + axis[0] + 1;
  return {axis[0], axis[1], axis[2], axis[3], first, patch, patch + axis[4], weighs};
}
}  // namespace

#define DEPTHWISE(NAME, T, BODY)                                                                                   \
  EXPORT void NAME(const T *grad, const T *x, const T *weight, T *x_grad, T *weight_grad, const T *per_pixel,      \
                   T *scratch, long maps, long channels, const int32_t *axis_h, const double *weighs_h,            \
                   const int32_t *axis_w, const double *weighs_w, int threads) {                                   \
    Axis h = axis_of(axis_h, weighs_h), w = axis_of(axis_w, weighs_w);                                             \
    Depthwise<T> job{{},   grad,     x,    weight, x_grad, weight_grad, per_pixel, maps,                           \
                     channels, h, w, scratch};                                                                     \
    run(BODY, job, maps *channels *h.patches_out *w.patches_out, threads);                                         \
  }
DEPTHWISE(gf_depthwise_float, float, depthwise_float)
DEPTHWISE(gf_depthwise_double, double, depthwise_double)

// ------------------------------------------------------------------------------------------------- blocks of few bits
// Values in blocks of `size`, each with its minimum and step, and whole numbers of BITS bits: part k of a block is in
// the k-th bits of its bytes. See ops/blocks.py, whose torch version computes the same.

namespace {
template <class T>
struct Encode : Job {
  const T *x;
  uint8_t *codes;
  T *ranges;
  const T *noise;
  long count, size, bits, tile, offset, next_chunk;
};

template <class T>
struct Decode : Job {
  const uint8_t *codes;
  const T *ranges;
  T *x;
  long count, size, bits;
};

// Minimum and step of a block; whether all its values are finite. NaN is the minimum where they are not.
template <class T>
INLINE bool find_range(const T *x, long width, T levels, T *range) {
  constexpr int ABREAST = 32;
  T low[ABREAST], high[ABREAST], odd[ABREAST];
  std::fill(low, low + ABREAST, x[0]);
  std::fill(high, high + ABREAST, x[0]);
  std::fill(odd, odd + ABREAST, T(0));
  const long even = width / ABREAST * ABREAST;
  for (long i = 0; i < even; i += ABREAST)
    for (int j = 0; j < ABREAST; j++) {
      const T v = x[i + j];
      low[j] = v < low[j] ? v : low[j];
      high[j] = v > high[j] ? v : high[j];
      odd[j] += v * T(0);  // NaN if v is not finite
    }
  for (long i = even; i < width; i++) {
    low[0] = x[i] < low[0] ? x[i] : low[0];
    high[0] = x[i] > high[0] ? x[i] : high[0];
    odd[0] += x[i] * T(0);
  }
  for (int j = 1; j < ABREAST; j++) {
    low[0] = std::min(low[0], low[j]);
    high[0] = std::max(high[0], high[j]);
    odd[0] += odd[j];
  }
  range[1] = (high[0] - low[0]) / levels;
  range[0] = low[0] + (odd[0] + T(0) * range[1]);
  return range[0] == range[0];
}

template <class T, int BITS>
INLINE void encode_block(const T *x, long width, const T *noise, T *range, uint8_t *codes) {
  constexpr int PARTS = 8 / BITS;
  const T levels = (1 << BITS) - 1;
  const long span = (width + PARTS - 1) / PARTS;
  if (!find_range(x, width, levels, range)) {
    std::fill(codes, codes + span, uint8_t(0));
    return;
  }
  const T low = range[0], step = range[1];
  const T per_step = step < std::numeric_limits<T>::min() ? T(0) : T(1) / step;
  auto whole = [=](long at) {
    const T place = (x[at] - low) * per_step + noise[at];
    return int(place < levels ? place : levels);
  };
  const long in_all_parts = std::max(0L, width - (PARTS - 1) * span);
  for (long i = 0; i < in_all_parts; i++) {
    int byte = 0;
    for (int k = 0; k < PARTS; k++) byte |= whole(i + k * span) << (k * BITS);
    codes[i] = uint8_t(byte);
  }
  for (long i = in_all_parts; i < span; i++) {
    int byte = 0;
    for (int k = 0; k < PARTS && i + k * span < width; k++) byte |= whole(i + k * span) << (k * BITS);
    codes[i] = uint8_t(byte);
  }
}

template <class T, int BITS>
INLINE void encode_share(const Encode<T> &job) {
  const long whole = job.count / job.size, rest = job.count % job.size, bytes = job.size * BITS / 8;
  const long rows = std::max(1L, job.tile / job.size);
  const Share mine = my_share(job, whole + (rest > 0));
  for (long block = mine.begin; block < mine.end; block++) {
    const bool last = block == whole;  // the short one: a chunk of its own
    const long chunk = last ? (whole + rows - 1) / rows : block / rows;
    const long at = (job.offset + chunk * job.next_chunk) % job.tile + (last ? 0 : block % rows * job.size);
    encode_block<T, BITS>(job.x + block * job.size, last ? rest : job.size, job.noise + at, job.ranges + 2 * block,
                          job.codes + block * bytes);
  }
}

template <class T, int BITS>
INLINE void decode_share(const Decode<T> &job) {
  const long whole = job.count / job.size, rest = job.count % job.size, bytes = job.size * BITS / 8;
  const Share mine = my_share(job, whole + (rest > 0));
  for (long block = mine.begin; block < mine.end; block++) {
    const long width = block == whole ? rest : job.size, span = (width * BITS + 7) / 8;
    const uint8_t *codes = job.codes + block * bytes;
    T *x = job.x + block * job.size;
    const T low = job.ranges[2 * block], step = job.ranges[2 * block + 1];
    for (int k = 0; k < 8 / BITS; k++) {
      const long part = std::min(span, width - k * span);
      for (long i = 0; i < part; i++)
        x[k * span + i] = T((codes[i] >> (k * BITS)) & ((1 << BITS) - 1)) * step + low;
    }
  }
}

#define BY_BITS(SHARE, KIND, T)                                                                                    \
  const KIND<T> &job = *static_cast<KIND<T> *>(given);                                                             \
  if (job.bits == 8) SHARE<T, 8>(job);                                                                             \
  if (job.bits == 4) SHARE<T, 4>(job);                                                                             \
  if (job.bits == 2) SHARE<T, 2>(job);

EACH_PROCESSOR void encode_float(void *given) { BY_BITS(encode_share, Encode, float) }
EACH_PROCESSOR void encode_double(void *given) { BY_BITS(encode_share, Encode, double) }
EACH_PROCESSOR void decode_float(void *given) { BY_BITS(decode_share, Decode, float) }
EACH_PROCESSOR void decode_double(void *given) { BY_BITS(decode_share, Decode, double) }
}  // namespace

#define BLOCKS(T)                                                                                                  \
  EXPORT void gf_encode_##T(const T *x, uint8_t *codes, T *ranges, const T *noise, long count, long size,          \
                            long bits, long tile, long offset, long next_chunk, int threads) {                     \
    Encode<T> job{{}, x, codes, ranges, noise, count, size, bits, tile, offset, next_chunk};                       \
    run(encode_##T, job, count, threads);                                                                          \
  }                                                                                                                \
  EXPORT void gf_decode_##T(const uint8_t *codes, const T *ranges, T *x, long count, long size, long bits,         \
                            int threads) {                                                                         \
    Decode<T> job{{}, codes, ranges, x, count, size, bits};                                                        \
    run(decode_##T, job, count, threads);                                                                          \
  }
BLOCKS(float)
BLOCKS(double)
