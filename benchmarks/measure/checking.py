"""Checks providers before they are timed: outputs and gradients against fp64, and that each is what its name says.

A provider's error may be three times the error of the oracle in the same dtype, plus 2 ulp; a rival's may be ten times,
because Inductor sums thousands of rows sequentially in fp32. Shapes, dtypes and integers (tokens) have to be equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape, cast, outputs_of, results, timed_call
from benchmarks.measure.launches import recorded_launches
from fastformer.ops import record_backends, use_backend

_MAY_ERR = 3.0  # times the error of plain PyTorch
_RIVALS_MAY_ERR = 10.0  # one decimal digit


@dataclass
class Verdicts:
    """The results of checking a case's providers.

    Attributes:
        wrong: provider -> how its result differs.
        refused: provider -> why it can't compute the case, or isn't what its name says.
        backends: provider -> the fastformer ops that it called, and their backends.
        kernels: the names of the Triton kernels that fastformer launched on a GPU.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    backends: dict[str, dict[str, str]] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)

    def passed(self, name: str) -> bool:
        """Returns whether a provider may be timed."""
        return name not in self.wrong and name not in self.refused


def verdicts_of(
    benchmark: Benchmark, chosen: Mapping[str, Provider], shape: Shape, mode: str, dtype: torch.dtype, device: str
) -> Verdicts:
    """Checks some providers of a case, at its shape for checks, and finds out their backends at its own shape.

    Raises:
        Exception: any exception of fastformer or the baseline; a rival that can't compute the case is refused instead.
    """
    verdicts, checked = Verdicts(), benchmark.checked(shape)
    baseline = benchmark.providers[benchmark.baseline]
    oracles = {name: benchmark.oracles.get(name, baseline) for name in chosen}
    plain: Shape | None = checked
    if checked.get("dropout_p"):
        # Each provider draws its own mask. fastformer is checked with its reference's mask, the others without dropout.
        del oracles[benchmark.ours]
        own_call = {benchmark.ours: chosen[benchmark.ours]}
        _check(benchmark, own_call, own_call, checked, mode, dtype, device, verdicts, backend="reference")
        plain = benchmark.without_dropout(checked)
    if plain is not None:
        _check(benchmark, chosen, oracles, plain, mode, dtype, device, verdicts)
    torch.manual_seed(0)
    inputs = cast(benchmark.make_inputs(shape, device), dtype)
    for name, call in chosen.items():
        if verdicts.passed(name):
            _identify(benchmark, name, call, inputs, shape, mode, verdicts)
    return verdicts


def _check(
    benchmark: Benchmark,
    providers: Mapping[str, Provider],
    oracles: Mapping[str, Provider],
    shape: Shape,
    mode: str,
    dtype: torch.dtype,
    device: str,
    verdicts: Verdicts,
    backend: str | None = None,
) -> None:
    """Finds wrong providers among those with an oracle, whose results come from the backend."""
    torch.manual_seed(0)
    # Values that the dtype can represent, so that all providers start from the same numbers.
    inputs = cast(cast(benchmark.make_inputs(shape, device), dtype), torch.float32)
    answers = {}
    for oracle in dict.fromkeys(oracles.values()):
        with use_backend(backend):
            outputs = outputs_of(oracle(cast(inputs, torch.float64), shape))
            # Contiguous, as those of timed calls of fastformer are: another layout would be another kernel.
            outs = [output for output in outputs if output.requires_grad]
            douts = [torch.randn_like(output, memory_format=torch.contiguous_format) for output in outs]
            exact = results(oracle, cast(inputs, torch.float64), shape, mode, douts)
            answers[oracle] = outputs, douts, exact, results(oracle, cast(inputs, dtype), shape, mode, douts)
    for name, oracle in oracles.items():
        call = providers[name]
        outputs, douts, exact, plain = answers[oracle]
        try:
            values = results(call, cast(inputs, dtype), shape, mode, douts)
        except Exception as error:
            if (how := _other_shape(call, cast(inputs, dtype), shape, outputs)) is not None:
                verdicts.wrong[name] = how  # the difference explains why it couldn't be differentiated
            else:
                _refuse(benchmark, name, error, verdicts)
            continue
        if len(values) != len(exact):
            verdicts.wrong[name] = f"{len(values)} tensors in place of {len(exact)}"
            continue
        is_rival = not benchmark.compares_stages and name not in (benchmark.ours, benchmark.baseline)
        may_err, agreement = _RIVALS_MAY_ERR if is_rival else _MAY_ERR, benchmark.agreement.get(name, 1.0)
        for index, (value, eager_value, right) in enumerate(zip(values, plain, exact, strict=True)):
            if (how := difference(value, eager_value, right, dtype, agreement, may_err)) is not None:
                verdicts.wrong[name] = f"tensor {index}: {how}"
                break


def _other_shape(call: Provider, inputs: Inputs, shape: Shape, exact: list[torch.Tensor]) -> str | None:
    """Returns how the output shapes of a provider that raised differ from the oracle's; None if they don't."""
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


def _refuse(benchmark: Benchmark, name: str, error: Exception, verdicts: Verdicts) -> None:
    if name in (benchmark.ours, benchmark.baseline):
        raise error
    verdicts.refused[name] = f"{type(error).__name__}: {str(error)[:200]}"


def _is_compiled(call: Callable[[], object]) -> bool:
    """Returns whether torch.compile made a part of the call, now or in an earlier call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr when it begins and ends
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
    verdicts: Verdicts,
) -> None:
    """Records the backends of a provider, and refuses one that isn't what its name says.

    A provider that torch.compile left alone is eager, and fastformer without any kernel is plain PyTorch.
    """
    try:
        with record_backends() as ran:
            results(call, inputs, shape, mode, None)
        if mode == "replay":
            timed_call(call, inputs, shape, mode)  # raises if it can't be captured
    except Exception as error:
        _refuse(benchmark, name, error, verdicts)
        return
    backends = {op: "+".join(sorted(backend for other, backend in ran if other == op)) for op, _ in sorted(ran)}
    verdicts.backends[name] = backends
    # A product that PyTorch computes because it is faster is neither a kernel nor a fallback.
    kernels = {backend for _, backend in ran - {("linear", "torch")}}
    if name == benchmark.ours and "triton" in "+".join(backends.values()):
        with recorded_launches() as launched:
            results(call, inputs, shape, mode, None)
        verdicts.kernels = sorted(launched)
    if name in benchmark.compiled and not _is_compiled(lambda: results(call, inputs, shape, mode, None)):
        verdicts.refused[name] = "torch.compile did not compile it"
    elif name == benchmark.ours and kernels == {"reference"}:
        verdicts.refused[name] = f"no kernel ran, only the reference of {', '.join(backends)}"


def difference(
    value: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype,
    agreement: float = 1.0,
    may_err: float = _MAY_ERR,
) -> str | None:
    """Returns how a tensor is wrong; None if it is right.

    Args:
        value: the result of the provider.
        plain: the result of the oracle in the case's dtype; `value` must have the same dtype.
        exact: the result of the oracle in fp64.
        dtype: the dtype of the case.
        agreement: the share of integers that have to be equal.
        may_err: the allowed error, as a multiple of the error of `plain`.
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
    return None if error <= allowed else f"error {error:.2e}, allowed {allowed:.2e}"  # False for NaN
