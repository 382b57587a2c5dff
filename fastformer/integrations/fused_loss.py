"""`accelerate(model, fused_loss=True)`: a language model in training computes its loss without making the logits.

The logits of a large vocabulary take most of the memory of a small model's training step. Only the loss reads them, and
it is one op here (`ops.linear_cross_entropy`).
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss import loss_utils
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast, Seq2SeqLMOutput

from fastformer.engine.checks import is_plain, is_traced, is_written_as_known, is_written_in
from fastformer.integrations.known import CACHE, by_name, gives_tuple
from fastformer.integrations.packing import telling
from fastformer.integrations.replace import original_class
from fastformer.nn.linear import LINEARS
from fastformer.ops import linear_cross_entropy

IGNORED = -100
_CROSS_ENTROPY = nn.CrossEntropyLoss


def _losses() -> tuple[object, ...]:
    """Returns the functions of PyTorch and transformers that the fused losses replace."""
    kind = _CROSS_ENTROPY
    functions = (F.cross_entropy, loss_utils.fixed_cross_entropy, ForCausalLMLoss)
    return (*functions, kind.__init__, kind.__call__, kind.forward)


_KNOWN = tuple(each if is_written_in(each, nn, transformers) else None for each in _losses())


def are_losses_known() -> bool:
    """Returns whether the functions that compute the heads' losses are PyTorch's and transformers' own."""
    return _losses() == _KNOWN


class FusedLoss(nn.Module):
    """A head whose output has a loss and no logits if it is in training and gets labels.

    Calls that ask for more (a tuple, some of the logits, another loss) run as transformers wrote them. So do all calls
    if the functions that compute the loss were replaced, and calls under torch.compile, whose graph would break when
    the arguments are read.
    """

    config: Any
    base_model: nn.Module
    lm_head: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_other = is_traced() or not self.training or not is_written_as_known(type(self))
        given = None if is_other else by_name(type(self).forward, self, args, kwargs)
        if given is None or not self._is_fusable(given):
            return super().forward(*args, **kwargs)
        return self._output(given)

    def _is_fusable(self, given: dict[str, Any]) -> bool:
        head, config = self.lm_head, self.config
        return (
            isinstance(given.get("labels"), Tensor)
            and not gives_tuple(config, given)
            and is_plain(head, *LINEARS)
            and isinstance(head, nn.Linear)
            and head.out_features == getattr(config, "decoder_vocab_size", config.vocab_size)
            and are_losses_known()
        )

    def _output(self, given: dict[str, Any]) -> Any:
        raise NotImplementedError


class CausalLoss(FusedLoss):
    """The fused loss of a decoder-only model: the label of a position is the next position's token."""

    loss_function: Any

    def _is_fusable(self, given: dict[str, Any]) -> bool:
        kept = given.get("logits_to_keep", 0)
        return (
            super()._is_fusable(given)
            and isinstance(kept, int)
            and kept == 0
            and self.loss_function is ForCausalLMLoss
            and not getattr(self, "model_parallel", False)
        )

    def _output(self, given: dict[str, Any]) -> Any:
        labels, ignored = given["labels"], given.get("ignore_index", IGNORED)
        target = given.get("shift_labels")
        if target is None:
            target = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        with telling(unread=_behind_the_last(target != ignored)):
            out = self.base_model(
                **{name: value for name, value in given.items() if name not in ("labels", "logits_to_keep")}
            )
        loss = _loss(out.last_hidden_state, self.lm_head, None, target, ignored, given.get("num_items_in_batch"))
        parts = {name: out.get(name) for name in (CACHE, "hidden_states", "attentions")}
        if "cross_attentions" in inspect.signature(type(out)).parameters:
            return CausalLMOutputWithCrossAttentions(loss=loss, **parts, cross_attentions=out.get("cross_attentions"))
        return CausalLMOutputWithPast(loss=loss, **parts)


