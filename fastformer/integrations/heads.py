"""Classes for models around stacks, by the outputs at padding that they read; and classes derived from transformers'.

A row in the table of a family names a class of transformers and its role:

Owner           reads the output of stacks only at real positions
LanguageModel   a causal stack's head; reads padding where labels, the last logits or the next token ask for it
Seq2SeqModel    the same of a decoder with its encoder
EncoderHead     `LanguageModel` around a stack that isn't causal
TokenLabels     a head with one label a token
LastToken       a head that reads the last token of each row that isn't PAD
KeepsPadding    reads padding in each call: a softmax over all tokens, the last token, labels anywhere
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import transformers
from torch import Tensor, nn
from transformers.loss import loss_utils

from fastformer.engine.checks import is_written_in
from fastformer.integrations.engine_generate import ENCODING_METHODS, OnEngine
from fastformer.integrations.engine_models import is_convertible
from fastformer.integrations.fused_loss import are_losses_known
from fastformer.integrations.known import cache_of, record_outputs_of
from fastformer.integrations.padding import Owner
from fastformer.integrations.replace import Replacement

Model = TypeVar("Model", bound=type[nn.Module])
_NAMES_BEFORE_MASK = 3  # input_ids, attention_mask, decoder_input_ids


class LanguageModel(Owner):
    """A head that reads its causal stack's output at padding where labels or the last logits ask for it.

    Attributes:
        PREDICTS_NEXT: whether the logits at a position are those of the next token.
    """

    PREDICTS_NEXT: ClassVar[bool] = True

    def reads_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._has_own_loss(args, kwargs) or self._sees_padding(args, kwargs)

    def _has_own_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether the call computes a loss that isn't transformers' own: that loss may read any position."""
        if len(args) < 2 and kwargs.get("labels") is None:
            return False
        loss = _loss_of(self)
        is_original = getattr(loss, "__module__", None) == loss_utils.__name__ and is_written_in(loss, transformers)
        return not (is_original and are_losses_known())

    def _sees_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether the requested loss or logits depend on the stack's output at padding.

        They do if there are labels at padding, which transformers counts like others, or if the last logits of
        sequences that end with padding are requested. Without labels, they may if a token follows padding: a loss
        outside of the call, such as the Trainer's with label smoothing, reads the prediction of that token.
        """
        mask, labels, kept = (kwargs.get(name) for name in ("attention_mask", "labels", "logits_to_keep"))
        if len(args) > 1:
            return True
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return False
        if isinstance(kept, Tensor):
            return True
        # A caller with a cache continues from the last logits, as `generate` does, even if it asks for more of them.
        last = max(kept or 0, int(cache_of(kwargs) is not None))
        if last and not bool(mask[:, -last:].all()):
            return True
        if labels is None:
            may_be_read = self.PREDICTS_NEXT and not last and mask.shape[1] > 1
            return may_be_read and bool(((mask[:, :-1] == 0) & (mask[:, 1:] != 0)).any())
        if not isinstance(labels, Tensor) or labels.shape != mask.shape or "shift_labels" in kwargs:
            return True
        return bool(((labels[:, 1:] != -100) & (mask[:, :-1] == 0)).any())


def _loss_of(model: Any) -> Any:
    """Returns a model's loss function, without the warning that transformers gives if the class's name tells none.

    Such a model may compute its loss in its forward, as Marian does, and then never ask for a function.
    """
    asked = getattr(type(model), "loss_function", None)
    is_default = getattr(model, "loss_type", None) is None and not hasattr(model, "_loss_function")
    if is_default and isinstance(asked, property) and is_written_in(asked.fget, transformers):
        return loss_utils.LOSS_MAPPING["ForCausalLM"]
    return getattr(model, "loss_function", None)


class EncoderHead(LanguageModel):
    """`LanguageModel` around a stack that isn't causal."""

    READS_ENCODERS = True
    PREDICTS_NEXT = False


class KeepsPadding(LanguageModel):
    """A head that reads padding in each call: a softmax over all tokens, the last token, labels anywhere."""

    ALWAYS_READS = True


