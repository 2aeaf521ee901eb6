// What is done to one chunk of tokens besides matrix products: loading, φ, rotation, decay and running sums.
#pragma once

#include "call.h"
#include "vector.h"

enum { RUN_TOKENS = 16 };  // running sums start again after so many tokens, so that they lose few digits

// One chunk of one head.
struct Chunk {
  int64_t batch, head, start, n;  // n tokens, 1 to CHUNK
  int64_t rows() const { return round_up(n, 4); }
};

static inline int64_t entry_size(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

static inline char* row_of(const Tokens& x, int64_t dtype, const Chunk& c, int64_t t) {
  int64_t offset = c.batch * x.batch + c.head * x.head + (c.start + t) * x.token;
  return (char*)x.data + offset * entry_size(dtype);
}

static inline void fill(float* to, int64_t count, float value) {
  for (int64_t i = 0; i < count; i++) to[i] = value;
}

static inline const uint8_t* mask_of(const Call& call, const Chunk& c) {
  return call.key_mask ? call.key_mask + c.batch * call.keys + c.start : nullptr;
}

// Values in float32, 0 where masked and in the padding.
static void load_values(const Call& call, const Chunk& c, const uint8_t* mask, float* to) {
  const int64_t size = call.width, width = round_up(size, LANES);
  with_dtype(call.value_dtype, [&](auto entry) {
    for (int64_t t = 0; t < c.n; t++, to += width) {
      const auto* row = (const decltype(entry)*)row_of(call.v, call.value_dtype, c, t);
      if (mask && !mask[t])
        fill(to, width, 0);
      else
        for (int64_t i = 0; i < width; i += LANES) store(to + i, load_part(row + i, size - i));
    }
  });
  fill(to, (c.rows() - c.n) * width, 0);
}

// Values to their tensor, each token's multiplied by 1 / by[t]; 0 where masked. `by` and `mask` may be null.
static void store_values(const Call& call, const Tokens& x, const Chunk& c, const float* values, const float* by,
                         const uint8_t* mask) {
  const int64_t size = call.width, width = round_up(size, LANES);
  with_dtype(call.value_dtype, [&](auto entry) {
    for (int64_t t = 0; t < c.n; t++, values += width) {
      auto* row = (decltype(entry)*)row_of(x, call.value_dtype, c, t);
      const Vector divisor = broadcast(by ? by[t] : 1);
      const bool hidden = mask && !mask[t];
      for (int64_t i = 0; i < size; i += LANES) {
        Vector y = load(values + i);
        store_part(row + i, hidden ? Vector{} : by ? y / divisor : y, size - i);
      }
    }
  });
}

// --- feature maps ---------------------------------------------------------------------------------------------------

// The features that denominators sum.
struct Summed {
  int64_t first, last;
  explicit Summed(const Call& call) : first(call.signed_features), last(call.features) {}
  Vector operator()(Vector x, int64_t i) const { return keep_lanes(x, i, first, last); }
};

static inline Vector zero_below(Vector x) { return x < Vector{} ? Vector{} : x; }

template <int MAP>
static inline Vector feature(Vector x) {
  if (MAP == ELU1) return exponential(least(x, Vector{})) + zero_below(x);
  if (MAP == RELU) return zero_below(x);
  if (MAP == EXP) return exponential(least(x, broadcast(10.f)));  // EXP_CEILING of feature_maps.py
  return x;
}

template <int MAP, typename T>
static inline void map_row(const Summed summed, const T* row, float* to, int64_t width) {
  int64_t i = 0;
  if (summed.first == 0)
    for (; i + LANES <= summed.last; i += LANES) store(to + i, feature<MAP>(load(row + i)));
  for (; i < width; i += LANES) {
    Vector x = load_part(row + i, summed.last - i);
    store(to + i, summed(feature<MAP>(x), i) + keep_lanes(x, i, 0, summed.first));
  }
}

template <typename T>
static void softmax_row(const Summed summed, const T* row, float* to, int64_t width) {
  map_row<IDENTITY>(summed, row, to, width);
  if (summed.first >= summed.last) return;
  Vector most = broadcast(to[summed.first]), total = {};
  for (int64_t i = 0; i < width; i += LANES) {
    Vector x = load(to + i), inside = summed(broadcast(1), i);
    x = inside > Vector{} ? x : most;
    most = x > most ? x : most;
  }
  const Vector shift = broadcast(largest_lane(most));
  for (int64_t i = 0; i < width; i += LANES) {
    Vector x = load(to + i), y = summed(decay_weight(x - shift), i);
    total += y;
    store(to + i, y + keep_lanes(x, i, 0, summed.first));
  }
  const Vector scale = broadcast(1 / sum_lanes(total));
  for (int64_t i = 0; i < width; i += LANES) {
    Vector y = load(to + i);
    store(to + i, summed(y * scale, i) + keep_lanes(y, i, 0, summed.first));
  }
}

// φ of the tokens of x, rows of `width`; 0 where masked (φ(0) is not 0) and in the padding.
static void load_features(const Call& call, const Tokens& x, const Chunk& c, const uint8_t* mask, float* to) {
  const int64_t width = round_up(call.features, LANES), map = call.feature_map;
  const Summed summed(call);
  with_dtype(call.dtype, [&](auto entry) {
    for (int64_t t = 0; t < c.n; t++, to += width) {
      const auto* row = (const decltype(entry)*)row_of(x, call.dtype, c, t);
      if (mask && !mask[t]) {
        fill(to, width, 0);
        continue;
      }
      switch (map) {
        case ELU1: map_row<ELU1>(summed, row, to, width); break;
        case RELU: map_row<RELU>(summed, row, to, width); break;
        case EXP: map_row<EXP>(summed, row, to, width); break;
        case IDENTITY: map_row<IDENTITY>(summed, row, to, width); break;
        default: softmax_row(summed, row, to, width);
      }
    }
  });
  fill(to, (c.rows() - c.n) * width, 0);
}

// From the gradient of φ(x), y = φ(x), to that of x.
template <int MAP, typename T>
static inline void gradient_row(const Summed summed, const T* x, const float* y, const float* dy, T* dx, int64_t width) {
  const int64_t size = summed.last;
  Vector mean = {};
  if (MAP == SOFTMAX) {
    for (int64_t i = 0; i < width; i += LANES) mean += summed(load(y + i) * load(dy + i), i);
    mean = broadcast(sum_lanes(mean));
  }
  for (int64_t i = 0; i < size; i += LANES) {
    Vector f = load(y + i), g = load(dy + i), d = g;
    if (MAP == ELU1) d = g * least(f, broadcast(1.f));
    if (MAP == RELU) d = f > Vector{} ? g : Vector{};
    if (MAP == SOFTMAX) d = f * (g - mean);
    if (MAP == EXP) d = load_part(x + i, size - i) > broadcast(10.f) ? Vector{} : f * g;
    if (summed.first > i) d = summed(d, i) + keep_lanes(g, i, 0, summed.first);
    store_part(dx + i, d, size - i);
  }
}

// The gradient of x from that of φ(x), stored in the inputs' dtype; 0 where masked.
static void store_gradient(const Call& call, const Tokens& x, const Tokens& dx, const Chunk& c, const uint8_t* mask,
                           const float* y, const float* dy) {
  const int64_t size = call.features, width = round_up(size, LANES), map = call.feature_map;
  const Summed summed(call);
  with_dtype(call.dtype, [&](auto entry) {
    for (int64_t t = 0; t < c.n; t++, y += width, dy += width) {
      const auto* row = (const decltype(entry)*)row_of(x, call.dtype, c, t);
      auto* to = (decltype(entry)*)row_of(dx, call.dtype, c, t);
      if (mask && !mask[t]) {
        for (int64_t i = 0; i < size; i += LANES) store_part(to + i, Vector{}, size - i);
        continue;
      }
      switch (map) {
        case ELU1: gradient_row<ELU1>(summed, row, y, dy, to, width); break;
        case RELU: gradient_row<RELU>(summed, row, y, dy, to, width); break;
        case EXP: gradient_row<EXP>(summed, row, y, dy, to, width); break;
        case IDENTITY: gradient_row<IDENTITY>(summed, row, y, dy, to, width); break;
        default: gradient_row<SOFTMAX>(summed, row, y, dy, to, width);
      }
    }
  });
}

// --- rotation -------------------------------------------------------------------------------------------------------

// The rotations of a chunk's tokens, (CHUNK, width) each. y = cos ∘ x + sin ∘ x', where x' has the two entries of each
// pair exchanged, and sin is negative for the first of a pair. Beyond the rotated dimensions cos is 1 and sin 0.
// `local` (2, CHUNK, width) holds those of tokens within a chunk, `frames` (chunks, 2, width) those of each chunk.
struct Rotations {
  float *cos, *sin;

  void make(const Call& call, const Chunk& c) {
    int64_t width = round_up(call.features, LANES);
    const float* local_cos = call.local + c.head * call.local_head;
    const float *local_sin = local_cos + CHUNK * width, *frame_cos = call.frames + c.head * call.frames_head;
    frame_cos += c.start / CHUNK * 2 * width;
    for (int64_t t = 0; t < c.n; t++)
      for (int64_t i = 0; i < width; i += LANES) {
        Vector a = load(local_cos + t * width + i), b = load(local_sin + t * width + i);
        Vector p = load(frame_cos + i), q = load(frame_cos + width + i);
        store(cos + t * width + i, a * p - b * q);
        store(sin + t * width + i, b * p + a * q);
      }
  }

  // Rows of x rotated into `to`, which is not x; INVERSE rotates back.
  template <bool INVERSE>
  void rotate(const Call& call, const Chunk& c, const float* x, float* to) const {
    const int64_t width = round_up(call.features, LANES), half = call.rotary / 2;
    const bool interleaved = call.interleaved;
    const float *cos = this->cos, *sin = this->sin;
    if (call.rotary == 0) {
      memcpy(to, x, c.rows() * width * sizeof(float));
      return;
    }
    float halves[256 + LANES];
    const bool whole = half % LANES == 0;  // vectors of partners lie in the row itself
    if (!interleaved && !whole) fill(halves, width, 0);
    for (int64_t t = 0; t < c.n; t++) {
      const float* row = x + t * width;
      if (!interleaved && !whole) {
        memcpy(halves, row + half, half * sizeof(float));
        memcpy(halves + half, row, half * sizeof(float));
      }
      for (int64_t i = 0; i < width; i += LANES) {
        const float* partner = !whole ? halves + i : i < half ? row + i + half : i < 2 * half ? row + i - half : row + i;
        Vector y = load(row + i), other = interleaved ? swap_pairs(y) : load(partner);
        Vector s = load(sin + t * width + i);
        store(to + t * width + i, y * load(cos + t * width + i) + other * (INVERSE ? -s : s));
      }
    }
    fill(to + c.n * width, (c.rows() - c.n) * width, 0);
  }
};

// θ's gradient: Σ (t - middle) · (x × ∂x) over pairs of rotated features x.
static void add_theta_gradient(const Call& call, const Chunk& c, const float* x, const float* dx, double* total) {
  int64_t width = round_up(call.features, LANES), half = call.rotary / 2;
  int64_t step = call.interleaved ? 2 : 1, other = call.interleaved ? 1 : half;
  for (int64_t t = 0; t < c.n; t++) {
    double position = (double)(c.start + t - call.middle);
    const float *a = x + t * width, *b = dx + t * width;
    for (int64_t m = 0; m < half; m++) {
      int64_t i = m * step, j = i + other;
      total[m] += position * ((double)a[i] * b[j] - (double)a[j] * b[i]);
    }
  }
}

// --- decay ----------------------------------------------------------------------------------------------------------

// Weights between the tokens of a chunk, exp of differences of the running sum of log_decay, 0 between documents.
struct Decay {
  float* pairs;             // (CHUNK, CHUNK): from key (column) to query (row)
  float reach[CHUNK];       // from the state before the chunk to a token
  float kept[CHUNK];        // from a token to the state after the chunk
  float carry[CHUNK + 1];   // from the token before
  float since[CHUNK];       // from the sum before a token's run to the token
  float till[CHUNK];        // from a token to the end of its run
  float step;               // from the state before the chunk to the one after it
  double total[CHUNK + 1];  // the running sum, total[0] = 0 before the first token
  int64_t document[CHUNK + 1];

  void none() {
    fill(carry, CHUNK + 1, 1), fill(since, CHUNK, 1), fill(till, CHUNK, 1);
    step = 1;
  }

  void make(const Call& call, const Chunk& c) {
    total[0] = 0;
    for (int64_t t = 0; t < c.n; t++) {
      float g = call.log_decay.data ? *(float*)row_of(call.log_decay, FLOAT32, c, t) : 0;
      carry[t] = g;
      total[t + 1] = total[t] + g;
    }
    const int64_t* documents = call.documents ? call.documents + c.batch * call.queries + c.start : nullptr;
    for (int64_t t = 0; t < c.n; t++) document[t + 1] = documents ? documents[t] : 0;
    document[0] = !documents ? 0 : c.start ? documents[-1] : documents[0];  // that of the state
    for (int64_t t = 0; t < c.n; t++) {
      int64_t first = t / RUN_TOKENS * RUN_TOKENS, end = minimum(first + RUN_TOKENS, c.n);
      reach[t] = total[t + 1];
      kept[t] = total[c.n] - total[t + 1];
      since[t] = total[t + 1] - total[first];
      till[t] = total[end] - total[t + 1];
    }
    for (int64_t t = c.n; t < CHUNK; t++) reach[t] = kept[t] = carry[t] = since[t] = till[t] = 0, total[t + 1] = total[c.n];
    float* all[] = {reach, kept, carry, since, till};
    for (float* weights : all)
      for (int64_t t = 0; t < CHUNK; t += LANES) store(weights + t, decay_weight(load(weights + t)));
    for (int64_t t = 0; documents && t < c.n; t++) {
      int64_t first = t / RUN_TOKENS * RUN_TOKENS, end = minimum(first + RUN_TOKENS, c.n), own = document[t + 1];
      if (own != document[0]) reach[t] = 0;
      if (own != document[c.n]) kept[t] = 0;
      if (own != document[t]) carry[t] = 0;
      if (own != document[first]) since[t] = 0;
      if (own != document[end]) till[t] = 0;
    }
    step = document[c.n] == document[0] ? decay_weight(total[c.n]) : 0;
  }

  // Whole vectors of keys before a query: one product of two weights, through the vector's last key.
  void make_pairs(const Chunk& c) {
    float to_last[CHUNK] = {}, from_last[CHUNK / LANES][CHUNK];
    for (int64_t j = 0; j * LANES < c.n; j++) {
      int64_t last = minimum((j + 1) * LANES, c.n);
      for (int64_t t = j * LANES; t < last; t++) to_last[t] = total[last] - total[t + 1];
      for (int64_t t = last; t < c.n; t++) from_last[j][t] = total[t + 1] - total[last];
      store(to_last + j * LANES, decay_weight(load(to_last + j * LANES)));
      for (int64_t t = last; t < c.n; t += LANES) {
        Vector weights = decay_weight(load_part(from_last[j] + t, c.n - t));
        store_part(from_last[j] + t, weights, c.n - t);
      }
    }
    int64_t first = 0;  // of the query's document, in this chunk
    for (int64_t t = 0; t < c.rows(); t++) {
      float* row = pairs + t * CHUNK;
      if (t >= c.n) {
        fill(row, CHUNK, 0);
        continue;
      }
      if (document[t + 1] != document[t]) first = t;
      int64_t own = t / LANES * LANES;
      for (int64_t i = 0; i < own; i += LANES)
        store(row + i, load(to_last + i) * broadcast(from_last[i / LANES][t]));
      Doubles difference = total[t + 1] - *(const Doubles*)(total + 1 + own);
      store(row + own, keep_lanes(decay_weight(__builtin_convertvector(difference, Vector)), own, 0, t + 1));
      if (own + LANES < CHUNK) store(row + own + LANES, Vector{});  // a tile's rows may reach into the next vector
      fill(row, first, 0);
    }
  }
};

// --- denominators ---------------------------------------------------------------------------------------------------

// The decayed sum of k up to each token, from `sum` (width), which becomes that of the last; `use(t, i, sum_t)` gets it in
// vectors, of one run of tokens after the other.
template <typename Use>
static inline void running_sums(const Call& call, const Chunk& c, const Decay& decay, const float* k, float* sum,
                                Use use) {
  const int64_t width = round_up(call.features, LANES);
  const Summed summed(call);
  for (int64_t first = 0; first < c.n; first += RUN_TOKENS) {
    const int64_t last = minimum(first + RUN_TOKENS, c.n);
    for (int64_t i = 0; i < width; i += LANES) {
      Vector before = load(sum + i), total = before, own = {};
      for (int64_t t = first; t < last; t++) {
        own = broadcast(decay.carry[t]) * own + summed(load(k + t * width + i), i);
        total = broadcast(decay.since[t]) * before + own;
        use(t, i, total);
      }
      store(sum + i, total);
    }
  }
}

// The same from the end: the decayed sum of scale_t · q from each token on. `sum` becomes that before the first token.
template <typename Use>
static inline void running_sums_back(const Call& call, const Chunk& c, const Decay& decay, const float* q,
                                     const float* scale, float* sum, Use use) {
  const int64_t width = round_up(call.features, LANES);
  const Summed summed(call);
  for (int64_t first = (c.n - 1) / RUN_TOKENS * RUN_TOKENS; first >= 0; first -= RUN_TOKENS) {
    const int64_t last = minimum(first + RUN_TOKENS, c.n);
    for (int64_t i = 0; i < width; i += LANES) {
      Vector after = load(sum + i), total = after, own = {};
      for (int64_t t = last - 1; t >= first; t--) {
        if (scale) own += broadcast(scale[t]) * summed(load(q + t * width + i), i);
        total = broadcast(decay.till[t]) * after + own;
        use(t, i, total);
        own *= broadcast(decay.carry[t]);
      }
      store(sum + i, broadcast(decay.carry[first]) * total);
    }
  }
}
