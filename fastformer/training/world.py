"""The processes that train one model together. Nothing else here talks to torch.distributed.

`torchrun` starts the processes and sets the variables that identify each one (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT). Without these variables there is one process, and each method of its `World` returns its
argument unchanged. All processes must call every method in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from fastformer.engine.checks import is_sharded
from fastformer.nn.stack import Stack
from fastformer.training.contents import read_contents

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("fastformer")

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Words in gloo's errors about a process that ended or doesn't respond; NCCL's errors have a type of their own.
_SIGNS_OF_LOSS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")
_ROOM = 1 / 16  # the share of a process's memory that the gathered weights of a sharded model may use during an update


class OtherRankError(RuntimeError):
    """Another process failed; the message says which one, and why."""


class LostRanksError(RuntimeError):
    """Other processes ended, or didn't respond within `rank_timeout`."""


def is_launched() -> bool:
    """Returns whether torchrun, or another launcher that sets its variables, started this process."""
    return all(name in os.environ for name in _VARIABLES)


def restarts() -> int:
    """Returns how often torchrun restarted the processes, by this process's environment."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass
class Runner:
    """A model prepared for updates.

    Attributes:
        module: its `loss` has the signature of the model's.
        factor: the factor for losses if gradients are averaged over processes instead of added up.
        waiting: a context in which gradients stay in this process; the next backward outside of it adds up all.
    """

    module: Any
    factor: int = 1
    waiting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    shell: nn.Module | None = None  # with sharded weights: the model without its weights
    gathers: Literal["update", "layer"] | None = None  # how long sharded weights stay gathered: an update, or a layer

    def whole(self, model: nn.Module) -> nn.Module:
        """Gathers a model with all of its weights, for use outside of updates; all processes must call it together.

        Args:
            model: the module, or another one that was sharded in the same way.
        """
        if self.shell is None:
            return model
        places = {**dict(self.shell.named_parameters()), **dict(self.shell.named_buffers())}
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        memo: dict[int, Any] = {}
        for name, place in places.items():
            tensor: Any = tensors[name].detach()
            tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
            memo[id(place)] = nn.Parameter(tensor) if isinstance(place, nn.Parameter) else tensor.clone()
        copied = copy.deepcopy(self.shell, memo)
        return copied.train(model.training)


class _LossModule(nn.Module):
    """A module whose forward is a model's loss, for DistributedDataParallel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Computes the loss."""
        loss: Callable[..., Tensor] = self.model.loss  # type: ignore[assignment]
        return loss(*inputs, **options)


