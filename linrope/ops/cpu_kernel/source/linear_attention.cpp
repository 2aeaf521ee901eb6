// Linear attention with rotary positions in the numerator only, forward and backward, for one head of a row at a time.
//
// A head is computed chunk by chunk, and everything of a chunk stays in the first- and second-level caches. With q̃, k̃ the
// rotated features, S (D, E) the state before the chunk, M the weights of pairs (0 above the diagonal), a, b the weights
// from the state and to it, and g that of the state:
//
//     num = (M ∘ q̃ k̃ᵀ) v + a ∘ q̃ S        S ← g S + (b ∘ k̃)ᵀ v        den = φ(q) · (decayed running sum of φ(k)) + ε
//
// The backward goes from the last block of 4 chunks to the first. It sums the states of a block again from the one before
// it, which the forward wrote, and goes through its chunks from the end:
//
//     ∂q̃ = (M ∘ ∂num vᵀ) k̃ + a ∘ ∂num Sᵀ      ∂k̃ = (M ∘ ∂num vᵀ)ᵀ q̃ + b ∘ v ∂Sᵀ      ∂v = (M ∘ q̃ k̃ᵀ)ᵀ ∂num + b ∘ k̃ ∂S
//     ∂num = ∂o / den      ∂den = -∂num · o      ∂S ← g ∂S + q̃ᵀ (a ∘ ∂num)
//
// If a call says so (`products`), the operands of products are rounded to bfloat16, and multiplied as such. All sums, the
// state and the denominators are float32 even so.
//
// The gradient of log_decay is a difference of large sums: that of a numerator and that of a denominator. So a long call
// with decay (`exact`) keeps the sums over its chunks in double.
//
// If there are fewer heads than threads, the sequence is cut into stripes. First the states of their parts are summed, then
// each stripe starts from the sum of those before it.

#include "chunk.h"
#include "products.h"
#include "tiles.h"

namespace {

// Where things are, for a thread; all rows are padded to whole vectors.
struct Buffers {
  int64_t d, e;                                // padded D and E
  float *q, *k, *q_rotated, *k_rotated;        // (CHUNK, d)
  float *v, *out;                              // (CHUNK, e)
  float *pairs;                                // (CHUNK, CHUNK)
  float *state, *sum;                          // (d, e), (d)
  float *features, *states, *sums;             // of a block: φ(k) (BLOCK, d), states (5, e, d), sums of keys (5, d)
  float *dq, *dk, *d_num;                      // (CHUNK, d) twice, (CHUNK, e)
  float *d_state, *d_state_transposed, *d_sum;  // (d, e), (e, d), (d)
  float* added;                                // (d, e) or (d): a chunk's share of a sum
  double *total = nullptr, *total_sum = nullptr;  // of an exact call: the state or its gradient, and the sum of rows
  Rotations rotations;
  float *pair_weights;
  // Room for operands of products, see products.h: _rows and _columns in the shape of their matrix, _flipped transposed.
  float *q_rows, *q_columns, *k_rows, *k_columns, *k_flipped, *v_rows, *v_columns, *v_flipped;
  float *d_num_rows, *d_num_columns, *pairs_rows, *pairs_columns, *state_columns;
  float* from;
  int64_t size = 0;

  // `from` may be null: then only the size is right.
  Buffers(const Call& call, float* from) : from(from) {
    d = round_up(call.features, LANES), e = round_up(call.width, LANES);
    q = take(CHUNK * d), k = take(CHUNK * d), q_rotated = take(CHUNK * d), k_rotated = take(CHUNK * d);
    v = take(CHUNK * e), out = take(CHUNK * e), pairs = take(CHUNK * CHUNK);
    state = take(d * e), sum = take(d), pair_weights = take(CHUNK * CHUNK);
    rotations.cos = take(CHUNK * d), rotations.sin = take(CHUNK * d);
    features = take(BLOCK * d), states = take((BLOCK_CHUNKS + 1) * e * d), sums = take((BLOCK_CHUNKS + 1) * d);
    dq = take(CHUNK * d), dk = take(CHUNK * d), d_num = take(CHUNK * e);
    d_state = take(d * e), d_state_transposed = take(e * d), d_sum = take(d);
    q_rows = take(CHUNK * d), q_columns = take(CHUNK * d);
    k_rows = take(CHUNK * d), k_columns = take(CHUNK * d), k_flipped = take(CHUNK * d);
    v_rows = take(CHUNK * e), v_columns = take(CHUNK * e), v_flipped = take(CHUNK * e);
    d_num_rows = take(CHUNK * e), d_num_columns = take(CHUNK * e);
    pairs_rows = take(CHUNK * CHUNK), pairs_columns = take(CHUNK * CHUNK), state_columns = take(d * e);
    added = take(d * e);
    if (call.exact) total = (double*)take(2 * d * e), total_sum = (double*)take(2 * d);
  }
  float* take(int64_t count) {
    int64_t start = size;
    size += round_up(count, 16);
    return from ? from + start : nullptr;
  }
};

// (D, E) <-> padded (d, e)
void read_state(const Call& call, const Buffers& b, const float* kv, const float* k_sum, float* state, float* sum) {
  for (int64_t i = 0; i < b.d; i++)
    for (int64_t j = 0; j < b.e; j += LANES)
      store(state + i * b.e + j,
            kv && i < call.features ? load_part(kv + i * call.width + j, call.width - j) : Vector{});
  for (int64_t i = 0; i < b.d; i += LANES)
    store(sum + i, k_sum ? load_part(k_sum + i, call.features - i) : Vector{});
}

void write_state(const Call& call, const Buffers& b, const float* state, const float* sum, float* kv, float* k_sum) {
  for (int64_t i = 0; i < call.features; i++)
    for (int64_t j = 0; j < call.width; j += LANES)
      store_part(kv + i * call.width + j, load(state + i * b.e + j), call.width - j);
  for (int64_t i = 0; i < call.features; i += LANES) store_part(k_sum + i, load(sum + i), call.features - i);
}

void scale(float* x, int64_t size, float by) {
  if (by != 1)
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) * broadcast(by));
}

