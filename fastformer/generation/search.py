"""The one search: greedy, sampling and beam, over any engine.

What is chosen grows by a column a step. No step waits for the device except to look whether rows are done: each step on
a CPU, every few steps on a GPU (rows that are done go on with PAD meanwhile). What is finished leaves the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastformer.generation.engine import Engine
from fastformer.generation.processors import Processing, warp

_ASK_EVERY = 8  # steps between two looks at a GPU
_NEVER = -torch.inf  # the score of what isn't there


@dataclass(frozen=True)
class Sampling:
    """How `choose_rows` draws; None in its place means the best token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None


def length_penalty(length: int, alpha: float) -> float:
    """((5 + length) / 6) ** alpha, length counting EOS (Wu et al. 2016, equation 14; tensor2tensor)."""
    return float(((5.0 + length) / 6.0) ** alpha)


def _look(step: int, device: torch.device) -> bool:
    return device.type == "cpu" or step % _ASK_EVERY == _ASK_EVERY - 1


def _check_numbers(scores: Tensor) -> None:
    if bool(scores.isnan().any()):
        raise ValueError(
            "the model gives NaN or infinite logits: its weights are damaged, or too large for this precision "
            "(try fp32)"
        )


def choose_rows(
    engine: Engine,
    limits: Sequence[int],
    eos_id: int,
    pad_id: int,
    processing: Processing,
    sampling: Sampling | None,
) -> tuple[Tensor, Tensor]:
    """Greedy decoding or sampling, one hypothesis a row.

    Args:
        engine: at its first tokens, one row a source.
        limits: the most tokens that each row gets.
        eos_id, pad_id: the ids.
        processing: of the logits.
        sampling: None: the best token.

    Returns:
        (rows, length) ids ending in EOS, or cut at the limit, and then PAD, as wide as the longest of them; and (rows,)
        the sum of their log-probabilities.

    Raises:
        ValueError: the model gives NaN.
    """
    tokens = engine.first_tokens()
    rows, device = len(tokens), tokens.device
    out = torch.full((rows, max(limits)), pad_id, dtype=torch.long, device=device)
    scores = torch.zeros(rows, device=device)
    lengths = torch.zeros(rows, dtype=torch.long, device=device)
    limit = torch.tensor(limits, device=device)
    here = torch.arange(rows, device=device)  # which row of `out` each row of the batch is
    history = torch.empty((rows, 0), dtype=torch.long, device=device)
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    for step in range(max(limits)):
        logits = processing(engine.step(tokens), history, step, eos_id)
        log_probabilities = logits.log_softmax(-1)
        if sampling is None:
            tokens = logits.argmax(-1)
        else:
            warped = warp(logits, sampling.temperature, sampling.top_k, sampling.top_p)
            # Drawing from NaN ends a GPU's context; the scores keep it, and it is said below.
            probabilities = warped.softmax(-1).nan_to_num(nan=1.0)
            tokens = torch.multinomial(probabilities, 1, generator=sampling.generator).flatten()
        tokens = torch.where(done, pad_id, tokens)
        gained = log_probabilities.gather(1, tokens[:, None]).flatten()
        scores[here] += torch.where(done, 0.0, gained)
        lengths[here] += ~done
        out[here, step] = tokens
        done = done | (tokens == eos_id) | (limit <= step + 1)
        history = torch.cat((history, tokens[:, None]), 1)
        if _look(step, device):
            _check_numbers(scores)
            alive = (~done).nonzero().flatten()
            if len(alive) == 0:
                break
            if len(alive) <= 0.75 * len(done):
                engine.select(alive)
                tokens, here, done, history = tokens[alive], here[alive], done[alive], history[alive]
                limit = limit[alive]
    _check_numbers(scores)
    return out[:, : int(lengths.max())], scores


