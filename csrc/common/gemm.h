// The matrix product inside the kernels: C (m, n) (+)= A (m, k) * B (k, n), A row-major, B packed, C in the
// accumulation type.
//
// B is packed once and used by many row blocks. It is stored in panels of kPanel columns, row by row; bf16 interleaves
// pairs of rows (VNNI), the layout that vdpbf16ps and AMX read. Columns beyond n, and the partner of an odd last row of
// bf16, are zero. A is read in place, by broadcast, or from a widened copy of some rows.
//
//   float     6 to 14 rows by two vectors of accumulators, FMA
//   bfloat16  oneDNN's brgemm if the CPU has AMX; else vdpbf16ps if that is fast; else like float
//   double    plain loops, for gradcheck

#pragma once

#include <cstdint>

#include "common/simd.h"

namespace fastformer {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kPanel = 32;
#else
constexpr int64_t kPanel = 16;
#endif

// The number of rows of B that are interleaved.
template <typename T>
constexpr int64_t kPair = std::is_same_v<T, bfloat16> ? 2 : 1;

// Longer dot products are computed as sums of partial sums, because the rounding error grows with the length of a sum:
// fp32 sums of 512 elements have more than twice MKL's error (tests/ops/test_linear.py). For bf16, only the rounding of
// the operands matters.
template <typename T>
constexpr int64_t kDepth = std::is_same_v<T, float> ? 192 : 512;

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// The number of elements that pack() writes for a (k, n) matrix.
template <typename T>
int64_t packed_size(int64_t k, int64_t n) {
  return round_up(k, kPair<T>) * round_up(n, kPanel);
}

// Packs the (k, n) matrix whose element (i, j) is b[i * stride_k + j * stride_n]. One of the strides should be 1.
template <typename T>
void pack(const T* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, T* packed);

// C = A * B, or C += A * B with `accumulate`; A * B is 0 if k is. lda and ldc are row strides in elements. To multiply
// by rows [i, i + k) of a B that was packed with packed_k rows, pass packed + i * kPanel (i a multiple of kPair) and
// packed_k; 0: k.
template <typename T>
void gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* packed, acc_t<T>* c, int64_t ldc,
          bool accumulate, int64_t packed_k = 0);

// Returns a row stride for A, in elements and at least k, with which gemm() reads the rows in place. Rows that map to
// the same sets of the first-level cache (4 KB per way) evict each other, and gemm() copies them if they are many.
template <typename T>
int64_t row_stride(int64_t k) {
  constexpr int64_t kWay = 4096, kLine = 64, kSize = sizeof(T);
  return k * kSize % kWay == 0 ? k + kLine / kSize : k;
}

// C = A * B^T for at most kFewRows rows of A and an unpacked B (n, k) with row stride ldb, in float or bf16: packing
// would cost more than the product. The results are bit-identical to those of gemm() on the packed B, except for bf16
// under use_brgemm(), where the caller has to use gemm().
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kFewRows = 16;
#else
constexpr int64_t kFewRows = 8;
#endif
template <typename T>
void gemm_unpacked(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c,
                   int64_t ldc);

// C = A^T * B for a packed (k, m) A and a packed (k, n) B: the gradient of a weight. It never uses AMX; see use_brgemm.
template <typename T>
void gemm_transposed(int64_t m, int64_t n, int64_t k, const T* packed_a, const T* packed_b, acc_t<T>* c, int64_t ldc);

// Whether bf16 products use oneDNN's brgemm now (brgemm.h).
bool use_brgemm();

// Whether this build has vdpbf16ps and the CPU is fast at it. Otherwise bf16 is widened and runs at the speed of fp32.
bool has_bf16_dot();

// Whether this many rows of A with the stride `apart` evict each other from the cache in gemm(). They don't if gemm()
// uses brgemm or widens them. Up to 16 rows hardly do, because gemm() reads 8 at a time, and a set has 8 ways.
template <typename T>
bool evict_one_another(int64_t rows, int64_t apart) {
  constexpr int64_t kFew = 16;
  if (std::is_same_v<T, bfloat16> && (use_brgemm() || !has_bf16_dot())) return false;
  return rows > kFew && row_stride<T>(apart) != apart;
}

// Releases the AMX tiles, which brgemm keeps configured between calls. Each thread calls this after its last product.
void gemm_release();

}  // namespace fastformer
