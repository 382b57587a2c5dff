"""Options in the forms of other toolkits: names that resemble fastformer's, and transformers' GenerationConfig."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Other toolkits' names of fastformer's options.
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
# Options of other toolkits that have no counterpart here, and why.
_NOWHERE = {
    "use_vmap": "a folder's vmap.txt is not read: the shortlist of words would be that of all texts of a batch, and a "
    "translation would depend on the texts beside it",
}
_SAMPLING = ("temperature", "top_k", "top_p")
_TOP_K = 50  # the default of a config that samples, in transformers
# Fields of a GenerationConfig that aren't options of decoding, or have no effect here.
_NO_OPTIONS = ("transformers_version", "bos_token_id", "output_attentions", "output_hidden_states", "output_scores",
               "output_logits", "cache_implementation", "cache_config", "return_dict_in_generate")  # fmt: skip


def check_names(names: Iterable[object], known: Sequence[str]) -> None:
    """Checks the names of options.

    Raises:
        ValueError: an unknown name; the nearest one is suggested.
    """
    for name in names:
        if name not in known:
            if str(name) in _NOWHERE:
                raise ValueError(f"there is no option {name!r} here; {_NOWHERE[str(name)]}")
            near = [_ELSEWHERE[str(name)]] if _ELSEWHERE.get(str(name)) in known else []
            near = near or difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise ValueError(f"there is no option {name!r} here{hint}")


def with_config(options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Merges options with those in their "generation_config"; options that are given by name have priority.

    The values in a GenerationConfig mean the same as in transformers. Unless the options differ, beams follow
    transformers' rules, and samples are drawn from the 50 best tokens.

    Args:
        options: the keyword arguments of generate.
        known: the names that a config may contain.

    Raises:
        ValueError: generation_config isn't a config, or contains an option that fastformer doesn't have.
    """
    given = dict(options)
    config = given.pop("generation_config", None)
    if config is None:
        return given
    stated = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config
    if not isinstance(stated, Mapping):
        raise ValueError(
            f"expected generation_config to be transformers' GenerationConfig or a mapping, got {type(config).__name__}"
        )
    of_config = {
        name: value
        for name, value in stated.items()
        if value is not None and name not in _NO_OPTIONS and not str(name).startswith("_")
    }
    try:
        check_names(of_config, known)
    except ValueError as error:
        raise ValueError(f"expected a generation_config of options that are known here: {error}") from None
    of_config.setdefault("beam_rules", "transformers")
    merged = {**of_config, **given}
    if merged.get("do_sample", False):
        merged.setdefault("top_k", _TOP_K)
    else:
        for name in _SAMPLING:
            if name not in given:
                merged.pop(name, None)  # without do_sample, these have no effect in transformers
    return merged
