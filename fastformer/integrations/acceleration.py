"""`fastformer.accelerate(model)`: makes an existing model compute on fastformer's ops, in place."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar, get_args

import torch.nn.modules.module as torch_module
from torch import nn

from fastformer.engine.checks import examine_again, replacement
from fastformer.engine.frozen import forget_notes, repack
from fastformer.generation.config import Precision
from fastformer.integrations import torch_nn
from fastformer.integrations.replace import (
    Replacement,
    by_original,
    forget_restored_forwards,
    is_accelerated,
    is_derived,
    original_class,
    own_methods,
    replace_class,
    restore_class,
    why_left,
)
from fastformer.integrations.versions import check_version, has_transformers

Model = TypeVar("Model", bound=nn.Module)
Padding = Literal["auto", "skip", "compute"]


@dataclass
class Report:
    """A report of the changes that `accelerate` made to a model, by the names of its modules ("" is the model itself).

    Attributes:
        swapped: the class that each accelerated module had before.
        left: why a module that looks like a known one was not accelerated. It also names each replaced method or
            function of an accelerated module's class, or of a class inside of it (a forward, a block of torch.nn's
            layers, the function that attends). As long as the replacement exists, it is called, and the stacks around
            it compute padding.
        attention: the models of transformers whose attention runs on the ops of this library, whatever their family.
        hooked: the hooks on an accelerated module, or on a module inside of it. They see and change the same values as
            before: nothing is fused across a hooked module, and the stacks around it compute padding.
        padding: for each stack that may skip padding, when it does so and what it returns there, or why it never does.
        generate: for each model of transformers that generates, how its `generate` decodes, and why.
            If the options of a call make it fall back to transformers' own decoding, the debug log names them.
        encode: for each encoder of transformers that `from_huggingface` converts, whether the engine or the modules
            compute it in evaluation without gradients, and why. If a call falls back to the modules, the debug log
            says why.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)
    hooked: dict[str, str] = field(default_factory=dict)
    padding: dict[str, str] = field(default_factory=dict)
    generate: dict[str, str] = field(default_factory=dict)
    encode: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = Counter(self.swapped.values())
        lines = [f"swapped: {', '.join(f'{count} {name}' for name, count in counts.items()) or 'nothing'}"]
        if self.attention:
            lines.append(f"attention on fastformer's ops: {', '.join(name or 'the model' for name in self.attention)}")
        noted = {
            "not swapped": self.left,
            "hooked, and called as before": self.hooked,
            "padding": self.padding,
            "generate": self.generate,
            "encode": self.encode,
        }
        for what, reasons_by_name in noted.items():
            names_by_reason: dict[str, list[str]] = {}
            for name, reason in reasons_by_name.items():
                names_by_reason.setdefault(reason, []).append(name or "the model")
            for reason, names in names_by_reason.items():
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                lines.append(f"{what}: {shown}: {reason}")
        return "\n".join(lines)


