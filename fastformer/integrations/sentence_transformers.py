"""SentenceTransformer: a batch of texts goes from the tokenizer through one call of the engine to its embeddings.

`encode` stays sentence-transformers', with all its options. For one text the library's own way through devices, modes,
tensors and modules takes longer than the engine. It is left out where it can't change the result: a Transformer whose
model runs on the engine, a Pooling of one kind and a Normalize, all of the library's own classes without hooks or
patches. Any other model or call goes the library's way.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, NamedTuple

import sentence_transformers
import torch
import torch.nn.functional as F
import transformers
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import PaddingStrategy

from fastformer.engine.checks import is_its_own, is_unhooked, is_written_in
from fastformer.engine.frozen import Guards, Plans, UnfitError
from fastformer.integrations.engine_encode import ENCODERS, EncoderModel, OnEncoder
from fastformer.integrations.heads import derive
from fastformer.integrations.known import code_of, why_not_at_this_moment
from fastformer.integrations.replace import Replacement, original_class
from fastformer.models.pooling import POOLINGS

logger = logging.getLogger("fastformer")

_Fast = transformers.PreTrainedTokenizerFast
# The arguments of sentence-transformers' method; a version with others keeps its class.
_KNOWN = (
    *("self", "inputs", "prompt", "batch_size", "show_progress_bar", "output_value", "save_to_cpu"),
    *("normalize_embeddings", "truncate_dim", "device", "kwargs"),
)
_IN_ONE_CALL = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


class _Plan(NamedTuple):
    """A model whose texts need no module of sentence-transformers.

    Attributes:
        encoder: the model of transformers.
        found: the findings about it.
        tokenizer: its tokenizer.
        truncation: how the tokenizer truncates a text: the strategy, and the most tokens.
        has_types: whether the model gets the token types of the tokenizer.
        pooling: the kind of pooling.
        normalizes: whether a Normalize is behind it.
        takes_prompts: whether the tokens of a prompt are pooled.
    """

    encoder: nn.Module
    found: EncoderModel
    tokenizer: Any
    truncation: tuple[Any, int | None]
    has_types: bool
    pooling: str
    normalizes: bool
    takes_prompts: bool


def _why_not_plain(module: nn.Module, kind: type[nn.Module], *methods: str) -> str | None:
    """Returns why calling a module may run other code than that of a class of the library; None if it can't."""
    if original_class(module) is not kind or not is_unhooked(module):
        return f"{type(module).__name__} is not a plain {kind.__name__}"
    own = [name for name in vars(module) if callable(getattr(kind, name, None))]
    own += [name for name in ("forward", *methods) if not is_its_own(kind, name)]
    return f"{kind.__name__}.{own[0]} was replaced" if own else None


def _found(model: Any) -> _Plan | str:
    """Returns the plan of a SentenceTransformer in its current state, or the reason why it has none."""
    parts = [*model.children()]
    kinds = (Transformer, Pooling, Normalize)[: max(len(parts), 2)]
    if len(parts) != len(kinds):
        return "its modules are not a Transformer, a Pooling and perhaps a Normalize"
    reason = _why_not_plain(model, sentence_transformers.SentenceTransformer, "preprocess", "_inference")
    for part, kind in zip(parts, kinds, strict=True):
        reason = reason or _why_not_plain(part, kind, *(("preprocess",) if kind is Transformer else ()))
    if reason is not None:
        return reason
    first, pooling, *rest = parts
    if any(module.training for module in (model, *parts)):
        return "it is in training"
    if any((first.processing_kwargs, first.query_expansion, first.query_length, first.document_length)):
        return "its tokenizer has options"
    outputs = {name: dict(params) for name, params in first.modality_config.items()}
    if outputs != _IN_ONE_CALL or first.module_output_name != "token_embeddings" or first.can_flatten_inputs:
        return "its model has other inputs than texts, or other outputs than their states"
    if pooling.pooling_mode not in POOLINGS:
        return f"its pooling is {pooling.pooling_mode}"
    if any({each.module_input_name, each.module_output_name} != {"sentence_embedding"} for each in rest):
        return "it normalizes something else than the embedding"
    encoder, tokenizer = first.model, first.processor
    if not isinstance(encoder, OnEncoder) or not is_unhooked(encoder) or not encoder.is_encoder_stack():
        return "its model is not an encoder that the engine knows, without hooks"
    found = ENCODERS.of(encoder)
    if isinstance(found, str):
        return found
    if type(found) is not EncoderModel or found.precision != "fp32" or not found.is_evaluating:
        return "its model is not an encoder in fp32, in evaluation"
    config: Any = encoder.config
    if config.output_hidden_states or config.output_attentions:
        return "its config asks for hidden states or attentions"
    if (reason := _why_not_tokenizer(tokenizer)) is not None:
        return reason
    # As Transformer.preprocess asks for it.
    _, *truncation, _ = tokenizer._get_padding_truncation_strategies(padding=True, truncation="longest_first")
    has_types = "token_type_ids" in tokenizer.model_input_names and (
        first.model_forward_params is None or "token_type_ids" in first.model_forward_params
    )
    return _Plan(
        *(encoder, found, tokenizer, tuple(truncation), has_types),
        *(pooling.pooling_mode, bool(rest), pooling.include_prompt),
    )


