"""The programs of a suite are started, checked and timed; absent, wrong and broken programs are reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.measure import record
from benchmarks.peers import models, side_by_side, suite
from benchmarks.peers.job import JobResult, Missing, PeerJob, StepJob
from benchmarks.peers.suite import SuitePlan
from benchmarks.peers.worker import Failed, WorkerConfig

ENVIRONMENT = record.environment("cpu")


class FakeWorker:
    """The worker of a peer that is 1, 2, ... times slower than the first one, and fails as `says` prescribes."""

    alive: list[FakeWorker] = []
    turns: list[str] = []
    says: dict[str, str] = {}  # peer, or peer and precision -> what is the matter

    def __init__(self, place: WorkerConfig) -> None:
        self.place = place
        self.name = f"{place.peer} {place.precision}"
        self.matter = FakeWorker.says.get(place.peer) or FakeWorker.says.get(self.name)
        self.seconds = 1.0 + len({fake.name for fake in FakeWorker.alive if fake.name != self.name})
        FakeWorker.alive.append(self)

    def ready(self) -> str | None:
        if self.matter == "broken":
            raise Failed("broken: its process ended")
        return "not installed: pip install it" if self.matter == "absent" else None

    def turn(self, job: PeerJob | StepJob) -> JobResult:
        if self.matter == "breaks":
            raise Failed("breaks: its process ended")
        if self.matter == "refuses":
            raise Missing("can't do that")
        FakeWorker.turns.append(f"{self.name} {self.place.threads}")
        if isinstance(job, StepJob):
            if job.results is not None:
                values = torch.tensor([1.0, 2.0 + 0.01 * (self.place.precision == "int8")])
                if self.matter == "wrong":
                    values[1] = 9.0 if self.place.precision == "int8" else 2.0 + 0.02 * len(FakeWorker.says)
                torch.save((values, torch.tensor(2.0)), job.results)
            return JobResult(self.seconds, None)
        if self.place.peer == "read":
            return JobResult(1e-3, None)
        token = 6 if self.matter == "wrong" else 5
        slower = 2.0 if self.place.threads == 1 else 1.0
        return JobResult(
            self.seconds * slower, [[token] * (job.new_tokens or 1) for batch in job.batches for _ in batch]
        )

    def close(self) -> None:
        FakeWorker.alive.remove(self)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FakeWorker, "says", {})
    monkeypatch.setattr(FakeWorker, "turns", [])
    monkeypatch.setattr(side_by_side, "Worker", FakeWorker)
    monkeypatch.setattr(side_by_side, "PAUSE", 0.0)
    yield
    assert not FakeWorker.alive  # whatever happened, no process is left behind


TINY = SuitePlan({"name": "tiny"}, ("int8", "fp32"), (1, 2), (4,))
BERT = SuitePlan(models.QUICK[0], threads=(2,))


def rows(plan: SuitePlan, rounds: int = 3) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows by provider and precision, after checking that each is valid."""
    measured = list(suite.measure(plan, rounds))
    for row in measured:
        if "wrong" not in row:
            record.check(ENVIRONMENT | row)
    return {(row["provider"], row.get("precision") or row["dtype"]): row for row in measured}


def test_decoders_take_turns_and_are_ranked() -> None:
    by_peer = rows(TINY)
    assert set(by_peer) == {
        ("fastformer", "int8"), ("fastformer", "fp32"), ("ctranslate2", "int8"), ("ctranslate2", "fp32"),
        ("fastformer, CTranslate2's folder", "int8"), ("fastformer, CTranslate2's folder", "fp32"),
        ("transformers", "fp32"),  # which has no int8
    }  # fmt: skip
    ours, rival = by_peer["fastformer", "int8"], by_peer["ctranslate2", "int8"]
    assert (ours["threads"], ours["ms_by_threads"]) == (2, {"1": 2000.0, "2": 1000.0}) and ours["rounds"] == 3
    assert (ours["speedup"], ours["baseline"]) == (5.0, "ctranslate2 int8") and rival["speedup"] == 1.0
    assert ours["share_of_dram"] > 0 and ours["share_of_cached"] > 0
    assert ours["tokens_s"] == 48.0 and ours["same_tokens"] == 4 and ours["suite"] == "decoding"
    timed = [turn for turn in FakeWorker.turns if "read" not in turn]
    # Two turns each to begin with; then all of them, there and back again.
    order = list(dict.fromkeys(timed))
    assert len(order) == 14 and timed[28:] == [*order, *order[::-1], *order]


def test_models_are_measured_against_the_model_as_it_is() -> None:
    by_peer = rows(BERT)
    others = {"torch.compile", "accelerated, torch.compile", "openvino", "onnxruntime", "encoder engine"}
    assert {peer for peer, precision in by_peer if precision == "fp32"} == {"as it is", "accelerated", *others}
    assert {peer for peer, precision in by_peer if precision == "int8"} == {
        "accelerated", "encoder engine", "onnxruntime", "openvino"
    }  # fmt: skip
    assert ("onnxruntime", "bf16") not in by_peer and ("openvino", "bf16") in by_peer
    assert by_peer["accelerated", "fp32"]["speedup"] == 0.5 and by_peer["as it is", "fp32"]["speedup"] == 1.0
    assert by_peer["as it is", "fp32"]["ours"] == 0.5 and by_peer["torch.compile", "fp32"]["ours"] == 2.0
    assert "ours" not in by_peer["accelerated", "fp32"] and by_peer["openvino", "int8"]["ours"]
    assert by_peer["openvino", "int8"]["baseline"] == "as it is"
    assert by_peer["openvino", "int8"]["error"] == pytest.approx(0.005) and by_peer["openvino", "fp32"]["error"] == 0.0
    row = by_peer["accelerated", "bf16"]
    assert (row["suite"], row["op"], row["model"]) == ("model", "drop_in", "bert_tiny")
    assert row["shape"] == {"batch": 8, "seqlen": "8 to 64", "mode": "forward"} and 0.2 < row["padding"] < 0.5
    timed = FakeWorker.turns[
        FakeWorker.turns.index("as it is bf16 2") :
    ]  # the second group of processes: a check, two turns, three
    order = list(dict.fromkeys(timed))
    assert len(order) == 6 and timed[18:] == [*order, *order[::-1], *order]