// One head, in the thread that computes it. T: of what its products take, float, BFloat16x2 or BFloat16Tile.
template <typename T>
struct Head {
  typedef Matrix<T> Operand;
  const Call& call;
  int64_t number, batch, head;
  Buffers& b;
  Decay decay;
  bool decays;
  const Summed summed;

  Head(const Call& call, int64_t number, Buffers& b)
      : call(call), number(number), batch(number / call.heads), head(number % call.heads), b(b), summed(call) {
    decays = call.log_decay.data || call.documents;
    decay.pairs = b.pair_weights;
    decay.none();
  }

  // With n ≤ 0 beyond the sequence.
  Chunk chunk(int64_t index, int64_t length) const {
    int64_t start = index * CHUNK;
    return {batch, head, start, index < 0 ? 0 : minimum(CHUNK, length - start)};
  }

  // Of the state before block i, or of the final one.
  float* kv_at(int64_t i) const {
    return call.kv_at + (i * call.batch * call.heads + number) * call.features * call.width;
  }
  float* k_sum_at(int64_t i) const { return call.k_sum_at + (i * call.batch * call.heads + number) * call.features; }

  void load_rotations(const Chunk& c) {
    if (call.rotary) b.rotations.make(call, c);
  }
  void load_keys(const Chunk& c, float* k) {
    load_features(call, call.k, c, mask_of(call, c), k);
    b.rotations.rotate<false>(call, c, k, b.k_rotated);
  }
  void load_values(const Chunk& c) { ::load_values(call, c, mask_of(call, c), b.v); }
  void load_queries(const Chunk& c) {
    load_features(call, call.q, c, nullptr, b.q);
    b.rotations.rotate<false>(call, c, b.q, b.q_rotated);
  }

  // A chunk's rows of x. Nothing where there is no chunk before the first, or after the last.
  Rows rows_in(const Tokens& x, int64_t dtype, int64_t size, const Chunk& c, bool written = false) const {
    if (c.n <= 0) return {};
    return {row_of(x, dtype, c, 0), x.token * entry_size(dtype), size * entry_size(dtype), c.n, written};
  }
  Rows keys(const Chunk& c) const { return rows_in(call.k, call.dtype, call.features, c); }
  Rows queries(const Chunk& c) const { return rows_in(call.q, call.dtype, call.features, c); }
  Rows values_of(const Tokens& x, const Chunk& c) const { return rows_in(x, call.value_dtype, call.width, c); }
  Rows features_written(const Tokens& x, const Chunk& c) const {
    return rows_in(x, call.dtype, call.features, c, true);
  }
  Rows values_written(const Tokens& x, const Chunk& c) const {
    return rows_in(x, call.value_dtype, call.width, c, true);
  }
  Rows values(const Chunk& c) const { return values_of(call.v, c); }

  // Operands in a buffer's place; `weights` as in products.h.
  Operand rows_of(const float* x, int64_t width, int64_t n, float* to, const float* weights = nullptr) const {
    return by_rows(x, width, n, weights, (T*)to);
  }
  Operand columns_of(const float* x, int64_t width, int64_t n, float* to, const float* weights = nullptr) const {
    return by_columns(x, width, n, weights, (T*)to);
  }
  Operand flipped_of(Operand x, const Chunk& c, float* to) const {
    return flipped(x, round_up(c.n, LANES), (T*)to, CHUNK);
  }
  const float* weights(const float* of_tokens) const { return decays ? of_tokens : nullptr; }

  // S ← g S + (b ∘ k̃)ᵀ v
  void add_to_state(const Chunk& c, Operand v, Ahead ahead = {}) {
    add_product(b.state, columns_of(b.k_rotated, b.d, c.rows(), b.k_columns, weights(decay.kept)), v, c.n, ahead);
  }
  // S ← g S + xᵀ y
  void add_product(float* state, Operand x, Operand y, int64_t n, Ahead ahead) {
    if (call.exact) {
      multiply<true, FULL>(b.added, b.e, b.d, b.e, x, y, n, ahead);
      return add(state, b.total, b.d * b.e);
    }
    if (decays) scale(state, b.d * b.e, decay.step);
    multiply<true, FULL, ADD>(state, b.e, b.d, b.e, x, y, n, ahead);
  }

  // sum ← g sum + `b.added`, through the total in double if there is one.
  void add(float* sum, double* total, int64_t size) {
    for (int64_t i = 0; total && i < size; i++) sum[i] = (float)(total[i] = decay.step * total[i] + b.added[i]);
    for (int64_t i = 0; !total && i < size; i += LANES)
      store(sum + i, load(sum + i) * broadcast(decay.step) + load(b.added + i));
  }
  void start_totals(const float* state, const float* sum) {
    for (int64_t i = 0; b.total && i < b.d * b.e; i++) b.total[i] = state[i];
    for (int64_t i = 0; b.total && i < b.d; i++) b.total_sum[i] = sum[i];
  }
  Operand value_columns(const Chunk& c) const { return columns_of(b.v, b.e, c.rows(), b.v_columns); }

