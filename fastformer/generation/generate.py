"""`fastformer.generate`: decoding with Hugging Face's argument names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fastformer.generation.config import BeamRules, EarlyStopping, GenerationConfig, Window
from fastformer.generation.engines import Engine
from fastformer.generation.evaluation import evaluating
from fastformer.generation.foreign_options import check_names, with_config
from fastformer.generation.inputs import TokenIds, as_inputs, as_rows, left_padded, pad
from fastformer.generation.model_protocols import Model, as_model, device_of, is_decoder_only
from fastformer.generation.processors import Processor
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.scheduler import Scheduler, run
from fastformer.generation.search import NEVER, Hypothesis
from fastformer.generation.stopping import StoppingCriterion
from fastformer.generation.streaming import Detokenizer

P = ParamSpec("P")
R = TypeVar("R")

_CPU_BYTES, _CPU_ROWS, _GPU_ROWS = 512 * 2**20, 512, 1024


@dataclass
class GenerateOutput:
    """What `generate(..., return_dict_in_generate=True)` returns.

    Attributes:
        sequences: (batch * num_return_sequences, length) ids; see `generate`.
        scores: (batch * num_return_sequences,) fp32: the log-probability of each sequence's new tokens, for beams
            divided by the length penalty; -inf for a row that is no hypothesis, see `generate`.
        token_log_probs: (batch * num_return_sequences, longest) fp32: that of each new token, 0 behind them.
    """

    sequences: Tensor
    scores: Tensor
    token_log_probs: Tensor


class Streamer(Protocol):
    """Who is told tokens as they come; Hugging Face's `TextStreamer` is one."""

    def put(self, value: Tensor) -> object:
        """Takes ids: first (1, length) what decoding begins with, then (1,) each new token."""
        ...

    def end(self) -> object:
        """There are no more."""
        ...


def _with_named_options(function: Callable[P, R]) -> Callable[P, R]:
    """Calls a function with the options that are given by name or by a generation_config; see there."""
    known = [*inspect.signature(function).parameters]
    settings = [field.name for field in fields(GenerationConfig)]

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        check_names(options, known)
        merged: Any = with_config(options, settings) if "generation_config" in options else options
        return function(*args, **merged)

    return call


