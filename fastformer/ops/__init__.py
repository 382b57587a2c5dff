"""The ops: documented functions over fused kernels, with plain PyTorch as the reference.

This is the only layer that knows backends.
"""

from fastformer.ops import _oldest_torch as _oldest_torch  # first
from fastformer.ops._dispatch import record_backends as record_backends
from fastformer.ops._dispatch import use_backend as use_backend
from fastformer.ops._dropout import draw_seed as draw_seed
from fastformer.ops.add_layer_norm import add_layer_norm as add_layer_norm
from fastformer.ops.attention import attention as attention
from fastformer.ops.attention_weights import attention_weights as attention_weights
from fastformer.ops.decode_attention import decode_attention as decode_attention
from fastformer.ops.embedding import embedding as embedding
from fastformer.ops.embedding import sinusoidal_positions as sinusoidal_positions
from fastformer.ops.feed_forward import feed_forward as feed_forward
from fastformer.ops.linear import linear as linear
from fastformer.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from fastformer.ops.linear_topk import TopK as TopK
from fastformer.ops.linear_topk import linear_topk as linear_topk
from fastformer.ops.rotary import rotary as rotary
from fastformer.ops.rotary import rotary_tables as rotary_tables
from fastformer.ops.varlen_attention import varlen_attention as varlen_attention
