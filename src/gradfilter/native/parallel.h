// What the native sources share: one version of a function per generation of processors, and torch's threads.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__AVX512F__)
#define EACH_PROCESSOR __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define EACH_PROCESSOR __attribute__((noinline))  // as clones are: each has all registers to itself
#endif
#define INLINE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

// ------------------------------------------------------------------------------------------------- threads
// torch's own OpenMP threads, handed over by Python: a second pool would fight with them for the cores.

using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
using Number = int (*)();
EXPORT Parallel gf_parallel;
extern Number thread_number, thread_count;

struct Job {
  bool alone;
};

struct Share {
  long begin, end;
};

// The items of [0, total) that the calling thread works on.
inline Share my_share(const Job &job, long total) {
  if (job.alone) return {0, total};
  long count = thread_count(), number = thread_number();
  return {total * number / count, total * (number + 1) / count};
}

// `work` in elements: waking threads costs more than a small job.
template <class J>
void run(void (*body)(void *), J &job, long work, int threads) {
  job.alone = !gf_parallel || threads < 2 || work < 16384;
  if (job.alone)
    body(&job);
  else
    gf_parallel(body, &job, threads, 0);
}
