"""Which calls of linear maps read the quantised copy of a weight, and what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from fastformer import ops
from fastformer.models import GPT
from fastformer.models.quantization import from_grid, quantized_weights, to_grid
from fastformer.nn import MultiheadAttention
from fastformer.ops import record_backends
from fastformer.ops.linear import unchecked_linear
from fastformer.ops.quantized_linear import MOST_ROWS, QuantizedMatrix, QuantizedWeights, dequantized, why_no_kernel
from tests.checks import assert_accurate
from tests.generation.weights import CONFIGS, drawn

OP = ("quantized_linear", "reference")
IDS = torch.arange(2 * MOST_ROWS)


def numbers_of(matrix: QuantizedMatrix, weight: Tensor) -> Tensor:
    """Returns the numbers of a copy in the dtype of its weight."""
    return dequantized(matrix.q, matrix.scale, matrix.zero, weight.shape[1], weight.dtype)


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(48, 32).bfloat16()


@pytest.fixture
def copies(weight) -> QuantizedWeights:
    """Holds twice the numbers of the weight, which shows which of both a call read."""
    q, scale = to_grid(weight)
    return QuantizedWeights([(weight, QuantizedMatrix(q, 2 * scale))])


def test_few_rows_read_the_copy(weight, copies) -> None:
    x, bias, doubled = (
        torch.randn(3, 7, 32).bfloat16(),
        torch.randn(48).bfloat16(),
        2 * from_grid(*to_grid(weight), torch.bfloat16),
    )
    with copies.acting(), record_backends() as ran:
        found = ops.linear(x, weight, bias)
        with torch.inference_mode():
            part = ops.linear(x, weight[16:40], bias[16:40])
        many = ops.linear(torch.randn(MOST_ROWS + 1, 32).bfloat16(), weight)
    assert OP in ran and found.shape == (3, 7, 48) and many.shape == (MOST_ROWS + 1, 48)
    assert_accurate(found, F.linear(x, doubled, bias), F.linear(x.double(), doubled.double(), bias.double()))
    torch.testing.assert_close(part, found[..., 16:40])
    with record_backends() as ran:
        ops.linear(x, weight, bias)
    assert OP not in ran


@pytest.mark.parametrize(
    "kind",
    [
        "columns",
        "the transpose",
        "a square's transpose",
        "a neighbour",
        "beyond",
        "between rows",
        "many rows",
        "compiled",
        "no rows",
    ],
)
def test_other_calls_read_the_weight(kind, weight, copies) -> None:
    x = torch.randn(MOST_ROWS + 1 if kind == "many rows" else 0 if kind == "no rows" else 5, 32).bfloat16()
    used, call = weight, ops.linear
    if kind == "columns":
        used, x = weight[:, :16], x[:, :16]
    elif kind == "the transpose":
        used, x = weight.t(), torch.randn(5, 48).bfloat16()
    elif kind == "a square's transpose":
        square = torch.randn(32, 32).bfloat16()
        copies, used = QuantizedWeights([(square, QuantizedMatrix(*to_grid(square)))]), square.t()
    elif kind == "a neighbour":  # in memory right behind the weight of other copies
        both = torch.cat((weight, weight))
        copies, used = QuantizedWeights([(both[:48], QuantizedMatrix(*to_grid(weight)))]), both[48:]
    elif kind == "beyond":
        both = torch.cat((weight, weight))
        copies, used = QuantizedWeights([(both[:48], QuantizedMatrix(*to_grid(weight)))]), both[40:56]
    elif kind == "between rows":
        used = weight.flatten()[8:-24].view(47, 32)
    elif kind == "compiled":
        call = torch.compile(ops.linear, backend="eager", fullgraph=True)
    with copies.acting(), record_backends() as ran:
        found = call(x, used)
    assert OP not in ran
    torch.testing.assert_close(found, F.linear(x, used))


@pytest.mark.parametrize("kind", ["width", "dtype", "bias", "dtype of the bias", "no dimension"])
def test_arguments_that_do_not_fit_get_pytorchs_errors(kind, weight, copies) -> None:
    x = torch.randn(5, 16 if kind == "width" else 32, dtype=torch.float32 if kind == "dtype" else torch.bfloat16)
    bias = torch.randn(7 if kind == "bias" else 48, dtype=torch.float16 if kind.startswith("dtype of") else x.dtype)
    if kind == "no dimension":
        x = x[0, 0]
    with copies.acting(), record_backends() as ran, pytest.raises(RuntimeError):
        unchecked_linear(x, weight, bias)
    assert OP not in ran


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu_tanh"])
def test_a_feed_forward_network_reads_both_copies(activation) -> None:
    gated = activation in ("swiglu", "geglu_tanh")
    drawn_weights = torch.randn(64 * (1 + gated), 32) * 0.2, torch.randn(32, 64) * 0.2
    weights = [from_grid(*to_grid(w.bfloat16()), torch.bfloat16) for w in drawn_weights]
    biases = [torch.randn(len(w)).bfloat16() for w in weights]
    x = torch.randn(6, 32).bfloat16()
    arguments = [x, weights[0], biases[0], weights[1], biases[1]]
    copies = QuantizedWeights((w, QuantizedMatrix(*to_grid(w))) for w in weights)
    plain = ops.feed_forward(*arguments, activation=activation)
    exact = ops.feed_forward(*(a.double() for a in arguments), activation=activation)
    with copies.acting(), record_backends() as ran:
        found = ops.feed_forward(*arguments, activation=activation)
        dropped = ops.feed_forward(*arguments, activation=activation, dropout_p=0.5)
    assert ran >= {OP} and not torch.equal(dropped, found)
    assert_accurate(found, plain, exact)


def test_compiled_calls_read_the_weight(weight, copies) -> None:
    """The compiler can't trace which copies act."""
    x, second = torch.randn(3, 32).bfloat16(), torch.randn(32, 48).bfloat16()
    network = torch.compile(lambda: ops.feed_forward(x, weight, None, second, None), backend="eager", fullgraph=True)
    best = torch.compile(lambda: ops.linear_topk(x, weight, 2), backend="eager", fullgraph=True)
    with copies.acting(), record_backends() as ran:
        found = network(), best()
    assert OP not in ran
    assert torch.equal(found[0], ops.feed_forward(x, weight, None, second, None))
    assert torch.equal(found[1].values, ops.linear_topk(x, weight, 2).values)


