#include "engine/packed_brgemm.h"

#include "common/brgemm.h"

namespace fastformer {
namespace {

thread_local int64_t num_products = 0;

}  // namespace

bool can_brgemm(Precision precision) {
#if defined(CPU_CAPABILITY_AVX512)
  if (precision == Precision::fp32) return false;
  return precision == Precision::bf16 ? can_brgemm_bf16() : can_brgemm_u8s8();
#else
  return false;
#endif
}

void brgemm_panel(Precision precision, int64_t rows, const char* left, int64_t left_stride, const char* right,
                  int64_t steps, void* sums) {
  ++num_products;
  if (precision == Precision::int8) {
    brgemm()->u8s8(rows, kPanelColumns, steps * 4, left_stride, kPanelColumns, kPanelColumns, false,
                   reinterpret_cast<const uint8_t*>(left), reinterpret_cast<const int8_t*>(right),
                   static_cast<int32_t*>(sums));
  } else {
    brgemm()->bf16(rows, kPanelColumns, steps * 2, left_stride / 2, kPanelColumns, kPanelColumns, false,
                   reinterpret_cast<const bfloat16*>(left), reinterpret_cast<const bfloat16*>(right),
                   static_cast<float*>(sums));
  }
}

void release_brgemm() {
  if (brgemm() != nullptr) brgemm()->release();
}

int64_t num_brgemm_products() { return num_products; }

}  // namespace fastformer
