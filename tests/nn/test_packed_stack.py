"""Encoders on the engine give the results of their modules, also after their weights change."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
import fastformer.nn as fnn
from fastformer.generation import repack
from fastformer.models import Transformer
from fastformer.nn import packed_stack, stack
from tests.checks import assert_accurate

pytestmark = pytest.mark.skipif(packed_stack.why_no_engine() is not None, reason="it is C++")

DIM, SEQLEN = 32, 7
PADDED = torch.arange(SEQLEN) >= torch.tensor([5, 7, 2])[:, None]
HOLES = torch.tensor([[0, 1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1]]).bool()
MASKS = {
    "right": PADDED,
    "left": PADDED.flip(1),
    "holes": HOLES,
    "added": torch.zeros(HOLES.shape).masked_fill(HOLES, -torch.inf),
}


def made(num_layers: int = 2, *, final: bool = False, seed: int = 0, **options: Any) -> fnn.TransformerEncoder:
    torch.manual_seed(seed)
    layer = fnn.TransformerEncoderLayer(DIM, 4, 48, batch_first=True, **options)
    found = fnn.TransformerEncoder(layer, num_layers, fnn.AddLayerNorm(DIM) if final else None).eval()
    found.padding = "skip"
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return found


def inputs(batch: int = 3) -> Tensor:
    return torch.randn(batch, SEQLEN, DIM, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns for each call that reached the engine whether it was computed there."""
    found: list[bool] = []

    def counted(*args: Any) -> Tensor | None:
        out = packed_stack.run_packed(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(stack, "run_packed", counted)
    return found


@torch.no_grad()
def check(module: Any, padding: Tensor | None = None, mask: Tensor | None = None) -> None:
    """Checks that the engine errs no more than torch.nn's layers, against fp64."""
    x, kept = inputs().to(module.layers[0].linear1.weight.dtype), slice(None) if padding is None else ~padding
    found = module(x, mask, padding)[kept]
    plain = copy.deepcopy(module)
    plain.packs_weights = False
    assert_accurate(found, plain(x, mask, padding)[kept], plain.double()(x.double(), mask, padding)[kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"norm_first": norm_first, "final": final, "bias": bias, "activation": activation, "num_kv_heads": 2 + 2 * bias}
        for (norm_first, final), (bias, activation) in zip(
            itertools.product((False, True), repeat=2),
            ((True, "relu"), (False, "gelu"), (True, "gelu"), (False, "relu")),
            strict=True,
        )
    ]
    + [{"window_size": (2, 2)}],
    ids=str,
)
def test_the_engine_equals_the_layers(options: dict[str, Any], dtype: torch.dtype, runs: list[bool]) -> None:
    module = made(**options).to(dtype)
    # Tokens on both sides of a hole are neighbours to a window of packed ones: these go by the layers.
    paddings = [None, *(MASKS[name] for name in ("right", "left", *([] if "window_size" in options else ["holes"])))]
    for padding in paddings:
        check(module, padding)
    assert runs == [True] * len(paddings)


def test_calls_that_the_engine_does_not_support_use_the_layers(runs: list[bool]) -> None:
    check(made(), mask=torch.ones(SEQLEN, SEQLEN).triu(1).bool())
    mixed = made()
    mixed.layers[1].norm1.eps = 0.5
    check(mixed)
    assert not any(runs)


def test_changed_weights_are_packed_again(runs: list[bool]) -> None:
    module = made()
    weight = module.layers[1].linear1.weight
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: weight.data.mul_(1.1),
        lambda: weight.detach().numpy().fill(0.01),
        lambda: module.load_state_dict(made(seed=3).state_dict()),
        lambda: setattr(module.layers[0], "linear2", nn.Linear(48, DIM)),
        lambda: setattr(module.layers[0].norm1, "weight", nn.Parameter(torch.full((DIM,), 2.0))),
    ]
    for change in changes:
        change()
        for _ in range(4):
            check(module)
    assert all(runs) and len(runs) == 4 * len(changes)


def test_changed_settings_are_packed_again(runs: list[bool]) -> None:
    """The weights stay the same, and all layers change alike, so that the engine still supports the stack."""
    module = made(final=True)
    parts = [*module.modules()]

    def set_all(kind: type[nn.Module], name: str, value: object) -> None:
        for part in parts:
            if isinstance(part, kind):
                setattr(part, name, value)

    changes: list[tuple[type[nn.Module], str, object, object]] = [
        (nn.LayerNorm, "eps", 0.5, 1e-5),
        (fnn.TransformerEncoderLayer, "activation", nn.functional.gelu, nn.functional.relu),
        (fnn.TransformerEncoderLayer, "norm_first", True, False),
        (fnn.MultiheadAttention, "window_size", (1, 1), (None, None)),
    ]
    check(module)
    for kind, name, *values in changes:
        for value in values:
            set_all(kind, name, value)
            check(module)
    assert runs == [True] * (1 + 2 * len(changes))


@torch.no_grad()
@pytest.mark.parametrize("mend", [repack, fastformer.accelerate])
def test_an_uncounted_write_to_a_part_is_not_noticed_before_it_is_repacked(mend: Any, runs: list[bool]) -> None:
    module, x = made(), inputs()
    before = module(x)
    module.layers[1].linear1.weight.data[9] *= -3
    assert torch.equal(module(x), before)
    mend(module)
    assert not torch.equal(module(x), before)
    check(module)
    assert all(runs)


