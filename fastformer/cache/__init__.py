"""The KV cache of decoding, in blocks that requests take, share and release."""

from fastformer.cache.block_pool import CacheFullError as CacheFullError
from fastformer.cache.fixed_shape import FixedShapeCache as FixedShapeCache
from fastformer.cache.kv_cache import KVCache as KVCache
from fastformer.cache.layer_view import AttentionCache as AttentionCache
from fastformer.cache.layer_view import LayerCache as LayerCache
from fastformer.cache.layer_view import StepTables as StepTables
