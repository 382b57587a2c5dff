"""Families that read a source have the logits, losses and gradients of transformers, random small configs too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.checkpoints.hf import from_model
from fastformer.integrations import from_huggingface
from fastformer.models import Transformer
from tests.checks import assert_accurate
from tests.covering import by_turns
from tests.integrations.conversions import CASES, Case, drawn
from tests.nn.comparing import assert_same

KINDS = ("Marian", "Bart", "MBart", "Pegasus", "M2M100", "T5", "MT5")
# What each of transformers' matrices is for.
ROLES = {"encoder.embed_tokens.weight": "source", "decoder.embed_tokens.weight": "target", "lm_head.weight": "output"}


def labels_of(case: Case) -> Tensor:
    """Returns the next token of each target token; -100 after the end of shorter rows."""
    _, target = case.batch
    labels = F.pad(target[:, 1:], (0, 1), value=case.ids[1])
    return labels.masked_fill(torch.arange(target.shape[1]) >= torch.tensor([[99], [3], [2]]), -100)


def learned(theirs: Any, case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    """The logits of a model of transformers, and the loss of each token, whose gradients are in the parameters."""
    if case.options.get("bias"):
        theirs.final_logits_bias.requires_grad_()  # which is no parameter there
    with case.exactly():
        logits = case.logits(theirs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels_of(case).flatten(), reduction="none", **options)
        loss.sum().backward()
    return logits, loss


def gradients_of(ours: Transformer, theirs: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Returns the name, fastformer's gradient and transformers' gradient of each trainable parameter."""
    twin = Transformer(ours.config, dtype=ours.output_weight.dtype)
    with torch.no_grad():
        for (name, parameter), own in zip(twin.named_parameters(), ours.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(own) if own.grad is None or "embedding.weight" in name else own.grad)
        if not ours.config.tie_embeddings:
            twin.output.weight.zero_()
    found = from_model(twin)[1]
    # PAD's row learns here where it isn't zero; there in a T5, as torch's padding_idx keeps it in the others.
    rows = [token for token in range(len(ours.output_weight)) if token != theirs.config.pad_token_id]
    places: dict[int, list[str]] = {}
    for name, parameter in theirs.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for name, parameter in theirs.named_parameters():
        roles = {role for place, role in ROLES.items() if any(each.endswith(place) for each in places[id(parameter)])}
        if parameter.grad is None:
            continue
        if not roles:
            scale = theirs.config.d_kv if name.endswith("ttention.q.weight") else 1  # the weights there are smaller
            yield name, found[name] * scale, parameter.grad
        elif ours.config.tie_embeddings:
            yield name, _grad(ours.embedding.weight)[rows], parameter.grad[rows]
        else:
            matrices = {
                "source": ours.source_embedding.weight,
                "target": ours.target_embedding.weight,
                "output": ours.output.weight,
            }
            yield name, sum((_grad(matrices[role]) for role in roles), torch.zeros(()))[rows], parameter.grad[rows]


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def check_exactly(
    case: Case, theirs: Any, *, is_packed: bool = False, **options: Any
) -> tuple[Transformer, Tensor, Tensor]:
    """Compares logits, losses and gradients in fp64, where only another computation makes a difference.

    Args:
        theirs: a model of transformers in fp64.
        is_packed: whether our model gets packed sequences.
        options: of the loss.

    Returns:
        Our model with its gradients, the logits, and the loss of each token.
    """
    expected, due = learned(theirs, case, **options)
    ours = from_huggingface(theirs)
    assert isinstance(ours, Transformer)
    assert_same(ours(*case.batch), expected, "logits", 1e-9)
    (source, target), labels, wanted = case.batch, labels_of(case), due
    layouts: dict[str, Any] = {}
    if is_packed:
        sources, targets = case.layouts()
        wanted = targets.pack(due.view_as(labels))
        source, target, labels = sources.pack(source), targets.pack(target), targets.pack(labels)
        layouts = {"source_layout": sources, "target_layout": targets}
    loss = ours.loss(source, target, labels, **layouts, reduction="none", **options).flatten()
    assert_same(loss, wanted, "loss", 1e-6)
    loss.sum().backward()
    for name, one, other in gradients_of(ours, theirs):
        if other.abs().max() < 1e-12:  # a bias of keys has no gradient, but for rounding
            assert one.abs().max() < 1e-12, name
        else:
            assert_same(one, other, name, 1e-8)
    if case.options.get("bias"):
        assert_same(_grad(ours.get_parameter("output_bias")), theirs.final_logits_bias.grad[0], "output_bias", 1e-8)
    return ours, expected, due


LEARNING = [
    *(f"Marian {variant}" for variant in ("real", "untied")),
    *(f"{family} {variant}" for family in ("Bart", "MBart") for variant in ("scaled, bias", "untied")),
    *(f"T5 {variant}" for variant in ("1.0", "1.1", "few heads")),
]


@pytest.mark.parametrize("name, options", by_turns(LEARNING, [{}, {"is_packed": True}, {"label_smoothing": 0.2}]))
def test_losses_and_gradients_are_the_same(name, options) -> None:
    check_exactly(CASES[name], CASES[name].make(), **options)


def test_heads_of_zeros_stay() -> None:
    """Heads that a T5 lacks, by which ours has the width of its model, learn nothing."""
    case = CASES["T5 few heads"]
    theirs = case.make()
    ours, heads = check_exactly(case, theirs)[0], theirs.config.num_heads
    for side in ("encoder", "decoder"):
        table = _grad(ours.get_parameter(f"{side}_position_bias.table"))
        weight = _grad(ours.get_parameter(f"{side}.layers.0.self_attn.in_proj_weight")).view(3, 24, 24)
        assert not table[:, heads:].any() and not weight[:, 4 * heads :].any()
        assert table.any() and weight.any()


@pytest.mark.slow  # every option with every other, at unusual sizes
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_random_configs_compute_and_learn_the_same(kind, seed) -> None:
    """Proves that results differ only by rounding in fp64, and obey the rule in fp32, over several draws of weights."""
    case = drawn(kind, seed)
    found: dict[str, list[tuple[Tensor, ...]]] = {}
    for draw in range(3, 15):
        plain = case.make(torch.float32, seed=draw)
        exact = copy.deepcopy(plain).double()
        wide, expected, due = check_exactly(case, exact)
        theirs, their_loss = learned(plain, case)
        ours = from_huggingface(plain)
        assert isinstance(ours, Transformer)
        logits, loss = ours(*case.batch), ours.loss(*case.batch, labels_of(case), reduction="none").flatten()
        loss.sum().backward()
        found.setdefault("logits", []).append((logits, theirs, expected))
        found.setdefault("loss", []).append((loss, their_loss, due))
        # As one: a bias of keys, say, has no gradient but rounding, and that of one tensor may be small by luck.
        each = zip(gradients_of(ours, plain), gradients_of(wide, exact), strict=True)
        vectors = zip(
            *((one.flatten(), other.flatten(), wide.flatten()) for (_, one, other), (_, _, wide) in each), strict=True
        )
        found.setdefault("gradients", []).append(tuple(map(torch.cat, vectors)))
    for name, tensors in found.items():
        values = [torch.stack(which) for which in zip(*tensors, strict=True)]
        # Errors of scores, which are relaxed, are in all gradients.
        assert_accurate(values[0], values[1], values[2], "dk" if name == "gradients" else name)
