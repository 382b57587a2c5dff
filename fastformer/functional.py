"""Functions under PyTorch's names: `scaled_dot_product_attention`, and what its `attn_mask` can be."""

from fastformer.integrations.bias import BlockDiagonal as BlockDiagonal
from fastformer.integrations.bias import Window as Window
from fastformer.integrations.bias import causal_lower_right as causal_lower_right
from fastformer.integrations.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