def test_sentences_are_measured_in_each_order() -> None:
    plan = SuitePlan(models.QUICK[1], ("fp32",), (2,), only=("fastformer.Encoder", "sentence-transformers"))
    FakeWorker.says = {"sentence-transformers": "absent"}
    measured = [
        (row["provider"], row["shape"]["order"], row["shape"]["batch"], row["padding"])
        for row in suite.measure(plan, 1)
    ]
    assert {(provider, order) for provider, order, _, _ in measured} == {
        (provider, order)
        for provider in ("as it is", "fastformer.Encoder", "sentence-transformers")
        for order in models.ORDERS
    }
    assert {batch for _, order, batch, _ in measured if order == "one by one"} == {1}
    padding = {order: share for _, order, _, share in measured}
    assert padding["one by one"] == 0.0 < padding["sorted"] < padding["mixed"]
    assert sum("as it is" in turn for turn in FakeWorker.turns) == 3 * 4  # a check, two turns and one that counts


@pytest.mark.parametrize(
    ("plan", "field", "value", "others"),
    [
        (SuitePlan(models.QUICK[1], ("fp32",), (2,)), "order", "sorted", 2),
        (SuitePlan({"name": "llama-tiny"}, ("fp32",), (2,), (1, 16)), "new", 32, 3),
        (SuitePlan(models.QUICK[0], ("fp32",), (2,)), "mode", "forward", 0),
    ],
    ids=["models", "decoders", "all"],
)
def test_shapes_with_other_fields_are_not_measured(plan: SuitePlan, field: str, value: object, others: int) -> None:
    every = {str(row["shape"]): row["shape"][field] for row in suite.measure(plan, 1)}
    FakeWorker.turns.clear()
    kept = {str(row["shape"]) for row in suite.measure(replace(plan, shape={field: str(value)}), 1)}
    assert kept == {shape for shape, found in every.items() if found == value} and len(every) - len(kept) == others
    turns = len(FakeWorker.turns)
    assert not list(suite.measure(replace(plan, shape={field: "none"}), 1)) and len(FakeWorker.turns) == turns > 0


def test_absent_peers_are_rows_that_say_how_to_install_them() -> None:
    FakeWorker.says = {"ctranslate2": "absent"}
    by_peer = rows(TINY)
    row = by_peer["ctranslate2", "int8"]
    assert row["missing"] == "not installed: pip install it" and row["shape"] == {"batch": 4, "num_beams": 1}
    assert by_peer["fastformer", "int8"]["baseline"] == "transformers fp32"
    FakeWorker.says = {"openvino": "absent"}
    by_peer = rows(BERT)
    assert all(by_peer["openvino", precision]["missing"] for precision in ("fp32", "bf16", "int8"))
    assert "ms_p50" in by_peer["onnxruntime", "fp32"]
    peers = ("as it is", "accelerated", "torch.compile", "accelerated, torch.compile")
    FakeWorker.says = dict.fromkeys(peers, "absent")
    by_peer = rows(SuitePlan(models.QUICK[0], ("fp32",), (1,), only=("accelerated", "torch.compile")))
    assert len(by_peer) == 3 and all("missing" in row for row in by_peer.values())


@pytest.mark.parametrize(("plan", "peer"), [(TINY, "ctranslate2"), (BERT, "openvino")], ids=["decoders", "models"])
def test_a_wrong_peer_is_not_timed(plan: SuitePlan, peer: str) -> None:
    FakeWorker.says = {f"{peer} fp32": "wrong"}
    row = rows(plan)[peer, "fp32"]
    assert row["wrong"] and "ms_p50" not in row and "speedup" not in row
    assert FakeWorker.turns.count(f"{peer} fp32 2") <= 3  # those that found it out
    assert "ms_p50" in rows(plan)[peer, "int8"]  # which may be off, and says how far


@pytest.mark.parametrize("matter", ["broken", "breaks", "refuses"])
def test_a_broken_rival_is_a_row_and_a_broken_fastformer_an_error(matter: str) -> None:
    FakeWorker.says = {"torch.compile": matter, "onnxruntime int8": matter}
    by_peer = rows(BERT)
    assert by_peer["torch.compile", "fp32"]["missing"] and by_peer["onnxruntime", "int8"]["missing"]
    assert "ms_p50" in by_peer["onnxruntime", "fp32"] and "ms_p50" in by_peer["accelerated", "fp32"]
    if matter != "refuses":
        for plan, ours in ((BERT, "accelerated"), (TINY, "fastformer"), (BERT, "as it is")):
            FakeWorker.says = {ours: matter}
            with pytest.raises(Failed, match="its process ended"):
                rows(plan)


def test_suites() -> None:
    for name in suite.SUITES:
        for quick in (True, False):
            assert all(plan.places(plan.precisions) and plan.threads for plan in suite.plans(name, quick=quick))
    names = {plan.case["name"] for plan in suite.plans("model", quick=False)}
    assert names == {"bert_base", "minilm", "gpt2_small", "marian_base", "torch_nn_encoder"}
    with pytest.raises(ValueError, match="decoding, model, got 'ops'"):
        next(suite.run("ops"))
