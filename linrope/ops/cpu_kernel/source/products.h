// Matrix products in register tiles, and the transpose. All matrices lie in cache, with rows of whole vectors.
#pragma once

#include "vector.h"

// A tile of the result in registers: ROWS rows of VECTORS vectors, with room for a row of B and one entry of A. Where
// fewer vectors are needed, TALL rows: a processor has some ten sums under way at a time.
#if LANES == 8
enum { ROWS = 6, TALL = 6, VECTORS = 2 };  // 16 registers
#else
enum { ROWS = 4, TALL = 8, VECTORS = 4 };  // 32 registers
#endif

// Which entries count, of products with the pairs of a chunk (row: query, column: key, 0 above the diagonal).
enum Shape {
  FULL,
  PAIRS,         // the result is pairs: entries above the diagonal are not needed
  BY_PAIRS,      // A is pairs
  BY_PAIRS_T,    // A is pairs, transposed
};
enum Store { SET, ADD, WEIGH };  // C = AB, C += AB, C = AB ∘ weights

static constexpr int64_t terms_of(float) { return 1; }
static constexpr int64_t terms_of(BFloat16x2) { return 2; }

// The terms of a sum in an operand are a multiple of this, the last ones 0.
static constexpr int64_t block_of(BFloat16x2) { return 2; }
static constexpr int64_t block_of(BFloat16Tile) { return 32; }

// An operand of a product. T is float, or BFloat16x2: two terms of the sum each.
template <typename T>
struct Matrix {
  enum { TERMS = terms_of(T{}) };
  const T* data;
  int64_t width;  // entries from one row to the next
};

// Rows in memory that are needed soon.
struct Rows {
  const char* row = nullptr;
  int64_t step = 0, bytes = 0, left = 0;  // from one row to the next; of a row; how many there are
  bool written = false;

  void ask(int64_t n) {
    for (; n > 0 && left > 0; n--, left--, row += step)
      for (int64_t i = 0; i < bytes; i += 64)
        if (written)
          __builtin_prefetch(row + i, 1);
        else
          __builtin_prefetch(row + i);
  }
};

// What is needed after a product. It asks for one row of each with every row of its own, so that they arrive meanwhile: of
// many requests at once a processor would drop most.
struct Ahead {
  Rows first, second, third;

  Ahead(Rows first = {}, Rows second = {}, Rows third = {}) : first(first), second(second), third(third) {}
  void ask(int64_t n) { first.ask(n), second.ask(n), third.ask(n); }
};

// One vector of a result.
template <Store STORE>
static inline void put(float* to, Vector sum, const float* weights) {
  if (STORE == ADD) store(to, load(to) + sum);  // last: sums of many terms lose fewer digits
  if (STORE == WEIGH) {
    Vector weight = load(weights);
    store(to, weight == Vector{} ? Vector{} : sum * weight);  // 0 · NaN is NaN
  }
  if (STORE == SET) store(to, sum);
}

template <bool TRANSPOSED, int R, int V, Store STORE, typename T>
static inline void tile(float* c, int64_t c_width, const T* a, int64_t a_width, const T* b, int64_t b_width, int64_t depth,
                        const float* weights) {
  Vector sum[R][V] = {};
  for (int64_t k = 0; k < depth; k++)
    for (int i = 0; i < R; i++)
      for (int j = 0; j < V; j++)
        sum[i][j] = add_product(sum[i][j], a[TRANSPOSED ? k * a_width + i : i * a_width + k], b + k * b_width + j * LANES);
  for (int i = 0; i < R; i++)
    for (int j = 0; j < V; j++) put<STORE>(c + i * c_width + j * LANES, sum[i][j], weights + i * c_width + j * LANES);
}

