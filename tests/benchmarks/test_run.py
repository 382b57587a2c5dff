"""The runner never times a wrong result, interleaves its measurements, and writes complete rows."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import run as run_module
from benchmarks.measure import record, timing
from benchmarks.measure.case import SUITES, Benchmark, Inputs, Need, Provider, Shape
from benchmarks.measure.comparing import compare
from benchmarks.measure.console import table
from benchmarks.measure.execute import Outcome
from benchmarks.measure.suites import Case, chosen_cases, listing, nothing_fits
from benchmarks.run import main
from fastformer.ops import add_layer_norm, use_backend
from fastformer.ops._dispatch import forced_backend
from tests.benchmarks.conftest import Refused
from tests.benchmarks.running import run_case

SHAPE = {"rows": 64}


def make_inputs(shape: Shape, device: str) -> Inputs:
    return {"x": torch.randn(shape["rows"], 8, device=device, requires_grad=True)}


def square(x: Inputs, shape: Shape) -> torch.Tensor:
    return x["x"] * x["x"]


def wrong_value(x: Inputs, shape: Shape) -> torch.Tensor:
    return x["x"] * x["x"] * 1.001


def refuses(x: Inputs, shape: Shape) -> torch.Tensor:
    raise NotImplementedError("not this shape")


TOY = Benchmark(
    name="toy",
    shapes={"cpu": [SHAPE], "cuda": [SHAPE]},
    make_inputs=make_inputs,
    providers={"fastformer": square, "power": lambda x, shape: x["x"] ** 2},
    baseline="power",
    flops=lambda shape, mode: 8 * shape["rows"],
    moved=lambda shape, mode, itemsize: 16 * shape["rows"] * itemsize,
    tokens=lambda shape: shape["rows"],
)


def test_a_case_may_be_checked_at_a_smaller_shape_than_it_is_timed_at() -> None:
    """An error there makes the provider wrong, and no call at the timed shape is in fp64."""
    rows: dict[torch.dtype, set[int]] = {}

    def noted(x: Inputs, shape: Shape) -> torch.Tensor:
        rows.setdefault(x["x"].dtype, set()).add(shape["rows"])
        return x["x"] ** 2

    small = dataclasses.replace(
        TOY, checked=lambda shape: {**shape, "rows": 3}, providers={"fastformer": square, "power": noted}
    )
    outcome = run(small)
    assert [row["provider"] for row in outcome.rows] == ["fastformer", "power"] and outcome.rows[0]["shape"] == SHAPE
    assert rows == {torch.float64: {3}, torch.float32: {3, SHAPE["rows"]}}


def run(benchmark: Benchmark, mode: str = "fwdbwd"):
    return run_case(benchmark, SHAPE, mode, rounds=3)


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd", "step"])
def test_rows(mode: str) -> None:
    outcome = run(TOY, mode)
    assert not outcome.wrong and not outcome.refused
    assert [row["provider"] for row in outcome.rows] == ["fastformer", "power"]
    for row in outcome.rows:
        assert (row["op"], row["mode"], row["dtype"], row["shape"]) == ("toy", mode, "float32", SHAPE)
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["tflop_s"] > 0 and row["gb_s"] > 0 and row["tokens_s"] > 0 and row["floor_ms"] > 0
        assert row["peak_mib"] * 2**20 >= 64 * 8 * 4 and row["backends"] == {}
    assert outcome.rows[1]["speedup"] == 1.0


@pytest.mark.parametrize(
    "provider, says",
    [
        (wrong_value, "tensor 0: error"),
        (lambda x, shape: torch.where(torch.arange(8) == 3, torch.nan, x["x"] ** 2), "tensor 0: error nan"),
        # A shape that would broadcast, another dtype, a wrong gradient, one result more.
        (lambda x, shape: x["x"][:, :1] ** 2, "tensor 0: shape (64, 1) in place of (64, 8)"),
        (lambda x, shape: (x["x"] ** 2).double(), "tensor 0: torch.float64 in place of torch.float32"),
        (lambda x, shape: x["x"] * x["x"].detach(), "tensor 1: error"),
        (lambda x, shape: (x["x"] ** 2, x["x"]), "2 tensors in place of 1"),
    ],
    ids=["value", "nan", "shape", "dtype", "gradient", "number"],
)
def test_wrong_results_are_reported_before_anything_is_timed(provider, says, monkeypatch) -> None:
    timed: list[set[str]] = []

    def note(self: timing.Interleaved, calls: dict[str, Callable[[], object]], **_: object) -> None:
        if "power" in calls:  # and not the fixed work by which the first run of a process knows the machine
            timed.append(set(calls))
        self.rounds = timing.Rounds({name: [timing.Turn(1.0, False)] * 3 for name in calls}, [0, 1, 2])

    monkeypatch.setattr(timing.Interleaved, "take", note)
    outcome = run(dataclasses.replace(TOY, providers={**TOY.providers, "rival": provider}))
    assert list(outcome.wrong) == ["rival"] and says in outcome.wrong["rival"]
    assert timed == [{"fastformer", "power"}]
    assert run(dataclasses.replace(TOY, providers={"fastformer": provider, "power": square})).rows == []
    assert len(timed) == 1  # where this library is wrong, no provider is timed


@pytest.mark.parametrize(
    "wrong, is_staged, status",
    [("rival", False, 0), ("rival", True, 1), ("fastformer", False, 1), ("power", False, 1), (None, False, 0)],
)
def test_providers_that_must_be_right_for_the_command_to_succeed(wrong, is_staged, status, monkeypatch, capsys) -> None:
    """torch.compile's sums are sometimes wrong, which isn't the user's mistake; they are reported nevertheless."""
    providers: dict[str, Provider] = {**TOY.providers, "rival": square}
    if wrong is not None:
        providers[wrong] = wrong_value
    toy = dataclasses.replace(TOY, providers=providers, compares_stages=is_staged)
    monkeypatch.setattr(run_module, "benchmarks", lambda: {"toy": toy})
    command = "--op toy --mode fwd --dtype float32 --device cpu --rounds 3 --seconds 0"
    assert main(command.split()) == status
    printed = capsys.readouterr().out
    assert ("it is wrong" in printed) == (wrong is not None)


