"""What the tests of small models share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.models import GPT

EOS, VOCAB = 1, 40


@torch.no_grad()
def next_logits(model: Any, source: Sequence[int], tokens: Sequence[int], start: int = 0) -> torch.Tensor:
    """(len(tokens) + 1, vocab_size): the logits before each token and behind the last, without any cache."""
    if isinstance(model, GPT):
        return model(torch.tensor([[*source, *tokens]]))[0, len(source) - 1 :]
    logits = model(torch.tensor([source]), torch.tensor([[start, *tokens]]))
    return (logits[0] if isinstance(model, LSTMSeq2Seq) else logits)[0]


def mixed_sources(count: int, longest: int = 12) -> torch.Tensor:
    source = torch.randint(3, VOCAB, (count, longest))
    for i in range(count):
        source[i, 2 + i % (longest - 1) :] = 0
    return source


def new_tokens(model: Any, prompts: torch.Tensor, sequences: torch.Tensor) -> list[list[int]]:
    """What was generated, EOS included, without PAD behind it."""
    if isinstance(model, GPT):
        sequences = sequences[:, int((prompts != 0).sum(1).max()) :]
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in sequences.tolist()]


def real(row: torch.Tensor) -> list[int]:
    return row[row != 0].tolist()
