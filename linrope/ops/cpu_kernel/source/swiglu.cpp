// silu(a) ∘ b of rows (a, b) of twice the width, and its gradient, in one pass over memory.

#include "parallel.h"
#include "vector.h"

// As ops/swiglu.py declares it. All tensors are contiguous.
struct SwiGLU {
  int64_t rows, width, dtype;
  const void* x;  // (rows, 2 width)
  void* y;        // (rows, width)
  const void* grad;
  void* dx;
  ParallelFor parallel_for;
};

namespace {

template <typename T>
void forward_row(const SwiGLU& call, int64_t row) {
  const T *a = (const T*)call.x + 2 * row * call.width, *b = a + call.width;
  T* y = (T*)call.y + row * call.width;
  for (int64_t i = 0; i < call.width; i += LANES) {
    const int64_t count = call.width - i;
    Vector x = load_part(a + i, count);
    store_part(y + i, x * sigmoid(x) * load_part(b + i, count), count);
  }
}

template <typename T>
void backward_row(const SwiGLU& call, int64_t row) {
  const T *a = (const T*)call.x + 2 * row * call.width, *b = a + call.width;
  const T* grad = (const T*)call.grad + row * call.width;
  T *da = (T*)call.dx + 2 * row * call.width, *db = da + call.width;
  for (int64_t i = 0; i < call.width; i += LANES) {
    const int64_t count = call.width - i;
    Vector x = load_part(a + i, count), s = sigmoid(x), g = load_part(grad + i, count);
    store_part(da + i, g * load_part(b + i, count) * s * (broadcast(1.f) + x * (broadcast(1.f) - s)), count);
    store_part(db + i, g * x * s, count);
  }
}

template <bool BACKWARD>
void part(int64_t begin, int64_t end, void* context) {
  const SwiGLU& call = *(const SwiGLU*)context;
  with_dtype(call.dtype, [&](auto entry) {
    for (int64_t row = begin; row < end; row++)
      if (BACKWARD)
        backward_row<decltype(entry)>(call, row);
      else
        forward_row<decltype(entry)>(call, row);
  });
}

const int64_t GRAIN = 1 << 14;  // entries that take less time than handing them to another thread

template <bool BACKWARD>
void run(const SwiGLU& call) {
  call.parallel_for(0, call.rows, GRAIN / call.width + 1, part<BACKWARD>, (void*)&call);
}

}  // namespace

extern "C" {

EXPORT void linrope_swiglu(const SwiGLU* call) { run<false>(*call); }

EXPORT void linrope_swiglu_backward(const SwiGLU* call) { run<true>(*call); }
}
