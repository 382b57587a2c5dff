// CPU feature detection.

#include "common/cpu_features.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fastformer {
namespace {

CpuFeatures probe() {
  CpuFeatures supported;
  supported.avx512_vnni = __builtin_cpu_supports("avx512vnni");
  supported.avx512_bf16 = __builtin_cpu_supports("avx512bf16");
  supported.avx_vnni = __builtin_cpu_supports("avxvnni");
  const bool tiles = __builtin_cpu_supports("amx-tile");
  supported.amx_int8 = tiles && __builtin_cpu_supports("amx-int8");
  supported.amx_bf16 = tiles && __builtin_cpu_supports("amx-bf16");
  const char* allowed = std::getenv("FASTFORMER_CPU_FEATURES");
  if (allowed == nullptr) return supported;

  CpuFeatures enabled;
  std::string_view rest = allowed;
  while (!rest.empty()) {
    const std::string_view name = rest.substr(0, rest.find(','));
    rest.remove_prefix(name.size() < rest.size() ? name.size() + 1 : rest.size());
    if (name == "avx512_vnni") enabled.avx512_vnni = supported.avx512_vnni;
    else if (name == "avx512_bf16") enabled.avx512_bf16 = supported.avx512_bf16;
    else if (name == "avx_vnni") enabled.avx_vnni = supported.avx_vnni;
    else if (name == "amx_int8") enabled.amx_int8 = supported.amx_int8;
    else if (name == "amx_bf16") enabled.amx_bf16 = supported.amx_bf16;
    else
      throw std::invalid_argument(
          "FASTFORMER_CPU_FEATURES: expected avx512_vnni, avx512_bf16, avx_vnni, amx_int8 or "
          "amx_bf16, got '" +
          std::string(name) + "'");
  }
  return enabled;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = probe();
  return features;
}

bool has_fast_bf16_dot() {
  // Cooper Lake has no AMX to rely on instead, and has not been measured.
  static const bool is_fast =
      !is_intel_cpu() || __builtin_cpu_is("cooperlake") || std::getenv("FASTFORMER_CPU_FEATURES") != nullptr;
  return cpu_features().avx512_bf16 && is_fast;
}

bool has_fast_bf16() { return cpu_features().amx_bf16 || has_fast_bf16_dot(); }

bool is_intel_cpu() { return __builtin_cpu_is("intel"); }

}  // namespace fastformer
