"""The processes that train one model together. Nothing else here talks to torch.distributed.

`torchrun` starts the processes and says to each which one it is (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT). Without these variables there is one process, and each method of its `World` returns what it was given.
Every method is called by all processes in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import os
import pickle
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from fastformer.nn import guards
from fastformer.nn.stack import Stack

logger = logging.getLogger("fastformer")

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Words in gloo's errors about a process that is gone or silent; NCCL's errors have a type of their own.
_SIGNS_OF_LOSS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")
_ROOM = 1 / 16  # of a process's memory, which the whole weights of a sharded model may take during an update


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
    shell: nn.Module | None = None  # of sharded weights, the model without them
    gathers: Literal["update", "layer"] | None = None  # how long sharded weights stay whole: an update, or a layer

    def whole(self, model: nn.Module) -> nn.Module:
        """A model with all of its weights, for use outside of updates; all processes ask for it together.

        Args:
            model: the module, or one that was sharded as it was.
        """
        if self.shell is None:
            return model
        places = {**dict(self.shell.named_parameters()), **dict(self.shell.named_buffers())}
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        memo: dict[int, Any] = {}
        for name, place in places.items():
            tensor = whole_tensor(tensors[name].detach())
            memo[id(place)] = nn.Parameter(tensor) if isinstance(place, nn.Parameter) else tensor.clone()
        found = copy.deepcopy(self.shell, memo)
        return found.train(model.training)


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
            store = _fresh_store(rank, size, limit)
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
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

    def clip(self, parameters: Iterable[Tensor], most: float) -> Tensor:
        """Scales gradients down to a norm of at most `most`, as torch's `clip_grad_norm_` does. Returns their norm.

        Of parameters that are sharded each process scales its parts. PyTorch's function does the same by DTensors,
        each operation on which costs the CPU as much as a small layer.
        """
        parameters = list(parameters)
        if not any(is_parted(parameter) for parameter in parameters):
            return nn.utils.clip_grad_norm_(parameters, most)
        gradients = [local_part(each.grad.detach()) for each in parameters if each.grad is not None]
        norm = self.add_up(torch.stack(torch._foreach_norm(gradients)).square().sum()).sqrt()
        torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
        return norm

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

    def wrap(self, model: nn.Module, sharding: str = "ddp", *others: nn.Module) -> Runner:
        """A model as an update calls it: gradients of all processes are added up where one doesn't wait.

        Args:
            model: the model, on this process's device, before its optimizer is made.
            sharding: "ddp": each process has all weights; "fsdp": a part of them.
            others: copies of the model, which are sharded alike.
        """
        if self.size == 1:
            return Runner(model)
        if sharding == "fsdp":
            return self._shard(model, *others)
        replica = DistributedDataParallel(_Loss(model), broadcast_buffers=False, gradient_as_bucket_view=True)
        return Runner(_Callable(replica), self.size, replica.no_sync)

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
        # All processes gather together, so that what one of them lacks the room for none of them does.
        by_layer = bool(self.most(size > _ROOM * _memory(device))[0])
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
    """Bytes that a process has of a device: of a machine its share."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    pages, size = (os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE"))
    return pages * size / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class _ReduceScatter:
    """How FSDP adds up gradients by gloo: each process gets its parts of all others, and adds them in their order.

    gloo's own way adds up the whole gradient in each process, and throws most of it away.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A place for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: object, async_op: bool = False
    ) -> None:
        """Puts the sum of this process's part over all processes into `output_tensor`."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)


def _shard_weights(model: nn.Module, mesh: Any, *, by_layer: bool) -> None:
    """Shards a model's weights.

    Args:
        model: which one.
        mesh: of the processes.
        by_layer: each layer of each stack by itself, whose weights are whole while it computes, and what is left: the
            embeddings, which two sides may share. Otherwise all together, which are whole during an update.
    """
    # Imported here, as everything of sharding is: it takes as long as the rest of a training's imports.
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor

    guards.PARTED.add(DTensor)
    layers = [layer for stack in model.modules() if isinstance(stack, Stack) for layer in stack.layers]
    for layer in layers if by_layer else ():
        unknown = set(_hooks(layer))
        fully_shard(layer, mesh=mesh)
        guards.GATHERING.update(hook.__func__ for hook in _hooks(layer) if hook not in unknown)
        guards.BORROWERS.update(layer.modules())
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all processes
            module.set_force_sum_reduction_for_comms(True)  # gloo has no product within a sum, which fp32 would take
            if mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]


def _hooks(module: nn.Module) -> list[Any]:
    return [*vars(module)["_forward_pre_hooks"].values(), *vars(module)["_forward_hooks"].values()]


