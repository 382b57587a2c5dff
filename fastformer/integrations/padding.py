"""Which stacks of transformers' models leave padding out, and in which calls: decided by the model that is handed in.

`accelerate(model)` looks for the *owner* of each stack: the module handed in, where that is a model whose class is
known here (a head such as BertForMaskedLM, a model such as BertModel, or a stack by itself). A stack leaves padding out
only during a call of its owner that grants it: the owner's forward is one of ours, and knows from its arguments whether
padded positions are read (labels there, a softmax over positions). Whatever else calls the stack, a forward that
replaced the owner's among it, has no grant, and gets what the plain model computes.

An owner grants nothing while a part that reads its stacks is one that may look at several positions, or has a hook or a
forward of its own. That is asked once, and again when `nn.guards` finds the model changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastformer.integrations.hugging_face import (
    RETURNS_TUPLES,
    attends_as_known,
    is_recording,
    is_unhooked_or_recorded,
    works_by_token,
)
from fastformer.integrations.swap import forget_restored_forward, is_swapped, original_class
from fastformer.nn.fusing import is_traced, is_watched, is_written_as_known, is_written_in
from fastformer.nn.guards import Guards


class Rule:
    """What was decided of one owner and its stacks, which hold the same rule. A copy of a model has a copy of it."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason  # why the stacks never leave padding out; None: where their owner grants it


class Role(NamedTuple):
    """A module's part in a rule: its owner, or one of the stacks under it, or both."""

    rule: Rule
    owns: bool


class Grant(NamedTuple):
    """That stacks may leave padding out in the call that is going on."""

    rule: Rule
    causal: bool  # whether those with a causal mask may, too


class _Plan(NamedTuple):
    reason: str | None
    guards: Guards
    checkpointed: list[nn.Module]  # which compute their layers again while they train
    is_recorded: bool  # whether transformers' own hooks, which record outputs on request, are on a module


# The attribute in which a module remembers its role.
ROLE = "_fastformer_padding"
_grant: ContextVar[Grant | None] = ContextVar("fastformer_padding_grant", default=None)
_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()


class PackingStack(nn.Module):
    """A stack that may leave padding out."""

    IS_CAUSAL: ClassVar[bool] = False

    def may_leave_out(self) -> bool:
        """Whether nothing that runs now reads what this stack gives at padded positions."""
        role = vars(self).get(ROLE)
        if role is None or role.rule.reason is not None or is_traced() or is_watched() or not attends_as_known():
            return False
        if not role.owns:
            grant = _grant.get()
            return grant is not None and grant.rule is role.rule and (grant.causal or not self.IS_CAUSAL)
        return why_not(self) is None


class Owner(nn.Module):
    """A model of a known class around stacks: says at each call whether it reads what they give at padding.

    Attributes:
        INPUTS: the names of children that give stacks their input, and read nothing of what they give.
        READS_ENCODERS: whether it is any stack that it reads then; else those with a causal mask alone.
        ALWAYS_READS: whether every call does.
    """

    INPUTS: ClassVar[frozenset[str]] = frozenset({"embeddings", "shared"})
    READS_ENCODERS: ClassVar[bool] = False
    ALWAYS_READS: ClassVar[bool] = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        role = vars(self).get(ROLE)
        if role is None or not role.owns or is_traced():
            return super().forward(*args, **kwargs)
        reads = self.ALWAYS_READS or self.reads_padding(args, kwargs)
        with self.granting(causal=not reads, encoders=not (reads and self.READS_ENCODERS)):
            return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def granting(self, *, causal: bool, encoders: bool = True) -> Iterator[None]:
        """In the block stacks may leave padding out, if this is their owner and its parts allow it.

        Args:
            causal: whether those with a causal mask may.
            encoders: whether any may.
        """
        role = vars(self).get(ROLE)
        if role is None or not role.owns or is_traced():
            yield
            return
        granted = encoders and why_not(self) is None
        token = _grant.set(Grant(role.rule, causal) if granted else None)
        try:
            yield
        finally:
            _grant.reset(token)

    def reads_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments reads what stacks give at padding."""
        return False


def why_not(owner: nn.Module) -> str | None:
    """Why an owner's stacks compute padding now, whatever the call; None: they need not."""
    plan = _plans.get(owner)
    if plan is None or not plan.guards.hold(owner):
        plan = _plans[owner] = _planned(owner)
    if plan.reason is not None:
        return plan.reason
    if not _is_called_plainly(owner):
        return f"{type(owner).__name__} has a hook, or a forward of its own"
    if any(module.training for module in plan.checkpointed):
        return "its layers are computed again in the backward pass"
    if plan.is_recorded and is_recording():
        return "what its modules give is recorded"
    return None


