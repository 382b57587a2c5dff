"""Times other tiles of an attention kernel at a shape of the runner, and records the fastest in the tuning file.

    FASTFORMER_TUNING_FILE=tuning.json python -m benchmarks.tune_attention --shape causal=True seqlen=2048 head_dim=64

Every shape of the benchmark "attention" with these values is tuned, forward and backward. It needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure.commands import parser_of
from benchmarks.measure.suites import benchmarks, has_values, key_value
from benchmarks.measure.timing import time_interleaved

KERNELS = ("attention_fwd", "attention_bwd")


def candidates(kernel: str) -> list[Any]:
    """Returns the tiles to try."""
    from fastformer.kernels._attention_configs import Config

    is_backward = kernel == "attention_bwd"
    configs = [
        Config(block_m, block_n, warps, stages, maxnreg=most)
        for block_m in ((32, 64) if is_backward else (64, 128))
        for block_n in (64, 128)
        for warps in (4, 8)
        for stages in (2, 3)
        # 128 registers a thread: two programs of eight warps an SM.
        for most in ((None, 128) if warps == 8 and not is_backward else (None,))
    ]
    if is_backward:  # dq by a kernel of its own: seven products instead of five and an atomic sum
        configs += [config._replace(split=True) for config in configs if config.num_stages == 2]
    return configs


def tune(shape: dict[str, Any], kernel: str) -> list[tuple[float, Any]]:
    """Returns (milliseconds, tile) of each candidate that could be launched, the fastest first."""
    from fastformer.kernels import _attention_configs as configs
    from fastformer.kernels import _tuning
    from fastformer.kernels import attention as kernels
    from fastformer.kernels import attention_backward as backward_kernels
    from fastformer.kernels._launch import architecture

    size = tuple(shape[name] for name in ("batch", "seqlen", "heads", "head_dim"))
    q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    seed = torch.arange(1, 3, device="cuda") if shape["dropout_p"] else None
    scale, window_right = shape["head_dim"] ** -0.5, 0 if shape["causal"] else None
    problem = kernels.describe_dense(q, k, None, scale, None, window_right, shape["dropout_p"], seed)
    rest = (None, None, seed)  # lengths of queries and of keys, and the seed of dropout
    out, lse = kernels.plan_forward(q, k, v, None, problem)(q, k, v, None, *rest)
    call = configs.call_of(architecture(q), problem, q.dtype, "none")

    def launch(config: configs.Config) -> object:
        if kernel == "attention_bwd":
            inputs = (dout, q, k, v, out, lse, None)
            return backward_kernels.plan_backward(*inputs, problem, False, config=config)(*inputs, *rest)
        return kernels.plan_forward(q, k, v, None, problem, config=config)(q, k, v, None, *rest)

    def milliseconds(function: Callable[[], object]) -> float:
        return 1e3 * time_interleaved({"it": function}, rounds=8, device="cuda", seconds=0.5)["it"].p50

    timed, failed = _tuning.tune(kernel, call, candidates(kernel), launch, milliseconds)
    for config in failed:
        print(f"    not launched: {config}")
    return timed


def main(arguments: list[str] | None = None) -> int:
    """Prints the fastest tiles of each shape; returns 1 if a kernel has none."""
    parser = parser_of("tune_attention", __doc__)
    parser.add_argument("--shape", nargs="+", type=key_value, default=[], help="such as seqlen=2048 (all)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device")
    is_complete = True
    for shape in benchmarks()["attention"].shapes["cuda"]:
        for kernel in KERNELS if has_values(shape, options.shape) else ():
            timed = tune(shape, kernel)
            is_complete = is_complete and bool(timed)
            print(f"{kernel} {shape}")
            for value, config in timed[:6]:
                print(f"    {value:.4f} ms {tuple(config)}", flush=True)
    return 0 if is_complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
