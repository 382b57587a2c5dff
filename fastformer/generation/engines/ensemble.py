"""Decodes an ensemble: steps a batch for each of its models, and chooses tokens from the mean of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from fastformer.generation.engines.base import Batch, Candidates, Engine, Prompt, Selection
from fastformer.generation.engines.sampling import choose
from fastformer.generation.model_protocols import Ensembled, device_of, is_ensemble


class EnsembleEngine(Engine):
    """Steps the models of an `Ensemble`.

    Args:
        model: the ensemble.
        choose_engine: returns the engine for a model.
    """

    name: ClassVar[str] = "ensemble"

    def __init__(self, model: Ensembled, choose_engine: Callable[[object], Engine]) -> None:
        self.model = model
        self.engines = [choose_engine(member) for member in model.members]
        self.device = device_of(model)

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Returns a reason unless the model is an ensemble; see `Engine.why_unsupported`.

        Each model in the ensemble has its own engine, which may refuse the precision.
        """
        return None if is_ensemble(model) else "it is not an ensemble"

    @property
    def token_bytes(self) -> int:
        """The bytes of a token of memory, summed over the models."""
        return sum(engine.token_bytes for engine in self.engines)

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """Returns the tokens of memory that are enough for each of the models; see `Engine.tokens_needed`."""
        return max(engine.tokens_needed(prompt, num_rows, new_tokens) for engine in self.engines)

    def open(self, max_rows: int, num_tokens: int) -> Batch:
        """Opens a batch of each model's engine."""
        return EnsembleBatch(self.model, [engine.open(max_rows, num_tokens) for engine in self.engines])


class EnsembleBatch(Batch):
    """Batches of all models, with the same groups and rows. A step gets the logits of all rows from each of them."""

    def __init__(self, model: Ensembled, batches: Sequence[Batch]) -> None:
        self._model, self._batches = model, batches

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        for batch in self._batches:
            batch.prefill(prompts)

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        return choose(self._model.combine([_logits(batch, tokens) for batch in self._batches]), selection)

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        for batch in self._batches:
            batch.fork(parents)

    def free(self, groups: Sequence[int]) -> None:
        for batch in self._batches:
            batch.free(groups)

    def is_current(self) -> bool:
        return all(batch.is_current() for batch in self._batches)

    def free_tokens(self) -> int:
        """Returns the number of free tokens of memory in the model's batch that has the fewest."""
        return min(batch.free_tokens() for batch in self._batches)

    def step_tokens(self) -> int:
        """Returns the tokens of memory that the next step takes: more than are free if any batch has too few."""
        least = self.free_tokens()
        return max(batch.step_tokens() - (batch.free_tokens() - least) for batch in self._batches)


def _logits(batch: Batch, tokens: Sequence[int]) -> Tensor:
    """Steps a batch, and returns the logits of all of its rows, (rows, vocab_size)."""
    shown: list[Tensor] = []

    def keep(logits: Tensor) -> Tensor:
        shown.append(logits)
        return logits

    batch.step(tokens, Selection(1, log_probs=False, logit_rows=range(len(tokens)), process=keep))
    return shown[0]
