"""The settings of a Gemma 4 in a GGUF file, whose layers with and without a window have sizes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastformer.checkpoints.gguf.file import GGUF

SLIDING, FULL = "sliding_attention", "full_attention"
_SETTINGS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "num_attention_heads":
    "attention.head_count", "max_position_embeddings": "context_length", "sliding_window":
    "attention.sliding_window", "head_dim": "attention.key_length_swa", "global_head_dim": "attention.key_length",
}  # fmt: skip
_OPTIONAL = {
    "final_logit_softcapping": "final_logit_softcapping", "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}  # fmt: skip
_UNROTATED = 1e30  # the divisor of what llama.cpp doesn't rotate


def gemma4_settings(file: GGUF, values: Any, divisors: Tensor | None) -> dict[str, Any]:
    """Returns the settings of the family in transformers.

    Args:
        file: the file.
        values: its `_Values`.
        divisors: those of the rotations of layers without a window; None: all of their features are rotated.

    Raises:
        ValueError: a value is missing, contradicts others, or means something that the family doesn't have.
    """
    settings: dict[str, Any] = {name: int(values.number(key)) for name, key in _SETTINGS.items()}
    settings["rms_norm_eps"] = values.number("attention.layer_norm_rms_epsilon")
    settings |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, **values.settings(_OPTIONAL)}
    for name in ("swa", "full"):
        end = "_swa" if name == "swa" else ""
        keys, own = (values.number(f"attention.{part}_length{end}") for part in ("key", "value"))
        if keys != own:
            raise ValueError(f"expected keys and values of one length, got {keys} and {own}")
    depth = settings["num_hidden_layers"]
    pattern = _each(values.raw("attention.sliding_window_pattern"), depth, "attention.sliding_window_pattern")
    types = [SLIDING if has_window else FULL for has_window in pattern]
    heads = _each(values.raw("attention.head_count_kv"), depth, "attention.head_count_kv")
    by_kind = {kind: {count for count, own in zip(heads, types, strict=True) if own == kind} for kind in types}
    if any(len(counts) > 1 for counts in by_kind.values()):
        raise ValueError(f"expected one attention.head_count_kv for layers of a kind, got {heads!r:.80}")
    settings["num_key_value_heads"] = min(by_kind.get(SLIDING, by_kind[types[0]]))
    settings["num_global_key_value_heads"] = min(by_kind.get(FULL, by_kind[types[0]]))
    sizes, shared = (
        _each(values.raw("feed_forward_length"), depth, "feed_forward_length"),
        depth - settings["num_kv_shared_layers"],
    )
    wide = [size // sizes[0] if sizes[0] else 0 for size in sizes]
    is_wide = depth > shared and wide[-1] == 2
    if wide != [1 + (is_wide and layer >= shared) for layer in range(depth)]:
        raise ValueError(
            f"expected feed_forward_length of one size, or twice that in layers that share keys, got {sizes}"
        )
    full = {"rope_type": "proportional", "rope_theta": values.number("rope.freq_base"), "partial_rotary_factor": 1.0}
    if divisors is not None:
        turned = int((divisors == 1).sum())
        if not bool((divisors[:turned] == 1).all() and (divisors[turned:] >= _UNROTATED / 2).all()):
            raise ValueError("expected rope_freqs of 1, and then of about 1e30 for what isn't rotated")
        full["partial_rotary_factor"] = turned / max(1, len(divisors))
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10_000.0)}
    if (size := values.raw("rope.dimension_count_swa")) not in (None, settings["head_dim"]):
        raise ValueError(f"expected layers with a window to rotate whole heads, got {size!r:.40} features")
    table = file.tensors.get("per_layer_token_embd.weight")
    return settings | {
        "layer_types": types,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": is_wide,
        "vocab_size_per_layer_input": table.shape[0] if table is not None else 0,
        "rope_parameters": {SLIDING: local, FULL: full},
        "attention_k_eq_v": not all(
            f"blk.{layer}.attn_v.weight" in file.tensors for layer, kind in enumerate(types[:shared]) if kind == FULL
        ),
    }


def _each(value: Any, depth: int, name: str) -> Sequence[int]:
    """Returns a number for each layer, of a list or of one number."""
    given = value if isinstance(value, list) else [value] * depth
    if len(given) < depth or not depth or not all(isinstance(one, int) for one in given):
        raise ValueError(f"expected {name} of {depth} layers, got {value!r:.60}")
    return given[:depth]
