#include "common/brgemm.h"

#include <dlfcn.h>

#include <cstdlib>
#include <type_traits>

#include "common/cpu_features.h"

namespace fastformer {
namespace {

// The value of c10::ScalarType. It is stable, because checkpoints contain it.
constexpr int8_t kBFloat16 = 15;

// The functions that were found in libtorch_cpu.
struct Symbols {
  void* (*context)();
  bool (*is_enabled)(const void* context);
  bool (*could_pack)(int8_t dtype);
  void (*bf16)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const bfloat16*, const bfloat16*, float*,
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
         find(symbols.release, "_ZN2at6native7cpublas14brgemm_releaseEb");
}

constexpr Brgemm kFunctions{
    [](int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const bfloat16* a,
       const bfloat16* b, float* c) { symbols.bf16(m, n, k, lda, ldb, ldc, adds, a, b, c, true); },
    [] { symbols.release(true); },
};

}  // namespace

const Brgemm* brgemm() {
  static const bool has_all = find_all();
  return has_all ? &kFunctions : nullptr;
}

bool can_brgemm_bf16() {
  static const bool is_asked = [] {
    const char* setting = std::getenv("FASTFORMER_BRGEMM");
    return setting != nullptr && setting[0] == '1';
  }();
  const bool is_forced = is_asked && cpu_features().avx512_bf16;
  if ((!cpu_features().amx_bf16 && !is_forced) || brgemm() == nullptr) return false;
  // brgemm throws while oneDNN is switched off (torch.backends.mkldnn); users may switch it between two products.
  if (!symbols.is_enabled(symbols.context())) return false;
  // PyTorch has no function that tells whether it sees AMX, but only with AMX do weights need packing.
  return is_forced || symbols.could_pack(kBFloat16);
}

}  // namespace fastformer
