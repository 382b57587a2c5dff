"""What a person sees of a training, and what is written down of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fastformer.data import Batch
from fastformer.training.evaluate import Scores


class Meter:
    """Adds up loss, tokens and padding between two lines of the log. Real tokens only are counted as speed."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._losses: list[torch.Tensor] = []
        self._tokens = self._slots = 0

    def add(self, loss: torch.Tensor, batches: list[Batch]) -> None:
        """Counts one update."""
        self._losses.append(loss)
        self._tokens += sum(batch.num_tokens for batch in batches)
        self._slots += sum(batch.num_slots for batch in batches)

    def mean_loss(self) -> float:
        """Mean loss of the updates so far."""
        return float(torch.stack(self._losses).mean())

    def report(self, lr: float) -> dict[str, float]:
        """The numbers of a log line."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        return {
            "loss": self.mean_loss(),
            "lr": lr,
            "tokens_per_second": self._tokens / seconds,
            "padding": 1.0 - self._tokens / max(self._slots, 1),
        }


class Progress:
    """The progress bar (a line now and then without a terminal), metrics.jsonl, and TensorBoard if installed."""

    def __init__(self, steps: int, done: int, run: Path) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=steps, initial=done, unit="update", dynamic_ncols=True, disable=not sys.stderr.isatty(), leave=False
        )
        self._metrics = run / "metrics.jsonl"
        self._board = _tensorboard(run)
        self._steps = steps

    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(step - self._bar.n)

    def log(self, step: int, values: dict[str, float]) -> None:
        """A line with the loss, the speed in real tokens and the padding."""
        self.advance(step)
        self._bar.set_postfix(loss=f"{values['loss']:.3f}", tokens=f"{values['tokens_per_second']:,.0f}/s")
        self._say(
            f"update {step:>6}/{self._steps}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
            f"{values['tokens_per_second']:>8,.0f} real tokens/s  padding {100 * values['padding']:.1f} %"
        )
        self._write(step, "train", values)

    def validation(self, step: int, scores: Scores) -> None:
        """Scores and a few samples."""
        parts = [f"nll {scores.nll:.4f}"]
        values: dict[str, Any] = {"nll": scores.nll}
        if scores.exact_match is not None:
            parts.append(f"exact match {scores.exact_match:.4f}")
            values["exact_match"] = scores.exact_match
        if scores.bleu is not None and scores.chrf is not None:
            parts.append(f"BLEU {scores.bleu:.2f}  chrF {scores.chrf:.2f}")
            values |= {"bleu": scores.bleu, "chrf": scores.chrf}
        self._say(f"validation at {step}: " + "  ".join(parts))
        for source, found, reference in scores.samples:
            self._say(f"  {source}\n    -> {found}" + ("" if found == reference else f"\n    ({reference})"))
        self._write(step, "validation", values | scores.signatures)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()

    def _say(self, line: str) -> None:
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def _write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        with open(self._metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)


def _tensorboard(run: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run))
