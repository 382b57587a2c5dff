"""The program that torchrun starts in tests: `fastformer train` in fp64, with records and planned failures.

    launched.py OPTIONS train RUN ...

OPTIONS is JSON: "updates": a folder for a file of each process, with a line for each batch of an update that it began;
"nan": [rank, step]: that loss is NaN; "freeze": [rank, step]: this process says no more; "data": [rank, file]: this
process reads another file; "pace": seconds that each update waits; "small": [rank, step, bytes]: from that update
on no file of this process may get larger; "deaf": [rank, step]: this process loses its network; "dtype": another than
float64; "by_layer": there is no room for whole weights, which FSDP gathers a layer at a time; "late": seconds that
parts of a checkpoint take longer to be on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import socket
import stat
import sys
import time
from dataclasses import replace

import torch

torch.set_default_dtype(getattr(torch, json.loads(sys.argv[1]).get("dtype", "float64")))
torch.set_num_threads(1)

from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: E402

from fastformer.__main__ import leave  # noqa: E402
from fastformer.cli import main  # noqa: E402
from fastformer.data import Batch  # noqa: E402
from fastformer.training import build, world  # noqa: E402
from fastformer.training.trainer import Trainer  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))


def digest(batch: Batch) -> str:
    found = hashlib.sha256()
    for tensor in (batch.source, batch.target_in, batch.target_out, batch.target_layout.seqlens):
        found.update(b"" if tensor is None else tensor.numpy().tobytes())
    return found.hexdigest()


def install(options: dict) -> None:
    inner = Trainer.update

    def update(self, batches):
        if "updates" in options:
            with open(os.path.join(options["updates"], f"{RANK}.jsonl"), "a") as file:
                for place, batch in zip(batches.places, batches, strict=True):
                    file.write(json.dumps([self.step, place, digest(batch)]) + "\n")
        if options.get("freeze") == [RANK, self.step]:
            time.sleep(1000)
        if options.get("nan") == [RANK, self.step]:
            loss = self.model.loss
            self.model.loss = lambda *inputs, **others: loss(*inputs, **others) * float("nan")
        if options.get("small", [None])[:2] == [RANK, self.step]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (options["small"][2], resource.RLIM_INFINITY))
        if options.get("deaf") == [RANK, self.step]:
            hang_up()
        if options.get("pace"):
            time.sleep(options["pace"])
        return inner(self, batches)

    Trainer.update = update
    if options.get("by_layer"):
        world._ROOM = 0.0
    if "late" in options:
        FileSystemWriter.write_data = late_parts(FileSystemWriter.write_data, options["late"])


def hang_up() -> None:
    """Closes every connection of this process, but no socket that listens: gloo ends a process that can't accept."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                connection = socket.socket(fileno=os.dup(descriptor))
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def late_parts(write, seconds: float):
    def write_data(self, plan, planner):
        time.sleep(seconds)
        return write(self, plan, planner)

    return write_data


if __name__ == "__main__":
    asked, words = json.loads(sys.argv[1]), sys.argv[2:]
    install(asked)
    if asked.get("data", [None])[0] == RANK:
        load = build.load_data  # type: ignore[attr-defined]
        build.load_data = lambda config, *others: load(replace(config, train_tsv=asked["data"][1]), *others)  # type: ignore[attr-defined]
    leave(main(words))
