"""`fastformer.generate`: decoding with Hugging Face's argument names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastformer.generation.decoders import Model, as_model, device_of, is_decoder_only
from fastformer.generation.engine import make_engine
from fastformer.generation.inputs import TokenIds, as_batch, left_padded, right_padded
from fastformer.generation.processors import Processing
from fastformer.generation.search import Sampling, beam_search, choose_rows
from fastformer.generation.settings import GenerationSettings
from fastformer.nn import SequenceLayout

EXTRA_LENGTH = 100  # a translation may be this much longer than its source (tensor2tensor)


@dataclass
class GenerateOutput:
    """What `generate(..., return_dict_in_generate=True)` returns.

    Attributes:
        sequences: (batch * num_return_sequences, length) ids; see `generate`.
        scores: (batch * num_return_sequences,) fp32: the log-probability of each sequence, for beams divided by the
            length penalty; -inf for a row that is no hypothesis, see `generate`.
    """

    sequences: Tensor
    scores: Tensor


def generate(
    model: Model | nn.Module,
    input_ids: TokenIds,
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
        model: a `models.Transformer` or `baseline.LSTMSeq2Seq` (input_ids are sources), or a `models.GPT` (input_ids
            are prompts). It runs as it is: call `model.eval()` first, or dropout is on.
        input_ids: (batch, seqlen) integers, padded on either side, as a tensor or an array; (seqlen,) is a batch of
            one. Or a list of ids, or a list of such lists, which may differ in length. They are moved to the model's
            device.
        attention_mask: (batch, seqlen), 1 = keep, 0 = padding; None: ids equal to pad_token_id are padding.
        max_new_tokens: None: for a source its own length + 100, at most the model's max_len; for prompts what max_len
            leaves behind the longest.
        min_new_tokens: no EOS before so many.
        num_beams: hypotheses that are followed.
        length_penalty: alpha of ((5 + length) / 6) ** alpha, which divides a beam's score (tensor2tensor).
        early_stopping: stop a beam search when num_beams hypotheses are finished, better ones possible or not.
        do_sample: draw from the distribution, after temperature, top_k and top_p.
        temperature: below 1 sharpens the distribution.
        top_k: draw from so many best tokens; 0 = all.
        top_p: draw from the smallest set of tokens that holds this probability; 1 = all.
        repetition_penalty, no_repeat_ngram_size: see `Processing`; they look at generated tokens.
        num_return_sequences: at most num_beams for a beam search: its best hypotheses, the finished ones first, then
            those cut at max_new_tokens, each group best first. Where fewer exist, the rest is PAD alone with score
            -inf. With do_sample: draws for each input.
        eos_token_id, pad_token_id: the ids.
        use_cache: False recomputes everything for each token.
        rung: the memory to decode with, see `generation.engine`; overrides use_cache.
        seed: of the sampling; None: the default generator.
        return_dict_in_generate: return a `GenerateOutput`.

    Returns:
        (batch * num_return_sequences, length) ids on the model's device: for a source the new tokens, ending in EOS and
        then PAD; for a prompt the prompt (padded on the left) and the new tokens.

    Raises:
        ValueError: a model that doesn't decode, ids that make no batch, settings that are out of range or contradict
            each other, an empty input, no room for a token, a model that gives NaN.
    """
    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        num_return_sequences=num_return_sequences,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        use_cache=use_cache,
        rung=rung,
        seed=seed,
    )
    decoder = as_model(model)
    device = device_of(decoder)
    with torch.inference_mode():
        inputs, layout = right_padded(as_batch(input_ids, pad_token_id, device), attention_mask, pad_token_id)
        out = search(decoder, inputs, layout, settings, new_generator(settings, device))
        if is_decoder_only(decoder):
            prompts = left_padded(inputs, layout, pad_token_id).repeat_interleave(num_return_sequences, 0)
            out.sequences = torch.cat((prompts, out.sequences), 1)
    # Tensors of inference mode can't enter a graph; copies made outside of it can.
    out = GenerateOutput(out.sequences.clone(), out.scores.clone())
    return out if return_dict_in_generate else out.sequences


def search(
    model: Model,
    inputs: Tensor,
    layout: SequenceLayout,
    settings: GenerationSettings,
    generator: torch.Generator | None = None,
) -> GenerateOutput:
    """Runs the search that the settings ask for.

    Args:
        model: what decodes.
        inputs: (batch, seqlen) ids, right-padded, none empty, on the model's device.
        layout: of the inputs.
        settings: what to do.
        generator: what sampling draws from; None: the default one.

    Returns:
        The new tokens alone, (batch * num_return_sequences, length), and their scores.

    Raises:
        ValueError: no room for a token, ids that the vocabulary doesn't have, a model that gives NaN.
    """
    settings.check_model(model.config.vocab_size)
    lengths = layout.seqlens.tolist()
    limits = [most_new_tokens(model, length, settings, inputs.shape[1]) for length in lengths]
    eos_id, pad_id = settings.eos_token_id, settings.pad_token_id
    processing = Processing(settings.min_new_tokens, settings.repetition_penalty, settings.no_repeat_ngram_size)
    if settings.copies > 1:
        inputs = inputs.repeat_interleave(settings.copies, 0)
        layout = SequenceLayout.padded(layout.seqlens.repeat_interleave(settings.copies), layout.max_seqlen)
        limits = [limit for limit in limits for _ in range(settings.copies)]
    engine = make_engine(model, inputs, layout, settings.num_beams, max(limits), settings.memory_rung)
    if settings.num_beams > 1:
        sequences, scores = beam_search(
            engine,
            limits,
            eos_id,
            pad_id,
            processing,
            settings.num_beams,
            settings.length_penalty,
            settings.num_return_sequences,
            settings.early_stopping,
        )
        return GenerateOutput(sequences.flatten(0, 1), scores.flatten())
    sampling = None
    if settings.do_sample:
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, generator)
    return GenerateOutput(*choose_rows(engine, limits, eos_id, pad_id, processing, sampling))


def most_new_tokens(model: Model, seqlen: int, settings: GenerationSettings, width: int | None = None) -> int:
    """How many tokens an input may get: what was asked for, or by default as much as makes sense.

    Args:
        model: what decodes.
        seqlen: of the input.
        settings: what was asked for.
        width: of the batch; None: seqlen.

    Raises:
        ValueError: the model's max_len leaves too little room.
    """
    max_len, width = model.config.max_len, seqlen if width is None else width
    if not is_decoder_only(model):
        room, default, behind = max_len, min(seqlen + EXTRA_LENGTH, max_len), ""
    else:
        room = default = max_len - width
        behind = f" behind a prompt of {width}"
        if room < 1:
            raise ValueError(
                f"expected prompts of fewer tokens than the model's max_len {max_len}, got {width}: there is no room "
                "for a new one"
            )
    wanted, least = settings.max_new_tokens, settings.min_new_tokens
    for name, value in (("max_new_tokens", wanted or 0), ("min_new_tokens", least)):
        if value > room:
            raise ValueError(
                f"expected {name} of at most {room}{behind}, for the model's max_len is {max_len}; got {value}"
            )
    return wanted or max(default, least)


def new_generator(settings: GenerationSettings, device: torch.device) -> torch.Generator | None:
    """The generator that a seed asks for."""
    return None if settings.seed is None else torch.Generator(device).manual_seed(settings.seed)
