// Products of rows of activations with a prepacked weight, y = x W^T + b, for the decoding engine.
//
// A weight is stored in panels of 64 columns (outputs). For each step of k, a panel has 64 columns times 4 bytes of
// k: 256 bytes in the order in which they are used, so that a row reads the weight as one stream. The 4 bytes hold 4
// consecutive elements of k for int8, and 2 for bf16. AMX can read this layout, too. The tail of a panel (bias; int8:
// scales and corrections) follows its last step.
//
//   fp32   FMA
//   bf16   x and W are bf16, sums fp32: vdpbf16ps if the CPU is fast at it, else FMA on widened operands
//   int8   W has a scale per column: symmetric, largest magnitude 127. A row of x gets a scale and a zero
//          point when it is stored: x ~ scale * (byte - zero). So all bytes from 0 to 255 are used even if no value is
//          negative, as after ReLU. The zero point times the sum of a column corrects the sums of products.
//          AVX512_VNNI, AVX-VNNI and, without them, pmaddubsw for a few rows and pmaddwd for many all give the same
//          integers. A row of x can have 16 bits instead: it is stored as two rows, of its high bytes and of its low
//          ones, whose products add up to the row's. W is read once for both.
//   int4   x as for int8. W has a scale, and optionally a zero point, for each 32 inputs of a column; or its 4 bits are
//          places in a table of levels. int4_kernels.h describes the layout. Rows stored for int4 can be multiplied by
//          int8 weights as well.
//
// A row's result depends, bit for bit, only on the row and W, and not on the number of rows, the panels or the threads.
// If the CPU has AMX, int8 uses it from some number of rows on, with the same integers. bf16 uses it for any number of
// rows, because AMX rounds sums in another order.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "common/bfloat16.h"
#include "common/buffer.h"

namespace fastformer {

constexpr int64_t kPanelColumns = 64;
constexpr int64_t kStepBytes = 4 * kPanelColumns;

// The data after the steps of a panel.
struct PanelTail {
  float bias[kPanelColumns];
  float scale[kPanelColumns];         // int8
  int32_t correction[kPanelColumns];  // int8: minus the sum of the column
};

enum class Precision { fp32, bf16, int8, int4 };

// Returns the precision named "fp32", "bf16", "int8" or "int4". Throws std::invalid_argument for other names.
Precision precision_named(std::string_view name);

// The elements of a tensor in a model's memory.
enum class Kind { fp32, bf16, fp16, bytes };

inline int64_t element_bytes(Kind kind) { return kind == Kind::fp32 ? 4 : kind == Kind::bytes ? 1 : 2; }

// Returns element i of a tensor of numbers, which may be unaligned, as in a file that is mapped.
inline float number_at(const void* data, Kind kind, int64_t i) {
  const auto read = [=]<typename T>(T value) {
    std::memcpy(&value, static_cast<const T*>(data) + i, sizeof(T));
    return value;
  };
  if (kind == Kind::bf16) return static_cast<float>(read(bfloat16()));
  return kind == Kind::fp16 ? _cvtsh_ss(read(uint16_t())) : read(0.0f);
}

// A matrix (n, k) of numbers in a model's memory.
struct Matrix {
  const void* data;
  Kind kind;
  int64_t n, k;

  float at(int64_t i, int64_t j) const { return number_at(data, kind, i * k + j); }
  Matrix rows(int64_t begin, int64_t end) const {
    return {static_cast<const char*>(data) + begin * k * element_bytes(kind), kind, end - begin, k};
  }
};

// Returns rows [begin, end) of a matrix, which are valid until the next call.
template <typename M>
using RowReader = std::function<M(int64_t begin, int64_t end)>;

constexpr int64_t kInt4Group = 32;
inline int64_t int4_groups(int64_t k) { return (k + kInt4Group - 1) / kInt4Group; }

// The values of a weight's 16 nibbles.
using Levels = std::array<int8_t, 16>;

// A matrix (n, k) of 4-bit integers. An element is scale * (q - zero), with the scale and zero point of its group, or
// scale * levels[q].
struct Int4Matrix {
  const uint8_t* nibbles;  // (n, groups, 16): the low half of a byte comes first
  // (n, groups); stored as fp16 times a power of two per row, which is exact for 11 bits, of magnitudes down to 2^-28
  // of the row's largest (a power of two: 2^-38); smaller ones lose bits
  const float* scales;
  const uint8_t* zeros;  // (n, groups), up to 16; null: all are 8
  int64_t n, k;
  const int8_t* levels = nullptr;  // Levels; null: none

  Int4Matrix rows(int64_t begin, int64_t end) const {
    const int64_t groups = int4_groups(k), from = begin * groups;
    return {nibbles + from * kInt4Group / 2, scales + from, zeros ? zeros + from : nullptr, end - begin, k, levels};
  }
};

// The W of y = x W^T + b, packed and immutable. Copies share the panels. Columns from n to the end of the last panel
// give 0.
//
// int8: a column of multiples of a scale by integers from -127 to 127 is stored exactly if one of them is +-127. A
// column with NaN or infinity gives NaN. Magnitudes below 2^-120 count as zero.
class PackedWeight {
 public:
  PackedWeight() = default;
  // Packs the (n, k) matrix whose rows `read` returns. bias: n floats, or null. Throws std::invalid_argument for a k
  // above 66,311, whose int8 sums would overflow.
  PackedWeight(int64_t n, int64_t k, const RowReader<Matrix>& read, const float* bias, Precision precision);
  // Packs a weight of int4. has_zeros: whether the matrices have zero points; levels: their levels. Throws
  // std::invalid_argument for both, and for levels of a k that isn't a multiple of kInt4Group.
  PackedWeight(int64_t n, int64_t k, const RowReader<Int4Matrix>& read, const float* bias, bool has_zeros,
               std::optional<Levels> levels);