def accelerate(
    model: Model,
    *,
    fused_loss: bool = False,
    padding: Padding = "auto",
    generate: bool = True,
    encode: bool = True,
    precision: Precision | None = None,
) -> Model:
    """Makes the modules of a model that this library knows compute on its ops, in place.

    Each such module gets another class. Parameters, buffers, submodules, hooks and state_dict keys stay the same, and
    so does each object, so optimizers, wrappers and `isinstance` checks keep working. A subclass, or a module with a
    forward of its own, is not changed. Hooks and replaced methods inside of a module are called as before. `report`
    lists the changes.

    A stack of transformers that skips padding returns zeros at padded positions. Whether it may do so depends on the
    model that you pass here. A model that you build around an accelerated one later doesn't change that.

    `generate` of the models that `from_huggingface` converts runs on the C++ engine of the CPU: transformers prepares
    and checks the call, and the engine decodes it. If a call has anything that the engine doesn't know (an option, a
    hook, a patched or changed model, training mode), it falls back to transformers' own `generate`, and a debug line of
    the logger "fastformer" says why. The first call packs a copy of the weights, and so does the first call after the
    weights have changed. For a Marian of 233 MiB (6 + 6 layers, d_model 512, 32,000 words) packing took about a second
    of one core, and at the peak 540 MiB in fp32 and 320 in int8. As long as the model lives, the copy takes 300 MiB in
    fp32, 144 in bf16 and 86 in int8, once glibc has returned the memory that packing freed (`malloc_trim`). On a GPU,
    `generate` runs on captured steps (the engine "graph"), over a copy of the weights there, if that takes at most half
    of the free memory.

    Encoders of transformers that `from_huggingface` converts (BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet,
    ELECTRA, ALBERT, ModernBERT; and those of BART, Marian, mBART, Pegasus, M2M100 and T5) run on
    the engine, too, in evaluation without gradients on a CPU: one call computes the hidden states from the ids, and
    poolers, heads and decoders read them as before. A call falls back to the modules if it has inputs_embeds,
    position_ids, hidden states or attentions to return, or padding that something may read. Padding may lie on either
    side, or between tokens. The packed copy takes about as much memory as the encoder's matrices in the engine's
    precision, in addition to the model itself; `report` says how much. The first call on the engine packs the copy,
    unless `generate` has packed it already. The encoders of torch.nn run on the engine, too, if their layers are alike
    and a call has no mask, or one of padding that it skips. They know fp32, bf16 and int8; asked for int4 they keep
    their own precision.

    A Whisper of transformers runs on the engine, too: its encoder, and the steps of its `generate`, whose windows,
    rules and fallbacks stay transformers'. It needs another copy of its weights, and knows fp32, bf16 and int8.

    Args:
        model: any module. Known are those of torch.nn (`MultiheadAttention`, `TransformerEncoderLayer`,
            `TransformerDecoderLayer`, `TransformerEncoder`, `TransformerDecoder`, `Transformer`), and of transformers
            the layers of BART, BERT, GPT-2, Llama, Marian and T5, and the encoders named above. In any model of
            transformers the linear maps are accelerated, and attention "sdpa" runs on the ops of this library.
        fused_loss: for training: BartForConditionalGeneration, GPT2LMHeadModel, LlamaForCausalLM, MarianMTModel and
            T5ForConditionalGeneration compute the loss of their labels without ever holding the logits: in training the
            output's `logits` is None. In evaluation, without labels, and under torch.compile it has them as before.
        padding: how stacks treat padding. By "auto" they skip it where nothing reads their output there. A stack of
            torch.nn then equals the plain one at every position: padding is skipped where torch.nn itself skips it (an
            encoder in evaluation without gradients), in the encoder of a `Transformer` whose memory_key_padding_mask
            hides what src_key_padding_mask hides, and in the memory of a decoder that gets no tgt_key_padding_mask. A
            stack of transformers skips it, and returns zeros there, if the model is of a known class (also inside of
            peft's models and DistributedDataParallel), if all parts that read its stacks work on one position at a
            time, and if a call asks for nothing at padded positions, such as labels there. "skip" skips it in every
            call: you promise that nothing reads padded positions. "compute" skips it nowhere.
        generate: whether `generate` runs on the engine if it can; with False it stays transformers' own.
        encode: whether encoders run on the engine if they can; with False their modules compute them, and none is
            packed.
        precision: the precision of the engine, in `generate` and in encoders: "fp32", "bf16", "int8" or "int4". None:
            the dtype of the parameters, or autocast's if it is on. In the engine, embeddings, norms, softmax and the
            residual stream stay fp32. Poolers, heads, training and calls that fall back to the modules stay in the
            dtype of the parameters.

    Returns:
        The model itself. A second call examines the model anew. It changes only `generate`, `encode` and a precision
        that you name.

    Raises:
        ImportError: the model has modules of transformers, which is older than 5.16.
        ValueError: `model` is not a module, or has no loss that can be fused; `padding` or `precision` is unknown.
    """
    _check_module(model)
    if padding not in get_args(Padding):
        raise ValueError(f"expected padding to be one of {', '.join(map(repr, get_args(Padding)))}, got {padding!r}")
    known = known_replacements()
    if fused_loss:
        known |= _fused_losses(model)
    products, unknown = _products(model), _with_new_fields(model)
    forget_restored_forwards(model.modules())
    repack(model)
    examine_again()
    for module in list(model.modules()):
        by = products.get(module) or (None if module in unknown else known.get(type(module)))
        if by is not None and why_left(module, {by.original: by}) is None:
            replace_class(module, by)
    torch_nn.decide(model, precision, wanted=encode, padding=padding)
    if has_transformers():
        from fastformer.integrations import engine_encode, engine_generate
        from fastformer.integrations.attention_interface import patch_attention
        from fastformer.integrations.padding import decide

        patch_attention(model)
        decide(model, padding)
        engine_generate.decide(model, precision, wanted=generate)
        engine_encode.decide(model, precision, wanted=encode)
    return model