def beam_search(
    engine: Engine,
    limits: Sequence[int],
    eos_id: int,
    pad_id: int,
    processing: Processing,
    num_beams: int,
    alpha: float,
    num_return: int,
    early_stopping: bool,
) -> tuple[Tensor, Tensor]:
    """Beam search as tensor2tensor does it: 2 * num_beams candidates a step, finished hypotheses kept apart.

    A source is done when no hypothesis alive can still beat the num_return-th finished one: its score can only fall,
    and is divided at best by the penalty of the longest length. With early_stopping: when num_beams are finished. It is
    also done at its limit; hypotheses cut there stand behind the finished ones, whatever their scores.

    Args:
        engine: at its first tokens, num_beams rows a source.
        limits: the most tokens that a hypothesis of each source gets.
        eos_id, pad_id: the ids.
        processing: of the logits.
        num_beams: hypotheses that are followed.
        alpha: of `length_penalty`.
        num_return: at most num_beams.
        early_stopping: see above.

    Returns:
        (sources, num_return, length) ids, and (sources, num_return) log-probabilities divided by the length penalty:
        the finished hypotheses, best first, then the cut ones, best first. Where there are fewer hypotheses than
        num_return, the rest is PAD alone with score -inf.

    Raises:
        ValueError: the model gives NaN.
    """
    tokens = engine.first_tokens()
    device, sources, longest = tokens.device, len(limits), max(limits)
    shape = (sources, num_beams)
    out = torch.full((sources, num_return, longest), pad_id, dtype=torch.long, device=device)
    out_scores = torch.full((sources, num_return), _NEVER, device=device)
    here = torch.arange(sources, device=device)
    limit = torch.tensor(limits, device=device)
    stops = set(limits)
    # The best that dividing by a penalty can still do for a score below zero.
    best_penalty = torch.tensor([length_penalty(most if alpha > 0 else 1, alpha) for most in limits], device=device)

    alive = torch.zeros((*shape, 0), dtype=torch.long, device=device)
    # The beams of a source begin alike: only the first may be expanded.
    alive_scores = torch.full(shape, _NEVER, device=device)
    alive_scores[:, 0] = 0.0
    finished = torch.full((*shape, longest), pad_id, dtype=torch.long, device=device)
    finished_scores = torch.full(shape, _NEVER, device=device)

    def deliver(which: Tensor) -> None:
        cut = torch.nn.functional.pad(alive[which], (0, longest - alive.shape[-1]), value=pad_id)
        cut_scores = alive_scores[which] / length_penalty(alive.shape[-1], alpha)
        hypotheses = torch.cat((finished[which], cut), 1)
        scores = torch.cat((finished_scores[which], cut_scores), 1)
        # Both halves are in order, so it is enough to move what isn't there behind them.
        order = (scores == _NEVER).long().argsort(dim=1, stable=True)[:, :num_return]
        scores = scores.gather(1, order)
        hypotheses = hypotheses.gather(1, order[:, :, None].expand(-1, -1, longest))
        out[here[which]] = hypotheses.masked_fill((scores == _NEVER)[:, :, None], pad_id)
        out_scores[here[which]] = scores

    for step in range(longest):
        rows = processing(engine.step(tokens), alive.flatten(0, 1), step, eos_id).log_softmax(-1)
        vocab_size = rows.shape[-1]
        totals = (rows.view(*alive_scores.shape, vocab_size) + alive_scores[:, :, None]).flatten(1)
        candidates = totals.topk(min(2 * num_beams, totals.shape[1]), dim=1)
        parent, token = candidates.indices // vocab_size, candidates.indices % vocab_size
        ends = token == eos_id
        grown = torch.cat((alive.gather(1, parent[:, :, None].expand(-1, -1, step)), token[:, :, None]), 2)

        ended_scores = torch.where(ends, candidates.values / length_penalty(step + 1, alpha), _NEVER)
        if early_stopping:  # a GPU is looked at later, and must not find more than a CPU
            ended_scores = ended_scores.masked_fill((finished_scores[:, -1:] > _NEVER), _NEVER)
        padded = torch.nn.functional.pad(grown, (0, longest - step - 1), value=pad_id)
        pool, pool_scores = torch.cat((finished, padded), 1), torch.cat((finished_scores, ended_scores), 1)
        best = pool_scores.topk(num_beams, dim=1)
        finished = pool.gather(1, best.indices[:, :, None].expand(-1, -1, longest))
        finished_scores = best.values

        going = torch.where(ends, _NEVER, candidates.values).topk(num_beams, dim=1)
        alive_scores = going.values
        alive = grown.gather(1, going.indices[:, :, None].expand(-1, -1, step + 1))
        origin = parent.gather(1, going.indices)
        tokens = alive[:, :, -1].flatten()

        if step + 1 in stops or _look(step, device):
            _check_numbers(alive_scores)
            if early_stopping:
                done = finished_scores[:, -1] > _NEVER
            else:
                done = finished_scores[:, num_return - 1] >= alive_scores[:, 0] / best_penalty
            done |= limit <= step + 1
            if bool(done.any()):
                deliver(done.nonzero().flatten())
                going_on = (~done).nonzero().flatten()
                if len(going_on) == 0:
                    break
                engine.select(going_on)
                here, limit, best_penalty = here[going_on], limit[going_on], best_penalty[going_on]
                alive, alive_scores, origin = alive[going_on], alive_scores[going_on], origin[going_on]
                finished, finished_scores = finished[going_on], finished_scores[going_on]
                tokens = alive[:, :, -1].flatten()
        engine.reorder((origin + torch.arange(len(origin), device=device)[:, None] * num_beams).flatten())
    return _trim(out, pad_id), out_scores


def _trim(out: Tensor, pad_id: int) -> Tensor:
    used = (out != pad_id).flatten(0, 1).any(0).nonzero()
    return out[..., : int(used.max()) + 1 if len(used) else 1]
