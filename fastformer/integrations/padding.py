"""Decides which stacks of transformers' models omit padding, and in which calls.

`accelerate(model)` decides it by its argument. It looks for the *owner* of each stack: the model itself, if its class
is known here (a head such as BertForMaskedLM, a model such as BertModel, or a stack by itself). A stack omits padding
only during a call of its owner that grants it. The owner's forward is fastformer's, and knows from its arguments
whether padded positions are read (labels there, a softmax over positions). Any other caller of the stack, such as a
forward that replaced the owner's, has no grant: the stack computes padding as the plain model does.

An owner grants nothing if a module that reads its stacks may look at several positions, or has a hook or a forward of
its own. This is checked once, and again when `engine.frozen` finds the model changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from torch import nn

from fastformer.engine.checks import (
    has_plain_call,
    is_its_own,
    is_traced,
    is_unhooked,
    is_watched,
    is_written_in,
    replacement,
)
from fastformer.engine.frozen import Guards, Plans, forget_setting, setting_of, settings_to_change
from fastformer.integrations.known import (
    attends_as_known,
    code_of,
    is_recording,
    is_unhooked_or_recorded,
    own_function,
    replaced_in_sources,
)
from fastformer.integrations.packing import Grant, telling, told
from fastformer.integrations.positionwise import is_positionwise, is_positionwise_part
from fastformer.integrations.replace import forget_restored_forwards, original_class


class Rule:
    """The decision about one owner and its stacks, which share this object. A copied model has a copy of it."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason  # why the stacks never omit padding; None: their owner grants it call by call


class Role(NamedTuple):
    """The role of a module under a rule: the owner, one of the owner's stacks, or both."""

    rule: Rule
    owns: bool


class _Plan(NamedTuple):
    """The findings about an owner, which holds them; they don't refer to it, so that it is freed without delay."""

    reason: str | None
    stacks: frozenset[int]  # the ids of stacks with known layers; the guards keep all but the owner alive
    checkpointed: list[nn.Module]  # modules inside of the owner that compute their layers again in backward
    is_checkpointed: bool  # whether the owner itself does so


# The name of a module's role among its settings, and of the findings about an owner.
_ROLE = "padding"


class PackingStack(nn.Module):
    """A stack that may omit padding."""

    def is_causal_stack(self) -> bool:
        """Returns whether the stack has a causal mask."""
        return False

    def has_known_layers(self) -> bool:
        """Returns whether each layer accepts packed tokens, and calls no attention after the stack has ended.

        This is called once, and again when `engine.frozen` finds the model changed.
        """
        raise NotImplementedError

    def may_leave_out(self) -> bool:
        """Returns whether the running call doesn't read this stack's output at padded positions."""
        if is_traced():
            return False
        role = setting_of(self, _ROLE)
        if role is None or role.rule.reason is not None or is_watched() or is_recording() or not attends_as_known():
            return False
        if not role.owns:
            grant = told().grant
            if grant is None or grant.rule is not role.rule or id(self) not in grant.stacks:
                return False
            return grant.causal or not self.is_causal_stack()
        plan = _PLANS.of(self)
        return id(self) in plan.stacks and _why_not(self, plan) is None


