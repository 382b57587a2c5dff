"""Forced decoding: a model's log-probabilities of existing tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines.kv_cache import decode_whole, packed
from fastformer.generation.engines.recurrent import encode_padded
from fastformer.generation.evaluation import evaluating
from fastformer.generation.inputs import TokenIds, as_rows, batches_by_length
from fastformer.generation.inputs import pad as padded
from fastformer.generation.model_protocols import (
    Model,
    Recurrent,
    as_model,
    device_of,
    is_decoder_only,
    is_encoder_decoder,
    is_ensemble,
    is_recurrent,
)
from fastformer.generation.request_builder import check_vocabulary, special_ids
from fastformer.generation.text_io import ErrorPolicy, TextError, TokenScored, expect_text
from fastformer.models.common import chosen_log_probs
from fastformer.settings import Positive, check_value
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    from fastformer.generation.pair_encoder import PairEncoder

_TEXTS = 4096  # texts to read before the first of them is scored: enough to find some of similar length
MAX_TOKENS = 8192  # the most tokens in a batch, on its longer side, because its activations are in memory together


class Part(NamedTuple):
    """The unit of scoring: a target, or a window of a long text.

    Attributes:
        source: the ids that an encoder reads; empty for a language model.
        inputs: the input ids of the decoder.
        outputs: the id that follows each input.
        known: the number of outputs at the beginning that are only context, and aren't scored.
    """

    source: Sequence[int]
    inputs: Sequence[int]
    outputs: Sequence[int]
    known: int = 0

    @property
    def length(self) -> int:
        """The length of the longer side."""
        return max(len(self.source), len(self.inputs))


def score(
    model: Model | nn.Module,
    input_ids: TokenIds,
    target_ids: TokenIds | None = None,
    *,
    context: int | None = None,
    pad_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
    max_tokens: int = MAX_TOKENS,
) -> list[list[float]]:
    """Computes the log-probability of each token of given sequences (forced decoding).

    The model's modules compute it, in their own precision. For a sequence that `generate` found by greedy decoding, the
    sum equals its score, up to rounding.

    Args:
        model: a `models.Transformer` or `baseline.LSTMSeq2Seq` (input_ids are sources), or a `models.GPT` (input_ids
            are scored), or an `Ensemble`. It scores in evaluation mode, without dropout; afterwards each module is in
            its former mode again.
        input_ids: in the forms of `generate`. Padding at the ends of a tensor or an array is removed.
        target_ids: for a model that reads sources: the outputs, one for each source, without the start token. EOS is
            scored if they contain it.
        context: for a language model: the minimum number of tokens before each scored token, if a sequence is longer
            than the model's max_len and is read in windows. More context is more exact, and slower. None: half of
            max_len.
        pad_token_id, decoder_start_token_id: ids that replace the model's.
        max_tokens: the most tokens in a batch, on its longer side, padding included. A longer sequence is a batch of
            its own.

    Returns:
        For each sequence the natural logarithms of its tokens' probabilities. For a language model they begin with the
        second token, since the first has no context.

    Raises:
        ValueError: the model can't decode, ids are missing or outside of the vocabulary, the numbers of sources and
            targets differ, a source is empty, or a source or a target is longer than the model's max_len.
    """
    decoder = as_model(model)
    config = decoder.config
    ids_given = GenerationConfig(pad_token_id=pad_token_id, decoder_start_token_id=decoder_start_token_id)
    ids_given.check_model(config.vocab_size)
    ids = special_ids(SpecialIds.of(decoder.config), ids_given)
    pad_id = ids.pad if ids.marks_padding else None
    rows = as_rows(input_ids, pad_id, None, "input_ids")
    if is_decoder_only(decoder):
        if target_ids is not None:
            raise ValueError(f"expected no target_ids for {type(model).__name__}: its input_ids are scored")
        return score_rows(decoder, [window_parts(row, config.max_len, context) for row in rows], max_tokens)
    if target_ids is None:
        raise ValueError(f"expected target_ids for {type(model).__name__}, the ids to score for each source")
    if context is not None:
        raise ValueError(f"expected no context for {type(model).__name__}: a target is read as a whole")
    targets = as_rows(target_ids, pad_id, None, "target_ids")
    if len(targets) != len(rows):
        raise ValueError(f"expected target_ids of {len(rows)} rows, as input_ids have, got {len(targets)}")
    return score_rows(
        decoder, [[target_part(*pair, ids.start)] for pair in zip(rows, targets, strict=True)], max_tokens
    )


def target_part(source: Sequence[int], target: Sequence[int], start: int, known: int = 0) -> Part:
    """Makes a part of a whole target, after the start token. The first `known` tokens aren't scored."""
    return Part(source, [start, *target[:-1]] if target else [], target, known)


