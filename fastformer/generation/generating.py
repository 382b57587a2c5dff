"""`fastformer.generate`: decoding with Hugging Face's argument names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fastformer.generation.config import OPTIONS, GenerationConfig, GenerationOptions
from fastformer.generation.evaluation import evaluating
from fastformer.generation.foreign_options import check_names
from fastformer.generation.inputs import TokenIds, as_rows, input_rows, pad
from fastformer.generation.model_protocols import Model, as_model, is_decoder_only
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import new_scheduler
from fastformer.generation.search import NEVER, Hypothesis
from fastformer.generation.session import Session
from fastformer.generation.streaming import Detokenizer

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class GenerateOutput:
    """What `generate(..., return_dict_in_generate=True)` returns.

    Attributes:
        sequences: (batch * num_return_sequences, length) ids; see `generate`.
        scores: (batch * num_return_sequences,) fp32: the log-probability of each sequence's new tokens, for beams
            divided by the length penalty; -inf for a row without a hypothesis, see `generate`.
        token_log_probs: (batch * num_return_sequences, longest) fp32: the log-probability of each new token, then 0.
    """

    sequences: Tensor
    scores: Tensor
    token_log_probs: Tensor


class Streamer(Protocol):
    """Receives tokens as they are generated; Hugging Face's `TextStreamer` is one."""

    def put(self, value: Tensor) -> object:
        """Receives ids: first those that decoding begins with, (1, length), then each new token, (1,)."""

    def end(self) -> object:
        """Called after the last token."""


def shows_options(function: Callable[P, R]) -> Callable[P, R]:
    """Gives a function's signature the fields of `GenerationConfig` instead of **options, for help()."""
    signature = inspect.signature(function)
    *named, rest = signature.parameters.values()
    kinds = GenerationOptions.__annotations__
    options = [
        rest.replace(name=f.name, kind=rest.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name].__forward_arg__)
        for f in fields(GenerationConfig)
    ]
    function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


@shows_options
def generate(
    model: Model | nn.Module,
    input_ids: TokenIds,
    config: GenerationConfig | None = None,
    *,
    attention_mask: Tensor | None = None,
    decoder_input_ids: TokenIds | None = None,
    generation_config: Mapping[str, Any] | Any = None,
    tokenizer: Detokenizer | None = None,
    streamer: Streamer | None = None,
    return_dict_in_generate: bool = False,
    **options: Unpack[GenerationOptions],
) -> Tensor | GenerateOutput:
    """Decodes a batch: greedy by default, beam search with num_beams > 1, sampling with do_sample.

    A row's tokens depend neither on its neighbours nor on the number of rows that are decoded together. If prompts of a
    call share a beginning, an engine that can do so ("cpp") reads it once; a `Generator` reuses it in later calls, too.

    Args:
        model: a `models.Transformer` or `baseline.LSTMSeq2Seq` (input_ids are sources), or a `models.GPT` (input_ids
            are prompts). It decodes in evaluation mode, without dropout; afterwards each module is in its former mode
            again. The engine "cpp" packs the weights once, and again after they have changed; see
            `fastformer.generation.repack` for changes that it may not notice.
        input_ids: (batch, seqlen) integers, padded on either side, as a tensor or an array; (seqlen,) is a batch of
            one. Or a list of ids, or a list of such lists, which may differ in length.
        config: the options; options that are given by name override it.
        attention_mask: (batch, seqlen), 1 = keep, 0 = padding. None: in a tensor or an array, ids equal to pad_token_id
            are padding. A single list, and lists of different lengths, have no padding. Several lists of one length may
            have been padded by hand: ids equal to pad_token_id are padding at their ends.
        decoder_input_ids: the tokens that each output of a model that reads sources begins with, for example the first
            words of a translation: one row, or a list, for each input, in the forms of input_ids, with or without the
            start token. The outputs contain them; lengths and scores count only new tokens.
        generation_config: options as transformers' GenerationConfig or a mapping, instead of config; options that are
            given by name override it. They are read as transformers reads them: unless you pass other values, with its
            beam_rules and, with do_sample, its default for top_k (50). A folder's generation_config.json is read only
            by what loads the folder: `Chat`, `AsyncGenerator`, and the commands generate, chat and serve.
        tokenizer: has encode and decode; needed for stop_strings.
        streamer: receives the tokens as they are generated, for one input without beams or several samples.
        return_dict_in_generate: return a `GenerateOutput`.
        options: the fields of `GenerationConfig`, such as num_beams=4 and max_new_tokens=64, which documents them.

    Returns:
        (batch * num_return_sequences, length) ids on the model's device. For a source: the decoder_input_ids and the
        new tokens, which end with EOS and then PAD. For a prompt: the prompt (padded on the left) and the new tokens.

    Raises:
        ValueError: the model can't decode, the ids aren't a batch, options are out of range or contradict each other,
            an input is empty or leaves no room for a token, or the model computes NaN.
    """
    config = config_of(options, config, generation_config)
    call = Call(input_ids, attention_mask, decoder_input_ids, tokenizer, streamer, return_dict_in_generate)
    return decode(as_model(model), config, call)


