"""A Translator keeps the order of texts, names bad ones, fits batches in memory, reads folders and draws pictures."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import ByteTokenizer
from fastformer.generation import Translator, draw_attention, generate, request_builder
from fastformer.generation.engines import choose_engine
from fastformer.generation.engines.cpp import CppEngine
from fastformer.generation.engines.cpp_support import why_no_cpp_engine
from fastformer.generation.text_io import ErrorPolicy, Item, TextError
from fastformer.generation.translator import Scored, TokenScored
from fastformer.models import GPT, Transformer
from fastformer.models.pretrained import save_model
from fastformer.special_ids import SpecialIds
from tests.covering import by_turns
from tests.generation.small import DEFAULT, HAS_CPP, Foreign, always, louder, tiny, watch_steps

TEXTS = ["a", "a longer text", "mid size", "b" * 40, "x"]
FEW = {"max_new_tokens": 8}
SEED = {"seed": 7}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny()


def talkative(model: Transformer, never: Sequence[int] = ()) -> Transformer:
    """Returns a model of the same shape that, without sampling, generates many different tokens, but never some of
    them.
    """
    torch.manual_seed(2)
    model = louder(Transformer(dataclasses.replace(model.config, tie_embeddings=False)), 3)
    # The first of a state's numbers is large, and takes their logits away.
    model.decoder.norm.weight.data[0], model.decoder.norm.bias.data[0] = 0, 100
    model.output_weight.data[:, 0] = 0
    model.output_weight.data[list(never), 0] = -1
    return model


@pytest.fixture(scope="module")
def translator(model) -> Translator:
    return Translator(model, ByteTokenizer(), max_batch_size=64)


def test_order_is_kept_whatever_the_batches_and_the_form_of_the_texts(translator) -> None:
    together = translator.translate(TEXTS, **FEW)
    assert together == [translator.translate(text, **FEW) for text in TEXTS] and len(set(together)) > 1
    for read_ahead in (1, 2, 1000):
        assert list(translator.stream(iter(TEXTS), read_ahead=read_ahead, **FEW)) == together
    for texts in (
        tuple(TEXTS),
        iter(TEXTS),
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        dict.fromkeys(TEXTS).keys(),
    ):
        assert translator.translate(texts, **FEW) == together
    assert translator.translate([]) == [] and list(translator.stream([])) == []


def test_values_that_are_not_text_are_named(translator) -> None:
    for wrong in (b"bytes", {"a": "b"}, None, 7):
        with pytest.raises(ValueError, match=type(wrong).__name__):
            translator.translate(wrong)
        with pytest.raises(ValueError, match=type(wrong).__name__):
            translator.stream(wrong)
    for text in (7, None, b"x", ["y"]):
        for translate in (translator.translate, lambda texts: list(translator.stream(texts))):
            with pytest.raises(ValueError, match=rf"texts\[1\].*{type(text).__name__}"):
                translate(["a", text])


def test_options_are_checked_before_anything_is_read(translator) -> None:
    for options, message in (
        ({"num_beam": 2}, "num_beam.*num_beams"),
        ({"return_dict_in_generate": True}, "return_scores=True.*return_dict_in_generate"),
        ({"num_beams": 300}, r"\bnum_beams\b"),
        ({"max_new_tokens": 65}, r"\bmax_new_tokens\b.*64"),
        ({"on_error": "ignore"}, r"\bon_error\b.*'ignore'"),
    ):
        for translate in (translator.translate, translator.stream):
            with pytest.raises(ValueError, match=message):
                translate([], **options)
    for read_ahead in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"\bread_ahead\b"):
            translator.stream(["a"], read_ahead=read_ahead)
    for sizes in ({"max_batch_size": 0}, {"max_batch_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(sizes))):
            Translator(translator.model, ByteTokenizer(), **sizes)
    with pytest.raises(ValueError, match="Linear"):
        Translator(torch.nn.Linear(2, 2), ByteTokenizer())


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 4, "num_return_sequences": 3}, {"do_sample": True, "num_return_sequences": 3, "top_k": 1}],
    ids=["beams", "samples"],
)
def test_n_best_belongs_to_its_text(model, options) -> None:
    # Two texts a batch, the longest first: each text gets its own rows back, in order.
    translator = Translator(model.eval(), ByteTokenizer(), max_batch_size=6)
    tokenizer, device = ByteTokenizer(), torch.device("cpu")
    found = translator.translate(TEXTS, return_scores=True, **FEW, **options)
    for text, answers in zip(TEXTS, found, strict=True):
        ids = torch.tensor([[*tokenizer.encode(text), 1]], device=device)
        out = generate(model, ids, return_dict_in_generate=True, **FEW, **options)
        expected = [tokenizer.decode(row) for row in out.sequences.tolist()]
        assert [answer.text for answer in answers] == expected
        assert max(abs(answer.score - score) for answer, score in zip(answers, out.scores.tolist(), strict=True)) < 1e-4
    assert translator.translate(TEXTS, **FEW, **options) == [[answer.text for answer in row] for row in found]
    assert translator.translate(TEXTS[1], **FEW, **options) == [answer.text for answer in found[1]]
    assert list(translator.stream(["a", ""], **FEW, **options)) == [[answer.text for answer in found[0]], []]


def test_sampling_is_seeded_once_for_all_batches(model) -> None:
    # The same text in two batches: other draws, and the same ones again with the same seed.
    translator = Translator(model, ByteTokenizer(), max_batch_size=1)
    options = {"do_sample": True, "seed": 3, **FEW}
    found = translator.translate(["same text"] * 4, **options)
    assert len(set(found)) > 1 and found == translator.translate(["same text"] * 4, **options)
    for read_ahead in (1, 2):  # nor does a stream begin anew with each group
        assert list(translator.stream(["same text"] * 4, read_ahead=read_ahead, **options)) == found


def test_there_are_no_more_hypotheses_than_found() -> None:
    # This model says EOS and nothing else.
    model = LSTMSeq2Seq(vocab_size=259, d_model=32)
    model.output.weight.data.zero_()
    model.output.bias.data = torch.full((259,), -math.inf).index_fill(0, torch.tensor([1]), 0.0)
    found = Translator(model, ByteTokenizer()).translate(
        ["a", "b"], num_beams=3, num_return_sequences=2, return_scores=True
    )
    assert found == [[Scored("", 0.0)]] * 2


def test_errors_name_the_text(translator) -> None:
    with pytest.raises(ValueError, match="text 2: .*on_error"):
        translator.translate(["a", " "])
    with pytest.raises(ValueError, match="text 1: .*64.*101.*skip_long"):
        translator.translate(["x" * 100])
    with pytest.raises(ValueError, match="text 3: .*surrogate"):
        list(translator.stream(["a", "", "\ud800"], read_ahead=2))
    assert len(translator.encode("x" * 63)) == 64
    with pytest.raises(ValueError, match="64.*65"):
        translator.encode("x" * 64)


@pytest.mark.parametrize("read_ahead", [2, 100])
def test_bad_texts_are_skipped_in_their_place(translator, caplog, read_ahead) -> None:
    texts = ["a", "x" * 100, "", "x", "\ud800"]
    a, x = translator.translate(["a", "x"], **FEW)
    with caplog.at_level(logging.WARNING, "fastformer"):
        found = list(translator.stream(texts, read_ahead=read_ahead, on_error="skip", **FEW))
    assert found == [a, "", "", x, ""]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and all(
        named in one for named, one in zip(("text 2:", "text 5:", "2 of 5"), said, strict=True)
    )
    assert translator.translate(texts, on_error="skip", **FEW) == found
    assert translator.translate(texts[:2], skip_long=True, **FEW) == found[:2]
    with pytest.raises(ValueError, match="text 5: .*surrogate"):
        list(translator.stream(texts, skip_long=True, **FEW))
    with pytest.raises(ValueError, match=r"texts\[0\].*int"):  # a mistake of the program
        translator.translate([7], on_error="skip")


def test_many_skipped_texts_do_not_flood_the_log(translator, caplog) -> None:
    assert translator.translate(["x" * 100] * 50, skip_long=True) == [""] * 50
    assert len(caplog.records) == 11 and "50 of 50" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("kind", [Transformer, LSTMSeq2Seq])
def test_attention_is_that_of_evaluation(kind) -> None:
    # With dropout on, no two calls would agree.
    model = tiny(kind, dropout=0.5)
    translator = Translator(model, ByteTokenizer())
    expected = translator.attention("abc")
    model.train()
    source, target, weights = translator.attention("abc")
    assert (source, target) == expected[:2] and torch.equal(weights, expected[2])
    assert model.training


def test_attention_and_its_picture(translator, tmp_path) -> None:
    source, target, weights = translator.attention("zwölf")
    assert weights.shape == (2, 4, len(target), len(source)) and source[-1] == "</s>"
    assert (weights.sum(-1) - 1).abs().max() < 1e-5
    ids = torch.tensor([translator.encode("zwölf")])
    found = generate(translator.model.eval(), ids)
    assert target == translator.tokenizer.tokens(found[0].tolist())
    expected = translator.model.attention_maps(ids, torch.tensor([[0, *found[0].tolist()[:-1]]]))["cross"][:, 0]
    assert (weights - expected).abs().max() < 1e-6
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    draw_attention(source, target, weights, tmp_path / "a.png", title="zwölf")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_a_translation_begins_with_its_prefix(model, translator) -> None:
    tokenizer, texts = ByteTokenizer(), ["a", "a longer text", "mid size"]
    prefixes = ["Ähm", None, "so "]
    rows = [[0, *tokenizer.encode(prefix or "")] for prefix in prefixes]
    found = translator.translate(texts, target_prefix=prefixes, return_scores=True, **FEW)
    for text, row, (answer, score) in zip(texts, rows, found, strict=True):
        ids = [[*tokenizer.encode(text), 1]]
        out = generate(model.eval(), ids, decoder_input_ids=[row], return_dict_in_generate=True, **FEW)
        assert answer == tokenizer.decode(out.sequences[0].tolist()) and abs(score - float(out.scores[0])) < 1e-4
    answers = [answer for answer, _ in found]
    assert answers[0].startswith("Ähm") and answers[2].startswith("so ")
    assert answers[1] == translator.translate(texts[1], **FEW)
    assert translator.translate(texts[0], target_prefix="Ähm", **FEW) == answers[0]
    assert list(translator.stream(iter(texts), target_prefix=iter(prefixes), **FEW)) == answers
    assert "".join(translator.stream(texts[0], target_prefix="Ähm", **FEW)) == answers[0]
    several = translator.translate(texts, target_prefix=prefixes, num_beams=3, num_return_sequences=2, **FEW)
    assert all(answer.startswith(p or "") for row, p in zip(several, prefixes, strict=True) for answer in row)


def test_a_special_start_token_is_not_part_of_the_translation() -> None:
    model = tiny(special_ids=SpecialIds(start=ord("S") + 3))
    tokenizer = ByteTokenizer()
    found = Translator(model, tokenizer).translate("a", target_prefix="b", **FEW)
    out = generate(model, [[*tokenizer.encode("a"), 1]], decoder_input_ids=[tokenizer.encode("b")], **FEW)
    assert found == tokenizer.decode(out[0].tolist()) and found.startswith("b")
    assert "".join(Translator(model, tokenizer).stream("a", target_prefix="b", **FEW)) == found


def test_prefixes_that_do_not_match_the_texts(translator) -> None:
    for texts, prefix, message in (
        ("a", ["b"], "target_prefix.*list"),
        (["a"], "b", "target_prefix.*str"),
        (["a"], 7, "target_prefix.*int"),
        (["a", "b"], ["c"], "1 of target_prefix.*texts"),
        (["a"], ["b", "c"], "1 of texts.*target_prefix"),
        (["a", "b"], ["c", 7], r"target_prefix\[1\].*int 7"),
        (["a", "b"], ["c", "\ud800"], "text 2: .*target_prefix.*surrogate"),
        (["a", "b"], ["c", "x" * 64], "text 2: .*prefix.*max_len 64"),
        (["a", "b"], ["c", "x" * 60], "text 2: .*max_new_tokens.*60"),
    ):
        for translate in (translator.translate, lambda texts, **options: list(translator.stream(texts, **options))):
            with pytest.raises(ValueError, match=message):
                translate(texts, target_prefix=prefix, **FEW)
    assert translator.translate(["a", "b"], target_prefix=["x" * 64, "c"], on_error="skip", **FEW)[0] == ""


def test_a_text_with_ids_that_the_model_does_not_have_is_a_bad_text(model) -> None:
    assert Foreign().encode("!") == [9999]
    translator = Translator(model, Foreign())
    for name, texts, prefixes in (("source", ["a", "b!"], None), ("target", ["a", "b"], ["", "!"])):
        message = rf"text 2: .*\b{name} ids\b.*\b9999\b"
        with pytest.raises(TextError, match=message):
            translator.translate(texts, target_prefix=prefixes, **FEW)
        with pytest.raises(TextError, match=message):
            list(translator.stream(texts, target_prefix=prefixes, **FEW))
        with pytest.raises(TextError, match=message[8:]):
            translator.stream(texts[1], target_prefix=prefixes and prefixes[1], **FEW)
        found = translator.translate(texts, target_prefix=prefixes, on_error="skip", **FEW)
        assert found == [translator.translate("a", **FEW), ""]


def test_scores_of_tokens(translator) -> None:
    text, score, tokens = translator.translate("a", target_prefix="z", return_token_scores=True, **FEW)
    assert (text, score) == translator.translate("a", target_prefix="z", return_scores=True, **FEW)
    assert len(tokens) == 8 and score == pytest.approx(sum(log_prob for _, log_prob in tokens))
    new = translator.tokenizer.encode(text)[1:]
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert [token for token, _ in tokens] == translator.tokenizer.tokens(new)
    found = translator.translate(["a", "b"], num_beams=3, num_return_sequences=2, return_token_scores=True, **FEW)
    for answer in (answer for row in found for answer in row):
        penalty = ((5 + len(answer.tokens)) / 6) ** 0.6
        assert answer.score == pytest.approx(sum(log_prob for _, log_prob in answer.tokens) / penalty)
    assert list(translator.stream(["", "a"], return_token_scores=True, target_prefix=["", "z"], **FEW)) == [
        TokenScored("", -math.inf, []),
        (text, score, tokens),
    ]
    assert list(translator.stream([" "], return_scores=True, **FEW)) == [Scored("", -math.inf)]


@pytest.mark.parametrize("engine", [None, "kv_cache"])
def test_log_probabilities_are_computed_only_for_scores(model, engine, monkeypatch) -> None:
    calls = watch_steps(monkeypatch)

    def asked() -> set[tuple[str, bool]]:
        found = {(call.engine, call.log_probs) for call in calls}
        calls.clear()
        return found

    name = engine or DEFAULT
    translator = Translator(model, ByteTokenizer())
    for options, expected in (
        ({}, False),
        ({"do_sample": True, "num_return_sequences": 2}, False),
        ({"return_scores": True}, True),
        ({"return_token_scores": True}, True),
        ({"num_beams": 2}, True),
    ):
        translator.translate(["a"], engine=engine, **options, **FEW)
        assert asked() == {(name, expected)}, options
        list(translator.stream(["a"], engine=engine, **options, **FEW))
        assert asked() == {(name, expected)}, options
    list(translator.stream("a", engine=engine, **FEW))
    assert asked() == {(name, False)}
    translator.attention("a")
    assert {log_probs for _, log_probs in asked()} == {False}


@pytest.mark.parametrize("draws, engine", by_turns([True, False], [None, "kv_cache"]))
def test_the_batch_is_full_while_there_is_input(model, engine, draws, monkeypatch) -> None:
    # Translations of many lengths: as one ends, the next begins, and no text is read long before there is room for it.
    calls = watch_steps(monkeypatch)
    read: list[str] = []

    def texts():
        for number in range(60):
            read.append("x" * (1 + number * 7 % 30))
            yield read[-1]
        read.append("the end")

    model = talkative(model)
    translator = Translator(model, ByteTokenizer(), max_batch_size=4)
    options = {"eos_token_id": list(range(1, 40)), "max_new_tokens": 20, "engine": engine}
    if draws:
        options |= {"do_sample": True, "seed": 5, "temperature": 0.7}
    answers = translator.stream(texts(), **options)
    assert not read
    found, full = [], 0
    for answer in answers:
        found.append(answer)
        assert len(read) - len(found) <= 4 * 20
        if read[-1] != "the end":
            full = len(calls)
    assert sum(call.steps for call in calls[:full]) > 50
    assert {(call.engine, call.rows) for call in calls[:full]} == {(engine or DEFAULT, 4)}
    monkeypatch.undo()
    assert found == Translator(model, ByteTokenizer(), max_batch_size=100).translate(read[:-1], **options)
    assert len(set(map(len, found))) > 2


@pytest.mark.parametrize("read_ahead", [1, 3, 7])
def test_a_stream_holds_no_more_texts_than_requested(translator, read_ahead) -> None:
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield "x" * (1 + read % 5)

    for given, _ in zip(range(20), translator.stream(endless(), read_ahead=read_ahead, **FEW), strict=False):
        assert 1 <= read - given <= read_ahead


def test_running_requests_do_not_wait_for_new_ones(translator) -> None:
    class Chat:
        """Yields a text, and the next one after the first was answered; code that waits for it before would wait for
        ever.
        """

        def __init__(self) -> None:
            self.texts, self.answered, self.said = iter(TEXTS), 0, 0

        def get(self, wait: bool) -> Item | None:
            if self.said > self.answered:
                assert not wait
                return None
            if self.said == len(TEXTS):
                raise EOFError
            self.said += 1
            return Item(next(self.texts))

    chat, found = Chat(), []
    for answers in translator.answers(chat, translator.settings(FEW), ErrorPolicy(), log_probs=False):
        found += [answer.texts()[0] for answer in answers]
        assert len(found) == chat.said
        chat.answered += len(answers)
    assert found == translator.translate(TEXTS, **FEW)


def test_a_stream_yields_the_results_before_an_error(translator) -> None:
    def texts():
        yield from TEXTS
        raise OSError("the line is dead")

    answers = translator.stream(texts(), **FEW)
    assert [next(answers) for _ in TEXTS] == translator.translate(TEXTS, **FEW)
    with pytest.raises(OSError, match="the line is dead"):
        next(answers)
    answers = translator.stream([*TEXTS, "x" * 100, "never read"], **FEW)
    assert [next(answers) for _ in TEXTS] == translator.translate(TEXTS, **FEW)
    with pytest.raises(ValueError, match="text 6: .*101"):
        next(answers)


def test_a_text_that_fails_is_named(translator) -> None:
    def processor(input_ids, scores):
        if input_ids.shape[1] > 2 and input_ids[0, 1] == ord("z") + 3:
            raise error
        return scores

    for error, kind in ((ValueError("no z"), ValueError), (KeyError("no z"), RuntimeError)):
        options = {"target_prefix": ["a", "z", "b"], "logits_processor": processor, **FEW}
        with pytest.raises(kind, match="text 2: .*no z") as caught:
            translator.translate(["1", "2", "3"], **options)
        assert caught.value.__cause__ is error
        answers = translator.stream(["1", "2", "3"], **options)
        assert next(answers).startswith("a")
        with pytest.raises(kind, match="text 2: .*no z"):
            next(answers)
        with pytest.raises(kind, match="text 1: .*no z"):
            list(translator.stream("1", **options | {"target_prefix": "z"}))


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}, {"min_new_tokens": 20}], ids=str)
def test_the_pieces_of_a_text_are_its_translation(translator, options) -> None:
    for text in TEXTS:
        pieces = list(translator.stream(text, max_new_tokens=25, **options))
        assert "".join(pieces) == translator.translate(text, max_new_tokens=25, **options)
        assert all(pieces)
    assert list(Translator(always("q"), ByteTokenizer()).stream("a", max_new_tokens=4)) == ["q"] * 4


@pytest.mark.parametrize("has_processors", [True, False])
@pytest.mark.parametrize("engine", [None, "kv_cache"])
def test_pieces_come_while_the_rest_is_not_known(model, engine, has_processors, monkeypatch) -> None:
    calls = watch_steps(monkeypatch)
    letters = [i for i in range(259) if i not in range(100, 120)]
    options = {"suppress_tokens": letters} if has_processors else {}
    if not has_processors:  # a model that says nothing but letters by itself
        model = talkative(model, letters)
    pieces = Translator(model, ByteTokenizer()).stream("a", max_new_tokens=9, engine=engine, **options)
    told = 0
    for number, piece in enumerate(pieces, 1):
        told += len(piece)
        assert sum(call.steps for call in calls) == told and (number > 4 or len(piece) == 1)
    assert told == 9 and {call.engine for call in calls} == {engine or DEFAULT}


def test_one_text_that_cannot_be_streamed(translator, caplog) -> None:
    for options in (
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"return_scores": True},
        {"return_token_scores": True},
    ):
        with pytest.raises(ValueError, match="beams"):
            translator.stream("a", **options)
    with pytest.raises(ValueError, match="text 1: .*empty"):
        translator.stream(" ")
    assert list(translator.stream("x" * 100, skip_long=True)) == []
    assert "text 1:" in caplog.text
    for name, instead in (("streamer", "Translator.stream"), ("decoder_input_ids", "target_prefix")):
        with pytest.raises(ValueError, match=f"{instead}.*{name}"):
            translator.translate("a", **{name: None})
    for name in ("return_scores", "return_token_scores"):
        with pytest.raises(ValueError, match=rf"\b{name}\b.*'yes'"):
            translator.translate("a", **{name: "yes"})


SEARCHES = [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}, {}]


@pytest.mark.parametrize(("engine", "options"), by_turns(["cpp", "kv_cache"], SEARCHES))
def test_caches_keep_to_their_memory(model, options, engine, monkeypatch) -> None:
    if engine == "cpp" and not HAS_CPP:
        pytest.skip("there is no decoding engine in C++ here")
    taken: list[int] = []
    empty_cache, open_batch = Transformer.empty_cache, CppEngine.open

    def counted(self, *args, **given):
        cache = empty_cache(self, *args, **given)
        taken.append(sum(tensor.numel() * tensor.element_size() for tensor in (cache.k, cache.v)))
        return cache

    def opened(self, *args):
        batch = open_batch(self, *args)
        taken.append(batch.free_tokens() * self.token_bytes)
        return batch

    if engine == "kv_cache":  # the C++ engine wants a model whose methods are its own
        monkeypatch.setattr(Transformer, "empty_cache", counted)
    monkeypatch.setattr(CppEngine, "open", opened)
    calls = watch_steps(monkeypatch)
    options = {**options, "engine": engine}
    texts = ["x" * (5 + i * 7 % 30) for i in range(24)]
    budget = 600_000
    translator = Translator(model, ByteTokenizer(), max_batch_bytes=budget)
    found = translator.translate(texts, max_new_tokens=30, **options, **SEED)
    block = 16 * choose_engine(model, engine).token_bytes
    if engine == "kv_cache":
        taken.pop()  # of the engine that was asked for the size of a token
    assert budget / 2 < max(taken) <= budget + 2 * block
    assert {call.engine for call in calls} == {engine}
    assert 4 <= max(call.rows for call in calls) < 96
    taken.clear()
    assert list(translator.stream(texts, max_new_tokens=30, **options, **SEED)) == found
    assert budget / 2 < max(taken) <= budget + 2 * block
    calls.clear()
    translator = Translator(model, ByteTokenizer(), max_batch_bytes=1)  # one text is translated whatever it takes
    assert translator.translate(texts[:3], max_new_tokens=30, **options, **SEED) == found[:3]
    assert max(call.rows for call in calls) <= 4


@pytest.mark.parametrize("precision, kind", by_turns([None, "fp32", "bf16"], [Transformer, LSTMSeq2Seq]))
def test_from_pretrained_needs_only_the_folder(kind, precision, tmp_path) -> None:
    model = tiny(kind)
    save_model(model, tmp_path, ByteTokenizer())
    translator = Translator.from_pretrained(tmp_path, precision=precision, device="cpu")
    assert {p.dtype for p in translator.model.parameters()} == {
        torch.bfloat16 if precision == "bf16" else torch.float32
    }
    found = translator.translate(TEXTS, num_beams=2, **FEW)
    if precision != "bf16":
        assert found == Translator(model, ByteTokenizer()).translate(TEXTS, num_beams=2, **FEW)
    assert translator.attention("a")[2].dtype == torch.float32


def test_an_engine_never_replaces_the_requested_precision(model, tmp_path, calls_of) -> None:
    calls = calls_of(request_builder, "choose_engine")

    def made() -> tuple[str, str | None]:
        call = calls.pop()
        return call.result.name, call.args[2]

    model.save_pretrained(tmp_path / "plain", ByteTokenizer())
    model.quantize().save_pretrained(tmp_path / "int8", ByteTokenizer())
    for folder, given, asked in (
        ("plain", None, None),
        ("plain", "fp32", None),  # the dtype of the weights says it
        ("plain", "int8", "int8"),
        ("int8", None, None),
        ("int8", "int8", "int8"),
        ("int8", "fp32", "fp32"),
    ):
        translator = Translator.from_pretrained(tmp_path / folder, precision=given)
        assert translator.precision == asked
        if asked != "int8" or why_no_cpp_engine() is None:
            translator.translate("a", **FEW)
            assert made()[1] == asked
            list(translator.stream("a", **FEW))
            assert made()[1] == asked
    translator = Translator(model.train(), ByteTokenizer(), precision="int8")
    for options in ({}, {"num_beams": 2}):  # in training mode too: it is set to evaluation while it translates
        if why_no_cpp_engine() is None:
            translator.translate("a", **options, **FEW)
            assert made() == ("cpp", "int8")
    assert model.training
    translator.translate("a", precision="fp32", engine="kv_cache", **FEW)
    assert made() == ("kv_cache", "fp32")
    model.encoder.layers[0].register_forward_hook(lambda module, args, out: None)
    try:
        with pytest.raises(ValueError, match="'cpp'.*int8"):
            translator.translate("a", **FEW)
    finally:
        model.encoder.layers[0]._forward_hooks.clear()
    with pytest.raises(ValueError, match=r"\bprecision\b.*'int2'"):
        Translator(model, ByteTokenizer(), precision="int2")


def test_errors_of_from_pretrained_say_what_is_wrong(tmp_path) -> None:
    tiny(GPT).save_pretrained(tmp_path, ByteTokenizer())
    with pytest.raises(ValueError, match="'GPT'"):
        Translator.from_pretrained(tmp_path)
    for bad in ("int2", "INT8", 8, torch.float32):
        with pytest.raises(ValueError, match=r"\bprecision\b"):
            Translator.from_pretrained(tmp_path, precision=bad)


@pytest.mark.parametrize("wrong", [None, 5])
def test_a_folder_is_a_path_or_a_list_of_paths(wrong) -> None:
    with pytest.raises(ValueError, match="folder"):
        Translator.from_pretrained(wrong)