def test_rounded_weights_may_have_some_other_integers() -> None:
    def change(count: int, width: int = 8):
        def provider(x: Inputs, shape: Shape) -> torch.Tensor:
            ids = torch.arange(64)
            ids[:count] += 1
            return ids[: 8 * width]

        return provider

    providers = {"fastformer": change(0), "power": change(0), "half": change(32), "more": change(33)}
    providers["short"] = change(0, width=7)
    rival = dataclasses.replace(TOY, providers=providers, agreement={"half": 0.5, "more": 0.5, "short": 0.5})
    wrong = run(rival, "fwd").wrong
    assert list(wrong) == ["more", "short"] and "33 other integers" in wrong["more"]
    assert list(run(dataclasses.replace(rival, agreement={}), "fwd").wrong) == ["half", "more", "short"]


def test_a_rival_may_refuse_and_fastformer_may_not() -> None:
    rival = dataclasses.replace(TOY, providers={**TOY.providers, "rival": refuses})
    for shape in (SHAPE, SHAPE | {"dropout_p": 0.1}):  # with dropout, rivals are checked without it
        outcome = run_case(rival, shape)
        assert "not this shape" in outcome.refused["rival"]
        assert [row["provider"] for row in outcome.rows] == ["fastformer", "power"]
    with pytest.raises(NotImplementedError, match="not this shape"):
        run(dataclasses.replace(TOY, providers={"fastformer": refuses, "power": square}))


def test_a_row_names_the_backends_that_ran() -> None:
    def normed(x: Inputs, shape: Shape) -> torch.Tensor:
        return add_layer_norm(x["x"])[0]

    def plain(x: Inputs, shape: Shape) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x["x"], (8,))

    layer_norm = dataclasses.replace(TOY, providers={"fastformer": normed, "power": plain})
    ours, base = run(layer_norm).rows
    assert ours["backends"] == {"add_layer_norm_fwd": "cpp", "add_layer_norm_bwd": "cpp"} and base["backends"] == {}
    assert ours["extension"] is True and "extension" not in base
    assert "on cpp" in table(ours) and "on" not in table(base).split()
    assert run(layer_norm, "fwd").rows[0]["backends"] == {"add_layer_norm_fwd": "cpp"}

    # Ours on the reference is reported and has no time, and nothing is left to compare.
    with use_backend("reference"):
        outcome = run(layer_norm)
    assert outcome.rows == [] and "only the reference of add_layer_norm_bwd" in outcome.refused["fastformer"]


def dropped(x: Inputs, shape: Shape) -> torch.Tensor:
    return torch.nn.functional.dropout(x["x"] ** 2, shape["dropout_p"])


def test_a_rival_with_its_own_dropout_mask_is_checked_without_dropout() -> None:
    shapes: list[float] = []

    def ours(x: Inputs, shape: Shape) -> torch.Tensor:
        shapes.append(shape["dropout_p"])
        return x["x"] ** 2

    providers: dict[str, Provider] = {"fastformer": ours, "power": dropped, "right": dropped}
    toy = dataclasses.replace(TOY, providers=providers | {"wrong": lambda x, shape: dropped(x, shape) + 1e-3})
    shape = {"rows": 64, "dropout_p": 0.5}
    outcome = run_case(toy, shape, "fwdbwd")
    assert list(outcome.wrong) == ["wrong"] and "tensor 0: error" in outcome.wrong["wrong"]
    assert [row["provider"] for row in outcome.rows] == ["fastformer", "power", "right"]
    assert all(row["shape"] == shape for row in outcome.rows) and set(shapes) == {0.5}
    elsewhere = dataclasses.replace(toy, without_dropout=lambda shape: None)
    assert not run_case(elsewhere, shape, "fwdbwd").wrong


