"""`fastformer.accelerate(model)`: makes an existing model compute on our ops, in place."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar, get_args

import torch.nn.modules.module as torch_module
from torch import nn

from fastformer.generation.config import Precision
from fastformer.integrations import torch_nn
from fastformer.integrations.replace import (
    Replacement,
    by_original,
    is_accelerated,
    is_derived,
    original_class,
    own_methods,
    replace_class,
    restore_class,
    why_left,
)
from fastformer.nn.guards import forget_plans, replacement

Model = TypeVar("Model", bound=nn.Module)
Padding = Literal["auto", "skip", "compute"]


@dataclass
class Report:
    """What `accelerate` did to a model, by the names of its modules ("" is the model itself).

    Attributes:
        swapped: the class that each accelerated module had before.
        left: why a module that looks like a known one was left as it is. Also which method or function was replaced of
            an accelerated module's class, or of a class inside of it (a forward, a block of torch.nn's layers, the
            function that attends). While the replacement is there it is called, and no padding is left out around it.
        attention: the models of transformers whose attention runs on the ops of this library, whatever their family.
        hooked: the hooks on an accelerated module, or on a module inside of it. They see and change what they did
            before: nothing is fused across such a module, and no padding is left out around it.
        padding: for each stack of transformers that may leave padding out, what its output is at padded positions, and
            why.
        generate: for each model of transformers that `from_huggingface` converts, how its `generate` decodes, and why.
            Options of a call that send it transformers' own way are in the debug log.
        encode: for each encoder of transformers that `from_huggingface` converts, what computes it in evaluation
            without gradients, and why. What sends a call to the modules is in the debug log.
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
            lines.append(f"attention on fastformer: {', '.join(name or 'the model' for name in self.attention)}")
        noted = {
            "left as they are": self.left,
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
    forward of its own, is left alone. What you hooked or replaced inside of a module is called as before. `report` says
    what was done.

    A stack of transformers that leaves padding out returns zeros at padded positions. Whether it may do so is decided
    by the model that you pass here. A model that you build around an accelerated one later doesn't change that.

    `generate` of the models that `from_huggingface` converts runs on the C++ engine of the CPU: transformers prepares
    and checks the call, and the engine decodes it, whole greedy and beam searches without a step in Python. What the
    engine doesn't know (an option, a hook, a patched or changed model, training mode) goes transformers' own way, and a
    debug line of the logger "fastformer" says why. The first call packs a copy of the weights, and so does the first
    call behind a change of them. Of a Marian of 233 MiB (6 + 6 layers, d_model 512, 32,000 words) that took about a
    second of one core and at the peak 540 MiB in fp32 and 320 in int8. As long as the model lives, 300 MiB stay in
    fp32, 144 in bf16 and 86 in int8, once glibc has given back what packing freed (`malloc_trim`).

    Encoders of transformers that `from_huggingface` converts (BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet,
    ELECTRA, ModernBERT; and those of BART, Marian, mBART, Pegasus, M2M100 and, on transformers 5, T5) run on the
    engine, too, in evaluation without gradients on a CPU: one call from ids to hidden states, which poolers, heads and
    decoders read as before. A call with inputs_embeds, position_ids, hidden states or attentions to return, padding on
    the left or with holes, or padding that something may read, goes by the modules. The packed copy holds about as much
    as the encoder's matrices in the engine's precision, beside the model itself; `report` says how much. Nothing is
    packed before the first such call, nor what `generate` has packed already. So do the encoders of torch.nn, whose
    products are 1.1 to 4 times as fast so, where their layers are alike and a call has no mask but that of padding.

    Args:
        model: any module. Known are those of torch.nn (`MultiheadAttention`, `TransformerEncoderLayer`,
            `TransformerDecoderLayer`, `TransformerEncoder`, `TransformerDecoder`, `Transformer`), and of transformers
            the layers of BART, BERT, GPT-2, Llama, Marian and T5, and the encoders named above. In any model of
            transformers the linear maps are accelerated, and attention "sdpa" runs on the ops of this library.
        fused_loss: for training: BartForConditionalGeneration, GPT2LMHeadModel, LlamaForCausalLM, MarianMTModel and
            T5ForConditionalGeneration (of transformers 5) compute the loss of their labels without ever holding the
            logits: in training the output's `logits` is None. In evaluation, without labels, and under torch.compile
            they are there as before.
        padding: of transformers' stacks. "auto" leaves padding out if the model is of a known class (also inside of
            peft's models and DistributedDataParallel), if all parts that read its stacks work on one position at a
            time, and if a call asks for nothing at padded positions, such as labels there. Everything else computes
            padding as the plain model does. "skip" leaves it out everywhere: you promise that nothing reads padded
            positions. "compute" leaves it out nowhere.
        generate: whether `generate` runs on the engine where it can; False leaves transformers' own.
        encode: whether encoders run on the engine where they can; False leaves them to their modules, and packs none.
        precision: what the engine computes in, in `generate` and in encoders: "fp32", "bf16", "int8" or "int4". None:
            the dtype of the parameters, or autocast's where it is on. It changes nothing that the engine doesn't
            compute: embeddings, norms, softmax and the residual stream stay fp32 there, and poolers, heads, training
            and calls that go by the modules stay in the dtype of the parameters.

    Returns:
        The model itself. A second call changes nothing but `generate`, `encode` and a precision that you name.

    Raises:
        ValueError: `model` is no module or has no head whose loss can be fused; an unknown `padding` or `precision`.
    """
    _check_module(model)
    if padding not in get_args(Padding):
        raise ValueError(f"expected padding to be one of {', '.join(map(repr, get_args(Padding)))}, got {padding!r}")
    known = known_replacements()
    if fused_loss:
        known |= _fused_losses(model)
    products = _products(model)
    for module in list(model.modules()):
        by = products.get(module) or known.get(type(module))
        if by is not None and why_left(module, {by.original: by}) is None:
            replace_class(module, by)
    torch_nn.decide(model, wanted=encode)
    if "transformers" in sys.modules:
        from fastformer.integrations import engine_encode, engine_generate
        from fastformer.integrations.attention_interface import patch_attention
        from fastformer.integrations.padding import decide

        patch_attention(model)
        decide(model, padding)
        engine_generate.decide(model, precision, wanted=generate)
        engine_encode.decide(model, precision, wanted=encode)
    return model


def report(model: nn.Module) -> Report:
    """What `accelerate` did to a model, as the model is now.

    Args:
        model: any module, accelerated or not.

    Returns:
        What is accelerated, what is left and why, what is hooked, and what stands at padded positions. Hooks and
        patches since `accelerate` are included. `print` shows it in a few lines.

    Raises:
        ValueError: `model` is no module.
    """
    _check_module(model)
    known, products = known_replacements(), _products(model)
    found = Report()
    for name, module in model.named_modules():
        if is_accelerated(module):
            found.swapped[name] = original_class(module).__name__
            continue
        by = products.get(module)
        reason = why_left(module, known if by is None else {by.original: by})
        if reason is not None:
            found.left[name] = reason
    found.encode = torch_nn.described(model)
    if "transformers" in sys.modules:
        from fastformer.integrations import engine_encode, engine_generate
        from fastformer.integrations.attention_interface import patched_attention
        from fastformer.integrations.padding import described

        found.attention = patched_attention(model)
        found.padding = described(model)
        found.generate = engine_generate.described(model)
        found.encode |= engine_encode.described(model)
    inside = {inner for module in model.modules() if is_accelerated(module) for inner in module.modules()}
    for name, module in model.named_modules():
        if module in inside and (replaced := replacement(type(module))) is not None:
            found.left[name] = f"{replaced.replaced} was replaced"
    found.hooked = _hooked(model, inside)
    return found


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}")


def restore(model: nn.Module) -> list[str]:
    """Undoes `accelerate`: each module gets its class and its attributes back. Its weights stay as they are.

    Args:
        model: the model that `accelerate` got, or any module with accelerated modules inside.

    Returns:
        The names of the modules that were restored. A module whose class was changed since keeps the new class.

    Raises:
        ValueError: `model` is no module; a module inside was given a class since that is derived from ours, as
            `fully_shard` does, or a forward (or another method) of its own, which may call ours.
    """
    _check_module(model)
    found = [(name, module) for name, module in model.named_modules() if is_accelerated(module)]
    for name, module in found:
        if is_derived(module):
            raise ValueError(
                f"expected modules of the classes that accelerate gave them, got {type(module).__name__} "
                f"in {name or 'the model'}: restore before what gave it this class, such as fully_shard"
            )
        if own := own_methods(module):
            raise ValueError(
                f"expected modules with the methods of the classes that accelerate gave them, got another {own[0]} in "
                f"{name or 'the model'}, which may call ours: remove it first"
            )
    if "transformers" in sys.modules:
        from fastformer.integrations import engine_encode, engine_generate

        engine_generate.forget(model)
        engine_encode.forget(model)
    torch_nn.decide(model, wanted=True)
    restored = [name for name, module in found if restore_class(module)]
    for module in model.modules():
        forget_plans(module)
    if "transformers" in sys.modules:
        from fastformer.integrations.attention_interface import unpatch_attention
        from fastformer.integrations.padding import forget

        unpatch_attention(model)
        forget(model)
    return restored


_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
# The module of transformers' hooks that record outputs. They do nothing while it records none.
_RECORDING = "transformers.utils.output_capturing"


def _hooked(model: nn.Module, inside: set[nn.Module]) -> dict[str, str]:
    """`Report.hooked`; `inside` are the accelerated modules, and those inside of them."""
    on_all = ["a hook on all modules"] if torch_module._has_any_global_hook() else []
    found = {}
    for name, module in model.named_modules():
        kinds = [
            kind for attribute, kind in _HOOKS.items() if any(map(_is_foreign, getattr(module, attribute).values()))
        ]
        kinds += on_all if is_accelerated(module) else []
        if module in inside and kinds:
            found[name] = ", ".join(kinds)
    return found


def _is_foreign(hook: object) -> bool:
    return getattr(hook, "__module__", None) != _RECORDING


# The file of a family here, and transformers' module, which is loaded if there is a model of the family.
_FAMILIES = {
    name: f"transformers.models.{name}.modeling_{name}" for name in ("bart", "bert", "gpt2", "llama", "marian", "t5")
}


def _products(model: nn.Module) -> dict[nn.Module, Replacement]:
    """The linear maps to accelerate: those inside of transformers' models."""
    if "transformers" not in sys.modules:
        return {}
    from fastformer.integrations.products import products_of

    return products_of(model)


def known_replacements() -> dict[type[nn.Module], Replacement]:
    """The replacements for classes of torch.nn and of loaded families, by the class that they replace."""
    known = [*torch_nn.REPLACEMENTS]
    if "transformers" in sys.modules:
        from fastformer.integrations import decoders, encoders, seq2seq

        # A later one counts: those of encoder-decoders do what those of `decoders` do, and more.
        known += [*decoders.replacements(), *encoders.replacements(), *seq2seq.replacements()]
    return by_original([*known, *chain.from_iterable(family.REPLACEMENTS for family in _families())])


def _families() -> list[Any]:
    loaded = [name for name, theirs in _FAMILIES.items() if theirs in sys.modules]
    families = [importlib.import_module(f"fastformer.integrations.{name}") for name in loaded]
    if loaded:
        from fastformer.integrations.known import register

        for name in loaded:  # a forward that was a foreign one at the first call may be transformers' again
            register(sys.modules[_FAMILIES[name]])
    return families


def _fused_losses(model: nn.Module) -> dict[type[nn.Module], Replacement]:
    """The replacements for heads whose loss can be fused.

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
        f"LlamaForCausalLM, MarianMTModel, T5ForConditionalGeneration of transformers 5), got {type(model).__name__}"
    )