def _why_not_tokenizer(tokenizer: Any) -> str | None:
    """Returns why a tokenizer's backend may give other ids than a call of the tokenizer; None if it can't."""
    if not isinstance(tokenizer, _Fast):
        return "its tokenizer has no backend in Rust"
    kind: Any = type(tokenizer)
    if kind._encode_plus is not _Fast._encode_plus or kind.__call__ is not PreTrainedTokenizerBase.__call__:
        return "its tokenizer has a call of its own"
    own = [name for name in vars(tokenizer) if callable(getattr(kind, name, None))]
    if own or not all(is_written_in(code_of(each), transformers) for each in (kind.__call__, kind._encode_plus)):
        return "its tokenizer was patched"
    if tokenizer.split_special_tokens or tokenizer.pad_token_id is None or hasattr(tokenizer, "_switch_to_input_mode"):
        return "its tokenizer has modes, splits special tokens or has no PAD"
    return None


class _Guards(Guards):
    """Guards that hold as long as a plan does."""

    def __init__(self, model: Any) -> None:
        parts: list[Any] = [*model.children()]
        known = [each for each in parts if type(each) in (Transformer, Pooling, Normalize)]
        encoder, spaces = None, []
        if parts and isinstance(first := parts[0], Transformer):
            encoder, spaces = first.model, [first.processing_kwargs, first.modality_config]
            spaces += [each for each in first.modality_config.values() if isinstance(each, dict)]
            spaces += [vars(first.processor)] if isinstance(first.processor, _Fast) else []
        self._found = ENCODERS.of(encoder) if isinstance(encoder, OnEncoder) else None
        inner, others = [encoder] if isinstance(encoder, nn.Module) else [], set(parts).difference(known)
        super().__init__(model, inner, wholly=known, strangers=others, spaces=spaces)

    def hold(self, model: Any) -> bool:
        """See `Guards`."""
        return super().hold(model) and (self._found is None or ENCODERS.of(model[0].model) is self._found)


_PLANS: Plans[_Plan | str] = Plans("sentences", _found, _Guards)


class OfTexts(nn.Module):
    """A SentenceTransformer, whose batches of texts the engine computes if it can."""

    def _inference(self, inputs: list[Any], **options: Any) -> Any:
        """See sentence-transformers."""
        rows = _embedded(self, inputs, **options)
        if isinstance(rows, str):
            logger.debug("%s encodes texts in sentence-transformers' own way: %s", type(self).__name__, rows)
            return super()._inference(inputs, **options)  # type: ignore[misc]
        return rows


def _embedded(
    model: Any,
    inputs: list[Any],
    *,
    prompt: str | None,
    batch_size: int,
    show_progress_bar: bool,
    output_value: str | None,
    save_to_cpu: bool,
    normalize_embeddings: bool,
    truncate_dim: int | None,
    device: Any = None,
    **others: Any,
) -> Tensor | str:
    """Returns the embeddings of texts, or the reason why sentence-transformers computes them."""
    if output_value != "sentence_embedding" or show_progress_bar or not others.keys() <= {"task"}:
        return "the call asks for more than embeddings"
    if not 0 < len(inputs) <= batch_size or not all(type(text) is str for text in inputs):
        return "the inputs are not one batch of texts"
    if model._device_map is not None or not (device is None or str(device) == "cpu") or not is_unhooked(model):
        return "a device was named, or the model has hooks"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if (reason := why_not_at_this_moment()) is not None:
        return reason
    plan = _PLANS.of(model)
    if isinstance(plan, str):
        return plan
    if prompt and not plan.takes_prompts:
        return "the tokens of the prompt are not pooled"
    if (setting := ENCODERS.setting(plan.encoder)) is None:
        return "you asked for it"
    tokenizer = plan.tokenizer
    # Padding is as in the library's way, which other threads may go with the same tokenizer.
    tokenizer.set_truncation_and_padding(PaddingStrategy.LONGEST, *plan.truncation, 0, None, None)
    backend = tokenizer.backend_tokenizer
    if backend.encode_special_tokens:
        return "its tokenizer splits special tokens"
    encodings = backend.encode_batch([prompt + text for text in inputs] if prompt else inputs)
    parts = [_unpadded(each.attention_mask) for each in encodings]
    ids = [each.ids[part] for each, part in zip(encodings, parts, strict=True)]
    try:
        weights = plan.found.weights(plan.encoder, plan.found.acting_precision(setting))
    except UnfitError as error:
        return str(error)
    lengths = [*map(len, ids)]
    if min(lengths) == 0 or max(lengths) > weights.max_len:
        return f"a text has no tokens, or more than the model's {weights.max_len} positions"
    if tokenizer.padding_side != "right" and min(lengths) < max(lengths):
        return "padding in front of a text moves its positions"
    if plan.found.pad is not None and any(plan.found.pad in row for row in ids):
        return "there is a PAD among the tokens"
    if plan.has_types and not weights.token_types:
        return "the model has no token types"
    types = [each.type_ids[part] for each, part in zip(encodings, parts, strict=True)] if plan.has_types else None
    try:
        rows = torch.from_numpy(weights.states(ids, types, None, plan.pooling, plan.normalizes))
    except ValueError as error:  # ids out of range: the modules raise their own error
        return str(error)
    if truncate_dim is not None:
        rows = rows[:, :truncate_dim].clone(memory_format=torch.contiguous_format)  # like a stack of rows
    return F.normalize(rows, p=2, dim=1) if normalize_embeddings else rows


def _unpadded(mask: list[int]) -> slice:
    """Returns the part of a text's tokens that is no padding."""
    first = mask.index(1) if 1 in mask else 0
    return slice(first, first + sum(mask))


def _replacements() -> tuple[Replacement, ...]:
    original: Any = sentence_transformers.SentenceTransformer
    if tuple(inspect.signature(original._inference).parameters) != _KNOWN:
        return ()
    return (Replacement(original, derive(__name__, original, OfTexts)),)


REPLACEMENTS = _replacements()
SentenceTransformer = REPLACEMENTS[0].replacement if REPLACEMENTS else None
