"""Streamed pieces add up to the whole text; no piece is half a character or is revised later."""

from __future__ import annotations

import string

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastformer.data import ByteTokenizer
from fastformer.generation import generate
from fastformer.generation.streaming import TextPieces, TextStreamer
from fastformer.models import GPT
from tests.generation.detokenizers import KINDS, Counted, detokenizer
from tests.generation.small import tiny

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXT = "Zwölf Boxkämpfer — 日本語のテキスト, naïve 👩‍🚀 café's  end.\n\n  A new line isn't lost\t!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(params=KINDS)
def tokenizer(request, folder):
    return detokenizer(request.param, folder)


def pieces_of(tokenizer, ids, begin=(), **options) -> list[str]:
    pieces = TextPieces(tokenizer, begin, **options)
    return [*(pieces.add([i]) for i in ids), pieces.end()]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "byte level", "sentencepiece"])
def test_real_text_is_streamed_unchanged(kind, folder) -> None:
    tokenizer = detokenizer(kind, folder)
    ids = tokenizer.encode(TEXT)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(BROKEN in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 30
    if kind == "bytes":
        assert pieces[:8] == ["Z", "w", "", "ö", "l", "f", "", " B"]
    if kind != "sentencepiece":  # whose EOS is another id
        assert "".join(pieces_of(tokenizer, [*ids, 1, *ids])) == tokenizer.decode(ids)


# Tokens as no text has them: broken bytes, spaces and line ends in rows, specials between, the same one many times.
RUNS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([1, 1, 1, 2, 3, 40])), max_size=30)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RUNS, st.integers(0, 40), st.booleans(), st.randoms(use_true_random=False))
def test_the_pieces_add_up_to_the_text_for_any_tokens(tokenizer, runs, cut, is_told, chance) -> None:
    odd = [i for i in range(tokenizer.vocab_size) if i != 1 and not tokenizer.decode([i]).isalpha()]
    ids: list[int] = []
    for place, times in runs:
        usual = range(tokenizer.vocab_size) if chance.random() < 0.5 else odd
        ids += [usual[int(place * len(usual))]] * times
    assert "".join(pieces_of(tokenizer, ids[cut:], ids[:cut])) == tokenizer.decode(ids)
    pieces = TextPieces(tokenizer)
    assert pieces.add(ids[:cut]) + pieces.add(ids[cut:]) + pieces.end() == tokenizer.decode(ids)
    before = tokenizer.decode(ids[:cut])
    if is_told and tokenizer.decode(ids).startswith(before):
        assert "".join(pieces_of(tokenizer, ids[cut:], ids[:cut], is_told=True)) == tokenizer.decode(ids)[len(before) :]


@pytest.mark.parametrize("unit", [TEXT, "日本語のテキスト", "\n", ". "], ids=repr)
def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer, unit) -> None:
    cost: list[float] = []
    for size in (300, 2400):
        ids = (tokenizer.encode(unit) * size)[:size]
        counted = Counted(tokenizer)
        assert "".join(pieces_of(counted, ids)) == tokenizer.decode(ids)
        cost.append(counted.decoded / size)
    assert cost[1] < 1.5 * cost[0] + 2 and cost[1] < 100


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "words"])
def test_a_long_beginning_is_not_decoded_for_each_token(kind, folder) -> None:
    tokenizer = detokenizer(kind, folder)
    begin = (tokenizer.encode(TEXT) * 200)[:3000]
    new = tokenizer.encode("and then there")
    counted = Counted(tokenizer)
    pieces = pieces_of(counted, new * 20, begin, is_told=True)
    assert "".join(pieces) == tokenizer.decode(begin + new * 20)[len(tokenizer.decode(begin)) :]
    assert counted.decoded < 8 * len(begin)
    assert sum(map(bool, pieces)) > 20 or "and" not in tokenizer.decode(new)


