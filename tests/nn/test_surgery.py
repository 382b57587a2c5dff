"""Changes to a stack of layers have the same effect as on torch.nn's, on fastformer's and accelerated stacks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as parametrizations
import torch.nn.utils.parametrize as parametrize
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fastformer
from tests.covering import covering
from tests.nn import comparing
from tests.nn.comparing import FF, E, assert_same, padding_mask

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:.*nested tensors is in prototype", "ignore:.*weight_norm. is deprecated"
)

N, L, S = 3, 5, 4
both_orders = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
kinds = pytest.mark.parametrize("kind", ["encoder", "decoder"])
PADDING = padding_mask([5, 3, 2], L)


def pair(kind: str, norm_first: bool, *, accelerated: bool = False) -> tuple[Any, Any]:
    """Makes fastformer's stack (or torch.nn's, accelerated) and torch.nn's, with the same random weights."""
    ours, theirs = comparing.pair(kind, 2, nn.LayerNorm, norm_first=norm_first)
    return (fastformer.accelerate(copy.deepcopy(theirs)) if accelerated else ours), theirs


def data() -> tuple[Tensor, Tensor]:
    """Makes a batch and a memory."""
    return torch.randn(N, L, E, dtype=torch.float64), torch.randn(N, S, E, dtype=torch.float64)


def bent(out: Any) -> Any:
    """Changes values in a way that no norm undoes."""
    return (out[0].cumsum(-1), *out[1:]) if isinstance(out, tuple) else out.cumsum(-1)


def patch_forward(module: Any, name: str = "forward") -> None:
    """Replaces the forward, or another method, of an instance, as adapters do."""
    before = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: bent(before(*args, **kwargs)))


def replace(name: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, make())


class Halved(nn.Module):
    """A module without dropout that has dropout's attribute, like DropPath."""

    p = 0.9

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Adapter(nn.Module):
    """An adapter around a linear layer."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return bent(self.linear(x))


class Mixer(nn.Module):
    """A replacement for an attention that accepts torch.nn's arguments."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, None]:
        assert set(options) == {"attn_mask", "key_padding_mask", "need_weights", "is_causal"}
        return query.cumsum(1) + value.mean(1, keepdim=True), None


class Tagged(nn.Parameter):
    """A parameter subclass that changes operations on it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        return out * out.abs() if name in ("linear", "layer_norm", "rms_norm") else out


def tag(name: str) -> Callable[[Any], None]:
    def surgery(layer: Any) -> None:
        module = layer.get_submodule(name)
        module.weight = Tagged(module.weight.detach().clone())

    return surgery


class Half(nn.Module):
    """A parametrization that halves a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def halve(*names: str) -> Callable[[Any], None]:
    def surgery(layer: Any) -> None:
        for name in names:
            parametrize.register_parametrization(layer.get_submodule(name), "weight", Half())

    return surgery


def adapt(layer: Any) -> None:
    layer.linear1 = Adapter(layer.linear1)


def hook(name: str) -> Callable[[Any], None]:
    return lambda layer: layer.get_submodule(name).register_forward_hook(lambda module, args, out: bent(out))


def own_forward(name: str) -> Callable[[Any], None]:
    return lambda layer: patch_forward(layer.get_submodule(name))


def pre_hook(name: str) -> Callable[[Any], None]:
    return lambda layer: layer.get_submodule(name).register_forward_pre_hook(lambda module, args: (args[0].cumsum(-1),))


def without_dropout(layer: Any) -> None:
    for name in ("dropout", "dropout1", "dropout2"):
        setattr(layer, name, nn.Identity())


def activation(layer: Any) -> None:
    layer.activation = nn.ReLU()
    hook("activation")(layer)


