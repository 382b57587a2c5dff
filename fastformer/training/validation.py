"""A validation that several processes share: each computes a part, and the result is that of a single process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastformer.generation import Translator
from fastformer.training.config import TrainConfig
from fastformer.training.evaluate import Scores, lengths_of, losses_of, mean_of, translate_and_score
from fastformer.training.examples import Data, Pairs


@dataclass
class Part:
    """The part of a validation that one process computed.

    Attributes:
        losses: the summed loss of each batch that it computed, by the batch's place in the plan.
        texts: the translations of its sources, by their places.
    """

    losses: dict[int, float]
    texts: dict[int, str]


class Told:
    """A translator of sources whose translations are known."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def translate(self, sources: Sequence[str], **options: Any) -> list[str]:
        """Returns the known translations."""
        return [self._texts[place] for place, _ in enumerate(sources)]


def validate_part(
    model: nn.Module, data: Data, pairs: Pairs, config: TrainConfig, device: torch.device, rank: int, size: int
) -> Part:
    """Computes the part of one process.

    Args:
        model: the model.
        data: the data with the validation examples.
        pairs: the pairs whose sources are translated.
        config: the settings of the run.
        device: the device of the model.
        rank, size: the rank of the process, and the number of processes.
    """
    packed = config.batching == "packed"
    losses = losses_of(
        model, data.val, max_tokens=config.max_tokens, packed=packed, device=device, rank=rank, size=size
    )
    mine, texts = range(rank, len(pairs), size), []
    if mine:
        texts = Translator(model, data.tokenizer).translate([pairs[place][0] for place in mine])
    return Part(losses, dict(zip(mine, texts, strict=True)))


def scores_of(parts: Sequence[Part], data: Data, pairs: Pairs, config: TrainConfig) -> Scores:
    """Computes the scores from the parts of all processes."""
    nll = mean_of({place: loss for part in parts for place, loss in part.losses.items()}, data.val)
    if not pairs:
        characters, tokens = data.val_characters, int(lengths_of(data.val)[:, 1].sum())
        return Scores(nll, nll_per_character=nll * tokens / characters if characters else None)
    told = Told({place: text for part in parts for place, text in part.texts.items()})
    scores = translate_and_score(told, pairs, nll, config.samples, bleu_tokenize=config.bleu_tokenize)
    scores.lines = len(data.val_texts)
    return scores
