// The short convolution before queries, keys and values, and its SiLU, in one pass over memory:
//
//     y_t = silu(p_t)        p_t = Σ_i w_i x_{t - width + 1 + i}
//
// A task is a block of tokens of one row, in a group of channels, and goes through memory in the order in which it lies.

#include "parallel.h"
#include "vector.h"

// As ops/short_convolution.py declares it. x and the gradients have C contiguous channels; all else is contiguous.
struct Convolution {
  int64_t batch, length, channels, width, without_silu, dtype;
  int64_t block;              // tokens of a task
  int64_t x_batch, x_token;   // strides of x, in entries
  const void *x, *tail;       // (B, T, C) and the inputs before it (B, width - 1, C)
  const float* weight;        // (width, C)
  const int64_t* documents;   // (B, T) numbers that grow, or null; the tail belongs to document 0
  void* y;                    // (B, T, C)
  const void* grad;           // the gradient of y
  void *dx, *d_tail;
  float* d_weight;            // (B, blocks of a row, width, C)
  ParallelFor parallel_for;
};

namespace {

enum { MOST = 8, GROUP = 256, AT_ONCE = 4 };  // the widest; channels of a task; tokens whose vectors are in registers

// A block of tokens of one row, in a group of channels. WIDTH is the convolution's, or 0 for any.
template <typename T, int WIDTH>
struct Block {
  const Convolution& c;
  const int64_t row, first, last, first_channel, last_channel;  // the last ones are not in it
  const int64_t width = WIDTH ? WIDTH : c.width, before = width - 1;
  float d[MOST][GROUP] = {}, d_weight[MOST][GROUP] = {};  // the gradient of p, of token t in d[t % MOST]

  Vector weight(int64_t i, int64_t channel) const {
    return load_part(c.weight + i * c.channels + channel, last_channel - channel);
  }

  // 1 in channels with SiLU
  Vector active(int64_t channel) const { return keep_lanes(broadcast(1), channel, c.without_silu, c.channels); }

  float* d_of(int64_t t, int64_t channel) { return d[t & (MOST - 1)] + channel - first_channel; }

  int64_t document(int64_t t) const { return !c.documents || t < 0 ? 0 : c.documents[row * c.length + t]; }

  const T* input(int64_t t, int64_t channel) const {
    if (t >= 0) return (const T*)c.x + row * c.x_batch + t * c.x_token + channel;
    return (const T*)c.tail + (row * before + t + before) * c.channels + channel;
  }

  int64_t at(int64_t t, int64_t channel) const { return (row * c.length + t) * c.channels + channel; }

  // x at t, as token `by` sees it
  Vector seen(int64_t t, int64_t by, int64_t channel) const {
    return document(t) == document(by) ? load_part(input(t, channel), last_channel - channel) : Vector{};
  }

  Vector sum(int64_t t, int64_t channel) const {
    Vector p = {};
    for (int64_t i = 0; i < width; i++) p += weight(i, channel) * seen(t - before + i, t, channel);
    return p;
  }

  // Whether AT_ONCE tokens from t on need no care: one document, and no tail.
  bool is_plain(int64_t t) const { return WIDTH && !c.documents && t >= before && t >= first && t + AT_ONCE <= last; }

  void forward() const {
    for (int64_t t = first, n; t < last; t += n) {
      n = is_plain(t) ? AT_ONCE : 1;
      for (int64_t channel = first_channel; channel < last_channel; channel += LANES)
        if (n == AT_ONCE && channel + LANES <= last_channel)
          forward_plain(t, channel);
        else
          for (int64_t i = t; i < t + n; i++) forward_one(i, channel);
    }
  }

  void forward_one(int64_t t, int64_t channel) const {
    Vector p = sum(t, channel), y = active(channel) > Vector{} ? p * sigmoid(p) : p;
    store_part((T*)c.y + at(t, channel), y, last_channel - channel);
  }

  void forward_plain(int64_t t, int64_t channel) const {
    enum { N = WIDTH ? WIDTH : 1 };
    const T* x = input(t - (N - 1), channel);
    T* y = (T*)c.y + at(t, channel);
    const Vector is_active = active(channel);
    Vector w[N], seen[N + AT_ONCE - 1];
    for (int i = 0; i < N; i++) w[i] = weight(i, channel);
    for (int i = 0; i < N + AT_ONCE - 1; i++) seen[i] = load(x + i * c.x_token);
    for (int j = 0; j < AT_ONCE; j++) {
      Vector p = {};
      for (int i = 0; i < N; i++) p += w[i] * seen[i + j];
      store(y + j * c.channels, is_active > Vector{} ? p * sigmoid(p) : p);
    }
  }

  // From the end, so that d of the tokens after one is there when its own is due.
  void backward() {
    for (int64_t t = minimum(last + before, c.length) - 1; t >= last; t--)
      for (int64_t channel = first_channel; channel < last_channel; channel += LANES) find_d(t, channel);
    for (int64_t t = last, n; t > first; t -= n) {
      n = is_plain(t - AT_ONCE) ? AT_ONCE : 1;
      for (int64_t channel = first_channel; channel < last_channel; channel += LANES)
        if (n == AT_ONCE && channel + LANES <= last_channel)
          backward_plain(t - n, channel);
        else
          for (int64_t i = t - 1; i >= t - n; i--) backward_one(i, channel);
    }
    if (first == 0) backward_of_tail();
  }

