"""A process for each peer, precision and number of threads, which lives as long as the run and works on demand.

Thread pools differ in the way they wait, and none can reliably be resized. In processes of their own they keep their
initial size, and while one works the others sleep.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import IO, Any

from benchmarks.measure import record
from benchmarks.peers import models
from benchmarks.peers.cases import GPTS, LLAMAS, make_model
from benchmarks.peers.job import JobResult, Missing, Peer, PeerJob, StepJob


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of a worker.

    Attributes:
        peer: a key of `peers(case)`.
        precision: one of the peer's precisions.
        threads: the number of threads of the worker.
        case: a case for `cases.make_model`, or one of `models`.
        options: options of the command line.
    """

    peer: str
    precision: str
    threads: int
    case: dict[str, Any]
    options: dict[str, str]


class Failed(Exception):
    """Raised if a worker ended, or its peer raised an error."""


class Worker:
    """The run's side of a worker. Call `start`, then `ready` once, then `turn` any number of times, then `close`."""

    def __init__(self, place: WorkerConfig) -> None:
        self.place = place
        threads = str(place.threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.worker", json.dumps(asdict(place))],
            cwd=record.ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ready(self) -> str | None:
        """Waits until the model is loaded; returns the reason if the peer can't load it."""
        return self._answer().get("missing")

    def turn(self, job: PeerJob | StepJob) -> JobResult:
        """Runs a job in the worker.

        Raises:
            Missing: the peer can't do the job.
            Failed: it raised an error, or its process ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says that it ended
            self._process.stdin.write(json.dumps(asdict(job)) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        if "missing" in answer:
            raise Missing(answer["missing"])
        return JobResult(answer["seconds"], answer["tokens"])

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _end(self) -> str:
        """Waits for the end of a process that closed its output; returns how it ended."""
        code = self._process.wait()
        return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with status {code}"

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": self._end()}
        if "failed" in answer:
            raise Failed(f"{self.place.peer} in {self.place.precision}: {answer['failed']}")
        return answer


def peers(case: dict[str, Any]) -> dict[str, type[Peer]]:
    """Returns the peers of a case: fastformer, or the unchanged model, comes first."""
    if case["name"] in models.MODELS:
        from benchmarks.peers.onnxruntime import OnnxRuntime
        from benchmarks.peers.openvino import OpenVino
        from benchmarks.peers.pytorch import Accelerated, AcceleratedCompiled, AsItIs, FusedLossPeer, TorchCompile
        from benchmarks.peers.sentences import OF_TEXTS, EngineAlone

        compared: list[type[Peer]] = [AsItIs, Accelerated]
        if models.is_embedding(case):  # recompiling for each length would dominate the time
            compared += OF_TEXTS
        else:
            compared += [TorchCompile, AcceleratedCompiled]
        if models.is_exported(case):
            compared += [EngineAlone, OnnxRuntime, OpenVino]
        if models.has_vocabulary(case):
            compared.append(FusedLossPeer)
    else:
        from benchmarks.peers.ctranslate2 import CTranslate2, OursOfFolder
        from benchmarks.peers.hugging_face import HuggingFace, StaticCache
        from benchmarks.peers.llama_cpp import IkLlamaCpp, LlamaCpp
        from benchmarks.peers.ours import Ours
        from benchmarks.peers.reading import MemoryReader

        others: list[type[Peer]] = (
            [HuggingFace, IkLlamaCpp, LlamaCpp] if case["name"] in GPTS else [OursOfFolder, CTranslate2, HuggingFace]
        )
        if case["name"] in LLAMAS:
            others.append(StaticCache)
        compared = [Ours, *others, MemoryReader]
    return {peer.name: peer for peer in compared}


def serve(config: WorkerConfig, orders: IO[str], answers: IO[str]) -> None:
    """Runs the worker's side: answers with a line at the start, and with one for each order."""

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        model = config.case if config.case["name"] in models.MODELS else make_model(config.case)
        peer = peers(config.case)[config.peer](model, config.precision, config.threads, config.options)
        answer()
    except Missing as missing:
        answer(missing=str(missing))
        return
    except Exception as error:
        answer(failed=f"{type(error).__name__}: {error}")
        raise
    for line in orders:
        try:
            turn = peer.turn(peer.order(**json.loads(line)))
            answer(seconds=turn.seconds, tokens=turn.tokens)
        except Missing as missing:
            answer(missing=str(missing))
        except Exception as error:
            answer(failed=f"{type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    # Output of libraries must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.WARNING)  # warnings of the libraries, once for each process
    warnings.simplefilter("ignore")
    serve(WorkerConfig(**json.loads(sys.argv[1])), sys.stdin, answers)