class Owner(nn.Module):
    """A model of a known class around stacks, which decides at each call whether it reads their output at padding.

    Attributes:
        INPUTS: the names of children that compute the stacks' input and don't read their output.
        READS_ENCODERS: whether a call that reads padding reads it in the output of all stacks; else only of those with
            a causal mask.
        ALWAYS_READS: whether every call reads padding.
    """

    INPUTS: ClassVar[frozenset[str]] = frozenset({"embeddings", "shared"})
    READS_ENCODERS: ClassVar[bool] = False
    ALWAYS_READS: ClassVar[bool] = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced():  # no stack omits padding then
            return super().forward(*args, **kwargs)
        with self.granting(lambda: self.ALWAYS_READS or self.reads_padding(args, kwargs)):
            return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def granting(self, reads: Callable[[], bool]) -> Iterator[None]:
        """Lets stacks omit padding inside the block, if this is their owner and its parts allow it.

        Args:
            reads: returns whether padded positions are read in the block. It is called only if its result matters: it
                may read the values of a mask, for which the host waits on a GPU.
        """
        if is_traced() or (role := setting_of(self, _ROLE)) is None or not role.owns:
            yield
            return
        grant = None
        if role.rule.reason is None and _why_not(self, plan := _PLANS.of(self)) is None:
            is_read = reads()
            if not (is_read and self.READS_ENCODERS):
                grant = Grant(role.rule, not is_read, plan.stacks)
        with telling(grant=grant):
            yield

    def reads_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether a call with these arguments reads the stacks' output at padding."""
        return False


def _why_not(owner: nn.Module, plan: _Plan) -> str | None:
    """Returns why an owner's stacks compute padding now with any arguments; None if they needn't."""
    if plan.reason is not None:
        return plan.reason
    if not _is_called_plainly(owner):
        return f"{type(owner).__name__} has a hook or its own forward"
    if (plan.is_checkpointed and owner.training) or any(module.training for module in plan.checkpointed):
        return "its layers are recomputed in the backward pass"
    return None


def _is_called_plainly(owner: nn.Module) -> bool:
    """Returns whether a call of an owner has the result of its class's forward, apart from the dtype.

    Hooks of PyTorch and transformers, and the wrappers by which the accelerate library casts a model's output, read no
    positions.
    """
    attributes = vars(owner)
    if not has_plain_call(owner):
        return False
    if not attributes["_forward_hooks"] and "forward" not in attributes:
        return True
    libraries = [sys.modules[name] for name in ("torch", "transformers", "accelerate") if name in sys.modules]
    if not all(is_written_in(code_of(hook), *libraries) for hook in attributes["_forward_hooks"].values()):
        return False
    function = getattr(attributes.get("forward"), "__func__", attributes.get("forward"))
    while function is not None and function is not type(owner).forward:
        function = getattr(function, "__wrapped__", None) if is_written_in(code_of(function), *libraries) else None
    return "forward" not in attributes or function is not None


def _planned(owner: nn.Module) -> _Plan:
    inside = [module for module in owner.modules() if module is not owner]
    forget_restored_forwards(inside)
    reading = _reading(owner)
    checkpointed = [module for module in inside if getattr(module, "gradient_checkpointing", False)]
    stacks = [module for module in (owner, *reading) if isinstance(module, PackingStack)]
    known = frozenset(id(stack) for stack in stacks if stack.has_known_layers())
    is_checkpointed = bool(getattr(owner, "gradient_checkpointing", False))
    reason = _first_reason(owner, reading) or replaced_in_sources({type(module) for module in (owner, *reading)})
    return _Plan(reason, known, checkpointed, is_checkpointed)


def _guards_of(owner: nn.Module) -> Guards:
    return Guards(owner, _reading(owner))


_PLANS: Plans[_Plan] = Plans(_ROLE, _planned, _guards_of)


def _first_reason(owner: nn.Module, reading: dict[nn.Module, bool]) -> str | None:
    """Says which part of a model reads several positions, or may read them; None if no part does."""
    names = {module: name for name, module in owner.named_modules()}
    for module, may_hold in {owner: True, **reading}.items():
        kind = type(module).__name__
        if (replaced := replacement(type(module))) is not None:
            return f"{replaced.replaced} was replaced"
        if (function := own_function(module)) is not None:
            return f"{names[module] or kind}.{function} is your own function, which may read several positions"
        if module is owner:
            continue
        if not may_hold:
            return f"{names[module]} is a {kind}, which may read several positions"
        if not is_unhooked_or_recorded(module):
            return f"{names[module]} has a hook or its own forward"
    return None