def window_parts(row: Sequence[int], max_len: int, context: int | None = None) -> list[Part]:
    """Splits a text into windows of at most max_len tokens that score each token except the first once.

    Args:
        row: the ids of the text.
        max_len: the most that a model reads at once.
        context: the minimum number of tokens before a scored one, except at the beginning; None: half of max_len.

    Raises:
        ValueError: the context isn't an integer from 1 to max_len.
    """
    context = max(max_len // 2, 1) if context is None else context
    if not isinstance(context, int) or not 1 <= context <= max_len:
        raise ValueError(f"expected context from 1 to the model's max_len {max_len}, got {context!r}")
    parts, done = [], 1  # the number of tokens that are scored, or have no context
    while done < len(row):
        begin = max(0, done - context) if done > 1 else 0
        end = min(begin + max_len, len(row) - 1)
        parts.append(Part((), row[begin:end], row[begin + 1 : end + 1], known=done - begin - 1))
        done = end + 1
    return parts


@torch.inference_mode()
def score_rows(model: Model, rows: Sequence[Sequence[Part]], max_tokens: int = MAX_TOKENS) -> list[list[float]]:
    """Returns the log-probabilities of the outputs of each row's parts, which are batched by length.

    Raises:
        ValueError: see `score`.
    """
    check_value("max_tokens", max_tokens, Positive)
    parts = [part for row in rows for part in row]
    check_parts(model, parts)
    log_probs: list[list[float]] = [[] for _ in parts]
    lengths = {place: part.length for place, part in enumerate(parts) if part.outputs}
    for places in batches_by_length(lengths, lambda count, longest: count * longest <= max_tokens):
        batch = [parts[place] for place in places]
        with evaluating(model):
            values = iter(_log_probs(model, batch).tolist())
        for place, part in zip(places, batch, strict=True):
            log_probs[place] = [next(values) for _ in part.outputs][part.known :]
    each = iter(log_probs)
    return [[value for _ in row for value in next(each)] for row in rows]


def check_parts(model: Model, parts: Sequence[Part]) -> None:
    """Checks ids and lengths against a model, which itself doesn't look at the ids on a GPU.

    Raises:
        ValueError: ids outside of the vocabulary, an empty source, or a side that is longer than the model's max_len.
    """
    config = model.config
    reads_source = not is_decoder_only(model)
    source_size = getattr(config, "source_vocab_size", None) or config.vocab_size
    for part in parts:
        if reads_source and not part.source:
            raise ValueError("expected at least one token in each source, got an empty one")
        sides = (("source", part.source, source_size), ("target", (*part.inputs[:1], *part.outputs), config.vocab_size))
        for name, ids, size in sides:
            if len(ids) - (name == "target") > config.max_len:
                raise ValueError(
                    f"expected {name} sequences of at most max_len = {config.max_len} tokens, got "
                    f"{len(ids) - (name == 'target')}"
                )
            check_vocabulary(ids, size, name)


def _log_probs(model: Model, parts: Sequence[Part]) -> Tensor:
    """Returns the log-probabilities of the outputs of a batch, with the parts concatenated, (total,)."""
    outputs, _ = packed([part.outputs for part in parts], device_of(model))
    hidden, logits_of = _states(model, parts)
    direct = getattr(model, "token_log_probs", None)  # this method needs no logits
    log_probs: Tensor = chosen_log_probs(logits_of, hidden, outputs) if direct is None else direct(hidden, outputs)
    return log_probs


def _states(model: Model, parts: Sequence[Part]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns the states of a model at each input, (total, size), and the function that turns them into logits."""
    if is_ensemble(model):
        states = [_states(as_model(member), parts) for member in model.members]

        def combined(rows: Tensor) -> Tensor:
            each = rows.split([hidden.shape[1] for hidden, _ in states], 1)
            pairs = zip(each, states, strict=True)
            return model.combine([logits_of(part.to(hidden.dtype)) for part, (hidden, logits_of) in pairs])

        return torch.cat([hidden for hidden, _ in states], 1), combined
    if is_recurrent(model):
        return _recurrent_states(model, parts), model.output
    assert is_encoder_decoder(model) or is_decoder_only(model)
    sources, inputs = ([part.source for part in parts], [part.inputs for part in parts])
    return decode_whole(model, sources, inputs, device_of(model))[0], model.logits


def _recurrent_states(model: Recurrent, parts: Sequence[Part]) -> Tensor:
    """Returns the states of a recurrent model, which reads only padded batches, at each input: (total, d_model)."""
    device = device_of(model)
    inputs = padded([part.inputs for part in parts]).to(device)
    memory, mask, state = encode_padded(model, [part.source for part in parts], device)
    hidden, _, _ = model.decode(inputs, memory, mask, state)
    lengths = torch.tensor([len(part.inputs) for part in parts], device=device)
    return hidden[torch.arange(inputs.shape[1], device=device) < lengths[:, None]]


def score_texts(
    translator: PairEncoder,
    pairs: Iterable[tuple[str | TextError, str | TextError]],
    errors: ErrorPolicy,
    max_tokens: int = MAX_TOKENS,
) -> Iterator[TokenScored]:
    """Yields the score of each translation, given its text, in order; see `Translator.score`.

    Args:
        translator: has the model and the tokenizer.
        pairs: texts with their translations; an error stands for a text or translation that can't be used.
        errors: the policy for pairs that can't be scored; it reports at the end.
        max_tokens: see `score`.
    """
    model, tokenizer, start = translator.model, translator.tokenizer, SpecialIds.of(translator.model.config).start
    numbers, rest, total = count(1), iter(pairs), 0
    while chunk := list(islice(rest, _TEXTS)):
        total += len(chunk)
        known = len(translator.language_ids().begin)
        rows: list[list[Part] | None] = []
        for text, translation in chunk:
            number = next(numbers)
            try:
                encoded = encoded_pair(translator, text, translation, number)
                rows.append([target_part(*encoded, start, known)] if encoded else [])
            except TextError as error:
                errors.handle(error)
                rows.append(None)
        scores = iter(score_rows(model, [row for row in rows if row is not None], max_tokens))
        for (_, translation), row in zip(chunk, rows, strict=True):
            translation = "" if isinstance(translation, TextError) else translation
            if row is None:
                yield TokenScored(translation, -math.inf, [])
                continue
            log_probs = next(scores)
            tokens = tokenizer.tokens(row[0].outputs[known:]) if row else []
            yield TokenScored(translation, math.fsum(log_probs), list(zip(tokens, log_probs, strict=True)))
    errors.report(total)


def encoded_pair(
    translator: PairEncoder, text: str | TextError, translation: str | TextError, number: int
) -> tuple[Sequence[int], Sequence[int]] | None:
    """Returns the ids of a text and of its translation, each with EOS and with the ids that name the languages.

    Returns None if both are empty.

    Raises:
        TextError: a text can't be translated, or the model can't generate a translation.
    """
    for side in (text, translation):
        if isinstance(side, TextError):
            raise side
    assert not isinstance(text, TextError)
    translation = expect_text("translations", number, translation)
    if isinstance(text, str) and not text.strip() and not translation.strip():
        return None
    source = translator.encode(text, number)
    try:
        begin = translator.language_ids().begin
        target = [*begin, *translator.encode_target(translation), SpecialIds.of(translator.model.config).first_eos]
    except ValueError as error:
        raise TextError(f"text {number}: its translation: {error}") from error
    if len(target) > (max_len := translator.model.config.max_len):
        raise TextError(
            f"text {number}: expected a translation of at most {max_len} tokens, got {len(target)}", is_long=True
        )
    try:
        check_parts(translator.model, [target_part(source, target, 0)])
    except ValueError as error:
        raise TextError(f"text {number}: {error}") from error
    return source, target