_NAMES = (*inspect.signature(generate).parameters,)
_OPTIONS = frozenset(OPTIONS)


class Call(NamedTuple):
    """The arguments of `generate` that are not options."""

    input_ids: TokenIds
    attention_mask: Tensor | None = None
    decoder_input_ids: TokenIds | None = None
    tokenizer: Detokenizer | None = None
    streamer: Streamer | None = None
    return_dict: bool = False


def decode(
    decoder: Model, config: GenerationConfig, call: Call, session: Session[Request] | None = None
) -> Tensor | GenerateOutput:
    """Decodes the inputs of a call to `generate`, and returns its result.

    Args:
        decoder: the model.
        config: all options.
        call: all other arguments.
        session: runs the requests, and its engine decodes them; None: a session for this call alone.
    """
    streamer = call.streamer
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise ValueError(f"expected a streamer with put and end, got {type(streamer).__name__}")
    with evaluating(decoder) as mode, torch.inference_mode():
        engine = None if session is None else session.scheduler.engine
        builder = RequestBuilder(decoder, config, log_probs=call.return_dict, engine=engine, tokenizer=call.tokenizer)
        rows = input_rows(call.input_ids, call.attention_mask, builder.ids.pad, marks_padding=builder.ids.marks_padding)
        prefixes = _prefixes(call.decoder_input_ids, len(rows), decoder, builder)
        requests = builder.build_all(rows, prefixes)
        if streamer is not None:
            if len(requests) > 1 or requests[0].search.peak_rows > 1:
                raise ValueError("expected one input, without beams or several samples, along with a streamer")
            requests[0].listen(_listener(streamer, requests[0].before))
        (session or Session(decoder, lambda: new_scheduler(builder.engine))).run(requests, mode)
    if streamer is not None:
        streamer.end()
    # Outside of inference mode, because tensors made in inference mode can't be used in an autograd graph.
    prompts = _left_padded(rows, builder.ids.pad) if builder.is_prompted else None
    return _gathered(requests, prefixes, prompts, builder, return_dict=call.return_dict)


def config_of(options: GenerationOptions, config: GenerationConfig | None, foreign: Any) -> GenerationConfig:
    """Returns the options of a call as one config."""
    if options and not options.keys() <= _OPTIONS:
        check_names(options, _NAMES)  # its suggestions include the names of arguments
    if foreign is None:
        return GenerationConfig.from_options(options, config)
    return GenerationConfig.from_options({**options, "generation_config": foreign}, config)


def _prefixes(decoder_input_ids: TokenIds | None, count: int, model: Model, builder: RequestBuilder) -> list[list[int]]:
    """Returns the tokens that each output begins with, without the start token."""
    if decoder_input_ids is None:
        return [[] for _ in range(count)]
    if is_decoder_only(model):
        raise ValueError(f"expected no decoder_input_ids for {type(model).__name__}: its input_ids are the beginning")
    pad_id = builder.ids.pad if builder.ids.marks_padding else None
    prefixes = as_rows(decoder_input_ids, pad_id, builder.ids.start, "decoder_input_ids")
    if len(prefixes) != count:
        raise ValueError(f"expected decoder_input_ids of {count} rows, as input_ids have, got {len(prefixes)}")
    return prefixes


def _listener(streamer: Streamer, prompt: Sequence[int]) -> Callable[[int], object]:
    streamer.put(torch.tensor([list(prompt)], device="cpu"))
    return lambda token: streamer.put(torch.tensor([token], device="cpu"))


def _left_padded(rows: Sequence[list[int]], pad_id: int) -> list[list[int]]:
    width = max(map(len, rows))
    return [[pad_id] * (width - len(row)) + row for row in rows]


def _gathered(
    requests: Sequence[Request],
    prefixes: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]] | None,
    builder: RequestBuilder,
    *,
    return_dict: bool,
) -> Tensor | GenerateOutput:
    """Returns the results as tensors, with rows of PAD if an input has fewer hypotheses than were requested."""
    device, pad_id, num_return = builder.engine.device, builder.ids.pad, builder.config.num_return_sequences
    each = len(requests) // len(prefixes)  # requests per input
    rows: list[tuple[Sequence[int], Hypothesis]] = []
    for place, prefix in enumerate(prefixes if prompts is None else prompts):
        results = [one for request in requests[place * each : (place + 1) * each] for one in request.results]
        rows += [(prefix, one) for one in results]
        rows += [(() if prompts is None else prefix, Hypothesis(score=NEVER))] * (num_return - len(results))
    sequences = pad([[*prefix, *one.tokens] for prefix, one in rows], pad_id).to(device)
    if not return_dict:
        return sequences
    longest = max(len(one.log_probs) for _, one in rows)
    log_probs = [[*one.log_probs, *[0.0] * (longest - len(one.log_probs))] for _, one in rows]
    scores = torch.tensor([one.score for _, one in rows], dtype=torch.float32, device=device)
    return GenerateOutput(sequences, scores, torch.tensor(log_probs, dtype=torch.float32, device=device))