def test_fastformer_with_dropout_must_equal_its_reference() -> None:
    def ours(x: Inputs, shape: Shape) -> torch.Tensor:
        seed = torch.tensor([1, 2]) if forced_backend.get() == "reference" else torch.tensor([1, shape["other"]])
        return add_layer_norm(x["x"], dropout_p=shape["dropout_p"], dropout_seed=seed)[0]

    toy = dataclasses.replace(TOY, providers={"fastformer": ours, "power": dropped})
    for other, wrong in ((2, []), (3, ["fastformer"])):
        shape = {"rows": 64, "dropout_p": 0.5, "other": other}
        outcome = run_case(toy, shape)
        assert list(outcome.wrong) == wrong


@pytest.mark.parametrize(
    "role, times, is_wrong", [("ours", 2.9, False), ("ours", 3.5, True), ("rival", 9, False), ("rival", 12, True)]
)
def test_limits_on_the_errors_of_fastformer_and_rivals(role: str, times: float, is_wrong: bool) -> None:
    """In units of the baseline's error, fastformer may err by three, and rivals by ten."""

    def off(factor: float) -> Provider:
        def run(x: Inputs, shape: Shape) -> torch.Tensor:
            square = x["x"] ** 2
            return square if x["x"].dtype == torch.float64 else square + factor * 1e-3

        return run

    providers = {"fastformer": off(1), "power": off(1), "rival": off(1)}
    name = {"ours": "fastformer", "rival": "rival"}[role]
    outcome = run(dataclasses.replace(TOY, providers=providers | {name: off(times)}), "fwd")
    assert list(outcome.wrong) == ([name] if is_wrong else [])
    staged = dataclasses.replace(TOY, providers=providers | {"rival": off(5)}, compares_stages=True)
    assert list(run(staged, "fwd").wrong) == ["rival"]  # all are ours there


def test_a_missing_package_is_a_row_that_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    needs = {"there": Need("torch", "no"), "absent": Need("no_such_module", "pip install it")}
    providers = {**TOY.providers, "there": square, "absent": refuses}
    rival = dataclasses.replace(TOY, providers=providers, needs=needs)
    outcome = run(rival)
    absent, *timed = outcome.rows
    assert (absent["provider"], absent["missing"]) == ("absent", "pip install it") and "ms_p50" not in absent
    assert [row["provider"] for row in timed] == ["fastformer", "power", "there"]
    assert not outcome.wrong and not outcome.refused
    for row in outcome.rows:
        record.check(record.environment("cpu") | row)
    text = listing([Case(rival, SHAPE, "fwd", "float32")], "cpu", ())
    assert "toy: fastformer, power, there" in text and "without absent: pip install it" in text


def test_a_shape_sets_the_number_of_threads() -> None:
    """The number is restored afterwards, also if fastformer fails."""
    seen, before = set(), torch.get_num_threads()

    def noted(x: Inputs, shape: Shape) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return x["x"] * x["x"]

    threads = before + 1
    case = dataclasses.replace(TOY, providers={"fastformer": noted, "power": square})
    shape = {**SHAPE, "threads": threads}
    outcome = run_case(case, shape)
    assert seen == {threads} and {row["threads"] for row in outcome.rows} == {threads}
    with pytest.raises(NotImplementedError):
        run_case(dataclasses.replace(case, providers={"fastformer": refuses, "power": square}), shape)
    assert torch.get_num_threads() == before


def test_command_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    out = tmp_path / "new.jsonl"
    command = "--op embedding --provider eager --quick --mode fwd --dtype float32 --device cpu --seconds 0 --out"
    assert main([*command.split(), str(out)]) == 0
    assert "on cpp" in capsys.readouterr().out
    rows = record.read(out)
    assert {"commit", "dirty", "device", "threads", "torch", "command", "time", "backends"} <= rows[0].keys()
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(row | {"ms_p50": 2 * row["ms_p50"]}) + "\n" for row in rows))
    assert all(row["quick"] for row in rows)
    text = compare(old, out)
    assert text.count("  2.00x  ") == len(rows) == 2
    assert text.count("  2.00x  (against eager: ") == 1 and "1.00x -> 1.00x" not in text
    for line in ("{", "[]", "3"):
        old.write_text(line + "\n")
        with pytest.raises(ValueError, match="old.jsonl, line 1: expected a JSON object"):
            compare(old, out)
    assert "line 1: expected a JSON object" in refused(main, "--compare", str(old), str(tmp_path / "missing.jsonl"))