  // sum ← g sum + Σ_t weight_t x_t over the chunk's rows; without weights they are 1.
  void add_rows(const Chunk& c, const float* x, const float* weights, float* sum, double* total = nullptr) {
    for (int64_t i = 0; i < b.d; i += LANES) {
      Vector own = {};
      for (int64_t t = 0; t < c.n; t++) {
        Vector row = summed(load(x + t * b.d + i), i);
        own += weights ? row * broadcast(weights[t]) : row;
      }
      store(b.added + i, own);
    }
    add(sum, total, b.d);
  }

  // The state's sum of keys after the chunk, without those in between.
  void add_to_sum(const Chunk& c, const float* k, float* sum, double* total = nullptr) {
    add_rows(c, k, weights(decay.kept), sum, total);
  }

  // The state of some chunks of keys alone; returns the weight of what came before them.
  float sum_keys(int64_t first, int64_t last) {
    float step = 1;
    read_state(call, b, nullptr, nullptr, b.state, b.sum);
    start_totals(b.state, b.sum);
    for (int64_t i = first; i < last; i++) {
      Chunk c = chunk(i, call.keys);
      if (decays) decay.make(call, c);
      load_rotations(c), load_keys(c, b.k), load_values(c);
      add_to_sum(c, b.k, b.sum, b.total_sum);
      Chunk next = chunk(i + 1, call.keys);
      add_to_state(c, value_columns(c), {keys(next), values(next)});
      step *= decay.step;
    }
    return step;
  }

  float* den_of(const Chunk& c) const { return call.den + number * call.queries + c.start; }

  // o of a chunk's queries from `b.out`, the numerator, and the sums of keys.
  void divide(const Chunk& c, float* dots) {
    if (call.plain)
      for (int64_t t = 0; t < c.n; t++) den_of(c)[t] = dots[t] + (float)call.eps;
    store_values(call, call.o, c, b.out, call.plain ? den_of(c) : nullptr, nullptr);
  }

  // --- causal ---

  void forward(int64_t first, int64_t last) {
    start_totals(b.state, b.sum);
    for (int64_t i = first; i < last; i++) {
      if (i % BLOCK_CHUNKS == 0) write_state(call, b, b.state, b.sum, kv_at(i / BLOCK_CHUNKS), k_sum_at(i / BLOCK_CHUNKS));
      Chunk c = chunk(i, call.keys), next = chunk(i + 1, call.keys);
      if (decays) decay.make(call, c), decay.make_pairs(c);
      load_rotations(c), load_keys(c, b.k), load_values(c), load_queries(c);
      Operand q = rows_of(b.q_rotated, b.d, c.rows(), b.q_rows), k = rows_of(b.k_rotated, b.d, c.rows(), b.k_rows);
      pairs_of(c, q, flipped_of(k, c, b.k_flipped), call.features, keys(next));
      Operand pairs = rows_of(b.pairs, CHUNK, c.rows(), b.pairs_rows), v = value_columns(c);
      multiply<false, BY_PAIRS>(b.out, b.e, c.rows(), b.e, pairs, v, c.n, values_written(call.o, c));
      if (decays) q = rows_of(b.q_rotated, b.d, c.rows(), b.q_rows, decay.reach);
      Operand state = columns_of(b.state, b.e, b.d, b.state_columns);
      multiply<false, FULL, ADD>(b.out, b.e, c.rows(), b.e, q, state, call.features, queries(next));
      float dots[CHUNK];
      if (call.plain) {
        Vector totals[CHUNK];
        const int64_t d = b.d;
        const float* q = b.q;
        running_sums(call, c, decay, b.k, b.sum, [=, &totals, &dots, summed = summed](int64_t t, int64_t i, Vector sum) {
          totals[t] = (i ? totals[t] : Vector{}) + summed(load(q + t * d + i), i) * sum;
          if (i + LANES == d) dots[t] = sum_lanes(totals[t]);
        });
      }
      if (!call.plain || call.exact) add_to_sum(c, b.k, b.sum, b.total_sum);
      divide(c, dots);
      add_to_state(c, v, values(next));
    }
  }

  // M ∘ (x yᵀ), y given transposed.
  void pairs_of(const Chunk& c, Operand x, Operand y, int64_t depth, Ahead ahead) {
    if (decays)
      multiply<false, PAIRS, WEIGH>(b.pairs, CHUNK, c.rows(), CHUNK, x, y, depth, ahead, decay.pairs);
    else
      multiply<false, PAIRS>(b.pairs, CHUNK, c.rows(), CHUNK, x, y, depth, ahead);
  }