def _is_called_plainly(owner: nn.Module) -> bool:
    """Whether a call of an owner gives what its class's forward gives, but for its dtype.

    Hooks of PyTorch and transformers, and the wrappers that accelerate puts on a model for mixed precision, read no
    positions.
    """
    own = vars(owner)
    if not own["_forward_hooks"] and "forward" not in own:
        return True
    libraries = [sys.modules[name] for name in ("torch", "transformers", "accelerate") if name in sys.modules]
    if not all(is_written_in(_code_of(hook), *libraries) for hook in own["_forward_hooks"].values()):
        return False
    function = getattr(own.get("forward"), "__func__", own.get("forward"))
    while function is not None and function is not type(owner).forward:
        function = getattr(function, "__wrapped__", None) if is_written_in(_code_of(function), *libraries) else None
    return "forward" not in own or function is not None


def _code_of(function: object) -> object:
    """What has the code of a function, or of an object that is called as one."""
    function = getattr(function, "__func__", function)
    return function if hasattr(function, "__code__") else vars(type(function)).get("__call__")


def _planned(owner: nn.Module) -> _Plan:
    inside = [module for module in owner.modules() if module is not owner]
    if RETURNS_TUPLES:
        for module in inside:
            forget_restored_forward(module)
    names = {module: name for name, module in owner.named_modules()}
    reading = _reading(owner)
    reason = None if is_written_as_known(type(owner)) else f"the forward of {type(owner).__name__} was replaced"
    for module, may_hold in reading.items():
        if reason is not None:
            break
        kind = type(module).__name__
        if not is_written_as_known(type(module)):
            reason = f"the forward of {kind} was replaced"
        elif not may_hold:
            reason = f"{names[module]} is a {kind}, which may read several positions"
        elif not is_unhooked_or_recorded(module):
            reason = f"{names[module]} has a hook, or a forward of its own"
    checkpointed = [module for module in owner.modules() if getattr(module, "gradient_checkpointing", False)]
    is_recorded = any(vars(module)["_forward_hooks"] for module in reading)
    return _Plan(reason, Guards(owner, reading), checkpointed, is_recorded)


def _reading(owner: nn.Module) -> dict[nn.Module, bool]:
    """What reads the stacks of an owner, and what is inside of them; with each whether it may stand there."""
    found: dict[nn.Module, bool] = {}
    if isinstance(owner, PackingStack):
        return {module: works_by_token(module) for module in owner.modules() if module is not owner}
    _collect(owner, owner, found)
    return found


def _collect(module: nn.Module, owner: nn.Module, found: dict[nn.Module, bool]) -> None:
    """Adds what is inside of a model: stacks with all of theirs, models with their parts, parts."""
    inputs = module.INPUTS if isinstance(module, Owner) else frozenset()
    for name, child in module.named_children():
        if name in inputs or child in found:
            continue
        if isinstance(child, PackingStack):
            found[child] = True
            found.update({inner: works_by_token(inner) for inner in child.modules() if inner is not child})
        elif isinstance(child, Owner):
            found[child] = True
            _collect(child, owner, found)
        else:
            for part in child.modules():
                found[part] = reads_one_position(part)


_PARTS: set[type[nn.Module]] = set()


def know_parts(*kinds: type[nn.Module]) -> None:
    """Remembers classes of transformers' heads and poolers that read one position at a time, or the first one."""
    _PARTS.update(kinds)


def reads_one_position(part: nn.Module) -> bool:
    """Whether a part of a head, without what is inside of it, reads one position at a time, or the first one."""
    kind = original_class(part) if is_swapped(part) else type(part)
    if kind.__module__ == "peft.utils.other":  # which keeps copies of a part, and calls one of them
        return True
    return kind in _PARTS or (not kind.__module__.startswith("transformers.models.") and works_by_token(part))


