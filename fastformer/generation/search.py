"""The one search: greedy, sampling and beam, over any engine.

The tensors of a step have fixed shapes and no step waits for the device; whether all rows are done is asked each step
on a CPU and every few steps on a GPU (rows that are done go on with PAD meanwhile). Finished sources leave the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastformer.generation.processors import Processing, warp

_ASK_EVERY = 8  # steps between two looks at a GPU
_NEVER = -1e9  # a score that loses against every real one and survives arithmetic


@dataclass(frozen=True)
class Sampling:
    """How `choose_rows` draws; None in its place means the best token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None


def length_penalty(length: Tensor | int, alpha: float) -> Any:
    """((5 + length) / 6) ** alpha, length counting EOS (Wu et al. 2016, equation 14; tensor2tensor)."""
    return ((5.0 + length) / 6.0) ** alpha


def _look(step: int, device: torch.device) -> bool:
    return device.type == "cpu" or step % _ASK_EVERY == _ASK_EVERY - 1


def choose_rows(
    engine: Any,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    processing: Processing,
    sampling: Sampling | None,
) -> tuple[Tensor, Tensor]:
    """Greedy decoding or sampling, one hypothesis a row.

    Returns:
        (rows, <= max_new_tokens) ids ending in EOS and then PAD, and (rows,) the sum of their log-probabilities.
    """
    tokens = engine.first_tokens()
    rows, device = len(tokens), tokens.device
    out = torch.full((rows, max_new_tokens), pad_id, dtype=torch.long, device=device)
    scores = torch.zeros(rows, device=device)
    here = torch.arange(rows, device=device)  # which row of `out` each row of the batch is
    history = torch.empty((rows, 0), dtype=torch.long, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    for step in range(max_new_tokens):
        logits = processing(engine.step(tokens), history, step, eos_id)
        log_probabilities = logits.log_softmax(-1)
        if sampling is None:
            tokens = logits.argmax(-1)
        else:
            warped = warp(logits, sampling.temperature, sampling.top_k, sampling.top_p)
            tokens = torch.multinomial(warped.softmax(-1), 1, generator=sampling.generator).flatten()
        tokens = torch.where(done, pad_id, tokens)
        gained = log_probabilities.gather(1, tokens[:, None]).flatten()
        scores[here] += torch.where(done, 0.0, gained)
        out[here, step] = tokens
        done = done | (tokens == eos_id)
        history = torch.cat((history, tokens[:, None]), 1)
        if _look(step, device):
            alive = (~done).nonzero().flatten()
            if len(alive) == 0:
                return out[:, : step + 1], scores
            if len(alive) <= 0.75 * len(done):
                engine.select(alive)
                tokens, here, done, history = tokens[alive], here[alive], done[alive], history[alive]
    return out, scores


def beam_search(
    engine: Any,
    num_beams: int,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    processing: Processing,
    alpha: float,
    num_return: int,
    early_stopping: bool,
) -> tuple[Tensor, Tensor]:
    """Beam search as tensor2tensor does it: 2 * num_beams candidates a step, finished hypotheses kept apart.

    A source is done when no hypothesis alive can still beat the num_return-th finished one: its score can only fall,
    and is divided at best by the penalty of the longest length. With early_stopping: when num_beams are finished.

    Returns:
        (sources, num_return, <= max_new_tokens) ids, best first, and (sources, num_return) penalised scores.
    """
    tokens = engine.first_tokens()
    device, sources = tokens.device, len(tokens) // num_beams
    shape = (sources, num_beams)
    out = torch.full((sources, num_return, max_new_tokens), pad_id, dtype=torch.long, device=device)
    out_scores = torch.full((sources, num_return), _NEVER, device=device)
    here = torch.arange(sources, device=device)

    alive = torch.zeros((*shape, 0), dtype=torch.long, device=device)
    # The beams of a source begin alike: only the first may be expanded.
    alive_scores = torch.full(shape, _NEVER, device=device)
    alive_scores[:, 0] = 0.0
    finished = torch.full((*shape, max_new_tokens), pad_id, dtype=torch.long, device=device)
    finished_scores = torch.full(shape, _NEVER, device=device)
    best_penalty = length_penalty(max_new_tokens, alpha) if alpha > 0 else length_penalty(1, alpha)

    def deliver(which: Tensor, at_end: bool) -> None:
        hypotheses, scores = finished[which], finished_scores[which]
        if at_end:  # what is alive at the last step counts as it stands, behind nothing but better hypotheses
            padding = max_new_tokens - alive.shape[-1]
            cut = torch.nn.functional.pad(alive[which], (0, padding), value=pad_id)
            cut_scores = alive_scores[which] / length_penalty(alive.shape[-1], alpha)
            # A finished hypothesis is a translation, a cut one is not: it serves only where none is finished.
            cut_scores = torch.where((scores > _NEVER / 2).any(-1, keepdim=True), _NEVER, cut_scores)
            hypotheses, scores = torch.cat((hypotheses, cut), 1), torch.cat((scores, cut_scores), 1)
        top = scores.topk(num_return, dim=1)
        out[here[which]] = hypotheses.gather(1, top.indices[:, :, None].expand(-1, -1, max_new_tokens))
        out_scores[here[which]] = top.values

    for step in range(max_new_tokens):
        rows = engine.step(tokens)
        rows = processing(rows, alive.flatten(0, 1), step, eos_id).log_softmax(-1)
        vocab_size = rows.shape[-1]
        totals = (rows.view(*alive_scores.shape, vocab_size) + alive_scores[:, :, None]).flatten(1)
        candidates = totals.topk(min(2 * num_beams, totals.shape[1]), dim=1)
        parent, token = candidates.indices // vocab_size, candidates.indices % vocab_size
        ends = token == eos_id
        grown = torch.cat((alive.gather(1, parent[:, :, None].expand(-1, -1, step)), token[:, :, None]), 2)

        ended_scores = torch.where(ends, candidates.values / length_penalty(step + 1, alpha), _NEVER)
        padded = torch.nn.functional.pad(grown, (0, max_new_tokens - step - 1), value=pad_id)
        pool, pool_scores = torch.cat((finished, padded), 1), torch.cat((finished_scores, ended_scores), 1)
        best = pool_scores.topk(num_beams, dim=1)
        finished = pool.gather(1, best.indices[:, :, None].expand(-1, -1, max_new_tokens))
        finished_scores = best.values

        going = torch.where(ends, _NEVER, candidates.values).topk(num_beams, dim=1)
        alive_scores = going.values
        alive = grown.gather(1, going.indices[:, :, None].expand(-1, -1, step + 1))
        origin = parent.gather(1, going.indices)
        engine.reorder((origin + torch.arange(len(origin), device=device)[:, None] * num_beams).flatten())
        tokens = alive[:, :, -1].flatten()

        if step + 1 < max_new_tokens and _look(step, device):
            if early_stopping:
                done = finished_scores[:, -1] > _NEVER / 2
            else:
                done = finished_scores[:, num_return - 1] >= alive_scores[:, 0] / best_penalty
            if done.any():
                deliver(done.nonzero().flatten(), at_end=False)
                going_on = (~done).nonzero().flatten()
                if len(going_on) == 0:
                    return _trim(out, pad_id), out_scores
                engine.select(going_on)
                here, alive, alive_scores = here[going_on], alive[going_on], alive_scores[going_on]
                finished, finished_scores = finished[going_on], finished_scores[going_on]
                tokens = alive[:, :, -1].flatten()
    deliver(torch.arange(len(here), device=device), at_end=True)
    return _trim(out, pad_id), out_scores


def _trim(out: Tensor, pad_id: int) -> Tensor:
    used = (out != pad_id).flatten(0, 1).any(0).nonzero()
    return out[..., : int(used.max()) + 1 if len(used) else 1]