@_with_named_options
def generate(
    model: Model | nn.Module,
    input_ids: TokenIds,
    *,
    attention_mask: Tensor | None = None,
    decoder_input_ids: TokenIds | None = None,
    generation_config: Mapping[str, Any] | Any = None,
    max_new_tokens: int | None = None,
    min_new_tokens: int = 0,
    max_length: int | None = None,
    min_length: int = 0,
    max_time: float | None = None,
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] = (),
    num_beams: int = 1,
    beam_rules: BeamRules = "tensor2tensor",
    length_penalty: float | None = None,
    early_stopping: EarlyStopping = False,
    num_beam_groups: int = 1,
    diversity_penalty: float = 0.0,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    num_return_sequences: int = 1,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    suppress_tokens: Sequence[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    shortlist: Sequence[int] = (),
    forced_bos_token_id: int | None = None,
    forced_eos_token_id: int | None = None,
    logits_processor: Processor | Sequence[Processor] = (),
    renormalize_logits: bool = True,
    stop_strings: str | Sequence[str] = (),
    tokenizer: Detokenizer | None = None,
    window: Window = "stop",
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
    use_cache: bool = True,
    engine: str | None = None,
    precision: str | None = None,
    streamer: Streamer | None = None,
    return_dict_in_generate: bool = False,
) -> Tensor | GenerateOutput:
    """Decodes a batch: greedy by default, beam search with num_beams > 1, sampling with do_sample.

    A row's tokens depend neither on its neighbours nor on how many of them are decoded at once.

    Args:
        model: a `models.Transformer` or `baseline.LSTMSeq2Seq` (input_ids are sources), or a `models.GPT` (input_ids
            are prompts). It decodes in evaluation, without dropout; behind it each of its modules is in the mode that
            it was in. The engine "cpp" packs its weights once, and again when they have changed; see
            `fastformer.generation.repack` for changes that it may not notice.
        input_ids: (batch, seqlen) integers, padded on either side, as a tensor or an array; (seqlen,) is a batch of
            one. Or a list of ids, or a list of such lists, which may differ in length. They are moved to the model's
            device.
        attention_mask: (batch, seqlen), 1 = keep, 0 = padding. None: ids equal to pad_token_id are padding in a tensor
            or an array. A lone list, and lists that differ in length, are taken as they are; several lists of one
            length may have been padded by hand, so that ids equal to pad_token_id are padding at their ends.
        decoder_input_ids: what each output of a model that reads sources begins with, for example the first words of a
            translation: one row, or a list, for each input, in the forms of input_ids; the start token may stand in
            front. The outputs hold them, while lengths and scores count new tokens.
        generation_config: options as transformers' GenerationConfig or a mapping holds them; what is given by name
            comes first. They are read as transformers reads them: unless you say otherwise, by its beam_rules and with
            its defaults for renormalize_logits (False) and, with do_sample, top_k (50). An option that isn't one here
            is an error.
        max_new_tokens: None: for a source its own length + 100, at most the model's max_len; for prompts what max_len
            leaves behind the longest.
        min_new_tokens: no EOS before so many. Where it is above max_new_tokens, everything ends there.
        max_length, min_length: the same, counting what an output begins with, too: the prompt (as long as the longest
            one of a batch), or the start token and the decoder_input_ids. Where both are given, the number of new
            tokens counts.
        max_time: seconds after which decoding ends with what there is; inputs that haven't begun then give nothing.
        stopping_criteria: functions of (input_ids, scores) that say where rows end, as Hugging Face's do; see
            `stopping.make_stop`.
        num_beams: hypotheses that are followed.
        beam_rules: whose beam search: "tensor2tensor" (see `BeamSearch`), or "transformers", that of Hugging Face's
            `generate` (see `TransformersBeamSearch`). The two give a beam's score another penalty, and end otherwise.
        length_penalty: alpha of ((5 + length) / 6) ** alpha, which divides a beam's score (tensor2tensor), or of
            length ** alpha (transformers), where length counts the new tokens, EOS included. None: 0.6, or 1.0 by
            transformers' rules, as it is there.
        early_stopping: stop a beam search when num_beams hypotheses are finished, better ones possible or not. False
            goes on: by tensor2tensor's rules while a better one is possible; by transformers' rules while the best that
            goes on, as long as it is now, beats the worst finished one. "never", of transformers' rules alone, compares
            what it could become at max_new_tokens.
        num_beam_groups, diversity_penalty: groups of beams that avoid each other's tokens; see `BeamSearch`. Not by
            transformers' rules.
        do_sample: draw from the distribution, after temperature, top_k and top_p.
        temperature: below 1 sharpens the distribution.
        top_k: draw from so many best tokens; 0 = all.
        top_p: draw from the smallest set of tokens that holds this probability; 1 = all.
        seed: of the sampling; None: one that PyTorch's default generator gives.
        num_return_sequences: at most num_beams for a beam search: its best hypotheses, the finished ones first, then
            those cut at max_new_tokens, each group best first; by transformers' rules all together, best first. Where
            fewer exist, the rest is PAD alone with score -inf. With do_sample: draws for each input.
        repetition_penalty, no_repeat_ngram_size: see `processors`. They look at new tokens; by transformers' rules,
            also without beams, at the start token, the decoder_input_ids or the prompt, too.
        suppress_tokens: ids that are never said.
        bad_words_ids: sequences of ids that are never said.
        shortlist: where it isn't empty, only these ids, those that end a row and forced ones are said, and
            log-probabilities are those among them. The engine "cpp" computes no others, which is faster.
        forced_bos_token_id: the first new token; by transformers' rules only behind one id alone, a start token or a
            prompt of one.
        forced_eos_token_id: the new token at the limit.
        logits_processor: functions of (input_ids, scores) that give scores, called in turn after all others for each
            input; see `processors`.
        stop_strings: a text or some: a row ends with the token that completes one of them in the text of its new
            tokens. The ids hold it; what gives text leaves it out. A beam that ends so counts as one that ends in EOS.
        tokenizer: with encode and decode; needed for stop_strings.
        window: what becomes of a prompt and its new tokens that are more than the model's max_len. "stop": decoding
            ends there, and an error says so where more was asked for. "slide": whenever max_len tokens are full, or
            the prompt leaves no room, the model reads the last max_len // 2 of them anew, as if the text began there,
            and goes on: it always sees between the last half and all of max_len tokens, at the cost of reading half a
            window for every half a window of new tokens. It needs max_new_tokens, and isn't for beams. The outputs,
            and options that look at what was said, hold the whole text.
        renormalize_logits: make log-probabilities of what the processors give. False, transformers' default, takes it
            as the scores of beams, in which tokens that were forbidden keep their share; by its rules alone.
        eos_token_id: the ids that end a row; None: the model's.
        pad_token_id: of inputs and outputs; None: the model's. It may be one that ends a row, as is usual with GPT-2:
            then it fills the outputs, and without an attention_mask nothing in input_ids is padding.
        decoder_start_token_id: what outputs of a model that reads sources begin with, unseen; None: the model's.
        use_cache: False recomputes everything for each token.
        engine: how to decode, one of `engines.ENGINES`; None: the fastest that can, but for "graph" (steps as CUDA
            graphs), which has to be asked for.
        precision: what to compute in: "fp32", "bf16", "fp16" or "int8". None: what the model says, "int8" where it was
            quantised (`model.quantize()`), else its dtype, or autocast's. The engine "cpp" computes a model in fp32 or
            bf16 in each of fp32, bf16 and int8; the others in its dtype alone. Where nobody can, the error says why.
        streamer: is told tokens as they come, of one input without beams or several samples.
        return_dict_in_generate: return a `GenerateOutput`.

    Returns:
        (batch * num_return_sequences, length) ids on the model's device: for a source the decoder_input_ids and the new
        tokens, ending in EOS and then PAD; for a prompt the prompt (padded on the left) and the new tokens.

    Raises:
        ValueError: a model that doesn't decode, ids that make no batch, settings that are out of range or contradict
            each other, an empty input, no room for a token, a model that gives NaN.
    """
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        max_length=max_length,
        min_length=min_length,
        max_time=max_time,
        stopping_criteria=stopping_criteria,
        num_beams=num_beams,
        beam_rules=beam_rules,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_beam_groups=num_beam_groups,
        diversity_penalty=diversity_penalty,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        num_return_sequences=num_return_sequences,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        suppress_tokens=suppress_tokens,
        bad_words_ids=bad_words_ids,
        shortlist=shortlist,
        forced_bos_token_id=forced_bos_token_id,
        forced_eos_token_id=forced_eos_token_id,
        logits_processor=logits_processor,
        stop_strings=stop_strings,
        window=window,
        renormalize_logits=renormalize_logits,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        decoder_start_token_id=decoder_start_token_id,
        use_cache=use_cache,
        engine=engine,
        precision=precision,
    )
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise ValueError(f"expected a streamer with put and end, got {type(streamer).__name__}")
    decoder = as_model(model)
    device = device_of(decoder)
    with evaluating(decoder) as mode, torch.inference_mode():
        builder = RequestBuilder(decoder, settings, log_probs=return_dict_in_generate, tokenizer=tokenizer)
        pad_id = builder.ids.pad
        marks = builder.ids.marks_padding
        inputs, layout = as_inputs(input_ids, attention_mask, pad_id, device, marks_padding=marks)
        rows = [row[:length] for row, length in zip(inputs.tolist(), layout.seqlens.tolist(), strict=True)]
        prefixes = _prefixes(decoder_input_ids, len(rows), decoder, builder)
        width = inputs.shape[1]
        checked = [builder.check(row, prefix, width=width) for row, prefix in zip(rows, prefixes, strict=True)]
        # Samples of one input slide apart: then each is a request.
        samples: list[int | None] = [*range(settings.samples)] if settings.window == "slide" else [None]
        requests = [builder.build(one, place=place, sample=k) for place, one in enumerate(checked) for k in samples]
        if streamer is not None:
            if len(requests) > 1 or requests[0].search.peak_rows > 1:
                raise ValueError("expected one input, without beams or several samples, along with a streamer")
            requests[0].on_token = _listener(streamer, requests[0].before)
        run(new_scheduler(builder.engine), requests, mode.hold)
        if streamer is not None:
            streamer.end()
        found = [request.results for request in requests]
        found = [sum(found[first : first + len(samples)], []) for first in range(0, len(found), len(samples))]
        out = _gathered(found, prefixes, settings.num_return_sequences, pad_id, device)
        if is_decoder_only(decoder):
            prompts = left_padded(inputs, layout, pad_id).repeat_interleave(num_return_sequences, 0)
            out.sequences = torch.cat((prompts, out.sequences), 1)
    # Tensors of inference mode can't enter a graph; copies made outside of it can.
    out = GenerateOutput(out.sequences.clone(), out.scores.clone(), out.token_log_probs.clone())
    return out if return_dict_in_generate else out.sequences


