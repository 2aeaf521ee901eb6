// Products of bfloat16 in the tile registers of Intel's AMX: a tile of the result has 16 rows and 16 columns, and one
// instruction adds 32 products to each entry of it.
#pragma once

#include "call.h"
#include "products.h"

// What a thread holds while it multiplies operands of T.
template <typename T>
struct Registers {};

#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

// Whether Linux lets this process use the registers. The processor has them: Python looks.
static inline bool may_use_tiles() {
  const long request = 0x1023, registers = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, registers) == 0;
}

// All tiles are of 16 rows of 64 bytes.
template <>
struct Registers<BFloat16Tile> {
  Registers() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    __asm__ volatile("" ::"r"(&shapes) : "memory");  // GCC takes the configuration for 8 bytes
    _tile_loadconfig(&shapes);
  }
  ~Registers() { _tile_release(); }
};

enum { TILE = 16, TILE_TERMS = block_of(BFloat16Tile{}), TILE_PAIRS = TILE_TERMS / 2 };

// V tiles side by side, (16, 16 · V), into `c`, or added to it: A has 16 rows, and `blocks` times 32 terms of each sum.
// a_block: entries from one 32 terms of A to the next.
template <int V, bool ADDED>
static inline void tiles(float* c, int64_t c_width, const BFloat16Tile* a, int64_t a_width, int64_t a_block,
                         const BFloat16Tile* b, int64_t b_width, int64_t blocks) {
  const int64_t a_step = a_width * sizeof(*a), b_step = b_width * sizeof(*b), c_step = c_width * sizeof(*c);
  __asm__ volatile("" ::: "memory");  // GCC does not know that tiles are loaded from memory
  if (ADDED) {  // in float32: what its last digits lose is far below the rounding of operands
    _tile_loadd(0, c, c_step);
    if (V > 1) _tile_loadd(1, c + TILE, c_step);
    if (V > 2) _tile_loadd(2, c + 2 * TILE, c_step);
    if (V > 3) _tile_loadd(3, c + 3 * TILE, c_step);
  } else {
    _tile_zero(0);
    if (V > 1) _tile_zero(1);
    if (V > 2) _tile_zero(2);
    if (V > 3) _tile_zero(3);
  }
  for (int64_t k = 0; k < blocks; k++, a += a_block, b += TILE_PAIRS * b_width) {
    _tile_loadd(4, a, a_step);
    _tile_loadd(5, b, b_step);
    _tile_dpbf16ps(0, 4, 5);
    if (V > 1) {
      _tile_loadd(6, b + TILE, b_step);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (V > 2) {
      _tile_loadd(5, b + 2 * TILE, b_step);
      _tile_dpbf16ps(2, 4, 5);
    }
    if (V > 3) {
      _tile_loadd(6, b + 3 * TILE, b_step);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, c, c_step);
  if (V > 1) _tile_stored(1, c + TILE, c_step);
  if (V > 2) _tile_stored(2, c + 2 * TILE, c_step);
  if (V > 3) _tile_stored(3, c + 3 * TILE, c_step);
}

template <bool ADDED>
static inline void some_tiles(int64_t n, float* c, int64_t c_width, const BFloat16Tile* a, int64_t a_width,
                              int64_t a_block, const BFloat16Tile* b, int64_t b_width, int64_t blocks) {
  switch (n) {
    case 4: return tiles<4, ADDED>(c, c_width, a, a_width, a_block, b, b_width, blocks);
    case 3: return tiles<3, ADDED>(c, c_width, a, a_width, a_block, b, b_width, blocks);
    case 2: return tiles<2, ADDED>(c, c_width, a, a_width, a_block, b, b_width, blocks);
    default: return tiles<1, ADDED>(c, c_width, a, a_width, a_block, b, b_width, blocks);
  }
}

// As the other `multiply`, in blocks of 16 rows and 32 terms. Rows of the result up to a multiple of 16 are written.
template <bool TRANSPOSED, Shape SHAPE = FULL, Store STORE = SET>
static void multiply(float* c, int64_t c_width, int64_t rows, int64_t columns, Matrix<BFloat16Tile> a,
                     Matrix<BFloat16Tile> b, int64_t depth, Ahead ahead = {}, const float* weights = nullptr) {
  const int64_t all = round_up(depth, TILE_TERMS) / TILE_TERMS;
  for (int64_t i = 0; i < rows; i += TILE) {
    const int64_t own = i / TILE_TERMS, end = minimum(i + TILE, rows);  // the 32 rows that these are among
    const int64_t first = SHAPE == BY_PAIRS_T ? own : 0, last = SHAPE == BY_PAIRS ? minimum(own + 1, all) : all;
    const int64_t n = SHAPE == PAIRS ? i + TILE : columns;
    ahead.ask(end - i);
    const BFloat16Tile *of_a = a.data + (TRANSPOSED ? 0 : i * a.width), *of_b = b.data;
    int64_t a_width = a.width, a_block = TILE_PAIRS;
    alignas(64) BFloat16Tile strip[CHUNK / TILE_TERMS * TILE * TILE_PAIRS];
    if (TRANSPOSED) {  // the terms are tokens of a chunk
      a_width = TILE_PAIRS, a_block = TILE * TILE_PAIRS;
      for (int64_t k = first; k < last; k++)
        transpose((const float*)a.data + k * TILE_PAIRS * a.width + i, a.width, (float*)(strip + k * a_block), TILE_PAIRS,
                  TILE_PAIRS, TILE);
      of_a = strip;
    }
    of_a += first * a_block, of_b += first * TILE_PAIRS * b.width;
    for (int64_t j = 0; j < n; j += 4 * TILE) {
      const int64_t some = minimum(n - j, 4 * TILE);
      some_tiles<STORE == ADD>(some / TILE, c + i * c_width + j, c_width, of_a, a_width, a_block, of_b + j, b.width,
                               last - first);
    }
    for (int64_t r = i; SHAPE == PAIRS && r < end; r++) {  // a product with the pairs takes 32 of them at a time
      float* row = c + r * c_width;
      for (int64_t j = 0; STORE == WEIGH && j < n; j += LANES) put<WEIGH>(row + j, load(row + j), weights + r * c_width + j);
      for (int64_t j = STORE == WEIGH ? n : r + 1; j < minimum((own + 1) * TILE_TERMS, columns); j++) row[j] = 0;
    }
  }
}
#endif
