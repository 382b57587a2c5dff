"""Tests the kernels for sm_90 in the emulator of Gluon: their results, in any order of events."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from fastformer.kernels import _attention_hopper as hopper  # noqa: E402
from fastformer.kernels import _attention_hopper_backward as backward  # noqa: E402
from fastformer.kernels import _attention_hopper_forward as forward  # noqa: E402
from fastformer.kernels._attention_common import Problem, describe  # noqa: E402
from fastformer.kernels._attention_hopper_backward import _attention_hopper_bwd_kernel  # noqa: E402
from fastformer.kernels._attention_hopper_forward import _attention_hopper_fwd_kernel  # noqa: E402
from fastformer.kernels.attention import describe_dense  # noqa: E402
from tests.checks import assert_accurate  # noqa: E402
from tests.covering import by_turns  # noqa: E402
from tests.kernels.attention_cases import (  # noqa: E402
    SEED,
    Case,
    cumulative,
    lengths_of,
    make_inputs,
    pack,
    packed_results,
    plain,
)
from tests.kernels.gluon_emulator import KernelBody, Schedule, eager, emulate, shuffled  # noqa: E402
from tests.kernels.gluon_values import GluonError  # noqa: E402

# The producer as far ahead as it may be, then as late, then copies that land at the last moment.
SCHEDULES = {
    "producer first": eager("produce", "copy", "consume"),
    "consumers first": eager("consume", "copy", "produce"),
    "copies last": eager("consume 1", "produce", "consume", "copy"),
    "shuffled": shuffled(0),
}


def problem_of(case: Case, q: Tensor, k: Tensor) -> Problem:
    """Describes a case for the launcher."""
    lengths_q, lengths_k = lengths_of(case)
    seed = torch.tensor(SEED) if case.dropout_p else None
    if case.packed:
        return describe(
            q, k, lengths="packed", seqlens_q=cumulative(lengths_q, "cpu"), seqlens_k=cumulative(lengths_k, "cpu"),
            seqlen_q=max(lengths_q), seqlen_k=max(lengths_k), softmax_scale=case.scale, window_left=case.window[0],
            window_right=case.window[1], dropout_p=case.dropout_p, dropout_seed=seed, softcap=case.softcap,
        )  # fmt: skip
    lengths = None if case.lengths is None else torch.tensor(case.lengths, dtype=torch.int32)
    return describe_dense(q, k, lengths, case.scale, *case.window, case.dropout_p, seed, case.softcap)


def run(
    case: Case, inputs: dict, schedule: Schedule, programs: int = 2, kernel: Any = _attention_hopper_fwd_kernel
) -> dict[str, Tensor]:
    """Returns out and lse of a case from the emulated kernel."""
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    lengths_q, lengths_k = lengths_of(case)
    if case.packed:
        q, k, v = pack(q, lengths_q), pack(k, lengths_k), pack(v, lengths_k)
    problem = problem_of(case, q, k)
    assert hopper.fits(problem, q, k, v, None)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    shape = (q.shape[1], q.shape[0]) if case.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(shape, float("nan"))
    arguments, constants, _ = hopper.forward_arguments(q, k, v, out, lse, problem)
    emulate(kernel, programs, arguments, constants, [q, k, v], schedule)
    return {"out": out, "lse": lse}


def run_backward(
    case: Case, inputs: dict, schedule: Schedule, programs: int = 2, kernel: Any = _attention_hopper_bwd_kernel
) -> dict[str, Tensor]:
    """Returns dq, dk and dv of a case from the emulated kernel, given out and lse in fp64."""
    exact = plain(case, inputs, torch.float64)
    q, k, v, dout, out, lse = *(inputs[name] for name in ("q", "k", "v", "dout")), exact["out"], exact["lse"]
    if case.packed:
        lengths_q, lengths_k = lengths_of(case)
        q, dout, out, k, v = *(pack(x, lengths_q) for x in (q, dout, out)), pack(k, lengths_k), pack(v, lengths_k)
        lse = pack(lse.transpose(1, 2), lengths_q).T
    delta = (out * dout.double()).sum(-1).transpose(-1, -2).float().contiguous()
    row_lse = lse.masked_fill(lse == float("-inf"), float("inf")).float().contiguous()
    problem = problem_of(case, q, k)
    dq = torch.zeros(q.shape)
    per_head = (*k.shape[:-2], case.heads, case.head_dim)
    dk, dv = (torch.full(per_head, float("nan"), dtype=torch.float32 if problem.group > 1 else k.dtype) for _ in "kv")
    arguments, constants, _ = hopper.backward_arguments(dout, q, k, v, row_lse, delta, dq, dk, dv, problem)
    emulate(kernel, programs, arguments, constants, [q, k, v, dout], schedule)
    if problem.group > 1:
        dk, dv = (x.unflatten(-2, (case.kv_heads, problem.group)).sum(-2).to(k.dtype) for x in (dk, dv))
    return {"dq": dq.to(q.dtype), "dk": dk, "dv": dv}


def check(case: Case, dtype: torch.dtype, schedule: Schedule, results: Any = run, **options: Any) -> None:
    """Holds what `run` or `run_backward` gives to the rule."""
    inputs = make_inputs(case, dtype)
    ours = results(case, inputs, schedule, **options)
    exact, rival = plain(case, inputs, torch.float64), plain(case, inputs, dtype)
    if case.packed:
        exact, rival = packed_results(case, exact), packed_results(case, rival)
    for name, x in ours.items():
        assert_accurate(x, rival[name].float() if name == "lse" else rival[name], exact[name], name)


BASE = Case(batch=1, heads=2, kv_heads=1, seqlen_q=200, seqlen_k=300)
CASES = {
    "full": BASE,
    "causal": replace(BASE, window=(None, 0)),
    "causal, more queries than keys": replace(BASE, seqlen_q=300, seqlen_k=130, window=(None, 0)),
    "window": replace(BASE, seqlen_q=270, seqlen_k=400, window=(130, 7)),
    "before": replace(BASE, seqlen_q=130, window=(150, -40)),
    "seqlens_k": replace(BASE, batch=2, seqlen_q=70, lengths=(129, 0)),
    "tiles without keys": replace(BASE, batch=5, seqlen_q=70, lengths=(0, 0, 0, 0, 129)),
    "tiles without keys, window": replace(BASE, batch=5, seqlen_q=70, lengths=(0, 0, 0, 0, 129), window=(100, 5)),
    "packed": replace(BASE, batch=3, packed=True, lengths_q=(130, 0, 200), lengths=(257, 40, 300), window=(None, 0)),
    "dropout": replace(BASE, dropout_p=0.3, window=(None, 0)),
    "dropout, seqlens_k": replace(BASE, batch=2, seqlen_q=70, window=(100, 5), lengths=(129, 0), dropout_p=0.5),
    "dropout, packed": replace(
        BASE, batch=3, packed=True, lengths_q=(130, 0, 70), lengths=(257, 40, 90), dropout_p=0.9
    ),
    "head_dim 128": replace(BASE, head_dim=128, window=(None, 0), dropout_p=0.1),
    "head_dim 72": replace(BASE, head_dim=72, seqlen_q=100),
}


@pytest.mark.parametrize("schedule, dropout_p", by_turns([*SCHEDULES], [0.0, 0.2]))
def test_any_order_of_events(schedule: str, dropout_p: float) -> None:
    case = replace(BASE, seqlen_q=400, seqlen_k=700, window=(None, 0), dropout_p=dropout_p)
    check(case, torch.bfloat16, SCHEDULES[schedule], programs=3)


def test_a_program_without_a_tile() -> None:
    """If there are more programs than tiles, the rest end without touching a barrier."""
    check(replace(BASE, batch=1, heads=1, seqlen_q=40), torch.bfloat16, shuffled(2), programs=3)


def test_values_beyond_a_length_are_not_read() -> None:
    """The next sequence, or padding, follows a sequence's keys: NaN there must not be multiplied by a weight of 0."""
    case = replace(BASE, batch=2, seqlen_q=70, lengths=(129, 0))
    inputs = make_inputs(case, torch.bfloat16)
    clean = run(case, inputs, shuffled(3))
    for name in ("k", "v"):
        for batch, length in enumerate(case.lengths):
            inputs[name][batch, length:] = float("nan")
    dirty = run(case, inputs, shuffled(3))
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_strides() -> None:
    """q, k and v are slices of one projection, or in SDPA's layout: strides of rows, heads and batches in any order."""
    case = replace(BASE, batch=2, heads=2, kv_heads=2, seqlen_q=140, seqlen_k=140, window=(None, 0))
    inputs = make_inputs(case, torch.bfloat16)
    expected = run(case, inputs, shuffled(4))
    tensors: dict[str, Any] = {name: inputs[name] for name in ("q", "k", "v")}
    q, k, v = torch.stack(list(tensors.values()), dim=2).unbind(2)
    transposed = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
    for changed in ({"q": q, "k": k, "v": v}, transposed):
        ours = run(case, inputs | changed, shuffled(4))
        assert all(torch.equal(ours[name], expected[name]) for name in ours)


