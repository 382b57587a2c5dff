"""Several models that decode together: each step uses the mean of their distributions over the next token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fastformer.generation.model_protocols import Model, as_model, device_of, is_decoder_only, is_ensemble
from fastformer.special_ids import SpecialIds

Mean = Literal["probabilities", "log_probabilities"]


@dataclass(frozen=True)
class EnsembleConfig:
    """The config of an ensemble, with the sizes that decoding uses.

    Attributes:
        vocab_size, source_vocab_size: the sizes of each model's vocabularies.
        max_len: the smallest of the models' max_len.
        d_model: the largest of the models' d_model.
        special_ids: the special ids of each model.
    """

    vocab_size: int
    source_vocab_size: int
    max_len: int
    d_model: int
    special_ids: SpecialIds
    suppress_tokens: tuple[int, ...] = ()  # those of any model


class Ensemble(nn.Module):
    """Models with one vocabulary that decode together: `generate(Ensemble([a, b]), ids)`.

    Each step computes every model's distribution over the next token, and the search sees their mean. Every option of
    `generate` works. Processors, such as `repetition_penalty`, get log-probabilities, whereas a single model gives them
    its logits. `engine=` and `precision=` apply to each model. Each model has an engine of its own: the C++ engine if
    it supports the model. The searches run in Python, whereas those of a single model may run in C++.

    Args:
        models: either each a `models.Transformer` or a `baseline.LSTMSeq2Seq`, or each a `models.GPT`. A model may
            occur several times.
        weights: the weights of the models, above 0; they are divided by their sum. None: equal weights.
        mean: the mean of the "probabilities" (arithmetic, as in fairseq and OpenNMT), or of the "log_probabilities"
            (geometric, as in Marian), which is normalised over the vocabulary.

    Raises:
        ValueError: no models; a model that can't decode; models that read different kinds of inputs, have different
            vocabulary sizes or special ids, or are on several devices; weights that don't match the models.
    """

    def __init__(
        self, models: Iterable[nn.Module], weights: Sequence[float] | None = None, mean: Mean = "probabilities"
    ) -> None:
        super().__init__()
        models = list(models)
        if not models:
            raise ValueError("expected at least one model for an ensemble, got none")
        for model in models:
            if is_ensemble(as_model(model)) or not isinstance(model, nn.Module):
                raise ValueError(f"expected models that are modules and no ensembles, got {type(model).__name__}")
        if mean not in get_args(Mean):
            raise ValueError(f"expected mean to be 'probabilities' or 'log_probabilities', got {mean!r}")
        self.members = nn.ModuleList(models)
        self.mean = mean
        self.config = _config([as_model(model) for model in models])
        self.weights = _shares(weights, len(models))

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean distribution.

        Args:
            logits: the logits of each model, (..., vocab_size).

        Returns:
            (..., vocab_size), fp32.
        """
        log_probs = [one.float().log_softmax(-1) for one in logits]
        if self.mean == "log_probabilities":
            weighted = [one * weight for one, weight in zip(log_probs, self.weights, strict=True)]
            return torch.stack(weighted).sum(0).log_softmax(-1)
        weighted = [one + math.log(weight) for one, weight in zip(log_probs, self.weights, strict=True)]
        return torch.stack(weighted).logsumexp(0)


def _shares(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1 / count,) * count
    numbers = list(weights)
    if len(numbers) != count:
        raise ValueError(f"expected a weight for each of {count} models, got {len(numbers)}")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ValueError(f"expected weights of more than 0, got {number!r}")
    return tuple(number / sum(numbers) for number in numbers)


def _config(models: Sequence[Model]) -> EnsembleConfig:
    first, configs = models[0], [model.config for model in models]
    summaries = [
        EnsembleConfig(
            vocab_size=config.vocab_size,
            source_vocab_size=getattr(config, "source_vocab_size", None) or config.vocab_size,
            max_len=min(one.max_len for one in configs),
            d_model=max(one.d_model for one in configs),
            special_ids=SpecialIds.of(config),
            suppress_tokens=tuple(sorted({i for one in configs for i in getattr(one, "suppress_tokens", ())})),
        )
        for config in configs
    ]
    for number, (model, config) in enumerate(zip(models, summaries, strict=True), 1):
        if is_decoder_only(model) != is_decoder_only(first):
            raise ValueError("expected models that all read a source, or that all continue prompts, got both kinds")
        for name in ("vocab_size", "source_vocab_size", "special_ids"):
            of_model, of_first = getattr(config, name), getattr(summaries[0], name)
            if of_model != of_first:
                raise ValueError(
                    f"expected models of one vocabulary, got {name} {of_first} of the first and {of_model} of number "
                    f"{number}"
                )
        if device_of(model) != device_of(first):
            raise ValueError(f"expected models on one device, got {device_of(first)} and {device_of(model)}")
    return summaries[0]
