"""The processes that train one model together. Nothing else here talks to torch.distributed.

`torchrun` starts the processes and says to each which one it is (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT). Without these variables there is one process, and each method of its `World` returns what it was given.
Every method is called by all processes in the same order.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("fastformer")

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Words in gloo's errors about a process that is gone or silent; NCCL's errors have a type of their own.
_SIGNS_OF_LOSS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")


class OtherRankError(RuntimeError):
    """Another process failed; the message says which one, and why."""


class LostRanksError(RuntimeError):
    """Other processes are gone, or were silent for longer than `rank_timeout`."""


def is_launched() -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process."""
    return all(name in os.environ for name in _VARIABLES)


def restarts() -> int:
    """How often torchrun started the processes anew, as this process knows it."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass
class Runner:
    """A model as an update calls it.

    Attributes:
        module: its `loss` takes what the model's takes.
        factor: multiplies a loss if gradients are averaged over processes instead of added up.
        waiting: gradients that are computed inside stay in this process, until one that isn't.
    """

    module: Any
    factor: int = 1
    waiting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class _Loss(nn.Module):
    """A model's loss as the forward of a module, which is what DistributedDataParallel takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """The loss."""
        loss: Callable[..., Tensor] = self.model.loss  # type: ignore[assignment]
        return loss(*inputs, **options)


@dataclass
class _Callable:
    """Something whose `loss` is a call of a module."""

    loss: nn.Module


@dataclass
class World:
    """The processes of a training.

    Attributes:
        rank: which one this is; 0 alone writes files.
        size: how many there are.
        local_rank: which one this is on its machine.
        is_launched: whether a launcher started them, be it one process alone.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    is_launched: bool = False
    timeout: float = 600.0
    _host: Any = field(default=None, repr=False)  # the group for values that are on no device

    @classmethod
    def none(cls) -> World:
        """This process alone."""
        return cls()

    @classmethod
    def join(cls, device: str = "auto", timeout: float = 600.0) -> World:
        """The processes that torchrun started; this process alone without it.

        Args:
            device: what they train on: "auto", "cpu", "cuda".
            timeout: seconds after which a process that waits for the others gives up.

        Raises:
            LostRanksError: others don't answer.
            ValueError: variables of the environment that make no sense; more processes on a machine than GPUs.
        """
        if not is_launched():
            return cls.none()
        try:
            rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"expected RANK, WORLD_SIZE and LOCAL_RANK in the environment as torchrun sets them, got {error}"
            ) from error
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if on_gpu:
            if local >= torch.cuda.device_count():
                raise ValueError(
                    f"expected at most {torch.cuda.device_count()} processes on this machine, one for each GPU, got "
                    f"local rank {local}: start fewer, or give --device cpu"
                )
            torch.cuda.set_device(local)
        world = cls(rank, size, local, True, timeout)
        limit = datetime.timedelta(seconds=timeout)
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=limit)
            world._host = dist.new_group(backend="gloo", timeout=limit)
        except (RuntimeError, OSError) as error:
            raise LostRanksError(
                f"rank {rank} of {size} found no others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
                f"within {timeout:g} seconds ({_first_line(error)}): are address and port right, and reachable?"
            ) from error
        if rank:  # messages of all processes appear once
            logger.setLevel(logging.ERROR)
        return world

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure the others may be gone, and saying goodbye to them would wait for an answer.
        if self._host is not None and error is None:
            dist.destroy_process_group()
            self._host = None

    def device_of(self, device: torch.device) -> torch.device:
        """The device of this process, where its machine has several."""
        return torch.device("cuda", self.local_rank) if self.is_launched and device.type == "cuda" else device

    @contextlib.contextmanager
    def reporting_loss(self) -> Iterator[None]:
        """Says in plain words that other processes are gone, whatever operation noticed.

        Raises:
            LostRanksError: they are.
        """
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_of_lost_ranks(error):
                raise
            raise LostRanksError(
                f"rank {self.rank} lost the other processes: one ended, or didn't answer for {self.timeout:g} seconds "
                f"({_first_line(error)}). Its own message says why; go on from the last checkpoint with --resume"
            ) from error

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of their ranks, for each of them."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.reporting_loss():
            dist.all_gather_object(found, value, group=self._host)
        return found

    def most(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        if self.size == 1:
            return [*values]
        found = torch.tensor(values, dtype=torch.float64, device="cpu")
        with self.reporting_loss():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._host)
        return found.tolist()

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes, in its place; all get the same bits."""
        if self.size > 1:
            with self.reporting_loss():
                dist.all_reduce(tensor)
        return tensor

    def first(self, action: Callable[[], T]) -> T:
        """Rank 0 does something; its result reaches all processes, and so does its failure.

        Raises:
            OtherRankError: in the others, where rank 0 failed; it raises its own error.
        """
        if self.size == 1:
            return action()
        return self.gather(self.each(action if self.rank == 0 else lambda: None))[0]  # type: ignore[return-value]

    def each(self, action: Callable[[], T]) -> T:
        """Each process does something and gets its own result, but a failure of one is a failure of all.

        Raises:
            OtherRankError: where others failed; they raise their own errors.
        """
        if self.size == 1:
            return action()
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        problems = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise OtherRankError(f"rank {rank} failed: {problem}")
        return result

    def check_same(self, found: dict[str, object], advice: str) -> None:
        """Holds what this process found against what the others did.

        Args:
            found: what has to be equal, by its name.
            advice: how to mend it.

        Raises:
            ValueError: a process found something else than rank 0.
        """
        everything = self.gather(found)
        for name, expected in everything[0].items():
            others = [rank for rank, each in enumerate(everything) if each[name] != expected]
            if others:
                raise ValueError(
                    f"expected the same {name} in all processes, but rank{'s' if len(others) > 1 else ''} "
                    f"{', '.join(map(str, others))} and rank 0 have different ones: {advice}"
                )

    def check_accumulate(self, accumulate: int) -> None:
        """Makes sure that all processes get as many batches of an update.

        Raises:
            ValueError: they don't.
        """
        if accumulate % self.size:
            few = "more processes than batches" if accumulate < self.size else "batches that don't divide"
            raise ValueError(
                f"expected accumulate, the batches of an update, to be a multiple of the {self.size} processes, got "
                f"{accumulate} ({few}): give --accumulate {self.size * -(-accumulate // self.size)}, or start fewer"
            )

    def wrap(self, model: nn.Module) -> Runner:
        """A model as an update calls it: gradients of all processes are added up where one doesn't wait."""
        if self.size == 1:
            return Runner(model)
        replica = DistributedDataParallel(_Loss(model), broadcast_buffers=False, gradient_as_bucket_view=True)
        return Runner(_Callable(replica), self.size, replica.no_sync)


def _is_of_lost_ranks(error: BaseException) -> bool:
    kinds = tuple(getattr(dist, name) for name in ("DistError", "DistBackendError") if hasattr(dist, name))
    return isinstance(error, kinds) or any(sign in str(error) for sign in _SIGNS_OF_LOSS)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