  // ∂num into `b.d_num`, and ∂den = -∂num · o.
  void through_division(const Chunk& c, float* d_den) {
    const int64_t size = call.width, width = b.e;
    const bool plain = call.plain;
    float* to = b.d_num;
    with_dtype(call.value_dtype, [&](auto entry) {
      for (int64_t t = 0; t < c.n; t++, to += width) {
        const auto* g = (const decltype(entry)*)row_of(call.grad_o, call.value_dtype, c, t);
        const auto* o = (const decltype(entry)*)row_of(call.o, call.value_dtype, c, t);
        const Vector den = broadcast(plain ? den_of(c)[t] : 1);
        Vector total = {};
        for (int64_t i = 0; i < width; i += LANES) {
          Vector x = load_part(g + i, size - i);
          if (plain) {
            x = keep_lanes(x / den, i, 0, size);  // 0 / 0 is NaN
            total += x * load_part(o + i, size - i);
          }
          store(to + i, x);
        }
        d_den[t] = -sum_lanes(total);
      }
    });
    fill(to, (c.rows() - c.n) * width, 0);
  }

  // ∂S and the gradient of the sum of keys, of some chunks of queries alone; returns the weight of what comes after.
  float sum_queries(int64_t first, int64_t last) {
    float step = 1, d_den[CHUNK];
    read_state(call, b, nullptr, nullptr, b.d_state, b.d_sum);
    start_totals(b.d_state, b.d_sum);
    for (int64_t i = last - 1; i >= first; i--) {
      Chunk c = chunk(i, call.queries);
      if (decays) decay.make(call, c);
      load_rotations(c), load_queries(c);
      through_division(c, d_den);
      Chunk next = chunk(i - 1, call.queries);
      add_to_gradient(c, query_columns(c), reached_columns(c),
                      {queries(next), values_of(call.grad_o, next), values_of(call.o, next)});
      sum_query_gradients(c, d_den);
      step *= decay.step;
    }
    return step;
  }

  // ∂S ← g ∂S + q̃ᵀ (a ∘ ∂num), from q̃ and a ∘ ∂num
  void add_to_gradient(const Chunk& c, Operand q, Operand d_num, Ahead ahead = {}) {
    add_product(b.d_state, q, d_num, c.n, ahead);
  }
  Operand query_columns(const Chunk& c) const { return columns_of(b.q_rotated, b.d, c.rows(), b.q_columns); }
  Operand reached_columns(const Chunk& c) const {
    return columns_of(b.d_num, b.e, c.rows(), b.d_num_columns, weights(decay.reach));
  }

  void sum_query_gradients(const Chunk& c, const float* d_den) {
    if (!call.plain) {
      fill(b.added, b.d, 0);
      return add(b.d_sum, b.total_sum, b.d);
    }
    float weights[CHUNK];
    for (int64_t t = 0; t < c.n; t++) weights[t] = decays ? d_den[t] * decay.reach[t] : d_den[t];
    add_rows(c, b.q, weights, b.d_sum, b.total_sum);
  }

  void backward(int64_t first, int64_t last, double* d_theta) {
    start_totals(b.d_state, b.d_sum);
    for (int64_t block = (last - 1) / BLOCK_CHUNKS; block >= first / BLOCK_CHUNKS; block--) {
      int64_t begin = block * BLOCK_CHUNKS, end = minimum(begin + BLOCK_CHUNKS, last);
      sum_states_again(block, begin, end);
      for (int64_t i = end - 1; i >= begin; i--) backward_chunk(chunk(i, call.keys), i - begin, d_theta);
    }
  }

  // The states before each chunk of a block, and after it, transposed; φ(k) of its tokens.
  void sum_states_again(int64_t block, int64_t begin, int64_t end) {
    read_state(call, b, kv_at(block), k_sum_at(block), b.state, b.sums);
    transpose(b.state, b.e, b.states, b.d, b.d, b.e);
    for (int64_t i = begin; i < end; i++) {
      Chunk c = chunk(i, call.keys);
      float *k = b.features + (i - begin) * CHUNK * b.d, *next = b.states + (i - begin + 1) * b.e * b.d;
      bool needed = i + 1 < end || call.d_log_decay;
      if (decays) decay.make(call, c);
      load_rotations(c), load_keys(c, k);
      if (!needed) break;
      load_values(c);
      memcpy(next, next - b.e * b.d, b.e * b.d * sizeof(float));
      if (decays) scale(next, b.e * b.d, decay.step);
      Operand rotated = columns_of(b.k_rotated, b.d, c.rows(), b.k_columns, weights(decay.kept));
      multiply<true, FULL, ADD>(next, b.d, b.e, b.d, value_columns(c), rotated, c.n);
      float* sum = b.sums + (i - begin + 1) * b.d;
      memcpy(sum, sum - b.d, b.d * sizeof(float));
      add_to_sum(c, k, sum);
    }
  }

  void backward_chunk(const Chunk& c, int64_t index, double* d_theta) {
    const float *k = b.features + index * CHUNK * b.d, *state = b.states + index * b.e * b.d;
    float d_den[CHUNK], anchor = 0;
    if (decays) decay.make(call, c), decay.make_pairs(c);
    transpose(b.d_state, b.e, b.d_state_transposed, b.d, b.d, b.e);
    if (call.d_log_decay) anchor = state_times_gradient(index + 1);
    load_rotations(c), load_queries(c), load_values(c);
    b.rotations.rotate<false>(call, c, k, b.k_rotated);
    through_division(c, d_den);
    through_products(c, state);
    if (d_theta) {
      add_theta_gradient(call, c, b.q_rotated, b.dq, d_theta);
      add_theta_gradient(call, c, b.k_rotated, b.dk, d_theta);
    }
    float *dq = b.q_rotated, *dk = b.k_rotated;  // free now
    b.rotations.rotate<true>(call, c, b.dq, dq);
    b.rotations.rotate<true>(call, c, b.dk, dk);
    through_denominator(c, k, d_den, b.sums + index * b.d, dq, dk);
    if (call.exact) sum_query_gradients(c, d_den);
    if (call.d_log_decay) store_log_decay(c, k, dq, dk, anchor);
    store_gradient(call, call.q, call.dq, c, nullptr, b.q, dq);
    store_gradient(call, call.k, call.dk, c, mask_of(call, c), k, dk);
  }

