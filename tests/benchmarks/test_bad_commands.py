"""The commands of the benchmarks refuse what they can't do, and name it."""

from __future__ import annotations

import importlib
import shlex

import pytest

from tests.benchmarks.conftest import Refused

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


@pytest.mark.parametrize(("module", "words", "named"), COMMANDS, ids=[" ".join(case[:2]) for case in COMMANDS])
def test_a_bad_command_is_refused(module: str, words: str, named: str, refused: Refused) -> None:
    main = importlib.import_module(f"benchmarks.{module}").main
    assert named in refused(main, *shlex.split(words))
