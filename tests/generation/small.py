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
