// Attention of int8 models over whole numbers of 8 bits: for encoders, and for sources whose keys and values are
// packed.
//
// A key and a value are rounded as those of a cache of 8 bits are (int8_cache.h), each with a scale of its own. A query
// is rounded as the rows of other products are (packed_gemm.h), so its product with the keys is one of int8. The
// weights of the softmax, times the scales of the values, become 16 bits, as two rows of bytes: 8 would lose the many
// small ones of a long text beside a large one. With dot products of bytes, the product with the keys takes a quarter
// of the instructions of fp32, and the one with the values half of them.

#pragma once

#include "engine/block_attention.h"
#include "engine/packed_gemm.h"

namespace fastformer {

class Int8Head {
 public:
  static constexpr int64_t kSlice = kPanelColumns, kWidth = kPanelColumns;

  // Whether the CPU has dot products of bytes, and no matrix unit, by which PackedHead multiplies bf16.
  static bool is_fast();

  // See PackedHead.
  void reserve(int64_t count, int64_t dim);
  // Takes the mean of keys, `stride` apart, from those that are stored. A product with it is the same for all keys, so
  // a softmax loses nothing, and an offset that keys share doesn't take the place of what tells them apart.
  void centre(const float* keys, int64_t stride, int64_t count);
  void store(int64_t i, const float* k, const float* v);
  // Does the same for a key and a value that are rounded already.
  void store_bytes(int64_t i, const int8_t* k, float k_scale, const int8_t* v, float v_scale);
  static int64_t bytes(int64_t count, int64_t dim);
  void pack_into(int64_t count, char* memory);
  void use(const char* memory, int64_t count, int64_t dim);
  void pack(int64_t count);
  template <typename First, typename End, typename Bias>
  void attend(const float* q, int64_t q_stride, int64_t rows, float scale2, First first, End end, Bias bias, float* out,
              int64_t out_stride, bool /*few_rows*/ = false, const float* /*value_scales*/ = nullptr) {
    attend_by(*this, q, q_stride, rows, scale2, first, end, bias, out, out_stride);
  }

  // What attend_by needs.
  int64_t dim() const { return dim_; }
  int64_t sums_stride() const { return round_up(dim_, kPanelColumns); }
  float* multiply_keys(const float* q, int64_t q_stride, int64_t rows, const Seen& seen);
  float weigh(int64_t row, float* x, float lowered, float scale2, const Seen& seen);
  const float* multiply_values(int64_t rows, const Seen& seen);
  void release() {}

 private:
  void pad(int64_t i);

  int64_t count_ = 0, dim_ = 0;
  const char *packed_keys_ = nullptr, *packed_values_ = nullptr;
  const float* packed_scales_ = nullptr;
  std::vector<char> memory_;
  std::vector<int8_t> key_rows_, value_rows_;  // in whole vectors: of round_up(dim, kPanelColumns)
  std::vector<float> key_scales_, value_scales_;
  PackedRows queries_, weights_;
  std::vector<float> scores_, sums_, origin_, centred_;
};

// Calls f.operator()<Head>() with the attention to `count` keys (see block_attention.h) in a model of the precision:
// over fp32, over bf16, or, for int8 and int4, over whole numbers of 8 bits if they are many and the CPU multiplies
// bytes fast. On Emerald Rapids, whose dot products of bf16 are slow, int8 took 0.7 to 0.8 times as long for 512 and
// more tokens of an encoder, and as long for 128. The CPUs that have AMX multiply bf16 by it.
constexpr int64_t kFewestInt8Keys = 256;
template <typename F>
void with_head(Precision precision, int64_t count, F&& f) {
  if (precision == Precision::fp32) f.template operator()<PackedHead<float>>();
  else if (precision != Precision::bf16 && count >= kFewestInt8Keys && Int8Head::is_fast())
    f.template operator()<Int8Head>();
  else f.template operator()<PackedHead<bfloat16>>();
}

}  // namespace fastformer