class Seq2SeqLoss(FusedLoss):
    """The fused loss of an encoder-decoder: the decoder reads the start token, then the labels."""

    final_logits_bias: Tensor

    def _is_fusable(self, given: dict[str, Any]) -> bool:
        return (
            super()._is_fusable(given)
            and not given.get("use_cache")
            and self.lm_head.bias is None
            and getattr(_source(self), "CrossEntropyLoss", None) is _CROSS_ENTROPY
        )

    def _decoded(self, given: dict[str, Any]) -> Any:
        """Returns the output of the model without its head; the head reads its last hidden state."""
        return self.base_model(**given)

    def _bias(self) -> Tensor | None:
        return self.final_logits_bias[0]

    def _shifted(self, labels: Tensor) -> Tensor:
        """Returns the decoder's input, made by the function that the model's own forward looks up."""
        shift: Any = getattr(self, "_shift_right", None)
        if shift is not None:  # T5
            shifted: Tensor = shift(labels)
            return shifted
        config, shift = self.config, _source(self).shift_tokens_right
        shifted = shift(labels, config.pad_token_id, config.decoder_start_token_id)
        return shifted

    def _output(self, given: dict[str, Any]) -> Seq2SeqLMOutput:
        labels = given["labels"]
        if given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
            given = given | {"decoder_input_ids": self._shifted(labels)}
        given = given | {"use_cache": False}
        with telling(unread=_behind_the_last(labels != IGNORED)):
            out = self._decoded({name: value for name, value in given.items() if name != "labels"})
        hidden, bias = out.last_hidden_state, self._bias()
        loss = _loss(hidden, self.lm_head, bias, labels, IGNORED, None)
        if not torch.is_autocast_enabled(loss.device.type):  # autocast makes a loss fp32; else it has the logits' dtype
            loss = loss.to(hidden.dtype if bias is None else torch.promote_types(hidden.dtype, bias.dtype))
        parts = {name: value for name, value in out.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, **parts)


def _source(head: nn.Module) -> ModuleType:
    """Returns the module of transformers that defines a head's class, where its forward looks up functions."""
    return sys.modules[original_class(head).__module__]


def _behind_the_last(counts: Tensor) -> Tensor | None:
    """Returns the positions (batch, seqlen) after each row's last one that counts: the loss doesn't depend on them.

    None if they are few, or if reading them would make the host wait.
    """
    if counts.device.type != "cpu" or counts.dim() != 2:
        return None
    behind = counts.flip(1).cumsum(1).flip(1) == 0
    return behind if int(behind.sum()) * 16 >= behind.numel() > 0 else None


def _loss(
    hidden: Tensor, head: nn.Module, bias: Tensor | None, target: Tensor, ignored: int, num_items: Tensor | int | None
) -> Tensor:
    """Computes the mean loss of labels that aren't ignored (NaN without labels, as in PyTorch), or sum / `num_items`.

    Args:
        hidden: (batch, seqlen, dim).
        head: the linear map to the logits, with weight (vocab_size, dim).
        bias: (vocab_size,), in place of the head's.
        target: (batch, seqlen).
        ignored: the target value that is ignored.
        num_items: the divisor if a step consists of several batches; None: the number of targets.
    """
    assert isinstance(head, nn.Linear)
    hidden, target = hidden.flatten(0, 1), target.flatten().to(hidden.device)
    if len(hidden) != len(target):
        raise ValueError(f"expected a label for each of {len(hidden)} tokens, got {len(target)}")
    if bias is None:
        bias = head.bias
    if hidden.device.type == "cpu":  # elsewhere the host would wait for the number of rows
        kept = (target != ignored).nonzero().flatten()
        if len(kept) < len(target):
            hidden, target = hidden[kept], target[kept]
    total = linear_cross_entropy(
        hidden, head.weight, target, None if bias is None else bias.to(hidden.dtype), ignore_index=ignored,
        reduction="sum",
    )  # fmt: skip
    if num_items is None:
        count = (target != ignored).sum()
        # NaN is set next to the division and not by it, since the division's gradient would be NaN as well.
        return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
    return total / (num_items.to(total.device) if isinstance(num_items, torch.Tensor) else num_items)