@torch.no_grad()
def test_a_sequence_has_the_same_bits_alone(runs: list[bool]) -> None:
    module, x = made(), inputs(5)
    together = module(x)
    for i in range(5):
        assert torch.equal(module(x[i : i + 1])[0], together[i])
    for mask in (PADDED, PADDED.flip(1), HOLES):
        padded = module(inputs(), src_key_padding_mask=mask)
        for row, padding, out in zip(inputs(), mask, padded, strict=True):
            assert torch.equal(module(row[~padding][None])[0], out[~padding])
    assert all(runs)


def check_torch_nn(mask: str, dim: int, heads: int, layers: int, seed: int, **options: Any) -> None:
    """Compares torch.nn's encoder before and after `accelerate`, by the rule."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(dim, heads, batch_first=True, **options)
    norm = nn.LayerNorm(dim, options.get("layer_norm_eps", 1e-5)) if seed % 2 else None
    plain = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False).eval()
    for parameter in plain.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    x, padding = torch.randn(len(HOLES), SEQLEN, dim), MASKS[mask]
    real = padding == 0
    ours = fastformer.accelerate(copy.deepcopy(plain), padding="skip")
    found, expected = (model(x, src_key_padding_mask=padding) for model in (ours, plain))
    exact = plain.double()(x.double(), src_key_padding_mask=padding if mask != "added" else padding.double())
    assert_accurate(found[real], expected[real], exact[real])
    for row, keep, out in zip(x, real, found, strict=True):
        assert torch.equal(ours(row[keep][None])[0], out[keep])


@torch.no_grad()
@pytest.mark.parametrize(("mask", "norm_first"), [(mask, i % 2 == 0) for i, mask in enumerate(MASKS)])
def test_torch_nns_encoder_with_padding_anywhere(mask: str, norm_first: bool, runs: list[bool]) -> None:
    check_torch_nn(mask, DIM, 4, 2, 1, dim_feedforward=48, norm_first=norm_first)
    assert all(runs) and len(runs) == 1 + len(HOLES)


@pytest.mark.slow  # every option with every other, at unusual sizes
@torch.no_grad()
@pytest.mark.parametrize("seed", range(40))
def test_torch_nns_encoder_of_any_size(seed: int, runs: list[bool]) -> None:
    draw = random.Random(seed)
    heads, layers = draw.choice([1, 2, 3, 5]), draw.randint(1, 4)
    options: dict[str, Any] = {
        "dim_feedforward": draw.choice([1, 7, 33, 64]), "norm_first": draw.random() < 0.5,
        "activation": draw.choice(["relu", "gelu"]), "bias": draw.random() < 0.7,
        "layer_norm_eps": draw.choice([1e-5, 1e-12]),
    }  # fmt: skip
    check_torch_nn([*MASKS][seed % 4], heads * draw.choice([4, 6, 14]), heads, layers, seed, **options)
    assert all(runs) and len(runs) == 1 + len(HOLES)


@torch.no_grad()
def test_a_copy_is_freed_with_its_stack() -> None:
    module, x = made(), inputs()
    out = module(x)
    assert torch.equal(copy.deepcopy(module)(x), out) and torch.equal(pickle.loads(pickle.dumps(module))(x), out)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_torch_nns_encoder_after_accelerate(runs: list[bool]) -> None:
    layer = nn.TransformerEncoderLayer(DIM, 4, 48, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = inputs()
    plain = module(x)
    fastformer.accelerate(module)
    torch.testing.assert_close(module(x), plain)
    assert runs == [True] and "C++ engine in fp32" in fastformer.report(module).encode[""]
    assert "in training" in fastformer.report(module.train()).encode[""]
    fastformer.accelerate(module.eval(), encode=False)
    torch.testing.assert_close(module(x), plain)
    assert runs == [True] and "C++ engine in" not in fastformer.report(module).encode[""]


@torch.no_grad()
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 1e-3), ("int8", 5e-3)])
def test_a_precision_is_that_of_evaluation(precision: Any, bound: float, runs: list[bool]) -> None:
    module, x = made(), inputs()
    exact = module(x)
    fastformer.accelerate(module, precision=precision)
    found = module(x, src_key_padding_mask=None)
    assert found.dtype == torch.float32 and f"in {precision}" in fastformer.report(module).encode[""]
    assert 0 < 1 - float(nn.functional.cosine_similarity(found, exact, dim=-1).min()) < bound
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fastformer.accelerate(module)):
        assert torch.equal(again(x), found)
    fastformer.accelerate(module, precision="int4")  # which needs a whole model
    assert torch.equal(module(x), exact) and "in fp32" in fastformer.report(module).encode[""]
    fastformer.accelerate(module, precision=precision)
    assert torch.equal(module(x), found) and all(runs)
    fastformer.restore(module)
    assert torch.equal(module(x), exact)


@torch.no_grad()
def test_threads_of_two_dtypes_share_a_stack(runs: list[bool]) -> None:
    module, x = made(), inputs()
    due, wrong = module(x), []

    def run() -> None:
        with torch.no_grad():
            for turn in range(20):
                if turn % 4 == 3:
                    with contextlib.suppress(RuntimeError, ValueError):  # of fp32 and bf16 together
                        module(x.bfloat16())
                elif not torch.equal(module(x), due):
                    wrong.append(turn)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_a_transformers_sources(runs: list[bool]) -> None:
    torch.manual_seed(0)
    model = Transformer.from_preset("tiny", vocab_size=50).eval()
    source = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    found = model.encode(source)
    assert runs == [True]
    model.encoder.packs_weights = False
    torch.testing.assert_close(found[source != 0], model.encode(source)[source != 0])
