"""Each small program of the benchmarks measures what it says, and writes valid rows."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks import processes, retrieval, trained_draft
from benchmarks import token_times as token_times_module
from benchmarks.cases.models.bench_decoding import ENGINES
from benchmarks.measure import record
from benchmarks.measure.synthetic_text import write_pairs
from benchmarks.peers.cases import make_model
from benchmarks.peers.compare import fair_share
from benchmarks.peers.servers import OURS, requests
from benchmarks.publish.latest import latest
from benchmarks.serving_costs import PARTS
from benchmarks.token_times import PlotLine, token_times
from fastformer.commands import _parsing
from fastformer.commands import train as command
from fastformer.data.tokenizer import ByteTokenizer
from fastformer.generation.requests import run_batch
from fastformer.models import GPT
from fastformer.ops import _extension
from fastformer.training import TrainConfig
from tests.benchmarks.conftest import Refused
from tests.benchmarks.running import checked_rows
from tests.covering import each
from tests.encoding.folders import TEXTS, bert
from tests.generation.small import needs_cpp

THREADS = ["--threads", str(torch.get_num_threads())]
Measured = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    """Runs a program, which has to succeed, and returns its rows."""

    def run(program: str, words: str, *more: object) -> list[dict[str, Any]]:
        out = tmp_path / "rows.jsonl"
        every = [*words.split(), *map(str, more), "--out", str(out)]
        assert importlib.import_module(f"benchmarks.{program}").main(every) == 0
        return checked_rows(out)

    return run


def test_the_cost_of_a_constraint(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance", reason="the llguidance library is not installed")
    sizes = "--dim 64 --layers 1 --vocab 400 --tokens 8 --rounds 1 --rows 1 2 --precision fp32 --forced"
    rows = measured("structured", sizes, *THREADS)
    assert [(row["provider"], row["shape"]["rows"]) for row in rows] == [
        (name, count) for count in (1, 2) for name in ("free", "schema")
    ]
    for free, schema in zip(rows[::2], rows[1::2], strict=True):
        assert schema["baseline"] == "free"
        assert schema["speedup"] == pytest.approx(free["ms_p50"] / schema["ms_p50"])  # of one round
    assert "times" in capsys.readouterr().out


@needs_cpp
def test_what_a_trained_draft_model_gives(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in range(4):  # stand for Python's library
        functions = [f"def add_{i}(a, b):\n    return a + {module} * b + {i}\n\n\n" for i in range(40)]
        (tmp_path / f"module_{module}.py").write_text("".join(functions))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    sizes = "--dim 64 --layers 1 --draft_dim 64 --draft_layers 1 --vocab 300 --steps 2 --draft_steps 2 --texts 4"
    again = f"{sizes} --prompts 3 --tokens 12 --rounds 1 --text whole --precision fp32", "--folder", tmp_path / "pair"
    plain, drafting = measured("trained_draft", *again, *THREADS)
    assert plain["shape"] == drafting["shape"] and plain["shape"]["tokens"] <= 3 * 12
    assert drafting["speedup"] == pytest.approx(plain["ms_p50"] / drafting["ms_p50"])  # of one round
    assert 0 <= drafting["value"] <= 1 and "accepted" in drafting["unit"]
    assert len(list((tmp_path / "pair" / "held_out").iterdir())) == 1
    weights = tmp_path / "pair" / "draft" / "model.safetensors"
    trained = weights.stat().st_mtime_ns
    measured("trained_draft", *again, "--tokens", 7, *THREADS)
    assert weights.stat().st_mtime_ns == trained, "the pair is kept"
    said = capsys.readouterr().out
    assert said.count("times faster with drafts") == said.count("no text of at least 8 tokens") == 1


def test_a_text_is_new_until_it_repeats_four_tokens() -> None:
    assert trained_draft.num_new([*range(20)], 5) == 15
    assert trained_draft.num_new([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 7], 5) == 4, "what its prompt has counts"
    assert trained_draft.num_new([1, 1, 1, 1, 1, 2, 3, 4, 5, 3, 4, 5, 6], 5) == 8


def test_long_contexts(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--contexts 40 70 --dim 128 --heads 2 --kv_heads 1 --layers 1 --rounds 1 --steps 1"
    rows = measured("long_contexts", sizes)
    assert [row["shape"]["context"] for row in rows] == [40, 40, 70, 70]
    for plain, rounded in zip(rows[::2], rows[1::2], strict=True):
        assert plain["difference"] == 0 < rounded["difference"] < 0.3
        assert rounded["speedup"] == pytest.approx(plain["ms_p50"] / rounded["ms_p50"])  # of one round
        assert rounded["value"] / plain["value"] == pytest.approx(68 / 128)  # bytes of 64 numbers
    assert capsys.readouterr().out.count("times faster") == 2


def test_an_encoder_beside_busy_processes(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--dim 32 --layers 1 --batch 2 --seqlen 8 --provider fastformer --rounds 1 --seconds 0.01"
    rows = measured("busy_neighbour", sizes, *THREADS)
    assert [row["mode"] for row in rows] == ["step", "fwd"]
    for row in rows:
        assert row["neighbours"] == 1 and row["fair_share"] == fair_share(int(THREADS[1]), 1, os.cpu_count() or 1)
        assert row["speedup"] == pytest.approx(row["ms_quiet"] / row["ms_p50"])
        assert row["shape"]["dim"] == 32 and row["provider"] == "fastformer"
    assert len(capsys.readouterr().out.splitlines()) == 2


@needs_cpp
def test_each_turn_of_a_chat_reads_only_new_tokens(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--turns 3 --system 40 --question 8 --answer 5 --layers 1 --dim 64"
    rows = measured("chat_turns", sizes, *THREADS)
    printed = capsys.readouterr().out.splitlines()
    # Of prompts of 48, 61 and 74 tokens; whole blocks of what came before their last token are there.
    assert [line.partition(", ")[2].partition(" of")[0] for line in printed] == ["48", "29", "26"]
    assert [row["provider"] for row in rows] == ["Generator", "generate"]
    for row in rows:
        assert len(row["curve"]["y"]) == 3 and min(row["curve"]["y"]) > 0


# Precisions.

RIGHT = ["ein Hund läuft durch das Gras", "zwei Männer sitzen auf einer Bank"]


class FakeTranslator:
    """A translator that is right, except for the second line in int8 with beams."""

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def translate(self, texts: list[str], *, num_beams: int) -> list[str]:
        assert texts == ["a dog", "two men"]
        return [RIGHT[0], "zwei Hunde"] if (self.precision, num_beams) == ("int8", 4) else RIGHT


def test_each_precision_has_its_translations(measured, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("sacrebleu", reason="not installed: pip install 'fastformer[train]'")

    def opened(run: str, *, device: str, precision: str) -> FakeTranslator:
        assert (run, device) == ("RUN", "cpu")
        return FakeTranslator(precision)

    monkeypatch.setattr("benchmarks.precisions.Translator.from_pretrained", opened)
    (tmp_path / "en").write_text("a dog\ntwo men\n", encoding="utf-8")
    (tmp_path / "de").write_text("\n".join(RIGHT) + "\n", encoding="utf-8")
    measured_rows = measured("precisions", "RUN", tmp_path / "en", tmp_path / "de")
    rows = {(row["precision"], row["shape"]["num_beams"]): row for row in measured_rows}
    assert rows.keys() == {(precision, beams) for precision in ("fp32", "bf16", "int8", "int4") for beams in (1, 4)}
    for case, row in rows.items():
        assert row["same_tokens"] == (1 if case == ("int8", 4) else 2)
        assert (row["sacrebleu_test2016"] < 99) == (row["chrf_test2016"] < 99) == (case == ("int8", 4))
    assert "1 of 2 lines as in fp32" in capsys.readouterr().out


@pytest.mark.skipif(_extension.module() is None, reason="no C++ extension for this CPU")
def test_a_perplexity_equals_the_models(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu", reason="not installed: pip install 'fastformer[train]'")
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    special = {"vocab_size": tokenizer.vocab_size, "special_ids": tokenizer.special_ids}
    model = GPT.from_preset("tiny", d_model=32, num_heads=2, num_layers=2, max_len=16, **special).eval()
    model.save_pretrained(tmp_path, tokenizer)
    text = tmp_path / "text"
    text.write_text("the dog reads a book in the park, two birds read another one", encoding="utf-8")
    rows = measured("precisions", f"{tmp_path} {text} --window 16")
    windows = torch.tensor(tokenizer.encode(text.read_text())[:48]).view(3, 16)
    with torch.inference_mode():
        log_probs = model(windows[:, :-1]).log_softmax(-1)
    expected = float((-log_probs.gather(2, windows[:, 1:, None])).mean().exp())
    plain, rounded = ([row for row in rows if row["op"] == op] for op in ("score_precisions", "score_cache_int8"))
    for row, most in zip(plain, (1e-5, 1e-2, 2e-2, 0.2), strict=True):
        assert row["perplexity"] == pytest.approx(expected, rel=most), row["precision"]
    for row, same in zip(rounded, plain, strict=True):
        assert row["precision"] == same["precision"]
        assert row["perplexity"] == pytest.approx(same["perplexity"], rel=1e-3), row["precision"]
    assert len({row["perplexity"] for row in rows}) == len(rows) == 8


# Preparing a corpus.


def test_made_up_pairs(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.tsv", 500, seed=1, shortest=2, longest=5)
    pairs = [line.split("\t") for line in path.read_text().splitlines()]
    assert len(pairs) == 500 and all(len(pair) == 2 for pair in pairs)
    assert {len(side.split()) for pair in pairs for side in pair} == {2, 3, 4, 5}
    counts = Counter(word for source, _ in pairs for word in source.split())
    assert counts.most_common(1)[0][1] > 50 and len(counts) > 300  # few words often, many rarely
    assert write_pairs(tmp_path / "b.tsv", 500, seed=1, shortest=2, longest=5).read_text() == path.read_text()
    assert write_pairs(tmp_path / "c.tsv", 500, seed=2, shortest=2, longest=5).read_text() != path.read_text()


def test_the_time_of_a_preparation(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="shards are files of Arrow")
    alone, whole, clock = measured("preparing", "--pairs 300 --processes 1 --rounds 1")
    assert 0 < alone["ms_p50"] < whole["ms_p50"] and 0 < whole["speedup"] < 1
    assert clock["shape"]["processes"] == 1 and clock["speedup"] == 1.0
    assert "of which tokenizers are" in capsys.readouterr().out


def test_a_table_of_retrieval_has_all_precisions(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(tmp_path / "model")
    monkeypatch.setattr(retrieval, "sentences", lambda: TEXTS)
    now, seconds = record.environment("cpu"), itertools.count()
    monkeypatch.setattr(record, "environment", lambda device: now | {"time": f"2026-01-01T00:00:{next(seconds):02}"})
    rows = measured("retrieval", str(tmp_path / "model"), "--precision", "fp32", "int8")
    assert len(rows) == 2 * 2 * len(retrieval.MEASURES) and list(latest(rows)) == rows
    assert {row["shape"]["queries"] for row in rows} == {len(TEXTS) * retrieval.DRAWS}


def test_queries_find_the_sentences_that_they_were_made_of() -> None:
    texts = [f"sentence {number}" for number in range(30)]
    encoder = SimpleNamespace(encode=lambda found, normalize: np.eye(30)[[texts.index(text) for text in found]])
    assert retrieval.measured(encoder, texts * 2, texts) == dict.fromkeys(retrieval.MEASURES, 100.0)
    one_in_three = [*texts, *texts[::-1], *texts[3:], *texts[:3]]
    found = retrieval.measured(encoder, one_in_three, texts)
    assert found["recall at 1"] == pytest.approx(100 / 3)


@pytest.mark.slow  # 20 s: both commands of the benchmark run, and the system says what they took
def test_the_memory_of_a_small_corpus(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="shards are files of Arrow")
    rows = measured("large_corpus", "--pairs 20000 --steps 2 --shards 6", "--folder", tmp_path)
    assert all(100 < row["peak_mib"] < 1000 for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


# Training on several processes.


def take(turns, rounds):
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            samples[name].append(turn())
    return samples


def test_trainings_on_several_processes(measured, monkeypatch, capsys) -> None:
    """Fake trainings report given results; the flags with which they are started are valid."""
    speeds = {None: 100.0, "ddp": 180.0, "fsdp": 150.0}
    started: list[str | None] = []

    def trained(words: list[str], run: Path) -> float:
        after = words[words.index("train") + 1 :]
        values = _parsing.parse(command, "train", after)
        config = TrainConfig.from_dict({k: v for k, v in values.items() if k not in ("run", "config", "resume")})
        assert (config.steps, config.accumulate) == (16, 2) and Path(str(config.train_data)).is_dir()
        kind = config.sharding if "torch.distributed.run" in words else None
        started.append(kind)
        run.mkdir()
        lines = [{"kind": "train", "tokens_per_second": speed} for speed in (1.0, 1.0, *[speeds[kind]] * 3)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 1 / processes.tokens_a_second(run)

    monkeypatch.setattr(processes, "train", trained)
    monkeypatch.setattr(processes, "_PAIRS", 200)
    monkeypatch.setattr(processes, "_VOCABULARY", 80)
    monkeypatch.setattr("benchmarks.processes.take_turns", lambda turns, rounds, pause: take(turns, rounds))
    rows = measured("processes", "--rounds 2 --steps 16")
    assert started == [None, "ddp", "fsdp"] * 2
    assert [row["shape"]["processes"] for row in rows] == [1, 2, 2]
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 1.8, 1.5])
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.slow  # 40 s: the trainings of the benchmark run, and say a speed
def test_a_training_of_each_kind_runs(measured: Measured) -> None:
    rows = measured("processes", "--d_model 32 --layers 1 --max_tokens 256 --steps 8 --rounds 1")
    assert all(row["tokens_s"] > 0 for row in rows)


# Servers.


def test_requests_are_mixed_and_the_same_in_each_run() -> None:
    mixed = requests(500, lengths=range(3, 9), new_tokens=lambda length: 2 * length)
    assert mixed == requests(500, lengths=range(3, 9), new_tokens=lambda length: 2 * length)
    assert {len(request.words) for request in mixed} == set(range(3, 9))
    assert all(request.new_tokens == 2 * len(request.words) for request in mixed)
    assert all(3 <= word < 500 for request in mixed for word in request.words)


@pytest.mark.slow  # proves that servers start, answer in full and give lines of the schema; each takes seconds to start
@needs_cpp
@pytest.mark.parametrize("case", ["tiny", "llama-tiny"])
def test_every_server_writes_its_rows(case: str, measured: Measured) -> None:
    rows = measured("serving", f"--case {case} --clients 1 3 --rounds 2 --seconds 1 --warm_up 0.3 --threads 1")
    ours = {(row["precision"], row["shape"]["clients"]): row for row in rows if row["provider"] == OURS}
    assert ours.keys() == {(precision, clients) for precision in ("int8", "fp32") for clients in (1, 3)}
    assert all(row["requests_s"] > 0 and row["ms_p50"] <= row["ms_p99"] for row in ours.values())
    others = [row for row in rows if row["provider"] != OURS]
    assert others and all("missing" in row or row["ours"] > 0 for row in others)


@pytest.mark.slow  # proves that 64 clients get the texts of the library, and that a full queue is empty afterwards
@needs_cpp
def test_every_part_of_the_costs_of_http(measured: Measured) -> None:
    rows = measured("serving_costs", "--case tiny --rounds 2 --many_rounds 2 --seconds 0.5 --threads 1")
    parts = [row["shape"]["part"] for row in rows]
    assert list(dict.fromkeys(parts)) == list(PARTS)
    assert [parts.count(part) for part in PARTS] == [2, 6, 2, 2]
    assert all(row["speedup"] > 0 for row in rows if "baseline" in row)


@pytest.mark.slow
def test_the_hosts_time_of_every_case_on_the_stub(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "host_time.jsonl"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "benchmarks.host_time", "--rounds", "1", "--calls", "3", "--out", str(out)]
    proc = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert proc.returncode == 0, proc.stderr
    row = json.loads(out.read_text())
    times = row["microseconds"]
    for op in ("attention", "add_layer_norm"):
        for case in ("fwd", "bwd", "fwd no_grad", "fwd launcher", "bwd plan", "bwd Triton's run", "bwd our launch"):
            assert 0 < times[f"{op} {case}"] < 1e6, case
    assert len(times) == len(proc.stdout.splitlines())
    assert row["triton"] is not None and row["mode"] == "host"


# Times of tokens: the first includes the prompt, and medians are per position.


@pytest.mark.parametrize("engine", [name for name in ENGINES if name in ("kv_cache", "cpp", "recompute")])
def test_each_token_is_timed_by_itself(engine, monkeypatch) -> None:
    steps = mock.Mock(wraps=run_batch)
    monkeypatch.setattr(token_times_module, "run_batch", steps)
    monkeypatch.setattr(token_times_module, "time", SimpleNamespace(perf_counter=lambda: steps.call_count))
    assert token_times(make_model({"name": "tiny"}), [5, 6, 7], 9, PlotLine(engine, None)) == [1] * 9


def test_a_plot_of_token_times(measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    picture, engines = tmp_path / "plot.svg", ["kv_cache", "cross_cache"]
    rows = measured("token_times", "tiny --tokens 9 --rounds 1 --picture", picture, "--engines", *engines, *THREADS)
    assert picture.stat().st_size > 1000
    assert [(row["provider"], row["curve"]["x"]) for row in rows] == [(name, list(range(2, 10))) for name in engines]
    assert all(len(row["curve"]["y"]) == 8 and min(row["curve"]["y"]) > 0 for row in rows)
    assert capsys.readouterr().out.count("ms at the end") == 2


def test_printed_scores_omit_the_encoders_token(monkeypatch, capsys) -> None:
    """The figures are over an eighth of the tokens at either end, without the first, which includes the encoder."""
    seconds = [5.0, 0.001, 0.003, *[0.010] * 12, 0.004, 0.008]
    monkeypatch.setattr(token_times_module, "token_times", lambda *_, **__: seconds)
    words = ["tiny", "--tokens", str(len(seconds)), "--rounds", "1", "--engines", "kv_cache"]
    assert token_times_module.main(words) == 0
    printed = re.search(r"([\d.]+) ms a token at the start, ([\d.]+) ms at the end", capsys.readouterr().out)
    assert printed is not None and [float(ms) for ms in printed.groups()] == [2.0, 6.0]


# The commands of the benchmarks refuse what they can't do, and name it.


# Module, words, and what the error names.
COMMANDS = [
    ("busy_neighbour", "--threads 0", "--threads"),
    ("busy_neighbour", "--rounds 0", "--rounds"),
    ("busy_neighbour", "--layers 0", "--layers"),
    ("preparing", "--rounds 0", "--rounds"),
    ("preparing", "--pairs 0", "--pairs"),
    ("large_corpus", "--steps 0", "--steps"),
    ("processes", "--rounds 0", "--rounds"),
    ("processes", "--processes 3", "--accumulate"),
    ("token_times", "tiny --tokens 1", "--tokens"),
    ("token_times", "/nowhere/none", "none"),
    ("experiments.positions", "--seeds 0", "--seeds: expected an integer above 0, got 0"),
    ("experiments.lstm", "--seconds -3", "--seconds: expected an integer above 0"),
    ("experiments.padding", "--d-model 100", "--d-model: expected a multiple of 64, got 100"),
    ("experiments.padding", "--text nowhere.en nowhere.de", "nowhere.en"),
    ("experiments.norm_order", "--lr fast", "--lr: invalid float value: 'fast'"),
    ("peers.__main__", "--case run", "--text"),
    ("peers.__main__", "--case base --run x --text y", "--text"),
    ("peers.__main__", "--batch 1 0", "--batch"),
    ("peers.__main__", "--neighbours -1", "--neighbours"),
    ("peers.__main__", "--peer openvino", "transformers"),
    ("peers.__main__", "--case bert_base --peer ctranslate2", "onnxruntime"),
    ("peers.__main__", "--case bert_base --beams 4", "--beams"),
    ("peers.__main__", "--case gpt2 --rounds 0", "--rounds"),
    # A filter without a match lists the cases.
    ("run", "--device cpu --op attention --shape seqlen=2049", "seqlen=2048"),
    ("run", "--device cpu --op attention --shape seqlength=2048", "seqlen=2048"),
    ("run", "--device cpu --op attention --mode step", "fwdbwd"),
    ("run", "--device cpu --op rotary --dtype float8", "bfloat16"),
    ("run", "--device cpu --op rotary --provider flash", "torch.compile"),
    ("run", "--device cpu --op training_step --quick", "--quick"),
    ("run", "--device cpu --op attenshun", "attenshun"),
]


@each("module, words, named", COMMANDS)
def test_a_bad_command_is_refused(module: str, words: str, named: str, refused: Refused) -> None:
    main = importlib.import_module(f"benchmarks.{module}").main
    assert named in refused(main, *shlex.split(words))
