"""A GPU day on a device that is none: `python tests/benchmarks/stub_device.py OUT` runs `gpu_run_plan` to its end.

Time is the steps' own estimates. Tests and cases are counted in place of being run, and no kernel is. But what tuning
launches, and of attention's and the feed-forward network's cases what ours does, forward and backward, comes from the
launchers themselves, on fake CUDA tensors, and is counted too. So it is a process of its own, in which Triton compiles
and does not interpret. Prints JSON: the exit status of each call of the program and what was counted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import gpu_run_plan
from benchmarks.machine_code.cases.attention import attention_call
from benchmarks.machine_code.cases.feed_forward import feed_forward_call
from benchmarks.machine_code.report import recorded
from benchmarks.measure.execute import Outcome
from benchmarks.measure.roofline import Machine
from benchmarks.measure.timing import Timing
from fastformer.kernels import _feed_forward_configs


class StubDevice:
    """What the steps ask for, counted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timed = 0.0  # seconds that the turns of a step may take
        self.counts: Counter[str] = Counter()
        self.tests: list[str] = []

    def synchronize(self) -> None:
        self.counts["waits for the device"] += 1

    def run_side_by_side(self, commands: list[tuple[list[str], dict[str, str], Path]], limit: float) -> dict[str, Any]:
        shards = {environment["FASTFORMER_TEST_SHARD"] for _, environment, _ in commands}
        assert shards == {f"{index}/{len(commands)}" for index in range(len(commands))}
        assert 0 < limit <= gpu_run_plan.CHUNK
        self.counts["test runs"] += 1
        self.tests += [argument for argument in commands[0][0] if argument.startswith("tests/")]
        return {"ok": True, "failed": [], "tails": {}}

    def run_case(
        self, benchmark: Any, shape: dict[str, Any], mode: str, dtype: Any, device: str, *, seconds: float, **_: Any
    ) -> Outcome:
        self.timed += seconds
        assert mode in benchmark.modes and shape in benchmark.shapes["cuda"] and device == "cuda"
        self.counts[f"cases of {benchmark.name}"] += 1
        launch_ours(benchmark.name, shape, dtype)
        row = {"op": benchmark.name, "mode": mode, "provider": benchmark.ours, "speedup": 2.0, "rounds": 1}
        return Outcome(rows=[row])

    def time_interleaved(
        self, functions: dict[str, Callable[[], object]], *, seconds: float, **_: Any
    ) -> dict[str, Timing]:
        self.timed += seconds
        for function in functions.values():
            function()
        self.counts["timings of tiles"] += 1
        return {name: Timing(1.0 / self.counts["timings of tiles"], 1.0, 1.0) for name in functions}

    def captured(self, function: Callable[[], object]) -> Callable[[], object]:
        self.counts["graphs"] += 1
        return function

    def steps(self, out: Path, real: Callable[[Path], Iterator[gpu_run_plan.Step]]) -> Iterator[gpu_run_plan.Step]:
        """The real steps, each of which takes as long as it says."""
        for step in real(out):
            yield step._replace(run=partial(self._run, step))

    def _run(self, step: gpu_run_plan.Step) -> dict[str, Any]:
        self.now += step.seconds
        self.counts["steps"] += 1
        self.timed = 0.0
        with FakeTensorMode(allow_non_fake_inputs=True), recorded(90) as launches:
            result = step.run()
        assert self.timed <= gpu_run_plan.TIMING * step.seconds, f"{step.key}: {self.timed} s of turns"
        self.counts["launches"] += len(launches)
        return result


def launch_ours(op: str, shape: dict[str, Any], dtype: torch.dtype) -> None:
    """Both passes of a case, by the launchers as the compile report calls them."""
    if op in ("attention", "masked_attention", "packed_attention"):
        options = ("causal",) * shape.get("causal", False) + ("dropout",) * bool(shape.get("dropout_p"))
        options += (shape["mask"],) if op == "masked_attention" else ("packed",) * (op == "packed_attention")
        attention_call(dtype, shape["head_dim"], options, shape["seqlen"])()
    if op == "feed_forward":
        options = ("dropout",) * bool(shape["dropout_p"]) + ("persistent",) * _feed_forward_configs.PERSISTENT
        feed_forward_call(dtype, shape["dim"], shape["activation"], options, shape["rows"])()


def main() -> None:
    stub, out = StubDevice(), Path(sys.argv[1])
    statuses: list[int] = []
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_name", lambda *_: "stub"),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        mock.patch.object(torch.cuda, "synchronize", stub.synchronize),
        mock.patch.object(gpu_run_plan, "run_side_by_side", stub.run_side_by_side),
        mock.patch.object(gpu_run_plan, "run_case", stub.run_case),
        mock.patch.object(gpu_run_plan, "time_interleaved", stub.time_interleaved),
        mock.patch.object(gpu_run_plan, "captured", stub.captured),
        # Fake tensors can't be copied to a device that is none.
        mock.patch.object(gpu_run_plan, "inputs_of", lambda benchmark, shape: benchmark.make_inputs(shape, "cpu")),
        mock.patch.object(gpu_run_plan, "measure_machine", lambda *_: Machine(1e15, 4e12)),
        mock.patch.object(gpu_run_plan, "steps", partial(stub.steps, real=gpu_run_plan.steps)),
        mock.patch.object(gpu_run_plan, "work_through", partial(gpu_run_plan.work_through, clock=lambda: stub.now)),
        mock.patch.object(sys, "argv", ["gpu_run_plan", "--out", str(out)]),
        mock.patch.object(sys, "stdout", sys.stderr),
    ):
        while not statuses or (statuses[-1] == 3 and len(statuses) < 20):
            statuses.append(gpu_run_plan.main())
    print(json.dumps({"statuses": statuses, "seconds": stub.now, "counts": stub.counts, "tests": stub.tests}))


if __name__ == "__main__":
    main()
