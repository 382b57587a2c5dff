"""What the names in a GGUF file mean: how each pre-tokenizer cuts a text, and which tokens end one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastformer.checkpoints.gguf.file import read_gguf
from fastformer.checkpoints.gguf.tokenizers import PRE, Vocabulary, decoder_tokenizer, read_vocabulary
from fastformer.data import Tokenizer
from fastformer.models import GPTConfig
from tests.checkpoints.test_gguf import LLAMA

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

KEY = "tokenizer.ggml."
TEXT = "We'LL see 12345 camelCase a/\n/b e\u0301"
# By llama.cpp's names: the words of the text (_ is a space), and whether a word that is a token is one whatever the
# merges make of it, and whether a text begins with BOS. Only qwen2 and qwen35 normalise.
GPT2 = "We ' LL _see _12345 _camelCase _a / \n / b _e \u0301"
DIGITS = GPT2.replace("_12345", "_ 1 2 3 4 5")
LLAMA3 = "We 'LL _see _ 123 45 _camelCase _a /\n /b _e \u0301"
QWEN2 = LLAMA3.replace("123 45", "1 2 3 4 5")
CAMEL = "_see _ 1 2 3 4 5 _camel Case _a /\n/ b _e\u0301"
CUTS: dict[str, tuple[str, bool, bool]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe", "jina-v1-en", "jina-v2-code"), (GPT2, False, False)
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), (DIGITS, False, False)
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), (LLAMA3, True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (LLAMA3, False, False)),
    **dict.fromkeys(("qwen2", "qwen35"), (QWEN2.replace("_e \u0301", "_\u00e9"), False, False)),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2"), (QWEN2, False, False)),
    "hunyuan": (QWEN2, False, False),
    "hunyuan-dense": ("We 'LL _see _ 123 45 _camelCase _a /\n /b _e\u0301", False, False),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (LLAMA3, False, False)),
    "afmoe": ("We 'LL _see _ 12 345 _camelCase _a /\n /b _e\u0301", False, False),
    "seed-coder": (QWEN2.replace("/\n", "/ \n"), False, False),
    "tekken": (f"We 'LL {CAMEL}", True, True),
    **dict.fromkeys(("gpt-4o", "llama4"), (f"We'LL {CAMEL}".replace("1 2 3 4 5", "123 45"), False, False)),
}  # fmt: skip


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    found = read_gguf(LLAMA).values
    return {key: value for key, value in found.items() if key.startswith(KEY) and not key.endswith("add_bos_token")}


def vocabulary(values: dict[str, Any], **changes: Any) -> Vocabulary:
    return read_vocabulary(Path("x.gguf"), values | {KEY + name: value for name, value in changes.items()})


def made(known: Vocabulary, **options: Any) -> Tokenizer:
    config = GPTConfig(vocab_size=len(known.tokens), d_model=8, num_heads=1, num_layers=1)
    return decoder_tokenizer(known, **options)[1](config)


@pytest.mark.parametrize("name", CUTS)
def test_a_text_is_cut_as_its_name_says(name, values) -> None:
    tokenizer = made(vocabulary(values, pre=name))
    library: Any = getattr(tokenizer.backend, "tokenizer")  # noqa: B009  # of the tokenizers library
    text = TEXT if library.normalizer is None else library.normalizer.normalize_str(TEXT)
    words = [text[slice(*place)] for _, place in library.pre_tokenizer.pre_tokenize_str(text)]
    due, is_whole, adds_bos = CUTS[name]
    assert "|".join(words).replace(" ", "_") == due.replace(" ", "|")
    assert (library.model.ignore_merges, bool(tokenizer.encode(""))) == (is_whole, adds_bos)
    assert bool(made(vocabulary(values, pre=name, add_bos_token=not adds_bos)).encode("")) != adds_bos


def test_marks_above_letters_belong_to_words_of_qwen35(values) -> None:
    text = "b\u0301c ?\u0301"
    for name, words in (("qwen2", ["b", "\u0301c", " ?\u0301"]), ("qwen35", ["b\u0301c", " ?", "\u0301"])):
        library: Any = getattr(made(vocabulary(values, pre=name)).backend, "tokenizer")  # noqa: B009
        assert [text[slice(*place)] for _, place in library.pre_tokenizer.pre_tokenize_str(text)] == words


def test_a_hunyuan_cuts_between_scripts(values) -> None:
    library: Any = getattr(made(vocabulary(values, pre="hunyuan-dense")).backend, "tokenizer")  # noqa: B009
    text = "see漢字かな[ok) x"
    words = [text[slice(*place)] for _, place in library.pre_tokenizer.pre_tokenize_str(text)]
    assert words == ["see", "漢字かな", "[ok", ")", " x"]


def test_every_name_has_a_row() -> None:
    assert PRE.keys() == CUTS.keys()


ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>",
        "<|end_of_text|>", "<eos>", "<turn|>", "<|tool_response>", "<|call|>")  # fmt: skip


def test_tokens_that_end_a_text_by_their_names_are_ends_and_special(values) -> None:
    tokens, types = values[f"{KEY}tokens"], values[f"{KEY}token_type"]
    first = len(tokens)
    usual = vocabulary(values).ends
    known = vocabulary(values, tokens=[*tokens, *ENDS, "<|other|>"], token_type=[*types, *[4] * len(ENDS), 4])
    renamed = [i for i, token in enumerate(known.tokens) if token in ENDS]
    assert set(known.ends) == {*usual, *renamed} and {*range(first, first + len(ENDS))} <= {*renamed}
    assert known.types[first:] == [3] * len(ENDS) + [4]
    assert [i for i in vocabulary(values, tokens=[*tokens, *ENDS], token_type=[*types, *[1] * len(ENDS)]).ends] == usual
    both = vocabulary(values, tokens=[*tokens, *ENDS, "<|return|>"], token_type=[*types, *[3] * (len(ENDS) + 1)]).ends
    assert {*both} == {*known.ends, first + len(ENDS)} - {known.tokens.index("<|end|>")}  # ends a message of gpt-oss
    assert vocabulary(values, eot_token_id=5, eom_token_id=7).ends[:3] == [usual[0], 5, 7]  # the usual one first