  // ∂q̃ and ∂k̃ into their buffers, ∂v into its tensor, ∂S to that before the chunk. `state` is transposed.
  void through_products(const Chunk& c, const float* state) {
    const int64_t rows = c.rows();
    const Chunk next = chunk(c.start / CHUNK - 1, call.keys), later = chunk(c.start / CHUNK - BLOCK_CHUNKS, call.keys);
    Operand q_rows = rows_of(b.q_rotated, b.d, rows, b.q_rows), k_rows = rows_of(b.k_rotated, b.d, rows, b.k_rows);
    pairs_of(c, q_rows, flipped_of(k_rows, c, b.k_flipped), call.features, queries(next));
    Operand pairs = columns_of(b.pairs, CHUNK, rows, b.pairs_columns);
    Operand d_num_columns = columns_of(b.d_num, b.e, rows, b.d_num_columns);
    multiply<true, BY_PAIRS_T>(b.out, b.e, rows, b.e, pairs, d_num_columns, c.n, values_of(call.grad_o, next));

    Operand d_num_rows = rows_of(b.d_num, b.e, rows, b.d_num_rows), v_rows = rows_of(b.v, b.e, rows, b.v_rows);
    pairs_of(c, d_num_rows, flipped_of(v_rows, c, b.v_flipped), call.width, values_of(call.o, next));
    pairs = rows_of(b.pairs, CHUNK, rows, b.pairs_rows);
    Operand k_columns = columns_of(b.k_rotated, b.d, rows, b.k_columns), q_columns = query_columns(c);
    multiply<false, BY_PAIRS>(b.dq, b.d, rows, b.d, pairs, k_columns, c.n, values_written(call.dv, c));
    pairs = columns_of(b.pairs, CHUNK, rows, b.pairs_columns);
    multiply<true, BY_PAIRS_T>(b.dk, b.d, rows, b.d, pairs, q_columns, c.n, features_written(call.dq, c));

    if (decays) {
      k_rows = rows_of(b.k_rotated, b.d, rows, b.k_rows, decay.kept);
      v_rows = rows_of(b.v, b.e, rows, b.v_rows, decay.kept);
      d_num_rows = rows_of(b.d_num, b.e, rows, b.d_num_rows, decay.reach), d_num_columns = reached_columns(c);
    }
    Operand d_state = columns_of(b.d_state, b.e, b.d, b.state_columns);
    multiply<false, FULL, ADD>(b.out, b.e, rows, b.e, k_rows, d_state, call.features, features_written(call.dk, c));
    d_state = columns_of(b.d_state_transposed, b.d, b.e, b.state_columns);
    multiply<false, FULL, ADD>(b.dk, b.d, rows, b.d, v_rows, d_state, call.width, keys(later));
    add_to_gradient(c, q_columns, d_num_columns, values(later));
    Operand transposed = columns_of(state, b.d, b.e, b.state_columns);
    multiply<false, FULL, ADD>(b.dq, b.d, rows, b.d, d_num_rows, transposed, call.width);
    store_value_gradient(c);
  }

  void store_value_gradient(const Chunk& c) { store_values(call, call.dv, c, b.out, nullptr, mask_of(call, c)); }

  // The denominator's share of ∂φ(q) and ∂φ(k); `sum` is that of the keys before the chunk.
  void through_denominator(const Chunk& c, const float* k, const float* d_den, const float* sum, float* dq, float* dk) {
    const int64_t d = b.d;
    memcpy(b.sum, sum, d * sizeof(float));
    if (call.plain)
      running_sums(call, c, decay, k, b.sum, [=, summed = summed](int64_t t, int64_t i, Vector total) {
        float* to = dq + t * d + i;
        store(to, load(to) + broadcast(d_den[t]) * summed(total, i));
      });
    running_sums_back(call, c, decay, b.q, call.plain ? d_den : nullptr, b.d_sum,
                      [=, summed = summed](int64_t t, int64_t i, Vector total) {
                        float* to = dk + t * d + i;
                        store(to, load(to) + summed(total, i));
                      });
  }

  // The sum of all gradients of the running sum of log_decay after a chunk: the state there times its gradient.
  float state_times_gradient(int64_t index) {
    const float *state = b.states + index * b.e * b.d, *sum = b.sums + index * b.d;
    Vector total = {}, of_sum = {};
    for (int64_t i = 0; i < b.e * b.d; i += LANES) total += load(state + i) * load(b.d_state_transposed + i);
    for (int64_t i = 0; i < b.d; i += LANES) of_sum += load(sum + i) * load(b.d_sum + i);
    return sum_lanes(total) + sum_lanes(of_sum);
  }

