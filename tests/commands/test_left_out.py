"""What a flag means that is left out, and that lines get the answers that they have in any other order."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import select
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
import transformers

from fastformer.cli import COMMANDS
from fastformer.commands._parsing import make_parser
from fastformer.data import ByteTokenizer
from fastformer.models import GPT, Transformer
from tests.audio import speech
from tests.audio.test_reading import wav
from tests.checkpoints import decoders
from tests.commands.test_every_flag import outcome
from tests.encoding.folders import bert
from tests.generation.chat_templates import CHATML
from tests.generation.small import tiny
from tests.generation.test_chat import with_template

LINES = ["the dog", "a bird", "two", "dogs sing, and birds", "x", "one dog", "birds", "sing the dog", "a", "hills"]
SEARCH = "--max_new_tokens 8 --num_beams 4"
DRAWN = "--max_new_tokens 19 --min_new_tokens 19 --seed 1"
# By command: for a flag, the value that it has if it is left out, and another one, which shows. Words in braces are
# files; the models are rounded, in bf16 or deep, so that another default would show.
MEANT: dict[str, dict[str, tuple[str, str]]] = {
    "translate {run} --max_new_tokens 8": {"file": ("-", "{few}")},
    f"translate {{run}} a {SEARCH} --n_best 4": {"length_penalty": ("0.6", "0")},
    "translate {run} a": {"max_new_tokens": ("40", "3")},
    f"translate {{int8}} a {SEARCH} --n_best 4": {"precision": ("int8", "fp32")},
    f"translate {{run}} a {SEARCH}": {"n_best": ("1", "2")},
    "translate {run} 'a b' --max_new_tokens 8 --align tokens": {"align_layer": ("3", "1")},
    f"translate {{run}},{{second}} a {SEARCH} --n_best 4": {"ensemble_weights": ("1,1", "1,9")},
    "generate {gpt} --greedy --max_new_tokens 8": {"file": ("-", "{few}")},
    "generate {gpt} a --greedy": {"max_new_tokens": ("39", "3")},
    f"generate {{gpt8}} --file {{many}} {DRAWN}": {"precision": ("int8", "fp32")},
    "chat {llama} --greedy --max_new_tokens 30": {"precision": ("bf16", "int4")},
    "embed {encoder} --out {out}/v.npy": {
        "file": ("-", "{few}"), "precision": ("bf16", "fp32"), "normalize": ("false", "true"),
    },
    "rank {ranker} --query bird": {"file": ("-", "{few}"), "precision": ("bf16", "fp32"), "top_k": ("10", "2")},
    "score {gpt} --file {long}": {"context": ("20", "1")},
    "score {half} --file {few}": {"precision": ("bf16", "fp32")},
    "score {rounded} --file {few} --target {few}": {"precision": ("bf16", "fp32")},
    "transcribe {whisper} {audio} --language en --beam_size 1 --format json": {"precision": ("bf16", "fp32")},
}  # fmt: skip
# Flags that mean nothing without a value, or whose default changes the speed alone.
NOTHING = {
    *("adapter", "attention", "baseline", "cache_dtype", "choices", "config", "draft", "grammar", "hotwords"),
    *("hypotheses", "initial_prompt", "max_batch_bytes", "max_batch_size", "max_time", "out", "prefix", "prefix_file"),
    *("prompt", "prompt_lookup_num_tokens", "prompt_name", "query", "reference", "regex", "schema", "seed"),
    *("source_lang", "stop", "system", "target", "target_lang"),
}  # fmt: skip
# Those whose default no value names, or that other tests try.
ELSEWHERE = {
    "translate": {"align_head"},  # the mean of all heads
    "generate": {"length_penalty"},  # as of translate
    "chat": {"max_new_tokens"},  # the folder's
    "score": {"file"},
    "transcribe": {"batch_size", "max_new_tokens"},
    "average": {"last"},  # test_average.py
    "warmup": {"precision"},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("left_out")
    for seed, name in enumerate(("run", "second")):
        model = tiny(Transformer, max_len=40, num_decoder_layers=4, seed=seed)
        model.embedding.weight.data *= 3  # a fresh model is nearly uniform
        model.save_pretrained(folder / name, ByteTokenizer())
    copy.deepcopy(model).bfloat16().save_pretrained(folder / "rounded", ByteTokenizer())
    model.quantize("int8").save_pretrained(folder / "int8", ByteTokenizer())
    model = tiny(GPT, max_len=40, tie_embeddings=False)
    model.output.weight.data *= 20
    model.save_pretrained(folder / "gpt", ByteTokenizer())
    model.bfloat16().save_pretrained(folder / "half", ByteTokenizer())
    model.float().quantize("int8").save_pretrained(folder / "gpt8", ByteTokenizer())
    decoders.llama3(folder / "llama")
    transformers.AutoModelForCausalLM.from_pretrained(folder / "llama").bfloat16().save_pretrained(folder / "llama")
    with_template(folder / "llama", CHATML)
    for name in ("encoder", "ranker"):
        (folder / name).mkdir()
        bert(folder / name, **({"num_labels": 1} if name == "ranker" else {})).bfloat16().save_pretrained(folder / name)
    model, tokens = speech.whisper()
    model.bfloat16().save_pretrained(folder / "whisper")
    tokens.save(str(folder / "whisper" / "tokenizer.json"))
    (folder / "audio").write_bytes(wav(speech.sound(5, 2)))
    for name, lines in (("few", LINES[:3]), ("many", LINES), ("turned", LINES[::-1]), ("long", ["x" * 60])):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return {path.name: str(path) for path in folder.iterdir()}


ROWS = [(command, flag) for command, flags in MEANT.items() for flag in flags]


@pytest.mark.parametrize(("command", "flag"), ROWS, ids=[f"{command.split()[0]}-{flag}" for command, flag in ROWS])
def test_a_flag_that_is_left_out_has_its_default(command, flag, places, tmp_path, capfdbinary, monkeypatch) -> None:
    usual, other = MEANT[command][flag]
    found = []
    for place, more in enumerate(("", f" --{flag}={usual}", f" --{flag}={other}")):
        lines = "".join(f"{line}\n" for line in LINES[: 1 if command.startswith("chat") else 10])
        words = outcome(command + more, lines, places, tmp_path / str(place), capfdbinary, monkeypatch)
        found.append(words)
    assert [code for code, *_ in found] == [0, 0, 0], found
    (first, second, third) = ((out, written) for _, out, _, written in found)
    assert first == second != third


def test_every_flag_without_a_default_is_in_a_table() -> None:
    for command in {*COMMANDS} - {"doctor", "train", "prepare", "serve"}:
        parser, _ = make_parser(importlib.import_module(f"fastformer.commands.{command}"), command)
        flags = {each.option_strings[0][2:] for each in parser._actions if each.option_strings and each.default is None}
        known = {flag for words, rows in MEANT.items() if words.split()[0] == command for flag in rows}
        assert known | ELSEWHERE.get(command, set()) >= flags - NOTHING, command


# Commands that answer lines, which are decoded a few at a time, and whether a number of the line comes first.
BY_LINE = {
    f"translate {{run}} --file {{}} {SEARCH} --n_best 2 --max_batch_size 8": True,
    f"translate {{run}} --file {{}} {SEARCH} --max_batch_size 8 --align": False,
    "translate {run} --file {} --max_new_tokens 8 --max_batch_size 2 --split": False,
    "generate {gpt} --file {} --greedy --max_new_tokens 8": False,
    f"generate {{gpt}} --file {{}} {SEARCH} --num_return_sequences 2": True,
    "score {run} --file {} --target {} --max_tokens 32 --token_scores": False,
    "score {gpt} --by_line --file {} --max_tokens 32": False,
}


@pytest.mark.parametrize("command", BY_LINE, ids=lambda command: "-".join(command.replace("}", "").split()[::2]))
def test_lines_in_another_order_have_the_same_answers(command, places, tmp_path, capfdbinary, monkeypatch) -> None:
    answers, count = [], 2 if BY_LINE[command] else 1
    for name in ("many", "turned"):
        words = command.replace("{}", places[name])
        code, out, error, _ = outcome(words, "", places, tmp_path / name, capfdbinary, monkeypatch)
        lines = out.decode().splitlines()
        assert code == 0 and len(lines) == count * len(LINES), error
        if BY_LINE[command]:
            numbers, lines = zip(*(line.split("\t", 1) for line in lines), strict=True)
            assert [*numbers] == [str(number + 1) for number in range(len(LINES)) for _ in range(count)]
        answers.append([lines[place : place + count] for place in range(0, len(lines), count)])
    assert answers[0] == answers[1][::-1] and len({*map(str, answers[0])}) > 1


def test_rows_and_places_in_another_order_are_the_same(places, tmp_path, capfdbinary, monkeypatch) -> None:
    found = []
    for name in ("many", "turned"):
        words = f"rank {{ranker}} --query bird --file {places[name]} --json_lines --batch_tokens 16"
        _, out, _, _ = outcome(words, "", places, tmp_path / f"r{name}", capfdbinary, monkeypatch)
        ranked = [json.loads(line) for line in out.decode().splitlines()]
        lines = Path(places[name]).read_text().splitlines()
        assert all(lines[each["corpus_id"]] == each["text"] for each in ranked)
        words = f"embed {{encoder}} --out {{out}}/v.npy --file {places[name]} --batch_tokens 16"
        *_, written = outcome(words, "", places, tmp_path / f"e{name}", capfdbinary, monkeypatch)
        found.append(torch.frombuffer(bytearray(written["v.npy"][128:]), dtype=torch.float32).view(len(LINES), -1))
    assert torch.equal(found[0], found[1].flip(0))


# Commands that read a file, whose lines may come from standard input all the same.
FROM_STDIN = [
    *BY_LINE,
    "translate {run} --file {} --max_new_tokens 8 --prefix_file {turned}",
    "translate {run} --file {} --max_new_tokens 8 --prefix xy --on_error skip",
    "translate {run} --file {} --max_new_tokens 8 --reference {turned}",
    "rank {ranker} --query bird --file {} --json_lines",
    "embed {encoder} --out {out}/v.npy --file {}",
]


@contextlib.contextmanager
def typed_slowly(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Yields a pipe in which a line arrives when a command waits for it, and not before."""
    end, begin = os.pipe()
    rest, wait = deque(lines), select.select

    def waited(readers: Any, writers: Any, others: Any, timeout: float | None = None) -> Any:
        if timeout is None and readers == [end]:
            if rest:
                os.write(begin, f"{rest.popleft()}\n".encode())
            else:
                os.close(begin)
        return wait(readers, writers, others, timeout)

    monkeypatch.setattr(select, "select", waited)
    with open(end) as pipe:
        yield pipe


