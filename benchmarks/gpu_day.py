"""Everything that waits for a GPU, unattended, in chunks: check, then time, most important first.

    python -m benchmarks.gpu_day --out DIR [--resume FILE] [--minutes 9]

Each step writes one JSON line to FILE (default DIR/gpu_day.jsonl) as it ends. A run stops before a step once its
minutes are spent and is simply called again: steps that FILE has are skipped. A step that fails is a line too, and the
others go on. Exit status: 0 all steps done and right, 3 steps are left (call again), 1 all done and something failed.

Nothing is timed whose output was not checked first, in the same process, against fp64. Rivals are timed interleaved
with ours, on the same tensors: PyTorch's SDPA backends, each alone, and compiled flex attention. The L2 cache is
flushed before every run. Reads nothing outside the checkout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]


class Step(NamedTuple):
    """One unit of work: its line's key, what it does, and about how many seconds it takes."""

    key: str
    run: Callable[[], Result]
    seconds: float = 15.0


def environment() -> Result:
    """What the numbers belong to."""
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit.stdout.strip() or None,
        "ok": True,
    }


def command(*arguments: str, limit: float) -> Callable[[], Result]:
    """A step that is another process; right when it exits 0."""

    def run() -> Result:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"ok": False, "error": f"took longer than {limit:.0f} s"}
        return {"ok": done.returncode == 0, "tail": (done.stdout + done.stderr)[-2000:]}

    return run


