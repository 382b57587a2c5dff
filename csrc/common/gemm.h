// The matrix product inside the kernels: C (m, n) (+)= A (m, k) * B (k, n), A row-major, B packed, C in the
// accumulation type.
//
// B is packed once and used by many row blocks. It is stored in panels of kPanel columns, as rows of k; bf16 stores
// two rows of k side by side (VNNI), the layout of vdpbf16ps and AMX. Columns beyond n and an odd last row of bf16 are
// zero. A is read in place, by broadcast, or from a widened copy of some rows.
//
//   float     6 to 14 rows by two vectors of accumulators, FMA
//   bfloat16  oneDNN's brgemm if the CPU has AMX; else vdpbf16ps if it has AVX512_BF16; else like float
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

// Rows of k that are stored side by side.
template <typename T>
constexpr int64_t kPair = std::is_same_v<T, bfloat16> ? 2 : 1;

// Products longer than this are sums of sums: the rounding error grows with the length of a sum, and sums of 512 in
// fp32 have more than twice the error of MKL's (tests/ops/test_linear.py). In bf16 only the operands' rounding
// matters.
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

// C = A * B, or C += A * B with `accumulate`. lda and ldc are row strides in elements. To multiply by rows [i, i + k)
// of a B that was packed with packed_k rows, pass packed + i * kPanel (i a multiple of kPair) and packed_k.
template <typename T>
void gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* packed, acc_t<T>* c, int64_t ldc,
          bool accumulate, int64_t packed_k);

// Elements from one row of A to the next, at least k, such that gemm() reads the rows in place: rows that fall into one
// set of a first-level cache, which has 4 KB a way, evict each other, and many of them would be copied.
template <typename T>
int64_t row_stride(int64_t k) {
  constexpr int64_t kWay = 4096, kLine = 64, kSize = sizeof(T);
  return k * kSize % kWay == 0 ? k + kLine / kSize : k;
}

template <typename T>
void gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* packed, acc_t<T>* c, int64_t ldc,
          bool accumulate) {
  gemm<T>(m, n, k, a, lda, packed, c, ldc, accumulate, k);
}

// C = A * B^T for at most kFewRows rows of A and a B (n, k) that is not packed, its rows ldb elements apart: packing
// would cost more than the product. float and bf16. The sums are those of gemm() on the packed B, bit for bit, except
// if use_brgemm(): then bf16 has to use gemm().
#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kFewRows = 16;
#else
constexpr int64_t kFewRows = 8;
#endif
template <typename T>
void gemm_unpacked(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c,
                   int64_t ldc);

// C = A^T * B for a packed (k, m) A and a packed (k, n) B: the gradient of a weight. Never on AMX; see use_brgemm.
template <typename T>
void gemm_transposed(int64_t m, int64_t n, int64_t k, const T* packed_a, const T* packed_b, acc_t<T>* c, int64_t ldc);

// Whether bf16 products use oneDNN's brgemm: if the CPU has AMX, which nothing else here reaches.
bool use_brgemm();

// Whether the CPU and this module have bf16 products, vdpbf16ps. Else bf16 is widened, at the rate of fp32.
bool has_bf16_dot();

// Whether this many rows of A, this many elements apart, evict each other in gemm(). Not if it reads them through
// brgemm or widens them; and hardly up to 16 rows, of which it uses 8 at a time, as many as a set has ways.
template <typename T>
bool evict_one_another(int64_t rows, int64_t apart) {
  constexpr int64_t kFew = 16;
  if (std::is_same_v<T, bfloat16> && (use_brgemm() || !has_bf16_dot())) return false;
  return rows > kFew && row_stride<T>(apart) != apart;
}

// brgemm keeps the AMX tiles configured between calls; a thread calls this when it is done with its products.
void gemm_release();

}  // namespace fastformer
