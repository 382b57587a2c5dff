"""Compares linear_cross_entropy with F.linear and F.cross_entropy on the whole matrix of logits."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure.timing import peak_bytes
from fastformer.ops import linear_cross_entropy
from tests.checks import assert_op_accurate, is_interpreted
from tests.covering import by_turns, each
from tests.no_sync import no_waiting

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OP = torch.ops.fastformer
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "smooth_others": True},
    {"z_loss": 0.01},
    {"label_smoothing": 0.3, "smooth_others": True, "z_loss": 0.02, "ignore_index": 3},
    {"softcap": 2.0},
    {"label_smoothing": 0.3, "smooth_others": True, "z_loss": 0.02, "softcap": 0.7},
]


def plain(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smooth_others: bool = False,
    reduction: str = "mean",
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    logits = F.linear(x, weight, bias).view(-1, len(weight))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    target = target.flatten().long()
    valid = target != ignore_index
    if smooth_others:
        # tensor2tensor: a soft target with 1 - e on the right class and e / (V - 1) on each of the others.
        soft = torch.full_like(logits, label_smoothing / (logits.shape[1] - 1)).detach()
        soft.scatter_(1, target.masked_fill(~valid, 0)[:, None], 1 - label_smoothing)
        losses = F.cross_entropy(logits, soft, reduction="none").masked_fill(~valid, 0)
    else:
        losses = F.cross_entropy(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
        )
    if z_loss:
        losses = losses + (z_loss * logits.logsumexp(-1).square()).masked_fill(~valid, 0)
    if reduction == "none":
        return losses.view(x.shape[:-1])
    return losses.sum() / valid.sum() if reduction == "mean" else losses.sum()


def make_inputs(
    shape: tuple[int, ...],
    vocab_size: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = True,
    ignored: int = -100,
) -> dict[str, Tensor | None]:
    random = partial(torch.randn, device=device)
    target = torch.randint(vocab_size, shape[:-1], device=device)
    target[torch.rand(shape[:-1], device=device) < 0.3] = ignored
    target.flatten()[:1] = vocab_size - 1  # the last class, and one row that counts
    return {
        "x": random(*shape).to(dtype),
        "weight": (2 * random(vocab_size, shape[-1]) * shape[-1] ** -0.5).to(dtype),
        "target": target,
        "bias": random(vocab_size).to(dtype) if bias else None,
    }


def compare(inputs: dict[str, Tensor | None], *, strided_dy: bool = False, **options) -> None:
    assert_op_accurate(
        partial(linear_cross_entropy, **options), partial(plain, **options), inputs, strided_dy=strided_dy
    )


# Slow: each of the options with each reduction, which scales what the options give.
@pytest.mark.parametrize("options, reduction", by_turns(OPTIONS, ["mean", "sum", "none"]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype: torch.dtype, options: dict, reduction: str, backend: str, device: str) -> None:
    inputs = make_inputs((3, 13, 24), 50, device, dtype, ignored=options.get("ignore_index", -100))
    compare(inputs, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@each(
    "shape, vocab_size", [((1, 16), 32), ((6, 1), 7), ((9, 17), 2), ((2, 3, 2, 20), 100), ((12,), 9), ((33, 40), 1000)]
)
def test_shapes(shape: tuple[int, ...], vocab_size: int, reduction: str, backend: str, device: str) -> None:
    inputs = make_inputs(shape, vocab_size, device, bias=False)
    compare(inputs, reduction=reduction, label_smoothing=0.1, strided_dy=True)


def test_one_class(backend: str, device: str) -> None:
    compare(make_inputs((20, 64), 1, device, bias=False), z_loss=0.1, label_smoothing=0.1)


@pytest.mark.parametrize("dtype, reduction", by_turns([torch.float32, torch.bfloat16], ["mean", "none"]))
def test_more_rows_than_a_chunk(dtype: torch.dtype, reduction: str, backend: str, device: str) -> None:
    if is_interpreted() and dtype == torch.bfloat16:
        pytest.skip("the interpreter goes through chunks in fp32")
    compare(make_inputs((4100, 16), 40, device, dtype), reduction=reduction, label_smoothing=0.1)


@pytest.mark.parametrize("dtype, vocab_size", by_turns([torch.float32, torch.bfloat16], [50257, 32000]))
def test_large_vocabularies(vocab_size: int, dtype: torch.dtype, backend: str, device: str) -> None:
    compare(make_inputs((5, 8), vocab_size, device, dtype), label_smoothing=0.1)


def test_a_cap_over_several_tiles_and_chunks(backend: str, device: str) -> None:
    compare(make_inputs((7, 24), 5000, device), label_smoothing=0.1, softcap=2.0)
    if backend != "triton":  # whose chunks know nothing of the cap, and whose interpreter is slow
        compare(make_inputs((1100, 16), 40, device), label_smoothing=0.1, softcap=2.0)


def test_large_logits(backend: str, device: str) -> None:
    """For logits of several hundred, exp of a single one would overflow."""
    if device != "cpu" and backend == "reference":
        pytest.skip("in fp32 cuBLAS adds up products of other shapes in another order")
    inputs = make_inputs((8, 16), 40, device)
    inputs["weight"].mul_(300)
    compare(inputs, label_smoothing=0.1)
    compare(inputs, label_smoothing=0.1, softcap=30.0)


@each("best", [0, 15, 16, 255, 256, 271, 287, 299])
def test_one_class_far_above_the_others(best: int, backend: str, device: str) -> None:
    """A logit of 1000 is among logits near 0, at any place in the tiles of classes."""
    inputs = make_inputs((3, 8), 300, device)
    inputs["bias"][best] = 1000.0
    inputs["target"] = torch.tensor([best, (best + 1) % 300, -100], device=device)
    compare(inputs, reduction="none")
    compare(inputs, label_smoothing=0.1)


def test_impossible_classes(backend: str, device: str) -> None:
    """With a bias of -inf, over more classes than a kernel handles at once, their probability is 0."""
    inputs = make_inputs((8, 16), 1000, device)
    inputs["bias"][200:900] = float("-inf")
    inputs["target"] = torch.randint(200, (8,), device=device)
    compare(inputs)


def test_bf16_gradients_lose_nothing_between_chunks(backend: str) -> None:
    """If dweight were summed in bf16, it would be rounded once per chunk; it is rounded once."""
    if backend != "cpp":
        pytest.skip("of the C++ code, which keeps no fp32 copy of dweight")
    rows, vocab_size, dim = 6000, 256, 17
    x, target = (1 + torch.rand(rows, dim)).bfloat16(), torch.randint(4, (rows,))
    # Without weights every probability is 1/256, and 1/256 - 1 is a number of 8 bits: dlogits is exact.
    weight = torch.zeros(vocab_size, dim, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(x, weight, target, reduction="sum").backward()
    dlogits = torch.full((rows, vocab_size), 1 / 256, dtype=torch.float64)
    dlogits[torch.arange(rows), target] -= 1
    exact = dlogits.T @ x.double()
    ulp = torch.exp2(exact.abs().log2().floor() - 7)
    assert ((weight.grad.double() - exact).abs() / ulp).max() <= 0.52


def test_small_probabilities_are_not_denormal(backend: str) -> None:
    """A denormal number costs an Intel CPU more time than the rest of its vector."""
    if backend != "cpp":
        pytest.skip("of the C++ exponentials")
    logits = torch.cat([torch.zeros(1), torch.arange(-110.0, -70.0, 0.25)])
    bias = logits.clone().requires_grad_()
    target = torch.zeros(1, dtype=torch.long)
    linear_cross_entropy(torch.zeros(1, 4), torch.zeros(len(logits), 4), target, bias, reduction="sum").backward()
    assert bias.grad is not None
    small = bias.grad[1:]
    assert ((small == 0) | (small >= torch.finfo(torch.float32).tiny)).all()
    torch.testing.assert_close(small, logits[1:].exp(), rtol=1e-5, atol=2 * torch.finfo(torch.float32).tiny)


@each("reduction", ["mean", "sum", "none"])
@each("dtype", [torch.float32, torch.float16])
def test_all_rows_ignored(dtype: torch.dtype, reduction: str, backend: str, device: str) -> None:
    """The loss and gradients are 0, whereas torch's mean is NaN."""
    inputs = make_inputs((2, 5, 8), 12, device, dtype)
    inputs["target"].fill_(-100)
    leaves = {name: inputs[name].requires_grad_() for name in ("x", "weight", "bias")}
    try:
        loss = linear_cross_entropy(**inputs, reduction=reduction, label_smoothing=0.1, z_loss=0.1)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert torch.equal(loss, torch.zeros_like(loss))
    loss.sum().backward()
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, torch.zeros_like(leaf)), name


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@each("options", OPTIONS)
def test_same_loss_without_gradients(options: dict, reduction: str, backend: str, device: str) -> None:
    """Without gradients, another op runs, which computes only the loss."""
    ignored = options.get("ignore_index", -100)
    inputs = make_inputs((5, 8), 12, device, torch.float64 if backend != "triton" else torch.float32, ignored=ignored)
    without = linear_cross_entropy(**inputs, reduction=reduction, **options)
    inputs["weight"].requires_grad_()
    learning = linear_cross_entropy(**inputs, reduction=reduction, **options)
    assert learning.requires_grad and not without.requires_grad
    torch.testing.assert_close(without, learning.detach())
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(**inputs, reduction=reduction, **options), without)


