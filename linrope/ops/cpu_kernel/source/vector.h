// Vectors of the target's width, in the extensions of clang and GCC, so that one source serves all. Only products of
// bfloat16 are intrinsics.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float UnalignedVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef double Doubles __attribute__((vector_size(8 * LANES), aligned(8), may_alias));

struct BFloat16 {
  uint16_t bits;
};
typedef _Float16 Float16;

// Two bfloat16 numbers: where the processor can, products sum two terms at a time.
struct BFloat16x2 {
  uint32_t bits;
};
// The same in a matrix that tiles multiply, see tiles.h.
struct BFloat16Tile : BFloat16x2 {};

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

static inline Vector broadcast(float x) { return x - Vector{}; }

static inline Vector load(const float* from) { return *(const UnalignedVector*)from; }
static inline void store(float* to, Vector x) { *(UnalignedVector*)to = x; }

static inline Vector load(const BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  return (Vector)(__builtin_convertvector(*(const Halves*)from, Bits) << 16);
}

static inline void store(BFloat16* to, Vector x) {  // to the nearest, ties to even; NaN stays NaN
  typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  Bits bits = (Bits)x;
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Integers is_number = x == x;
  rounded = is_number ? rounded : (Bits)(Integers{} + 0x7fc0);
  *(Halves*)to = __builtin_convertvector(rounded, Halves);
}

static inline Vector load(const Float16* from) {
  typedef Float16 Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  return __builtin_convertvector(*(const Halves*)from, Vector);
}

static inline void store(Float16* to, Vector x) {
  typedef Float16 Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  *(Halves*)to = __builtin_convertvector(x, Halves);
}

// The first `count` entries, and 0 for the rest.
template <typename T>
static inline Vector load_part(const T* from, int64_t count) {
  if (count >= LANES) return load(from);
  T part[LANES] = {};
  for (int64_t i = 0; i < count; i++) part[i] = from[i];
  return load(part);
}

template <typename T>
static inline void store_part(T* to, Vector x, int64_t count) {
  if (count >= LANES) return store(to, x);
  T part[LANES];
  store(part, x);
  for (int64_t i = 0; i < count; i++) to[i] = part[i];
}

#if defined(__AVX512BF16__)
// sum + the two products of x with each two of y.
static inline Vector add_product(Vector sum, BFloat16x2 x, const BFloat16x2* y) {
  __m512i twice = _mm512_set1_epi32((int)x.bits);
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)twice, (__m512bh)_mm512_loadu_si512(y));
}

// Neighbours in a vector become two.
static inline void store_neighbours(BFloat16x2* to, Vector first, Vector second) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// The same entries of two vectors become two.
static inline void store_across(BFloat16x2* to, Vector first, Vector second) {
  typedef uint16_t Halves __attribute__((vector_size(64)));
  Halves x = (Halves)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  x = __builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27,
                              12, 28, 13, 29, 14, 30, 15, 31);
  _mm512_storeu_si512(to, (__m512i)x);
}
#endif

static inline Vector add_product(Vector sum, float x, const float* y) { return sum + broadcast(x) * load(y); }

static inline Integers lane_numbers() {
  Integers numbers;
  for (int i = 0; i < LANES; i++) numbers[i] = i;
  return numbers;
}

static inline float sum_lanes(Vector x) {
#if LANES == 16
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15);
#elif LANES == 8
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  return (x[0] + x[1]) + (x[2] + x[3]);
}

static inline float largest_lane(Vector x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

static inline Vector least(Vector x, Vector y) { return x > y ? y : x; }  // x where x is NaN

// Entries 2m and 2m + 1 exchanged.
static inline Vector swap_pairs(Vector x) {
#if LANES == 16
  return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif LANES == 8
  return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#endif
}

// exp(x) for x ≤ 80, within 2 units in the last place; e^-87 below -87. NaN stays NaN.
static inline Vector exponential(Vector x) {
  x = x < broadcast(-87.f) ? broadcast(-87.f) : x;
  const Vector shift = broadcast(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer, in the last bits
  Vector shifted = x * broadcast(1.44269504f) + shift;
  Vector n = shifted - shift;
  Vector r = x - n * broadcast(0.693145752f);
  r = r - n * broadcast(1.42860677e-6f);
  Vector p = broadcast(1.9875691500e-4f);
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(5.0000001201e-1f);
  p = p * (r * r) + r + broadcast(1.f);
  Bits power = ((Bits)shifted - (Bits)shift + 127) << 23;
  return p * (Vector)power;
}

// σ(x)
static inline Vector sigmoid(Vector x) {
  return broadcast(1.f) / (broadcast(1.f) + exponential(least(-x, broadcast(80.f))));
}

// exp(x) for x ≤ 0 as a weight: 0 below -87.
static inline Vector decay_weight(Vector x) { return x < broadcast(-87.f) ? Vector{} : exponential(x); }
static inline float decay_weight(double x) { return decay_weight(broadcast((float)x))[0]; }
