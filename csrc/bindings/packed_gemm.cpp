// What Python sees of packed_gemm.h and cpu_features.h.

#include "engine/packed_gemm.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "common/cpu_features.h"
#include "engine/packed_brgemm.h"

namespace fastformer {
namespace {

namespace py = pybind11;
using Array = py::array_t<float, py::array::c_style | py::array::forcecast>;

// x W^T + b, packed for this one call.
Array packed_linear(const Array& x, const Array& weight, const std::optional<Array>& bias,
                    const std::string& precision) {
  if (x.ndim() != 2 || weight.ndim() != 2 || x.shape(1) != weight.shape(1))
    throw py::value_error("packed_linear: expected x of (rows, k) and a weight of (n, k)");
  const int64_t rows = x.shape(0), n = weight.shape(0), k = weight.shape(1);
  if (bias && (bias->ndim() != 1 || bias->shape(0) != n))
    throw py::value_error("packed_linear: expected a bias of (n,)");
  const PackedWeight packed({weight.data(), false, n, k, k}, bias ? bias->data() : nullptr, precision_named(precision));
  PackedRows left;
  left.resize(rows, k, packed.precision);
  for (int64_t r = 0; r < rows; ++r) left.store(r, x.data() + r * k);
  const int64_t ld = packed.num_panels * kPanelColumns;
  std::vector<float> padded(static_cast<size_t>(rows * ld));
  gemm(left, rows, packed, 0, packed.num_panels, padded.data(), ld);
  Array out({rows, n});
  for (int64_t r = 0; r < rows; ++r) std::copy_n(padded.data() + r * ld, n, out.mutable_data() + r * n);
  return out;
}

std::vector<std::string> names_of_features() {
  const CpuFeatures& f = cpu_features();
  std::vector<std::string> names;
  if (f.avx512_vnni) names.emplace_back("avx512_vnni");
  if (f.avx512_bf16) names.emplace_back("avx512_bf16");
  if (f.avx_vnni) names.emplace_back("avx_vnni");
  if (f.amx_int8) names.emplace_back("amx_int8");
  if (f.amx_bf16) names.emplace_back("amx_bf16");
  return names;
}

}  // namespace

void bind_packed_gemm(py::module_& m) {
  m.def("packed_linear", &packed_linear, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("precision"),
        "x (rows, k) times weight (n, k) transposed, plus bias (n,) or None, by the products of the decoding engine.");
  m.def("cpu_features", &names_of_features, "Instructions that the CPU has and FASTFORMER_CPU_FEATURES allows.");
  m.def("is_intel_cpu", &is_intel_cpu, "Did Intel make this CPU?");
  m.def("num_brgemm_products", &num_brgemm_products,
        "How many products the calling thread has sent to brgemm, which takes them where the CPU has AMX.");
}

}  // namespace fastformer
