"""Decodes an ensemble: an engine for each of its models, stepped alongside, and one choice from the mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fastformer.generation.engines.base import Candidates, Engine, Prompt, Selection
from fastformer.generation.engines.sampling import choose
from fastformer.generation.model_protocols import Ensembled, device_of, is_ensemble


class EnsembleEngine:
    """Steps the models of an `Ensemble`.

    All engines have the same groups and rows. A step shows the logits of all rows of each of them.

    Args:
        model: the ensemble.
        choose_engine: gives the engine of a model.
    """

    name: ClassVar[str] = "ensemble"

    def __init__(self, model: Ensembled, choose_engine: Callable[[object], Engine]) -> None:
        self.model = model
        self.engines = [choose_engine(member) for member in model.members]
        self.device: torch.device = device_of(model)

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """See `Engine.why_unsupported`; each model in the ensemble has its own engine's say."""
        return None if is_ensemble(model) else "it is no ensemble"

    @property
    def token_bytes(self) -> int:
        """What a token takes in all of them."""
        return sum(engine.token_bytes for engine in self.engines)

    def start(self, max_rows: int, num_tokens: int) -> None:
        """See `Engine.start`."""
        for engine in self.engines:
            engine.start(max_rows, num_tokens)

    def admit(self, prompts: Sequence[Prompt]) -> None:
        """See `Engine.admit`."""
        for engine in self.engines:
            engine.admit(prompts)

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        """See `Engine.step`."""
        shown = [_logits(engine, tokens) for engine in self.engines]
        return choose(self.model.combine(shown), selection)

    def reorder(self, parents: Sequence[Sequence[int]]) -> None:
        """See `Engine.reorder`."""
        for engine in self.engines:
            engine.reorder(parents)

    def release(self, groups: Sequence[int]) -> None:
        """See `Engine.release`."""
        for engine in self.engines:
            engine.release(groups)

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """See `Engine.tokens_needed`: what is enough for each of them."""
        return max(engine.tokens_needed(prompt, num_rows, new_tokens) for engine in self.engines)

    def free_tokens(self) -> int:
        """See `Engine.free_tokens`: what is free in each of them."""
        return min(engine.free_tokens() for engine in self.engines)

    def step_tokens(self) -> int:
        """See `Engine.step_tokens`: more than is free where one of them has too little, whatever the others have."""
        least = self.free_tokens()
        return max(engine.step_tokens() - (engine.free_tokens() - least) for engine in self.engines)


def _logits(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """Steps an engine: (rows, vocab_size), the logits of all of its rows."""
    shown: list[Tensor] = []

    def keep(logits: Tensor) -> Tensor:
        shown.append(logits)
        return logits

    engine.step(tokens, Selection(1, log_probs=False, logit_rows=range(len(tokens)), process=keep))
    return shown[0]
