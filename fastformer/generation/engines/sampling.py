"""Turns logits into candidates, for engines that compute logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastformer.generation.engines.base import Candidates, Selection
from fastformer.generation.search import Sample
from fastformer.ops.linear_topk import best_of_logits

# Below this temperature the result doesn't change, and the reciprocal overflows fp32.
_LEAST_TEMPERATURE = 1e-30


def choose(logits: Tensor, selection: Selection) -> Candidates:
    """Returns the candidates of a step from the logits of all rows, (rows, vocab_size) of any floating-point dtype.

    If a row's logits contain NaN or +inf, its values are NaN.
    """
    logits = logits.float()
    if selection.process is not None and len(selection.logit_rows) == len(logits):
        logits = selection.process(logits)
    elif selection.process is not None and selection.logit_rows:
        edited = torch.tensor(selection.logit_rows, device=logits.device)
        logits = logits.index_copy(0, edited, selection.process(logits[edited]))
    values, ids = best_of_logits(logits, min(selection.num_candidates, logits.shape[-1]), log_probs=False)
    broken = values[:, :1].isnan()
    sampled = {}
    if selection.samples is not None:
        pairs = zip(selection.logit_rows, selection.samples, strict=True)
        sampled = {row: how for row, how in pairs if how is not None}
    if sampled:
        rows = torch.tensor(list(sampled), device=logits.device)
        tokens = sample(logits[rows], list(sampled.values()))
        ids[rows, 1:], values[rows, 1:] = ids[rows, :-1], values[rows, :-1]
        ids[rows, 0] = tokens
        values[rows, 0] = logits[rows, tokens]
    if selection.log_probs:
        total = _log_total(logits)
        if selection.keeps is not None:
            raw_rows = [row for row, keeps in zip(selection.logit_rows, selection.keeps, strict=True) if keeps]
            total[raw_rows] = 0.0
        values = values - total
    values = values.masked_fill(broken, torch.nan)  # the sampled token may not be the one with the NaN
    return Candidates(ids.tolist(), values.tolist())


def best_candidates(logits: Tensor, count: int, log_probs: bool) -> tuple[Tensor, Tensor]:
    """Returns the candidates of rows that aren't sampled: values and ids, (rows, count). The host reads no value."""
    values, ids = best_of_logits(logits, count, log_probs=False, may_read=False)
    return (values - _log_total(logits) if log_probs else values), ids


def _log_total(logits: Tensor) -> Tensor:
    total = logits.logsumexp(-1, keepdim=True)
    # A row whose tokens are all forbidden has no distribution: its candidates keep their -inf.
    return total.masked_fill(total == -torch.inf, 0.0)


def sample(logits: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Samples a token for each row: (rows, vocab_size) fp32 logits -> (rows,) ids.

    The token of a row depends on its logits and its `Sample` alone, never on other rows.
    """
    tokens = torch.zeros(len(samples), dtype=torch.long, device=logits.device)
    kinds = [one[:3] for one in samples]  # temperature, top_k, top_p
    for kind in dict.fromkeys(kinds):
        here = [row for row, kind_of_row in enumerate(kinds) if kind_of_row == kind]
        rows = torch.tensor(here, device=logits.device)
        uniform = torch.tensor([samples[row].uniform for row in here], dtype=torch.float64, device=logits.device)
        tokens[rows] = _draw(logits[rows], kind, uniform)
    return tokens


def sampled_candidates(
    logits: Tensor, count: int, kind: tuple[float, int, float], uniform: Tensor, log_probs: bool
) -> tuple[Tensor, Tensor]:
    """Returns the candidates of rows that are all sampled: values and ids, (rows, count). The host reads no value.

    Args:
        logits: (rows, vocab_size) of any floating-point dtype.
        count, log_probs: see `Selection`.
        kind: the temperature, top_k and top_p of all rows.
        uniform: (rows,) fp64, the number at which each row is sampled; see `Sample`.
    """
    logits = logits.float()
    values, ids = best_of_logits(logits, count, log_probs=False, may_read=False)
    broken = values[:, :1].isnan()
    drawn = _draw(logits, kind, uniform)[:, None]
    ids = torch.cat((drawn, ids[:, :-1]), 1)
    values = torch.cat((logits.gather(1, drawn), values[:, :-1]), 1)
    values = values - _log_total(logits) if log_probs else values
    return values.masked_fill(broken, torch.nan), ids


def _draw(logits: Tensor, kind: tuple[float, int, float], uniform: Tensor) -> Tensor:
    """Samples a token for each row, all by one temperature, top_k and top_p, at the numbers uniform, (rows,) fp64."""
    # fp64: in a sum of many small probabilities, each token must remain possible.
    cumulative = warp(logits, *kind).softmax(-1).double().cumsum(-1)
    point = uniform[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, point, right=True).flatten()
    return drawn.clamp(max=logits.shape[-1] - 1)


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Applies temperature, then top_k, then top_p: the smallest set with that probability (Holtzman et al. 2020).

    Args:
        logits: (rows, vocab_size).
        temperature: > 0; a value below 1 sharpens the distribution.
        top_k: 0 = all.
        top_p: 1 = all; the best token always stays.

    Returns:
        (rows, vocab_size); the largest value of each row is 0, and tokens that can't be sampled have -inf.
    """
    # No temperature changes the order, so the top_k come from the original logits, before any rounding.
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    # The largest is 0, so division by a small temperature makes the others -inf at worst, and never gives inf - inf.
    highest = logits.amax(-1, keepdim=True)
    logits = (logits - highest.masked_fill(highest == -torch.inf, 0.0)) / max(temperature, _LEAST_TEMPERATURE)
    if top_p < 1.0:
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        # A token is dropped if the tokens before it have a probability of top_p already.
        before = ranked.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0].zero_()  # an assignment would copy a number from the host
        remove = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(remove, -torch.inf)
    return logits
