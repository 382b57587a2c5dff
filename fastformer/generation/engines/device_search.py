"""Greedy and beam search as operations on tensors, which a CUDA graph can hold: what goes on, and nothing else.

What the searches of `generation/search.py` find is decided there, on the host, from the same candidates some steps
later: which hypotheses are finished, their scores, and when there is an end. The device has to know what it decodes
next, and for that the best beams that go on, in the same order to the last tie, are all. Rows whose search has ended
meanwhile are decoded until the host looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastformer.generation.engines.sampling import best_candidates
from fastformer.generation.native_search import SearchRules
from fastformer.generation.search import NEVER

Ints = npt.NDArray[np.int32]


class Record(NamedTuple):
    """What the device found and did in the steps of a run.

    Attributes:
        ids, values: (steps, slots, candidates) each step's candidates; fp32.
        parents: (steps, slots) the slot that each goes on from after each step.
        tokens: (steps, slots) the next token of each slot.
        scores: (steps, slots) fp64, the score of each slot.
    """

    ids: Ints
    values: npt.NDArray[np.float32]
    parents: Ints
    tokens: Ints
    scores: npt.NDArray[np.float64]


class DeviceSearch:
    """The searches of some groups of slots, by the same rules but for min_tokens.

    Args:
        rules: see above.
        num_groups: with as many slots each as there are beams, or one.
        num_candidates: of a slot.
        vocab_size: of the model.
        num_steps: that the record has room for.
        device: of everything.

    Attributes:
        tokens: (slots,) int32, what each slot is given next.
    """

    def __init__(
        self,
        rules: SearchRules,
        num_groups: int,
        num_candidates: int,
        vocab_size: int,
        num_steps: int,
        device: torch.device,
    ) -> None:
        self.num_beams, self._count = max(1, rules.num_beams), num_candidates
        self._is_greedy, self._groups = rules.num_beams == 0, num_groups
        slots = self._slots = num_groups * self.num_beams
        self._ends = list(accumulate((slots, num_groups, num_groups)))
        is_cuda = device.type == "cuda"
        self._sent = torch.zeros(self._ends[-1], dtype=torch.int32, device=device)
        self._staged = torch.zeros(self._ends[-1], dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        self.tokens, self._said, self._least = self._sent.tensor_split(self._ends[:-1])
        self._scores = torch.zeros(slots, dtype=torch.float64, device=device)
        self._staged_scores = torch.zeros(slots, dtype=torch.float64, device="cpu", pin_memory=is_cuda)
        widths = (slots * num_candidates, slots * num_candidates, slots, slots, 2 * slots)
        self._columns = list(accumulate(widths))
        self._record = torch.zeros(num_steps, self._columns[-1], dtype=torch.int32, device=device)
        self._eos = torch.tensor(rules.eos, dtype=torch.int64, device=device)
        self._first_slots = torch.arange(0, slots, self.num_beams, device=device)[:, None]
        self._itself = torch.arange(slots, dtype=torch.int32, device=device)
        ends = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        ends[list(rules.eos)] = True
        banned = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        banned[list(rules.suppressed)] = True
        self._is_end, self._is_suppressed = ends.to(device), banned.to(device)

    def load(self, tokens: Sequence[int], scores: Sequence[float], said: Sequence[int], least: Sequence[int]) -> None:
        """Sends the device where the searches are.

        Args:
            tokens: of the slots that rows stand in.
            scores: likewise; `NEVER` for those that are no hypothesis.
            said: how many new tokens the rows of each group have.
            least: its min_tokens.
        """
        host, ends = self._staged.numpy(), self._ends
        host[:] = 0
        host[: len(tokens)] = tokens
        host[ends[0] : ends[0] + len(said)] = said
        host[ends[1] : ends[1] + len(least)] = least
        self._staged_scores.numpy()[:] = [*scores, *[NEVER] * (self._slots - len(scores))]
        self._sent.copy_(self._staged, non_blocking=True)
        self._scores.copy_(self._staged_scores, non_blocking=True)

    def candidates(self, logits: Tensor, log_probs: bool) -> tuple[Tensor, Tensor]:
        """The best of logits (slots, vocab_size), of which the rules forbid some: values and ids, (slots, candidates).

        As a `Selection` would with the processors `SuppressTokens` and `MinNewTokens`.
        """
        early = (self._said < self._least).repeat_interleave(self.num_beams, output_size=self._slots)
        forbidden = self._is_suppressed | (self._is_end & early[:, None])
        return best_candidates(logits.float().masked_fill(forbidden, NEVER), self._count, log_probs)

    def advance(self, values: Tensor, ids: Tensor, step: Tensor) -> Tensor | None:
        """Chooses the hypotheses that go on, and records everything.

        Args:
            values, ids: (slots, candidates), each slot's best first, of equals the lowest id first.
            step: (1,) int64, of the run.

        Returns:
            (slots,) int64, the slot that each goes on from; None: from itself.
        """
        values = values.float()
        parents: Tensor | None = None
        if self._is_greedy:
            tokens = ids[:, 0]
        else:
            tokens, parents = self._best_beams(values, ids)
        self.tokens.copy_(tokens)
        self._said.add_(1)
        noted = self._itself if parents is None else parents.int()
        line = (ids.int(), values.contiguous().view(torch.int32), noted, self.tokens, self._scores.view(torch.int32))
        self._record.index_copy_(0, step, torch.cat([part.flatten() for part in line])[None])
        return parents

    def _best_beams(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        # Upward by id, then a stable sort over the beams of a group: of equal scores the first beam's lowest id first.
        ids, places = ids.sort(-1)
        totals = self._scores[:, None] + values.gather(1, places).double()
        # Hypotheses that end don't go on; enough of the candidates do.
        totals = totals.masked_fill(self._is_end[ids], NEVER)
        ranked = torch.sort(totals.view(self._groups, -1), dim=-1, descending=True, stable=True)
        best = ranked.indices[:, : self.num_beams]
        self._scores.copy_(ranked.values[:, : self.num_beams].reshape(-1))
        parents = best // self._count + self._first_slots
        return ids.view(self._groups, -1).gather(1, best).flatten(), parents.flatten()

    def read(self, num_steps: int) -> Record:
        """What was noted in the first steps of the run. The device is waited for."""
        lines = self._record[:num_steps].cpu().numpy()
        ids, values, parents, tokens, scores = np.split(lines, self._columns[:-1], axis=1)
        shape = (num_steps, self._slots, self._count)
        return Record(
            ids.reshape(shape),
            np.ascontiguousarray(values).view(np.float32).reshape(shape),
            parents,
            tokens,
            np.ascontiguousarray(scores).view(np.float64),
        )
