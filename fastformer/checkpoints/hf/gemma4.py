"""Gemma 4 (Google DeepMind 2026), for text without pictures and sounds, and without experts.

Its layers without a window have heads of another size, and may make values of their keys; the last layers may read the
keys and values of layers before them; and each layer may have embeddings of its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastformer.checkpoints.hf.common import flag_of, number_of
from fastformer.checkpoints.hf.decoder import MisfitError
from fastformer.checkpoints.hf.gemma import ACTIVATIONS, FOUR_NORMS
from fastformer.checkpoints.hf.llama import FULL, QK_NORMS, SLIDING, Names, Variant, all_but_each
from fastformer.models import GPTConfig

logger = logging.getLogger("fastformer")

_ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
# Names of rotary positions in other families. transformers 5 reads none of them here but rope_scaling.
_OLD = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")
_INSIDE, _OUTER = "model.language_model.", "model."  # the prefixes of the text's tensors in a whole, and of all parts
_PER_LAYER = ("head_dim", "num_key_value_heads")
_TABLE = "layer_embedding.embedding.weight"
_INPUT = {
    "gate": "per_layer_input_gate",
    "projection": "per_layer_projection",
    "norm": "post_per_layer_input_norm",
}
# Modules whose tensors a file may have for a layer that reads the keys of another one. No pass reads these.
_UNREAD = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.self_attn\.[kv]_(?:proj|norm)\.")


def _types(settings: Mapping[str, Any], depth: int) -> list[str]:
    """Returns the kinds of the layers; transformers gives the last one no window, whatever the settings say."""
    listed = settings.get("layer_types")
    types = all_but_each(6)(settings, depth) if listed is None else listed
    if not isinstance(types, list | tuple) or not types:
        raise ValueError(f"expected layer_types to be a list with an entry for each layer, got {types!r:.80}")
    return [*types[:-1], FULL]


def _differing(settings: Mapping[str, Any], types: list[str]) -> dict[str, int]:
    """Returns the head_dim and the num_key_value_heads of layers without a window, where the settings have others.

    Raises:
        ValueError: layers of one kind differ, or layers with a window have values of their own.
    """
    listed = settings.get("per_layer_config")
    if listed is None:
        own = {"head_dim": 512 if settings.get("global_head_dim") is None else number_of(settings, "global_head_dim")}
        if flag_of(settings, "attention_k_eq_v", False) and settings.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = number_of(settings, "num_global_key_value_heads")
        return own
    if not isinstance(listed, Mapping) or not all(isinstance(each, Mapping) for each in listed.values()):
        raise ValueError(f"expected per_layer_config to be a mapping of layers to settings, got {listed!r:.80}")
    of_layers = {str(layer): {**each} for layer, each in listed.items()}
    expected = next((of_layers[str(i)] for i, kind in enumerate(types) if kind == FULL and str(i) in of_layers), {})
    for i, kind in enumerate(types):
        if of_layers.get(str(i), {}) != (expected if kind == FULL else {}):
            raise ValueError(
                "expected per_layer_config to have the same settings for all layers without a window, and none for "
                f"others, got {of_layers.get(str(i), {})} for layer {i}"
            )
    if unknown := expected.keys() - {*_PER_LAYER}:
        raise ValueError(f"expected per_layer_config of {_PER_LAYER}, got {min(unknown)!r}")
    return {name: number_of(expected, name) for name in expected}


def _more(settings: Mapping[str, Any]) -> dict[str, Any]:
    if flag_of(settings, "enable_moe_block", False):
        raise ValueError("expected enable_moe_block to be false, since no layer here has experts beside a network")
    if settings.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ValueError(
            "expected use_bidirectional_attention of 'vision' (which concerns no text) or none, got "
            f"{settings['use_bidirectional_attention']!r:.60}"
        )
    shared = number_of(settings, "num_kv_shared_layers", 0)
    options: dict[str, Any] = {
        "embedding_scale": settings["hidden_size"] ** 0.5,
        "keys_as_values": flag_of(settings, "attention_k_eq_v", False),
        "shared_kv_layers": shared,
    }
    if (cap := settings.get("final_logit_softcapping")) is not None:
        options["logit_softcap"] = cap
    if shared and flag_of(settings, "use_double_wide_mlp", False):
        options["shared_kv_d_ff"] = 2 * number_of(settings, "intermediate_size")
    if (size := number_of(settings, "hidden_size_per_layer_input", 0)) > 0:
        options["layer_input_dim"] = size
    return options


def _more_settings(config: GPTConfig) -> dict[str, Any]:
    if config.embedding_scale != (expected := config.d_model**0.5):
        raise ValueError(f"expected a Gemma 4, with embedding_scale={expected}, got {config.embedding_scale}")
    if config.windows[-1]:
        raise ValueError("expected a Gemma 4, whose last layer has no window, got one with a window")
    if config.shared_kv_d_ff not in (None, config.d_ff, 2 * (config.d_ff or 0)):
        raise MisfitError(
            "shared_kv_d_ff",
            f"expected a Gemma 4, with shared_kv_d_ff of d_ff or twice that, got {config.shared_kv_d_ff}",
        )
    kv_heads, head_dim = config.heads_of(False)
    own = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
    return {
        "final_logit_softcapping": config.logit_softcap,
        "per_layer_config": {str(i): own for i, has_window in enumerate(config.windows) if not has_window},
        "attention_k_eq_v": config.keys_as_values,
        "num_kv_shared_layers": config.shared_kv_layers,
        "use_double_wide_mlp": config.shared_kv_d_ff == 2 * (config.d_ff or 0),
        "hidden_size_per_layer_input": config.layer_input_dim or 0,
        "vocab_size_per_layer_input": config.vocab_size,
    }


def _renamed(names: Names, config: GPTConfig) -> Names:
    for i in range(config.num_layers):
        own, place = f"decoder.layers.{i}", f"layers.{i}"
        count = config.kv_projections_of(i)
        for kind in ("weight", "bias"):
            if (name := f"{own}.self_attn.in_proj_{kind}") in names:
                names[name] = names[name][: 1 + count]
        if count == 0:
            del names[f"{own}.self_attn.k_norm.weight"]
        names[f"{own}.layer_scalar"] = (f"{place}.layer_scalar",)
        if config.layer_input_dim is not None:
            for ours, theirs in _INPUT.items():
                names[f"{own}.layer_input.{ours}.weight"] = (f"{place}.{theirs}.weight",)
    if config.layer_input_dim is not None:
        names[_TABLE] = ("embed_tokens_per_layer.weight",)
        names["layer_embedding.projection.weight"] = ("per_layer_model_projection.weight",)
        names["layer_embedding.norm.weight"] = ("per_layer_projection_norm.weight",)
    return names


def _opened(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the text's tensors by their names in a model without pictures and sounds, but none that is not read."""
    if any(name.startswith(_INSIDE) for name in state):
        left = {name.split(".")[1] for name in state if name.startswith(_OUTER) and not name.startswith(_INSIDE)}
        if left:
            logger.warning("The model reads text alone: these parts are left out: %s", ", ".join(sorted(left)))
        text = {name: t for name, t in state.items() if name.startswith(_INSIDE) or not name.startswith(_OUTER)}
        state = {name.replace(_INSIDE, _OUTER, 1): tensor for name, tensor in text.items()}
    depth, shared = settings.get("num_hidden_layers"), settings.get("num_kv_shared_layers")
    if not isinstance(depth, int) or not isinstance(shared, int):
        return dict(state)

    def is_read(name: str) -> bool:
        found = _UNREAD.search(name)
        return found is None or int(found[1]) < depth - shared

    return {name: tensor for name, tensor in state.items() if is_read(name)}


