"""Linear attention and state spaces in chunks compute what their recurrences do, one token after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.models import GPT, GPTConfig
from fastformer.nn import SequenceLayout
from fastformer.nn.gated_delta import GatedDeltaNet, gated_delta_rule
from fastformer.nn.mamba import Mamba, scan
from fastformer.nn.state_mixing import ShortConv
from tests.checks import assert_accurate
from tests.nn.comparing import assert_same

HEADS = [(2, 2), (2, 4), (1, 3)]
LENGTHS = [2, 63, 64, 65, 130]


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule as its paper writes it, with a state for each value head."""
    shared = v.shape[2] // k.shape[2]
    q, k = (x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(shared, 2) for x in (q / q.shape[-1] ** 0.5, k))
    state = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(v.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        new = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, ..., None]).sum(-2))
        state = state + k[:, t, ..., None] * new[..., None, :]
        outputs.append((state * q[:, t, ..., None]).sum(-2))
    return torch.stack(outputs, 1)


def inputs(length: int, keys: int, values: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, length, keys, 8, generator=draw, dtype=torch.float64) for _ in "qk")
    v = torch.randn(2, length, values, 6, generator=draw, dtype=torch.float64)
    # Decays from nearly none, over more than a chunk, to nearly all of the state.
    decay = -(10.0 ** (4 * torch.rand(2, length, values, generator=draw, dtype=torch.float64) - 3))
    return [q, k, v, decay, torch.rand(2, length, values, generator=draw, dtype=torch.float64)]


def results(rule: Any, given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the output and the gradients of the inputs."""
    leaves = [x.to(dtype).requires_grad_() for x in given]
    out = rule(*leaves)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    out.backward(dy.to(dtype))
    gradients = [x.grad for x in leaves]
    assert all(each is not None for each in gradients)
    return [out, *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("keys, values", HEADS)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_compute_the_recurrence_with_its_gradients(length, keys, values) -> None:
    given = inputs(length, keys, values)
    exact = results(recurrent, given, torch.float64)
    found = results(gated_delta_rule, given, torch.float64)
    for name, one, other in zip(("output", "q", "k", "v", "decay", "beta"), found, exact, strict=True):
        assert_same(one, other, name, 1e-9)


@pytest.mark.parametrize("length", (65, 200))
def test_in_fp32_chunks_are_as_accurate_as_the_recurrence(length) -> None:
    found: list[list[list[Tensor]]] = [[], [], []]
    for seed in range(4):  # one draw may be lucky
        given = inputs(length, 2, 4, seed)
        found[0].append(results(gated_delta_rule, given, torch.float32))
        found[1].append(results(recurrent, given, torch.float32))
        found[2].append(results(recurrent, given, torch.float64))
    for i, name in enumerate(("output", "dq", "dk", "dv", "decay", "beta")):
        ours, plain, exact = (torch.stack([each[i] for each in draws]) for draws in found)
        assert_accurate(ours, plain, exact, name)


def scanned(x: Tensor, b: Tensor, c: Tensor, decay: Tensor) -> Tensor:
    """A state space model's recurrence, with a state for each head."""
    state, outputs = x.new_zeros(x.shape[0], x.shape[2], b.shape[-1], x.shape[-1]), []
    for t in range(x.shape[1]):
        state = state * decay[:, t].exp()[..., None, None] + b[:, t, ..., None] * x[:, t, ..., None, :]
        outputs.append((state * c[:, t, ..., None]).sum(-2))
    return torch.stack(outputs, 1)


def scan_inputs(length: int, seed: int = 0) -> list[Tensor]:
    q, k, v, decay, _ = inputs(length, 3, 3, seed)
    return [v, k, q, decay]


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_of_a_state_space_compute_the_recurrence_with_its_gradients(length) -> None:
    given = scan_inputs(length)
    pairs = zip(results(scan, given, torch.float64), results(scanned, given, torch.float64), strict=True)
    for name, (one, other) in zip(("output", "x", "b", "c", "decay"), pairs, strict=True):
        assert_same(one, other, name, 1e-9)


@pytest.mark.parametrize("length", (65, 200))
def test_in_fp32_chunks_of_a_state_space_are_as_accurate(length) -> None:
    given = [scan_inputs(length, seed) for seed in range(4)]
    found = [
        [results(rule, each, dtype) for each in given]
        for rule, dtype in ((scan, torch.float32), (scanned, torch.float32), (scanned, torch.float64))
    ]
    for i, name in enumerate(("output", "dv", "dk", "dq", "decay")):
        ours, plain, exact = (torch.stack([each[i] for each in draws]) for draws in found)
        assert_accurate(ours, plain, exact, name)


LINEAR = {"linear_layers": (True, False), "linear_key_heads": 2, "linear_key_dim": 8, "linear_value_dim": 6}


def module(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(16, 2, 4, 8, 6, **options).double()


def mamba(**options: Any) -> Mamba:
    torch.manual_seed(0)
    return Mamba(16, 4, 6, 5, 2, **options).double()


@pytest.mark.parametrize("make", [module, lambda: ShortConv(16).double(), mamba], ids=["delta", "conv", "mamba"])
def test_packed_sequences_are_as_if_alone(make) -> None:
    """Neither a state nor the inputs of the convolution go on from one sequence to the next."""
    net, lengths = make(), [5, 1, 70, 0, 64, 129]
    rows = [torch.randn(n, 16, dtype=torch.float64) for n in lengths]
    seqlens = torch.tensor(lengths)
    layout = SequenceLayout.packed(seqlens, 129, total=sum(lengths) + 3)
    together = net(torch.cat([*rows, torch.randn(3, 16, dtype=torch.float64)]), layout=layout)[0]
    padded = net(torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True))[0]
    assert together.isfinite().all()
    for i, (row, part) in enumerate(zip(rows, together.split([*lengths, 3]), strict=False)):
        if not len(row):
            continue
        alone = net(row[None])[0][0]
        assert_same(part, alone, "packed", 1e-11)
        assert_same(padded[i, : len(row)], alone, "padded", 1e-11)


_MAMBA = {"mamba_layers": (True, False), "mamba_heads": 4, "mamba_head_dim": 6, "mamba_state_dim": 5}


@pytest.mark.parametrize("options", [LINEAR, {"conv_layers": (False, True), "conv_size": 4}, _MAMBA])
def test_a_model_is_trained_on_packed_texts_as_on_padded_ones(options) -> None:
    torch.manual_seed(0)
    config = GPTConfig(50, 24, 4, num_layers=2, attention_gate=True, **options)
    model = GPT(config).double()
    ids = torch.randint(3, 50, (3, 81))
    seqlens = torch.tensor([80, 3, 66])
    targets = ids[:, 1:].masked_fill(torch.arange(80) >= seqlens[:, None], -100)
    real = targets >= 0
    losses, gradients = [], []
    layout = SequenceLayout.packed(seqlens, 80)
    for call in (
        lambda: model.loss(ids[:, :-1], targets),
        lambda: model.loss(ids[:, :-1][real], targets[real], layout=layout),
    ):
        model.zero_grad()
        loss = call()
        loss.backward()
        losses.append(loss)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(losses[1], losses[0], "loss", 1e-11)
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().max() > 0, name
        assert_same(gradients[1][name], gradient, name, 1e-9)


@pytest.mark.parametrize("make", [module, mamba])
def test_the_whole_module_has_the_right_gradients(make) -> None:
    net, x = make(conv_size=2), torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in net.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (x,))[0]
        return found

    assert torch.autograd.gradcheck(call, (x, *net.parameters()), fast_mode=True)