# Modules around an owner that give on what it gives, by the beginning of where they are defined.
_HANDING_ON = ("peft.", "torch.nn.parallel.", "torch._dynamo.")


def decide(model: nn.Module, choice: Literal["auto", "skip", "compute"]) -> None:
    """Gives the stacks in a model, and their owners, their roles.

    Args:
        model: what was handed to `accelerate`.
        choice: "auto": by what is known of the model, see above; "skip": every stack leaves padding out, whatever is
            around it; "compute": none does.
    """
    stacks = [module for module in model.modules() if isinstance(module, PackingStack)]
    if choice == "compute":
        rule = Rule('padding="compute" was asked for')
        _give(model, Role(rule, True))
        for stack in stacks:
            _give(stack, Role(rule, stack is model))
    elif choice == "skip":
        for stack in stacks:
            _give(stack, Role(Rule(), True))
    else:
        _find_owners(model, stacks)


def _find_owners(model: nn.Module, stacks: Sequence[nn.Module]) -> None:
    inside = {id(role.rule) for module in model.modules() if (role := vars(module).get(ROLE)) is not None and role.owns}
    # What was decided for a larger model goes on: that is around these stacks, and can't be seen from here.
    stacks = [each for each in stacks if (role := vars(each).get(ROLE)) is None or id(role.rule) in inside]
    if not stacks:
        return
    owner = model
    while type(owner).__module__.startswith(_HANDING_ON):
        around = [child for child in owner.children() if any(stack in set(child.modules()) for stack in stacks)]
        if len(around) != 1:
            break
        owner = around[0]
    is_known = isinstance(owner, (Owner, PackingStack))
    rule = Rule(None if is_known else f"{type(owner).__name__}, which is around it, may read what stands there")
    for module in model.modules():
        if (role := vars(module).get(ROLE)) is not None and id(role.rule) in inside:
            del vars(module)[ROLE]
    for stack in stacks:
        _give(stack, Role(rule, False))
    _give(owner, Role(rule, True))


def _give(module: nn.Module, role: Role) -> None:
    vars(module)[ROLE] = role
    _plans.pop(module, None)


def forget(model: nn.Module) -> None:
    """Undoes `decide`."""
    for module in model.modules():
        vars(module).pop(ROLE, None)
        _plans.pop(module, None)


def described(model: nn.Module) -> dict[str, str]:
    """By the name of each stack in a model: what stands at padded positions of its output, and why."""
    names = {module: name for name, module in model.named_modules()}
    owners = {id(role.rule): module for module in names if (role := vars(module).get(ROLE)) is not None and role.owns}
    found = {}
    for stack, name in names.items():
        if isinstance(stack, PackingStack) and (role := vars(stack).get(ROLE)) is not None:
            found[name] = _described(stack, role.rule, owners.get(id(role.rule)))
    return found


def _described(stack: PackingStack, rule: Rule, owner: nn.Module | None) -> str:
    reason = rule.reason
    if reason is None and owner is None:
        reason = "the model that decides is not among these modules"
    elif reason is None and owner is not None:
        reason = why_not(owner)
        kind = type(owner).__name__
        if reason is None and isinstance(owner, Owner) and owner.ALWAYS_READS:
            reason = f"{kind} reads what stands there" if stack.IS_CAUSAL or owner.READS_ENCODERS else None
    if reason is not None:
        return f"padding is computed: {reason}"
    if owner is stack:
        return "padding is left out, and zeros stand there"
    return f"padding is left out, and zeros stand there, where a call of {type(owner).__name__} reads nothing there"


_unread: ContextVar[Tensor | None] = ContextVar("fastformer_unread", default=None)


@contextlib.contextmanager
def leaving_unread(positions: Tensor | None) -> Iterator[None]:
    """In the block nothing reads what causal stacks give at these positions.

    Args:
        positions: (batch, seqlen), bool, in each row a number of the last ones; None: all are read.
    """
    token = _unread.set(positions)
    try:
        yield
    finally:
        _unread.reset(token)


def unread(shape: torch.Size) -> Tensor | None:
    """The positions of `leaving_unread`, for a batch of this shape."""
    positions = _unread.get()
    return None if positions is None or positions.shape != shape else positions