  // ∂G_t = φ(q_t) · ∂φ(q_t) - φ(k_t) · ∂φ(k_t), and ∂log_decay_t is the sum of ∂G from t on.
  void store_log_decay(const Chunk& c, const float* k, const float* dq, const float* dk, float anchor) {
    float later = 0;
    for (int64_t t = c.n - 1; t >= 0; t--) {
      Vector total = {};
      for (int64_t i = t * b.d; i < (t + 1) * b.d; i += LANES)
        total += load(b.q + i) * load(dq + i) - load(k + i) * load(dk + i);
      later += sum_lanes(total);
      call.d_log_decay[number * call.queries + c.start + t] = later + anchor;
    }
  }

  // One causal token: the state is read and written once.
  void one_token() {
    Chunk c = {batch, head, 0, 1};
    if (decays) decay.make(call, c);
    load_rotations(c), load_keys(c, b.k), load_values(c), load_queries(c);
    const int64_t size = call.features * call.width;
    const float *from = call.kv + number * size, *sum = call.k_sum + number * call.features;
    float *to = call.kv_out + number * size, *sum_to = call.k_sum_out + number * call.features;
    Vector step = broadcast(decay.step), dot = {};
    for (int64_t j = 0; j < call.width; j += LANES)
      if (j + 4 * LANES <= call.width)
        read_and_write<4>(from, to, j), j += 3 * LANES;
      else
        read_and_write<1>(from, to, j);
    for (int64_t i = 0; i < call.features; i += LANES) {
      int64_t count = call.features - i;
      Vector total = step * load_part(sum + i, count) + summed(load(b.k + i), i);
      store_part(sum_to + i, total, count);
      dot += summed(load(b.q + i), i) * total;
    }
    float den = sum_lanes(dot) + (float)call.eps;
    store_values(call, call.o, c, b.out, call.plain ? &den : nullptr, nullptr);
  }

  // V vectors of one token's numerator, and of the state after it.
  template <int V>
  void read_and_write(const float* from, float* to, int64_t first) {
    Vector out[V] = {}, v[V];
    for (int j = 0; j < V; j++) v[j] = load(b.v + first + j * LANES);
    for (int64_t i = 0; i < call.features; i++)
      for (int j = 0; j < V; j++) {
        int64_t column = first + j * LANES, at = i * call.width + column, count = call.width - column;
        Vector state = broadcast(decay.step) * load_part(from + at, count) + broadcast(b.k_rotated[i]) * v[j];
        store_part(to + at, state, count);
        out[j] += broadcast(b.q_rotated[i]) * state;
      }
    for (int j = 0; j < V; j++) store(b.out + first + j * LANES, out[j]);
  }

  // --- all keys ---

  void read_all(int64_t first, int64_t last) {
    Operand state = columns_of(b.state, b.e, b.d, b.state_columns);
    for (int64_t i = first; i < last; i++) {
      Chunk c = chunk(i, call.queries);
      load_rotations(c), load_queries(c);
      Operand q = rows_of(b.q_rotated, b.d, c.rows(), b.q_rows);
      multiply<false>(b.out, b.e, c.rows(), b.e, q, state, call.features,
                      {queries(chunk(i + 1, call.queries)), values_written(call.o, c)});
      float dots[CHUNK];
      for (int64_t t = 0; t < c.n; t++) {
        Vector total = {};
        for (int64_t i = 0; i < b.d; i += LANES)
          total += summed(load(b.q + t * b.d + i), i) * load(b.sum + i);
        dots[t] = sum_lanes(total);
      }
      divide(c, dots);
    }
  }

  // ∂q of some chunks; their part of ∂S and of the gradient of the sum of keys into b.d_state and b.d_sum.
  void backward_queries(int64_t first, int64_t last, double* d_theta) {
    float d_den[CHUNK];
    read_state(call, b, kv_at(1), k_sum_at(1), b.state, b.sum);
    transpose(b.state, b.e, b.states, b.d, b.d, b.e);
    Operand state = columns_of(b.states, b.d, b.e, b.state_columns);
    read_state(call, b, nullptr, nullptr, b.d_state, b.d_sum);
    for (int64_t i = first; i < last; i++) {
      Chunk c = chunk(i, call.queries);
      load_rotations(c), load_queries(c);
      through_division(c, d_den);
      Operand d_num = rows_of(b.d_num, b.e, c.rows(), b.d_num_rows);
      const Chunk next = chunk(i + 1, call.queries);
      multiply<false>(b.dq, b.d, c.rows(), b.d, d_num, state, call.width, {queries(next), features_written(call.dq, c)});
      add_to_gradient(c, query_columns(c), reached_columns(c), {values_of(call.grad_o, next), values_of(call.o, next)});
      sum_query_gradients(c, d_den);
      if (d_theta) add_theta_gradient(call, c, b.q_rotated, b.dq, d_theta);
      float* dq = b.q_rotated;
      b.rotations.rotate<true>(call, c, b.dq, dq);
      for (int64_t t = 0; call.plain && t < c.n; t++)
        for (int64_t i = 0; i < b.d; i += LANES) {
          float* to = dq + t * b.d + i;
          store(to, load(to) + broadcast(d_den[t]) * summed(load(b.sum + i), i));
        }
      store_gradient(call, call.q, call.dq, c, nullptr, b.q, dq);
    }
  }

