"""The training loop: batches in, a run folder out.

RUN/ holds model.safetensors, config.json and tokenizer.json (the result, loadable alone), config.yaml (the settings),
metrics.jsonl, and checkpoints/ to go on from. A run goes on as if it had never stopped: the order of the data is a
function of the seed, the learning rate one of the update, and the checkpoint has the rest.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fastformer.data import Batch, collate, plan_epoch
from fastformer.generation import Translator
from fastformer.models.pretrained import save_model
from fastformer.training.checkpoint import average_weights, checkpoints, latest_checkpoint, save_checkpoint
from fastformer.training.config import TrainConfig
from fastformer.training.evaluate import Scores, lengths_of, model_loss, negative_log_likelihood, translate_and_score
from fastformer.training.examples import Data
from fastformer.training.progress import Meter, Progress
from fastformer.training.schedule import learning_rate

logger = logging.getLogger("fastformer")

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains one model on one run folder.

    Args:
        config: the settings.
        run: the folder; made if it isn't there.
        model: what to train, freshly initialised; it has `loss` and `save_pretrained`.
        data: what to train on.
        device: where.
    """

    def __init__(self, config: TrainConfig, run: Path, model: nn.Module, data: Data, device: torch.device) -> None:
        self.config, self.run, self.data, self.device = config, run, data, device
        self.model = model.to(device)
        self.packed = config.batching == "packed"
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=device.type in ("cpu", "cuda"),
        )
        self.ema = AveragedModel(model, multi_avg_fn=self._move_average) if config.ema else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.lengths = lengths_of(data.train)
        self.step, self.epoch, self.batch = 0, 0, 0
        self.best, self.bad_validations = float("-inf"), 0
        self.trained_seconds = 0.0
        self.losses: list[tuple[int, float]] = []  # (update, mean loss since the last entry)
        self.meter = Meter()
        self._interrupted = False
        if config.checkpointing:
            stacks = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
            if not stacks:
                raise ValueError(f"expected checkpointing off for model {config.model}, which has nothing to recompute")
            for stack in stacks:
                stack.gradient_checkpointing = True  # type: ignore[assignment]

    def train(self) -> Scores:
        """Runs until the last update, the time limit, the end of patience, or Ctrl-C; saves, and says what came out.

        Raises:
            RuntimeError: a loss or gradient that is NaN or infinite; the last good checkpoint stays.
        """
        with contextlib.closing(Progress(self.config.steps, self.step, self.run)) as progress:
            with self._catch_interrupt():
                scores = self._run_updates(progress)
            self.save()
            if self._interrupted:
                logger.warning("interrupted: saved at update %d; go on with --resume", self.step)
            if scores is None or not self._interrupted:
                scores = self._validate_and_keep(progress, final=True)
                self.save()  # with the score to beat
        return scores

    def _run_updates(self, progress: Progress) -> Scores | None:
        """The loop. Returns the scores of the last validation in it, if there was one."""
        config, scores = self.config, None
        began = time.perf_counter() - self.trained_seconds
        self.model.train()
        # Asking whether all is finite waits for the device; a GPU is asked only before something is shown or saved.
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        for batches in self._updates():
            loss, norm = self._update(batches)
            self.step += 1
            # An overflow of fp16 is the scaler's business: it skips the update and lowers the scale.
            finite &= torch.isfinite(loss) & (torch.isfinite(norm) | self.scaler.is_enabled())
            self.meter.add(loss, batches)
            last = self.step >= config.steps or self._interrupted or self._out_of_time()
            showing, saving = last or self.step % config.log_every == 0, due(self.step, config.save_every)
            if (self.device.type == "cpu" or showing or saving) and not finite:
                raise RuntimeError(self._not_finite(float(loss), float(norm)))
            self.trained_seconds = time.perf_counter() - began
            if showing:
                self.losses.append((self.step, self.meter.mean_loss()))
                rate = self.optimizer.param_groups[0]["lr"]
                progress.log(self.step, {**self.meter.report(), "lr": rate, "grad_norm": float(norm)})
                self.meter = Meter()
            else:
                progress.advance(self.step)
            if due(self.step, config.val_every) and not last:
                scores = self._validate_and_keep(progress)
                self.model.train()
            if saving and not last:
                self.save()
            if last or self._out_of_patience():
                break
        return scores

    def _updates(self) -> Iterator[list[Batch]]:
        """The batches of each update, from where the run stands on."""
        group: list[Batch] = []
        while self.step < self.config.steps:
            plan = plan_epoch(
                self.lengths,
                max_tokens=self.config.max_tokens,
                batching=self.config.batching,
                seed=self.config.seed,
                epoch=self.epoch,
            )
            while self.batch < len(plan):
                examples = [self.data.train[i] for i in plan[self.batch]]
                group.append(collate(examples, packed=self.packed).to(self.device))
                self.batch += 1
                if len(group) == self.config.accumulate:
                    yield group
                    group = []
            self.epoch, self.batch = self.epoch + 1, 0

    def _update(self, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step over some batches. Returns the mean loss of a target token, and the gradient's norm."""
        config = self.config
        # Every token of the update weighs the same, in whichever batch it stands.
        tokens = sum(batch.num_target_tokens for batch in batches)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with self._autocast():
                loss = model_loss(
                    self.model, batch, label_smoothing=config.label_smoothing, smooth_others=config.smooth_others
                )
                loss = loss / tokens
            self.scaler.scale(loss).backward()
            total += loss.detach()
        rate = learning_rate(
            self.step + 1,
            schedule=config.schedule,
            lr=config.lr,
            warmup=config.warmup,
            steps=config.steps,
            d_model=self.model.config.d_model,  # type: ignore[union-attr, arg-type]
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip or float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return total, norm.detach()

    @torch.no_grad()
    def _move_average(self, averages: Any, weights: Any, _: Any) -> None:
        # The decay grows with the run, or the random weights of the beginning would stay in a short run's average.
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    def _autocast(self) -> contextlib.AbstractContextManager:
        dtype = AUTOCAST_DTYPES.get(self.config.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def validate(self, model: nn.Module) -> Scores:
        """The scores of a model on the validation data."""
        with self._autocast():
            nll = negative_log_likelihood(
                model, self.data.val, max_tokens=self.config.max_tokens, packed=self.packed, device=self.device
            )
        pairs = self.data.val_texts[: self.config.val_examples]
        if not pairs:
            characters, tokens = self.data.val_characters, int(lengths_of(self.data.val)[:, 1].sum())
            return Scores(nll, nll_per_character=nll * tokens / characters if characters else None)
        return translate_and_score(Translator(model, self.data.tokenizer), pairs, nll, self.config.samples)

    def _validate_and_keep(self, progress: Progress, final: bool = False) -> Scores:
        """Validates; the run folder gets the weights if they are the best so far."""
        model = self.ema.module if self.ema is not None else self.model
        if final and self.config.average_last > 1:
            model = copy.deepcopy(self.model)
            model.load_state_dict(average_weights(checkpoints(self.run)[-self.config.average_last :]))
        scores = self.validate(model)
        progress.validation(self.step, scores)
        if scores.best > self.best:
            self.best, self.bad_validations = scores.best, 0
            save_model(model, self.run, self.data.tokenizer)
        else:
            self.bad_validations += 1
        return scores

    def _out_of_time(self) -> bool:
        return bool(self.config.max_minutes) and self.trained_seconds > 60 * self.config.max_minutes

    def _out_of_patience(self) -> bool:
        return bool(self.config.patience) and self.bad_validations >= self.config.patience

    def _not_finite(self, loss: float, norm: float) -> str:
        what = "gradient's norm" if math.isfinite(loss) and not math.isfinite(norm) else "loss"
        found = checkpoints(self.run)
        kept = f"the last good checkpoint is {found[-1]}" if found else "no checkpoint was saved yet"
        return (
            f"the {what} became {loss if what == 'loss' else norm} at update {self.step}: training stopped and {kept}. "
            f"Go on with --resume and a lower --lr (now {self.config.lr}), a longer --warmup, a lower --clip, or "
            "--precision fp32"
        )

    @contextlib.contextmanager
    def _catch_interrupt(self) -> Iterator[None]:
        """Ctrl-C ends training after the update at work instead of in the middle of it; a second one ends at once."""

        def interrupt(signum: int, frame: Any) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

        try:
            previous = signal.signal(signal.SIGINT, interrupt)
        except ValueError:  # not the main thread: nobody sends signals there
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the training."""
        return self._interrupted

    def save(self) -> None:
        """Writes a checkpoint that `resume` goes on from."""
        state: dict[str, Any] = {
            "config": json.dumps(self.config.to_dict()),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "counters": {"step": self.step, "epoch": self.epoch, "batch": self.batch},
            "best": self.best,
            "bad_validations": self.bad_validations,
            "trained_seconds": self.trained_seconds,
            "losses": [list(entry) for entry in self.losses],
            "meter": self.meter.state_dict(),
            "data": self._data_fingerprint(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        save_checkpoint(self.run, self.step, state, keep_last=max(self.config.keep_last, self.config.average_last))

    def resume(self) -> bool:
        """Takes up the newest whole checkpoint of the run. False if there is none.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        found = latest_checkpoint(self.run)
        if found is None:
            return False
        path, state = found
        expected, got = (describe(fingerprint) for fingerprint in (state["data"], self._data_fingerprint()))
        if expected != got:
            raise ValueError(
                f"expected the training data that {path} is about, {expected}, got {got}: give the same files, or "
                "train anew in another folder"
            )
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"{path} is of another model than the settings describe: {error}") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_state_dict(state["ema"])
        counters = state["counters"]
        self.step, self.epoch, self.batch = counters["step"], counters["epoch"], counters["batch"]
        self.best, self.bad_validations = state["best"], state["bad_validations"]
        self.trained_seconds = state["trained_seconds"]
        self.losses = [(int(step), float(loss)) for step, loss in state["losses"]]
        self.meter.load_state_dict(state["meter"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        logger.info("going on from %s", path)
        return True

    def _data_fingerprint(self) -> list[int]:
        """Examples, and tokens of both sides: what the place in the data means something for."""
        return [len(self.lengths), *self.lengths.sum(0).tolist()]


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many updates (0 = never) happens at this one."""
    return every > 0 and step % every == 0


def describe(fingerprint: list[int]) -> str:
    """ "20,000 examples of 180,000 and 120,000 tokens"."""
    examples, source, target = fingerprint
    return f"{examples:,} examples of {source:,} and {target:,} tokens"