@pytest.mark.parametrize("results", [run, run_backward])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_fp64(name: str, results: Any) -> None:
    """Programs have several tiles, rings wrap around, and there are tails in rows and keys."""
    dtype = torch.float16 if name in ("window", "dropout") else torch.bfloat16
    check(CASES[name], dtype, shuffled(1), results)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_in_any_order_of_events(schedule: str) -> None:
    case = replace(BASE, kv_heads=2, head_dim=40, seqlen_q=300, seqlen_k=300, window=(None, 0), dropout_p=0.2)
    check(case, torch.bfloat16, SCHEDULES[schedule], run_backward)


def swapped(first: str, second: str, indent: int) -> tuple[str, str]:
    """Returns the mistake of two lines of code in the wrong order."""
    first, second = " " * indent + first, " " * indent + second
    return f"{first}\n{second}\n", f"{second}\n{first}\n"


# What a slip of the pen would do to a kernel: of each kind that the emulator finds one, as (module, text, what it
# becomes). It is an error of the emulator (a deadlock, a race), or, for some, of the numbers.
MISTAKES = {
    "a phase": (forward, "k_full.index(stage), (at // STAGES) & 1", "k_full.index(stage), at & 1"),
    "no wait for V": (forward, "mbarrier.wait(v_full.index(stage), (at // STAGES) & 1)", "pass"),
    "no arrive after Q": (forward, "mbarrier.arrive(q_empty.index(consumer), count=1)", "pass"),
    "a wait one too deep": (forward, "warpgroup_mma_wait(1, deps=[s])", "warpgroup_mma_wait(2, deps=[s])"),
    "V released early": (
        forward,
        *swapped(
            "acc = warpgroup_mma_wait(0, deps=[acc])",
            "mbarrier.arrive(v_empty.index((at - 1) & (STAGES - 1)), count=1)",
            8,
        ),
    ),
    "expected bytes": (forward, "v_desc.block_type.nbytes)", "v_desc.block_type.nbytes // 2)"),
    "dropout's words": (
        forward,
        "gl.join(gl.join(w0, w2), gl.join(w1, w3))",
        "gl.join(gl.join(w0, w1), gl.join(w2, w3))",
    ),
    "no fence": (backward, "        fence_async_shared()\n        mbarrier.arrive", "        mbarrier.arrive"),
    "told of before the fence": (
        backward,
        *swapped("fence_async_shared()", "mbarrier.arrive(ds_full.index(0), count=1)", 8),
    ),
    "P not transposed": (backward, "p_shared.permute((1, 0))", "p_shared"),
}