SURGERIES: dict[str, Callable[[Any], Any]] = {
    **{
        f"a hook on {name}": hook(name)
        for name in ("norm1", "norm2", "dropout", "dropout1", "dropout2", "linear1", "linear2", "self_attn")
    },
    **{f"a pre-hook on {name}": pre_hook(name) for name in ("norm1", "norm2", "dropout2", "linear1")},
    **{
        f"a forward of {name}'s own": own_forward(name)
        for name in ("norm1", "norm2", "dropout", "dropout1", "dropout2", "linear1", "linear2")
    },
    "a forward of the layer's own": patch_forward,
    "an activation with a hook": activation,
    "nn.LayerNorm": replace("norm1", lambda: nn.LayerNorm(E, dtype=torch.float64)),
    "nn.LayerNorm without weight": replace("norm2", lambda: nn.LayerNorm(E, elementwise_affine=False)),
    "nn.RMSNorm": replace("norm1", lambda: nn.RMSNorm(E, 1e-3, dtype=torch.float64)),
    "nn.RMSNorm of its own eps": replace("norm2", lambda: nn.RMSNorm(E, dtype=torch.float64)),
    "a norm of two dimensions": replace("norm2", lambda: nn.LayerNorm([L, E], dtype=torch.float64)),
    "no norm": replace("norm1", nn.Identity),
    "no dropout": without_dropout,
    "a dropout that is none": replace("dropout1", Halved),
    "a dropout inside that is none": replace("dropout", Halved),
    "an adapter": adapt,
    "another attention": replace("self_attn", Mixer),
    "a parametrization": halve("linear2", "norm2"),
    "pruning": lambda layer: [
        prune.l1_unstructured(getattr(layer, name), "weight", 0.5) for name in ("linear1", "norm1")
    ],
    "a linear's parameter of a subclass": tag("linear1"),
    "a norm's parameter of a subclass": tag("norm2"),
}


def with_(attribute: str, stack: nn.Module) -> list[Any]:
    """Returns the modules of a stack that have an attribute."""
    return [module for module in stack.modules() if hasattr(module, attribute)]


