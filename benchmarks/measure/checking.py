"""Nothing wrong is timed: every provider's outputs and gradients against fp64, and each is what it is called.

A provider may err by three times what the one that is right by definition errs in the same dtype, and 2 ulp; a rival by
ten times, for Inductor adds up thousands of rows one after another in fp32. Shapes, dtypes and integers (tokens)
have to be equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape, cast, outputs_of, results, timed_call
from benchmarks.measure.launches import recorded_launches
from fastformer.ops import record_backends, use_backend

_MAY_ERR = 3.0  # times what plain PyTorch does
_RIVALS_MAY_ERR = 10.0  # one decimal digit


@dataclass
class Verdicts:
    """What the checks found of a case's providers.

    Attributes:
        wrong: provider -> how it disagrees.
        refused: provider -> why it can't take the case, or isn't what it is called.
        backends: provider -> the ops of this library that it called, and where they ran.
        kernels: the Triton kernels that ours launched on a GPU, by name.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    backends: dict[str, dict[str, str]] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)

    def passed(self, name: str) -> bool:
        """Whether a provider may be timed."""
        return name not in self.wrong and name not in self.refused


def verdicts_of(
    benchmark: Benchmark, chosen: Mapping[str, Provider], shape: Shape, mode: str, dtype: torch.dtype, device: str
) -> Verdicts:
    """Checks some providers of a case, at its shape to check, and finds out what they run on at its own.

    Raises:
        Exception: whatever ours or the baseline raises; a rival that can't take the case is refused instead.
    """
    found, checked = Verdicts(), benchmark.checked(shape)
    baseline = benchmark.providers[benchmark.baseline]
    oracles = {name: benchmark.oracles.get(name, baseline) for name in chosen}
    plain: Shape | None = checked
    if checked.get("dropout_p"):
        # Each draws a mask of its own. Ours has to be right with that of our reference, the others without any.
        del oracles[benchmark.ours]
        ours = {benchmark.ours: chosen[benchmark.ours]}
        _check(benchmark, ours, ours, checked, mode, dtype, device, found, backend="reference")
        plain = benchmark.without_dropout(checked)
    if plain is not None:
        _check(benchmark, chosen, oracles, plain, mode, dtype, device, found)
    torch.manual_seed(0)
    inputs = cast(benchmark.make_inputs(shape, device), dtype)
    for name, call in chosen.items():
        if found.passed(name):
            _identify(benchmark, name, call, inputs, shape, mode, found)
    return found


def _check(
    benchmark: Benchmark,
    providers: Mapping[str, Provider],
    oracles: Mapping[str, Provider],
    shape: Shape,
    mode: str,
    dtype: torch.dtype,
    device: str,
    found: Verdicts,
    backend: str | None = None,
) -> None:
    """Names the providers that are wrong, of those that have an oracle, which computes on the backend."""
    torch.manual_seed(0)
    # Values that the dtype holds, so that all start from the same numbers.
    inputs = cast(cast(benchmark.make_inputs(shape, device), dtype), torch.float32)
    answers = {}
    for oracle in dict.fromkeys(oracles.values()):
        with use_backend(backend):
            outputs = outputs_of(oracle(cast(inputs, torch.float64), shape))
            douts = [torch.randn_like(output) for output in outputs if output.requires_grad]
            exact = results(oracle, cast(inputs, torch.float64), shape, mode, douts)
            answers[oracle] = outputs, douts, exact, results(oracle, cast(inputs, dtype), shape, mode, douts)
    for name, oracle in oracles.items():
        call = providers[name]
        outputs, douts, exact, plain = answers[oracle]
        try:
            values = results(call, cast(inputs, dtype), shape, mode, douts)
        except Exception as error:
            if (how := _other_shape(call, cast(inputs, dtype), shape, outputs)) is not None:
                found.wrong[name] = how  # which is why it couldn't be differentiated
            else:
                _refuse(benchmark, name, error, found)
            continue
        if len(values) != len(exact):
            found.wrong[name] = f"{len(values)} tensors in place of {len(exact)}"
            continue
        is_rival = not benchmark.compares_stages and name not in (benchmark.ours, benchmark.baseline)
        may_err, agreement = _RIVALS_MAY_ERR if is_rival else _MAY_ERR, benchmark.agreement.get(name, 1.0)
        for index, (value, theirs, right) in enumerate(zip(values, plain, exact, strict=True)):
            if (how := difference(value, theirs, right, dtype, agreement, may_err)) is not None:
                found.wrong[name] = f"tensor {index}: {how}"
                break


