"""Encoders of transformers on the C++ engine: in evaluation without gradients one call computes all their layers.

The engine takes over the forward of a model without a head, such as BertModel, between the ids and the hidden states. A
pooler and the heads around the model are called as before. The engine takes over only known cases. The model is checked
when it is first called, and again after it has changed (`ENCODERS`, by its guards). Each call is checked by its
arguments and by the modes that are active. Everything else falls back to the modules.

Padding is omitted if `padding.py` allows it; the output is then zeros there. If it doesn't, a batch without padding
still runs on the engine. Padding may lie anywhere in a row. As poolers and heads read the first position of each row,
that one is computed even if it is padding: its token attends to the others, and is not attended to.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import Self

from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS, FAMILIES, encoding_family, why_unsupported
from fastformer.checkpoints.hf.fields import sees_later
from fastformer.encoding.engine import OWN_ENDS, Gaps, PackedEncoder, pack_encoder, why_no_encoder
from fastformer.encoding.source_engine import pack_source
from fastformer.engine.frozen import UnfitError, forget_setting, notes_of, setting_of, unpack
from fastformer.integrations.as_made import why_not_as_made
from fastformer.integrations.conversion import convert, from_huggingface, settings_of
from fastformer.integrations.engine_models import (
    NO_END,
    FoundModel,
    FoundModels,
    counts_words,
    is_convertible,
    model_type_of,
    why_not_converted,
)
from fastformer.integrations.engine_sources import AROUND, is_source, tell_encoders, weights_of_decoding, whole_of
from fastformer.integrations.known import by_name, gives_tuple, why_not_at_this_moment
from fastformer.integrations.padding import Owner, PackingStack
from fastformer.integrations.replace import original_class
from fastformer.models import BERT, GPT, Transformer
from fastformer.nn.packed_stack import copy_bytes, megabytes

logger = logging.getLogger("fastformer")

# Arguments of a forward that a call of the engine reads, or that don't change an encoder's results.
_READ = frozenset({"input_ids", "attention_mask", "token_type_ids", "return_dict", "use_cache"})


class EncoderModel(FoundModel[PackedEncoder]):
    """An encoder-only model that the engine runs, with its packed weights.

    Attributes:
        pad: the id that the model skips when it counts positions; None: it counts all ids.
        pad_position: the row of the packed table of positions that this id has; None: it has none.
        reads_first: whether the first position of a row may be read even if it is padding.
        window: how far a token of some layer sees to either side; None: all layers see everything.
    """

    name = "encoder"
    reads_first = True

    def __init__(self, model: Any, guards: Any) -> None:
        super().__init__(model, guards)
        self.pad = self.skipped(model)
        self.pad_position: int | None = None
        if self.pad is not None and self.reads_first:
            self.pad_position = len(_positions_of(model)) - _unused(model)
        self.window = _window_of(model)

    def skipped(self, model: Any) -> int | None:
        """Returns the id that a model skips when it counts positions; None: it counts all ids."""
        return cast(int, model.embeddings.padding_idx) if _unused(model) else None

    def pack(self, model: Any, converted: Any, precision: str) -> PackedEncoder:
        """See `FoundModel`."""
        assert isinstance(converted, BERT | GPT)
        packed = pack_encoder(converted, precision, None if self.pad is None else _positions_of(model)[self.pad])
        if isinstance(packed, str):
            raise UnfitError(packed)
        return packed


class DecoderModel(EncoderModel):
    """The layers of a decoder-only model that the engine runs without a cache, as embedders use them."""

    reads_first = False

    def skipped(self, model: Any) -> int | None:
        """See `EncoderModel`."""
        return None

    def convert(self, model: nn.Module) -> Any:
        """See `FoundModel`."""
        return convert(model, headless=True)


class SourceModel(EncoderModel):
    """The encoder of an encoder-decoder that the engine runs, with its packed weights."""

    reads_first = False  # decoders don't attend to padding

    def skipped(self, model: Any) -> int | None:
        """See `EncoderModel`."""
        return cast("int | None", model.config.pad_token_id) if counts_words(model) else None

    def weights(self, model: nn.Module, precision: str) -> PackedEncoder:
        """See `FoundModel`. If the whole model is packed for decoding, its encoder is not packed a second time."""
        shared = weights_of_decoding(model, precision)
        if shared is None:
            return super().weights(model, precision)
        unpack(model)
        return shared

    def convert(self, model: nn.Module) -> Any:
        """See `FoundModel`."""
        return from_huggingface(whole_of(model))

    def pack(self, model: Any, converted: Any, precision: str) -> PackedEncoder:
        """See `FoundModel`."""
        assert isinstance(converted, Transformer)
        if converted.config.positions == "relative":
            converted.config.max_len = NO_END
        packed = pack_source(converted, precision)
        if isinstance(packed, str):
            raise UnfitError(packed)
        return packed


def _window_of(model: Any) -> int | None:
    """Returns the window of some layers of a model, by its family's form; None: no layer has one."""
    form = ENCODER_FORMS.get(model.config.model_type)
    try:
        return None if form is None else cast("int | None", form.options(settings_of(model)).get("window_size"))
    except ValueError:  # which the conversion reports
        return None


