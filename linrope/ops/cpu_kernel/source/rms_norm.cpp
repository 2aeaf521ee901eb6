// x / √(mean of x² + ε) ∘ weight of rows, and its gradients, in one pass over memory.

#include "parallel.h"

// As ops/rms_norm.py declares it. All tensors are contiguous.
struct RMSNorm {
  int64_t rows, width, dtype, block;  // block: rows whose share of the weight's gradient is summed together
  double eps;
  const void *x, *weight;  // (rows, width), (width)
  void* y;                 // (rows, width)
  const void* grad;
  void* dx;
  float* d_weight;  // (blocks, width)
  ParallelFor parallel_for;
};

namespace {

// 1 / √(mean of x² + ε)
template <typename T>
float scale_of(const RMSNorm& call, const T* x) {
  Vector squares = {};
  for (int64_t i = 0; i < call.width; i += LANES) {
    Vector part = load_part(x + i, call.width - i);
    squares += part * part;
  }
  return 1.f / __builtin_sqrtf(sum_lanes(squares) / call.width + (float)call.eps);
}

template <typename T>
void forward_row(const RMSNorm& call, int64_t row) {
  const T *x = (const T*)call.x + row * call.width, *weight = (const T*)call.weight;
  T* y = (T*)call.y + row * call.width;
  const Vector scale = broadcast(scale_of(call, x));
  for (int64_t i = 0; i < call.width; i += LANES) {
    const int64_t count = call.width - i;
    store_part(y + i, load_part(x + i, count) * scale * load_part(weight + i, count), count);
  }
}

// With n = x · scale: ∂x = scale · (w ∂y - n · mean(w ∂y n)), ∂w = Σ ∂y n.
template <typename T>
void backward_row(const RMSNorm& call, int64_t row, float* d_weight) {
  const T *x = (const T*)call.x + row * call.width, *weight = (const T*)call.weight;
  const T* grad = (const T*)call.grad + row * call.width;
  T* dx = (T*)call.dx + row * call.width;
  const float scale = scale_of(call, x);
  Vector products = {};
  for (int64_t i = 0; i < call.width; i += LANES) {
    const int64_t count = call.width - i;
    Vector g = load_part(grad + i, count), n = load_part(x + i, count) * broadcast(scale);
    products += g * load_part(weight + i, count) * n;
    store_part(d_weight + i, load_part(d_weight + i, count) + g * n, count);
  }
  const Vector mean = broadcast(sum_lanes(products) / call.width);
  for (int64_t i = 0; i < call.width; i += LANES) {
    const int64_t count = call.width - i;
    Vector g = load_part(grad + i, count), n = load_part(x + i, count) * broadcast(scale);
    store_part(dx + i, broadcast(scale) * (g * load_part(weight + i, count) - n * mean), count);
  }
}

template <bool BACKWARD>
void part(int64_t begin, int64_t end, void* context) {
  const RMSNorm& call = *(const RMSNorm*)context;
  with_dtype(call.dtype, [&](auto entry) {
    for (int64_t block = begin; block < end; block++) {
      const int64_t last = minimum((block + 1) * call.block, call.rows);
      for (int64_t row = block * call.block; row < last; row++)
        if (BACKWARD)
          backward_row<decltype(entry)>(call, row, call.d_weight + block * call.width);
        else
          forward_row<decltype(entry)>(call, row);
    }
  });
}

template <bool BACKWARD>
void run(const RMSNorm& call) {
  call.parallel_for(0, round_up(call.rows, call.block) / call.block, 1, part<BACKWARD>, (void*)&call);
}

}  // namespace

extern "C" {

EXPORT void linrope_rms_norm(const RMSNorm* call) { run<false>(*call); }

EXPORT void linrope_rms_norm_backward(const RMSNorm* call) { run<true>(*call); }
}
