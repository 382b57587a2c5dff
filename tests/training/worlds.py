"""Starts trainings of several processes on this machine, with torchrun, as users do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastformer.checkpoints.training_state import checkpoints, load_checkpoint
from fastformer.cli import main
from fastformer.training.world import read_parts
from tests.training.tiny import lines

PAIRS = [(" ".join(["ab", "cde", "f", "ghij"][(i * k) % 4] for k in range(1, 2 + i % 9)), "xyz"[i % 3] * (1 + i % 13))
         for i in range(120)]  # fmt: skip
FLAGS = {
    **{"tokenizer": "bytes", "max_tokens": 128, "max_len": 96, "accumulate": 4, "steps": 20},
    **{"warmup": 5, "log_every": 1, "val_examples": 8, "rank_timeout": 40, "device": "cpu"},
    **{"model.d_model": 32, "model.d_ff": 64, "save_every": 0, "val_every": 0},
    **{"model.num_heads": 2, "model.dropout": 0.1, "model.attention_dropout": 0.1, "model.activation_dropout": 0.1},
    **{"model.num_encoder_layers": 2, "model.num_decoder_layers": 2},
}  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": "", "PYTHONPATH": os.getcwd()}


def command(
    processes: int, run: Path, *, options: dict[str, Any] | None = None, restarts: int = 0, **flags: Any
) -> list[str]:
    """Returns the command `torchrun` with a training; for 0 processes, the command without torchrun."""
    data = {"train_tsv": run.parent / "train.tsv", "val_tsv": run.parent / "val.tsv"}
    settings = {key.replace("__", "."): value for key, value in {**FLAGS, **data, **flags}.items()}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    for path in data.values():
        if not path.exists():
            path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    script = [str(Path(__file__).with_name("launched.py")), json.dumps(options or {}), "train", str(run), *words]
    if processes == 0:
        return [sys.executable, *script]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    launcher += ["--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [sys.executable, *launcher, *script]


@contextlib.contextmanager
def two(*runs: Path, **flags: Any) -> Iterator[Iterator[list[str]]]:
    """Forks another process as rank 1, with this one as rank 0; a new one would take longer to start than they take.

    Args:
        runs: run folders, each named after its sharding.
        flags: the flags of all trainings.

    Yields:
        The words of each training's command line for this process, which has to run them in this order.
    """
    with contextlib.ExitStack() as sockets:
        free = [sockets.enter_context(socket.socket()) for _ in runs]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in free]
    scripts = [command(0, run, sharding=run.name, **flags) for run in runs]
    words = [script[script.index("train") :] for script in scripts]
    ranks = [{"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    before = {name: os.environ.get(name) for name in (*ranks[0], "MASTER_PORT")}

    def each_words() -> Iterator[list[str]]:
        for port, each in zip(ports, words, strict=True):
            os.environ["MASTER_PORT"] = port
            yield each

    said = runs[0].parent / "said.txt"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has none of OpenMP's other threads, and would wait for them
    other = os.fork()
    if not other:
        _run_as_the_other(ranks[1], each_words(), said)
    try:
        os.environ.update(ranks[0])
        yield each_words()
        status, other = os.waitpid(other, 0)[1], 0
        assert status == 0 and not said.read_text(), said.read_text()
    finally:
        if other:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _run_as_the_other(rank: dict[str, str], each_words: Iterator[list[str]], said: Path) -> NoReturn:
    """Runs trainings in a forked process, which ends with them; what it says is written to a file."""
    signal.alarm(60)
    code = 1
    try:
        with said.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                os.environ.update(rank)
                code = max(main(words) for words in each_words)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def train(processes: int, run: Path, *, fails: bool = False, **others: Any) -> str:
    """Runs a training to its end, and returns its output."""
    done = subprocess.run(
        command(processes, run, **others), env=ENVIRONMENT, capture_output=True, text=True, timeout=180
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, said
    return said


def weights(run: Path) -> dict[str, Tensor]:
    """Returns the weights of the last checkpoint."""
    found: dict[str, Tensor] = load_checkpoint(checkpoints(run)[-1], read_parts)["model"]
    return found


def difference(run: Path, other: Path) -> float:
    """Returns the largest difference of any weight, and of any loss."""
    mine, others = weights(run), weights(other)
    ours, theirs = ([line["loss"] for line in lines(each, "train")] for each in (run, other))
    assert len(ours) == len(theirs) and mine.keys() == others.keys()
    assert all(weight.dtype == torch.float64 for weight in mine.values())
    return max(
        *(float((mine[name] - others[name]).abs().max()) for name in mine),
        *(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
    )


def batches(folder: Path) -> dict[tuple[int, int], set[str]]:
    """Returns the digests of the batches of each update and place, for all processes and attempts."""
    found: dict[tuple[int, int], set[str]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            step, place, digest = json.loads(line)
            found.setdefault((step, place), set()).add(digest)
    return found