def new_scheduler(
    engine: Engine, max_rows: int | None = None, max_bytes: int | None = None, *, is_endless: bool = False
) -> Scheduler:
    """A scheduler within the memory that is usual on the engine's device.

    Args:
        engine: what steps.
        max_rows: decoded together; None: 512 on a CPU, 1,024 on a GPU.
        max_bytes: of caches; None: 512 MiB on a CPU, a quarter of the free memory on a GPU.
        is_endless: see `Scheduler`.
    """
    is_gpu = engine.device.type == "cuda"
    if max_bytes is None:
        max_bytes = torch.cuda.mem_get_info(engine.device)[0] // 4 if is_gpu else _CPU_BYTES
    max_rows = max_rows or (_GPU_ROWS if is_gpu else _CPU_ROWS)
    return Scheduler(engine, max_rows=max_rows, max_bytes=max_bytes, is_endless=is_endless)


def _prefixes(decoder_input_ids: TokenIds | None, count: int, model: Model, builder: RequestBuilder) -> list[list[int]]:
    """What each output begins with, without the start token."""
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


def _gathered(
    results: list[list[Hypothesis]], prefixes: list[list[int]], num_return: int, pad_id: int, device: torch.device
) -> GenerateOutput:
    """What was found as tensors; rows of PAD where an input has fewer hypotheses than were asked for."""
    sequences: list[list[int]] = []
    log_probs: list[list[float]] = []
    scores: list[float] = []
    for found, prefix in zip(results, prefixes, strict=True):
        missing = num_return - len(found)
        sequences += [[*prefix, *hypothesis.tokens] for hypothesis in found] + [[]] * missing
        log_probs += [hypothesis.log_probs for hypothesis in found] + [[]] * missing
        scores += [hypothesis.score for hypothesis in found] + [NEVER] * missing
    longest = max(map(len, log_probs))
    padded = [[*row, *[0.0] * (longest - len(row))] for row in log_probs]
    return GenerateOutput(
        pad(sequences, pad_id).to(device),
        torch.tensor(scores, dtype=torch.float32, device=device),
        torch.tensor(padded, dtype=torch.float32, device=device),
    )
