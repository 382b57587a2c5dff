"""What people do to models of torch.nn after `accelerate`: results and gradients stay those of the model as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import fastformer
from tests.nn.comparing import assert_same, padding_mask, randomised

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*weight_norm. is deprecated")

N, L, S, E, H, FF = 3, 5, 4, 12, 3, 16
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
PADDING = padding_mask([5, 3, 2], L)
Surgery = Callable[[nn.Module], Any]
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def make(name: str, norm_first: bool) -> nn.Module:
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, **DOUBLE}
    norm = nn.LayerNorm(E, **DOUBLE)
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(E, H, FF, **options)
        made: nn.Module = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
    else:
        made = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, FF, **options), 2, norm)
    torch.manual_seed(3)
    return randomised(made)


def of_kind(model: nn.Module, *kinds: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kinds)]


def layers(model: nn.Module) -> list[Any]:
    return of_kind(model, *LAYERS)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Loud(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledTensor(Tensor):
    """A weight whose norms and products say more than its numbers do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (nn.functional.linear, nn.functional.layer_norm):
            return super().__torch_function__(function, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return 2 * function(*args, **kwargs or {})


def tie(model: nn.Module) -> None:
    first, second = layers(model)
    second.linear1.weight, second.linear2, second.self_attn = first.linear1.weight, first.linear2, first.self_attn


def weights_of_others(model: nn.Module) -> None:
    for layer in layers(model):
        del layer.linear2.weight
        layer.linear2.weight = layer.linear1.weight.t() * 2


def tensors_in_place_of_parameters(model: nn.Module) -> None:
    # As sharded training puts views of one flat tensor.
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[name]
                setattr(module, name, parameter * 1.5)
                module.register_parameter(f"flat_{name}", parameter)


def scattered(model: nn.Module) -> None:
    for layer in layers(model):
        layer.linear1.bias = nn.Parameter(torch.full((1,), 0.3, **DOUBLE).expand(FF))
        layer.linear2.weight = nn.Parameter(torch.randn(FF, E, 2, **DOUBLE)[..., 0].t())


def of_another_class(model: nn.Module) -> None:
    for layer in layers(model):
        layer.linear1.__class__ = Loud


def of_a_tensor_subclass(name: str) -> Surgery:
    def change(model: nn.Module) -> None:
        for layer in layers(model):
            module = layer.get_submodule(name)
            module.weight = nn.Parameter(module.weight.detach().as_subclass(DoubledTensor))

    return change


def each(change: Callable[[Any], Any], *kinds: type[nn.Module]) -> Surgery:
    def surgery(model: nn.Module) -> None:
        for module in of_kind(model, *kinds):
            change(module)

    return surgery


def weight_norm_by_hooks(layer: Any) -> None:
    nn.utils.weight_norm(layer.linear1)
    with torch.no_grad():
        layer.linear1.weight_g.mul_(2)  # what the hook computed before is old now


def swapped_tensors(model: nn.Module) -> None:
    for parameter in list(model.parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 1.5))


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.3 for name, value in model.state_dict().items()}, assign=True)


SURGERY: dict[str, Surgery] = {
    "tied": tie,
    "weights of others": weights_of_others,
    "flat parameters": tensors_in_place_of_parameters,
    "scattered": scattered,
    "another class": of_another_class,
    "tensor subclass, linear": of_a_tensor_subclass("linear1"),
    "tensor subclass, norm": of_a_tensor_subclass("norm1"),
    "weight_norm": each(parametrizations.weight_norm, nn.Linear),
    "weight_norm by hooks": each(weight_norm_by_hooks, *LAYERS),
    "weight_norm of attention": each(
        lambda attention: parametrizations.weight_norm(attention, "in_proj_weight"), nn.MultiheadAttention
    ),
    "parametrized norm": each(lambda m: parametrize.register_parametrization(m, "weight", Double()), nn.LayerNorm),
    "pruned": each(lambda m: prune.l1_unstructured(m, "weight", 0.4), nn.Linear, nn.LayerNorm),
    "swapped tensors": swapped_tensors,
    "assigned state": assigned,
    "no bias": each(lambda layer: setattr(layer.linear1, "bias", None), *LAYERS),
    "another eps": each(lambda norm: setattr(norm, "eps", 0.3), nn.LayerNorm),
    "fewer heads": each(lambda attention: setattr(attention, "num_heads", 2), nn.MultiheadAttention),
    "norm_first turned": each(lambda layer: setattr(layer, "norm_first", not layer.norm_first), *LAYERS),
    "certain dropout": each(lambda dropout: setattr(dropout, "p", 1.0), nn.Dropout),
    "gradient hooks": lambda model: [p.register_hook(lambda g: 2 * g) for p in model.parameters()],
}


def results(name: str, norm_first: bool, surgery: Surgery, accelerated: bool) -> Iterator[tuple[str, Tensor]]:
    model = make(name, norm_first)
    if accelerated:
        fastformer.accelerate(model)
    torch.manual_seed(5)
    surgery(model)
    x, memory = (torch.randn(N, n, E, **DOUBLE, requires_grad=True) for n in (L, S))
    dy = torch.randn(N, L, E, **DOUBLE)
    if name == "encoder":
        out = model(x, src_key_padding_mask=PADDING)
    else:
        out = model(x, memory, tgt_key_padding_mask=PADDING)
    out = out * ~PADDING[..., None]
    yield "output", out
    (out * dy).sum().backward()
    for parameter_name, parameter in (("x", x), *model.named_parameters()):
        if parameter.grad is not None:
            yield parameter_name, parameter.grad.as_subclass(Tensor)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize("what", SURGERY)
def test_surgery_after_accelerate(what, name, norm_first):
    theirs, ours = (dict(results(name, norm_first, SURGERY[what], accelerated)) for accelerated in (False, True))
    assert ours.keys() == theirs.keys()
    for each_, expected in theirs.items():
        if expected.any():
            assert_same(ours[each_], expected, each_, 1e-9)
        else:
            assert not ours[each_].any(), each_