def test_calls_that_a_state_cannot_answer_are_refused() -> None:
    net, x = module(), torch.randn(2, 3, 16, dtype=torch.float64)
    for wrong in ({"is_causal": False}, {"attn_mask": torch.zeros(3, 3)}, {"cache": object()}, {"need_weights": True},
                  {"key_padding_mask": torch.zeros(2, 3)}, {"position_bias": torch.zeros(1, 2, 3, 3)}):  # fmt: skip
        with pytest.raises(ValueError, match="causal"):
            net(x, **wrong)
    with pytest.raises(ValueError, match="shape"):
        net(x[0])
    for sizes in ((16, 0, 4, 8, 6), (16, 3, 4, 8, 6), (16, 2, 4, 8, 0)):
        with pytest.raises(ValueError, match="num_value_heads"):
            GatedDeltaNet(*sizes)
    for sizes in ((16, 3, 4, 8, 2), (16, 2, 0, 8, 2), (16, 2, 4, 8, 0)):
        with pytest.raises(ValueError, match="num_groups"):
            Mamba(*sizes)
    for dim, size in ((0, 3), (16, 0)):
        with pytest.raises(ValueError, match="sizes"):
            ShortConv(dim, size)
    config = GPTConfig(50, 24, 4, num_layers=2, linear_layers=(True, False))
    assert F.softplus(GPT(config).decoder.layers[0].self_attn.dt_bias).min() > 1  # as Qwen3.5 begins
    others = ({"conv_layers": (True, False)}, {"mamba_layers": (True, False)})
    for own in (config, *(GPTConfig(50, 24, 4, num_layers=2, **each) for each in others)):
        with pytest.raises(ValueError, match="KVCache"):
            GPT(own).new_cache(1, 8)
    for options, what in (
        ({"conv_layers": (True, True)}, "conv_layers"), ({"conv_layers": (True,)}, "conv_layers"),
        ({"conv_layers": (True, False), "linear_layers": (True, False)}, "in two"), ({"conv_size": 2}, "conv_layers"),
        ({"conv_layers": (True, False), "linear_layers": (False, True)}, "attends"),
        ({"conv_layers": (True, False), "is_causal": False}, "causal"),
        ({"conv_layers": (True, False), "positions": "rotary", "shared_kv_layers": 1}, "shared_kv_layers"),
        ({"linear_layers": (True, True)}, "linear_layers"), ({"linear_layers": (True,)}, "linear_layers"),
        ({"linear_key_heads": 2}, "linear_layers"), ({"linear_layers": (True, False), "is_causal": False}, "causal"),
        ({"linear_layers": (True, False), "linear_value_heads": 24}, "multiple"),
        ({"mamba_layers": (True, True)}, "mamba_layers"), ({"mamba_state_dim": 8}, "mamba_layers"),
        ({"mamba_layers": (True, False), "conv_layers": (True, False)}, "in two"),
        ({"mamba_layers": (True, False), "mamba_groups": 5}, "multiple"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=what):
            GPTConfig(50, 24, 4, num_layers=2, **options)
