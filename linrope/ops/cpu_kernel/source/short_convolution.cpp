// The short convolution before queries, keys and values, and its SiLU, in one pass over memory:
//
//     y_t = silu(p_t)        p_t = Σ_i w_i x_{t - width + 1 + i}
//
// A task is a group of channels of one row, in blocks of tokens, so that each entry of x is read from memory once.

#include "parallel.h"
#include "vector.h"

// As ops/short_convolution.py declares it. x and the gradients have C contiguous channels; all else is contiguous.
struct Convolution {
  int64_t batch, length, channels, width, without_silu, dtype;
  int64_t x_batch, x_token;   // strides of x, in entries
  const void *x, *tail;       // (B, T, C) and the inputs before it (B, width - 1, C)
  const float* weight;        // (width, C)
  const int64_t* documents;   // (B, T) numbers that grow, or null; the tail belongs to document 0
  void* y;                    // (B, T, C)
  const void* grad;           // the gradient of y
  void *dx, *d_tail;
  float* d_weight;            // (B, width, C)
  ParallelFor parallel_for;
};

namespace {

enum { MOST = 8, GROUP = 32, TOKENS = 64 };  // the widest; channels of a task; tokens that stay in the first-level cache

// One vector of channels of one row. WIDTH is the convolution's, or 0 for any.
template <typename T, int WIDTH>
struct Lane {
  const Convolution* c;
  int64_t row, channel, count, width;
  Vector weight[MOST];
  Vector active;  // 1 in channels with SiLU
  Vector d_sum[MOST] = {}, d_weight[MOST] = {}, part[MOST] = {};  // d_sum[j]: of the token j later

  void start(const Convolution& call, int64_t row_, int64_t channel_) {
    c = &call, row = row_, channel = channel_;
    count = minimum(LANES, c->channels - channel), width = WIDTH ? WIDTH : c->width;
    for (int64_t i = 0; i < width; i++) weight[i] = load_part(c->weight + i * c->channels + channel, count);
    active = keep_lanes(broadcast(1), channel, c->without_silu, c->channels);
    for (int64_t i = 0; i < width; i++) d_sum[i] = d_weight[i] = part[i] = Vector{};
  }

  int64_t document(int64_t t) const { return !c->documents || t < 0 ? 0 : c->documents[row * c->length + t]; }

  const T* input(int64_t t) const {
    if (t >= 0) return (const T*)c->x + row * c->x_batch + t * c->x_token + channel;
    return (const T*)c->tail + (row * (width - 1) + t + width - 1) * c->channels + channel;
  }

  // x at t, as token `at` sees it
  Vector seen(int64_t t, int64_t at) const {
    return c->documents && document(t) != document(at) ? Vector{} : load_part(input(t), count);
  }

  Vector sum(int64_t t) const {
    Vector p = {};
    for (int64_t i = 0; i < width; i++) p += weight[i] * seen(t - width + 1 + i, t);
    return p;
  }

  int64_t at(int64_t t) const { return (row * c->length + t) * c->channels + channel; }

  // Whether tokens from t on need no care: whole vectors, one document, and no tail.
  bool is_plain(int64_t t) const { return WIDTH && t >= WIDTH - 1 && !c->documents && count == LANES; }

  void forward(int64_t first, int64_t last) {
    if (is_plain(first)) return forward_plain(first, last);
    for (int64_t t = first; t < last; t++) {
      Vector p = sum(t), y = p * sigmoid(p);
      store_part((T*)c->y + at(t), active > Vector{} ? y : p, count);
    }
  }

  // From the end, so that the gradients of the sums after a token are there when its own is due.
  void backward(int64_t first, int64_t last) {
    if (is_plain(first)) return backward_plain(first, last);
    const int64_t before = width - 1;
    for (int64_t t = last - 1; t >= first; t--) {
      for (int64_t j = before; j > 0; j--) d_sum[j] = d_sum[j - 1];
      d_sum[0] = Vector{};
      if (t >= 0) {
        Vector p = sum(t), s = sigmoid(p), g = load_part((const T*)c->grad + at(t), count);
        d_sum[0] = active > Vector{} ? g * s * (broadcast(1.f) + p * (broadcast(1.f) - s)) : g;
        for (int64_t i = 0; i < width; i++) part[i] += d_sum[0] * seen(t - before + i, t);
      }
      Vector dx = {};
      for (int64_t j = 0; j <= before; j++)
        if (!c->documents || (t + j < c->length && document(t + j) == document(t))) dx += weight[before - j] * d_sum[j];
      if (t >= 0)
        store_part((T*)c->dx + at(t), dx, count);
      else
        store_part((T*)c->d_tail + (row * before + t + before) * c->channels + channel, dx, count);
    }
    for (int64_t i = 0; i < width; i++) d_weight[i] += part[i], part[i] = Vector{};
  }

