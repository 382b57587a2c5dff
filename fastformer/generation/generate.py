"""`fastformer.generate`: decoding with Hugging Face's argument names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastformer.generation.engine import GPTEngine, RecurrentEngine, TransformerEngine
from fastformer.generation.processors import Processing
from fastformer.generation.search import Sampling, beam_search, choose_rows
from fastformer.nn import SequenceLayout

EXTRA_LENGTH = 100  # a translation may be this much longer than its source (tensor2tensor)


@dataclass
class GenerateOutput:
    """What `generate(..., return_dict_in_generate=True)` returns.

    Attributes:
        sequences: (batch * num_return_sequences, length) ids; see `generate`.
        scores: (batch * num_return_sequences,) fp32: the log-probability of each sequence, for beams divided by the
            length penalty.
    """

    sequences: Tensor
    scores: Tensor


def generate(
    model: Any,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    min_new_tokens: int = 0,
    num_beams: int = 1,
    length_penalty: float = 0.6,
    early_stopping: bool = False,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    num_return_sequences: int = 1,
    eos_token_id: int = 1,
    pad_token_id: int = 0,
    use_cache: bool = True,
    rung: str | None = None,
    seed: int | None = None,
    return_dict_in_generate: bool = False,
) -> Tensor | GenerateOutput:
    """Decodes a batch: greedy by default, beam search with num_beams > 1, sampling with do_sample.

    Args:
        model: a `models.Transformer` (input_ids are sources) or `models.GPT` (input_ids are prompts). It runs as it
            is: call `model.eval()` first, or dropout is on.
        input_ids: (batch, seqlen) ids, padded on either side.
        attention_mask: (batch, seqlen), 1 = keep, 0 = padding; None: ids equal to pad_token_id are padding.
        max_new_tokens: None: for a translation the source's length + 100, for a prompt what max_len leaves.
        min_new_tokens: no EOS before so many.
        num_beams: hypotheses that are followed.
        length_penalty: alpha of ((5 + length) / 6) ** alpha, which divides a beam's score (tensor2tensor).
        early_stopping: stop a beam search when num_beams hypotheses are finished, better ones possible or not.
        do_sample: draw from the distribution, after temperature, top_k and top_p.
        repetition_penalty, no_repeat_ngram_size: see `Processing`; they look at generated tokens.
        num_return_sequences: at most num_beams for a beam search.
        eos_token_id, pad_token_id: the ids.
        use_cache: False recomputes everything for each token.
        rung: the memory to decode with, see `generation.engine`; overrides use_cache.
        seed: of the sampling; None: the default generator.
        return_dict_in_generate: return a `GenerateOutput`.

    Returns:
        (batch * num_return_sequences, length) ids: for a Transformer the new tokens, ending in EOS and then PAD; for a
        GPT the prompts (padded on the left) and the new tokens.

    Raises:
        ValueError: settings that contradict each other, an empty prompt, no room for a token.
    """
    _check(locals())
    rung = rung or ("cached" if use_cache else "naive")
    with torch.inference_mode():
        inputs, layout = _right_padded(input_ids, attention_mask, pad_token_id)
        decoder_only = not hasattr(model, "encode")
        max_new_tokens = _room(model, inputs.shape[1], decoder_only, max_new_tokens)
        if num_beams == 1:  # each sample decodes an input of its own
            inputs = inputs.repeat_interleave(num_return_sequences, 0)
            layout = SequenceLayout.padded(layout.seqlens.repeat_interleave(num_return_sequences), layout.max_seqlen)
        has_cache = hasattr(model, "new_cache")
        make: Any = GPTEngine if decoder_only else TransformerEngine if has_cache else RecurrentEngine
        engine = make(model, inputs, layout, num_beams, max_new_tokens, rung)
        processing = Processing(min_new_tokens, repetition_penalty, no_repeat_ngram_size)
        if num_beams > 1:
            found, found_scores = beam_search(
                engine,
                num_beams,
                max_new_tokens,
                eos_token_id,
                pad_token_id,
                processing,
                length_penalty,
                num_return_sequences,
                early_stopping,
            )
            sequences, scores = found.flatten(0, 1), found_scores.flatten()
        else:
            sampling = None
            if do_sample:
                generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
                sampling = Sampling(temperature, top_k, top_p, generator)
            sequences, scores = choose_rows(engine, max_new_tokens, eos_token_id, pad_token_id, processing, sampling)
        if decoder_only:
            prompts = _left_padded(inputs, layout, pad_token_id)
            if num_beams > 1:
                prompts = prompts.repeat_interleave(num_return_sequences, 0)
            sequences = torch.cat((prompts, sequences), 1)
    # Tensors of inference mode can't enter a graph; copies made outside of it can.
    sequences, scores = sequences.clone(), scores.clone()
    return GenerateOutput(sequences, scores) if return_dict_in_generate else sequences


def _room(model: Any, seqlen: int, decoder_only: bool, wanted: int | None) -> int:
    """How many tokens may be made: what is wanted, or by default as much as makes sense, within the model's max_len."""
    max_len = model.config.max_len
    room = max_len - seqlen if decoder_only else max_len
    if wanted is None:
        wanted = room if decoder_only else min(seqlen + EXTRA_LENGTH, room)
    if wanted > room or room < 1:
        raise ValueError(
            f"expected at most {max(room, 0)} new tokens behind {seqlen}, for the model's max_len is {max_len}; "
            f"got max_new_tokens {wanted}"
        )
    return wanted