  // Returns a packed weight of the given columns.
  PackedWeight columns(const std::vector<int32_t>& candidates) const;
  // to[i] += factor * W[column, i], for fp32 and bf16.
  void add_column(int64_t column, float factor, float* to) const;

  int64_t n = 0, k = 0, num_panels = 0;
  Precision precision = Precision::fp32;
  bool has_zeros = false;        // int4
  std::optional<Levels> levels;  // int4

  int64_t steps() const { return steps_; }              // the number of 4-byte units of k
  int64_t panel_bytes() const { return panel_bytes_; }  // from one panel to the next
  int64_t bytes() const { return num_panels * panel_bytes_; }
  const char* panel(int64_t index) const { return panels_.get() + index * panel_bytes_; }

 private:
  int64_t steps_ = 0, panel_bytes_ = 0;
  std::shared_ptr<const char> panels_;
};

// Rows of activations in the form that the products read.
class PackedRows {
 public:
  // Makes room for `rows` rows of k; their contents are undefined. The capacity never shrinks. parts: 2: a row of int8
  // has 16 bits and is stored as rows 2 * row and 2 * row + 1.
  void resize(int64_t rows, int64_t k, Precision precision, int64_t parts = 1);

  // Rounds or quantises a row of k floats. Different threads may store different rows at once. For int8 and int4, a row
  // gets the scale NaN if it contains NaN or infinity, or if its range overflows fp32. A row whose range is below
  // 2^-120, or 2^-112 in 16 bits, is stored as zeros. shifts: kPanelColumns numbers between -1/2 and 1/2, which are
  // added to each kPanelColumns whole numbers of int8 before they are rounded; null: none.
  void store(int64_t row, const float* x, const float* shifts = nullptr);
  // Copies a row of rows of the same k and precision.
  void copy(int64_t row, const PackedRows& from, int64_t from_row);

  int64_t rows() const { return rows_; }    // in memory: the parts of all
  int64_t parts() const { return parts_; }  // of a row
  int64_t k() const { return k_; }
  Precision precision() const { return precision_; }
  int64_t stride() const { return stride_; }  // bytes from one row to the next
  const char* data() const { return data_.data(); }
  const float* scales() const { return scales_.data(); }  // int8: the scale of each row; zeros(): its zero point
  const int32_t* zeros() const { return zeros_.data(); }
  // int4: (groups, rows), minus the sum of the bytes of each group of inputs, in the low 16 bits.
  const int32_t* sums() const { return sums_.data(); }

 private:
  int64_t rows_ = 0, parts_ = 1, k_ = 0, stride_ = 0, capacity_ = 0;
  Precision precision_ = Precision::fp32;
  Buffer<char> data_;
  std::vector<float> scales_;
  std::vector<int32_t> zeros_, sums_;
};

// The rows from one of them on, which products read. Rows up to the next multiple of kTileRows may be read as well.
class RowsView {
 public:
  RowsView(const PackedRows& rows, int64_t first = 0) : rows_(rows), first_(first) {}

  RowsView from(int64_t row) const { return {rows_, first_ + row}; }
  int64_t rows() const { return rows_.rows(); }  // of all: the stride of sums()
  int64_t parts() const { return rows_.parts(); }
  int64_t stride() const { return rows_.stride(); }
  const char* data() const { return rows_.data() + first_ * rows_.stride(); }
  const float* scales() const { return rows_.scales() + first_; }
  const int32_t* zeros() const { return rows_.zeros() + first_; }
  const int32_t* sums() const { return rows_.sums() + first_; }

 private:
  const PackedRows& rows_;
  int64_t first_;
};

// Computes out[r * ld + c - 64 * begin] = x[r] . W[c] + b[c] for the first `rows` rows and the columns c of panels
// [begin, end). It writes all 64 columns of a panel, so ld >= 64 * (end - begin). x has the k and the precision of the
// weight, or int4 for a weight of int8. It is fastest for 1 to 64 rows, which read W once, but works for any number.
// If the rows of x have two parts, `out` needs room for 2 * rows, and the second half of it is undefined afterwards.
void gemm(const RowsView& x, int64_t rows, const PackedWeight& w, int64_t begin, int64_t end, float* out, int64_t ld);

// Panels of int8 that aren't those of a PackedWeight, or some of their steps.
struct BytePanels {
  const char *steps, *tail;  // of the first panel
  int64_t num_steps;
  int64_t panel_bytes, tail_bytes;  // from one panel, or PanelTail, to the next
  int64_t columns;
  int64_t first_input = 0;  // of a row: that of the first step
};
// Does the same for all of these panels, without AMX. It writes whole vectors: ld >= round_up(columns, kPanelColumns).
void gemm(const RowsView& x, int64_t rows, const BytePanels& w, float* out, int64_t ld);

// Estimates how long a thread takes for all panels, in units of the bytes that it could read in that time. From about
// 12 rows on (7 for int4), multiplying takes longer than reading.
inline double gemm_work(const RowsView& x, int64_t rows, const PackedWeight& w) {
  constexpr double kRows = 12;
  return std::max(static_cast<double>(w.bytes()), static_cast<double>(rows * x.parts() * w.n * x.stride()) / kRows);
}

}  // namespace fastformer