def time_interleaved(functions: dict[str, Callable[[], object]], rounds: int = 20) -> dict[str, float]:
    """Milliseconds of each function, the median over rounds in which each runs once, L2 flushed before each run."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


class Shape(NamedTuple):
    """One attention call to time; dtype bf16, num_heads * head_dim = 2048 as the published charts have it."""

    seqlen: int
    head_dim: int
    is_causal: bool
    dropout_p: float = 0.0
    tokens: int = 16384

    @property
    def size(self) -> tuple[int, int, int, int]:
        return max(1, self.tokens // self.seqlen), self.seqlen, 2048 // self.head_dim, self.head_dim

    def tflops(self, milliseconds: float, backward: bool) -> float:
        batch, seqlen, heads, head_dim = self.size
        flops = 4 * batch * heads * seqlen**2 * head_dim * (0.5 if self.is_causal else 1.0) * (2.5 if backward else 1.0)
        return flops / milliseconds / 1e9


def _sdpa(backend: str) -> Callable[..., Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def run(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
        with sdpa_kernel(chosen):
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                dropout_p=shape.dropout_p, is_causal=shape.is_causal,
            )  # fmt: skip
        return out.transpose(1, 2)

    return run


def _flex(shape: Shape) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if shape.dropout_p:
        raise NotImplementedError("flex attention has no dropout")
    mask = None
    if shape.is_causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, shape.seqlen, shape.seqlen)
    compiled = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor, _: Shape) -> Tensor:
        out = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask)
        return out.transpose(1, 2)

    return run


def _ours(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    from fastformer.ops import attention

    seed = torch.tensor([1, 2], device=q.device) if shape.dropout_p else None
    return attention(q, k, v, is_causal=shape.is_causal, dropout_p=shape.dropout_p, dropout_seed=seed)


def check_attention(shape: Shape) -> dict[str, float]:
    """Errors of ours and of eager bf16 against fp64, one batch and head of the shape, forward and backward.

    Raises:
        AssertionError: ours errs more than twice as much as eager, by the rule of the tests.
    """
    from fastformer.ops._dropout import keep_mask, keep_scale
    from tests.checks import assert_accurate, error

    seqlen = min(shape.seqlen, 4096)
    q, k, v, dout = (torch.randn(1, seqlen, 1, shape.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device="cuda").triu(1)
    keep = None
    if shape.dropout_p:
        keep = keep_mask(torch.tensor([1, 2], device="cuda"), shape.dropout_p, seqlen, seqlen)

    def eager(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        heads_first = [x.transpose(1, 2) for x in leaves]
        scores = heads_first[0] @ heads_first[1].transpose(-1, -2) * shape.head_dim**-0.5
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf) if shape.is_causal else scores, -1)
        if keep is not None:
            weights = weights * keep * keep_scale(shape.dropout_p)
        out = (weights @ heads_first[2]).transpose(1, 2)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = _ours(*leaves, shape)
    ours = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    exact, plain = eager(torch.float64), eager(torch.bfloat16)
    errors = {}
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        assert_accurate(a, b, c, name)
        errors[name] = error(a, c)
    return errors


def time_attention(shape: Shape) -> Callable[[], Result]:
    """A step: check ours at this shape, then time it and its rivals, forward and backward."""

    def run() -> Result:
        errors = check_attention(shape)
        leaves = [torch.randn(shape.size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        dout = torch.randn(shape.size, device="cuda", dtype=torch.bfloat16)
        makers: dict[str, Callable[[], Callable[..., Tensor]]] = {"ours": lambda: _ours}
        makers |= {
            f"sdpa_{name.split('_')[0].lower()}": lambda name=name: _sdpa(name)
            for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
        }
        makers["flex"] = lambda: _flex(shape)
        if shape.seqlen <= 1024:
            makers["sdpa_math"] = lambda: _sdpa("MATH")
        forward: dict[str, Callable[[], object]] = {}
        backward: dict[str, Callable[[], object]] = {}
        missing = {}
        for name, make in makers.items():
            try:
                function = make()
                out = function(*leaves, shape)
                torch.autograd.grad(out, leaves, dout, retain_graph=True)
                torch.cuda.synchronize()
            except Exception as reason:  # a rival that refuses a shape is a line, not the end of the day
                if name == "ours":
                    raise
                missing[name] = str(reason)[:200]
                continue
            plain = [x.detach() for x in leaves]
            forward[name] = lambda function=function, plain=plain: function(*plain, shape)
            backward[name] = lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        milliseconds = {"forward": time_interleaved(forward), "backward": time_interleaved(backward)}
        tflops = {
            way: {name: round(shape.tflops(value, way == "backward"), 1) for name, value in times.items()}
            for way, times in milliseconds.items()
        }
        return {
            "ok": True, "shape": shape._asdict(), "errors": errors, "milliseconds": milliseconds, "tflops": tflops,
            "missing": missing,
        }  # fmt: skip

    return run


def tune_attention(shape: Shape, kernel: str) -> Callable[[], Result]:
    """A step: time other tiles of one kernel at this shape and record the fastest in the tuning file."""

    def run() -> Result:
        from fastformer.kernels import _attention_configs as configs
        from fastformer.kernels import _tuning
        from fastformer.kernels import attention as kernels
        from fastformer.kernels import attention_backward as backward_kernels
        from fastformer.kernels._attention_common import architecture

        q, k, v, dout = (torch.randn(shape.size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        seed = torch.tensor([1, 2], device="cuda") if shape.dropout_p else None
        window_right = 0 if shape.is_causal else None
        scale = shape.head_dim**-0.5
        problem = kernels.describe_dense(q, k, None, scale, None, window_right, shape.dropout_p, seed)
        out, lse = kernels.launch_forward(q, k, v, None, problem)
        is_backward = kernel == "attention_bwd"
        call = configs.call_of(architecture(q), problem, q.dtype, False)

        def launch(config: configs.Config) -> object:
            if is_backward:
                return backward_kernels.launch_backward(dout, q, k, v, out, lse, None, problem, False, config=config)
            return kernels.launch_forward(q, k, v, None, problem, config=config)

        candidates = [
            configs.Config(block_m, block_n, warps, stages)
            for block_m in ((16, 32, 64) if is_backward else (64, 128))
            for block_n in ((64, 128) if is_backward else (32, 64, 128))
            for warps in (4, 8)
            for stages in (2, 3)
        ]
        timed = _tuning.tune(kernel, call, candidates, launch, lambda run: time_interleaved({"x": run}, 8)["x"])
        fastest = [{"config": list(config), "milliseconds": value} for value, config in timed[:6]]
        return {"ok": bool(timed), "shape": shape._asdict(), "call": list(call), "fastest": fastest}

    return run


def steps() -> Iterator[Step]:
    """The day, most important first."""
    yield Step("environment", environment, 5)
    tests = ("pytest", "-m", "gpu", "-q", "-x", "tests/kernels/test_attention_gpu.py")
    yield Step("tests attention", command(*tests, limit=480), 240)
    for head_dim in (64, 128):
        for seqlen in (8192, 2048, 512):
            yield from _timed(Shape(seqlen, head_dim, True))
    for head_dim in (64, 128):
        yield from _timed(Shape(8192, head_dim, False))
        yield from _timed(Shape(2048, head_dim, True, dropout_p=0.1))
    for seqlen in (64, 128, 256):
        for is_causal in (False, True):
            yield from _timed(Shape(seqlen, 64, is_causal))
            yield from _timed(Shape(seqlen, 64, is_causal, dropout_p=0.1))
    for shape in (Shape(4096, 128, True), Shape(4096, 64, True), Shape(256, 64, False, dropout_p=0.1)):
        for kernel in ("attention_fwd", "attention_bwd"):
            yield Step(f"tune {kernel} {_name(shape)}", tune_attention(shape, kernel), 90)
        # With the tiles that the tuning found: OUT/tuning.json, which main() makes the tuning file.
        yield Step(f"time tuned attention {_name(shape)}", time_attention(shape), 30)
    yield Step("tests all", command("pytest", "-m", "gpu", "-q", limit=500), 300)
    if importlib.util.find_spec("benchmarks.run") is not None:
        yield Step("benchmarks", command("benchmarks.run", "--quick", limit=500), 300)


def _name(shape: Shape) -> str:
    kind = "causal" if shape.is_causal else "full"
    return f"n{shape.seqlen} d{shape.head_dim} {kind}" + (f" dropout{shape.dropout_p}" if shape.dropout_p else "")


def _timed(shape: Shape) -> Iterator[Step]:
    yield Step(f"time attention {_name(shape)}", time_attention(shape), 30)


def work_through(todo: list[Step], resume: Path, minutes: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Runs the steps that `resume` lacks until the minutes are spent; the exit status (see the module's docstring)."""
    start = clock()
    lines = [json.loads(line) for line in resume.read_text().splitlines()] if resume.exists() else []
    done = {line["key"]: line["ok"] for line in lines}
    ran = 0
    for step in todo:
        if step.key in done:
            continue
        # The first of a chunk always runs: a step that is longer than a chunk must not stop the day.
        if ran and (clock() - start + step.seconds) / 60 > minutes:
            break
        ran += 1
        began = clock()
        try:
            result = step.run()
        except Exception as error:  # one failed step must not lose the others
            result = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:1000]}"}
        line = {"key": step.key, "seconds": round(clock() - began, 1), **result}
        with resume.open("a") as file:
            file.write(json.dumps(line) + "\n")
        done[step.key] = bool(line["ok"])
        print(json.dumps(line), flush=True)
    left = [step.key for step in todo if step.key not in done]
    failed = [key for key, ok in done.items() if not ok]
    print(f"{len(done)} steps done, {len(failed)} failed {failed}, {len(left)} left", flush=True)
    return 3 if left else 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results and the tuning file")
    parser.add_argument("--resume", type=Path, help="file to go on from (default: OUT/gpu_day.jsonl)")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop before a step that would pass this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device: on a CPU run `python -m benchmarks.compile_report`")
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["FASTFORMER_TUNING_FILE"] = str(args.out.absolute() / "tuning.json")
    resume = args.resume or args.out / "gpu_day.jsonl"
    return work_through(list(steps()), resume, args.minutes)


if __name__ == "__main__":
    sys.exit(main())
