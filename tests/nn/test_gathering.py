"""Layers whose hooks gather parameters for a call compute as without hooks, and never return views."""

from __future__ import annotations

import copy
import types

import torch

from tests.nn.test_surgery import both_orders, data, kinds, pair, run, with_


class Gatherer:
    """Hooks like those of FSDP, which gather no parameters."""

    __module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"

    def __init__(self, param_dtype: torch.dtype | None = None) -> None:
        self.views: list[bool] = []
        self._mp_policy = types.SimpleNamespace(param_dtype=param_dtype, output_dtype=None)

    def before(self, module, inputs):
        return None

    def behind(self, module, inputs, output):
        tensors = output if isinstance(output, tuple) else (output,)
        self.views += [each._is_view() for each in tensors if isinstance(each, torch.Tensor) and each.requires_grad]


@both_orders
@kinds
def test_outputs_are_not_views(kind, norm_first) -> None:
    plain, _ = pair(kind, norm_first)
    for dropout in with_("p", plain):
        dropout.p = 0.1
    for attention in with_("num_heads", plain):
        attention.dropout = 0.1
    hooked, gatherer = copy.deepcopy(plain), Gatherer()
    for layer in hooked.layers:
        layer.register_forward_pre_hook(gatherer.before)
        layer.register_forward_hook(gatherer.behind)
    given, found = data(), []
    for stack in (plain, hooked):
        torch.manual_seed(1)
        found.append(run(stack, kind, *given))
        found[-1].square().sum().backward()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)
    for mine, other in zip(hooked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-12)
    assert gatherer.views and not any(gatherer.views)