def _unused(model: Any) -> int:
    """Returns how many rows of a model's table of positions no token has."""
    pad = model.config.pad_token_id
    return 0 if pad is None else ENCODER_FORMS[model.config.model_type].unused_positions(pad)


def _positions_of(model: Any) -> Tensor:
    """Returns the table of positions of a model that skips PAD when it counts them; PAD's id is also its row there."""
    return cast(Tensor, model.embeddings.position_embeddings.weight)


def is_encoder(kind: type) -> bool:
    """Returns whether a class of transformers is an encoder without a head that can be converted."""
    family = FAMILIES.get(model_type_of(kind) or "")
    if family is None or family.generates:
        return False
    source = sys.modules.get(family.source(cast(str, model_type_of(kind))))
    return kind is getattr(source, family.model_class, None)


def is_decoder_stack(kind: type) -> bool:
    """Returns whether a class of transformers is a decoder-only model without a head that can be converted."""
    model_type = model_type_of(kind) or ""
    return model_type in DECODER_FORMS and kind.__name__ == FAMILIES[model_type].headless


def _why_not(model: Any) -> str | None:
    """Returns why the engine's results would differ from those of an encoder's modules; None if they would not."""
    if (missing := why_no_encoder()) is not None:
        return f"there is no C++ engine: {missing}"
    kind, model_type = original_class(model), getattr(getattr(model, "config", None), "model_type", None)
    if is_source(kind) and model_type == model_type_of(kind):
        return why_not_as_made(model)
    if is_decoder_stack(kind) and model_type == model_type_of(kind):
        if encoding_family(model_type) is None:
            return "some of its layers have a state, which the engine keeps in decoding alone"
        return OWN_ENDS if model_type == "gemma4_text" else why_not_as_made(model)
    if not is_encoder(kind) or model_type != model_type_of(kind):
        return f"{kind.__name__} is not an encoder that from_huggingface converts"
    has_pooler = "add_pooling_layer" in inspect.signature(kind).parameters
    options: dict[str, Any] = {"add_pooling_layer": model.pooler is not None} if has_pooler else {}
    return why_not_as_made(model, **options)


def _found(model: Any, guards: Any) -> EncoderModel:
    kind = original_class(model)
    found = SourceModel if is_source(kind) else DecoderModel if is_decoder_stack(kind) else EncoderModel
    return found(model, guards)


ENCODERS = FoundModels("encoder", _found, _why_not)