def test_fp16_gradients_under_a_gradient_scaler(backend: str, device: str) -> None:
    """Gradients of a mean over thousands of rows underflow in fp16; those of the scaled loss must not."""
    # 512 rows of small weights give the gradients of thousands, and Triton's interpreter takes a program for each row.
    inputs = make_inputs((512, 6), 8, device, torch.float16)
    inputs["weight"].mul_(0.00125)
    assert_op_accurate(
        lambda **a: linear_cross_entropy(**a).float() * 2**12, lambda **a: plain(**a).float() * 2**12, inputs
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_whole_logits_are_never_in_memory(reduction: str, backend: str, device: str) -> None:
    if backend == "triton" and device == "cpu":
        pytest.skip("too slow in Triton's interpreter")
    rows, vocab_size = 16384, 500
    inputs = make_inputs((rows, 4), vocab_size, device)
    x = inputs.pop("x").requires_grad_()

    def step() -> None:
        linear_cross_entropy(x, **inputs, label_smoothing=0.1, reduction=reduction).sum().backward()

    share = 8 if backend == "reference" else 2
    assert peak_bytes(step, device) < rows * vocab_size * 4 / share


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_host_sync(reduction: str) -> None:
    inputs = make_inputs((300, 64), 1000, "cuda")
    x = inputs.pop("x").requires_grad_()
    linear_cross_entropy(x, **inputs, reduction=reduction).sum().backward()  # compiled by now
    with no_waiting():
        linear_cross_entropy(x, **inputs, reduction=reduction).sum().backward()


NAMES = ("x", "weight", "bias")
MASKS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@each("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_get_no_gradient(dtype: torch.dtype, reduction: str, backend: str, device: str) -> None:
    """If the head is frozen or features are detached, the other gradients are those of a call with all gradients."""
    inputs = make_inputs((5, 16), 40, device, dtype)
    dloss = torch.randn(() if reduction == "mean" else 5, device=device)

    def gradients(mask: tuple[bool, ...]) -> list[Tensor | None]:
        leaves = [inputs[name].detach().requires_grad_(learns) for name, learns in zip(NAMES, mask, strict=True)]
        x, weight, bias = leaves
        loss = linear_cross_entropy(x, weight, inputs["target"], bias, reduction=reduction, label_smoothing=0.1)
        loss.backward(dloss)
        return [leaf.grad for leaf in leaves]

    every = gradients((True, True, True))
    for mask in MASKS[:-1]:
        for ours, whole, learns in zip(gradients(mask), every, mask, strict=True):
            assert (ours is not None) == learns
            if learns:
                assert torch.equal(ours, whole), mask


@pytest.mark.parametrize("bias", [False, True])
def test_output_mask(bias: bool, backend: str, device: str) -> None:
    """Gradients that are not requested are empty, in the fake as well, and don't affect the others."""
    x, weight, target, bias_ = make_inputs((5, 16), 40, device, bias=bias).values()
    options = (-100, 0.1, False, 0.01)
    losses, lse = OP.linear_cross_entropy_fwd(x, weight, bias_, target, *options)
    calls = (
        lambda mask: OP.linear_cross_entropy_bwd(losses, x, weight, bias_, target, lse, *options, mask),
        lambda mask: OP.linear_cross_entropy_fwd_bwd(x, weight, bias_, target, *options, True, mask)[1:],
    )
    for call in calls:
        whole = call([True] * 3)
        assert [t.shape for t in whole] == [x.shape, weight.shape, (len(weight) if bias else 0,)]
        for mask in MASKS:
            for ours, needed, expected in zip(call(list(mask)), mask, whole, strict=True):
                assert torch.equal(ours, expected if needed else x.new_empty(0)), mask
    for mask in MASKS[::3]:
        torch.library.opcheck(
            OP.linear_cross_entropy_fwd_bwd.default, (x, weight, bias_, target, *options, True, list(mask)),
            test_utils=["test_schema", "test_faketensor"],
        )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_graph_that_is_kept(reduction: str, backend: str, device: str) -> None:
    """Each backward pass scales the gradients by its own dloss, and not by earlier ones as well."""
    inputs = make_inputs((5, 16), 40, device)
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    loss = linear_cross_entropy(**inputs, reduction=reduction)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    for ours, again in zip(once, torch.autograd.grad(0.5 * loss, leaves), strict=True):
        assert torch.equal(0.5 * ours, again)


@each("factor", [1.0, 3.0])
@each("keep", [False, True])
def test_gradients_are_not_copied(factor: float, keep: bool, backend: str, device: str) -> None:
    """A graph that ends returns its stored gradients, scaled in place; a retained graph makes new ones."""
    x, weight, target, bias = make_inputs((5, 16), 40, device).values()
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    options = -100, 0.0, False, 0.0, True, [True, True, True]
    loss, *saved = OP.linear_cross_entropy_fwd_bwd(x, weight, bias, target, *options)
    expected = [factor * tensor for tensor in saved]
    ours = torch.autograd.grad(factor * loss, leaves, retain_graph=keep)
    for tensor, gradient, want in zip(saved, ours, expected, strict=True):
        assert torch.equal(gradient, want)
        assert (gradient.data_ptr() == tensor.data_ptr()) is not keep


@pytest.mark.parametrize("through", ["the function", "the dispatcher"])
def test_backward_makes_nothing_as_large_as_the_weight(through: str, backend: str, device: str) -> None:
    """The gradients exist already, and no zeros are made for them."""
    inputs = make_inputs((4, 8), 4000, device)
    x, weight, target, bias = (tensor.requires_grad_(tensor.is_floating_point()) for tensor in inputs.values())
    if through == "the function":
        loss = linear_cross_entropy(x, weight, target, bias)
    else:
        loss = OP.linear_cross_entropy_fwd_bwd(x, weight, bias, target, -100, 0.0, False, 0.0, True, [True] * 3)[0]
    assert peak_bytes((3 * loss).backward, device) < weight.numel() * weight.element_size() / 2
    assert weight.grad is not None


def test_gradients_of_a_batch_of_losses(backend: str, device: str) -> None:
    """Several dloss at once, which autograd passes with is_grads_batched, leave the stored gradients unchanged."""
    inputs = make_inputs((5, 16), 40, device)
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    loss = linear_cross_entropy(**inputs)
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    factors = torch.tensor([1.0, 3.0], device=device)
    batched = torch.autograd.grad(loss, leaves, factors, is_grads_batched=True)
    for ours, single in zip(batched, expected, strict=True):
        torch.testing.assert_close(ours, torch.stack([single, 3 * single]))
