"""Options as people know them from elsewhere: names that are nearly ours, and a GenerationConfig of transformers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What other toolkits call our options.
_ELSEWHERE = {
    "beam_size": "num_beams",
    "beam_width": "num_beams",
    "n_best": "num_return_sequences",
    "max_tokens": "max_new_tokens",
    "max_gen_len": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "inputs": "input_ids",
    "sampling_temperature": "temperature",
    "sampling_topk": "top_k",
    "stop": "stop_strings",
    "stop_token_ids": "eos_token_id",
    "prefix_allowed_tokens_fn": "logits_processor",
    "begin_suppress_tokens": "logits_processor",
    "sequence_bias": "logits_processor",
}
_SAMPLING = ("temperature", "top_k", "top_p")
_TOP_K = 50  # of transformers, where a config that samples doesn't say
# What a GenerationConfig holds beside options, or what has no consequence here.
_NO_OPTIONS = ("transformers_version", "bos_token_id", "output_attentions", "output_hidden_states", "output_scores",
               "output_logits", "cache_implementation", "cache_config", "return_dict_in_generate")  # fmt: skip


def check_names(names: Iterable[object], known: Sequence[str]) -> None:
    """Holds the names of options against those that there are.

    Raises:
        ValueError: one that there isn't; the nearest one is suggested.
    """
    for name in names:
        if name not in known:
            near = [_ELSEWHERE[str(name)]] if _ELSEWHERE.get(str(name)) in known else []
            near = near or difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise ValueError(f"there is no option {name!r} here{hint}")


def with_config(options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Options with those of their "generation_config", which go behind those that are given by name.

    The numbers of such a config mean what they mean in transformers: where the options don't say otherwise, the search
    follows its rules, samples come from the 50 best tokens, and scores aren't normalised again.

    Args:
        options: of generate.
        known: the names that a config may hold.

    Raises:
        ValueError: something else than a config, or an option in it that there isn't here.
    """
    found = dict(options)
    config = found.pop("generation_config", None)
    if config is None:
        return found
    stated = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config
    if not isinstance(stated, Mapping):
        raise ValueError(
            f"expected generation_config to be transformers' GenerationConfig or a mapping, got {type(config).__name__}"
        )
    said = {
        name: value
        for name, value in stated.items()
        if value is not None and name not in _NO_OPTIONS and not str(name).startswith("_")
    }
    try:
        check_names(said, known)
    except ValueError as error:
        raise ValueError(f"expected a generation_config of options that are known here: {error}") from None
    said.setdefault("beam_rules", "transformers")
    merged = {**said, **found}
    if merged["beam_rules"] == "transformers":
        merged.setdefault("renormalize_logits", False)
    if merged.get("do_sample", False):
        merged.setdefault("top_k", _TOP_K)
    else:
        for name in _SAMPLING:
            if name not in found:
                merged.pop(name, None)  # it says nothing there
    return merged
