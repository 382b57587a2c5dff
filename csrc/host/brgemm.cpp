// Hands PyTorch's brgemm over to the kernels; see common/brgemm.h.

#include "common/brgemm.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

namespace fastformer {
namespace {

namespace blas = at::native::cpublas;

constexpr Brgemm kFunctions{
    [] { return at::globalContext().userEnabledMkldnn(); },
    // Whether weights need packing is PyTorch's only answer to whether the CPU has AMX.
    [] { return blas::could_pack(at::kBFloat16); },
    [] { return blas::could_pack(at::kByte); },
    [](int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const c10::BFloat16* a,
       const c10::BFloat16* b, float* c) { blas::brgemm(m, n, k, lda, ldb, ldc, adds, a, b, c, true); },
    [](int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const uint8_t* a,
       const int8_t* b, int32_t* c) {
      blas::brgemm(m, n, k, lda, ldb, ldc, adds, reinterpret_cast<const unsigned char*>(a),
                   reinterpret_cast<const signed char*>(b), c, true);
    },
    [] { blas::brgemm_release(); },
};

[[maybe_unused]] const bool is_set = (set_brgemm(&kFunctions), true);

}  // namespace
}  // namespace fastformer