MISTAKE_CASE = replace(BASE, heads=2, seqlen_q=300, seqlen_k=700, window=(None, 0), dropout_p=0.2)
MISTAKE_SCHEDULES = (SCHEDULES["producer first"], SCHEDULES["consumers first"], shuffled(5))


def kernel_with(right: str, wrong: str, module: types.ModuleType = forward) -> Any:
    """Returns the kernel of a module in which one text is replaced."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1, f"{right!r} stands {source.count(right)} times in the kernel"
    # Triton looks for a function's text in its file: the emulator needs its bytecode alone.
    changed = types.ModuleType("changed")
    code = compile(source.replace(right, wrong), str(module.__file__), "exec")
    with mock.patch("triton.experimental.gluon.jit", lambda fn=None, **_: KernelBody(fn) if fn else KernelBody):
        exec(code, changed.__dict__)
    return changed._attention_hopper_fwd_kernel if module is forward else changed._attention_hopper_bwd_kernel


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    module, right, wrong = MISTAKES[mistake]
    kernel = kernel_with(right, wrong, module)
    case, results = MISTAKE_CASE, run
    if module is backward:
        case = replace(BASE, batch=2, kv_heads=2, seqlen_q=300, seqlen_k=330, window=(None, 0), dropout_p=0.2)
        case, results = replace(case, lengths=(330, 200)), run_backward
    with pytest.raises((GluonError, AssertionError)):
        for schedule in MISTAKE_SCHEDULES:
            check(case, torch.bfloat16, schedule, results, kernel=kernel)


def test_without_a_mistake() -> None:
    """This is the reference in which no mistake is detected."""
    kernel = kernel_with("first_row += consumer * CONSUMER_ROWS", "first_row += CONSUMER_ROWS * consumer")
    for schedule in MISTAKE_SCHEDULES:
        check(MISTAKE_CASE, torch.bfloat16, schedule, kernel=kernel)


def fits(**changes: Any) -> bool:
    """Returns whether the kernels support a call of BASE with changes to the case, its tensors, or the mask."""
    tensors = {name: changes.pop(name) for name in ("q", "k", "v") if name in changes}
    mask, dtype = changes.pop("attn_mask", None), changes.pop("dtype", torch.bfloat16)
    case = replace(BASE, **changes)
    inputs = make_inputs(case, dtype) | tensors
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    return hopper.fits(problem_of(case, q, k), q, k, v, mask)


def test_sizes_that_fit() -> None:
    assert fits() and fits(dtype=torch.float16) and fits(head_dim=40) and fits(head_dim=128)
    assert not fits(dtype=torch.float32)
    assert not fits(head_dim=32) and not fits(head_dim=136) and not fits(head_dim=68)
    assert fits(dropout_p=0.999) and not fits(dropout_p=1.0)
    assert not fits(attn_mask=torch.ones(1, 1, 200, 300, dtype=torch.bool))
    assert not fits(seqlen_k=0) and not fits(softcap=50.0)


def test_tensors_that_tma_cannot_address() -> None:
    q = torch.zeros(2, 200, 2, 64, dtype=torch.bfloat16)
    assert fits(batch=2, q=q)
    assert not fits(batch=2, q=torch.zeros(2, 200, 2, 68, dtype=torch.bfloat16)[..., 4:])  # its start, its strides
    assert not fits(batch=2, q=torch.zeros(2, 200, 2, 65, dtype=torch.bfloat16)[..., :64])
    assert not fits(batch=2, q=q[..., :1].expand(q.shape))  # elements of a row not side by side
    assert not fits(batch=2, q=q[:, :1].expand(q.shape))  # rows on top of each other
    between = torch.zeros(2 * 200 * 128 + 64, dtype=torch.bfloat16).as_strided(q.shape, (200 * 128 + 64, 128, 64, 1))
    assert not fits(batch=2, q=between)  # no whole number of rows from batch to batch
    assert fits(batch=1, q=between[:1])
    assert fits(batch=2, q=q[:1].expand(q.shape))  # one sequence for all


def test_only_sm_90_and_gradients_that_tma_can_address(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(BASE, head_dim=128, window=(None, 0))
    inputs = make_inputs(case, torch.bfloat16)
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    problem = problem_of(case, q, k)
    for capability in (80, 89, 90, 100, 120):
        monkeypatch.setattr(hopper, "architecture", lambda _, capability=capability: capability)
        assert hopper.takes(problem, q, k, v, None) == (capability == 90)
        assert hopper.takes_backward(problem, q, k, v, q, None) == (capability == 90)
    monkeypatch.setattr(hopper, "architecture", lambda _: 90)
    assert not hopper.takes_backward(problem, q, k, v, q[:, :1].expand(q.shape), None)


def test_descriptors_are_kept_and_keep_no_tensor() -> None:
    x = torch.zeros(2, 200, 2, 64, dtype=torch.bfloat16)
    descriptor = hopper.ragged_descriptor(x, 64, 64)
    assert hopper.ragged_descriptor(x, 64, 64) is descriptor
    assert hopper.ragged_descriptor(x.half(), 64, 64) is not descriptor
    assert hopper.ragged_descriptor(x, 128, 64) is not descriptor
    assert not isinstance(descriptor.base, Tensor) and descriptor.base.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_plan_passes_each_calls_own_tensors(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan stores no tensor and no address of a call; descriptors are cached by address."""
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper, "Launch", lambda *_, **__: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(hopper, "num_sms", lambda device: 132)
    case = Case(window=(None, 0), dropout_p=0.25, packed=packed, seqlen_q=56)
    plans: dict[str, Any] = {}
    for turn in range(3):
        inputs = make_inputs(case, torch.bfloat16)
        q, k, v = (pack(inputs[name], lengths_of(case)[0]) if packed else inputs[name] for name in ("q", "k", "v"))
        problem = problem_of(case, q, k)
        rows, sums, dout = torch.zeros(2 * q.numel()), torch.zeros(q.shape), torch.zeros_like(q)
        lse = rows[: q.numel() // 64].view((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]))
        lengths = (problem.seqlens_q, problem.seqlens_k, problem.seqlen_q, problem.seqlen_k)
        out, dq, dk, dv = torch.zeros_like(q), sums, torch.zeros_like(k), torch.zeros_like(v)
        untensored = problem._replace(seqlens_q=None, seqlens_k=None, dropout=(None, *problem.dropout[1:]))
        if not plans:
            plans = {"fwd": hopper.plan_forward(untensored), "bwd": hopper.plan_backward(untensored)}
        for repeated in range(2):
            plans["fwd"]((q, k, v, out, lse), lengths, problem.dropout)
            plans["bwd"]((dout, q, k, v, lse, lse, dq, dk, dv), lengths, problem.dropout)
            expected = [
                hopper.forward_arguments(q, k, v, out, lse, problem)[0],
                hopper.backward_arguments(dout, q, k, v, lse, lse, dq, dk, dv, problem)[0],
            ]
            for actual, due in zip(launched[-2:], expected, strict=True):
                assert compared(actual) == compared(due), (turn, repeated)


def test_another_thread_may_call_a_plan_during_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper, "Launch", lambda *_, **__: lambda *arguments: launched.append(arguments))
    inputs = make_inputs(case := Case(), torch.bfloat16)
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    problem = problem_of(case, q, k)
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    plan = hopper.plan_forward(problem)

    def call() -> None:
        lengths = (None, None, problem.seqlen_q, problem.seqlen_k)
        plan((q, k, v, torch.zeros_like(q), lse), lengths, problem.dropout)

    class Descriptor:
        @property
        def block_shape(self) -> list[int]:
            if not launched:
                launched.append(())
                call()  # as the other thread, at the moment when the first one stores what it has found
            return [1, 1, 1, 64, 128]

    monkeypatch.setattr(hopper, "ragged_descriptor", lambda x, rows, block_d: Descriptor())
    call()
    call()
    assert len(launched) == 4 and {len(arguments) for arguments in launched[1:]} == {len(launched[-1])}


def compared(value: Any) -> Any:
    """Returns a comparable form of a launch's argument: tensors by their memory, descriptors by their contents."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [compared(item) for item in value]
    if isinstance(value, Tensor):
        return value.data_ptr(), value.dtype
    if hasattr(value, "block_shape"):
        return value.base, value.shape, value.strides, value.block_shape
    return value