@dataclass
class World:
    """The processes of a training; by default this process alone.

    Attributes:
        rank: the rank of this process; only rank 0 writes files.
        size: the number of processes.
        local_rank: the rank of this process on its machine.
        is_launched: whether a launcher started the processes, even a single one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    is_launched: bool = False
    timeout: float = 600.0
    _host: dist.ProcessGroup | None = field(default=None, repr=False)  # the group for values on the CPU

    @classmethod
    def join(cls, device: str = "auto", timeout: float = 600.0) -> World:
        """Joins the processes that torchrun started; without torchrun, returns the world of this process alone.

        Args:
            device: the kind of device that they train on: "auto", "cpu", "cuda".
            timeout: seconds after which a process that waits for the others gives up.

        Raises:
            LostRanksError: other processes don't respond.
            ValueError: variables of the environment that make no sense; more processes on a machine than GPUs.
        """
        if not is_launched():
            return cls()
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
            store = _fresh_store(rank, size, limit)
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            world._host = dist.new_group(backend="gloo", timeout=limit)
        except (RuntimeError, OSError) as error:
            raise LostRanksError(
                f"rank {rank} of {size} found no others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
                f"within {timeout:g} seconds ({_first_line(error)}): are address and port right, and reachable?"
            ) from error
        if rank:  # only rank 0 logs messages below ERROR
            logger.setLevel(logging.ERROR)
        return world

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure the other processes may have ended, and destroying the group would wait for them.
        if self._host is not None and error is None:
            dist.destroy_process_group()
            self._host = None

    def device_of(self, device: torch.device) -> torch.device:
        """Returns the device of this process on a machine that may have several."""
        return torch.device("cuda", self.local_rank) if self.is_launched and device.type == "cuda" else device

    @contextlib.contextmanager
    def reporting_loss(self) -> Iterator[None]:
        """Turns the errors of any operation about lost processes into a readable one.

        Raises:
            LostRanksError: other processes ended or don't respond.
        """
        try:
            yield
        except RuntimeError as error:
            is_of_loss = isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS_OF_LOSS)
            if self.size == 1 or not is_of_loss or isinstance(error, LostRanksError):  # it says so already
                raise
            raise LostRanksError(
                f"rank {self.rank} lost the other processes: one ended, or didn't answer for {self.timeout:g} seconds "
                f"({_first_line(error)}). Its own message says why; continue from the last checkpoint with --resume"
            ) from error

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes, in the order of their ranks, in each process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.reporting_loss():
            dist.all_gather_object(values, value, group=self._host)
        return values

    def all_reduce_max(self, *values: float) -> list[float]:
        """Returns the maximum of each value over all processes."""
        if self.size == 1:
            return [*values]
        maxima = torch.tensor(values, dtype=torch.float64, device="cpu")
        with self.reporting_loss():
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._host)
        return maxima.tolist()

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over all processes in place; all get the same bits."""
        if self.size > 1:
            with self.reporting_loss():
                dist.all_reduce(tensor)
        return tensor

    def clip(self, parameters: Iterable[Tensor], most: float) -> Tensor:
        """Scales gradients down to a norm of at most `most`, as torch's `clip_grad_norm_` does. Returns their norm.

        For sharded parameters, each process scales its own parts. PyTorch's function works on DTensors, and each of
        their operations costs the CPU as much time as a small layer.
        """
        parameters = list(parameters)
        if not any(is_sharded(parameter) for parameter in parameters):
            return nn.utils.clip_grad_norm_(parameters, most)
        gradients = [local_part(each.grad.detach()) for each in parameters if each.grad is not None]
        norm = self.all_reduce_sum(torch.stack(torch._foreach_norm(gradients)).square().sum()).sqrt()
        torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """Runs an action in rank 0 only, and returns its result in all processes.

        Raises:
            OtherRankError: rank 0 failed; raised in the other processes, while rank 0 raises its own error.
        """
        if self.size == 1:
            return action()
        return self.gather(self.run_on_all(action if self.rank == 0 else lambda: None))[0]  # type: ignore[return-value]

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Runs an action in each process and returns its own result; if one process fails, all raise.

        Raises:
            OtherRankError: another process failed; that one raises its own error.
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

    def check_same(self, values: dict[str, object], advice: str) -> None:
        """Checks that values are the same in all processes.

        Args:
            values: this process's values by their names.
            advice: the remedy, for the message.

        Raises:
            ValueError: the values of a process differ from those of rank 0.
        """
        everything = self.gather(values)
        for name, expected in everything[0].items():
            others = [rank for rank, each in enumerate(everything) if each[name] != expected]
            if others:
                raise ValueError(
                    f"expected the same {name} in all processes, but rank{'s' if len(others) > 1 else ''} "
                    f"{', '.join(map(str, others))} and rank 0 have different ones: {advice}"
                )

    def check_accumulate(self, accumulate: int) -> None:
        """Checks that all processes get the same number of an update's batches.

        Raises:
            ValueError: the number of batches isn't divisible by that of processes.
        """
        if accumulate % self.size:
            few = "more processes than batches" if accumulate < self.size else "batches that don't divide"
            raise ValueError(
                f"expected accumulate, the batches of an update, to be a multiple of the {self.size} processes, got "
                f"{accumulate} ({few}): give --accumulate {self.size * -(-accumulate // self.size)}, or start fewer"
            )

    def wrap(self, model: nn.Module, sharding: str = "ddp", *others: nn.Module) -> Runner:
        """Prepares a model for updates: outside of `Runner.waiting`, gradients are added up over all processes.

        Args:
            model: the model, on this process's device, before its optimizer is made.
            sharding: "ddp": each process has all weights; "fsdp": a part of them.
            others: copies of the model, which are sharded in the same way.
        """
        if self.size == 1:
            return Runner(model)
        if sharding == "fsdp":
            return self._shard(model, *others)
        replica = DistributedDataParallel(_LossModule(model), broadcast_buffers=False, gradient_as_bucket_view=True)
        return Runner(SimpleNamespace(loss=replica), self.size, replica.no_sync)

    def _shard(self, model: nn.Module, *others: nn.Module) -> Runner:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import register_fsdp_forward_method

        memo: dict[int, Any] = {
            id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
            for weight in model.parameters()
        }
        shell = copy.deepcopy(model, memo)
        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (self.size,))
        size = sum(weight.nbytes for weight in model.parameters())
        # All processes gather weights together, so all must agree whether the memory of each suffices.
        by_layer = bool(self.all_reduce_max(size > _ROOM * _memory(device))[0])
        for each in (model, *others):
            _shard_weights(each, mesh, by_layer=by_layer)
        register_fsdp_forward_method(model, "loss")
        sharded: Any = model

        @contextlib.contextmanager
        def waiting() -> Iterator[None]:
            sharded.set_requires_gradient_sync(False)
            sharded.set_reshard_after_backward(by_layer)  # the next batch of the update needs the same weights
            try:
                yield
            finally:
                sharded.set_requires_gradient_sync(True)
                sharded.set_reshard_after_backward(True)

        return Runner(model, 1, waiting, shell, "layer" if by_layer else "update")


def _memory(device: torch.device) -> float:
    """Returns the bytes of a device's memory for a process; on a CPU, its share of the machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    pages, size = (os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE"))
    return pages * size / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class _ReduceScatter:
    """FSDP's reduce-scatter for gloo: each process receives its part from all others, and adds the parts in rank order.

    gloo's own reduce-scatter adds up the whole gradient in each process, and discards most of it.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Writes the sum of this process's part over all processes to `output_tensor`."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)


