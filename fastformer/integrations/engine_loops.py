"""Decodes on an engine for transformers' `generate`, after transformers has prepared the call.

There are two ways. If rules that the engine has itself are enough to choose the tokens (`WholeSearch`), a whole greedy
or beam search runs there. All other calls (with processors, stopping criteria, sampling, or scores to return) run in
transformers' own loop, whose model is then a session of the engine (`Stepper`). Their results are transformers' by
construction: only the logits come from the engine. Assisted decoding runs in the loop without drafts: the session
reads the drafts ahead of the loop (`DraftingStepper`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import logits_process, stopping_criteria
from transformers.modeling_outputs import ModelOutput

from fastformer.generation.config import Processor
from fastformer.generation.drafts import Drafter, DraftModel, source_text
from fastformer.generation.engines.base import Candidates, Prompt, Selection
from fastformer.generation.engines.cpp import CppBatch, DraftingCppBatch
from fastformer.generation.engines.graph import GraphBatch
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.processors import (
    AtOneLength,
    EndWhereNothingFollows,
    ForcedToken,
    LogProbs,
    MinNewTokens,
    SuppressTokens,
    SuppressTokensAt,
)
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import new_scheduler, run
from fastformer.integrations.engine_models import ForeignEngine, ForeignGraphEngine
from fastformer.integrations.known import CACHE

_LAST_ID = 2**31 - 1  # the engine's ids have 32 bits
_MOST_DIGITS = 30  # the decimal digits of a power of a length: fp32 holds 38

# The calls of the processors and criteria whose rules the engine has itself, as they were before a patch.
_CALLS = {
    kind: kind.__call__
    for kind in (
        logits_process.MinLengthLogitsProcessor,
        logits_process.MinNewTokensLengthLogitsProcessor,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.ForcedBOSTokenLogitsProcessor,
        logits_process.ForcedEOSTokenLogitsProcessor,
        logits_process.SuppressTokensAtBeginLogitsProcessor,
        logits_process.LogitNormalization,
        stopping_criteria.EosTokenCriteria,
        stopping_criteria.MaxLengthCriteria,
    )
}


@dataclass
class Inputs:
    """The prompts of a call, and the ids that its outputs begin with.

    Attributes:
        beginning: (rows, length) ids that the outputs begin with, `copies` rows for each input.
        prompts: the prompt of each input.
        copies: the number of rows for each input.
        limit: the maximum number of new tokens.
        model: transformers' model.
    """

    beginning: Tensor
    prompts: list[Prompt]
    copies: int
    limit: int
    model: Any


@dataclass
class WholeSearch:
    """The rules of a greedy or beam search that the engine runs by itself.

    Attributes:
        eos: the ids that end a row.
        min_tokens: the number of new tokens before which no row may end.
        suppressed: the ids that are never generated.
        at_lengths: the rules that force or forbid ids at one length.
        renormalizes: whether log-probabilities are normalised again over the tokens that the rules allow.
    """

    eos: tuple[int, ...]
    min_tokens: int
    suppressed: tuple[int, ...]
    at_lengths: tuple[AtOneLength, ...]
    renormalizes: bool

    def processors(self, begun: int, *, has_beams: bool) -> tuple[Processor, ...]:
        """Returns processors with the same effect for searches that decode step by step."""
        found: list[Processor] = [LogProbs()] if has_beams else []
        if self.suppressed:
            found.append(SuppressTokens(self.suppressed))
        if self.min_tokens:
            found.append(MinNewTokens(self.min_tokens, begun, self.eos))
        if self.suppressed or self.min_tokens:
            found.append(EndWhereNothingFollows(self.eos))
        return (*found, *self.at_lengths) if len(found) > has_beams or self.at_lengths else ()


def whole_search(
    processors: Sequence[Any], criteria: Sequence[Any], config: Any, beginning: Tensor, vocab_size: int
) -> WholeSearch | None:
    """Returns the rules of a call if the engine can run its whole search; None if the call has other rules.

    Args:
        processors, criteria: transformers' objects, as prepared for the call.
        config: the call's GenerationConfig.
        beginning: see `Inputs`.
        vocab_size: the vocabulary size of the model.
    """
    if any(type(one).__call__ is not _CALLS.get(type(one)) for one in (*processors, *criteria)):
        return None
    ends = _ends(criteria, config)
    if ends is None or config.do_sample or config.output_scores or config.output_logits:
        return None
    has_beams, begun, limit = config.num_beams > 1, beginning.shape[1], config.max_length
    if has_beams and config.return_dict_in_generate:
        return None  # the call wants beam_indices
    if has_beams and not _has_usual_powers(config.length_penalty, limit):
        return None
    least, suppressed, at_lengths, renormalizes = 0, set[int](), list[AtOneLength](), False
    for place, one in enumerate(processors):
        match type(one):
            # A processor that the caller made may have other ends than the call.
            case logits_process.MinLengthLogitsProcessor if {*one.eos_token_id.tolist()} == {*ends}:
                least = max(least, one.min_length - begun)
            case logits_process.MinNewTokensLengthLogitsProcessor if {*one.eos_token_id.tolist()} == {*ends}:
                least = max(least, one.min_new_tokens - begun + one.prompt_length_to_skip)
            case logits_process.SuppressTokensLogitsProcessor:
                suppressed |= {*one.suppress_tokens.tolist()}
            case logits_process.NoBadWordsLogitsProcessor if all(len(word) == 1 for word in one.sequence_bias):
                suppressed |= {word[0] for word in one.sequence_bias}  # without the processor's ends
            case logits_process.ForcedBOSTokenLogitsProcessor:
                at_lengths.append(ForcedToken(one.bos_token_id, 1))
            case logits_process.ForcedEOSTokenLogitsProcessor if one.eos_token_id.numel() == 1:
                at_lengths.append(ForcedToken(int(one.eos_token_id), one.max_length - 1))
            case logits_process.SuppressTokensAtBeginLogitsProcessor:
                if one.begin_suppress_tokens.numel():
                    at_lengths.append(SuppressTokensAt(tuple(one.begin_suppress_tokens.tolist()), one.begin_index))
            case logits_process.LogitNormalization if place == len(processors) - 1:
                renormalizes = True
            case _:
                return None
    # If a row allows no token, transformers' result can't be reproduced. If a token is both forced and forbidden, the
    # order of the processors decides.
    forbidden = suppressed | {token for one in at_lengths if isinstance(one, SuppressTokensAt) for token in one.ids}
    if len(forbidden | {*ends}) >= vocab_size or not all(0 <= token < vocab_size for token in forbidden):
        return None
    positions = [one.position for one in at_lengths]
    if len({*positions}) < len(positions) or (least and limit - begun < least):
        return None
    return WholeSearch(ends, max(0, least), tuple(sorted(suppressed)), tuple(at_lengths), renormalizes)


def _has_usual_powers(length_penalty: Any, limit: int) -> bool:
    """Returns whether fp32 holds the powers of lengths by which scores are divided. transformers raises for others."""
    is_number = type(length_penalty) in (int, float) and math.isfinite(length_penalty)
    return is_number and abs(length_penalty) * math.log10(max(limit, 10)) < _MOST_DIGITS


def _ends(criteria: Sequence[Any], config: Any) -> tuple[int, ...] | None:
    """Returns the ids of the config that end rows, if only these and the maximum length do; else None."""
    ends: list[int] = []
    has_limit = False
    for one in criteria:
        if type(one) is stopping_criteria.EosTokenCriteria and one.eos_token_id.dim() == 1:
            ends += one.eos_token_id.tolist()
        elif type(one) is stopping_criteria.MaxLengthCriteria and one.max_length == config.max_length:
            has_limit = True
        else:
            return None
    known = config._eos_token_tensor
    if not (ends and has_limit) or min(ends) < 0 or max(ends) > _LAST_ID:
        return None
    if known is None or known.dim() != 1 or {*ends} != {*known.tolist()}:
        return None
    return tuple(dict.fromkeys(ends))


def search_whole(
    engine: ForeignEngine | ForeignGraphEngine,
    inputs: Inputs,
    rules: WholeSearch,
    config: Any,
    streamer: Any,
    draft_model: DraftModel | None = None,
) -> Tensor | None:
    """Runs the searches of a call; returns None if one found fewer hypotheses than the call wants."""
    has_beams, begun = config.num_beams > 1, inputs.beginning.shape[1]
    processors = rules.processors(begun, has_beams=has_beams)
    ends = frozenset(rules.eos)
    num_return = config.num_return_sequences

    def search() -> NativeSearch:
        common: dict[str, Any] = {"min_tokens": rules.min_tokens, "suppressed": rules.suppressed}
        if not has_beams:
            return NativeSearch.greedy(inputs.limit, ends, **common)
        return NativeSearch.beams(
            inputs.limit,
            ends,
            config.num_beams,
            beam_rules="transformers",
            alpha=config.length_penalty,
            num_return=num_return,
            early_stopping=config.early_stopping,
            keeps_shares=not rules.renormalizes,
            **common,
        )

    listener = None if streamer is None else lambda token: streamer.put(torch.tensor([token], device="cpu"))
    requests = [
        Request(
            prompt,
            search,
            processors=processors,
            search_suffices=True,
            keeps_scores=has_beams and not rules.renormalizes,
            log_probs=has_beams,
            on_token=listener,
            before=[0] * (begun - len(prompt.tokens)) + list(prompt.tokens),  # the prompt counts in a row's length
            num_lookup_tokens=0 if has_beams else config.prompt_lookup_num_tokens or 0,
            lookup_text=source_text(prompt, engine.shape.config),
        )
        for prompt in inputs.prompts
    ]
    run(new_scheduler(engine, draft_model=draft_model), requests)
    if streamer is not None:
        streamer.end()
    found = [[one.tokens for one in request.results] for request in requests]
    if any(len(rows) < num_return for rows in found) and has_beams:
        return None
    copies = num_return if has_beams else inputs.copies
    rows = [tokens for each in found for tokens in (each if has_beams else each * copies)]
    width = max(map(len, rows))
    fill = _fill(config, has_beams=has_beams)
    new = torch.tensor([tokens + [fill] * (width - len(tokens)) for tokens in rows], dtype=torch.long, device="cpu")
    new = new.to(inputs.beginning.device)
    beginning = inputs.beginning[:: inputs.copies].repeat_interleave(copies, 0)
    return torch.cat((beginning, new), 1)


def _fill(config: Any, *, has_beams: bool) -> int:
    """Returns the id that fills a row after its end. For beams, transformers ignores a PAD of 0 and uses EOS."""
    pad, eos = config._pad_token_tensor, config._eos_token_tensor
    return int((pad or eos[0]) if has_beams else pad)


class Stepper(GenerationMixin):
    """Stands in for the model in transformers' loops: a forward is a step of the engine.

    Args:
        engine: computes the logits.
        inputs: the inputs of the call.
    """

    def __init__(self, engine: ForeignEngine | ForeignGraphEngine, inputs: Inputs) -> None:
        self.config, self.device = inputs.model.config, engine.device
        self.generation_config = inputs.model.generation_config
        self._inputs = inputs
        rows, copies = len(inputs.beginning), inputs.copies
        self._num_tokens = sum(engine.tokens_needed(prompt, copies, inputs.limit) for prompt in inputs.prompts)
        with torch.inference_mode():  # in which whole searches have made the cache that the model keeps
            batch = engine.open(rows, self._num_tokens)
            assert isinstance(batch, CppBatch | GraphBatch)
            batch.prefill(inputs.prompts)
            if copies > 1:
                batch.fork([[0] * copies for _ in inputs.prompts])
        self._batch = batch

    def __call__(self, input_ids: Tensor, **ignored: Any) -> ModelOutput:
        """Has the engine read the last id of each row, and returns the logits of the next ids.

        Args:
            input_ids: (rows, length).
            ignored: the other arguments of a model's forward, which are ignored.
        """
        return ModelOutput(logits=self._logits(input_ids[:, -1].tolist())[:, None])

    def _logits(self, tokens: list[int]) -> Tensor:
        """Returns the logits after the last token of each row, (rows, vocab_size)."""
        return self._batch.logits(tokens)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **ignored: Any) -> dict[str, Tensor]:
        """See transformers; the ids alone."""
        return {"input_ids": input_ids}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Lets row i continue from row beam_idx[i]; transformers also uses this object as the cache."""
        copies = self._inputs.copies
        parents = [[row % copies for row in group] for group in beam_idx.view(-1, copies).tolist()]
        if any(group != [*range(copies)] for group in parents):
            with torch.inference_mode():
                self._batch.fork(parents)

    def decode(self, loop: Any, config: Any, **kwargs: Any) -> Any:
        """Runs a loop of transformers (`_sample`, `_beam_search`), and omits the cache from the returned output."""
        cache = {CACHE: self} if config.num_beams > 1 else {}
        found = loop(
            self,
            self._inputs.beginning,
            generation_config=config,
            use_cache=True,
            encoder_outputs={},
            **cache,
            **kwargs,
        )
        if not config.return_dict_in_generate:
            return found
        return type(found)(**{name: value for name, value in found.items() if name != CACHE})

    # Hooks that transformers' loops call around a model's forward. They have no work to do here.
    def _prefill(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> ModelOutput:
        return self(input_ids)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        return model_kwargs

    def _optimize_model_for_decode(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False


class DraftingStepper(Stepper):
    """Computes the logits after a draft in the pass that reads the token before it. The loop chooses from them token by
    token, as long as it chooses what was drafted.

    Args:
        engine, inputs: see `Stepper`; there is one row.
        draft_model: drafts where nothing was found in the text; None: nothing does.
        num_lookup_tokens: the most tokens to draft from the text so far; 0: none.
    """

    _batch: DraftingCppBatch

    def __init__(
        self, engine: ForeignEngine, inputs: Inputs, draft_model: DraftModel | None, num_lookup_tokens: int
    ) -> None:
        super().__init__(engine, inputs)
        [prompt] = inputs.prompts
        self._request = Request(
            prompt,
            lambda: NativeSearch.greedy(inputs.limit, frozenset()),  # only counts the tokens
            log_probs=False,
            num_lookup_tokens=num_lookup_tokens,
            lookup_text=source_text(prompt, engine.shape.config),
        )
        self._drafter = Drafter(engine, draft_model, 1, self._num_tokens)
        self._draft: list[int] = []
        self._read = torch.empty(0)  # the logits after the token before the draft, and after each token of it
        self._accepted = -1  # tokens of the draft; -1: nothing was read yet

    def _logits(self, tokens: list[int]) -> Tensor:
        request, draft = self._request, self._draft
        if self._accepted >= 0:
            request.advance(Candidates([tokens], [[0.0]]), 0)
        if 0 <= self._accepted < len(draft) and tokens == [draft[self._accepted]]:
            self._accepted += 1
            return self._read[self._accepted, None]
        if draft:
            self._batch.cut([len(draft) - self._accepted])
            self._drafter.learn([request], [len(draft)], [self._accepted])
        [self._draft] = self._drafter.drafts([request], self._batch)
        count, self._accepted = 1 + len(self._draft), 0
        selection = Selection(1, log_probs=False, logit_rows=range(count))
        self._read = self._batch.read([*tokens, *self._draft], [count], selection).logits
        return self._read[:1]