class LastToken(LanguageModel):
    """A decoder's head that reads the last id of each row that isn't PAD, whatever the mask says."""

    def _sees_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        ids, mask, pad = kwargs.get("input_ids"), kwargs.get("attention_mask"), getattr(self.config, "pad_token_id", 0)
        if args or pad is None or not isinstance(ids, Tensor):
            return True
        if not isinstance(mask, Tensor) or mask.shape != ids.shape:
            return True
        is_word = ids != pad
        return bool((is_word & (mask == 0)).any()) or not bool(is_word.any(1).all())


class TokenLabels(LanguageModel):
    """A head with a label for each token. transformers counts labels at padding like others."""

    def _sees_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = inspect.signature(self.forward).bind_partial(*args).arguments | kwargs if args else kwargs
        return _labels_count_at_padding(given.get("attention_mask"), given.get("labels"))


class Seq2SeqModel(LanguageModel):
    """A language model whose decoder computes padding if labels count there, or if sequences end with padding."""

    def _sees_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        mask, labels = kwargs.get("decoder_attention_mask"), kwargs.get("labels")
        if len(args) > _NAMES_BEFORE_MASK:
            return True
        if labels is None and isinstance(mask, Tensor) and mask.dim() == 2:
            return not bool(mask[:, -1:].all())  # generate continues from the last logits
        return _labels_count_at_padding(mask, labels)


def _labels_count_at_padding(mask: Any, labels: Any) -> bool:
    """Returns whether labels, one for each token, count at positions that a mask marks as padding, or may count."""
    if mask is None or labels is None:
        return False
    if not (isinstance(mask, Tensor) and isinstance(labels, Tensor)) or mask.shape != labels.shape:
        return True
    return bool(((labels != -100) & (mask == 0)).any())


def _encoding_without_padding(name: str) -> Any:
    """Makes a method by which transformers' `generate` runs the encoder, whose padding it masks in each step.

    Only this part of `generate` may omit padding: the rest also calls the user's code, which may read an encoder.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.granting(lambda: True):
            return getattr(super(Seq2SeqModel, self), name)(*args, **kwargs)

    return method


for _name in ENCODING_METHODS:
    setattr(Seq2SeqModel, _name, _encoding_without_padding(_name))


def replacements(
    namespace: dict[str, Any], source: ModuleType, table: Mapping[str, type | tuple[type, ...]], *written: type
) -> tuple[Replacement, ...]:
    """Returns the replacements of a family.

    Args:
        namespace: the namespace of the family's file, in which pickle finds the derived classes.
        source: transformers' module.
        table: names in that module, each with the base classes of its derived class, in front of the original.
        written: classes written out in the file, whose last base is the original.
    """
    for name, bases in table.items():
        bases = bases if isinstance(bases, tuple) else (bases,)
        namespace[name] = derive(namespace["__name__"], getattr(source, name), *bases)
        written = (*written, namespace[name])
    return tuple(Replacement(kind.__bases__[-1], kind) for kind in written)


def derive(module: str, original: type[nn.Module], *bases: type, name: str | None = None, **attributes: Any) -> Any:
    """Makes a class that stands for one of transformers' (see `stands_for`).

    Args:
        module: the name of the module that holds the class, in which pickle finds it.
        original: the class of transformers.
        bases: the base classes in front of the original.
        name: the name under which the module holds the class; None: the original's.
        attributes: the attributes of the class.
    """
    doc = f"transformers' {original.__name__}, on our ops."
    if is_convertible(original):
        bases = (OnEngine, *bases)
    names = {"__module__": module, "__qualname__": name or original.__name__, "__doc__": doc, **attributes}
    return stands_for_original(type(original.__name__, (*bases, original), names))


def stands_for_original(derived: Model) -> Model:
    """Makes a class look like its last base, transformers' original, to code that inspects it.

    It gets the original's name, which is saved with a model; its forward gets the original's signature, which generate
    and trainers read; and transformers records the same outputs of it. `inspect.unwrap`, and accelerate's
    `unwrap_model` with it, stop at fastformer's forward.
    """
    original: Any = derived.__bases__[-1]
    forward = derived.forward

    def signed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    functools.update_wrapper(signed, original.forward)
    del signed.__wrapped__  # type: ignore[attr-defined]
    signed.__signature__ = inspect.signature(original.forward)  # type: ignore[attr-defined]
    derived.forward = signed
    derived.__name__ = original.__name__
    record_outputs_of(derived)
    return derived
