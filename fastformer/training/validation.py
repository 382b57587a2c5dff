"""A validation that several processes share: each computes a part, and the result is that of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastformer.engine.frozen import repack
from fastformer.generation import Translator
from fastformer.training.config import TrainConfig
from fastformer.training.evaluate import Scores, losses_of, mean_of, translation_scores
from fastformer.training.examples import Pairs, TrainingData


@dataclass
class ValidationPart:
    """The part of a validation that one process computed.

    Attributes:
        losses: the summed loss of each batch that it computed, by the batch's place in the plan.
        texts: the translations of its sources, by their places.
    """

    losses: dict[int, float]
    texts: dict[int, str]


def validate_part(
    model: nn.Module, data: TrainingData, pairs: Pairs, config: TrainConfig, device: torch.device, rank: int, size: int
) -> ValidationPart:
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
    try:
        losses = losses_of(
            model, data.val, max_tokens=config.max_tokens, packed=packed, device=device, rank=rank, size=size
        )
        mine, texts = range(rank, len(pairs), size), []
        if mine:
            texts = Translator(model, data.tokenizer).translate([pairs[place][0] for place in mine])
    finally:
        repack(model)  # copies of the weights would take memory until the next validation
    return ValidationPart(losses, dict(zip(mine, texts, strict=True)))


def scores_of(parts: Sequence[ValidationPart], data: TrainingData, pairs: Pairs, config: TrainConfig) -> Scores:
    """Computes the scores from the parts of all processes."""
    nll = mean_of({place: loss for part in parts for place, loss in part.losses.items()}, data.val)
    if not pairs:
        characters, tokens = data.val_characters, data.val.num_tokens[1]
        return Scores(nll, nll_per_character=nll * tokens / characters if characters else None)
    texts = {place: text for part in parts for place, text in part.texts.items()}
    outputs = [texts[place] for place in range(len(pairs))]
    scores = translation_scores(outputs, pairs, nll, config.samples, bleu_tokenize=config.bleu_tokenize)
    scores.lines = len(data.val_texts)
    return scores
