"""The device's part of greedy and beam search, as tensor operations that a CUDA graph can hold.

The device chooses only the beams that continue, because it needs them to decode the next tokens. It orders them exactly
as the host does, ties included. Some steps later, the searches of `generation/search.py` decide the results on the host
from the same candidates: which hypotheses are finished, their scores, and when the search ends. The device continues to
decode rows whose search has ended until the host looks.
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
from fastformer.generation.native_search import NativeSearch, SearchRules
from fastformer.generation.search import NEVER

Ints = npt.NDArray[np.int32]


class Record(NamedTuple):
    """The candidates and choices of the device in the steps of a run.

    Attributes:
        ids, values: (steps, slots, candidates) the candidates of each step; values are fp32.
        parents: (steps, slots) the slot that each slot continues from after each step.
        tokens: (steps, slots) the next token of each slot.
    """

    ids: Ints
    values: npt.NDArray[np.float32]
    parents: Ints
    tokens: Ints


class DeviceSearch:
    """The searches of several groups of slots. Their rules are the same, except min_tokens.

    Args:
        rules: the common rules.
        num_groups: the number of groups; each has one slot for each beam, or a single slot.
        num_candidates: the number of candidates for each slot.
        vocab_size: the size of the model's vocabulary.
        num_steps: the number of steps that the record has room for.
        device: the device of all tensors.

    Attributes:
        tokens: (slots,) int32, the next token of each slot.
        scores: (slots,) fp64, the score of each slot.
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
        self._keeps_shares = rules.keeps_shares
        slots = self._slots = num_groups * self.num_beams
        self._ends = list(accumulate((slots, num_groups, num_groups)))
        is_cuda = device.type == "cuda"
        self._sent = torch.zeros(self._ends[-1], dtype=torch.int32, device=device)
        self._staged = torch.zeros(self._ends[-1], dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        self.tokens, self._said, self._least = self._sent.tensor_split(self._ends[:-1])
        self.scores = torch.zeros(slots, dtype=torch.float64, device=device)
        self._staged_scores = torch.zeros(slots, dtype=torch.float64, device="cpu", pin_memory=is_cuda)
        widths = (slots * num_candidates, slots * num_candidates, slots, slots)
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

    def load(self, tokens: Sequence[int], searches: Sequence[NativeSearch], counts: Ints) -> None:
        """Sends the state of the searches to the device.

        Args:
            tokens: the next token of each row of the searches; the slots of a group that have no row get its first one.
            searches: the searches of the first groups.
            counts: the number of new tokens in the rows of each group.
        """
        host, scores, ends = self._staged.numpy(), self._staged_scores.numpy(), self._ends
        host[:], scores[:] = 0, NEVER
        begin = 0
        for first, search in zip(range(0, self._slots, self.num_beams), searches, strict=False):
            rows = len(search.handle.scores)
            host[first : first + self.num_beams] = tokens[begin]
            host[first : first + rows] = tokens[begin : begin + rows]
            scores[first : first + rows] = search.handle.scores
            begin += rows
        host[ends[0] : ends[0] + len(counts)] = counts
        host[ends[1] : ends[1] + len(counts)] = [search.rules.min_tokens for search in searches]
        self._sent.copy_(self._staged, non_blocking=True)
        self.scores.copy_(self._staged_scores, non_blocking=True)

    def candidates(self, logits: Tensor, log_probs: bool) -> tuple[Tensor, Tensor]:
        """Returns the best allowed candidates from logits (slots, vocab_size): values and ids, (slots, candidates).

        They are the candidates of a `Selection` with the processors `SuppressTokens` and `MinNewTokens`.
        """
        early = (self._said < self._least).repeat_interleave(self.num_beams, output_size=self._slots)
        forbidden = self._is_suppressed | (self._is_end & early[:, None])
        values = logits.float()
        if log_probs and self._keeps_shares:
            values, log_probs = values.log_softmax(-1), False
        return best_candidates(values.masked_fill(forbidden, NEVER), self._count, log_probs)

    def advance(self, values: Tensor, ids: Tensor, step: Tensor) -> Tensor | None:
        """Chooses the hypotheses that continue, and records the step.

        Args:
            values, ids: (slots, candidates), best first for each slot, and lowest id first among equal values.
            step: (1,) int64, the index of the step in the run.

        Returns:
            (slots,) int64, the slot that each slot continues from; None: each continues from itself.
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
        line = (ids.int(), values.contiguous().view(torch.int32), noted, self.tokens)
        self._record.index_copy_(0, step, torch.cat([part.flatten() for part in line])[None])
        return parents

    def _best_beams(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        # Sorted by id, then stably by score over the beams of a group: equal scores are ordered by beam, then by id.
        ids, places = ids.sort(-1)
        totals = self.scores[:, None] + values.gather(1, places).double()
        # Hypotheses that end don't continue; there are enough candidates that do.
        totals = totals.masked_fill(self._is_end[ids], NEVER)
        ranked = torch.sort(totals.view(self._groups, -1), dim=-1, descending=True, stable=True)
        best = ranked.indices[:, : self.num_beams]
        self.scores.copy_(ranked.values[:, : self.num_beams].reshape(-1))
        parents = best // self._count + self._first_slots
        return ids.view(self._groups, -1).gather(1, best).flatten(), parents.flatten()

    def read(self, num_steps: int) -> Record:
        """Returns the record of the first num_steps steps of the run. The host waits for the device."""
        lines = self._record[:num_steps].cpu().numpy()
        ids, values, parents, tokens = np.split(lines, self._columns[:-1], axis=1)
        shape = (num_steps, self._slots, self._count)
        values = np.ascontiguousarray(values).view(np.float32)
        return Record(ids.reshape(shape), values.reshape(shape), parents, tokens)
