// Python bindings of packed_gemm.h and cpu_features.h.

#include "engine/packed_gemm.h"

#include <algorithm>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "common/cpu_features.h"
#include "engine/tiles.h"

namespace fastformer {
namespace {

using python::Array;
using python::Bytes;
using python::Floats;
using python::Object;

Object product(const Floats& x, const PackedWeight& packed, Precision precision) {
  const int64_t rows = x.array.shape(0), n = packed.n, k = packed.k;
  PackedRows left;
  left.resize(rows, k, precision);
  for (int64_t r = 0; r < rows; ++r) left.store(r, x.data() + r * k);
  const int64_t ld = packed.num_panels * kPanelColumns;
  std::vector<float> padded(static_cast<size_t>(rows * ld));
  gemm(left, rows, packed, 0, packed.num_panels, padded.data(), ld);
  Array out = python::new_floats(rows, n);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(padded.data() + r * ld, n, static_cast<float*>(out.data()) + r * n);
  return std::move(out.object());
}

// Computes x W^T + b with a weight that is packed for this call only.
Object packed_linear(const Floats& x, const Floats& weight, const std::optional<Floats>& bias,
                     const std::string& precision, std::optional<bool> of_int4) {
  if (x.array.ndim() != 2 || weight.array.ndim() != 2 || x.array.shape(1) != weight.array.shape(1))
    throw std::invalid_argument("packed_linear: expected x of (rows, k) and a weight of (n, k)");
  const int64_t n = weight.array.shape(0), k = weight.array.shape(1);
  if (precision_named(precision) == Precision::int4)
    throw std::invalid_argument(
        "packed_linear: expected precision fp32, bf16 or int8; for int4, call packed_linear_int4");
  if (bias && (bias->array.ndim() != 1 || bias->array.shape(0) != n))
    throw std::invalid_argument("packed_linear: expected a bias of (n,)");
  const Matrix matrix{weight.data(), Kind::fp32, n, k};
  const PackedWeight packed(n, k, RowReader<Matrix>([&](int64_t i, int64_t j) { return matrix.rows(i, j); }),
                            bias ? bias->data() : nullptr, precision_named(precision));
  const bool rows_of_int4 = packed.precision == Precision::int8 && of_int4.value_or(false);
  return product(x, packed, rows_of_int4 ? Precision::int4 : packed.precision);
}

// Does the same for a 4-bit weight. `columns` selects columns of the packed weight, `levels` are bytes as int8.
Object packed_linear_int4(const Floats& x, const Bytes& nibbles, const Floats& scales,
                          const std::optional<Bytes>& zeros, const std::optional<Floats>& bias,
                          const std::optional<std::vector<int32_t>>& columns, const std::optional<Bytes>& levels) {
  if (x.array.ndim() != 2 || nibbles.array.ndim() != 2 || scales.array.ndim() != 2)
    throw std::invalid_argument(
        "packed_linear_int4: expected x of (rows, k), and nibbles and scales of two dimensions");
  const int64_t n = nibbles.array.shape(0), k = x.array.shape(1), groups = int4_groups(k);
  const auto fits = [&](const Array& array) {
    return array.ndim() == 2 && array.shape(0) == n && array.shape(1) == groups;
  };
  if (nibbles.array.shape(1) != groups * kInt4Group / 2 || !fits(scales.array) || (zeros && !fits(zeros->array)))
    throw std::invalid_argument("packed_linear_int4: expected nibbles (n, 16 * groups), scales and zeros (n, groups)");
  if (bias && (bias->array.ndim() != 1 || bias->array.shape(0) != n))
    throw std::invalid_argument("packed_linear_int4: expected a bias of (n,)");
  std::optional<Levels> table;
  if (levels) {
    if (levels->array.shape() != std::vector<int64_t>{std::tuple_size_v<Levels>})
      throw std::invalid_argument("packed_linear_int4: expected 16 levels");
    std::memcpy(table.emplace().data(), levels->data(), sizeof(Levels));
  }
  const Int4Matrix weight{
      nibbles.data(), scales.data(), zeros ? zeros->data() : nullptr, n, k, table ? table->data() : nullptr};
  PackedWeight packed(weight.n, weight.k,
                      RowReader<Int4Matrix>([&](int64_t i, int64_t j) { return weight.rows(i, j); }),
                      bias ? bias->data() : nullptr, weight.zeros != nullptr, table);
  if (columns) {
    for (const int32_t column : *columns)
      if (column < 0 || column >= n) throw std::invalid_argument("packed_linear_int4: expected columns of the weight");
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

void bind_packed_gemm(PyObject* module) {
  using python::function;
  static PyMethodDef functions[] = {
      function<"packed_linear", "x weight bias precision of_int4?", &packed_linear>(
          "Computes x (rows, k) times the transposed weight (n, k), plus bias (n,) or None, as the decoding engine "
          "does. "
          "of_int4: with int8, quantises the rows as in an int4 model."),
      function<"packed_linear_int4", "x nibbles scales zeros bias columns? levels?", &packed_linear_int4>(
          "Does the same for a 4-bit weight: nibbles (n, 16 * groups), scales (n, groups), and zeros (n, groups) or "
          "None. levels: the int8 values of the 16 nibbles, as uint8; it has no zeros then."),
      function<"cpu_features", "", &names_of_features>(
          "The instruction sets that the CPU has and FASTFORMER_CPU_FEATURES allows."),
      function<"has_fast_bf16", "", &has_fast_bf16>(
          "Whether the CPU has instructions that multiply bf16 faster than fp32."),
      function<"is_intel_cpu", "", &is_intel_cpu>("Whether Intel made this CPU."),
      function<"num_tile_products", "", &num_tile_products>(
          "The number of products that the calling thread has computed with tiles, which are used if the CPU has AMX."),
      {}};
  python::add_functions(module, functions);
}

}  // namespace fastformer
