#include "common/brgemm.h"

#include <dlfcn.h>

#include <cstdlib>
#include <type_traits>

#include "common/cpu_features.h"

namespace fastformer {
namespace {

// Values of c10::ScalarType. They are stable, because checkpoints contain them.
constexpr int8_t kByte = 0, kBFloat16 = 15;

// The functions that were found in libtorch_cpu.
struct Symbols {
  void* (*context)();
  bool (*is_enabled)(const void* context);
  bool (*could_pack)(int8_t dtype);
  void (*bf16)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const bfloat16*, const bfloat16*, float*,
               bool is_interleaved);
  void (*u8s8)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const uint8_t*, const int8_t*, int32_t*,
               bool is_interleaved);
  void (*release)(bool is_interleaved);
};
Symbols symbols;

bool find_all() {
  void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return false;
  const auto find = [torch](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(torch, name));
    return function != nullptr;
  };
  return find(symbols.context, "_ZN2at13globalContextEv") &&
         find(symbols.is_enabled, "_ZNK2at7Context17userEnabledMkldnnEv") &&
         find(symbols.could_pack, "_ZN2at6native7cpublas10could_packEN3c1010ScalarTypeE") &&
         find(symbols.bf16, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb") &&
         find(symbols.u8s8, "_ZN2at6native7cpublas6brgemmEllllllbPKhPKaPib") &&
         find(symbols.release, "_ZN2at6native7cpublas14brgemm_releaseEb");
}

constexpr Brgemm kFunctions{
    [](int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const bfloat16* a,
       const bfloat16* b, float* c) { symbols.bf16(m, n, k, lda, ldb, ldc, adds, a, b, c, true); },
    [](int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const uint8_t* a,
       const int8_t* b, int32_t* c) { symbols.u8s8(m, n, k, lda, ldb, ldc, adds, a, b, c, true); },
    [] { symbols.release(true); },
};

// Whether brgemm may run now for a dtype, on a CPU that has AMX or AVX-512's dot products for it, or neither.
bool can_brgemm(bool has_amx, bool has_dot, int8_t dtype) {
  static const bool is_asked = [] {
    const char* setting = std::getenv("FASTFORMER_BRGEMM");
    return setting != nullptr && setting[0] == '1';
  }();
  const bool is_forced = is_asked && has_dot;
  if ((!has_amx && !is_forced) || brgemm() == nullptr) return false;
  // brgemm throws while oneDNN is switched off (torch.backends.mkldnn); users may switch it between two products.
  if (!symbols.is_enabled(symbols.context())) return false;
  // PyTorch has no function that tells whether it sees AMX, but only with AMX do weights need packing.
  return is_forced || symbols.could_pack(dtype);
}

}  // namespace

const Brgemm* brgemm() {
  static const bool has_all = find_all();
  return has_all ? &kFunctions : nullptr;
}

bool can_brgemm_bf16() { return can_brgemm(cpu_features().amx_bf16, cpu_features().avx512_bf16, kBFloat16); }
bool can_brgemm_u8s8() { return can_brgemm(cpu_features().amx_int8, cpu_features().avx512_vnni, kByte); }

}  // namespace fastformer
