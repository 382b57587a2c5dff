"""`fastformer.accelerate(model)`: a model that somebody else wrote, on our ops, in place."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar, get_args

import torch.nn.modules.module as torch_module
from torch import nn

from fastformer.integrations import torch_nn
from fastformer.integrations.swap import (
    Swap,
    by_original,
    is_derived,
    is_swapped,
    original_class,
    own_methods,
    swap,
    unswap,
    why_left,
)
from fastformer.nn.guards import replacement

Model = TypeVar("Model", bound=nn.Module)
Padding = Literal["auto", "skip", "compute"]


@dataclass
class Report:
    """What is accelerated of a model, by the names of its modules ("" is the model itself).

    Attributes:
        swapped: the class that each swapped module had.
        left: why a module that looks like one of the known ones is as it was. Or what was replaced of the class of a
            swapped module, or of one inside of it (a forward, a block of torch.nn's layers, the function that attends):
            that is called, and no padding is left out around it, for as long as it is there.
        attention: the models of transformers whose attention is led to the ops of this library, whatever their family.
        hooked: which hooks there are on a swapped module, or on one inside of it. They see and change what they did
            before: nothing is fused over such a module, and no padding is left out around it.
        padding: of each stack of transformers' that may leave padding out, what stands at padded positions of its
            output, and why.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)
    hooked: dict[str, str] = field(default_factory=dict)
    padding: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = Counter(self.swapped.values())
        lines = [f"swapped: {', '.join(f'{count} {name}' for name, count in counts.items()) or 'nothing'}"]
        if self.attention:
            lines.append(f"attention led to fastformer: {', '.join(name or 'the model' for name in self.attention)}")
        noted = {"left as they are": self.left, "hooked, and called as before": self.hooked, "padding": self.padding}
        for what, reasons_by_name in noted.items():
            names_by_reason: dict[str, list[str]] = {}
            for name, reason in reasons_by_name.items():
                names_by_reason.setdefault(reason, []).append(name or "the model")
            for reason, names in names_by_reason.items():
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                lines.append(f"{what}: {shown}: {reason}")
        return "\n".join(lines)


def accelerate(model: Model, *, fused_loss: bool = False, padding: Padding = "auto") -> Model:
    """Makes the modules of a model that this library knows compute on its ops, in place.

    Parameters, buffers, submodules, hooks and state_dict keys stay what they are, and so does each object: optimizers
    and wrappers go on as before. `isinstance` still says what it said. A subclass, or a module with a forward of its
    own, is left alone. What you hooked or replaced inside of a module is called as before. `report` says what was done.

    A stack of transformers' that leaves padding out gives zeros at padded positions. Whether one may do so is decided
    here, by the model that you hand in, and a model that you build around an accelerated one later doesn't change it.

    Args:
        model: any module. Known are those of torch.nn (`MultiheadAttention`, `TransformerEncoderLayer`,
            `TransformerDecoderLayer`, `TransformerEncoder`, `TransformerDecoder`, `Transformer`), and of transformers
            the layers of BART, BERT, GPT-2, Llama, Marian and T5. In any model of transformers the linear maps are
            swapped, and attention that is "sdpa" is led to the ops of this library.
        fused_loss: for training: BartForConditionalGeneration, GPT2LMHeadModel, LlamaForCausalLM, MarianMTModel and
            T5ForConditionalGeneration (of transformers 5) give the loss of their labels without ever holding the
            logits: in training the output's `logits` is None. In evaluation, without labels, and under torch.compile
            they are there as before.
        padding: of transformers' stacks. "auto" leaves padding out where the model is of a class that is known (also
            inside of peft's models and DistributedDataParallel), all parts that read its stacks work on one position at
            a time, and a call asks for nothing at padded positions, such as labels there; everything else computes
            padding as the plain model does. "skip" leaves it out everywhere: you promise that nothing reads padded
            positions. "compute" leaves it out nowhere.

    Returns:
        The model itself. A second call swaps nothing.

    Raises:
        ValueError: this is no module, has no head whose loss could be fused, or `padding` is another word.
    """
    _check_module(model)
    if padding not in get_args(Padding):
        raise ValueError(f"expected padding to be one of {', '.join(map(repr, get_args(Padding)))}, got {padding!r}")
    swaps = known_swaps()
    if fused_loss:
        swaps |= _fused_losses(model)
    products = _products(model)
    for module in list(model.modules()):
        known = products.get(module) or swaps.get(type(module))
        if known is not None and why_left(module, {known.original: known}) is None:
            swap(module, known)
    if "transformers" in sys.modules:
        from fastformer.integrations.attention_interface import lead
        from fastformer.integrations.padding import decide

        lead(model)
        decide(model, padding)
    return model