class OnEncoder(nn.Module):
    """A model of transformers without a head, whose layers the engine computes if it can."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        # The cheapest first. A graph can't have the line of the log below.
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not self.is_encoder_stack():
            return super().forward(*args, **kwargs)
        output = _encoded(self, args, kwargs)
        if isinstance(output, str):
            logger.debug("%s runs by its modules: %s", type(self).__name__, output)
            return super().forward(*args, **kwargs)
        return output

    def train(self, mode: bool = True) -> Self:
        """See PyTorch. sentence-transformers asks for evaluation in each call, where visiting all modules is slow."""
        if not mode and not torch.compiler.is_compiling() and ENCODERS.is_evaluating(self):
            return self
        return super().train(mode)

    def is_encoder_stack(self) -> bool:
        """Returns whether this is an encoder; some families use the same class for their decoders."""
        return not getattr(self, "is_decoder", False)

    def reads_no_padding(self) -> bool:
        """Returns whether the running call reads no hidden states at padded positions."""
        raise NotImplementedError


class EncoderOwner(OnEncoder, Owner):
    """`OnEncoder` for a model around a stack that may omit padding by itself."""

    def reads_no_padding(self) -> bool:
        """See `OnEncoder`."""
        with self.granting(lambda: False):
            return any(module.may_leave_out() for module in self.children() if isinstance(module, PackingStack))


class StackOnEncoder(OnEncoder, PackingStack):
    """`OnEncoder` for a stack, which computes its output itself."""

    def reads_no_padding(self) -> bool:
        """See `OnEncoder`."""
        return self.may_leave_out()


class EncoderStack(StackOnEncoder):
    """`OnEncoder` for the stacks of a family whose modules compute padding."""

    def has_known_layers(self) -> bool:
        """Returns whether the engine runs this stack, and so omits padding."""
        return _is_on_engine(self)


def _is_on_engine(stack: Any) -> bool:
    return ENCODERS.setting(stack) is not None and isinstance(ENCODERS.of(stack), EncoderModel)


# The setting that says that a decoder's hidden states are what its caller wants: it is no part of a model that
# generates, or a model of sentence-transformers is around it.
_EMBEDS = "embeds"


class DecoderOnEncoder(StackOnEncoder):
    """`OnEncoder` for the stack of a decoder-only model, in calls without a cache."""

    def is_encoder_stack(self) -> bool:
        """See `OnEncoder`."""
        return bool(setting_of(self, _EMBEDS))

    def is_causal_stack(self) -> bool:
        """See `PackingStack`."""
        names = ("model_type", "is_causal", "use_bidirectional_attention")
        return not sees_later({name: getattr(self.config, name, None) for name in names})

    def has_known_layers(self) -> bool:
        """See `PackingStack`. Packed layers are causal, so that only the engine omits padding in other stacks."""
        return super().has_known_layers() if self.is_causal_stack() else _is_on_engine(self)


def _tell_decoders(model: nn.Module) -> None:
    """Tells each decoder-only stack whether it embeds."""
    whole = [] if original_class(model).__module__.startswith("sentence_transformers.") else [*model.modules()]
    generating = {id(part) for each in whole if is_convertible(original_class(each)) for part in each.modules()}
    for module in model.modules():
        if isinstance(module, DecoderOnEncoder):
            notes_of(module).settings[_EMBEDS] = id(module) not in generating


class _Texts(NamedTuple):
    """The tokens of a call's texts, without padding.

    Attributes:
        ids, types: the token ids and token types of each text.
        is_token: (batch, seqlen), True at the tokens of the texts; None: there is no padding.
        shape: the shape of the call's input_ids.
        gaps: the places of the tokens; None: each text is at the beginning of its row, without gaps.
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    is_token: Tensor | None
    shape: torch.Size
    gaps: Gaps | None = None


