// Threads, dtypes and symbols: what both parts of the library share.
#pragma once

#include "vector.h"

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

// torch_parallel_for of PyTorch: calls run(begin, end, context) for parts of the range, on PyTorch's own threads.
typedef void (*Run)(int64_t begin, int64_t end, void* context);
typedef int (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Run run, void* context);

enum DType { FLOAT32, BFLOAT16, FLOAT16 };

// `work` for the type of a dtype's entries: `work(T{})`.
template <typename Work>
static inline void with_dtype(int64_t dtype, Work work) {
  if (dtype == FLOAT32) return work(float{});
  if (dtype == BFLOAT16) return work(BFloat16{});
  work(Float16{});
}

// 0 but in the lanes of [first, last); the first lane is number i.
static inline Vector keep_lanes(Vector x, int64_t i, int64_t first, int64_t last) {
  if (i >= first && i + LANES <= last) return x;
  Integers number = lane_numbers() + (int32_t)i;
  x = number >= Integers{} + (int32_t)first ? x : Vector{};
  return number < Integers{} + (int32_t)last ? x : Vector{};
}
