"""The training loop: updates, validations, checkpoints, from top to bottom."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fastformer.checkpoints.lock import RunLock
from fastformer.checkpoints.training_state import (
    average_weights,
    begin_parts,
    checkpoints,
    describe_average,
    finish_parts,
    rewrite_rest,
    save_checkpoint,
)
from fastformer.data import Batch, collate
from fastformer.data.order import Order
from fastformer.graphs import Graphs
from fastformer.models.pretrained import save_model
from fastformer.models.weights import WEIGHTS, read_notes
from fastformer.nn.copied_weights import copied_weights
from fastformer.special_ids import SpecialIds
from fastformer.training.best import Best, choose_measure
from fastformer.training.config import TrainConfig
from fastformer.training.evaluate import Scores, model_loss
from fastformer.training.examples import TrainingData
from fastformer.training.graph_updates import (
    GraphUpdates,
    has_graphs,
    pad_batch,
    size_of,
    wants_graphs,
    why_uncapturable,
)
from fastformer.training.interrupts import Interrupted, Interrupts
from fastformer.training.progress import Meter, Progress, Silence
from fastformer.training.run_log import RunLog
from fastformer.training.schedule import rate_of
from fastformer.training.state import (
    Component,
    Identity,
    Optimization,
    Position,
    RandomState,
    Weights,
    fingerprint,
    restore,
    split,
)
from fastformer.training.updates import Update, dropout_seed, places_of
from fastformer.training.validation import ValidationPart, scores_of, validate_part
from fastformer.training.world import PartsWriter, World, local_part, read_parts

logger = logging.getLogger("fastformer")

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DivergedError(RuntimeError):
    """The loss or a gradient is NaN or infinite; the message suggests remedies."""


class Trainer:
    """Trains one model on one run folder.

    Args:
        config: the settings.
        run: the folder, which exists.
        model: the model to train, freshly initialised; it has `loss` and a `config`.
        data: the data to train on.
        device: the device to train on.
        lock: the lock of the run folder; by default one that is acquired when training starts.
        interrupts: catches signals; by default this trainer catches them while it trains.
        log: the log of the run; by default one of messages from now on.
        world: the processes that train together, this one among them; by default it is alone.

    Raises:
        ValueError: settings that this model can't take.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        model: nn.Module,
        data: TrainingData,
        device: torch.device,
        *,
        lock: RunLock | None = None,
        interrupts: Interrupts | None = None,
        log: RunLog | None = None,
        world: World | None = None,
    ) -> None:
        self.log, self.world = log or RunLog(run), world or World()
        self.config, self.run, self.data, self.device = config, run, data, device
        self.special_ids = SpecialIds.of(model.config)
        self.special_ids.check_tokenizer(data.tokenizer.special_ids, "the model")
        self.lock, self.interrupts = lock or RunLock(run), interrupts or Interrupts()
        self.signum: int | None = None  # the number of the signal on which all processes have agreed
        self.model = model.to(device)
        self.packed = config.batching == "packed"
        if config.sharding == "fsdp" and config.precision == "fp16" and self.world.size > 1:
            raise ValueError("expected precision bf16 or fp32 for sharding fsdp, got fp16: its scale is not shared")
        if config.model == "lstm" and config.precision == "fp16" and device.type == "cpu":
            raise ValueError("expected precision bf16 or fp32 for an LSTM on a CPU, got fp16: PyTorch has no such LSTM")
        self.ema = AveragedModel(model) if config.ema else None
        averages = [] if self.ema is None else [self.ema.module]
        self.runner = self.world.wrap(self.model, config.sharding, *averages)
        self.parts = PartsWriter(self.world) if self.runner.shell is not None else None
        self.saved_step: int | None = None  # the update of the last checkpoint in parts
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=device.type in ("cpu", "cuda"),
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        # Results of updates on the device, at the addresses that graphs write to.
        self.loss, self.norm = torch.zeros((), device=device), torch.zeros((), device=device)
        # Reading this flag waits for the device, so a GPU's is read only before results are shown or saved.
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.meter = Meter(device)
        self.optimization = Optimization(self.optimizer, self.scaler, config.lr)
        self.graphs: GraphUpdates | None = None
        if wants_graphs(config, model, device, self.world.size):
            self._begin_graphs()
        self.order = Order(
            data.train,
            max_tokens=config.max_tokens,
            batching=config.batching,
            seed=config.seed,
            weights=data.weights,
        )
        self.identity = Identity(fingerprint(data.train), self.special_ids, config.data_flags())
        self.pairs = data.val_texts[: config.val_examples]
        self.best = Best(
            choose_measure(config, [target for _, target in self.pairs]),
            str(fingerprint(data.val)["sha256"]),
            len(self.pairs),
        )
        self.position = Position(config.accumulate)
        weights = Weights(self.model, self.ema, self.position)
        self.components: tuple[Component, ...] = (
            self.identity, weights, self.optimization, self.position, self.best, self.meter, RandomState(device)
        )  # fmt: skip
        if config.checkpointing:
            stacks = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
            if not stacks:
                raise ValueError(f"expected checkpointing off for model {config.model}, which has nothing to recompute")
            for stack in stacks:
                stack.gradient_checkpointing = True  # type: ignore[assignment]

    def train(self) -> Scores | None:
        """Trains until the last update, the time limit, the end of patience, or a signal; saves, and logs the result.

        Returns:
            The scores of the last validation; None without one, as after a signal or if nothing was left to do.

        Raises:
            DivergedError: a loss or gradient that is NaN or infinite; the last good checkpoint stays.
            ValueError: another process trains in the folder.
            Interrupted: a second signal.
        """
        if self.position.finished and (end := self._end()):
            logger.info("nothing is left to do in %s: %s", self.run, end)
            return None
        self.position.finished = False
        if self.graphs is not None and self.graphs.is_wanted:
            self._check_capturable()
        speaks = self.world.rank == 0
        with contextlib.ExitStack() as stack:
            for each in (self.lock, self.interrupts, self.interrupts.held(), self.log):
                if speaks or each not in (self.lock, self.log):
                    stack.enter_context(each)
            progress: Progress | Silence = Silence()
            if speaks:
                progress = Progress(self.config.steps, self.step, self.position.validated, self.run, self.log)
            stack.callback(progress.close)
            stack.enter_context(self.world.reporting_loss())
            scores = self._run_updates(progress)
            return self._finish(progress, scores)

    def _run_updates(self, progress: Progress | Silence) -> Scores | None:
        """Runs the loop of updates; returns the scores of its last validation, or None."""
        config, scores = self.config, None
        self.finite.fill_(True)
        began = time.perf_counter() - self.position.trained_seconds
        if self.step < config.steps and due(self.step, config.val_every) and self.position.validated != self.step:
            scores = self._validate_and_keep(progress)  # the run was ended before this one
        if self._end():
            return scores
        self.model.train()
        for batches in self.updates():
            loss, norm = self.update(batches)
            self.position.step += 1
            self.position.trained_seconds = time.perf_counter() - began
            self.meter.count(batches)
            if self.graphs is None:  # a graph has called `note`
                self.note(loss, norm)
            last = self._end() is not None
            showing, saving = (
                last or due(self.step, config.log_every),
                due(self.step, config.save_every),
            )
            validating = due(self.step, config.val_every) and not last
            if (self.device.type == "cpu" or showing or saving or validating) and not self.finite:
                self._wait_for_parts()  # a checkpoint that is still being written is good
                raise DivergedError(self._not_finite(float(loss), float(norm)))
            if showing:
                self.position.losses.append((self.step, self.meter.mean_loss()))
                progress.log(self.step, {**self.meter.report(), "lr": self.optimization.rate, "grad_norm": float(norm)})
                self.meter.reset()
            else:
                progress.advance(self.step)
            if validating:
                with self.meter.paused():
                    # A run that saves its best model must also be able to resume from that update.
                    if not self.world.run_on_rank0(lambda: checkpoints(self.run)):
                        self.save()
                        self._wait_for_parts()
                    scores = self._validate_and_keep(progress) or scores
                self.model.train()
            if saving and not last:
                with self.meter.paused():
                    self.save()
            # Without a validation or a checkpoint in between, the next update's question comes soon enough.
            if last or ((validating or saving) and self._end()):
                break
        return scores

    def _finish(self, progress: Progress | Silence, scores: Scores | None) -> Scores | None:
        """Saves; then, unless a signal ended the run, validates if the last update wasn't validated, and averages."""
        self.save()
        if not self._is_signalled() and self.position.validated != self.step:
            scores = self._validate_and_keep(progress)
        if not self._is_signalled() and self.config.average_last > 1:
            scores = self._average(progress) or scores
        if self._is_signalled():
            if not self.world.run_on_rank0((self.run / WEIGHTS).exists):
                self._save_model(self._model(), "not validated")
            self._wait_for_parts()
            logger.warning("%s: saved at update %d; continue with --resume", self.interrupts.name, self.step)
            return scores
        self.position.finished = True
        self.save()  # with the score to beat
        self._wait_for_parts()
        if self.config.report:
            from fastformer.training.report import write_report

            progress.say(f"wrote {self.world.run_on_rank0(lambda: write_report(self.run))}")
        best = self.best.record
        # One process looks: a file system on a network may show others an older folder.
        averaged = self.config.average_last > 1 and self.world.run_on_rank0(lambda: len(checkpoints(self.run))) > 1
        if best is not None and not averaged:
            best_update, shown = f"update {best.step}", best.show(self.best.measure)
            # `fastformer average`, or an earlier average_last, may have left another model there.
            saved = self.world.run_on_rank0(lambda: read_notes(self.run)).get("model", best_update)
            single = "" if saved == best_update else f"; the best single update, {best.step}"
            progress.say(f"the model in {self.run} is {saved}{single}: {shown}")
        return scores

    def updates(self) -> Iterator[Update]:
        """Yields the batches of each update that this process computes, from the run's current position on."""
        group: list[list[int]] = []
        position = self.position
        while self.step < self.config.steps:
            windows = self.order.num_windows
            plan = self.order.plan(position.epoch, position.window) if position.window < windows else []
            if position.window >= windows or position.batch > len(plan):
                raise ValueError(
                    f"expected at most {len(plan)} batches of epoch {position.epoch}, window {position.window} of "
                    f"{windows}, to be done, as it has, got {position.batch} batches: the checkpoint that training "
                    "went on from is of other data"
                )
            while position.batch < len(plan):
                group.append(plan[position.batch])
                position.batch += 1
                if len(group) == self.config.accumulate:
                    yield self._share_of(group)
                    group = []
            position.window, position.batch = position.window + 1, 0
            if position.window == windows:
                position.epoch, position.window = position.epoch + 1, 0

    def _share_of(self, group: list[list[int]]) -> Update:
        """Builds this process's batches of an update from the plan's lists of examples."""
        world, lengths, padded = self.world, [self.order.lengths(indices) for indices in group], not self.packed
        mine = places_of(lengths, self.model.config, world.rank, world.size, padded=padded)
        batches = self.place([
            collate([self.data.train[i] for i in group[place]], packed=self.packed, special_ids=self.special_ids)
            for place in mine
        ])  # fmt: skip
        return Update(batches) if world.size == 1 else Update(batches, mine, lengths, padded=padded)

    def place(self, batches: list[Batch]) -> list[Batch]:
        """Copies batches to the device, or, for graphs, pads them to a common size on the CPU."""
        if self.graphs is None:
            return [batch.to(self.device) for batch in batches]
        size = size_of(batches, self.config.max_tokens, self.model.config.max_len)  # type: ignore[union-attr, arg-type]
        return [pad_batch(batch, size, self.special_ids.pad) for batch in batches]

    def update(self, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one optimizer step over some batches; returns the mean loss of a target token and the gradient norm."""
        config, update = self.config, batches if isinstance(batches, Update) else Update(batches)
        # Every token of the update has the same weight, regardless of its batch and process.
        tokens = update.num_target_tokens
        self.optimization.rate = rate_of(config, self.step + 1, self.model.config.d_model)  # type: ignore[union-attr, arg-type]
        if self.graphs is not None:
            self.graphs(batches, [tokens, self.optimization.rate, self._share()])
            return self.loss, self.norm
        loss, norm = self._descend(update, tokens, self.optimization.rate)
        self._move_average(self._share())
        return loss, norm

    def _descend(
        self, batches: list[Batch], tokens: int | torch.Tensor, rate: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs forward, backward, clipping and the optimizer, never waiting for the device; returns loss and norm."""
        config, runner = self.config, self.runner
        total = torch.zeros((), device=self.device)
        places = batches.places if isinstance(batches, Update) else range(len(batches))
        for i, (place, batch) in enumerate(zip(places, batches, strict=True)):
            if config.dropout_seeds == "batch":
                torch.manual_seed(dropout_seed(config.seed, self.step, place))
            with contextlib.nullcontext() if i + 1 == len(batches) else runner.waiting():
                with self._autocast(), self._copied_weights():
                    loss = model_loss(
                        runner.module, batch, label_smoothing=config.label_smoothing, smooth_others=config.smooth_others
                    )
                    loss = loss / tokens
                total += loss.detach()
                torch.autograd.backward(self.scaler.scale(loss if runner.factor == 1 else loss * runner.factor))
        self.world.all_reduce_sum(total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.unscale_(self.optimizer)
        norm = self.world.clip(self.model.parameters(), config.clip or float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm.detach()

    def note(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Adds an update to the sums and the flag on the device."""
        # The scaler handles overflows of fp16: it skips the update and lowers the scale.
        self.finite &= torch.isfinite(loss) & (torch.isfinite(norm) | self.scaler.is_enabled())
        self.meter.loss += loss

    def _begin_graphs(self) -> None:
        """Starts without graphs; existing ones hold old addresses of weights and of the optimizer's state."""
        self.graphs = GraphUpdates(
            Graphs(self.device), self._update_in_place, self.model, self.optimizer, self._check_capturable,
            is_wanted=self.config.cuda_graphs is True,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["capturable"] = True

    def _check_capturable(self) -> None:
        reason = why_uncapturable(self.model, self.optimizer)
        if reason is not None:
            raise ValueError(
                f"expected a model whose updates can be CUDA graphs, got {reason}, which no replay would know of: take "
                "it away, or set cuda_graphs to false"
            )

    def _update_in_place(self, batches: list[Batch], numbers: torch.Tensor) -> None:
        """Runs an update that a graph can capture: its inputs and results are tensors at fixed addresses."""
        tokens, rate, share = numbers.unbind()
        loss, norm = self._descend(batches, tokens, rate)
        self._move_average(share)
        self.loss.copy_(loss)
        self.norm.copy_(norm)
        self.note(loss, norm)

    def _share(self) -> float:
        """Returns the share by which this update moves the running average towards the weights; 1.0 copies them."""
        # The share decreases over the run; else the random initial weights would stay in a short run's average.
        return max(1.0 - self.config.ema, 9 / (10 + self.step)) if self.step else 1.0

    @torch.no_grad()
    def _move_average(self, share: float | torch.Tensor) -> None:
        # AveragedModel.update_parameters copies a counter to the GPU and waits for it.
        if self.ema is None:
            return
        averages = [local_part(average) for average in self.ema.module.parameters()]
        weights = [local_part(weight) for weight in self.model.parameters()]
        if isinstance(share, float):
            torch._foreach_lerp_(averages, weights, share)
        else:
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight, share)
        for kept, buffer in zip(self.ema.module.buffers(), self.model.buffers(), strict=True):
            kept.copy_(buffer)

    def _model(self) -> nn.Module:
        """Returns the model to validate and save, with all of its weights: the running average if the run has one."""
        return self.runner.whole(self.model if self.ema is None else self.ema.module)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        dtype = AUTOCAST_DTYPES.get(self.config.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _copied_weights(self) -> contextlib.AbstractContextManager[object]:
        # Without a launch for each, as on a CPU, copies gain nothing. Several processes send gradients as they come.
        # The LSTM is made of PyTorch's modules, which know of no copies.
        wanted = has_graphs(self.device) and self.world.size == 1 and self.config.model != "lstm"
        return copied_weights(self.model) if wanted else contextlib.nullcontext()

    def validate(self, model: nn.Module) -> Scores:
        """Computes the scores of a model on the validation data."""
        return scores_of([self._validate_part(model)], self.data, self.pairs, self.config)

    def _validate_part(self, model: nn.Module) -> ValidationPart:
        with self._autocast():
            return validate_part(
                model, self.data, self.pairs, self.config, self.device, self.world.rank, self.world.size
            )

    def _validate_and_keep(self, progress: Progress | Silence) -> Scores | None:
        """Validates, and saves the weights in the run folder if they are the best so far; None means a signal."""
        model = self._model()
        scores = self._validate_unless_interrupted(model)
        if scores is None:
            return None
        self.position.validated = self.step
        kept = self.best.add(self.step, scores)
        progress.validation(self.step, scores, kept=kept)
        record, measure = self.best.record, self.best.measure
        assert record is not None
        if kept:
            self._save_model(model, record.show(measure))
            progress.say(f"kept update {self.step}: {record.show(measure)}; best so far")
        else:
            progress.say(f"not kept: update {record.step} is better ({record.show(measure)})")
        return scores

    def _average(self, progress: Progress | Silence) -> Scores | None:
        """Saves the average of the last checkpoints in the run folder, even if it is worse than a single update."""
        self._wait_for_parts()
        paths = self.world.run_on_rank0(lambda: checkpoints(self.run)[-self.config.average_last :])
        if len(paths) == 1:
            logger.warning("average_last %d: there is one checkpoint alone to average", self.config.average_last)
            return None
        model = copy.deepcopy(self.runner.whole(self.model))
        model.load_state_dict(self.world.run_on_all(lambda: average_weights(paths, read_parts)))
        scores = self._validate_unless_interrupted(model)
        if scores is None:
            return None
        progress.validation(self.step, scores, kept=True, average=True)
        best, shown = self.best.record, self.best.of(self.step, scores).show(self.best.measure)
        what = describe_average(paths)
        self._save_model(model, shown, what)
        single = f"; the best single update, {best.step}: {best.show(self.best.measure)}" if best else ""
        progress.say(f"the model in {self.run} is {what}: {shown}{single}")
        return scores

    def _validate_unless_interrupted(self, model: nn.Module) -> Scores | None:
        # A validation may take minutes and can be repeated, so a signal aborts it.
        part: ValidationPart | None = None
        try:
            with self.interrupts.at_once():
                if self.world.size == 1:
                    return self.validate(model)
                part = self._validate_part(model)
        except Interrupted:
            if self.world.size == 1:
                return None
        parts = self.world.gather(part)
        whole = [each for each in parts if each is not None]
        if len(whole) < len(parts):  # one process was interrupted, so all stop
            self._is_signalled()
            return None
        return self.world.run_on_rank0(lambda: scores_of(whole, self.data, self.pairs, self.config))

    def _wait_for_parts(self) -> None:
        if self.parts is not None:
            self.parts.wait()

    def _save_model(self, model: nn.Module, scores: str, what: str | None = None) -> None:
        notes = {"model": what or f"update {self.step}", "scores": scores}
        self.world.run_on_rank0(lambda: save_model(model, self.run, self.data.tokenizer, notes=notes))

    def _is_signalled(self) -> bool:
        """Returns whether a signal ends the training; all processes return the same."""
        return self._agree()[0]

    def _agree(self) -> tuple[bool, bool]:
        """Returns whether a signal reached any process, and whether any process is past the time limit."""
        minutes = self.config.max_minutes
        late = bool(minutes and self.position.trained_seconds > 60 * minutes)
        signum, late_somewhere = self.world.all_reduce_max(self.interrupts.signum or 0, late)
        if signum and self.signum is None:
            self.signum = self.interrupts.signum = self.interrupts.signum or int(signum)
        return self.signum is not None, bool(late_somewhere)

    def _end(self) -> str | None:
        """Returns the reason to end the training, or None to continue."""
        is_signalled, is_late = self._agree()
        if is_signalled:
            return self.interrupts.name
        if self.step >= self.config.steps:
            return f"update {self.step} of {self.config.steps} is done; to continue, give more --steps"
        if is_late:
            return f"it trained for its {self.config.max_minutes:g} minutes; to continue, give more --max_minutes"
        if self.config.patience and self.best.bad_validations >= self.config.patience:
            return f"{self.best.bad_validations} validations brought nothing better; to continue, give more --patience"
        return None

    def _not_finite(self, loss: float, norm: float) -> str:
        what = "gradient's norm" if math.isfinite(loss) and not math.isfinite(norm) else "loss"
        paths = checkpoints(self.run)
        last = f"the last good checkpoint is {paths[-1]}" if paths else "no checkpoint was saved yet"
        again = "Go on with --resume and" if paths else "Train again with"
        return (
            f"the {what} became {loss if what == 'loss' else norm} at update {self.step}: training stopped and {last}. "
            f"{again} a lower --lr (now {self.config.lr}), a longer --warmup, a lower --clip, or --precision fp32"
        )

    @property
    def step(self) -> int:
        """The number of updates that are done."""
        return self.position.step

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the training."""
        return self.signum is not None

    def save(self) -> None:
        """Writes a checkpoint to resume from; the parts of sharded weights are written while training continues."""
        every, keep_last = self.config.save_every, max(self.config.keep_last, self.config.average_last)

        def regular(step: int) -> bool:
            return due(step, every) or not every

        def write() -> None:
            save_checkpoint(self.run, self.step, self.state_dict(), keep_last=keep_last, regular=regular)

        if self.parts is None:
            self.world.run_on_rank0(write)
            return
        step, (tensors, rest) = self.step, split(self.state_dict())
        if self.saved_step == step:  # the checkpoint on the disk has these weights
            self.parts.wait()
            self.world.run_on_rank0(lambda: rewrite_rest(checkpoints(self.run)[-1], rest))
            return
        folder = self.world.run_on_rank0(lambda: begin_parts(self.run, step))
        self.saved_step = None  # until it has begun
        self.parts.begin(
            tensors, folder, lambda: finish_parts(folder, self.run, step, rest, keep_last=keep_last, regular=regular)
        )
        self.saved_step = step

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that training needs to resume as if it had never stopped: tensors and plain values."""
        state = {"config": json.dumps(self.config.to_dict())}
        for component in self.components:
            state |= component.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], origin: object = "the checkpoint") -> None:
        """Restores a state that `state_dict` returned.

        Args:
            state: the state of a run with the same model, data and order.
            origin: the source of the state, for messages.

        Raises:
            ValueError: the state is of other data or of another model, or incomplete.
        """
        restore(self.components, state, origin)
        if self.graphs is not None:
            self._begin_graphs()


def due(step: int, every: int) -> bool:
    """Returns whether an action with a period in updates (0 = never) is due at this update."""
    return every > 0 and step % every == 0