  // The same for tokens that need no care, with everything in registers.
  void forward_plain(int64_t first, int64_t last) const {
    enum { N = WIDTH ? WIDTH : 1 };
    const T* x = input(first);
    T* y = (T*)c->y + at(first);
    const int64_t step = c->x_token, y_step = c->channels;
    const Vector is_active = active;
    Vector w[N], seen[N];
    for (int i = 0; i < N; i++) w[i] = weight[i];
    for (int i = 1; i < N; i++) seen[i] = load(x + (i - N) * step);
    for (int64_t t = first; t < last; t++, x += step, y += y_step) {
      for (int i = 1; i < N; i++) seen[i - 1] = seen[i];
      seen[N - 1] = load(x);
      Vector p = {};
      for (int i = 0; i < N; i++) p += w[i] * seen[i];
      store(y, is_active > Vector{} ? p * sigmoid(p) : p);
    }
  }

  void backward_plain(int64_t first, int64_t last) {
    enum { N = WIDTH ? WIDTH : 1 };
    const T *x = input(last - 1), *grad = (const T*)c->grad + at(last - 1);
    T* dx = (T*)c->dx + at(last - 1);
    const int64_t step = c->x_token, y_step = c->channels;
    const Vector is_active = active;
    Vector w[N], d[N], sums[N] = {}, seen[N];
    for (int i = 0; i < N; i++) w[i] = weight[i], d[i] = d_sum[i];
    for (int i = 1; i < N; i++) seen[i - 1] = load(x + (i - N + 1) * step);
    for (int64_t t = last - 1; t >= first; t--, x -= step, grad -= y_step, dx -= y_step) {
      for (int i = N - 1; i > 0; i--) seen[i] = seen[i - 1], d[i] = d[i - 1];
      seen[0] = load(x - (N - 1) * step);
      Vector p = {}, g = load(grad), total = {};
      for (int i = 0; i < N; i++) p += w[i] * seen[i];
      Vector s = sigmoid(p);
      d[0] = is_active > Vector{} ? g * s * (broadcast(1.f) + p * (broadcast(1.f) - s)) : g;
      for (int i = 0; i < N; i++) sums[i] += d[0] * seen[i], total += w[N - 1 - i] * d[i];
      store(dx, total);
    }
    for (int i = 0; i < N; i++) d_sum[i] = d[i], d_weight[i] += sums[i];
  }

  void store_weight_gradient() const {
    for (int64_t i = 0; i < width; i++)
      store_part(c->d_weight + (row * width + i) * c->channels + channel, d_weight[i], count);
  }
};

template <bool BACKWARD, typename T, int WIDTH>
void groups(const Convolution& c, int64_t begin, int64_t end) {
  const int64_t n = round_up(c.channels, GROUP) / GROUP;
  Lane<T, WIDTH> lanes[GROUP / LANES];
  for (int64_t item = begin; item < end; item++) {
    const int64_t row = item / n, channel = item % n * GROUP;
    const int64_t used = round_up(minimum(GROUP, c.channels - channel), LANES) / LANES;
    for (int64_t i = 0; i < used; i++) lanes[i].start(c, row, channel + i * LANES);
    if (!BACKWARD) {
      for (int64_t t = 0; t < c.length; t += TOKENS)
        for (int64_t i = 0; i < used; i++) lanes[i].forward(t, minimum(t + TOKENS, c.length));
      continue;
    }
    for (int64_t t = (c.length - 1) / TOKENS * TOKENS; t >= 0; t -= TOKENS)
      for (int64_t i = 0; i < used; i++) lanes[i].backward(t, minimum(t + TOKENS, c.length));
    for (int64_t i = 0; i < used; i++) lanes[i].backward(1 - c.width, 0), lanes[i].store_weight_gradient();
  }
}

template <bool BACKWARD>
void part(int64_t begin, int64_t end, void* context) {
  const Convolution& c = *(const Convolution*)context;
  with_dtype(c.dtype, [&](auto entry) {
    if (c.width == 4)
      groups<BACKWARD, decltype(entry), 4>(c, begin, end);
    else
      groups<BACKWARD, decltype(entry), 0>(c, begin, end);
  });
}

template <bool BACKWARD>
void run(const Convolution& c) {
  c.parallel_for(0, c.batch * round_up(c.channels, GROUP) / GROUP, 1, part<BACKWARD>, (void*)&c);
}

}  // namespace

extern "C" {

EXPORT void linrope_convolve(const Convolution* c) { run<false>(*c); }

EXPORT void linrope_convolve_backward(const Convolution* c) { run<true>(*c); }
}