def report(model: nn.Module) -> Report:
    """Reports what `accelerate` did to a model, in the model's current state.

    Args:
        model: any module, accelerated or not.

    Returns:
        A `Report`: the accelerated modules, those that are not and why, the hooks, and the output at padded positions.
        Hooks and patches since `accelerate` are included. `print` shows it in a few lines.

    Raises:
        ValueError: `model` is not a module.
    """
    _check_module(model)
    known, products, unknown = known_replacements(), _products(model), _with_new_fields(model)
    result = Report()
    for name, module in model.named_modules():
        if is_accelerated(module):
            result.swapped[name] = original_class(module).__name__
            continue
        by = products.get(module)
        reason = why_left(module, known if by is None else {by.original: by})
        if type(module) in known and reason is None:
            reason = unknown.get(module)
        if reason is not None:
            result.left[name] = reason
    result.encode, result.padding = torch_nn.described(model), torch_nn.described_padding(model)
    if has_transformers():
        from fastformer.integrations import engine_encode, engine_generate
        from fastformer.integrations.attention_interface import patched_attention
        from fastformer.integrations.padding import described

        result.attention = patched_attention(model)
        result.padding |= described(model)
        result.generate = engine_generate.described(model)
        result.encode |= engine_encode.described(model)
    inside = {inner for module in model.modules() if is_accelerated(module) for inner in module.modules()}
    for name, module in model.named_modules():
        if module in inside and (replaced := replacement(type(module))) is not None:
            result.left[name] = f"{replaced.replaced} was replaced"
    result.hooked = _hooked(model, inside)
    return result


