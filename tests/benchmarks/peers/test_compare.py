"""Tests the comparison with other programs: order of turns, choice of thread count, and the floor of times."""

from __future__ import annotations

import functools
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.measure.timing import Timing
from benchmarks.peers import cases, worker
from benchmarks.peers.__main__ import main
from benchmarks.peers.compare import Fastest, PeerKey, busy_neighbours, num_tokens, rival, steps, take_turns
from benchmarks.peers.job import PeerJob
from benchmarks.peers.reading import DRAM, bytes_per_step
from benchmarks.peers.side_by_side import rates
from fastformer.models import GPT, Transformer


def test_turns_are_interleaved() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    measured = take_turns({name: functools.partial(turn, name) for name in "abc"}, 3, pause=0.0)
    assert "".join(order) == "abccbaabc"  # so that none always comes behind the same one
    assert measured == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


def best_of(*things: tuple[str, str]) -> dict[PeerKey, Fastest]:
    return {PeerKey(*thing): Fastest(1, Timing(1.0, 1.0, 1.0)) for thing in things}


def test_rivals() -> None:
    everyone = best_of(("ctranslate2", "int8"), ("ctranslate2", "fp32"), ("transformers", "fp32"))
    assert rival(PeerKey("fastformer", "int8"), everyone) == ("ctranslate2", "int8")
    assert rival(PeerKey("fastformer", "fp32"), everyone) == ("ctranslate2", "fp32")
    assert rival(PeerKey("fastformer", "bf16"), everyone) == ("ctranslate2", "int8")  # it has no bf16
    gpt = best_of(("transformers", "fp32"), ("llama.cpp", "int8"))
    assert rival(PeerKey("fastformer", "int8"), gpt) == ("llama.cpp", "int8")
    alone = best_of(("transformers", "fp32"))
    assert rival(PeerKey("fastformer", "int8"), alone) == ("transformers", "fp32")
    assert rival(PeerKey("fastformer", "int8"), {}) is None


def test_steps_and_tokens() -> None:
    forced = PeerJob([[[3], [4]], [[5], [6]]], 4, 10)
    assert steps(forced, None) == 20 and num_tokens(forced, None) == 40
    free = PeerJob([[[3], [4]], [[5]]], 1, None)
    outputs = [[7, 1], [7, 7, 7, 1], [7, 7, 1]]
    assert steps(free, outputs) == 4 + 3 and num_tokens(free, outputs) == 9
    assert steps(PeerJob(free.batches, 4, None), outputs) is None  # beams go on behind what is found
    assert free.limit([[3], [4, 5, 6]]) == 103 and forced.limit([[3]]) == 10


def test_busy_processes_end_with_the_turn() -> None:
    children = psutil.Process().children
    before = set(children())
    with busy_neighbours(2):
        assert len(set(children()) - before) == 2
    assert set(children()) == before


def test_bytes_of_a_step() -> None:
    model = Transformer.from_preset("tiny", vocab_size=500)
    d, ff = 128, 512
    layer = 4 * d * d + 2 * d * d + 2 * d * ff  # the keys and values of cross-attention are there once a source
    assert bytes_per_step(model, "int8") == 500 * d + 2 * layer
    assert bytes_per_step(model, "bf16") == 2 * bytes_per_step(model, "int8")
    gpt = GPT.from_preset("tiny", vocab_size=500)
    assert bytes_per_step(gpt, "fp32") == 4 * (500 * d + 4 * (4 * d * d + 2 * d * 4 * d))


def test_a_row_shows_its_distance_from_the_floor() -> None:
    job = PeerJob([[[3], [4]]], 4, 10)
    row = rates(1000, 0.5, job, None, {DRAM: 40_000.0, 1000: 80_000.0})
    assert row["tokens_s"] == 40
    # 10 steps of 1000 bytes in half a second.
    assert row["ms_step"] == 50.0 and (row["share_of_dram"], row["share_of_cached"]) == (0.5, 0.25)


def test_each_source_has_a_length() -> None:
    lines = [[5] * 9, [6] * 7, [7] * 7, *[[8] * 40] * 60]
    sources = cases.mixed_sources(lines, [1])
    assert sorted(map(len, sources)) == list(range(8, 61)) and [len(s) for s in sources] != list(range(8, 61))
    assert all(source[-1] == 1 and 1 not in source[:-1] for source in sources)
    assert [6] * 7 + [1] in sources and [5] * 9 + [1] in sources  # lines as they are, where there is one
    with pytest.raises(ValueError, match="more tokens"):
        cases.mixed_sources(lines[:5], [1])


def test_jobs_are_the_same_in_each_process_and_never_end() -> None:
    assert cases.make_job({"name": "tiny"}, 3, 4) == cases.make_job({"name": "tiny"}, 3, 4)
    first, second = (cases.make_model({"name": "tiny"}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not first.output_weight[1].any() and not first.output_weight[0].any()
    with pytest.raises(ValueError, match="batch 1"):
        cases.make_job({"name": "gpt-tiny"}, 2, 1)


def test_a_worker_answers_orders_and_reports_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    job = cases.make_job({"name": "tiny"}, 2, 1)
    place = worker.WorkerConfig("fastformer", "fp32", torch.get_num_threads(), {"name": "tiny"}, {})
    answers = io.StringIO()
    worker.serve(place, io.StringIO(json.dumps(asdict(job)) + "\n"), answers)
    ready, turn = map(json.loads, answers.getvalue().splitlines())
    assert ready == {} and turn["seconds"] > 0 and [len(row) for row in turn["tokens"]] == [12, 12]

    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    for peer, model, message in (
        ("llama.cpp", "gpt-tiny", "no llama-bench: `make peers` builds it"),
        ("ctranslate2", "tiny", "not installed: pip install ctranslate2"),
    ):
        answers = io.StringIO()
        options = {"llama_bench": "/nowhere/llama-bench"}
        worker.serve(worker.WorkerConfig(peer, "int8", 1, {"name": model}, options), io.StringIO(""), answers)
        assert json.loads(answers.getvalue())["missing"].startswith(message)


def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the whole program, in one process instead of several workers."""

    class Here:
        def __init__(self, place: worker.WorkerConfig) -> None:
            self.peer = worker.peers(place.case)[place.peer](
                cases.make_model(place.case), place.precision, torch.get_num_threads(), place.options
            )

        def ready(self) -> None:
            return None

        def turn(self, job: PeerJob):
            return self.peer.turn(job)

        def close(self) -> None:
            pass

    monkeypatch.setattr("benchmarks.peers.side_by_side.Worker", Here)
    monkeypatch.setattr("benchmarks.peers.side_by_side.TURN", 0.01)
    monkeypatch.setattr("benchmarks.peers.side_by_side.PAUSE", 0.0)
    monkeypatch.setattr("benchmarks.peers.side_by_side.DRAM", 2**20)
    out = tmp_path / "peers.jsonl"
    # fmt: off
    arguments = ["--case", "tiny", "--batch", "2", "--beams", "1", "--precision", "fp32", "--threads", "1",
                 "--peer", "fastformer", "--rounds", "2", "--out", str(out)]
    # fmt: on
    assert main(arguments) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["op"], row["model"], row["provider"], row["precision"]) == ("peers", "tiny", "fastformer", "fp32")
    assert row["shape"] == {"batch": 2, "num_beams": 1} and row["threads"] == 1 and row["same_tokens"] == 2
    assert row["tokens_s"] == pytest.approx(24e3 / row["ms_p50"])
    assert row["share_of_dram"] > 0 and row["share_of_cached"] > 0
    assert "tiny batch=2" in capsys.readouterr().out
