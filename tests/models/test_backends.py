"""A training step of a whole model, with dropout, follows the rule with kernels and with the reference.

What only shows where ops follow one another: strides that one op leaves to the next, masks and layouts as a model makes
them, seeds in the order in which layers draw them.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fastformer.models import Transformer, TransformerConfig
from fastformer.nn import SequenceLayout
from fastformer.ops import use_backend
from tests.checks import assert_accurate, small_draws
from tests.conftest import HAS_GPU, missing_backend


def step(model: Transformer, backend: str, packed: bool, lengths: tuple[list[int], list[int]]) -> dict[str, Tensor]:
    """Returns the loss of each token and, for random weights of these losses, the gradient of each parameter."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(3, model.config.vocab_size, (len(n), max(n)), generator=generator) for n in lengths)
    make = SequenceLayout.packed if packed else SequenceLayout.padded
    layouts = [make(torch.tensor(n), max(n)) for n in lengths]
    tokens = [source, target, target.flip(1)]
    if packed:
        tokens = [layout.pack(ids) for layout, ids in zip([layouts[0], layouts[1], layouts[1]], tokens, strict=True)]
    else:
        tokens[2] = tokens[2].masked_fill(torch.arange(max(lengths[1])) >= torch.tensor(lengths[1])[:, None], -100)
    source_layout, target_layout = (layout.to(device) for layout in layouts)
    torch.manual_seed(2)  # the same seeds of dropout, whichever backend and dtype
    with use_backend(backend):
        losses = model.loss(
            *(ids.to(device) for ids in tokens), source_layout=source_layout, target_layout=target_layout,
            label_smoothing=0.1, reduction="none",
        )  # fmt: skip
        weights = torch.randn(losses.shape, generator=generator).to(device)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad((losses * weights).sum(), parameters)
    return {"losses": losses.detach(), **dict(zip(names, gradients, strict=True))}


def check(backend: str, device: str, dtype: torch.dtype, packed: bool, lengths: tuple[list[int], list[int]]) -> None:
    """Checks the rule over several models, because plain PyTorch may be lucky with some gradient of a single one."""
    size = 1 if device == "cpu" else 2  # a GPU's tiles are larger
    config = TransformerConfig(
        vocab_size=500 * size, d_model=64 * size, num_heads=2, d_ff=128 * size, num_encoder_layers=2,
        num_decoder_layers=2, max_len=700, dropout=0.1, attention_dropout=0.2, activation_dropout=0.1,
        activation="gelu",  # relu's gradient jumps where rounding moves a value across 0
    )  # fmt: skip
    ours, plain, exact = [], [], []
    for draw in range(small_draws()):
        torch.manual_seed(draw)
        model = Transformer(config, device=device, dtype=dtype)
        ours.append(step(model, backend, packed, lengths))
        plain.append(step(model, "reference", packed, lengths))
        exact.append(step(copy.deepcopy(model).double(), "reference", packed, lengths))
    for name in ours[0]:
        actual, usual, right = (torch.stack([losses[name] for losses in draws]) for draws in (ours, plain, exact))
        assert_accurate(actual, usual, right, name)


@pytest.mark.skipif(HAS_GPU, reason="on a GPU the sizes below run")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_training_step_in_cpp(packed: bool) -> None:
    if (reason := missing_backend("cpp", "attention")) is not None:
        pytest.skip(reason)
    check("cpp", "cpu", torch.float32, packed, ([40, 1, 23], [17, 30, 2]))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_training_step_in_triton(dtype: torch.dtype, packed: bool) -> None:
    """Sequences have several tiles, or one token."""
    check("triton", "cuda", dtype, packed, ([600, 1, 333], [257, 500, 2]))
