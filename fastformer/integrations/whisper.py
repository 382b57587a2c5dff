"""transformers' Whisper on the C++ engine: its encoder, and the loops of its `generate`.

transformers' own `generate` makes the windows, prompts, processors and fallbacks. The engine computes the states of the
windows, and the logits of each step.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper import modeling_whisper as whisper

from fastformer.audio.model import PRECISIONS, SpeechModel
from fastformer.checkpoints.speech import SpeechWeights, from_state
from fastformer.engine.frozen import UnfitError
from fastformer.generation.engines.base import Prompt
from fastformer.generation.engines.cpp_support import why_no_cpp_engine
from fastformer.integrations.as_made import why_not_as_made
from fastformer.integrations.engine_generate import ENCODING_METHODS, OnEngine
from fastformer.integrations.engine_loops import Inputs, Stepper
from fastformer.integrations.engine_models import FoundModel, FoundModels
from fastformer.integrations.heads import derive
from fastformer.integrations.known import CACHE, why_not_at_this_moment
from fastformer.integrations.replace import Replacement, original_class

logger = logging.getLogger("fastformer")
# The inputs of a forward that stay as they are if the engine computes the encoder's states.
_READ_BY_DECODER = frozenset(
    {
        *("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids"),
        *("past_key_values", "labels", "use_cache", "return_dict", "cache_position"),
    }
)


class FoundSpeech(FoundModel[SpeechModel]):
    """A Whisper that the engine can run; see `FoundModel`."""

    def convert(self, model: Any) -> SpeechWeights:
        """See `FoundModel`."""
        return from_state(model.config.to_dict(), model.generation_config.to_dict(), model.state_dict())

    def pack(self, model: Any, converted: SpeechWeights, precision: str) -> SpeechModel:
        """See `FoundModel`."""
        if precision not in PRECISIONS:
            raise UnfitError(f"speech runs in fp32, bf16 and int8, not in {precision}")
        return SpeechModel(converted, precision=precision)


def _why_not(model: Any) -> str | None:
    if (missing := why_no_cpp_engine()) is not None:
        return f"there is no C++ engine: {missing}"
    if original_class(model) is not whisper.WhisperForConditionalGeneration:
        return f"{original_class(model).__name__} is not transformers' WhisperForConditionalGeneration"
    return why_not_as_made(model)


SPEECH_MODELS = FoundModels("_fastformer_speech_plan", FoundSpeech, _why_not)


class _Steps(NamedTuple):
    """A session whose rows take a token each; see `Stepper`."""

    session: Any
    vocab_size: int
    threads: int

    def logits(self, tokens: list[int]) -> Tensor:
        logits = torch.empty(len(tokens), self.vocab_size)
        self.session.step(tokens, 1, False, [*range(len(tokens))], logits.numpy(), self.threads)
        return logits

    def fork(self, parents: list[list[int]]) -> None:
        self.session.reorder(parents)


class SpeechStepper(Stepper):
    """A `Stepper` whose sources are the states of windows.

    Args:
        speech: computes the logits.
        states: (windows, time, d_model).
        inputs: the inputs of the call.
    """

    def __init__(self, speech: SpeechModel, states: Tensor, inputs: Inputs) -> None:
        self.config, self.device = inputs.model.config, torch.device("cpu")
        self.generation_config, self._inputs = inputs.model.generation_config, inputs
        prompts = [[*prompt.tokens[:-1]] for prompt in inputs.prompts]
        session = speech.new_session(states.numpy(), prompts, 2 * len(inputs.beginning) * (inputs.limit + 32))
        if inputs.copies > 1:
            session.reorder([[0] * inputs.copies for _ in prompts])
        self._batch = _Steps(session, speech.config.vocab_size, speech.threads)  # type: ignore[assignment]


class OnSpeechEngine(OnEngine):
    """A Whisper whose encoder and whose `generate` run on the engine if the engine can serve the call."""

    MODELS = SPEECH_MODELS

    def why_not_options(self) -> str | None:
        """See `OnEngine`."""
        return None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers' WhisperGenerationMixin.generate."""
        return super(OnEngine, self).generate(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers' WhisperForConditionalGeneration."""
        features = args[0] if args else kwargs.get("input_features")
        given = {name for name, value in kwargs.items() if value is not None and value is not False}
        if len(args) < 2 and features is not None and given <= _READ_BY_DECODER | {"input_features"}:
            states = self._encoded(features)
            if states is not None:
                kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    # transformers reads the names of a model's inputs from its signature.
    forward.__signature__ = inspect.signature(whisper.WhisperForConditionalGeneration.forward)  # type: ignore[attr-defined]

    def _encoded(self, features: Any) -> Tensor | None:
        """Returns the states of windows; None if the engine can't compute them."""
        config = cast(Any, self).config
        if config.output_attentions or config.output_hidden_states or not isinstance(features, Tensor):
            return None
        speech = _speech_of(self)
        if speech is None or features.dtype not in (torch.float32, torch.bfloat16) or features.device.type != "cpu":
            return None
        frames = speech.config.max_frames
        if features.dim() != 3 or features.shape[2] != frames or not bool(features.isfinite().all()):
            return None
        return torch.from_numpy(speech.encode(features.float().numpy())).to(features.dtype)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super(OnEngine, self)._prepare_cache_for_generation(*args, **kwargs)  # type: ignore[misc]

    def _sample(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return _run(self, "_sample", super(OnEngine, self)._sample, input_ids, kwargs)  # type: ignore[misc]

    def _beam_search(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return _run(self, "_beam_search", super(OnEngine, self)._beam_search, input_ids, kwargs)  # type: ignore[misc]


def _encode_with(name: str) -> Any:
    def method(self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        asking = [vars(each) for each in (*args, *kwargs.values()) if isinstance(each, GenerationConfig)]
        wants_more = any(
            each.get(option)
            for each in (model_kwargs, *asking)
            for option in ("output_attentions", "output_hidden_states")
        )
        if (states := None if wants_more else self._encoded(inputs_tensor)) is None:
            return getattr(super(OnEngine, self), name)(inputs_tensor, model_kwargs, *args, **kwargs)
        model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
        return model_kwargs

    return method


for _name in ENCODING_METHODS:
    setattr(OnSpeechEngine, _name, _encode_with(_name))


def _speech_of(model: Any) -> SpeechModel | None:
    """Returns the engine's model with the current weights; None: the call goes transformers' own way."""
    setting = SPEECH_MODELS.setting(model)
    if setting is None:
        return None
    reason: str | None = None
    if model.training or torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        reason = "it is in training, or records gradients"
    found = reason or why_not_at_this_moment() or SPEECH_MODELS.of(model)
    try:
        if isinstance(found, FoundSpeech) and not found.trains:
            return found.weights(model, found.acting_precision(setting))
        reason = "a module inside of it is in training" if isinstance(found, FoundSpeech) else found
    except UnfitError as error:
        reason = str(error)
    logger.debug("%s goes transformers' own way: %s", type(model).__name__, reason)
    return None


def _run(model: Any, name: str, plain: Callable[..., Any], input_ids: Tensor, kwargs: dict[str, Any]) -> Any:
    """Runs a loop of transformers on the engine, or as transformers wrote it if the engine can't."""
    with torch.no_grad():
        speech = _speech_of(model)
    config, outputs, cache = kwargs["generation_config"], kwargs.get("encoder_outputs"), kwargs.get(CACHE)
    mask, states = kwargs.get("decoder_attention_mask"), getattr(outputs, "last_hidden_state", None)
    copies = max(config.num_beams, config.num_return_sequences)
    if (
        speech is None
        or not isinstance(states, Tensor)
        or len(states) != len(input_ids)
        or not kwargs.get("use_cache")
        or config.output_attentions
        or config.output_hidden_states
        or (mask is not None and not bool((mask == 1).all()))
        or (cache is not None and cache.get_seq_length())
        or config.max_length > speech.config.max_length
    ):
        return plain(input_ids, **kwargs)
    prompts = [Prompt(None, row) for row in input_ids[::copies].tolist()]
    inputs = Inputs(input_ids, prompts, copies, config.max_length - input_ids.shape[1], model)
    options = {key: kwargs[key] for key in ("logits_processor", "stopping_criteria")}
    if name == "_sample":
        options["streamer"] = kwargs.get("streamer")
    with torch.no_grad():
        stepper = SpeechStepper(speech, states[::copies].float(), inputs)
        return stepper.decode(getattr(GenerationMixin, name), config, **options)


WhisperForConditionalGeneration = derive(__name__, whisper.WhisperForConditionalGeneration, OnSpeechEngine)
REPLACEMENTS = (Replacement(whisper.WhisperForConditionalGeneration, WhisperForConditionalGeneration),)