@pytest.mark.parametrize("command", [words for words in FROM_STDIN if not words.startswith("score")])
def test_standard_input_is_a_file_like_any_other(command, places, tmp_path, capfdbinary, monkeypatch) -> None:
    found = []
    for place, (name, lines) in enumerate(((places["many"], ""), ("-", "".join(f"{line}\n" for line in LINES)))):
        words = command.replace("{}", name)
        found.append(outcome(words, lines, places, tmp_path / str(place), capfdbinary, monkeypatch))
    assert found[0][0] == 0 and found[0] == found[1]
    if "{turned}" not in command:  # two files are read in step, and no line is waited for
        with typed_slowly(LINES, monkeypatch) as pipe:
            words = command.replace("{}", "-")
            assert outcome(words, pipe, places, tmp_path / "pipe", capfdbinary, monkeypatch) == found[0]


@pytest.mark.parametrize(("count", "texts"), [(0, "0 texts"), (1, "1 text"), (2, "2 texts")])
def test_a_report_counts_in_words(count, texts, places, tmp_path, capfdbinary, monkeypatch) -> None:
    lines = "".join(f"{line}\n" for line in LINES[:count])
    *_, error, _ = outcome("embed {encoder} --out {out}/v", lines, places, tmp_path / "e", capfdbinary, monkeypatch)
    assert f"embedded {texts}\n" in error.decode()
    if count:
        (tmp_path / "lines").write_text(lines)
        words = f"score {{gpt}} --by_line --file {tmp_path}/lines"
        *_, error, _ = outcome(words, "", places, tmp_path / "s", capfdbinary, monkeypatch)
        assert f"scored {texts} of " in error.decode()
