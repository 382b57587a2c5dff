"""From logits to candidates, for engines that have logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastformer.generation.engines.interface import Candidates, Draw, Selection


def choose(logits: Tensor, selection: Selection) -> Candidates:
    """What a step returns, from logits (rows, vocab_size) of any floating-point dtype.

    NaN among a row's logits makes its values NaN.
    """
    logits = logits.float()
    if selection.process is not None:
        logits = selection.process(logits)
    count = min(selection.num_candidates, logits.shape[-1])
    ids, values = best_tokens(logits, count)
    highest = values[:, :1]
    drawn = [] if selection.draws is None else [row for row, d in enumerate(selection.draws) if d is not None]
    if drawn and selection.draws is not None:
        rows = torch.tensor(drawn, device=logits.device)
        tokens = draw(logits[rows], [d for d in selection.draws if d is not None])
        ids, values = ids.clone(), values.clone()
        ids[rows, 0] = tokens
        values[rows, 0] = logits[rows, tokens]
    if selection.log_probs:
        total = logits.logsumexp(-1, keepdim=True)
        # A row of which nothing is allowed has no distribution: its candidates keep their -inf.
        values = values - total.masked_fill(total == -torch.inf, 0.0)
    if drawn:  # the best of a row with NaN or +inf is NaN or +inf, and what was drawn may be another
        values = torch.where(highest < torch.inf, values, torch.nan)
    return Candidates(ids.tolist(), values.tolist())


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ids and the logits of each row's best tokens; of equal ones the lower ids, whatever the count."""
    if count == 1:
        values, ids = logits.max(-1, keepdim=True)
        return ids, values
    values, ids = logits.topk(min(count + 1, logits.shape[-1]))
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)).any(-1)
    if bool(tied.any()):  # in 16 bits that is often so, and topk takes any of them
        rows = tied.nonzero().flatten()
        ordered = logits[rows].sort(descending=True, stable=True)
        values[rows], ids[rows] = ordered.values[:, : values.shape[1]], ordered.indices[:, : values.shape[1]]
    return ids[:, :count], values[:, :count]


def draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draws a token for each row: (rows, vocab_size) fp32 logits -> (rows,) ids.

    The token of a row depends on its logits and its draw alone, never on other rows.
    """
    tokens = torch.zeros(len(draws), dtype=torch.long, device=logits.device)
    kinds = dict.fromkeys((d.temperature, d.top_k, d.top_p) for d in draws)
    for kind in kinds:
        here = [row for row, d in enumerate(draws) if (d.temperature, d.top_k, d.top_p) == kind]
        rows = torch.tensor(here, device=logits.device)
        uniform = torch.tensor([draws[row].uniform for row in here], dtype=torch.float64, device=logits.device)
        # fp64: the sum of many small probabilities, of which none may be out of reach.
        cumulative = warp(logits[rows], *kind).softmax(-1).double().cumsum(-1)
        point = uniform[:, None] * cumulative[:, -1:]
        found = torch.searchsorted(cumulative, point, right=True).flatten()
        tokens[rows] = found.clamp(max=logits.shape[-1] - 1)
    return tokens


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Temperature, then the top_k best, then the smallest set that holds top_p (Holtzman et al. 2020).

    Args:
        logits: (rows, vocab_size).
        temperature: > 0; below 1 sharpens.
        top_k: 0 = all.
        top_p: 1 = all; the best token always stays.
    """
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1.0:
        ranked, order = logits.sort(dim=-1, descending=True)
        # A token goes when those before it hold top_p already.
        before = ranked.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        remove = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(remove, -torch.inf)
    return logits