def _encoded(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the engine's output of a call, or the reason why the call falls back to the modules."""
    if (setting := ENCODERS.setting(model)) is None:
        return "you asked for it"
    given = by_name(cast(Any, original_class(model)).forward, model, args, kwargs) if args else kwargs
    if given is None:
        return "its arguments don't fit its forward"
    if (reason := _why_not_call(model, given) or why_not_at_this_moment()) is not None:
        return reason
    plan = ENCODERS.of(model)
    if isinstance(plan, str):
        return plan
    if plan.trains:
        return "a module inside of it is in training"
    texts = _texts(model, plan, given)
    if isinstance(texts, str):
        return texts
    try:
        weights = plan.weights(model, plan.acting_precision(setting))
    except UnfitError as error:
        return str(error)
    if max(map(len, texts.ids)) > weights.max_len:
        return f"a text is longer than the model's {weights.max_len} positions"
    if texts.types is not None and not weights.token_types:
        return "the model has no token types"
    try:
        rows = weights.states(texts.ids, texts.types, texts.gaps)
    except ValueError as error:  # ids or types out of range: the modules raise an IndexError
        raise IndexError(str(error)) from None
    return _as_asked(model, _padded(torch.from_numpy(rows), texts).to(_dtype(model)), given)


def _dtype(model: Any) -> torch.dtype:
    """Returns the dtype of the hidden states that the modules would return."""
    is_projected = "embeddings_project" in model._modules or model.config.model_type == "albert"
    if torch.is_autocast_enabled("cpu") and is_projected:
        # Only products have autocast's dtype. The residual stream is fp32, unless it begins with a product.
        return torch.get_autocast_dtype("cpu")
    return cast(torch.dtype, model.dtype)


def _why_not_call(model: Any, given: dict[str, Any]) -> str | None:
    """Returns why a call falls back to the modules, by its arguments' names and types alone; None if it needn't."""
    ids = given.get("input_ids")
    for name, value in given.items():
        if name not in _READ and value is not None and value is not False:
            return f"the engine doesn't know {name}"
    if type(ids) is not Tensor or ids.device.type != "cpu":
        return "the ids are not a tensor on the CPU"
    if ids.dim() != 2 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
        return f"the ids are {ids.dtype} of shape {tuple(ids.shape)}"
    for name in ("attention_mask", "token_type_ids"):
        value = given.get(name)
        if value is not None and (type(value) is not Tensor or value.shape != ids.shape or value.device != ids.device):
            return f"{name} is not a tensor of the ids' shape"
    config = model.config
    if isinstance(model, DecoderOnEncoder):
        use_cache = given.get("use_cache")
        if config.use_cache if use_cache is None else use_cache:
            return "it asks for a cache"
    if not config.return_dict and given.get("return_dict", False) is None:
        return "return_dict is None, which some versions of transformers treat as True, in contradiction to its config"
    if config.output_hidden_states or config.output_attentions or getattr(config, "output_router_logits", False):
        return "its config asks for hidden states, attentions or the logits of routers"
    return None


def _texts(model: Any, plan: EncoderModel, given: dict[str, Any]) -> _Texts | str:
    """Returns the texts of a call, or the reason why the engine can't compute them."""
    ids, mask, types = given["input_ids"], given.get("attention_mask"), given.get("token_type_ids")
    if types is not None and types.dtype not in (torch.int64, torch.int32):
        return f"token_type_ids are {types.dtype}"
    real = None
    if mask is not None:
        is_token = mask != 0
        if mask.dtype != torch.bool and not bool((mask == is_token).all()):
            return "the attention_mask has other numbers than 0 and 1"
        if not bool(is_token.all()):
            real = is_token
            if not model.reads_no_padding():
                return "padding may be read, which the engine leaves out"
            if not bool(real.any(1).all()):
                return "the attention_mask has a row without ones"
            if bool((real[:, 1:] & ~real[:, :-1]).any()) or not bool(real[:, 0].all()):
                return _texts_with_gaps(plan, ids, types, real)
    rows, kinds = ids.tolist(), None if types is None else types.tolist()
    if real is not None:
        ends = real.sum(1).tolist()
        rows = [row[:end] for row, end in zip(rows, ends, strict=True)]
        kinds = None if kinds is None else [row[:end] for row, end in zip(kinds, ends, strict=True)]
    if plan.pad is not None and any(plan.pad in row for row in rows):
        return _texts_with_gaps(plan, ids, types, torch.ones_like(ids, dtype=torch.bool) if real is None else real)
    return _Texts(rows, kinds, real, ids.shape)


def _texts_with_gaps(plan: EncoderModel, ids: Tensor, types: Tensor | None, real: Tensor) -> _Texts | str:
    """Returns the texts of a call with any mask, or the reason why the engine can't compute them.

    Args:
        plan: the model.
        ids: (batch, seqlen).
        types: (batch, seqlen), or None.
        real: (batch, seqlen), True at tokens; at least one in each row.
    """
    is_token, positions = real.clone(), torch.arange(ids.shape[1], device="cpu").expand_as(ids)
    if plan.reads_first:
        is_token[:, 0] = True
    starts = real.int().argmax(1)
    if plan.window is not None and plan.reads_first and int(starts.max()) > plan.window:
        return "a padded first position sees no token in layers that have a window"
    if plan.pad is not None:
        is_pad = ids == plan.pad
        if plan.pad_position is None and bool((is_pad & is_token).any()):
            return "its positions count the ids that are not PAD, but there is a PAD among the tokens"
        positions = torch.where(is_pad, plan.pad_position or 0, (~is_pad).cumsum(1) - 1)
    unseen = (is_token & ~real).sum(1).tolist()  # 1 at most: the first
    columns = [row.nonzero().flatten() for row in is_token]

    def at(table: Tensor) -> list[list[int]]:
        return [row[place].tolist() for row, place in zip(table, columns, strict=True)]

    gaps = Gaps(at(positions), [place.tolist() for place in columns], unseen)
    return _Texts(at(ids), None if types is None else at(types), is_token, ids.shape, gaps)


def _padded(rows: Tensor, texts: _Texts) -> Tensor:
    """Returns the states (tokens, d_model) as (batch, seqlen, d_model), zeros at padding."""
    if texts.is_token is None:
        return rows.view(*texts.shape, -1)
    out = rows.new_zeros(*texts.shape, rows.shape[-1])
    out[texts.is_token] = rows
    return out


# The class of the output, by the model_type; it is defined in the module of the model.
_OUTPUTS = {
    "albert": "BaseModelOutputWithPooling",
    "cwm": "CwmModelOutputWithPast",
    "distilbert": "BaseModelOutput",
    **dict.fromkeys(("modernbert", "eurobert"), "BaseModelOutput"),
    "electra": "BaseModelOutputWithPastAndCrossAttentions",
    **dict.fromkeys(("gte", "mpnet", "nomic_bert"), "BaseModelOutputWithPooling"),
    "t5": "BaseModelOutputWithPastAndCrossAttentions",
}


def _pooled(model: Any, hidden: Tensor) -> Tensor:
    if model.config.model_type == "albert":  # its pooler is a linear map
        return cast(Tensor, model.pooler_activation(model.pooler(hidden[:, 0])))
    return cast(Tensor, model.pooler(hidden))


def _as_asked(model: Any, hidden: Tensor, given: dict[str, Any]) -> Any:
    kind = model.config.model_type
    form = ENCODER_FORMS.get(kind)
    has_pooler = form is not None and form.pooler is not None
    pooled = _pooled(model, hidden) if has_pooler and model.pooler is not None else None
    if gives_tuple(model.config, given):
        if kind == "mpnet":
            return hidden, pooled
        return (hidden,) if pooled is None else (hidden, pooled)
    source = sys.modules[original_class(model).__module__]
    if kind in DECODER_FORMS:
        has_experts = hasattr(model.config, "output_router_logits")
        of_decoder = "MoeModelOutputWithPast" if has_experts else "BaseModelOutputWithPast"
        return getattr(source, _OUTPUTS.get(kind, of_decoder))(hidden)
    usual = "BaseModelOutput" if form is None else "BaseModelOutputWithPoolingAndCrossAttentions"
    output = getattr(source, _OUTPUTS.get(kind, usual))
    return output(hidden, pooled) if has_pooler else output(hidden)


def decide(model: nn.Module, precision: str | None, *, wanted: bool) -> None:
    """Gives the encoders of transformers inside of a module their setting.

    Args:
        model: the argument of `accelerate`.
        precision: a known precision of `accelerate`; None leaves that of an earlier call.
        wanted: whether the encoders run on the engine at all.
    """
    tell_encoders(model)
    _tell_decoders(model)
    for module in _encoders(model).values():
        ENCODERS.decide(module, precision, wanted=wanted)


def forget(model: nn.Module) -> None:
    """Undoes `decide`, and drops the weights that were packed."""
    for module in _encoders(model).values():
        forget_setting(module, AROUND)
        forget_setting(module, _EMBEDS)
        ENCODERS.forget(module)


def described(model: nn.Module) -> dict[str, str]:
    """Returns for each encoder of transformers in a module, by name, what computes it in evaluation, and why."""
    descriptions = {}
    for name, module in model.named_modules():
        is_whole = isinstance(module, PreTrainedModel) and module.base_model is module
        if is_whole and not isinstance(module, OnEncoder) and why_unsupported(module.config.to_dict()) is not None:
            descriptions[name] = f"by its modules: {why_not_converted(module)}"
    for name, module in _encoders(model).items():
        precision, reason = ENCODERS.described(module)
        if reason is not None:
            descriptions[name] = f"by its modules: {reason}"
        else:
            size = megabytes(_copy_bytes(module, precision))
            descriptions[name] = (
                f"on the C++ engine in {precision}, in evaluation without gradients, with a packed copy of {size}"
            )
    return descriptions


def _copy_bytes(model: nn.Module, precision: str) -> int:
    tables = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Embedding))
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1) - tables
    return copy_bytes(max(matrices, 0), tables, precision)


def _encoders(model: nn.Module) -> dict[str, OnEncoder]:
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, OnEncoder))
    return {name: module for name, module in modules if module.is_encoder_stack()}
