"""`fastformer generate` samples by default, keeps the prompt as typed, and refuses contradictory flags."""

from __future__ import annotations

import copy
import io
import json
import re
import sys
from functools import partial

import pytest
import torch

import fastformer.generation
from fastformer.cli import main
from fastformer.data import ByteTokenizer
from fastformer.generation import generate
from fastformer.generation.engines import graph
from fastformer.generation.engines.cpp import CppEngine
from fastformer.models import GPT
from tests.generation.small import tiny

FEW = ["--max_new_tokens", "6"]
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def model() -> GPT:
    model = tiny(GPT, max_len=40, tie_embeddings=False)
    model.output.weight.data *= 20  # a fresh model is nearly uniform
    return model


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("generate") / "run"
    model.save_pretrained(folder, ByteTokenizer())
    return str(folder)


def expected(model: GPT, prompt: str, **options) -> list[str]:
    out = generate(model, [TOKENIZER.encode(prompt)], max_new_tokens=6, **options)
    return [TOKENIZER.decode(row) for row in out.tolist()]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--seed", "3"], {"do_sample": True, "seed": 3}),
        (["--greedy"], {}),
        (["--num_beams", "3", "--num_return_sequences", "2"], {"num_beams": 3, "num_return_sequences": 2}),
        (["--greedy", "--min_new_tokens", "6", "--device", "cpu", "--precision", "fp32"], {"min_new_tokens": 6}),
    ],
    ids=str,
)
def test_generate_prints_the_librarys_output(run, model, flags, options, ran) -> None:
    prompt = "two lines\nof a prompt "
    out = ran("generate", run, prompt, *flags, *FEW).out
    assert out == "\n---\n".join(expected(model, prompt, **options)) + "\n"
    assert out.startswith(prompt)


def test_sampling_is_the_default_and_the_help_says_so(run, ran) -> None:
    assert len({ran("generate", run, "a", "--seed", str(seed), *FEW).out for seed in range(3)}) > 1
    text = " ".join(ran("generate", "--help").out.split())
    assert "--stop STOP a text" in text and "--stop+" not in text and "(list)" not in text
    assert re.search(r"--greedy [^-]*\bwithout sampling\b.*?default: false", text)