template <bool TRANSPOSED, int R, Store STORE, typename T>
static inline void tile_row(float* c, int64_t c_width, int64_t columns, const T* a, int64_t a_width, const T* b,
                            int64_t b_width, int64_t depth, const float* weights) {
  int64_t j = 0;
  for (; j + VECTORS * LANES <= columns; j += VECTORS * LANES)
    tile<TRANSPOSED, R, VECTORS, STORE>(c + j, c_width, a, a_width, b + j, b_width, depth, weights + j);
  switch ((columns - j) / LANES) {
#if LANES != 8
    case 3: return tile<TRANSPOSED, R, 3, STORE>(c + j, c_width, a, a_width, b + j, b_width, depth, weights + j);
    case 2: return tile<TRANSPOSED, R, 2, STORE>(c + j, c_width, a, a_width, b + j, b_width, depth, weights + j);
#endif
    case 1: return tile<TRANSPOSED, R, 1, STORE>(c + j, c_width, a, a_width, b + j, b_width, depth, weights + j);
  }
}

// C (rows, columns) from A (rows, depth) and B (depth, columns). With TRANSPOSED, A is given as (depth, rows). `rows` is
// a multiple of 4 (or 2), `columns` of LANES. `ahead`: what is needed next.
template <bool TRANSPOSED, Shape SHAPE = FULL, Store STORE = SET, typename T>
static void multiply(float* c, int64_t c_width, int64_t rows, int64_t columns, Matrix<T> a, Matrix<T> b, int64_t depth,
                     Ahead ahead = {}, const float* weights = nullptr) {
  const int64_t terms = Matrix<T>::TERMS;
  depth = round_up(depth, terms) / terms;
  for (int64_t i = 0, end; i < rows; i = end) {
    int64_t n = SHAPE == PAIRS ? minimum(round_up(i + TALL, LANES), columns) : columns;
    end = minimum(i + (n < VECTORS * LANES && i % TALL == 0 ? TALL : ROWS), rows);
    int64_t first = SHAPE == BY_PAIRS_T ? i / terms : 0;
    int64_t last = SHAPE == BY_PAIRS ? minimum(round_up(end, terms) / terms, depth) : depth;
    const T* from = a.data + (TRANSPOSED ? i + first * a.width : i * a.width + first);
    const T* of_b = b.data + first * b.width;
    const float* w = weights + i * c_width;
    int64_t k = last > first ? last - first : 0;
    ahead.ask(end - i);
    switch (end - i) {
#if LANES == 8
      case 6: tile_row<TRANSPOSED, 6, STORE>(c + i * c_width, c_width, n, from, a.width, of_b, b.width, k, w); break;
      case 2: tile_row<TRANSPOSED, 2, STORE>(c + i * c_width, c_width, n, from, a.width, of_b, b.width, k, w); break;
#else
      case 8: tile_row<TRANSPOSED, 8, STORE>(c + i * c_width, c_width, n, from, a.width, of_b, b.width, k, w); break;
#endif
      default: tile_row<TRANSPOSED, 4, STORE>(c + i * c_width, c_width, n, from, a.width, of_b, b.width, k, w);
    }
    if (SHAPE == PAIRS && STORE == SET)  // a product with the pairs may have taller tiles
      for (int64_t r = i; r < end; r++)
        for (int64_t column = r + 1; column < minimum(round_up(end, TALL), columns); column++) c[r * c_width + column] = 0;
  }
}

// Squares of SIDE × SIDE: in each step pairs of rows exchange halves, then quarters, ... With 8 a side they take less time
// than with 16, whose exchanges cross the quarters of a register.
enum { SIDE = LANES < 8 ? LANES : 8 };
typedef float Row __attribute__((vector_size(4 * SIDE)));
typedef float UnalignedRow __attribute__((vector_size(4 * SIDE), aligned(4), may_alias));