  Vector find_d(int64_t t, int64_t channel) {
    const Vector grad = load_part((const T*)c.grad + at(t, channel), last_channel - channel);
    const Vector found = gradient(sum(t, channel), grad, active(channel));
    store(d_of(t, channel), found);
    return found;
  }

  static Vector gradient(Vector p, Vector grad, Vector is_active) {
    const Vector s = sigmoid(p);
    return is_active > Vector{} ? grad * s * (broadcast(1.f) + p * (broadcast(1.f) - s)) : grad;
  }

  Vector gradient_of_input(int64_t t, int64_t channel) {
    Vector dx = {};
    for (int64_t j = t < 0 ? -t : 0; j <= before; j++)
      if (t + j < c.length && document(t + j) == document(t))
        dx += weight(before - j, channel) * load(d_of(t + j, channel));
    return dx;
  }

  void backward_one(int64_t t, int64_t channel) {
    const Vector found = find_d(t, channel);
    for (int64_t i = 0; i < width; i++) {
      float* sums = d_weight[i] + channel - first_channel;
      store(sums, load(sums) + found * seen(t - before + i, t, channel));
    }
    store_part((T*)c.dx + at(t, channel), gradient_of_input(t, channel), last_channel - channel);
  }

  void backward_plain(int64_t t, int64_t channel) {
    enum { N = WIDTH ? WIDTH : 1 };
    const T *x = input(t - (N - 1), channel), *grad = (const T*)c.grad + at(t, channel);
    T* dx = (T*)c.dx + at(t, channel);
    const Vector is_active = active(channel);
    const int64_t step = c.x_token, y_step = c.channels;
    float* rings[AT_ONCE];
    for (int j = 0; j < AT_ONCE; j++) rings[j] = d_of(t + j, channel);
    Vector w[N], seen[N + AT_ONCE - 1], d[AT_ONCE + N - 1];
    for (int i = 0; i < N; i++) w[i] = weight(i, channel);
    for (int i = 0; i < N + AT_ONCE - 1; i++) seen[i] = load(x + i * step);
    for (int j = AT_ONCE; j < AT_ONCE + N - 1; j++) d[j] = load(d_of(t + j, channel));
    for (int j = 0; j < AT_ONCE; j++) {
      Vector p = {};
      for (int i = 0; i < N; i++) p += w[i] * seen[i + j];
      d[j] = gradient(p, load(grad + j * y_step), is_active);
    }
    for (int j = 0; j < AT_ONCE; j++) {
      Vector total = {};
      for (int i = 0; i < N; i++) total += w[N - 1 - i] * d[j + i];
      store(dx + j * y_step, total), store(rings[j], d[j]);
    }
    for (int i = 0; i < N; i++) {
      float* sums = d_weight[i] + channel - first_channel;
      Vector total = load(sums);
      for (int j = 0; j < AT_ONCE; j++) total += d[j] * seen[i + j];
      store(sums, total);
    }
  }

  void backward_of_tail() {
    for (int64_t t = -before; t < 0; t++)
      for (int64_t channel = first_channel; channel < last_channel; channel += LANES) {
        T* to = (T*)c.d_tail + (row * before + t + before) * c.channels + channel;
        store_part(to, gradient_of_input(t, channel), last_channel - channel);
      }
  }

  void store_weight_gradient(float* to) const {
    for (int64_t i = 0; i < width; i++)
      for (int64_t channel = first_channel; channel < last_channel; channel++)
        to[i * c.channels + channel] = d_weight[i][channel - first_channel];
  }
};

template <bool BACKWARD, typename T, int WIDTH>
void blocks(const Convolution& c, int64_t begin, int64_t end) {
  const int64_t groups = round_up(c.channels, GROUP) / GROUP, of_row = round_up(c.length, c.block) / c.block;
  for (int64_t item = begin; item < end; item++) {
    const int64_t number = item / groups, t = number % of_row * c.block, channel = item % groups * GROUP;
    Block<T, WIDTH> block{c, number / of_row, t, minimum(t + c.block, c.length),
                          channel, minimum(channel + GROUP, c.channels)};
    if (BACKWARD)
      block.backward(), block.store_weight_gradient(c.d_weight + number * c.width * c.channels);
    else
      block.forward();
  }
}

template <bool BACKWARD>
void part(int64_t begin, int64_t end, void* context) {
  const Convolution& c = *(const Convolution*)context;
  with_dtype(c.dtype, [&](auto entry) {
    if (c.width == 4)
      blocks<BACKWARD, decltype(entry), 4>(c, begin, end);
    else
      blocks<BACKWARD, decltype(entry), 0>(c, begin, end);
  });
}

template <bool BACKWARD>
void run(const Convolution& c) {
  const int64_t groups = round_up(c.channels, GROUP) / GROUP, of_row = round_up(c.length, c.block) / c.block;
  c.parallel_for(0, c.batch * of_row * groups, 1, part<BACKWARD>, (void*)&c);
}

}  // namespace

extern "C" {

EXPORT void linrope_convolve(const Convolution* c) { run<false>(*c); }

EXPORT void linrope_convolve_backward(const Convolution* c) { run<true>(*c); }
}
