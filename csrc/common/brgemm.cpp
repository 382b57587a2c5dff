#include "common/brgemm.h"

#include <dlfcn.h>

#include <type_traits>

namespace fastformer {
namespace {

// Values of c10::ScalarType. They are stable, because checkpoints contain them.
constexpr int8_t kByte = 0, kBFloat16 = 15;

// The functions found in libtorch_cpu.
struct Found {
  void* (*context)();
  bool (*is_enabled)(const void* context);
  bool (*could_pack)(int8_t dtype);
  void (*bf16)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const bfloat16*, const bfloat16*, float*,
               bool is_interleaved);
  void (*u8s8)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const uint8_t*, const int8_t*, int32_t*,
               bool is_interleaved);
  void (*release)(bool is_interleaved);
};
Found found;

bool find_all() {
  void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return false;
  const auto find = [torch](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(torch, name));
    return function != nullptr;
  };
  return find(found.context, "_ZN2at13globalContextEv") &&
         find(found.is_enabled, "_ZNK2at7Context17userEnabledMkldnnEv") &&
         find(found.could_pack, "_ZN2at6native7cpublas10could_packEN3c1010ScalarTypeE") &&
         find(found.bf16, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb") &&
         find(found.u8s8, "_ZN2at6native7cpublas6brgemmEllllllbPKhPKaPib") &&
         find(found.release, "_ZN2at6native7cpublas14brgemm_releaseEb");
}

constexpr Brgemm kFunctions{
    [] { return found.is_enabled(found.context()); },
    // PyTorch has no function that tells whether it sees AMX, but only with AMX do weights need packing.
    [] { return found.could_pack(kBFloat16); },
    [] { return found.could_pack(kByte); },
    [](int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const bfloat16* a,
       const bfloat16* b, float* c) { found.bf16(m, n, k, lda, ldb, ldc, adds, a, b, c, true); },
    [](int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds, const uint8_t* a,
       const int8_t* b, int32_t* c) { found.u8s8(m, n, k, lda, ldb, ldc, adds, a, b, c, true); },
    [] { found.release(true); },
};

}  // namespace

const Brgemm* brgemm() {
  static const bool has_all = find_all();
  return has_all ? &kFunctions : nullptr;
}

}  // namespace fastformer