@pytest.mark.parametrize("log_probs", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_the_best_tokens_are_chosen_from_unrounded_sums(softcap, log_probs, weight, copies) -> None:
    x = torch.randn(4, 32).bfloat16() / 8  # within the cap, so that no two are equal
    matrix = copies.find(weight)
    assert matrix is not None
    logits = F.linear(x.double(), numbers_of(matrix, weight).double())
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = (logits.log_softmax(-1) if log_probs else logits).topk(5)
    with copies.acting():
        best = ops.linear_topk(x, weight, 5, log_probs=log_probs, softcap=softcap)
    assert best.values.dtype == torch.float32 and torch.equal(best.indices, expected.indices)
    torch.testing.assert_close(best.values.double(), expected.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt", "llama", "transformer", "two vocabularies"])
def test_a_models_matrices_are_found(name, precision) -> None:
    """All that are multiplied, as the very numbers of the model; of tables of embeddings, only an output's weight."""
    kind, options = CONFIGS[name]
    model = drawn(kind, **options).bfloat16().quantize(precision)
    copies = quantized_weights(model)
    multiplied = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert multiplied
    for weight in (*multiplied, model.output_weight):
        matrix = copies.find(weight)
        assert matrix is not None
        assert torch.equal(numbers_of(matrix, weight), weight)
        assert matrix.q.dtype == (torch.int8 if precision == "int8" else torch.uint8)
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    assert [copies.find(table) is not None for table in tables] == [table is model.output_weight for table in tables]
    for attention in (m for m in model.modules() if isinstance(m, MultiheadAttention)):
        assert attention.in_proj_weight is None or copies.find(attention.in_proj_weight) is not None


def test_an_old_gpu_has_no_kernel(monkeypatch) -> None:
    launch = pytest.importorskip("fastformer.kernels._launch")
    with FakeTensorMode():
        weight = torch.empty(4, 4, dtype=torch.float16, device="cuda")
    assert why_no_kernel(torch.empty(4, 4)) is None
    for arch, is_old in ((75, True), (90, False)):
        monkeypatch.setattr(launch, "architecture", lambda x, arch=arch: arch)
        assert ("8.0" in (why_no_kernel(weight) or "")) is is_old


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_changed_weight_is_rounded_again(precision) -> None:
    model = drawn(GPT, **CONFIGS["gpt"][1]).bfloat16().quantize(precision)
    weight = model.decoder.layers[0].linear1.weight
    with torch.no_grad():
        weight.mul_(-2)
    matrix = quantized_weights(model).find(weight)
    assert matrix is not None
    assert (numbers_of(matrix, weight) - weight).norm() < 0.2 * weight.norm()
