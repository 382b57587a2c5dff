// The one file of the decoding engine's products that knows torch.

#include "packed_brgemm.h"

#include <ATen/native/CPUBlas.h>

#include <cstdlib>

#include "cpu_features.h"

namespace fastformer {
namespace blas = at::native::cpublas;

bool can_brgemm(Precision precision) {
#if defined(CPU_CAPABILITY_AVX512)
  static const bool forced = [] {
    const char* asked = std::getenv("FASTFORMER_BRGEMM");
    return asked != nullptr && asked[0] == '1';
  }();
  if (precision == Precision::bf16) return (forced || cpu_features().amx_bf16) && blas::could_pack(at::kBFloat16);
  return precision == Precision::int8 && (forced || cpu_features().amx_int8) && blas::could_pack(at::kByte);
#else
  return false;
#endif
}

void brgemm_panel(Precision precision, int64_t rows, const char* left, int64_t left_stride, const char* panel,
                  int64_t steps, void* sums) {
  if (precision == Precision::int8) {
    blas::brgemm(rows, kPanelColumns, steps * 4, left_stride, kPanelColumns, kPanelColumns, false,
                 reinterpret_cast<const unsigned char*>(left), reinterpret_cast<const signed char*>(panel),
                 static_cast<int32_t*>(sums), true);
  } else {
    blas::brgemm(rows, kPanelColumns, steps * 2, left_stride / 2, kPanelColumns, kPanelColumns, false,
                 reinterpret_cast<const at::BFloat16*>(left), reinterpret_cast<const at::BFloat16*>(panel),
                 static_cast<float*>(sums), true);
  }
}

void release_brgemm() { blas::brgemm_release(); }

}  // namespace fastformer
