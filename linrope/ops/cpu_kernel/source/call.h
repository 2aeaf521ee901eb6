// One call of the kernel, as Python fills it in: library.py declares the same record.
#pragma once

#include "parallel.h"

enum { CHUNK = 64, BLOCK_CHUNKS = 4, BLOCK = CHUNK * BLOCK_CHUNKS };  // tokens of a chunk; chunks of a block; its tokens

// What products take. Of bfloat16 where inputs are: in vectors with AVX512-BF16, in tiles with AMX.
enum Products { OF_FLOAT32, IN_VECTORS, IN_TILES };

enum FeatureMap { ELU1, RELU, EXP, IDENTITY, SOFTMAX };

// (B, H, T, X) with the strides of the first three dimensions, in entries; the last one is contiguous.
struct Tokens {
  void* data;
  int64_t batch, head, token;
};

// Contiguous tensors are float32. What a direction does not use is null.
struct Call {
  int64_t batch, heads, queries, keys, features, width;
  int64_t rotary, signed_features;   // dimensions that rotate; dimensions that skip φ and the denominator
  int64_t dtype, value_dtype;        // of q and k; of v and o
  int64_t feature_map, plain, causal, interleaved;
  int64_t threads;
  int64_t exact;                     // sums over chunks are double
  int64_t products;                  // see `Products`
  double eps;
  Tokens q, k, v, o, grad_o, dq, dk, dv;
  Tokens log_decay;                  // float32, a token each: (B, H, T, 1)
  const uint8_t* key_mask;           // (B, S), 0 for masked keys
  const int64_t* documents;          // (B, T), numbers that grow
  const float *local, *frames;       // rotations within a chunk, and of each chunk: see `Rotations` in chunk.h
  int64_t local_head, frames_head;   // strides of heads; 0 if all share one θ
  const float *kv, *k_sum;           // (B, H, D, E), (B, H, D): the past; in the backward the final state's gradient
  float *kv_out, *k_sum_out;         // the final state; in the backward the past's gradient
  float *kv_at, *k_sum_at;           // (blocks + 1, ...): the state before each block, and the final one
  float* den;                        // (B, H, T), with ε
  float* d_log_decay;                // (B, H, T)
  double* d_theta;                   // (B, H, stripes, R/2), zeros at first
  int64_t middle;                    // the token around which θ's gradient is summed
  float *workspace, *parts;          // see linrope_sizes
  ParallelFor parallel_for;
};
