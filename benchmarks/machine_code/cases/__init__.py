"""The cases of the compile report: one module per stem, each with `cases(quick)`, which yields (title, call).

A module whose kernels are only for some architectures lists them in ARCHITECTURES.
"""

from collections.abc import Collection

import torch

# For stems with too many cases for a reader, the pattern that selects those of `--usual` by their titles.
USUAL = {
    "add_layer_norm": r"bf16 d(512|4096) residual\+affine\+dropout|bf16 d(1024|4096) fp32 residual"
    r"|bf16 d512 (affine|residual\+affine\+rms norm)",
    "attention": r"bf16 d(64|128) (?!n\d|deterministic)|bf16 d256 (full|causal|causal\+dropout|window|causal\+softcap)$"
    r"|fp32 d64 causal",
    "decode_attention": r"bf16 d(64|128) |fp32 d64 |(bf16 d256|fp32 d128) step table gqa",
    "embedding": r"bf16 d(512|4096) positions\+dropout|bf16 d512 plain",
    "feed_forward": r"bf16 d512 (relu|(relu|gelu|swiglu) cublas|relu no dropout)$"
    r"|bf16 d512 n1024 relu|fp32 d512 relu cublas",
    "linear_cross_entropy": r"bf16 v32000 (plain|smooth|bias)|fp32 v32000 smooth|bf16 v256000 softcap",
    "rotary": r"bf16 d64 (half|interleaved|of 32 half)|fp32 d64 half",
}


def dropout_of(options: Collection[str]) -> tuple[float, torch.Tensor | None]:
    """Returns (dropout_p, dropout_seed) of a call with these options."""
    return (0.1, torch.empty(2, dtype=torch.int64, device="cuda")) if "dropout" in options else (0.0, None)