def each(attribute: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def surgery(stack: nn.Module) -> None:
        for module in with_(attribute, stack):
            change(module)

    return surgery


def tie(stack: nn.Module) -> None:
    first, second = with_("linear1", stack)
    second.linear1.weight, second.linear2, second.self_attn = first.linear1.weight, first.linear2, first.self_attn


def weights_of_others(layer: Any) -> None:
    del layer.linear2.weight
    layer.linear2.weight = layer.linear1.weight.t() * 2


def tensors_in_place_of_parameters(stack: nn.Module) -> None:
    """Replaces parameters by views of one flat tensor, as sharded training does."""
    for module in stack.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[name]
                setattr(module, name, parameter * 1.5)
                module.register_parameter(f"flat_{name}", parameter)


def scatter(layer: Any) -> None:
    layer.linear1.bias = nn.Parameter(torch.full((1,), 0.3, dtype=torch.float64).expand(FF))
    layer.linear2.weight = nn.Parameter(torch.randn(FF, E, 2, dtype=torch.float64)[..., 0].t())


class Loud(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def weight_norm_by_hooks(layer: Any) -> None:
    nn.utils.weight_norm(layer.linear1)
    with torch.no_grad():
        layer.linear1.weight_g.mul_(2)  # what the hook computed before is old now


def swap_tensors(stack: nn.Module) -> None:
    for parameter in list(stack.parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 1.5))


def assign(stack: nn.Module) -> None:
    stack.load_state_dict({name: value * 1.3 for name, value in stack.state_dict().items()}, assign=True)


def prune_and_double_the_norm(stack: Any) -> None:
    prune.l1_unstructured(stack.norm, "weight", 0.5)
    with torch.no_grad():
        stack.norm.weight_orig.mul_(2)  # what was computed before is old now


# What is done to a whole stack.
TO_THE_STACK: dict[str, Callable[[Any], Any]] = {
    "tied layers": tie,
    "weights made of others": each("linear1", weights_of_others),
    "flat parameters": tensors_in_place_of_parameters,
    "scattered weights": each("linear1", scatter),
    "linears of another class": each("linear1", lambda layer: setattr(layer.linear1, "__class__", Loud)),
    "weight_norm": each("linear1", lambda layer: parametrizations.weight_norm(layer.linear1)),
    "weight_norm by hooks": each("linear1", weight_norm_by_hooks),
    "weight_norm of attention": each("in_proj_weight", lambda m: parametrizations.weight_norm(m, "in_proj_weight")),
    "swapped tensors": swap_tensors,
    "an assigned state": assign,
    "no bias": each("linear1", lambda layer: setattr(layer.linear1, "bias", None)),
    "another eps": each("eps", lambda norm: setattr(norm, "eps", 0.3)),
    "fewer heads": each("num_heads", lambda attention: setattr(attention, "num_heads", 2)),
    "norm_first turned": each("norm_first", lambda layer: setattr(layer, "norm_first", not layer.norm_first)),
    "certain dropout": each("dropout1", lambda layer: setattr(layer.dropout1, "p", 1.0)),
    "hooks of gradients": lambda stack: [p.register_hook(lambda g: 2 * g) for p in stack.parameters()],
    "a pruned final norm": prune_and_double_the_norm,
}
CHANGES_NO_OUTPUT = ("no dropout", "nn.LayerNorm without weight", "weight_norm", "weight_norm of attention",
                     "hooks of gradients")  # fmt: skip


def run(stack: nn.Module, kind: str, x: Tensor, memory: Tensor, **options: Any) -> Tensor:
    return stack(x, memory, **options) if kind == "decoder" else stack(x, **options)


def assert_alike(ours: nn.Module, theirs: nn.Module, kind: str, **options: Any) -> Tensor:
    """Checks that outputs and gradients are the same, except at padding."""
    results: list[list[Tensor]] = []
    given, dy = data(), torch.randn(N, L, E, dtype=torch.float64)
    for stack in (ours, theirs):
        x, memory = (each.clone().requires_grad_() for each in given)
        out = run(stack, kind, x, memory, **options)
        if any("padding" in name for name in options):
            out = out * ~PADDING[..., None]
        parameters = [p for _, p in sorted(stack.named_parameters())]
        wanted = [x, *parameters] if kind == "encoder" else [x, memory, *parameters]
        results.append([out, *torch.autograd.grad(out, wanted, dy, allow_unused=True, retain_graph=True)])
    for place, (a, b) in enumerate(zip(*results, strict=True)):
        if b is None or not b.any():
            assert a is None or not a.any(), f"a gradient where there is none ({place})"
        else:
            assert_same(a, b, str(place))
    return results[0][0]


@pytest.mark.parametrize(
    "name, kind, norm_first, accelerated",
    covering([*SURGERIES, *TO_THE_STACK], ["encoder", "decoder"], [False, True], [False, True]),
)
def test_surgery_has_torch_nns_effect(name, kind, norm_first, accelerated):
    torch.manual_seed(5)
    ours, theirs = pair(kind, norm_first, accelerated=accelerated)
    x = data()
    with torch.no_grad():
        before = run(ours, kind, *x)
    for stack in (ours, theirs):
        torch.manual_seed(6)
        TO_THE_STACK[name](stack) if name in TO_THE_STACK else SURGERIES[name](stack.layers[1])
    assert_alike(ours, theirs, kind)
    assert name in CHANGES_NO_OUTPUT or not torch.allclose(run(ours, kind, *x), before), "it made no difference"
    with torch.no_grad():
        assert_same(run(ours, kind, *x), run(theirs, kind, *x), "without gradients")
    side = "src" if kind == "encoder" else "tgt"
    assert_alike(ours, theirs, kind, **{f"{side}_key_padding_mask": PADDING})


# What comes later in a pass: (stack) -> the change.
LATER: dict[str, Callable[[Any], Any]] = {
    "the same layer": lambda stack: adapt(stack.layers[0]),
    "a part of the next layer": lambda stack: hook("self_attn")(stack.layers[1]),
    "the next layer": hook("layers.1"),
    "the norm": hook("norm"),
}


@pytest.mark.parametrize("name, kind, norm_first", covering([*LATER], ["encoder", "decoder"], [False, True]))
def test_changes_by_a_hook_take_effect(name, kind, norm_first):
    ours, theirs = pair(kind, norm_first)
    x = data()
    before = run(ours, kind, *x)
    outputs = []
    for stack in (ours, theirs):

        def once(module: nn.Module, args: Any, out: Any, stack: Any = stack) -> None:
            module._forward_hooks.clear()
            LATER[name](stack)

        stack.layers[0].self_attn.register_forward_hook(once)
        outputs.append(run(stack, kind, *x))
    assert_same(outputs[0], outputs[1], name)
    assert not torch.allclose(outputs[0], before)


@both_orders
@kinds
def test_hooks_see_the_same_as_on_torch_nn(kind, norm_first):
    """Forward and backward hooks of every submodule are called equally often, with the same tensors."""
    torch.manual_seed(7)
    ours, theirs = pair(kind, norm_first)
    x, memory = data()
    dy = torch.randn_like(x)
    seen: list[dict[str, list[Tensor]]] = []
    for stack in (ours, theirs):
        found: dict[str, list[Tensor]] = {}

        def keep(name: str, found: dict[str, list[Tensor]] = found) -> Callable[..., None]:
            def note(module: nn.Module, inputs: Any, outputs: Any) -> None:
                tensors = [inputs] if isinstance(inputs, Tensor) else [*inputs]
                tensors += [outputs] if isinstance(outputs, Tensor) else [*outputs]
                found.setdefault(name, []).extend(t.detach() for t in tensors if isinstance(t, Tensor))

            return note

        for name, module in stack.named_modules():
            if name.endswith("out_proj") or not name:
                continue  # torch.nn reads the weights of out_proj and doesn't call it
            module.register_forward_hook(keep(f"{name} forward"))
            if not name.endswith("attn"):
                module.register_full_backward_hook(keep(f"{name} backward"))
        run(stack, kind, x.clone().requires_grad_(), memory.clone().requires_grad_()).backward(dy)
        seen.append(found)
    assert seen[0].keys() == seen[1].keys() and len(seen[0]) > 20
    for name, tensors in seen[1].items():
        assert len(tensors) == len(seen[0][name]), name
        for ours_seen, theirs_seen in zip(seen[0][name], tensors, strict=True):
            assert_same(ours_seen, theirs_seen, name)


class DoublesRelu(TorchFunctionMode):
    """A mode like those of tools that count, emulate or replace operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.relu else out


LINEAR = F.linear
EVERYWHERE: dict[str, Callable[[], Any]] = {
    "a function of torch's": lambda: mock.patch.object(F, "linear", lambda *args: 2 * LINEAR(*args)),
    "calls of a class": lambda: mock.patch.object(nn.Dropout, "__call__", lambda self, x: 2 * x, create=True),
    "a mode": DoublesRelu,
}


@pytest.mark.parametrize("name, kind, norm_first", covering([*EVERYWHERE], ["encoder", "decoder"], [False, True]))
def test_global_changes_of_modules_take_effect(name, kind, norm_first):
    ours, theirs = pair(kind, norm_first)
    x = data()
    before = run(ours, kind, *x)
    with EVERYWHERE[name]():
        if name != "a mode":  # what a class or a function does is examined when a model is handed over
            assert name != "calls of a class" or torch.equal(run(ours, kind, *x), before)
            fastformer.accelerate(ours)
        changed = assert_alike(ours, theirs, kind)
        assert changed.shape == before.shape and not torch.allclose(run(ours, kind, *x), before)
    fastformer.accelerate(ours)
    assert torch.equal(run(ours, kind, *x), before)


def override(layer: Any, name: str) -> set[Any]:
    """Gives a layer a class that overrides a method. Returns the forms of the arguments that it gets."""
    made, seen = type(layer), set()

    def block(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        seen.add((len(args), *kwargs))
        return bent(getattr(made, name)(self, *args, **kwargs))

    layer.__class__ = type("Mine", (made,), {name: block})
    return seen


@both_orders
@kinds
def test_the_edges_of_blocks(kind, norm_first):
    """Subclasses override these methods, and users patch them on instances."""
    blocks = ("_sa_block", "_ff_block", *(("_mha_block",) if kind == "decoder" else ()))
    ours, theirs = pair(kind, norm_first)
    for name in blocks:
        changed = [copy.deepcopy(stack) for stack in (ours, theirs)]
        forms = [override(stack.layers[0], name) for stack in changed]
        first = assert_alike(changed[0], changed[1], kind)
        assert forms[0] == forms[1] != set()  # the method may name its arguments as it likes
        patched = [copy.deepcopy(stack) for stack in (ours, theirs)]
        for stack in patched:
            patch_forward(stack.layers[0], name)
        assert_alike(patched[0], patched[1], kind)
        x = data()
        assert first.shape == x[0].shape
        assert not torch.allclose(run(ours, kind, *x), run(changed[0], kind, *x))


@both_orders
@kinds
def test_autocast_keeps_torch_nns_dtypes(kind, norm_first):
    """The residual stream of a post-norm layer, and the output of a stack, stay in fp32."""
    ours, theirs = pair(kind, norm_first)
    ours, theirs = ours.float(), theirs.float()
    x, memory = torch.randn(N, L, E), torch.randn(N, S, E)
    exact = run(copy.deepcopy(theirs).double(), kind, x.double(), memory.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = run(ours, kind, x, memory), run(theirs, kind, x, memory)
    assert a.dtype == b.dtype == torch.float32
    assert (a - exact).abs().max() <= 2 * (b - exact).abs().max()


class Attends(nn.Module):
    """A user's attention on PyTorch's function, which reads the masks that torch.nn's encoder layer passes."""

    batch_first = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, key_padding_mask: Any, **_: Any) -> Any:
        rows = None if key_padding_mask is None else key_padding_mask[:, None]
        mask = attn_mask if rows is None else rows if attn_mask is None else attn_mask + rows
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask), None


