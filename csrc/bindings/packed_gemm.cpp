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

using Bytes = py::array_t<uint8_t, py::array::c_style>;

Array product(const Array& x, const PackedWeight& packed, Precision precision) {
  const int64_t rows = x.shape(0), n = packed.n, k = packed.k;
  PackedRows left;
  left.resize(rows, k, precision);
  for (int64_t r = 0; r < rows; ++r) left.store(r, x.data() + r * k);
  const int64_t ld = packed.num_panels * kPanelColumns;
  std::vector<float> padded(static_cast<size_t>(rows * ld));
  gemm(left, rows, packed, 0, packed.num_panels, padded.data(), ld);
  Array out({rows, n});
  for (int64_t r = 0; r < rows; ++r) std::copy_n(padded.data() + r * ld, n, out.mutable_data() + r * n);
  return out;
}

// x W^T + b, packed for this one call.
Array packed_linear(const Array& x, const Array& weight, const std::optional<Array>& bias, const std::string& precision,
                    bool of_int4) {
  if (x.ndim() != 2 || weight.ndim() != 2 || x.shape(1) != weight.shape(1))
    throw py::value_error("packed_linear: expected x of (rows, k) and a weight of (n, k)");
  const int64_t n = weight.shape(0), k = weight.shape(1);
  if (precision_named(precision) == Precision::int4)
    throw py::value_error("packed_linear: expected precision fp32, bf16 or int8; int4 has packed_linear_int4");
  if (bias && (bias->ndim() != 1 || bias->shape(0) != n))
    throw py::value_error("packed_linear: expected a bias of (n,)");
  const PackedWeight packed({weight.data(), false, n, k, k}, bias ? bias->data() : nullptr, precision_named(precision));
  return product(x, packed, packed.precision == Precision::int8 && of_int4 ? Precision::int4 : packed.precision);
}

// Likewise, of a weight of 4 bits; `columns` are picked out of the packed weight.
Array packed_linear_int4(const Array& x, const Bytes& nibbles, const Array& scales, const std::optional<Bytes>& zeros,
                         const std::optional<Array>& bias, const std::optional<std::vector<int32_t>>& columns) {
  if (x.ndim() != 2 || nibbles.ndim() != 2 || scales.ndim() != 2)
    throw py::value_error("packed_linear_int4: expected x of (rows, k), and nibbles and scales of two dimensions");
  const int64_t n = nibbles.shape(0), k = x.shape(1), groups = int4_groups(k);
  const auto fits = [&](const auto& array) {
    return array.ndim() == 2 && array.shape(0) == n && array.shape(1) == groups;
  };
  if (nibbles.shape(1) != groups * kInt4Group / 2 || !fits(scales) || (zeros && !fits(*zeros)))
    throw py::value_error("packed_linear_int4: expected nibbles (n, 16 * groups), scales and zeros (n, groups)");
  if (bias && (bias->ndim() != 1 || bias->shape(0) != n))
    throw py::value_error("packed_linear_int4: expected a bias of (n,)");
  const Int4Matrix weight{nibbles.data(), scales.data(), zeros ? zeros->data() : nullptr, n, k};
  PackedWeight packed(weight, bias ? bias->data() : nullptr);
  if (columns) {
    for (const int32_t column : *columns)
      if (column < 0 || column >= n) throw py::value_error("packed_linear_int4: expected columns that are there");
    packed = packed.columns(*columns);
  }
  return product(x, packed, Precision::int4);
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
        py::arg("of_int4") = false,
        "x (rows, k) times weight (n, k) transposed, plus bias (n,) or None, by the products of the decoding engine. "
        "of_int4: of int8, the rows are those of a model in int4.");
  m.def("packed_linear_int4", &packed_linear_int4, py::arg("x"), py::arg("nibbles").noconvert(), py::arg("scales"),
        py::arg("zeros").noconvert(), py::arg("bias"), py::arg("columns") = py::none(),
        "The same with a weight of 4 bits: nibbles (n, 16 * groups), scales and zeros or None (n, groups).");
  m.def("cpu_features", &names_of_features, "Instructions that the CPU has and FASTFORMER_CPU_FEATURES allows.");
  m.def("is_intel_cpu", &is_intel_cpu, "Did Intel make this CPU?");
  m.def("num_brgemm_products", &num_brgemm_products,
        "How many products the calling thread has sent to brgemm, which takes them where the CPU has AMX.");
}

}  // namespace fastformer