def test_samples_are_printed_at_once(run, monkeypatch) -> None:
    class Screen(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def flush(self) -> None:
            self.seen.append(self.getvalue())

    for flags, is_streamed in ((["--seed", "3"], True), (["--greedy"], True), (["--num_beams", "2"], False)):
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        assert main(["generate", run, "a prompt", "--min_new_tokens", "12", "--max_new_tokens", "12", *flags]) == 0
        partial = [text for text in screen.seen if text != screen.getvalue()]
        assert (len(set(partial)) > 2) == is_streamed
        if is_streamed:
            assert partial[0] == "a prompt"
    monkeypatch.undo()


def test_a_prompt_that_the_tokenizer_changes_is_kept_and_reported(tmp_path, ran, caplog) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="a BPE needs the tokenizers library")
    vocabulary = {token: i for i, token in enumerate(("<pad>", "</s>", "<unk>", *"abc"))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    tiny(GPT, vocab_size=6).save_pretrained(tmp_path / "run")
    backend.save(str(tmp_path / "run" / "tokenizer.json"))
    assert ran("generate", str(tmp_path / "run"), "a\nb", *FEW).out.startswith("a\nb")
    assert "the tokenizer doesn't know 1 of the prompt's 3 tokens" in caplog.text
    (tmp_path / "prompts").write_text("abz\ncc\nzz\n")
    ran("generate", str(tmp_path / "run"), "--file", str(tmp_path / "prompts"), *FEW)
    assert "the tokenizer doesn't know 3 of the prompt's 7 tokens" in caplog.text


def test_the_usual_limit_of_a_folder_without_one(tmp_path, ran) -> None:
    """A folder of another program that sets no limit gets 512 new tokens, or as many as the model has positions for."""
    transformers = pytest.importorskip("transformers", reason="the folder is written by transformers")
    from tests.checkpoints.decoders import SIZES, save
    from tests.checkpoints.families import byte_level

    (tmp_path / "prompts").write_text("to\n\nto\n")
    given = ["--file", str(tmp_path / "prompts"), "--greedy"]
    for max_len in (40, 600):
        folder = tmp_path / str(max_len)
        folder.mkdir()
        byte_level(["<|endoftext|>"]).save_model(str(folder))
        tokenizer = transformers.GPT2TokenizerFast.from_pretrained(folder)
        end, sizes = tokenizer.eos_token_id, {**SIZES, "max_position_embeddings": max_len}
        config = transformers.GPT2Config(**sizes, vocab_size=len(tokenizer), eos_token_id=end, bos_token_id=end)
        save(folder, transformers.GPT2LMHeadModel(config), tokenizer)
        limit = min(512, max_len - len(tokenizer("to").input_ids))
        due, short = (ran("generate", str(folder), *given, "--max_new_tokens", str(n)).out for n in (limit, limit - 1))
        assert len(due) > len(short) and ran("generate", str(folder), *given).out == due
        one = due.split("\n")[0]
        assert one_line(ran("generate", str(folder), "to", "--greedy").out) == one + "\\n"


def test_beams_of_a_folder_that_samples_are_not_sampled(tmp_path, ran) -> None:
    transformers = pytest.importorskip("transformers", reason="the folder is written by transformers")
    from tests.checkpoints.decoders import SIZES, save
    from tests.checkpoints.families import byte_level

    byte_level(["<|endoftext|>"]).save_model(str(tmp_path))
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    save(tmp_path, transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, vocab_size=len(tokenizer))), tokenizer)
    texts = {}
    for samples in (False, True):
        (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": samples}))
        texts[samples] = ran("generate", str(tmp_path), "to", "--num_beams", "2", *FEW).out
    assert texts[True] == texts[False]


def test_a_gpu_decodes_in_int8(run, model, ran, monkeypatch) -> None:
    """As `quantize` rounds the model; the CPU is treated as a GPU."""
    monkeypatch.setattr(graph, "DEVICES", ("cpu",))
    monkeypatch.setattr(CppEngine, "why_unsupported", classmethod(lambda *_: "the model is on a GPU"))
    rounded = copy.deepcopy(model).bfloat16().quantize("int8")
    out = ran("generate", run, "to be", "--greedy", "--device", "cpu", "--precision", "int8", *FEW).out
    assert out == expected(rounded, "to be")[0] + "\n"


def test_contradictions(run, capsys, ran) -> None:
    for flags, words in (
        (["--greedy", "--temperature", "3"], ("--greedy", "--temperature")),
        (["--greedy", "--top_k", "3"], ("--greedy", "--top_k")),
        (["--num_beams", "4", "--top_p", "0.5"], ("--num_beams", "--top_p")),
        (["--greedy", "--num_beams", "4"], ("--greedy", "--num_beams")),
        (["--greedy", "--num_return_sequences", "2"], ("--greedy", "--num_return_sequences")),
        (["--max_new_tokens", "40"], ("max_new_tokens", "39", "window='slide'")),
        (["--window", "slide"], ("max_new_tokens", "window")),
        (["--file", "somewhere"], ("--file", "'a'", "somewhere")),
        (["--stop", ""], ("stop_strings",)),
        (["--device", "toaster"], ("device", "toaster")),
    ):
        assert main(["generate", run, "a", *flags]) in (1, 2), flags
        error = capsys.readouterr().err
        assert error.startswith("fastformer: ") and all(word in error for word in words), error
    for prompt, word in (("x" * 5000, "max_len 40"), ("", "prompt")):
        assert word in ran("generate", run, prompt, code=1).err


def test_a_prompt_that_is_cut_leaves_room_for_a_quarter(run, model, ran, caplog) -> None:
    prompt = "0123456789" * 5
    out = ran("generate", run, prompt, "--cut", "--greedy", "--min_new_tokens", "10").out
    end = generate(model, [TOKENIZER.encode(prompt[20:])], max_new_tokens=10, min_new_tokens=10)[0].tolist()
    assert out == prompt[:20] + TOKENIZER.decode(end) + "\n" and "40 positions" in caplog.text
    for size, is_cut in ((34, False), (35, True)):  # with --max_new_tokens 6
        caplog.clear()
        ran("generate", run, prompt[:size], "--cut", "--greedy", *FEW)
        assert ("cut the beginning" in caplog.text) == is_cut, size


def test_weights_are_loaded_in_the_precision(run, ran, calls_of) -> None:
    calls = calls_of(fastformer.generation, "generate")
    for flags, dtype in (([], "float32"), (["--precision", "bf16"], "bfloat16"), (["--precision", "int8"], "float32")):
        ran("generate", run, "a", "--greedy", *flags, *FEW)
        assert {str(each.dtype) for each in calls.pop().args[0].parameters()} == {f"torch.{dtype}"}, flags


def test_a_neutral_value_contradicts_nothing(run, ran) -> None:
    """A script may give every flag."""
    due = ran("generate", run, "a", "--greedy", *FEW).out
    words = "--num_beams 1 --num_return_sequences 1 --temperature 1 --top_k 0 --top_p 1"
    assert ran("generate", run, "a", "--greedy", *words.split(), *FEW).out == due
    beams = ["--num_beams", "2", *FEW]
    neutral = words.split()[4:]
    assert ran("generate", run, "a", *beams, *neutral).out == ran("generate", run, "a", *beams).out


PROMPTS = ["two words", "", "a", "the third one, the longest by far", "ä"]


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\r\n".join(PROMPTS).encode())
    return str(path)


def one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def test_prompts_of_a_file_are_answered_line_by_line(run, model, file, ran, monkeypatch) -> None:
    short = [*FEW, "--greedy"]
    answers = [one_line(expected(model, prompt)[0]) if prompt else "" for prompt in PROMPTS]
    assert ran("generate", run, "--file", file, *short).out.split("\n") == [*answers, ""]
    with open(file, "rb") as lines:
        content = lines.read()
    for words in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert ran("generate", run, *words, *short).out.split("\n") == [*answers, ""]
    # Each prompt draws as in a batch of them; several samples stand behind the number of their prompt.
    full = [prompt for prompt in PROMPTS if prompt]
    for more in ([], ["--window", "slide"]):
        flags = [*FEW, "--seed", "4", "--num_return_sequences", "3", *more]
        lines = ran("generate", run, "--file", file, *flags).out.split("\n")[:-1]
        assert [line.partition("\t")[0] for line in lines] == [*"111", "2", *"333", *"444", *"555"]
        first = expected(model, PROMPTS[0], do_sample=True, seed=4, num_return_sequences=3)
        assert [line.partition("\t")[2] for line in lines[:3]] == [one_line(text) for text in first]
        assert all(
            line.partition("\t")[2].startswith(prompt) for prompt, line in zip(full[2:], lines[7::3], strict=True)
        )


def test_an_error_about_a_line_names_its_number(run, tmp_path, capsys, ran, caplog) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("good\n" + "x" * 50 + "\nlast\n")
    out, err = ran("generate", run, "--file", str(path), "--greedy", code=1)
    assert out.startswith("good") and out.count("\n") == 1
    assert "prompts.txt, line 2: expected prompts of fewer tokens than the model's max_len 40, got 50" in err
    assert main(["generate", run, "--file", str(path), "--greedy", "--window", "slide", *FEW]) == 0
    assert [line[:4] for line in capsys.readouterr().out.split("\n")] == ["good", "xxxx", "last", ""]
    for more in ([], ["--window", "slide", "--num_return_sequences", "2"]):
        path.write_bytes(b"good\n\xff\n" + b"x" * 50 + b"\nlast\n")
        flags = ["--on_error", "skip", "--seed", "1", *FEW, *more]
        lines = ran("generate", run, "--file", str(path), *flags).out.split("\n")
        expected_lines = (
            ["1\tg", "1\tg", "2\t", "3\tx", "3\tx", "4\tl", "4\tl", ""] if more else ["goo", "", "", "las", ""]
        )
        assert [line[:3] for line in lines] == expected_lines
        assert f"skipped {1 if more else 2} of 4 texts; their lines are empty" in caplog.text
    assert main(["generate", run, "--file", str(tmp_path / "none")]) == 1
    path.write_bytes(b"good\n\xff\n")
    assert "line 2: expected UTF-8" in ran("generate", run, "--file", str(path), *FEW, code=1).err


def test_a_stop_text_ends_it_and_is_not_printed(run, model, tmp_path, capsys, ran) -> None:
    usual = ["--greedy", "--max_new_tokens", "20", "--min_new_tokens", "20"]
    whole = TOKENIZER.decode(generate(model, [TOKENIZER.encode("a")], max_new_tokens=20, min_new_tokens=20)[0].tolist())
    stop = whole[9:12]
    place = whole.index(stop, 1)
    for more in ([], ["--stop", "-never"]):
        assert ran("generate", run, "a", *usual, "--stop", stop, *more).out == whole[:place] + "\n"
    (tmp_path / "prompts").write_text("b\na\n")
    assert main(["generate", run, "--file", str(tmp_path / "prompts"), *usual, "--stop", stop]) == 0
    assert capsys.readouterr().out.split("\n")[1] == one_line(whole[:place])
    for flags in (["--seed", "1"], ["--seed", "1", "--num_return_sequences", "2"]):
        flags = [*flags, "--max_new_tokens", "20"]
        texts = ran("generate", run, "a", *flags).out[:-1].split("\n---\n")
        stop = texts[0][4:6]
        assert main(["generate", run, "a", "--stop", stop, *flags]) == 0
        cut = [text if (end := text.find(stop, 1)) < 0 else text[:end] for text in texts]
        assert capsys.readouterr().out == "\n---\n".join(cut) + "\n"


def test_a_text_continues_past_the_window_on_request(run, model, ran, caplog) -> None:
    options = {"max_new_tokens": 90, "window": "slide", "min_new_tokens": 90}
    out = generate(model, [TOKENIZER.encode("a")], **options)[0].tolist()
    flags = ["--greedy", "--window", "slide", "--max_new_tokens", "90", "--min_new_tokens", "90"]
    assert ran("generate", run, "a", *flags).out == TOKENIZER.decode(out) + "\n" and "window" not in caplog.text
    # Where it isn't, the end says how, unless as many tokens were asked for.
    assert main(["generate", run, "a", "--greedy", "--min_new_tokens", "39", "--max_new_tokens", "39"]) == 0
    assert not caplog.text
    assert main(["generate", run, "a", "--greedy", "--min_new_tokens", "39"]) == 0
    assert "the model's 40 positions" in caplog.text and "--window slide --max_new_tokens" in caplog.text


def test_a_terminal_gets_no_control_characters(tmp_path, monkeypatch) -> None:
    folder = str(tmp_path / "run")
    tiny(GPT, max_len=40).save_pretrained(folder, TOKENIZER)

    def search(model, input_ids, config, *, streamer, **options) -> torch.Tensor:
        row = [*input_ids[0], *TOKENIZER.encode("\x1b[31m\tred\r\n\x07\x9b")]
        if streamer is not None:
            streamer.put(torch.tensor(input_ids))
            for token in row[1:]:
                streamer.put(torch.tensor([token]))
            streamer.end()
        return torch.tensor([row])

    monkeypatch.setattr("fastformer.generation.generate", search)
    for flags in (["--seed", "1"], ["--num_beams", "2"]):
        for is_terminal in (True, False):
            screen = io.StringIO()
            monkeypatch.setattr(screen, "isatty", partial(bool, is_terminal))
            monkeypatch.setattr(sys, "stdout", screen)
            assert main(["generate", folder, "a", *flags]) == 0
            raw, escaped = "a\x1b[31m\tred\r\n\x07\x9b\n", "a\\x1b[31m\tred\\r\n\\x07\\x9b\n"
            assert screen.getvalue() == (escaped if is_terminal else raw)


@pytest.mark.parametrize("flag", ["--schema", "--grammar"])
def test_a_constraint_is_a_file_of_text(flag, run, tmp_path, ran) -> None:
    (tmp_path / "odd").write_bytes(b"\xff")
    for file in ("odd", "missing"):
        assert f"expected {flag} to be a file" in ran("generate", run, "a", flag, str(tmp_path / file), code=1).err