def _other_shape(call: Provider, inputs: Inputs, shape: Shape, exact: list[torch.Tensor]) -> str | None:
    """How the outputs of a provider that raised aren't those of the oracle; None where they are, or there are none."""
    try:
        outputs = results(call, inputs, shape, "fwd", None)
    except Exception:
        return None
    if len(outputs) != len(exact):
        return f"{len(outputs)} tensors in place of {len(exact)}"
    for index, (output, right) in enumerate(zip(outputs, exact, strict=True)):
        if output.shape != right.shape:
            return f"tensor {index}: shape {tuple(output.shape)} in place of {tuple(right.shape)}"
    return None


def _refuse(benchmark: Benchmark, name: str, error: Exception, found: Verdicts) -> None:
    if name in (benchmark.ours, benchmark.baseline):
        raise error
    found.refused[name] = f"{type(error).__name__}: {str(error)[:200]}"


def _is_compiled(call: Callable[[], object]) -> bool:
    """Whether torch.compile made some of what runs, now or in a call before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler says on stderr that it begins and ends
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return any(event.name().startswith("Torch-Compiled Region") for event in profile.profiler.kineto_results.events())


def _identify(
    benchmark: Benchmark,
    name: str,
    call: Provider,
    inputs: Inputs,
    shape: Shape,
    mode: str,
    found: Verdicts,
) -> None:
    """Notes which backends a provider runs on, and refuses one that isn't what it is called.

    What torch.compile left alone is eager, and ours without any kernel is plain PyTorch.
    """
    try:
        with record_backends() as ran:
            results(call, inputs, shape, mode, None)
        if mode == "replay":
            timed_call(call, inputs, shape, mode)  # or it can't be captured
    except Exception as error:
        _refuse(benchmark, name, error, found)
        return
    backends = {op: "+".join(sorted(backend for other, backend in ran if other == op)) for op, _ in sorted(ran)}
    found.backends[name] = backends
    # A product that PyTorch makes because it is faster at it is neither a kernel nor a fallback.
    kernels = {backend for _, backend in ran - {("linear", "torch")}}
    if name == benchmark.ours and "triton" in "+".join(backends.values()):
        with recorded_launches() as launched:
            results(call, inputs, shape, mode, None)
        found.kernels = sorted(launched)
    if name in benchmark.compiled and not _is_compiled(lambda: results(call, inputs, shape, mode, None)):
        found.refused[name] = "torch.compile did not compile it"
    elif name == benchmark.ours and kernels == {"reference"}:
        found.refused[name] = f"no kernel ran, only the reference of {', '.join(backends)}"


def difference(
    value: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype,
    agreement: float = 1.0,
    may_err: float = _MAY_ERR,
) -> str | None:
    """How a tensor is wrong; None where it is right.

    Args:
        value: the provider's.
        plain: the oracle's in the case's dtype, which `value` has to have the dtype of.
        exact: the oracle's in fp64.
        dtype: the case's.
        agreement: the share of integers that have to be equal.
        may_err: times the error of `plain`.
    """
    if value.shape != exact.shape:
        return f"shape {tuple(value.shape)} in place of {tuple(exact.shape)}"
    if value.dtype != plain.dtype:
        return f"{value.dtype} in place of {plain.dtype}"
    if exact.numel() == 0:
        return None
    if not exact.is_floating_point():
        same = int((value == exact).sum())
        return None if same >= agreement * exact.numel() else f"{exact.numel() - same} other integers"
    error, error_plain = (float((t.detach().double() - exact.detach().double()).abs().max()) for t in (value, plain))
    allowed = may_err * error_plain + 2 * torch.finfo(dtype).eps * float(exact.detach().abs().max())
    return None if error <= allowed else f"error {error:.2e}, allowed {allowed:.2e}"  # NaN is not <= anything
