"""`generate` of accelerated models of transformers, on the C++ engine or, on a GPU, on captured steps.

transformers' own `generate` reads the options, checks them and prepares ids, masks, processors and stopping criteria,
so that its rules, warnings and errors hold here too. Then it calls methods that a class of this library overrides: one
runs the encoder and one makes the cache (both are deferred), and in the loop (`_sample`, `_beam_search`) the engine
takes over. If it can't serve the call, the loop runs as transformers wrote it.

The engine serves only known cases, which are checked at three points: the model when it is first called, and again
after it has changed (`engine_models`); the names of a call's options before the call begins; and, in the loop, the
objects that transformers has made from the options.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from fastformer.engine.frozen import UnfitError
from fastformer.generation.drafts import DraftModel
from fastformer.generation.engines.base import Prompt
from fastformer.generation.engines.cpp_support import PACKED_PRECISIONS
from fastformer.generation.model_protocols import device_of, is_decoder_only
from fastformer.integrations.engine_loops import DraftingStepper, Inputs, Stepper, search_whole, whole_search
from fastformer.integrations.engine_models import (
    ENGINE_MODELS,
    EngineModel,
    ForeignEngine,
    ForeignGraphEngine,
    FoundModels,
    Setting,
    counts_words,
    has_graphs,
    why_not_converted,
)
from fastformer.integrations.known import why_not_at_this_moment
from fastformer.models import GPT

logger = logging.getLogger("fastformer")

# The options of a GenerationConfig that the engine serves with any value: transformers turns them into ids, lengths,
# processors, criteria and loops.
_SERVED = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "max_time", "stop_strings"),
        *("do_sample", "num_beams", "num_return_sequences", "length_penalty", "renormalize_logits"),
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "remove_invalid_values"),
        *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        # None of these changes a result.
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("output_scores", "output_logits", "return_dict_in_generate", "disable_compile", "transformers_version"),
    }
)
# The kinds of caches that hold the same keys and values: a published Gemma 2 has "hybrid" in its generation_config. A
# "quantized" one rounds them, and an "offloaded" one is an error on a machine without a GPU.
_CACHES = ("dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked")
# Options that the engine serves if they have one of these values, None or transformers' default.
_SERVED_VALUES: dict[str, tuple[object, ...]] = {
    "use_cache": (True, False), "cache_implementation": _CACHES, "guidance_scale": (1, 1.0), "num_beam_groups": (1,),
    "diversity_penalty": (0, 0.0), "output_attentions": (False,), "output_hidden_states": (False,),
    "token_healing": (False,), "is_assistant": (False,), "low_memory": (False,), "use_mtp": (False,),
}  # fmt: skip
_PLAIN = GenerationConfig()
_DEFAULTS = {name: value for name, value in vars(_PLAIN).items() if type(value) in (bool, int, float, str, type(None))}
# The arguments of generate that are not options, and those of them that must be None or False.
_ARGUMENTS = frozenset(
    {
        *("inputs", "input_ids", "attention_mask", "decoder_input_ids", "generation_config", "logits_processor"),
        *("stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer", "assistant_model"),
    }
)
_NAMES = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:-1]  # without self and kwargs
_UNSERVED = frozenset(_NAMES) - _ARGUMENTS

_READS = frozenset({"attention_mask", "encoder_outputs", "position_ids", "use_cache", "logits_to_keep"})


@dataclass
class Call:
    """A call of generate that may run on the engine.

    Attributes:
        model: the model whose `generate` was called.
        found: the findings about the model.
        setting: the options of `accelerate` for it.
        encode: runs the encoder, if that is deferred.
        make_cache: makes the cache, if that is deferred.
    """

    model: nn.Module
    found: EngineModel
    setting: Setting
    encode: Callable[[], dict[str, Any]] | None = None
    make_cache: Callable[[dict[str, Any]], object] | None = None


_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("fastformer_generate", default=None)


class Deferred(dict[str, Any]):
    """A placeholder for an encoder's output that no code has asked for yet.

    Attributes:
        inputs: (batch, seqlen) ids of the sources.
    """

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def _signed(generate: Callable[..., Any]) -> Callable[..., Any]:
    generate.__doc__ = GenerationMixin.generate.__doc__
    generate.__signature__ = inspect.signature(GenerationMixin.generate)  # type: ignore[attr-defined]
    return generate


class OnEngine:
    """A model of transformers whose `generate` runs on the engine if the engine can serve the call.

    Attributes:
        MODELS: the findings about models of the class.
    """

    MODELS: ClassVar[FoundModels[Any]] = ENGINE_MODELS

    def why_not_options(self) -> str | None:
        """Returns why the options of the generation_config keep `generate` off the engine; None if they don't."""
        return _why_not_options(self, (), {})

    @_signed
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers' GenerationMixin.generate."""
        call = _begin(cast(nn.Module, self), args, kwargs)
        token = _CALL.set(call)
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            _CALL.reset(token)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        make = super()._prepare_cache_for_generation  # type: ignore[misc]
        call = _call_of(self)
        if call is None:
            return make(*args, **kwargs)

        def later(model_kwargs: dict[str, Any]) -> object:
            if "model_kwargs" in kwargs:
                return make(*args, **kwargs | {"model_kwargs": model_kwargs})
            return make(args[0], model_kwargs, *args[2:], **kwargs)

        call.make_cache = later
        return None

    def _sample(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return _run(self, "_sample", super()._sample, input_ids, kwargs)  # type: ignore[misc]

    def _beam_search(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return _run(self, "_beam_search", super()._beam_search, input_ids, kwargs)  # type: ignore[misc]

    def _assisted_decoding(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return _run(self, "_assisted_decoding", super()._assisted_decoding, input_ids, kwargs)  # type: ignore[misc]

    # transformers passes on the inputs if they are among the parameters.
    _assisted_decoding.__signature__ = inspect.signature(GenerationMixin._assisted_decoding)  # type: ignore[attr-defined]


def _encoding_later(name: str) -> Any:
    """Makes a method by which `generate` gets the encoder's output only if something reads it: the engine encodes."""

    def method(self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        encode = getattr(super(OnEngine, self), name)
        call = _call_of(self)
        if call is None:
            return encode(inputs_tensor, model_kwargs, *args, **kwargs)
        before = dict(model_kwargs)
        call.encode = lambda: encode(inputs_tensor, dict(before), *args, **kwargs)["encoder_outputs"]
        model_kwargs["encoder_outputs"] = Deferred(inputs_tensor)
        return model_kwargs

    return method


# The method of transformers' `generate` that runs the encoder has different names in its versions. `Seq2SeqModel` in
# heads.py has the same method after this one, which calls it.
ENCODING_METHODS = tuple(
    name
    for name in (
        "_prepare_encoder_decoder_kwargs_for_generation",
        "_prepare_text_encoder_decoder_kwargs_for_generation",
    )
    if hasattr(GenerationMixin, name)
)
for _name in ENCODING_METHODS:
    setattr(OnEngine, _name, _encoding_later(_name))


def _call_of(model: object) -> Call | None:
    call = _CALL.get()
    return call if call is not None and call.model is model else None


def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Returns a call that may run on the engine. None: it falls back to transformers, and a debug line says why."""
    if (setting := ENGINE_MODELS.setting(model)) is None:
        return None
    found = _why_not_options(model, args, kwargs) or _why_not_here(model) or ENGINE_MODELS.of(model)
    if isinstance(found, EngineModel) and found.trains:
        found = "a module inside of it is in training"
    if isinstance(found, str):
        _note(model, found)
        return None
    return Call(model, found, setting)


def _note(model: nn.Module, reason: str) -> None:
    logger.debug("generate of %s goes transformers' own way: %s", type(model).__name__, reason)


def _why_not_here(model: nn.Module) -> str | None:
    """Returns why no call of `generate` can run on the engine at this moment; None if calls can."""
    if model.training:
        return "the model is in training, whose dropout the engine doesn't draw: call model.eval()"
    return why_not_at_this_moment()


def _why_not_options(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns why a call falls back to transformers, by the names of its arguments alone; None if it needn't."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    for name, value in given.items():
        if name in _UNSERVED and value is not None and value is not False:
            return f"the engine has no {name}"
        if name not in _ARGUMENTS and name not in _UNSERVED and not _is_served(name, value):
            return f"the engine doesn't know {name}={value!r:.60}"
    both = (given.get("generation_config"), getattr(model, "generation_config", None))
    configs = [each for each in both if each is not None]
    for config in configs:
        if type(config) is not GenerationConfig:
            return f"its generation_config is a {type(config).__name__}"
        for name, value in vars(config).items():
            is_default = value is None or value is _DEFAULTS.get(name, _DEFAULTS)
            if (
                name not in _SERVED
                and not (name in _DEFAULTS and is_default)
                and name[0] != "_"
                and not _is_served(name, value)
            ):
                return f"the engine doesn't know {name}={value!r:.60} of the generation_config"
    if given.get("return_dict_in_generate") or any(each.return_dict_in_generate for each in configs):
        for name in ("use_cache", "cache_implementation"):
            if given.get(name):
                return f"the call requests the cache ({name}={given[name]!r} along with return_dict_in_generate)"
    return None


def _is_served(name: str, value: Any) -> bool:
    # For some inputs of the model, None differs from an omitted input: position_ids=None hides padding on the left.
    if name in _SERVED or (value is None and (name == "inputs_embeds" or hasattr(_PLAIN, name))):
        return True
    if name in _SERVED_VALUES:
        return any(value is one or (type(value) is type(one) and value == one) for one in _SERVED_VALUES[name])
    return hasattr(_PLAIN, name) and type(value) in (bool, int, float, str) and value == getattr(_PLAIN, name)


class _DeclinedError(Exception):
    """The engine can't serve a call; the text says why."""


def _run(model: Any, name: str, plain: Callable[..., Any], input_ids: Tensor, kwargs: dict[str, Any]) -> Any:
    """Runs a loop of transformers on the engine, or as transformers wrote it if the engine can't."""
    call = _call_of(model)
    if call is None:
        return plain(input_ids, **kwargs)
    try:
        return _decoding(call, name, input_ids, kwargs)()
    except (_DeclinedError, UnfitError) as error:
        _note(call.model, str(error))
    if call.encode is not None:
        outputs = call.encode()
        copies = len(input_ids) // len(kwargs["encoder_outputs"].inputs)
        for key, value in outputs.items():
            if isinstance(value, Tensor) and copies > 1:
                outputs[key] = value.repeat_interleave(copies, 0)
        kwargs["encoder_outputs"] = outputs
    if call.make_cache is not None:
        call.make_cache(kwargs)  # a static one is as long as the encoder's output
    return plain(input_ids, **kwargs)


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    """Declines a call whose cache, which the engine makes as long as the limits allow, doesn't fit into a GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _DeclinedError(f"there is no memory for its cache: {error!s:.200}") from error


def _decoding(call: Call, name: str, input_ids: Tensor, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Returns the function that decodes a call on the engine, and may still raise a `_DeclinedError`.

    Raises:
        _DeclinedError: the engine can't serve the call.
        UnfitError: the engine can't decode this model.
    """
    config, streamer = kwargs["generation_config"], kwargs.get("streamer")
    processors, criteria = kwargs["logits_processor"], kwargs["stopping_criteria"]
    unknown = {key for key, value in kwargs.items() if value is not None and value is not False} - _READS - {
        *("generation_config", "logits_processor", "stopping_criteria", "streamer", "tokenizer", "assistant_model"),
        "inputs_tensor",
    }  # fmt: skip
    if unknown:
        raise _DeclinedError(f"the model would have to read {', '.join(sorted(unknown))}")
    if kwargs.get("use_cache") is None:  # transformers then reads the ids as if there were a cache
        raise _DeclinedError(f"the call says use_cache={kwargs.get('use_cache')!r}")
    for option in ("num_beams", "num_return_sequences"):
        if type(value := getattr(config, option)) is not int or value < 1:
            raise _DeclinedError(f"{option} is {value!r}")
    # If a mask is all ones, transformers passes on only its length.
    if getattr(config, "_mask_length", None) not in (None, input_ids.shape[1]):
        raise _DeclinedError("the attention_mask does not fit the ids")
    is_assisted, draft_model = name == "_assisted_decoding", None
    if is_assisted and (len(input_ids) > 1 or not kwargs["use_cache"]):
        raise _DeclinedError("assisted decoding is for one row and a cache")  # transformers raises the error
    precision = call.found.acting_precision(call.setting)
    if is_assisted and has_graphs(call.found.device):
        raise _DeclinedError("a captured step reads no drafts")
    found = call.found.of_length(_longest(input_ids, kwargs.get("attention_mask")))
    engine = found.engine(call.model, precision)
    inputs = _inputs(call, engine, input_ids, kwargs)
    vocab_size = engine.shape.config.vocab_size
    pad = config._pad_token_tensor
    # Without beams, the model reads the PAD behind a row's end as long as others go on.
    if config.num_beams == 1 and len(input_ids) > 1 and pad is not None and not 0 <= int(pad) < vocab_size:
        raise _DeclinedError(f"PAD ({int(pad)}) is not in the vocabulary of {vocab_size}")

    if is_assisted and (assistant := kwargs.get("assistant_model")) is not None:
        draft_model = _draft_model(assistant, cast(ForeignEngine, engine))

    def step_by_step() -> Any:
        options: dict[str, Any] = {"logits_processor": processors, "stopping_criteria": criteria}
        if name != "_beam_search":
            options["streamer"] = streamer
        with torch.no_grad():
            if is_assisted:
                lookup = config.prompt_lookup_num_tokens or 0
                stepper: Stepper = DraftingStepper(cast(ForeignEngine, engine), inputs, draft_model, lookup)
            else:
                with _fitting():
                    stepper = Stepper(engine, inputs)
            loop = getattr(GenerationMixin, "_sample" if is_assisted else name)
            return stepper.decode(loop, config, **options)

    rules = whole_search(processors, criteria, config, input_ids, vocab_size)
    if rules is not None and (streamer is None or len(input_ids) == 1):

        def whole() -> Any:
            with _fitting() if streamer is None else contextlib.nullcontext():  # which may have got tokens
                found = search_whole(engine, inputs, rules, config, streamer, draft_model)
            if found is None:
                return step_by_step()
            return _as_asked(found, config, engine)

        return whole

    return step_by_step


def _draft_model(assistant: Any, engine: ForeignEngine) -> DraftModel:
    """Returns the drafts of a smaller model, in its own precision of `accelerate` or in that of the engine.

    Raises:
        _DeclinedError, UnfitError: the smaller model can't draft on the engine.
    """
    findings = ENGINE_MODELS.of(assistant) if isinstance(assistant, PreTrainedModel) else "it is no model"
    if not isinstance(findings, EngineModel):
        raise _DeclinedError(f"the engine can't draft with the assistant_model: {findings}")
    setting = ENGINE_MODELS.setting(assistant)
    precision = (setting and setting.precision) or engine.precision
    small = ForeignEngine(findings.weights(assistant, precision), precision)
    if small.has_states:
        raise _DeclinedError("the assistant_model has layers with states, which keep rejected drafts")
    sizes = [
        (
            is_decoder_only(each.shape),
            each.shape.config.vocab_size,
            getattr(each.shape.config, "source_vocab_size", None),
        )
        for each in (small, engine)
    ]
    if sizes[0] != sizes[1]:
        raise _DeclinedError("the assistant_model has other vocabularies, or is of another kind")
    return DraftModel(small, int(small.shape.config.max_len))


def _as_asked(found: Tensor, config: Any, engine: ForeignEngine | ForeignGraphEngine) -> Any:
    if not config.return_dict_in_generate:
        return found
    kind = "GenerateDecoderOnlyOutput" if is_decoder_only(engine.shape) else "GenerateEncoderDecoderOutput"
    return getattr(transformers.generation, kind)(sequences=found)


def _inputs(
    call: Call, engine: ForeignEngine | ForeignGraphEngine, input_ids: Tensor, kwargs: dict[str, Any]
) -> Inputs:
    config = kwargs["generation_config"]
    copies = max(config.num_beams, config.num_return_sequences)
    limits = [config.max_length, *(one.max_length for one in kwargs["stopping_criteria"] if hasattr(one, "max_length"))]
    begun, mask = input_ids.shape[1], kwargs.get("attention_mask")
    limit = math.ceil(max(limits)) - begun
    sizes: Any = engine.shape.config
    mask = None if mask is None else mask[::copies]
    rows = _ids(input_ids[::copies], sizes.vocab_size, engine.device)
    if isinstance(engine.shape, GPT):
        prompts = [Prompt(None, row) for row in _unpadded(rows, mask, left=True, right=False)]
    else:
        deferred = kwargs.get("encoder_outputs")
        if not isinstance(deferred, Deferred):
            raise _DeclinedError("the encoder's output was passed in")
        sources = _ids(deferred.inputs, sizes.source_vocab_size or sizes.vocab_size, engine.device)
        # Absolute positions also count the padding in front of a source.
        has_words = counts_words(call.model)
        sources = _unpadded(sources, mask, left=has_words or sizes.positions == "relative", right=True)
        if has_words:
            _check_words(call.model, deferred.inputs, mask, rows)
        if len(sources) != len(rows):
            raise _DeclinedError(f"there are {len(sources)} sources for {len(rows)} prefixes")
        prompts = [Prompt(source, row) for source, row in zip(sources, rows, strict=True)]
        longest = max(map(len, sources))
        if longest > sizes.max_len:
            raise _DeclinedError(f"a source of {longest} tokens is longer than the model's {sizes.max_len} positions")
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + limit - 1 > sizes.max_len:
        raise _DeclinedError(f"{longest} + {limit} tokens may not fit into the model's {sizes.max_len} positions")
    return Inputs(input_ids, prompts, copies, limit, call.model)


def _longest(ids: Tensor, mask: Any) -> int:
    """Returns the length of the longest prompt, of a mask that `_unpadded` will check."""
    is_mask = isinstance(mask, Tensor) and mask.shape == ids.shape
    return int(mask.sum(1).max()) if is_mask else ids.shape[1]


def _check_words(model: Any, ids: Tensor, mask: Tensor | None, rows: list[list[int]]) -> None:
    pad = model.config.pad_token_id
    is_word = ids != pad
    if not bool((is_word if mask is None else is_word == (mask == 1)).all()) or any(pad in row for row in rows):
        raise _DeclinedError("its positions count ids that are not PAD, which differ from those in the attention_mask")


def _ids(ids: Tensor, vocab_size: int, device: torch.device) -> list[list[int]]:
    is_batch = ids.dim() == 2 and ids.device == device and ids.dtype in (torch.int32, torch.int64) and ids.numel()
    if not is_batch:
        raise _DeclinedError(f"ids are {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}")
    rows: list[list[int]] = ids.tolist()
    if min(map(min, rows)) < 0 or max(map(max, rows)) >= vocab_size:
        raise _DeclinedError(f"ids are not all in the vocabulary of {vocab_size}")
    return rows


def _unpadded(rows: list[list[int]], mask: Any, *, left: bool, right: bool) -> list[list[int]]:
    """Returns the rows without the padding that a mask marks, which may be only on the sides that are allowed here."""
    if mask is None:
        return rows
    if not isinstance(mask, Tensor) or mask.shape != (len(rows), len(rows[0])):
        raise _DeclinedError("the attention_mask does not fit the ids")
    found = []
    for row, keep in zip(rows, mask.tolist(), strict=True):
        kept = [token for token, one in zip(row, keep, strict=True) if one == 1]
        first = keep.index(1) if 1 in keep else 0
        last = first + len(kept)
        # A mask must be one block of ones with zeros around it.
        if not kept or any(one != 1 for one in keep[first:last]) or any(one != 0 for one in keep[:first] + keep[last:]):
            raise _DeclinedError("the attention_mask isn't one block of ones in each row")
        if (first and not left) or (last < len(row) and not right):
            side = "left" if first and not left else "right"
            raise _DeclinedError(f"padding on the {side} shifts what this model computes")
        found.append(kept)
    return found


def decide(model: nn.Module, precision: str | None, *, wanted: bool) -> None:
    """Gives the models of transformers inside of a module their setting.

    Args:
        model: the argument of `accelerate`.
        precision: the precision of `accelerate`; None keeps that of an earlier call.
        wanted: whether `generate` runs on the engine at all.

    Raises:
        ValueError: an unknown precision.
    """
    if precision is not None and precision not in PACKED_PRECISIONS:
        known = ", ".join(map(repr, PACKED_PRECISIONS))
        raise ValueError(f"expected precision to be one of {known}, got {precision!r}")
    for module in model.modules():
        if isinstance(module, OnEngine):
            module.MODELS.decide(cast(nn.Module, module), precision, wanted=wanted)


def forget(model: nn.Module) -> None:
    """Undoes `decide`, and drops the weights that were packed."""
    for module in model.modules():
        if isinstance(module, OnEngine):
            module.MODELS.forget(cast(nn.Module, module))


def described(model: nn.Module) -> dict[str, str]:
    """Returns for each model of transformers inside of a module, by its name, how its `generate` decodes, and why."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, OnEngine):
            if isinstance(module, PreTrainedModel) and module.can_generate():
                found[name] = f"transformers' own: {why_not_converted(module)}"
            continue
        precision, reason = module.MODELS.described(cast(nn.Module, module))
        where = "by captured steps" if has_graphs(device_of(cast(Any, module))) else "on the C++ engine"
        reason = reason or module.why_not_options()
        found[name] = f"{where} in {precision}" if reason is None else f"transformers' own: {reason}"
    return found