def _shard_weights(model: nn.Module, mesh: DeviceMesh, *, by_layer: bool) -> None:
    """Shards a model's weights.

    Args:
        model: the model to shard.
        mesh: the mesh of the processes.
        by_layer: shard each layer of each stack separately, so that its weights are whole only while it computes, and
            then the rest: the embeddings, which two sides may share. False: shard all weights together; they are whole
            during an update.
    """
    # Imported here, as everything of sharding is: it takes as long as the rest of a training's imports.
    from torch.distributed.fsdp import FSDPModule, fully_shard

    layers = [layer for stack in model.modules() if isinstance(stack, Stack) for layer in stack.layers]
    for layer in layers if by_layer else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all processes
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, FSDP's choice for fp32
            if mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]


def _fresh_store(rank: int, size: int, limit: datetime.timedelta) -> PrefixStore:
    """Returns a store for the processes' addresses, without those of earlier processes.

    A launcher that restarts the processes may keep its store, which still holds the addresses of the earlier ones, and
    machines may count restarts differently. So rank 0 invents a new prefix for all processes, and sends it to each
    process that asks for it under a name of its own.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    store = TCPStore(address, port, size, hosts, timeout=limit, wait_for_workers=False)
    prefix, ends = secrets.token_hex(8), time.monotonic() + limit.total_seconds()
    if rank:
        store.set(f"fastformer/asks/{rank}", prefix)
        name = store.get(f"fastformer/answers/{prefix}").decode()  # waits
        store.set(f"fastformer/{name}/{rank}", prefix)
        return PrefixStore(name, store)
    waiting = set(range(1, size))
    while waiting:
        for each in sorted(waiting):
            if store.check([f"fastformer/asks/{each}"]):  # perhaps of an earlier process: it gets an answer, too
                store.set(f"fastformer/answers/{store.get(f'fastformer/asks/{each}').decode()}", prefix)
            if store.check([f"fastformer/{prefix}/{each}"]):
                waiting.discard(each)
        if time.monotonic() > ends:
            raise TimeoutError(f"no sign of rank {', '.join(map(str, sorted(waiting)))}")
        time.sleep(0.01)
    return PrefixStore(prefix, store)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this process's part of a tensor."""
    parted: Any = tensor
    part: Tensor = parted.to_local() if is_sharded(tensor) else tensor
    return part


def part_like(whole: Tensor, other: Tensor) -> Tensor:
    """Cuts a whole tensor to the part that this process holds of another one of that shape, without communication."""
    if not is_sharded(other) or whole.shape != other.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    parted: Any = other
    return distribute_tensor(whole.to(other.device), parted.device_mesh, parted.placements, src_data_rank=None)


class PartsWriter:
    """Writes tensors of which each process holds a part, while training continues.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # A group of its own: its messages must not mix with those of the training, which continues meanwhile.
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=world.timeout))
        self._threads = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def begin(self, tensors: dict[str, Tensor], folder: Path, finish: Callable[[], object]) -> None:
        """Begins to write a copy of the tensors' current values.

        Args:
            tensors: the tensors by their names.
            folder: an empty folder that all processes can access.
            finish: the function that rank 0 calls when all parts are on the disk.

        Raises:
            OSError: an earlier write has failed.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.wait()
        copies = {name: _copied(tensor) for name, tensor in tensors.items()}
        writer = FileSystemWriter(folder, sync_files=True)
        saving: Any = async_save(copies, storage_writer=writer, process_group=self._group)

        def complete() -> None:
            try:
                saving.result()
            # DCP gathers the failures of all processes into one that is a BaseException. A full disk is an error of
            # torch's archive in it, that writes end elsewhere than they should.
            except (Exception, CheckpointException) as error:
                raise OSError(f"could not write {folder}: {_cause(error)}; free some space") from error
            if self._world.rank == 0:
                finish()

        self._pending = self._threads.submit(complete)

    def wait(self) -> None:
        """Waits until the write that `begin` started is complete.

        Raises:
            OSError: the write failed; earlier checkpoints are undamaged.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._world.run_on_all(pending.result)


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # by rank: (an error, its traceback)
    return str(next(iter(failures.values()))[0]) if failures else _first_line(error)


def _copied(tensor: Tensor) -> Tensor:
    """Copies a tensor to the CPU."""
    if not is_sharded(tensor):
        return tensor.detach().cpu().clone()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    parted: Any = tensor
    mesh = parted.device_mesh if tensor.device.type == "cpu" else init_device_mesh("cpu", (parted.device_mesh.size(),))
    local = parted.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(
        local, mesh, parted.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def read_parts(folder: Path) -> dict[str, Tensor]:
    """Reads all tensors that a `PartsWriter` wrote into a folder, whole, in any number of processes.

    Raises:
        ValueError: the folder is damaged, or holds other data.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        entries = read_contents(folder).state_dict_metadata
        if not all(isinstance(entry, TensorStorageMetadata) for entry in entries.values()):
            raise ValueError("something that is not a tensor")
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") for name, entry in entries.items()
        }
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    except Exception as error:  # the reader passes on the errors of unpicklers and files
        raise ValueError(f"{folder} is damaged ({_first_line(error)})") from error
    return tensors


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