def _with_new_fields(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the modules of transformers' models whose configs have fields of a later version, with the reason."""
    reasons: dict[nn.Module, str] = {}
    if has_transformers():
        from transformers import PreTrainedModel

        from fastformer.integrations.conversion import new_fields

        for around in model.modules():
            if isinstance(around, PreTrainedModel) and around not in reasons and (named := new_fields(around.config)):
                reasons |= dict.fromkeys(
                    around.modules(), f"its config has a field that fastformer doesn't know: {named}"
                )
    return reasons


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if any(base.__module__.startswith("transformers.") for each in model.modules() for base in type(each).__mro__):
        check_version()


def restore(model: nn.Module) -> list[str]:
    """Undoes `accelerate`: each module gets its class and its attributes back, and its weights don't change.

    Args:
        model: the model that `accelerate` got, or any module with accelerated modules inside.

    Returns:
        The names of the modules that were restored. A module whose class was changed since keeps the new class.

    Raises:
        ValueError: `model` is not a module; or a module inside was given, after `accelerate`, a class derived from
            fastformer's, as by `fully_shard`, or a forward (or another method) of its own, which may call fastformer's.
    """
    _check_module(model)
    accelerated = [(name, module) for name, module in model.named_modules() if is_accelerated(module)]
    for name, module in accelerated:
        if is_derived(module):
            raise ValueError(
                f"expected modules of the classes that accelerate gave them, got {type(module).__name__} "
                f"in {name or 'the model'}: call restore before "
                "the function that changed the class, such as fully_shard"
            )
        if methods := own_methods(module):
            raise ValueError(
                f"expected modules with the methods of the classes that accelerate gave them, got another "
                f"{methods[0]} in {name or 'the model'}, which may call ours: remove it first"
            )
    if has_transformers():
        from fastformer.integrations import engine_encode, engine_generate
        from fastformer.integrations.attention_interface import unpatch_attention
        from fastformer.integrations.padding import forget

        engine_generate.forget(model)
        engine_encode.forget(model)
        unpatch_attention(model)
        forget(model)
    torch_nn.forget(model)
    restored = [name for name, module in accelerated if restore_class(module)]
    for module in model.modules():
        forget_notes(module)
    return restored


_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
# The module that defines transformers' hooks for recording outputs. They do nothing while transformers records none.
_RECORDING = "transformers.utils.output_capturing"


def _hooked(model: nn.Module, inside: set[nn.Module]) -> dict[str, str]:
    """Returns `Report.hooked` of a model; `inside` holds the accelerated modules and the modules inside of them."""
    on_all = ["a hook on all modules"] if torch_module._has_any_global_hook() else []
    hooked = {}
    for name, module in model.named_modules():
        kinds = [
            kind
            for attribute, kind in _HOOKS.items()
            if any(getattr(hook, "__module__", None) != _RECORDING for hook in getattr(module, attribute).values())
        ]
        kinds += on_all if is_accelerated(module) else []
        if module in inside and kinds:
            hooked[name] = ", ".join(kinds)
    return hooked


# Each family's file here, and transformers' module for it, which is loaded only if a model of the family exists.
_FAMILIES = {
    name: f"transformers.models.{name}.modeling_{name}"
    for name in ("bart", "bert", "gpt2", "llama", "marian", "t5", "whisper")
} | {"sentence_transformers": "sentence_transformers.base.modules.normalize"}  # since version 6


def _products(model: nn.Module) -> dict[nn.Module, Replacement]:
    """Returns the linear maps to accelerate, which are those inside of transformers' models."""
    if not has_transformers():
        return {}
    from fastformer.integrations.products import products_of

    return products_of(model)


def known_replacements() -> dict[type[nn.Module], Replacement]:
    """Returns the replacements for classes of torch.nn and of loaded families, by the class that they replace."""
    known = [*torch_nn.REPLACEMENTS]
    if has_transformers():
        from fastformer.integrations import derived

        known += derived.replacements()
    # The last replacement of a class counts.
    return by_original([*known, *chain.from_iterable(family.REPLACEMENTS for family in _families())])


def _families() -> list[Any]:
    if not has_transformers():
        return []
    loaded = [name for name, theirs in _FAMILIES.items() if theirs in sys.modules]
    return [importlib.import_module(f"fastformer.integrations.{name}") for name in loaded]


def _fused_losses(model: nn.Module) -> dict[type[nn.Module], Replacement]:
    """Returns the replacements for heads whose loss can be fused.

    Raises:
        ValueError: the model has no such head, or the head is accelerated without a fused loss already.
    """
    known = by_original(chain.from_iterable(getattr(family, "LOSS_REPLACEMENTS", ()) for family in _families()))
    fused = {each.replacement for each in known.values()}
    if any(type(module) in known or type(module) in fused for module in model.modules()):
        return known
    if any(is_accelerated(module) and isinstance(module, tuple(known)) for module in model.modules()):
        raise ValueError(
            "expected fused_loss=True along with the first accelerate, got it later: restore the model first"
        )
    raise ValueError(
        "expected a model with a head whose loss can be fused (BartForConditionalGeneration, GPT2LMHeadModel, "
        f"LlamaForCausalLM, MarianMTModel, T5ForConditionalGeneration), got {type(model).__name__}"
    )