def _reading(owner: nn.Module) -> dict[nn.Module, bool]:
    """Returns the modules that read an owner's stacks or are inside of them, each with whether it is positionwise."""
    readers: dict[nn.Module, bool] = {}
    if isinstance(owner, PackingStack):
        return {module: is_positionwise(module) for module in owner.modules() if module is not owner}
    _collect(owner, owner, readers)
    return readers


def _collect(module: nn.Module, owner: nn.Module, readers: dict[nn.Module, bool]) -> None:
    """Adds the modules inside of a model to `readers`: stacks with their modules, models with their parts, parts."""
    inputs = module.INPUTS if isinstance(module, Owner) else frozenset()
    for name, child in module.named_children():
        if name in inputs or child in readers:
            continue
        if isinstance(child, PackingStack):
            readers[child] = True
            readers.update({inner: is_positionwise(inner) for inner in child.modules() if inner is not child})
        elif isinstance(child, Owner):
            readers[child] = True
            _collect(child, owner, readers)
        else:
            for part in child.modules():
                readers[part] = is_positionwise_part(part)


# Wrappers that return the owner's output unchanged, by the prefix of their modules' names.
_WRAPPERS = ("peft.", "torch.nn.parallel.", "torch._dynamo.")
_PIPELINES = "sentence_transformers."
# Classes of sentence-transformers that only call the modules inside of them, one after another or one of them.
_CALLERS = frozenset(
    {"SentenceTransformer", "SparseEncoder", "CrossEncoder", "MultiVectorEncoder", "Transformer", "MLMTransformer"}
) | {"Router", "Asym"}
# Its modules that read the model's output only at real positions, or read no positions.
_BY_MASK = frozenset(
    {"Pooling", "Normalize", "Dense", "LayerNorm", "Dropout", "SpladePooling", "SparseAutoEncoder", "LogitScore"}
) | {"MultiVectorMask", "HierarchicalTokenPooling", "StaticEmbedding", "SparseStaticEmbedding"}


def decide(model: nn.Module, choice: Literal["auto", "skip", "compute"]) -> None:
    """Gives the stacks in a model, and their owners, their roles.

    Args:
        model: the argument of `accelerate`.
        choice: "auto": as the rules above decide; "skip": each stack omits padding, regardless of the modules around
            it; "compute": none does.
    """
    stacks = [module for module in model.modules() if isinstance(module, PackingStack)]
    if choice == "compute":
        rule = Rule('you asked for padding="compute"')
        _give(model, Role(rule, True))
        for stack in stacks:
            _give(stack, Role(rule, stack is model))
    elif choice == "skip":
        for stack in stacks:
            _give(stack, Role(Rule(), True))
    else:
        _find_owners(model, stacks)


def _find_owners(model: nn.Module, stacks: Sequence[nn.Module]) -> None:
    inside = {
        id(role.rule) for module in model.modules() if (role := setting_of(module, _ROLE)) is not None and role.owns
    }
    # A decision for a larger model stays: that model is around these stacks, and can't be found from here.
    stacks = [each for each in stacks if (role := setting_of(each, _ROLE)) is None or id(role.rule) in inside]
    if not stacks:
        return
    for module in model.modules():
        if (role := setting_of(module, _ROLE)) is not None and id(role.rule) in inside:
            forget_setting(module, _ROLE)
    owners = [model]
    try:
        owners, reason = _owners_in(model), None
    except _ReadsPaddingError as error:
        reason = str(error)
    for owner in dict.fromkeys(owners):
        rule, within = Rule(reason), set(owner.modules())
        for stack in stacks:
            if stack in within:
                _give(stack, Role(rule, False))
        _give(owner, Role(rule, True))


class _ReadsPaddingError(Exception):
    """Raised if a module around the stacks may read their output at padding; the message names the module."""