def _cut(name: str, tensor: Tensor, config: GPTConfig) -> Tensor:
    # A table for each layer's embeddings may have rows for ids that no vocabulary has.
    return tensor[: config.vocab_size] if name == _TABLE and tensor.shape[0] > config.vocab_size else tensor


class _Gemma4(Variant):
    def _options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        settings = {**self.usual, **settings}
        for name in ("rope_parameters", "rope_scaling"):
            rope = settings.get(name)
            if rope is not None and not (isinstance(rope, Mapping) and FULL in rope):
                raise ValueError(f"expected {name} with those of each kind of layers, got {rope!r:.80}")
        if settings.get("rope_scaling") is not None:  # transformers' other name for them
            settings["rope_parameters"] = settings["rope_scaling"]
        settings = {name: value for name, value in settings.items() if name not in _OLD}
        types = _types(settings, number_of(settings, "num_hidden_layers"))
        settings["layer_types"] = types
        rope = settings.get("rope_parameters") or {}
        if isinstance(full := rope.get(FULL), Mapping):
            if full.get("rope_type", "default") == "default":  # no pass reads the part of a default rotation
                full = {name: value for name, value in full.items() if name != "partial_rotary_factor"}
            settings["rope_parameters"] = {**rope, FULL: full}
        own = _differing(settings, types)
        if SLIDING not in types:
            return super()._options({**settings, **own})
        options = super()._options(settings)
        usual = options.get("head_dim", options["d_model"] // options["num_heads"])
        if own.get("head_dim", usual) != usual:
            options["global_head_dim"] = own["head_dim"]
            options.setdefault("local_rotary_base", options["rotary_base"])
        if own.get("num_key_value_heads", options["num_kv_heads"]) != options["num_kv_heads"]:
            options["global_num_kv_heads"] = own["num_key_value_heads"]
        return options

    def _settings(self, config: GPTConfig) -> dict[str, Any]:
        return {name: value for name, value in super()._settings(config).items() if name not in _OLD}


VARIANT = _Gemma4(
    "gemma4_text",
    "Gemma 4",
    modules={**FOUR_NORMS, **QK_NORMS},
    usual={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
    },
    fixed={
        "norm": "rms",
        "norm_placement": "both",
        "qk_norm": "head",
        "value_norm": True,
        "attention_scale": 1.0,
        "layer_scalars": True,
    },
    biases=("attention_bias", "attention_bias", False),
    layer_types=_types,
    rope=_ROPE,
    base=1_000_000.0,
    local_base=10_000.0,
    grows=False,
    activations=ACTIVATIONS,
    activation_settings=("hidden_activation",),
    is_tied=True,
    more=_more,
    more_settings=_more_settings,
    free=("embedding_scale", "logit_softcap", "global_head_dim", "global_num_kv_heads", "keys_as_values",
          "shared_kv_layers", "shared_kv_d_ff", "layer_input_dim"),
    rename=_renamed,
    convert=_cut,
    open=_opened,
)  # fmt: skip
FORMS = {VARIANT.kind: VARIANT.form}
