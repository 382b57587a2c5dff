"""Modules: parameters plus one call into ops. torch.nn's names, signatures and state_dict keys."""

from fastformer.cache.kv_cache import KVCache as KVCache
from fastformer.nn.attention import MultiheadAttention as MultiheadAttention
from fastformer.nn.embedding import Embedding as Embedding
from fastformer.nn.embedding import PositionalEncoding as PositionalEncoding
from fastformer.nn.embedding import RelativePositionBias as RelativePositionBias
from fastformer.nn.embedding import RotaryEmbedding as RotaryEmbedding
from fastformer.nn.feed_forward import FeedForward as FeedForward
from fastformer.nn.layers import TransformerDecoderLayer as TransformerDecoderLayer
from fastformer.nn.layers import TransformerEncoderLayer as TransformerEncoderLayer
from fastformer.nn.layout import SequenceLayout as SequenceLayout
from fastformer.nn.loss import LinearCrossEntropy as LinearCrossEntropy
from fastformer.nn.mixture import MixtureOfExperts as MixtureOfExperts
from fastformer.nn.norm import AddLayerNorm as AddLayerNorm
from fastformer.nn.transformer import Transformer as Transformer
from fastformer.nn.transformer import TransformerDecoder as TransformerDecoder
from fastformer.nn.transformer import TransformerEncoder as TransformerEncoder
