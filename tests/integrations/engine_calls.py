"""Runs `generate` of a model of transformers before and after acceleration."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.integrations import accelerate
from fastformer.integrations.engine_models import ForeignEngine, ForeignGraphEngine
from fastformer.integrations.known import CACHE
from tests.integrations import conversions, decoders

TIE = 1e-4  # logits, or scores of beams, as near as this may come in another order


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the batches that the engines open for accelerated models within the block."""
    opened = [0]

    def counting(plain: Any) -> Any:
        def counted_open(self: Any, *args: Any) -> Any:
            opened[0] += 1
            return plain(self, *args)

        return counted_open

    with pytest.MonkeyPatch.context() as patch:
        for engine in (ForeignEngine, ForeignGraphEngine):
            patch.setattr(engine, "open", counting(engine.open))
        yield opened


@dataclass
class Pair:
    """A model, unchanged and accelerated.

    Attributes:
        plain, ours: the unchanged and the accelerated model.
        inputs: the inputs of generate.
        near_ties: the number of rows that differed where two tokens were nearly as good.
        rows: the number of rows that were compared.
    """

    plain: Any
    ours: Any
    inputs: dict[str, Tensor]
    near_ties: int = 0
    rows: int = field(default=0)

    def both(self, *, is_served: bool = True, **options: Any) -> tuple[Any, Any]:
        """Returns the results of both models; the engine has to serve the accelerated one, or must not."""
        torch.manual_seed(0)
        expected = self.plain.generate(**self.inputs | options)
        torch.manual_seed(0)
        with counted() as opened:
            found = self.ours.generate(**self.inputs | options)
        assert bool(opened[0]) == is_served, options
        return found, expected

    def check(self, *, is_served: bool = True, **options: Any) -> None:
        """Checks that both models give the same tokens, except at near ties, and the same scores."""
        options |= {"return_dict_in_generate": True}
        is_beam = options.get("num_beams", 1) > 1
        found, expected = self.both(is_served=is_served, output_scores=True, **options)
        plain = self.ours.generate(**self.inputs | options | {"return_dict_in_generate": False})
        assert type(found) is type(expected)
        assert {*found} | {CACHE} == {*expected} | {CACHE}
        for one in (found.sequences, plain):
            assert one.dtype == expected.sequences.dtype and not one.is_inference()
        if is_beam:
            torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-3, atol=TIE)
        for tokens in (found.sequences, plain):
            self._compare(tokens, expected, options, is_beam=is_beam)
        if torch.equal(found.sequences, expected.sequences) and not is_beam:
            for one, other in zip(found.scores, expected.scores, strict=True):
                # In fp32 transformers' own scores are up to 1.3e-3 from those in fp64 (BART with scaled embeddings).
                torch.testing.assert_close(one, other, rtol=1e-3, atol=4e-3)

    def _compare(self, tokens: Tensor, expected: Any, options: dict[str, Any], *, is_beam: bool) -> None:
        self.rows += len(tokens)
        if tokens.shape == expected.sequences.shape and torch.equal(tokens, expected.sequences):
            return
        begun = expected.sequences.shape[1] - len(expected.scores)
        for row, (one, other) in enumerate(zip(tokens.tolist(), expected.sequences.tolist(), strict=True)):
            if one == other:
                continue
            place = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
            if not is_beam:
                scores = expected.scores[place - begun][row]
                assert abs(scores[one[place]] - scores[other[place]]) < TIE, (options, one, other)
            # Scores of beams were compared: another hypothesis of the same score is a near tie.
            self.near_ties += 1


def outcome_of(pair: Pair, *args: Any, **options: Any) -> int:
    """Returns how many batches the engine opens for a call, whose result, or error, is the same without the engine."""
    outcomes: list[Any] = []
    with counted() as opened:
        for model in (pair.plain, pair.ours):
            try:
                outcomes.append(model.generate(*args, **options).tolist())
            except Exception as error:
                outcomes.append(type(error))
    assert outcomes[0] == outcomes[1], options
    return opened[0]


def _enliven(model: Any, eos: int) -> None:
    """Gives a relative of BART weights with which it says different things, and ends sometimes."""
    torch.manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "positions" not in name:
                is_embedding = any(one in name for one in ("embed", "shared", "lm_head"))
                # The source is the same in all steps, which then say the same.
                is_constant = "encoder_attn.out" in name
                scale = 0.5 if is_embedding else 0.2 if is_constant else 1.0
                parameter.copy_(torch.randn_like(parameter) * scale * (parameter != 0))
            elif name.endswith("bias"):
                parameter.mul_(0.1)
        decoder = model.get_decoder()
        for norm in [module for name, module in decoder.named_modules() if "norm" in name.rpartition(".")[2]][-1:]:
            norm.weight.mul_(torch.randn_like(norm.weight) * 2)  # else a tied matrix repeats the last token
        if getattr(model, "final_logits_bias", None) is not None:
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias) * 0.3)
            model.final_logits_bias[0, eos] += 1.5


def pair_of(
    named: str | conversions.Case | decoders.Case,
    *,
    left: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Pair:
    """Makes the pair of a case of `conversions` or `decoders`, with a batch of different lengths.

    Args:
        named: the case, or its name.
        left: whether the batch is padded on the left.
        dtype: the dtype of the parameters.
        options: options of the config.
    """
    case: Any = {**conversions.CASES, **decoders.CASES}[named] if isinstance(named, str) else named
    if isinstance(case, decoders.Case):
        model = case.make(**options)
        pad, eos, length = 1, 2, 12
    else:
        model = case.make(torch.float32, **options)
        (pad, eos), length = case.ids, 9
        if case.family == "Marian":
            conversions.opinionated(model, seed=2)
        elif not case.is_t5:
            _enliven(model, eos)
    model = model.to(dtype)
    lengths = torch.tensor([length, 5, 2, 7])
    ids = torch.randint(4, 58, (4, length), generator=torch.Generator().manual_seed(5))
    mask = torch.arange(length) < lengths[:, None]
    mask = mask.flip(1) if left else mask
    ids = ids.masked_fill(~mask, pad)
    plain = copy.deepcopy(model)
    return Pair(plain, accelerate(model), {"input_ids": ids, "attention_mask": mask.long()})
