"""The run's side of a worker: a process that ends is an error that says so."""

from __future__ import annotations

import os
import signal

import pytest

from benchmarks.peers.job import StepJob
from benchmarks.peers.worker import Failed, Worker, WorkerConfig

pytest.importorskip("transformers", reason="the models of the comparison are transformers'")


@pytest.mark.slow  # starts a process that imports transformers
def test_a_killed_worker_is_reported_and_closed() -> None:
    case = {"name": "torch_nn_tiny", "batch": 2, "seqlen": "16", "mode": "forward"}
    worker = Worker(WorkerConfig("as it is", "fp32", 1, case, {}))
    try:
        assert worker.ready() is None
        worker.turn(StepJob())
        os.kill(worker._process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)  # its ends of the pipes are closed then
        with pytest.raises(Failed, match="9"):
            worker.turn(StepJob())
    finally:
        worker.close()