  void backward_keys(int64_t first, int64_t last, double* d_theta) {
    transpose(b.d_state, b.e, b.d_state_transposed, b.d, b.d, b.e);
    Operand d_state = columns_of(b.d_state, b.e, b.d, b.state_columns);
    Operand d_state_transposed = columns_of(b.d_state_transposed, b.d, b.e, b.states);  // free here
    for (int64_t i = first; i < last; i++) {
      Chunk c = chunk(i, call.keys), next = chunk(i + 1, call.keys);
      load_rotations(c), load_keys(c, b.k), load_values(c);
      Operand k = rows_of(b.k_rotated, b.d, c.rows(), b.k_rows), v = rows_of(b.v, b.e, c.rows(), b.v_rows);
      multiply<false>(b.out, b.e, c.rows(), b.e, k, d_state, call.features, {keys(next), values_written(call.dv, c)});
      multiply<false>(b.dk, b.d, c.rows(), b.d, v, d_state_transposed, call.width,
                      {values(next), features_written(call.dk, c)});
      store_value_gradient(c);
      if (d_theta) add_theta_gradient(call, c, b.k_rotated, b.dk, d_theta);
      float* dk = b.k_rotated;
      b.rotations.rotate<true>(call, c, b.dk, dk);
      for (int64_t t = 0; t < c.n; t++)
        for (int64_t i = 0; i < b.d; i += LANES) {
          float* to = dk + t * b.d + i;
          store(to, load(to) + summed(load(b.d_sum + i), i));
        }
      store_gradient(call, call.k, call.dk, c, mask_of(call, c), b.k, dk);
    }
  }
};

const int64_t SMALL = 1 << 17;  // multiplications that take less time than handing them to other threads

// How a call is spread over threads: each head in `stripes`, and each stripe in as many parts, whose states are summed first.
struct Work {
  const Call& call;
  int64_t heads, stripes, part_size, slot_size;
  int64_t slots = 0;

  explicit Work(const Call& call) : call(call), heads(call.batch * call.heads) {
    int64_t blocks = round_up(call.queries < call.keys ? call.queries : call.keys, BLOCK) / BLOCK;
    stripes = heads >= call.threads ? 1 : minimum(round_up(call.threads, heads) / heads, blocks / 4);
    if (stripes < 1) stripes = 1;
    Buffers sizes(call, nullptr);
    slot_size = sizes.size;
    part_size = round_up(sizes.d * sizes.e + sizes.d + 1, 16);
  }

  int64_t parts() const { return call.causal ? stripes * stripes : stripes; }
  // Those of a head that are summed before any stripe starts: of a causal call not the stripe that nothing comes after.
  int64_t parts_first() const { return call.causal ? parts() - stripes : parts(); }
  float* part(int64_t head, int64_t i) const { return call.parts + (head * parts() + i) * part_size; }

  // The first chunk of part i of a sequence; parts are whole blocks.
  int64_t boundary(int64_t i, int64_t length) const {
    int64_t blocks = round_up(length, BLOCK) / BLOCK, chunks = round_up(length, CHUNK) / CHUNK;
    return minimum(blocks * i / parts() * BLOCK_CHUNKS, chunks);
  }

  // A thread's own workspace: as many as there are threads.
  float* slot() { return call.workspace + __atomic_fetch_add(&slots, 1, __ATOMIC_RELAXED) % call.threads * slot_size; }

  void run(int64_t n, Run body) {
    slots = 0;
    if (heads * call.queries * call.features * call.width < SMALL)
      body(0, n, this);
    else
      call.parallel_for(0, n, 1, body, this);
  }

  void save_part(int64_t head, int64_t i, const Buffers& b, const float* state, const float* sum, float step) const {
    float* to = part(head, i);
    memcpy(to, state, b.d * b.e * sizeof(float));
    memcpy(to + b.d * b.e, sum, b.d * sizeof(float));
    to[b.d * b.e + b.d] = step;
  }

  // state ← step · state + the part's
  void add_part(int64_t head, int64_t i, const Buffers& b, float* state, float* sum) const {
    const float *from = part(head, i), step = from[b.d * b.e + b.d];
    scale(state, b.d * b.e, step), scale(sum, b.d, step);
    for (int64_t j = 0; j < b.d * b.e; j += LANES) store(state + j, load(state + j) + load(from + j));
    for (int64_t j = 0; j < b.d; j += LANES) store(sum + j, load(sum + j) + load(from + b.d * b.e + j));
  }

  const float* past_kv(int64_t head) const {
    return call.kv ? call.kv + head * call.features * call.width : nullptr;
  }
  const float* past_k_sum(int64_t head) const { return call.k_sum ? call.k_sum + head * call.features : nullptr; }

  void write_out(int64_t head, const Buffers& b, const float* state, const float* sum) const {
    write_state(call, b, state, sum, call.kv_out + head * call.features * call.width,
                call.k_sum_out + head * call.features);
  }

  double* d_theta(int64_t head, int64_t stripe) const {
    return call.d_theta ? call.d_theta + (head * stripes + stripe) * (call.rotary / 2) : nullptr;
  }
};