def options(**fields: object) -> argparse.Namespace:
    unset = dict.fromkeys(("suite", "op", "mode", "dtype", "provider"))
    return argparse.Namespace(**{**unset, "shape": [], "quick": False, "device": "cpu", **fields})


def test_a_stopped_run_keeps_and_summarises_its_rows(tmp_path, capsys, monkeypatch) -> None:
    row = {"suite": "ops", "op": "rotary", "mode": "fwd", "dtype": "float32", "shape": {}, "provider": "eager",
           "ms_p50": 1.0, "ms_p20": 1.0, "ms_p80": 1.0, "speedup": 1.0, "baseline": "eager", "ours": 2.5}  # fmt: skip

    def stopped(cases: list[Case], *_: object, **__: object) -> Iterator[tuple[Case, Outcome]]:
        yield cases[0], Outcome([row])
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_cases", stopped)
    out = tmp_path / "cpu.jsonl"
    assert main(["--op", "rotary", "--device", "cpu", "--out", str(out)]) == 130
    assert [row["ours"] for row in record.read(out)] == [2.5]
    printed = capsys.readouterr()
    assert "ops: ours is faster than" in printed.out and "2.50x" in printed.out and "stopped: " in printed.err


def test_the_choice_of_suites() -> None:
    available = {suite: dataclasses.replace(TOY, name=suite, suite=suite, quick=1) for suite in reversed(SUITES)}

    def names(**fields: object) -> list[str]:
        return list(dict.fromkeys(case.benchmark.name for case in chosen_cases(available, options(**fields))))

    assert names() == list(SUITES[:-1])
    assert names(suite=["decoding", "ops"]) == ["ops", "decoding"]
    assert names(op=["experiments"]) == ["experiments"] and names(suite=["ops"], op=["model"]) == []
    complaint = nothing_fits(available, options(suite=["ops"], op=["model"]), [])
    assert complaint == "no benchmark of model is of the suites ops"


def test_quick_takes_the_first_dtype_and_both_ends_of_the_modes() -> None:
    toy = dataclasses.replace(TOY, modes=("fwd", "bwd", "fwdbwd"), shapes={"cpu": [SHAPE, {"rows": 1}]}, quick=1)

    def cases(**fields: object) -> list[tuple[str, str, int]]:
        chosen = chosen_cases({"toy": toy}, options(**fields))
        return [(case.mode, case.dtype, case.shape["rows"]) for case in chosen]

    assert cases(quick=True) == [("fwd", "float32", 64), ("fwdbwd", "float32", 64)]
    assert cases(quick=True, mode=["bwd"], dtype=["bfloat16"]) == [("bwd", "bfloat16", 64)]
    assert len(cases()) == 2 * 2 * 3


def test_a_name_given_twice_takes_either_value() -> None:
    toy = dataclasses.replace(
        TOY, modes=("fwd",), dtypes=("float32",), shapes={"cpu": [{"a": a, "b": b} for a in (1, 2, 3) for b in (1, 2)]}
    )
    chosen = chosen_cases({"toy": toy}, options(shape=[("a", "1"), ("b", "2"), ("a", "3")]))
    assert [case.shape for case in chosen] == [{"a": 1, "b": 2}, {"a": 3, "b": 2}]


def test_a_published_run_is_recorded_and_then_written_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[str] = []

    def write(arguments: list[str]) -> int:
        published.append(f"tables, after {len(record.read(tmp_path / 'cpu.jsonl'))} rows")
        return 0

    monkeypatch.setattr(run_module, "benchmarks", lambda: {"toy": TOY})
    monkeypatch.setattr(run_module, "RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.readme.main", write)
    monkeypatch.setattr("benchmarks.plot.main", lambda arguments: published.append("pictures"))
    command = "--op toy --mode fwd --dtype float32 --device cpu --rounds 3 --seconds 0 --publish"
    assert main(command.split()) == 0 and published == ["tables, after 2 rows", "pictures"]
    for more in ("--quick", "--out x.jsonl"):  # neither is published
        with pytest.raises(SystemExit):
            main([*command.split(), *more.split()])
    assert len(published) == 2


def test_list_measures_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "run_cases", refuses)
    assert main(["--list", "--device", "cpu", "--suite", "ops", "--op", "attention", "--quick"]) == 0
    text = capsys.readouterr().out
    assert "attention fwd float32 batch=" in text and "without sdpa cudnn: it is for cuda alone" in text