def _fresh_store(rank: int, size: int, limit: datetime.timedelta) -> PrefixStore:
    """The place where processes tell each other their addresses, without those of processes that are gone.

    A launcher that starts the processes anew may keep its store, in which the addresses of the former ones still are;
    and how often it did so, machines may count differently. So rank 0 invents a name, under which all go on, and gives
    it to each process that asks under a name of its own.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    store = TCPStore(address, port, size, hosts, timeout=limit, wait_for_workers=False)
    own, ends = secrets.token_hex(8), time.monotonic() + limit.total_seconds()
    if rank:
        store.set(f"fastformer/asks/{rank}", own)
        name = store.get(f"fastformer/answers/{own}").decode()  # waits
        store.set(f"fastformer/{name}/{rank}", own)
        return PrefixStore(name, store)
    waiting = set(range(1, size))
    while waiting:
        for each in sorted(waiting):
            if store.check([f"fastformer/asks/{each}"]):  # perhaps of a process that is gone: it gets an answer, too
                store.set(f"fastformer/answers/{store.get(f'fastformer/asks/{each}').decode()}", own)
            if store.check([f"fastformer/{own}/{each}"]):
                waiting.discard(each)
        if time.monotonic() > ends:
            raise TimeoutError(f"no sign of rank {', '.join(map(str, sorted(waiting)))}")
        time.sleep(0.01)
    return PrefixStore(own, store)


def is_parted(tensor: object) -> bool:
    """Whether something is a tensor of which each process has a part."""
    return isinstance(tensor, tuple(guards.PARTED))


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which each process has a part, whole in each of them; any other one as it is."""
    parted: Any = tensor
    whole: Tensor = parted.full_tensor() if is_parted(tensor) else tensor
    return whole


def local_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    parted: Any = tensor
    part: Tensor = parted.to_local() if is_parted(tensor) else tensor
    return part


def part_like(whole: Tensor, other: Tensor) -> Tensor:
    """The part of a whole tensor that a process keeps of another one of that shape; nothing is sent."""
    if not is_parted(other) or whole.shape != other.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    parted: Any = other
    return distribute_tensor(whole.to(other.device), parted.device_mesh, parted.placements, src_data_rank=None)


class PartsWriter:
    """Writes tensors of which each process has a part, while training goes on.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # Its messages must not mix with those of the training, which goes on meanwhile.
        self._group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=world.timeout))
        self._threads = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def begin(self, tensors: dict[str, Tensor], folder: Path, finish: Callable[[], object]) -> None:
        """Begins to write the tensors as they are now.

        Args:
            tensors: by their names.
            folder: an empty folder that all processes see.
            finish: called by rank 0 when all parts are on the disk.

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
        """Waits until what was begun is on the disk, or failed.

        Raises:
            OSError: it could not be written; earlier checkpoints are whole.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._world.each(pending.result)


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # by rank: (an error, its traceback)
    return str(next(iter(failures.values()))[0]) if failures else _first_line(error)


def _copied(tensor: Tensor) -> Tensor:
    """A tensor that stays as it is now, on the CPU."""
    if not is_parted(tensor):
        return tensor.detach().cpu().clone()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    parted: Any = tensor
    mesh = parted.device_mesh if tensor.device.type == "cpu" else init_device_mesh("cpu", (parted.device_mesh.size(),))
    local = parted.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(
        local, mesh, parted.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


# What the table of contents of such a folder is made of. It is a pickle, and a pickle may call anything.
_OF_CONTENTS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A class of DCP's tables, a dtype or a size; nothing else."""
        found = super().find_class(module, name) if module in (*_OF_CONTENTS, "torch", "torch.serialization") else None
        if (module in _OF_CONTENTS and isinstance(found, type)) or isinstance(
            found, torch.dtype | torch.layout | torch.memory_format
        ):
            return found
        if (module, name) in (
            *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
            *(("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib", "PurePosixPath")),
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def read_parts(folder: Path) -> dict[str, Tensor]:
    """All tensors that a `PartsWriter` wrote into a folder, whole, in any number of processes.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with (folder / ".metadata").open("rb") as file:
            contents = _PlainUnpickler(file).load()
        entries = contents.state_dict_metadata
        if not all(isinstance(entry, TensorStorageMetadata) for entry in entries.values()):
            raise ValueError("something that is no tensor")
        found = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") for name, entry in entries.items()
        }
        load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    except Exception as error:  # the reader raises what unpicklers and files raise
        raise ValueError(f"{folder} is damaged ({_first_line(error)})") from error
    return found


def _is_of_lost_ranks(error: BaseException) -> bool:
    kinds = tuple(getattr(dist, name) for name in ("DistError", "DistBackendError") if hasattr(dist, name))
    return isinstance(error, kinds) or any(sign in str(error) for sign in _SIGNS_OF_LOSS)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
