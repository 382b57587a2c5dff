"""The progress of a training: the progress bar, lines for the terminal, and metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastformer import console
from fastformer.data import Batch
from fastformer.files import write_atomically
from fastformer.training.evaluate import SHOWN, Scores
from fastformer.training.run_log import RunLog
from fastformer.training.state import amount
from fastformer.training.updates import Update

logger = logging.getLogger("fastformer")


class Meter:
    """Adds up loss, tokens and padding between two lines of the log. The speed counts real tokens only.

    Args:
        device: the device of `loss`, the sum over updates.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.loss = torch.zeros((), device=device)
        self._paused: float | None = None  # the time when the pause began
        self.reset()

    def reset(self) -> None:
        """Sets all sums to zero and restarts the clock."""
        self.loss.zero_()
        self._started = time.perf_counter()
        self._updates = self._tokens = self._slots = 0

    def count(self, batches: list[Batch]) -> None:
        """Counts the tokens of one update in all processes; the caller adds the update's loss to `loss`."""
        update = batches if isinstance(batches, Update) else Update(batches)
        self._updates += 1
        self._tokens += update.num_tokens
        self._slots += update.num_slots

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the code inside, which doesn't train."""
        began = self._paused = time.perf_counter()
        try:
            yield
        finally:
            self._paused = None
            self._started += time.perf_counter() - began

    def _seconds(self) -> float:
        return (time.perf_counter() if self._paused is None else self._paused) - self._started

    def mean_loss(self) -> float:
        """Returns the mean loss of the updates so far."""
        return float(self.loss) / max(self._updates, 1)

    def report(self) -> dict[str, float]:
        """Returns the numbers of a log line."""
        seconds = max(self._seconds(), 1e-9)
        return {
            "loss": self.mean_loss(),
            "tokens_per_second": self._tokens / seconds,
            "padding": 1.0 - self._tokens / max(self._slots, 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint between two lines of the log."""
        state = {"loss": float(self.loss), "updates": self._updates, "tokens": self._tokens, "slots": self._slots}
        return {"meter": {**state, "seconds": self._seconds()}}

    def load_state_dict(self, state: dict[str, Any], origin: object = None) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            ValueError: values that no training has.
        """
        values = {name: amount(name, value) for name, value in state["meter"].items()}
        self.loss.fill_(values["loss"])
        self._updates = int(values["updates"])
        self._tokens, self._slots = int(values["tokens"]), int(values["slots"])
        self._started = time.perf_counter() - values["seconds"]


METRICS = "metrics.jsonl"
_SAMPLE = 200  # the most characters of a sample in the log; an untrained model may repeat one word without end


class Progress:
    """The progress bar (occasional lines without a terminal), metrics.jsonl, and TensorBoard if it is installed.

    Args:
        steps: the number of all updates.
        done: the number of updates done before; lines of metrics.jsonl for later updates are removed, because these
            updates are repeated.
        validated: the update of the last validation done before; lines for later validations are removed, too.
        run: the run folder.
        log: also gets each line; None: only the terminal gets it.

    Raises:
        ValueError: metrics.jsonl exists and is not a regular file.
    """

    def __init__(self, steps: int, done: int, validated: int, run: Path, log: RunLog | None = None) -> None:
        self._log, self._output = log, console.outlived_output()
        self._lacks_end = False  # a line of metrics.jsonl could not be written, or not to its end
        self._metrics = run / METRICS
        if os.path.lexists(self._metrics) and (self._metrics.is_symlink() or not self._metrics.is_file()):
            raise ValueError(f"expected {self._metrics} to be a file, got a link, a folder or a pipe: remove it")
        self._bar = console.progress_bar(total=steps, initial=done, unit="update", dynamic_ncols=True, leave=False)
        self._board = _tensorboard(run, done)
        self._steps, self._done = steps, done
        self._started = time.perf_counter()
        if self._metrics.is_file():
            lines = self._metrics.read_bytes().splitlines(keepends=True)
            earlier = [line for line in lines if _comes_before(line, done, validated)]
            if earlier != lines:
                write_atomically(self._metrics, b"".join(earlier))

    def advance(self, step: int) -> None:
        """Advances the progress bar."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs a line with the loss, the speed in real tokens, the padding, and the remaining time."""
        self.advance(step)
        speed, padding = f"{values['tokens_per_second']:,.0f}", f"{100 * values['padding']:.1f} %"
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed} real tokens/s, padding {padding}")
        seconds = (time.perf_counter() - self._started) / max(step - self._done, 1) * (self._steps - step)
        self.say(
            f"update {step:>6}/{self._steps}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
            f"grad norm {values['grad_norm']:.2f}  {speed:>8} real tokens/s  padding {padding}  "
            f"left {duration(seconds)}"
        )
        self._write(step, "train", values)

    def validation(self, step: int, scores: Scores, *, kept: bool, average: bool = False) -> None:
        """Logs the scores of a validation and a few samples.

        Args:
            step: the number of the update.
            scores: the scores of the update's model, or of the average that ends with the update.
            kept: whether the run folder holds this model from now on.
            average: whether the model is an average of several updates.
        """
        values: dict[str, Any] = {name: getattr(scores, name) for name in SHOWN if getattr(scores, name) is not None}
        parts = [SHOWN[name].format(value) for name, value in values.items()]
        if scores.translated:
            some = f"first {scores.translated:,} of {scores.lines:,}" if scores.translated < scores.lines else "all"
            parts.append(f"({some} lines translated)")
            values["translated"] = scores.translated
        self.say(f"validation {'of the average ' if average else ''}at {step}: " + "  ".join(parts))
        for sample in scores.samples:
            source, output, reference = (console.printable(text, _SAMPLE) for text in sample)
            self.say(f"  {source}\n    -> {output}" + ("" if output == reference else f"\n    ({reference})"))
        if scores.samples:
            values["samples"] = [list(sample) for sample in scores.samples]
        self._write(step, "average" if average else "validation", values | {"kept": kept} | scores.signatures)

    def close(self) -> None:
        """Removes the bar; finishes the TensorBoard file."""
        if self._bar is not None:
            self._bar.close()
        if self._board is not None:
            with contextlib.suppress(OSError):  # a full disk, for instance; the model matters more
                self._board.close()

    def say(self, line: str) -> None:
        """Prints a line on the terminal and adds it to the log."""
        if self._log is not None:
            self._log.write(line)
        if self._bar is not None:
            self._bar.write(line, file=self._output)
        else:
            print(line, file=self._output)
        self._output.flush()

    def _write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        line = json.dumps({"step": step, "kind": kind, **values}) + "\n"
        try:
            with open(self._metrics, "a", encoding="utf-8") as file:
                file.write("\n" + line if self._lacks_end else line)
            self._lacks_end = False
        except OSError as error:
            self._lacks_end = True
            logger.warning("%s lacks the line of update %d: %s", self._metrics, step, error.strerror)
        if self._board is not None:
            try:
                for name, value in values.items():
                    if isinstance(value, float):
                        self._board.add_scalar(f"{kind}/{name}", value, step)
            except OSError as error:
                self._board = None
                logger.warning("TensorBoard gets nothing from update %d on: %s", step, error.strerror)


class Silence:
    """The progress of a process other than rank 0, which logs nothing: each of its methods does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **options: None


def duration(seconds: float) -> str:
    """Formats seconds as "1:02:03", or as "2:03" under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _comes_before(line: bytes, done: int, validated: int) -> bool:
    """Returns whether a line of metrics.jsonl is complete and of an update that the run doesn't repeat."""
    try:
        values = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return False
    step = values.get("step") if isinstance(values, dict) else None
    if not isinstance(step, int):
        return False
    return step <= (done if values.get("kind") == "train" else min(done, validated))


def _tensorboard(run: Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run), purge_step=done + 1 if done else None)
