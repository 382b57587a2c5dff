// Forward passes that other ops call. They are documented where they are defined.

#pragma once

#include <optional>
#include <string_view>
#include <tuple>

#include "common/tensor.h"

namespace fastformer {

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

std::tuple<Tensor, Tensor> attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const OptionalTensor& attn_mask, const OptionalTensor& seqlens_k,
                                         double softmax_scale, std::optional<int64_t> window_left,
                                         std::optional<int64_t> window_right, double dropout_p,
                                         const OptionalTensor& dropout_seed, double softcap = 0.0);

std::tuple<Tensor, Tensor> varlen_attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale,
                                                std::optional<int64_t> window_left, std::optional<int64_t> window_right,
                                                double dropout_p, const OptionalTensor& dropout_seed,
                                                double softcap = 0.0);

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(const Tensor& x, const OptionalTensor& residual,
                                                              const OptionalTensor& weight, const OptionalTensor& bias,
                                                              double eps, double dropout_p,
                                                              const OptionalTensor& dropout_seed, bool rms_norm);

std::tuple<Tensor, Tensor> feed_forward_fwd(const Tensor& x, const Tensor& weight1, const OptionalTensor& bias1,
                                            const Tensor& weight2, const OptionalTensor& bias2,
                                            std::string_view activation, double dropout_p,
                                            const OptionalTensor& dropout_seed, bool needs_saved);

}  // namespace fastformer