// Items of the first phase: in the forward the parts before the last stripe, in the backward those after the first.
template <bool BACKWARD, typename T>
void sum_parts(int64_t begin, int64_t end, void* context) {
  Work& work = *(Work*)context;
  const Call& call = work.call;
  Buffers b(call, work.slot());
  Registers<T> registers;
  int64_t n = work.parts_first();
  for (int64_t item = begin; item < end; item++) {
    Head<T> head(call, item / n, b);
    int64_t i = item % n + (BACKWARD && call.causal ? work.stripes : 0);
    int64_t length = BACKWARD ? call.queries : call.keys;
    int64_t first = work.boundary(i, length), last = work.boundary(i + 1, length);
    if (BACKWARD && !call.causal) {
      head.backward_queries(first, last, work.d_theta(item / n, i));
      work.save_part(item / n, i, b, b.d_state, b.d_sum, 1);
    } else if (BACKWARD) {
      float step = head.sum_queries(first, last);
      work.save_part(item / n, i, b, b.d_state, b.d_sum, step);
    } else {
      float step = head.sum_keys(first, last);
      work.save_part(item / n, i, b, b.state, b.sum, step);
    }
  }
}

void one_token_heads(int64_t begin, int64_t end, void* context) {
  Work& work = *(Work*)context;
  Buffers b(work.call, work.slot());
  for (int64_t number = begin; number < end; number++) Head<float>(work.call, number, b).one_token();
}

template <typename T>
void forward_stripes(int64_t begin, int64_t end, void* context) {
  Work& work = *(Work*)context;
  const Call& call = work.call;
  Buffers b(call, work.slot());
  Registers<T> registers;
  for (int64_t item = begin; item < end; item++) {
    int64_t number = item / work.stripes, stripe = item % work.stripes, n = call.causal ? work.stripes : 1;
    Head<T> head(call, number, b);
    read_state(call, b, work.past_kv(number), work.past_k_sum(number), b.state, b.sum);
    if (!call.causal && stripe == 0) write_state(call, b, b.state, b.sum, head.kv_at(0), head.k_sum_at(0));
    for (int64_t i = 0; i < (call.causal ? stripe * n : work.parts()); i++)
      work.add_part(number, i, b, b.state, b.sum);
    int64_t first = work.boundary(stripe * n, call.queries), last = work.boundary((stripe + 1) * n, call.queries);
    if (call.causal)
      head.forward(first, last);
    else
      head.read_all(first, last);
    if (call.causal ? stripe == work.stripes - 1 : stripe == 0) {
      int64_t at = call.causal ? round_up(call.keys, BLOCK) / BLOCK : 1;
      write_state(call, b, b.state, b.sum, head.kv_at(at), head.k_sum_at(at));
      work.write_out(number, b, b.state, b.sum);
    }
  }
}

template <typename T>
void backward_stripes(int64_t begin, int64_t end, void* context) {
  Work& work = *(Work*)context;
  const Call& call = work.call;
  Buffers b(call, work.slot());
  Registers<T> registers;
  for (int64_t item = begin; item < end; item++) {
    int64_t number = item / work.stripes, stripe = item % work.stripes, n = call.causal ? work.stripes : 1;
    Head<T> head(call, number, b);
    read_state(call, b, work.past_kv(number), work.past_k_sum(number), b.d_state, b.d_sum);
    for (int64_t i = work.parts() - 1; i >= (call.causal ? (stripe + 1) * n : 0); i--)
      work.add_part(number, i, b, b.d_state, b.d_sum);
    int64_t first = work.boundary(stripe * n, call.keys), last = work.boundary((stripe + 1) * n, call.keys);
    if (call.causal)
      head.backward(first, last, work.d_theta(number, stripe));
    else
      head.backward_keys(first, last, work.d_theta(number, stripe));
    if (stripe == 0) work.write_out(number, b, b.d_state, b.d_sum);
  }
}

template <typename T>
void run_forward(const Call& call) {
  Work work(call);
  if (work.parts_first()) work.run(work.heads * work.parts_first(), sum_parts<false, T>);
  work.run(work.heads * work.stripes, forward_stripes<T>);
}

template <typename T>
void run_backward(const Call& call) {
  Work work(call);
  if (work.parts_first()) work.run(work.heads * work.parts_first(), sum_parts<true, T>);
  work.run(work.heads * work.stripes, backward_stripes<T>);
}

}  // namespace

extern "C" {

// The entries of a vector: tables have rows of whole vectors.
EXPORT int32_t linrope_lanes() { return LANES; }

// Floats of workspace for each thread, of the states of all parts, and the number of stripes.
EXPORT void linrope_sizes(const Call* call, int64_t* sizes) {
  Work work(*call);
  sizes[0] = work.slot_size;
  sizes[1] = work.heads * work.parts() * work.part_size;
  sizes[2] = work.stripes;
}

// Whether products may be IN_TILES, on a processor that has AMX.
EXPORT int32_t linrope_may_use_tiles() {
#if defined(HAS_TILES)
  return may_use_tiles();
#else
  return 0;
#endif
}

EXPORT void linrope_one_token(const Call* call) {
  Work work(*call);
  work.run(work.heads, one_token_heads);
}

EXPORT void linrope_forward(const Call* call) {
#if defined(__AVX512BF16__)
  if (call->products == IN_VECTORS) return run_forward<BFloat16x2>(*call);
#endif
#if defined(HAS_TILES)
  if (call->products == IN_TILES) return run_forward<BFloat16Tile>(*call);
#endif
  run_forward<float>(*call);
}

EXPORT void linrope_backward(const Call* call) {
#if defined(__AVX512BF16__)
  if (call->products == IN_VECTORS) return run_backward<BFloat16x2>(*call);
#endif
#if defined(HAS_TILES)
  if (call->products == IN_TILES) return run_backward<BFloat16Tile>(*call);
#endif
  run_backward<float>(*call);
}
}