def _right_padded(ids: Tensor, attention_mask: Tensor | None, pad_id: int) -> tuple[Tensor, SequenceLayout]:
    """The ids with their padding moved to the right, and their layout."""
    if attention_mask is None:
        keep = ids != pad_id
    else:
        if attention_mask.shape != ids.shape:
            raise ValueError(
                f"expected attention_mask of input_ids' shape {tuple(ids.shape)}, got {tuple(attention_mask.shape)}"
            )
        keep = attention_mask.bool()
    seqlens = keep.sum(1)
    if bool((seqlens == 0).any()):
        raise ValueError("expected at least one token in each input, got an empty one")
    order = (~keep).long().argsort(dim=1, stable=True)
    width = int(seqlens.max())
    return ids.gather(1, order)[:, :width], SequenceLayout.padded(seqlens, width)


def _left_padded(ids: Tensor, layout: SequenceLayout, pad_id: int) -> Tensor:
    width = ids.shape[1]
    position = torch.arange(width, device=ids.device) - (width - layout.seqlens[:, None])
    return torch.where(position >= 0, ids.gather(1, position.clamp(min=0).long()), pad_id)


def _check(given: dict[str, Any]) -> None:
    input_ids, beams, returned = given["input_ids"], given["num_beams"], given["num_return_sequences"]
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.shape[0] == 0:
        raise ValueError(
            f"expected input_ids (batch, seqlen) of integers, got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if beams < 1 or returned < 1:
        raise ValueError(f"expected num_beams and num_return_sequences of at least 1, got {beams} and {returned}")
    if given["do_sample"] and beams > 1:
        raise ValueError("expected do_sample or num_beams > 1, got both")
    if beams > 1 and returned > beams:
        raise ValueError(f"expected num_return_sequences of at most num_beams {beams}, got {returned}")
    if beams == 1 and returned > 1 and not given["do_sample"]:
        raise ValueError("expected num_return_sequences 1 for greedy decoding; use num_beams or do_sample for more")
    if given["temperature"] <= 0 or not 0 < given["top_p"] <= 1 or given["top_k"] < 0:
        raise ValueError(
            "expected temperature > 0, top_p in (0, 1] and top_k >= 0, got "
            f"{given['temperature']}, {given['top_p']} and {given['top_k']}"
        )
    if given["repetition_penalty"] <= 0 or given["no_repeat_ngram_size"] < 0:
        raise ValueError(
            "expected repetition_penalty > 0 and no_repeat_ngram_size >= 0, got "
            f"{given['repetition_penalty']} and {given['no_repeat_ngram_size']}"
        )
    if given["max_new_tokens"] is not None and given["max_new_tokens"] < 1:
        raise ValueError(f"expected max_new_tokens of at least 1, got {given['max_new_tokens']}")
