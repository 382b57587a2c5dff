"""Learning curves of the library's own trainer, on the built-in task: number words, English to German."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.experiment import Row
from fastformer.data import Examples
from fastformer.generation import Translator
from fastformer.training import TrainConfig, Trainer
from fastformer.training.build import build_model
from fastformer.training.evaluate import Scores
from fastformer.training.examples import TrainingData, load_data
from fastformer.training.trainer import DivergedError

VALIDATED = 500  # examples of each validation: fewer than the task has, because validations are frequent
# A quarter of a million parameters, which learn most of the task within a minute on one core.
SMALL = {"d_model": 64, "d_ff": 256, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}


@dataclass
class Curve:
    """The results of a training.

    Attributes:
        updates: the updates at which the model was validated.
        seconds: the CPU time of the training until then, without validations.
        nll: the plain negative log-likelihood of a validation's target token, in nats.
        losses: (update, mean training loss since the last entry).
        exact_match: the exact match of the model at the end, on all validation pairs.
        num_parameters: the number of parameters of the model.
        diverged: whether the loss became NaN or infinite, which ended the training.
    """

    updates: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    exact_match: float = 0.0
    num_parameters: int = 0
    diverged: bool = False

    def __str__(self) -> str:
        return f"{self.nll[-1]:.4f} nats a token, exact match {self.exact_match:.3f}"

    def row(self, provider: str, shape: Row, *, of: str = "nll", over: str = "updates") -> Row:
        """Makes a row of results: a curve of the model, and its exact match.

        Args:
            provider: the name of the line.
            shape: the values that vary between lines.
            of: "nll", of validations, or "losses", of the training.
            over: "updates" or "seconds"; losses are over updates.
        """
        if of == "losses":
            xs, ys = [float(update) for update, _ in self.losses], [loss for _, loss in self.losses]
        else:
            xs, ys = [float(x) for x in (self.updates if over == "updates" else self.seconds)], self.nll
        x_label = {"updates": "update", "seconds": "CPU seconds of training, one thread"}[over]
        y_label = {"nll": "validation loss, nats a target token", "losses": "training loss, nats a target token"}[of]
        return {
            "provider": provider,
            "shape": shape | {"parameters": self.num_parameters},
            "curve": {"x": xs, "y": [max(round(y, 6), 1e-6) for y in ys], "x_label": x_label, "y_label": y_label},
            "value": self.exact_match,
            "unit": "exact match",
        }


class _Trainer(Trainer):
    """A trainer that records each validation and the CPU time until then, which other processes hardly affect."""

    curve: Curve
    began: float  # is moved forward by the time of validations

    def train(self) -> Scores | None:
        self.curve, self.began = Curve(), time.process_time()
        return super().train()

    def validate(self, model: torch.nn.Module) -> Scores:
        at = time.process_time()
        scores = super().validate(model)
        self.curve.updates.append(self.step)
        self.curve.seconds.append(at - self.began)
        self.curve.nll.append(scores.nll)
        self.began += time.process_time() - at
        return scores


@functools.lru_cache(maxsize=4)
def numbers(seed: int) -> TrainingData:
    """Returns the built-in task, tokenized."""
    return load_data(TrainConfig.from_dict({"task": "numbers", "seed": seed}))


def learn(
    seed: int,
    *,
    steps: int,
    num_train: int | None = None,
    data: TrainingData | None = None,
    points: int = 20,
    **settings: Any,
) -> tuple[Curve, torch.nn.Module]:
    """Trains one model.

    Args:
        seed: the seed of data, weights, order and dropout.
        steps: the number of updates; there are ten validations.
        num_train: the number of training pairs; None: all of the task.
        data: the data; None: the built-in task.
        points: the number of points on the curve of training losses.
        settings: settings of `TrainConfig`, which override those of the task.

    Returns:
        The curve, and the model after the last update, in evaluation mode.

    Raises:
        SystemExit: a signal ended the training; the status is 128 plus its number.
    """
    every = max(1, steps // 10)
    config = TrainConfig.from_dict(
        {"task": "numbers", "max_tokens": 1024, "batching": "packed", "warmup": max(1, steps // 8), **settings}
        | {"seed": seed, "steps": steps, "val_every": every, "log_every": max(1, steps // points)}
        | {"save_every": 0, "val_examples": 0, "device": "cpu"}
    )
    data = numbers(seed) if data is None else data
    train = data.train if num_train is None else Examples(data.train[:num_train])
    few = dataclasses.replace(data, train=train, val=Examples(data.val[:VALIDATED]))
    model = build_model(config, data.tokenizer.vocab_size, data.tokenizer.special_ids)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # hides the trainer's log
        trainer = _Trainer(config, Path(folder), model, few, torch.device("cpu"))
        try:
            trainer.train()
        except DivergedError:
            trainer.curve.diverged = True
    if trainer.interrupts.signum is not None:  # an interrupted training has no result
        raise SystemExit(128 + trainer.interrupts.signum)
    curve = trainer.curve
    curve.losses = trainer.position.losses
    curve.num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model.eval()
    if not curve.diverged:
        translations = Translator(model, data.tokenizer).translate([source for source, _ in data.val_texts])
        right = sum(text == target for text, (_, target) in zip(translations, data.val_texts, strict=True))
        curve.exact_match = right / len(translations)
    return curve, model