template <int STEP>
static inline void exchange(Row* rows) {
  for (int i = 0; i < SIDE; i++) {
    if (i & STEP) continue;
    Row x = rows[i], y = rows[i + STEP];
#if LANES >= 8
    if (STEP == 4) {
      rows[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11);
      rows[i + STEP] = __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    if (STEP == 2) {
      rows[i] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13);
      rows[i + STEP] = __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    if (STEP == 1) {
      rows[i] = __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14);
      rows[i + STEP] = __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
    }
#else
    if (STEP == 2) {
      rows[i] = __builtin_shufflevector(x, y, 0, 1, 4, 5);
      rows[i + STEP] = __builtin_shufflevector(x, y, 2, 3, 6, 7);
    }
    if (STEP == 1) {
      rows[i] = __builtin_shufflevector(x, y, 0, 4, 2, 6);
      rows[i + STEP] = __builtin_shufflevector(x, y, 1, 5, 3, 7);
    }
#endif
  }
}

// (rows, columns) -> (columns, rows); both are multiples of SIDE.
static inline void transpose(const float* from, int64_t width, float* to, int64_t to_width, int64_t rows,
                             int64_t columns) {
  for (int64_t i = 0; i < rows; i += SIDE)
    for (int64_t j = 0; j < columns; j += SIDE) {
      Row square[SIDE];
      for (int r = 0; r < SIDE; r++) square[r] = *(const UnalignedRow*)(from + (i + r) * width + j);
#if LANES >= 8
      exchange<4>(square);
#endif
      exchange<2>(square);
      exchange<1>(square);
      for (int r = 0; r < SIDE; r++) *(UnalignedRow*)(to + (j + r) * to_width + i) = square[r];
    }
}

// --- operands: x (rows, width) in float32, as products read it -------------------------------------------------------
//
// by_rows: the left operand. by_columns: the right operand, or the left one transposed. flipped: the transpose of what
// by_rows returned, as the right operand. Each row is multiplied by its weight if there are weights. `to` has room for a
// copy, where one is needed.

static inline Matrix<float> by_rows(const float* x, int64_t width, int64_t rows, const float* weights, float* to) {
  if (!weights) return {x, width};
  for (int64_t t = 0; t < rows; t++)
    for (int64_t i = t * width; i < (t + 1) * width; i += LANES) store(to + i, load(x + i) * broadcast(weights[t]));
  return {to, width};
}

static inline Matrix<float> by_columns(const float* x, int64_t width, int64_t rows, const float* weights, float* to) {
  return by_rows(x, width, rows, weights, to);
}

#if defined(__AVX512BF16__)
// `width` is a multiple of LANES, `rows` of 2.
template <typename T>
static inline Matrix<T> by_rows(const float* x, int64_t width, int64_t rows, const float* weights, T* to) {
  const int64_t all = round_up(width, block_of(T{}));
  for (int64_t t = 0; t < rows; t++, x += width) {
    Vector weight = broadcast(weights ? weights[t] : 1);
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES, to += LANES)
      store_neighbours(to, load(x + i) * weight, load(x + i + LANES) * weight);
    if (i < width) {
      const int64_t left = (all - i) / 2;
      BFloat16x2 last[LANES];
      store_neighbours(last, load(x + i) * weight, Vector{});
      memcpy(to, last, left * sizeof(T)), to += left;
    }
  }
  return {to - rows * all / 2, all / 2};
}

template <typename T>
static inline Matrix<T> by_columns(const float* x, int64_t width, int64_t rows, const float* weights, T* to) {
  for (int64_t t = 0; t < rows; t += 2) {
    Vector first = broadcast(weights ? weights[t] : 1), second = broadcast(weights ? weights[t + 1] : 1);
    const float *x0 = x + t * width, *x1 = x0 + width;
    for (int64_t i = 0; i < width; i += LANES)
      store_across(to + t / 2 * width + i, load(x0 + i) * first, load(x1 + i) * second);
  }
  memset((void*)(to + rows / 2 * width), 0, (round_up(rows, block_of(T{})) - rows) / 2 * width * sizeof(T));
  return {to, width};
}
#endif

template <typename T>
static inline Matrix<T> flipped(Matrix<T> x, int64_t rows, T* to, int64_t to_width) {
  transpose((const float*)x.data, x.width, (float*)to, to_width, rows, x.width);
  return {to, to_width};
}