def test_a_tokenizer_whose_text_depends_on_all_tokens_is_slow_but_right() -> None:
    class Numbering:
        """A tokenizer that numbers its words, so that no window has the text of the whole."""

        def encode(self, text: str) -> list[int]:
            return [0]

        def decode(self, ids) -> str:
            return " ".join(f"{number}{string.ascii_lowercase[i]}" for number, i in enumerate(ids))

    ids = [i % 26 for i in range(3000)]
    counted = Counted(Numbering())
    pieces = pieces_of(counted, ids)
    assert "".join(pieces) == Numbering().decode(ids)
    assert sum(map(bool, pieces)) > 100 and counted.decoded < 100 * len(ids)


def test_streamed_text_is_not_repeated(folder) -> None:
    # Here the first byte of a character makes one broken run with the bytes before it, which were text.
    bpe = detokenizer("bpe", folder)
    byte = bpe.encode("\U0001f469")[-4:]
    assert "".join(pieces_of(bpe, byte[:1], byte, is_told=True)) == "\N{REPLACEMENT CHARACTER}"


def test_a_tokenizer_that_revises_its_text_is_an_error() -> None:
    class Backwards:
        def encode(self, text: str) -> list[int]:
            raise ValueError("it can't")

        def decode(self, ids) -> str:
            return "".join(string.ascii_lowercase[i] for i in reversed(list(ids)))

    with pytest.raises(ValueError, match="'ba'.*'a'"):
        pieces_of(Backwards(), [0, 1])


FEW = "ab. \n本é"


def stopped(tokenizer, ids, stop, begin=()) -> list[str]:
    pieces = TextPieces(tokenizer, begin, is_told=True, stop=stop)
    found = []
    for i in ids:
        assert not pieces.is_stopped
        found.append(pieces.add([i]))
        if pieces.is_stopped:
            break
    return [*found, pieces.end()]


def test_the_beginning_of_an_incomplete_stop_text_is_shown_late() -> None:
    tokenizer = ByteTokenizer()
    assert stopped(tokenizer, tokenizer.encode("a#b##c#"), ["##!", "x"]) == ["a", "", "#b", "", "", "##c", "", "#"]
    # What stands before the text is no part of it.
    assert "".join(stopped(tokenizer, tokenizer.encode("#b##c"), ["##"], tokenizer.encode("##a#"))) == "#b"
    pieces = TextPieces(tokenizer, tokenizer.encode("##a#"), stop=["##"])
    assert pieces.add(tokenizer.encode("#b##c")) == "##a##b" and pieces.is_stopped and pieces.end() == ""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(FEW, max_size=60), st.lists(st.text(FEW, min_size=1, max_size=4), min_size=1, max_size=3))
@example(TEXT, ["isn't l", "zzz"])
@example(TEXT, ["x", "é"])
@example("xab.", ["b.", "ab."])  # the first of the text, not of the list
@example(TEXT, [TEXT])
def test_the_first_of_several_stop_texts_and_all_text_after_it_are_omitted(tokenizer, text, stop) -> None:
    ids = tokenizer.encode(text)
    shown = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
    needed = next((n for n, one in enumerate(shown) if any(end in one for end in stop)), len(ids))
    found = stopped(tokenizer, ids, stop)
    assert len(found) - 1 == needed, "a token is read that isn't needed"
    places = [shown[needed].find(end) for end in stop if end in shown[needed]]
    assert "".join(found) == shown[needed][: min(places, default=None)]
    assert TextPieces(tokenizer, is_told=True, stop=stop).whole(ids[:needed]) == "".join(found)


@pytest.fixture(scope="module")
def model() -> GPT:
    return tiny(GPT, num_layers=1, max_len=40)


@pytest.mark.parametrize("prompt", [None, "as it was typed "])
def test_a_text_streamer_prints_the_output(model, prompt, capsys) -> None:
    tokenizer = ByteTokenizer()
    streamer, ids = TextStreamer(tokenizer, prompt=prompt), tokenizer.encode("ab ")
    for seed in range(4):  # one after another
        out = generate(model, [ids], max_new_tokens=12, do_sample=True, seed=seed, streamer=streamer)
        said = tokenizer.decode(out[0].tolist())
        assert capsys.readouterr().out == (said if prompt is None else prompt + said[3:]) + "\n"