class AttendsAlone(nn.Module):
    """A user's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attends()

    def forward(self, src: Tensor, src_mask: Any, src_key_padding_mask: Any, is_causal: bool) -> Tensor:
        return src + self.self_attn(src, src, src, src_mask, src_key_padding_mask)[0]


def attending_block(self: Any, x: Tensor, attn_mask: Any, key_padding_mask: Any, is_causal: bool = False) -> Tensor:
    return Attends()(x, x, x, attn_mask, key_padding_mask)[0]


@both_orders
@pytest.mark.parametrize("what", ["attention", "block", "layer", "hook"])
def test_hooks_see_torch_nns_masks(what, norm_first):
    """In an encoder, the mask is always additive, because a bool mask means the opposite to PyTorch's attention."""
    ours, theirs = pair("encoder", norm_first)
    seen: list[list[torch.dtype]] = []
    for stack in (ours, theirs):
        layer = stack.layers[0]
        dtypes: list[torch.dtype] = []

        def see(module: nn.Module, args: Any, options: Any, dtypes: list[torch.dtype] = dtypes) -> None:
            dtypes.extend(value.dtype for name, value in options.items() if "mask" in name and value is not None)

        if what == "attention":
            layer.self_attn = Attends()
        elif what == "block":
            layer._sa_block = attending_block.__get__(layer)
        elif what == "layer":
            stack.layers[0] = AttendsAlone()
        else:
            layer.register_forward_pre_hook(see, with_kwargs=True)
            layer.self_attn.register_forward_pre_hook(see, with_kwargs=True)
        seen.append(dtypes)
    band = torch.ones(L, L, dtype=torch.bool).triu(2)
    for options in ({"mask": band}, {"src_key_padding_mask": PADDING}, {"mask": band, "src_key_padding_mask": PADDING}):
        assert_alike(ours, theirs, "encoder", **options)
    assert seen[0] == seen[1] and (what != "hook" or seen[0] == [torch.float64] * 8)