def report(model: nn.Module) -> Report:
    """What `accelerate` did to a model, as it stands now.

    Args:
        model: any module, accelerated or not.

    Returns:
        What is swapped, what is left and why, what is hooked, and what stands at padded positions. Hooks and patches
        that came since `accelerate` are in it. `print` shows it in a few lines.

    Raises:
        ValueError: this is no module.
    """
    _check_module(model)
    swaps, products = known_swaps(), _products(model)
    found = Report()
    for name, module in model.named_modules():
        if is_swapped(module):
            found.swapped[name] = original_class(module).__name__
            continue
        known = products.get(module)
        reason = why_left(module, swaps if known is None else {known.original: known})
        if reason is not None:
            found.left[name] = reason
    if "transformers" in sys.modules:
        from fastformer.integrations.attention_interface import led
        from fastformer.integrations.padding import described

        found.attention = led(model)
        found.padding = described(model)
    inside = {inner for module in model.modules() if is_swapped(module) for inner in module.modules()}
    for name, module in model.named_modules():
        if module in inside and (replaced := replacement(type(module))) is not None:
            found.left[name] = f"{replaced.replaced} was replaced"
    found.hooked = _hooked(model, inside)
    return found


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}")


def restore(model: nn.Module) -> list[str]:
    """Undoes `accelerate`: each module has the class and the attributes that it had. What it learned stays.

    Args:
        model: what `accelerate` was given, or any module that has such modules inside.

    Returns:
        The names of the modules that were restored. One that was given a class of somebody else's since keeps that.

    Raises:
        ValueError: this is no module; one inside was given a class since that is made of ours, as `fully_shard` does,
            or a forward of its own (or another method of ours), which may hold the one that it had.
    """
    _check_module(model)
    found = [(name, module) for name, module in model.named_modules() if is_swapped(module)]
    for name, module in found:
        if is_derived(module):
            raise ValueError(
                f"expected modules of the classes that accelerate gave them, got {type(module).__name__} "
                f"in {name or 'the model'}: restore before what gave it this class (fully_shard, for one)"
            )
        if own := own_methods(module):
            raise ValueError(
                f"expected modules with the methods of the classes that accelerate gave them, got another {own[0]} in "
                f"{name or 'the model'}, which may call ours: take it away, or restore before what put it there"
            )
    restored = [name for name, module in found if unswap(module)]
    if "transformers" in sys.modules:
        from fastformer.integrations.attention_interface import lead_back
        from fastformer.integrations.padding import forget

        lead_back(model)
        forget(model)
    return restored


_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
# Where transformers has the hooks by which it records outputs. While it records none, nobody minds them.
_RECORDING = "transformers.utils.output_capturing"


def _hooked(model: nn.Module, inside: set[nn.Module]) -> dict[str, str]:
    """See `Report.hooked`; `inside` are the swapped modules, and those inside of them."""
    on_all = ["a hook on all modules"] if torch_module._has_any_global_hook() else []
    found = {}
    for name, module in model.named_modules():
        kinds = [
            kind for attribute, kind in _HOOKS.items() if any(map(_is_anothers, getattr(module, attribute).values()))
        ]
        kinds += on_all if is_swapped(module) else []
        if module in inside and kinds:
            found[name] = ", ".join(kinds)
    return found


def _is_anothers(hook: object) -> bool:
    return getattr(hook, "__module__", None) != _RECORDING


# Of transformers: the file of a family here, and the module whose classes it swaps. A model of a family has loaded it.
_FAMILIES = {
    name: f"transformers.models.{name}.modeling_{name}" for name in ("bart", "bert", "gpt2", "llama", "marian", "t5")
}


def _products(model: nn.Module) -> dict[nn.Module, Swap]:
    """The linear maps in it to be swapped, which are those of transformers' models."""
    if "transformers" not in sys.modules:
        return {}
    from fastformer.integrations.products import products_of

    return products_of(model)


def known_swaps() -> dict[type[nn.Module], Swap]:
    """All swaps of what is loaded, by the class that they replace."""
    return by_original([*torch_nn.SWAPS, *chain.from_iterable(family.SWAPS for family in _families())])


def _families() -> list[Any]:
    loaded = [name for name, theirs in _FAMILIES.items() if theirs in sys.modules]
    families = [importlib.import_module(f"fastformer.integrations.{name}") for name in loaded]
    if loaded:
        from fastformer.integrations.hugging_face import know

        for name in loaded:  # a forward that was another when the family was first seen may be back
            know(sys.modules[_FAMILIES[name]])
    return families


def _fused_losses(model: nn.Module) -> dict[type[nn.Module], Swap]:
    """The swaps of heads that fuse the loss.

    Raises:
        ValueError: the model has no such head, or it is swapped for another already.
    """
    swaps = by_original(chain.from_iterable(getattr(family, "LOSS_SWAPS", ()) for family in _families()))
    fused = {swap.swapped for swap in swaps.values()}
    if any(type(module) in swaps or type(module) in fused for module in model.modules()):
        return swaps
    if any(is_swapped(module) and isinstance(module, tuple(swaps)) for module in model.modules()):
        raise ValueError(
            "expected fused_loss=True along with the first accelerate, got it later: restore the model first"
        )
    raise ValueError(
        "expected a model with a head whose loss can be fused (BartForConditionalGeneration, GPT2LMHeadModel, "
        f"LlamaForCausalLM, MarianMTModel, T5ForConditionalGeneration of transformers 5), got {type(model).__name__}"
    )
