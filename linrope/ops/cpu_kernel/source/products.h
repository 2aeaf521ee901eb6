// Matrix products in register tiles, and the transpose. All matrices lie in cache, with rows of whole vectors.
#pragma once

#include "vector.h"

// A tile of the result in registers: ROWS rows of VECTORS vectors, with room for a row of B and one entry of A.
#if LANES == 8
enum { ROWS = 6, VECTORS = 2 };  // 16 registers
#else
enum { ROWS = 4, VECTORS = 4 };  // 32 registers
#endif

// Which entries count, of products with the pairs of a chunk (row: query, column: key, 0 above the diagonal).
enum Shape {
  FULL,
  PAIRS,         // the result is pairs: entries above the diagonal are not needed
  BY_PAIRS,      // A is pairs
  BY_PAIRS_T,    // A is pairs, transposed
};
enum Store { SET, ADD, WEIGH };  // C = AB, C += AB, C = AB ∘ weights

struct Matrix {
  const float* data;
  int64_t width;  // entries from one row to the next
};

template <bool TRANSPOSED, int R, int V, Store STORE>
static inline void tile(float* c, int64_t c_width, const float* a, int64_t a_width, const float* b, int64_t b_width,
                        int64_t depth, const float* weights) {
  Vector sum[R][V] = {};
  for (int64_t k = 0; k < depth; k++) {
    Vector row[V];
    for (int j = 0; j < V; j++) row[j] = load(b + k * b_width + j * LANES);
    for (int i = 0; i < R; i++) {
      Vector x = broadcast(TRANSPOSED ? a[k * a_width + i] : a[i * a_width + k]);
      for (int j = 0; j < V; j++) sum[i][j] += x * row[j];
    }
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < V; j++) {
      float* to = c + i * c_width + j * LANES;
      if (STORE == ADD) store(to, load(to) + sum[i][j]);  // last: sums of many terms lose fewer digits
      if (STORE == WEIGH) {
        Vector weight = load(weights + i * c_width + j * LANES);
        store(to, weight == Vector{} ? Vector{} : sum[i][j] * weight);  // 0 · NaN is NaN
      }
      if (STORE == SET) store(to, sum[i][j]);
    }
}

template <bool TRANSPOSED, int R, Store STORE>
static inline void tile_row(float* c, int64_t c_width, int64_t columns, const float* a, int64_t a_width, const float* b,
                            int64_t b_width, int64_t depth, const float* weights) {
  int64_t j = 0;
  for (; j + VECTORS * LANES <= columns; j += VECTORS * LANES)
    tile<TRANSPOSED, R, VECTORS, STORE>(c + j, c_width, a, a_width, b + j, b_width, depth, weights + j);
  for (; j < columns; j += LANES)
    tile<TRANSPOSED, R, 1, STORE>(c + j, c_width, a, a_width, b + j, b_width, depth, weights + j);
}

// C (rows, columns) from A (rows, depth) and B (depth, columns). With TRANSPOSED, A is given as (depth, rows). `rows` is
// a multiple of 4 (or 2), `columns` of LANES.
template <bool TRANSPOSED, Shape SHAPE = FULL, Store STORE = SET>
static void multiply(float* c, int64_t c_width, int64_t rows, int64_t columns, Matrix a, Matrix b, int64_t depth,
                     const float* weights = nullptr) {
  for (int64_t i = 0; i < rows; i += ROWS) {
    int64_t end = minimum(i + ROWS, rows), first = SHAPE == BY_PAIRS_T ? i : 0;
    int64_t n = SHAPE == PAIRS ? minimum(round_up(end, LANES), columns) : columns;
    int64_t last = SHAPE == BY_PAIRS ? minimum(end, depth) : depth;
    const float* from = a.data + (TRANSPOSED ? i + first * a.width : i * a.width + first);
    const float *of_b = b.data + first * b.width, *w = weights + i * c_width;
    int64_t k = last > first ? last - first : 0;
    switch (end - i) {
#if LANES == 8
      case 6: tile_row<TRANSPOSED, 6, STORE>(c + i * c_width, c_width, n, from, a.width, of_b, b.width, k, w); break;
      case 2: tile_row<TRANSPOSED, 2, STORE>(c + i * c_width, c_width, n, from, a.width, of_b, b.width, k, w); break;
#endif
      default: tile_row<TRANSPOSED, 4, STORE>(c + i * c_width, c_width, n, from, a.width, of_b, b.width, k, w);
    }
    if (SHAPE == PAIRS && STORE == SET)
      for (int64_t r = i; r < end; r++)
        for (int64_t column = r + 1; column < end; column++) c[r * c_width + column] = 0;
  }
}

// Squares of LANES × LANES: in each step pairs of rows exchange halves, then quarters, ...
template <int STEP>
static inline void exchange(Vector* rows) {
  for (int i = 0; i < LANES; i++) {
    if (i & STEP) continue;
    Vector x = rows[i], y = rows[i + STEP];
#if LANES == 16
    if (STEP == 8) {
      rows[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
      rows[i + STEP] = __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    if (STEP == 4) {
      rows[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
      rows[i + STEP] = __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    if (STEP == 2) {
      rows[i] = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      rows[i + STEP] = __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    if (STEP == 1) {
      rows[i] = __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
      rows[i + STEP] = __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
#elif LANES == 8
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

// (rows, columns) -> (columns, rows); both are multiples of LANES.
static inline void transpose(const float* from, int64_t width, float* to, int64_t to_width, int64_t rows,
                             int64_t columns) {
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t j = 0; j < columns; j += LANES) {
      Vector square[LANES];
      for (int r = 0; r < LANES; r++) square[r] = load(from + (i + r) * width + j);
#if LANES == 16
      exchange<8>(square);
#endif
#if LANES >= 8
      exchange<4>(square);
#endif
      exchange<2>(square);
      exchange<1>(square);
      for (int r = 0; r < LANES; r++) store(to + (j + r) * to_width + i, square[r]);
    }
}
