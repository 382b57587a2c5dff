// The forward passes of ops that other ops are made of; what they compute is said where they are defined.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace fastformer {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

std::tuple<at::Tensor, at::Tensor> attention_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                 const std::optional<at::Tensor>& attn_mask,
                                                 const std::optional<at::Tensor>& seqlens_k, double softmax_scale,
                                                 std::optional<int64_t> window_left,
                                                 std::optional<int64_t> window_right, double dropout_p,
                                                 const std::optional<at::Tensor>& dropout_seed, double softcap = 0.0);

std::tuple<at::Tensor, at::Tensor> varlen_attention_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                        const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                                        int64_t max_seqlen_q, int64_t max_seqlen_k,
                                                        double softmax_scale, std::optional<int64_t> window_left,
                                                        std::optional<int64_t> window_right, double dropout_p,
                                                        const std::optional<at::Tensor>& dropout_seed,
                                                        double softcap = 0.0);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_fwd(
    const at::Tensor& x, const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps, double dropout_p, const std::optional<at::Tensor>& dropout_seed,
    bool rms_norm);

std::tuple<at::Tensor, at::Tensor> feed_forward_fwd(const at::Tensor& x, const at::Tensor& weight1,
                                                    const std::optional<at::Tensor>& bias1, const at::Tensor& weight2,
                                                    const std::optional<at::Tensor>& bias2, std::string_view activation,
                                                    double dropout_p, const std::optional<at::Tensor>& dropout_seed,
                                                    bool needs_saved);

}  // namespace fastformer