def _owners_in(module: nn.Module, pipeline: bool = False) -> list[nn.Module]:
    """Returns the models of known classes inside of a module, which only wraps them, or reads no padding.

    Args:
        module: the argument of `accelerate`, or a module around a stack inside of it.
        pipeline: whether a model of sentence-transformers is around the module.

    Raises:
        _ReadsPaddingError: the module, or one inside of it, may read padded positions.
    """
    if isinstance(module, (Owner, PackingStack)):
        return [module]
    kind, children = original_class(module), list(module.children())
    around = [child for child in children if any(isinstance(inner, PackingStack) for inner in child.modules())]
    if kind.__module__.startswith(_WRAPPERS) and len(around) == 1:
        return _owners_in(around[0])
    calls_plainly = is_unhooked(module) and (is_its_own(kind) or kind is nn.ModuleDict)
    is_caller = kind.__module__.startswith(_PIPELINES) and kind.__name__ in _CALLERS
    if not calls_plainly or not (is_caller or (pipeline and kind in (nn.Sequential, nn.ModuleDict))):
        raise _ReadsPaddingError(f"the model around it, {kind.__name__}, may read padded positions")
    for child in children:
        if child not in around and not _reads_by_mask(child):
            raise _ReadsPaddingError(f"the module next to it, {type(child).__name__}, may read padded positions")
    expansion = getattr(module, "query_expansion", None)
    if expansion is not None and not expansion["attend"]:
        raise _ReadsPaddingError("its queries are expanded by tokens that are masked like padding, and read")
    return [owner for child in around for owner in _owners_in(child, pipeline=True)]


def _reads_by_mask(module: nn.Module) -> bool:
    """Returns whether a module of sentence-transformers doesn't read a model's output at padding."""
    kind = type(module)
    is_known = kind.__module__.startswith(_PIPELINES) and kind.__name__ in _BY_MASK
    if not is_known and kind in (nn.Sequential, nn.ModuleDict):  # a route without a stack
        return is_unhooked(module) and all(map(_reads_by_mask, module.children()))
    return is_known and is_unhooked(module) and is_its_own(kind)


def _give(module: nn.Module, role: Role) -> None:
    settings_to_change(module)[_ROLE] = role


def forget(model: nn.Module) -> None:
    """Undoes `decide`."""
    for module in model.modules():
        forget_setting(module, _ROLE)


def described(model: nn.Module) -> dict[str, str]:
    """Returns for each stack in a model, by its name, its output at padded positions, and the reason."""
    names = {module: name for name, module in model.named_modules()}
    owners = {
        id(role.rule): module for module in names if (role := setting_of(module, _ROLE)) is not None and role.owns
    }
    descriptions = {}
    for stack, name in names.items():
        if isinstance(stack, PackingStack) and (role := setting_of(stack, _ROLE)) is not None:
            descriptions[name] = _described(stack, role.rule, owners.get(id(role.rule)))
    return descriptions


def _described(stack: PackingStack, rule: Rule, owner: nn.Module | None) -> str:
    reason = rule.reason
    if reason is None and owner is None:
        reason = "the model that decides is not among these modules"
    elif reason is None and owner is not None:
        plan = _PLANS.of(owner)
        reason = _why_not(owner, plan)
        attention = getattr(getattr(stack, "config", None), "_attn_implementation", None)
        if reason is None and attention != "sdpa":
            reason = f"its attention is {attention!r}, and not 'sdpa'"
        if reason is None and id(stack) not in plan.stacks:
            reason = "its layers, or their attention, are of other classes or settings than it knows"
        reads = isinstance(owner, Owner) and owner.ALWAYS_READS and (stack.is_causal_stack() or owner.READS_ENCODERS)
        if reason is None and reads:
            reason = f"{type(owner).__name__} reads padded positions"
    if reason is not None:
        return f"padding is computed: {reason}"
    if owner is stack:
        return "padding is skipped, and the output is zero there"
    return f"padding is skipped, and the output is zero there, in calls of {type(owner).__name__} that don't read it"
