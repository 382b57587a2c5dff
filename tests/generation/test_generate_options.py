"""Tests other options of `generate`: prefixes, time limits, streamers, bad words, special ids, token scores."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastformer import requests as base_requests
from fastformer.baseline import LSTMSeq2Seq
from fastformer.generation import generate
from fastformer.generation import scheduler as scheduler_module
from fastformer.generation.scheduler import Scheduler
from fastformer.models import GPT, Transformer
from tests.generation.small import CPP, EOS, VOCAB, louder, mixed_sources, new_tokens, plain_greedy, real, watch_steps
from tests.test_special_ids import OTHER


@pytest.fixture(params=["model", "lstm"])
def reader(request):
    """Returns a model that reads sources."""
    return request.getfixturevalue(request.param)


# Beginnings.


def test_prefixes_come_in_all_forms(reader) -> None:
    sources = mixed_sources(3, 6)
    plain = [[5, 6], [7], [8, 9]]
    expected = generate(reader, sources, decoder_input_ids=plain, max_new_tokens=5)
    forms = [
        [[0, 5, 6], [0, 7], [8, 9]],  # the start token may stand in front
        torch.tensor([[5, 6], [7, 0], [8, 9]]),
        torch.tensor([[5, 6], [0, 7], [8, 9]]),  # padded in front
        torch.tensor([[0, 5, 6], [0, 7, 0], [0, 8, 9]]),
        torch.tensor([[0, 5, 6], [0, 0, 7], [0, 8, 9]]),
        np.array([[5, 6], [7, 0], [8, 9]]),
        [np.array([5, 6]), torch.tensor([7]), (8, 9)],
    ]
    for form in forms:
        assert torch.equal(generate(reader, sources, decoder_input_ids=form, max_new_tokens=5), expected)
    nothing = generate(reader, sources, max_new_tokens=5)
    empties: list = [[[], [], []], [[0], [0], [0]], torch.zeros(3, 1).long(), torch.zeros(3, 0).long()]
    for empty in empties:
        assert torch.equal(generate(reader, sources, decoder_input_ids=empty, max_new_tokens=5), nothing)
    one = generate(reader, sources[:1], decoder_input_ids=[5, 6], max_new_tokens=5)
    assert one[0].tolist() == expected[0, : one.shape[1]].tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[5]], "expected decoder_input_ids of 2 rows, as input_ids have, got 1"),
        (torch.ones(3, 2).long(), "expected decoder_input_ids of 2 rows, as input_ids have, got 3"),
        ("text", "expected decoder_input_ids .* got str: turn text into ids"),
        ([[5], [6.5]], r"decoder_input_ids\[1\] holds something else"),
        (torch.ones(2, 2), r"expected decoder_input_ids .* got torch.float32"),
        ([[5], [VOCAB]], f"expected .*target.* ids from 0 to {VOCAB - 1}"),
        ([[5], [VOCAB, 5]], f"expected .*target.* ids from 0 to {VOCAB - 1}"),
        ([[5], [-1, 5]], f"expected .*target.* ids from 0 to {VOCAB - 1}"),
    ],
)
def test_invalid_prefixes_are_refused(reader, given, message) -> None:
    with pytest.raises(ValueError, match=message):
        generate(reader, mixed_sources(2), decoder_input_ids=given, max_new_tokens=4)


def test_prefixes_that_do_not_fit(model, gpt) -> None:
    with pytest.raises(ValueError, match="expected a prefix of fewer tokens than the model's max_len 128, got 128"):
        generate(model, [[5]], decoder_input_ids=[5] * 128)
    with pytest.raises(ValueError, match="max_new_tokens of at most 8 after a prefix of 120, because .* is 128; got 9"):
        generate(model, [[5]], decoder_input_ids=[5] * 120, max_new_tokens=9)
    assert generate(model, [[5]], decoder_input_ids=[5] * 120, min_new_tokens=8).shape == (1, 128)
    assert generate(model, [[5]], decoder_input_ids=[5] * 127, eos_token_id=39).shape == (1, 128)
    with pytest.raises(ValueError, match="expected no decoder_input_ids for GPT: its input_ids are the beginning"):
        generate(gpt, [[5]], decoder_input_ids=[5])
    with pytest.raises(ValueError, match="expected no decoder_start_token_id for GPT: its prompts are the beginning"):
        generate(gpt, [[5]], decoder_start_token_id=5)


# Time.


@pytest.mark.parametrize("options", [{}, {"num_beams": 2, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_a_time_limit_cuts_the_output(any_model, options, clock, monkeypatch) -> None:
    step = Scheduler.step

    def stepped(self: Scheduler):
        clock.now += 1.0
        return step(self)

    monkeypatch.setattr(Scheduler, "step", stepped)
    sources = mixed_sources(3, 6)
    given = {"max_new_tokens": 30, "eos_token_id": 39, "min_new_tokens": 30, "return_dict_in_generate": True, **options}
    given["engine"] = "kv_cache" if hasattr(any_model, "empty_cache") else None  # one token a step of the scheduler
    cut = generate(any_model, sources, max_time=4.0, **given)
    width = 0 if not isinstance(any_model, GPT) else int((sources != 0).sum(1).max())
    assert clock.now == 104.0 and cut.sequences.shape[1] == width + 4
    assert generate(any_model, sources, max_time=1000.0, **given).sequences.shape[1] == width + 30
    if not options:
        short = generate(any_model, sources, max_new_tokens=4, eos_token_id=39, min_new_tokens=4)
        assert torch.equal(cut.sequences, short)


def test_inputs_without_time_left_give_empty_outputs(model, monkeypatch) -> None:
    monkeypatch.setattr(base_requests, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: 9.0))
    for options in ({}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2, "seed": 1}):
        out = generate(model, mixed_sources(2), max_time=9.0, return_dict_in_generate=True, **options)
        rows = 2 * options.get("num_return_sequences", 1)
        assert out.sequences.shape == out.token_log_probs.shape == (rows, 0)
        assert out.scores.tolist() == [-math.inf] * rows


# Streams.


class Listener:
    """A streamer that records its input."""

    def __init__(self, patience: int = 10**6) -> None:
        self.told: list[list] = []
        self.ended, self.patience = 0, patience

    def put(self, value: torch.Tensor) -> None:
        assert value.dtype == torch.long and not self.ended
        self.told.append(value.tolist())
        if len(self.told) > self.patience:
            raise RuntimeError("enough")

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 4}], ids=str)
def test_a_streamer_gets_the_prompt_and_then_each_token(any_model, options) -> None:
    listener = Listener()
    prefix = {} if isinstance(any_model, GPT) else {"decoder_input_ids": [8, 9]}
    out = generate(any_model, [5, 6, 7], streamer=listener, max_new_tokens=7, **prefix, **options)
    prompt = [5, 6, 7] if isinstance(any_model, GPT) else [0, 8, 9]
    assert listener.told[0] == [prompt] and listener.ended == 1
    tokens = [told[0] for told in listener.told[1:]]
    assert all(len(told) == 1 for told in listener.told[1:])
    assert out[0].tolist() == [*(prompt if isinstance(any_model, GPT) else [8, 9]), *tokens]
    assert torch.equal(out, generate(any_model, [5, 6, 7], max_new_tokens=7, **prefix, **options))


def test_impossible_streams_are_refused_and_errors_of_a_streamer_surface(model) -> None:
    for ids, options in (
        ([[5], [6]], {}),
        ([[5]], {"num_beams": 2}),
        ([[5]], {"do_sample": True, "num_return_sequences": 2}),
    ):
        listener = Listener()
        with pytest.raises(ValueError, match="expected one input, without beams or several samples, along with a str"):
            generate(model, ids, streamer=listener, **options)
        assert listener.told == []
    with pytest.raises(ValueError, match="expected a streamer with put and end, got builtin_function_or_method"):
        generate(model, [5], streamer=print)
    for patience in (0, 1, 3):
        listener = Listener(patience)
        with pytest.raises(RuntimeError, match="enough"):
            generate(model, [5], streamer=listener, max_new_tokens=6, eos_token_id=39)
        assert len(listener.told) == patience + 1 and listener.ended == 0


# Words.


def test_forced_and_suppressed_tokens(any_model) -> None:
    sources = mixed_sources(4, 6)
    free = new_tokens(any_model, sources, generate(any_model, sources, max_new_tokens=8))
    banned, pair = free[0][0], free[1][:2]
    is_begun_by_one = not isinstance(any_model, GPT)  # a forced first token follows exactly one id

    def change(logits: list[float], said: list[int]) -> None:
        logits[banned] = logits[EOS] = -math.inf
        if said[-1:] == pair[:1]:
            logits[pair[1]] = -math.inf
        if len(said) == 7 or (not said and is_begun_by_one):
            token = 20 if not said else EOS
            logits[:] = [-math.inf] * VOCAB
            logits[token] = 0.0

    out = generate(
        any_model,
        sources,
        max_new_tokens=8,
        min_new_tokens=8,
        suppress_tokens=[banned],
        bad_words_ids=[pair],
        forced_bos_token_id=20,
        forced_eos_token_id=EOS,
        return_dict_in_generate=True,
    )
    found = new_tokens(any_model, sources, out.sequences)
    for source, tokens, log_probs in zip(sources, found, out.token_log_probs.tolist(), strict=True):
        if isinstance(any_model, GPT) and pair[0] == real(source)[-1]:
            continue  # there the word would begin in the prompt
        assert tokens == plain_greedy(any_model, real(source), 8, change=change)
        assert log_probs[7] == 0.0 and (log_probs[0] == 0.0) == is_begun_by_one


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 2}], ids=str)
def test_min_new_tokens_and_the_forced_end(any_model, options) -> None:
    sources = mixed_sources(4, 6)
    ends = list(range(3, 20))  # so many that one of them comes soon

    def said(**more) -> list[list[int]]:
        found = generate(any_model, sources, max_new_tokens=9, eos_token_id=ends, **more, **options)
        prompts = int((sources != 0).sum(1).max()) if isinstance(any_model, GPT) else 0
        return found[:, prompts:].tolist()

    assert min(next((i for i, token in enumerate(row) if token in ends), 9) for row in said()) < 5
    for row in said(min_new_tokens=5):
        assert not set(row[:5]) & set(ends)
        assert len(row) == 9 or set(row[5:]) & set(ends)
    for row in said(forced_eos_token_id=ends[0]):
        assert set(row) & set(ends)


# Other ids.


@pytest.fixture(scope="module")
def others() -> dict[str, torch.nn.Module]:
    """Returns models with other special ids."""
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCAB, "d_model": 32, "num_heads": 4, "max_len": 64, "tie_embeddings": False}
    models = {
        "model": Transformer.from_preset("tiny", d_ff=64, special_ids=OTHER, **sizes),
        "gpt": GPT.from_preset("tiny", num_layers=2, special_ids=OTHER, **sizes),
        "lstm": LSTMSeq2Seq(vocab_size=VOCAB, d_model=32, pad=3, eos=(7, 9), unk=4, start=5),
    }
    return {name: louder(models[name], factor) for name, factor in (("model", 2), ("gpt", 8), ("lstm", 3))}


@pytest.mark.parametrize("kind", ["model", "gpt", "lstm"])
def test_the_models_own_ids_are_honoured(others, kind) -> None:
    which = others[kind]
    rows = [[10 + (7 * i + j) % 29 for j in range(1 + i % 5)] for i in range(12)]
    found = generate(which, rows, max_new_tokens=12).tolist()
    width = max(map(len, rows)) if kind == "gpt" else 0
    for row, source in zip(found, rows, strict=True):
        if kind == "gpt":
            assert row[:width] == [3] * (width - len(source)) + source
        due = plain_greedy(which, source, 12, start=5, ends=(7, 9))
        assert row[width:] == due + [3] * (len(row) - width - len(due))
    # Others may be named, and then those of the model mean nothing.
    common = next(token for row in found for token in row[width + 1 :] if token not in (0, 3, 7, 9))
    start = {} if kind == "gpt" else {"decoder_start_token_id": 11}
    found = generate(which, rows, max_new_tokens=12, eos_token_id=[common, 30], pad_token_id=0, **start).tolist()
    cut = 0
    for row, source in zip(found, rows, strict=True):
        due = plain_greedy(which, source, 12, start=11, ends=(common, 30))
        cut += due[-1] == common and len(due) < 12
        assert row[width:] == due + [0] * (len(row) - width - len(due))
    assert cut > 0


@pytest.mark.parametrize("ends", [0, [5, 0]])
def test_an_end_is_not_the_padding_of_the_model(model, ends) -> None:
    with pytest.raises(ValueError, match=r"\beos_token_id\b.*\bpad_token_id\b"):
        generate(model, mixed_sources(2), max_new_tokens=3, eos_token_id=ends)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 4}], ids=str)
def test_lengths_may_include_the_prefix(any_model, options) -> None:
    is_prompted = isinstance(any_model, GPT)
    inputs, prefix = [[5, 6, 7], [8, 9]], None if is_prompted else [[4, 3], [5]]
    # Prompts count as long as the longest one is; else each counts its own ids and the start token.
    for row, begun in enumerate([3, 3] if is_prompted else [3, 2]):
        for most, least in ((8, 0), (8, 6), (9, 30), (7, 1)):
            for together in (True, False) if not is_prompted else (True,):

                def said(rows=slice(None) if together else slice(row, row + 1), **lengths):  # noqa: B023
                    more = {} if is_prompted else {"decoder_input_ids": prefix[rows]}
                    return generate(any_model, inputs[rows], **more, **lengths, **options, eos_token_id=[1, 9, 13, 21])

                one = real(said(max_length=most, min_length=least)[row if together else 0])
                due = said(max_new_tokens=most - begun, min_new_tokens=max(0, least - begun))
                assert one == real(due[row if together else 0])
    shorter = generate(
        any_model, [[5, 6, 7]], max_length=99, max_new_tokens=2, min_length=50, min_new_tokens=2, **options
    )
    assert shorter.shape[1] == 2 + 3 * is_prompted  # the number of new tokens counts
    begins = 3 if is_prompted else 1
    with pytest.raises(ValueError, match=f"max_length of more than the {begins} .* max_new_tokens"):
        generate(any_model, [[5, 6, 7]], max_length=begins, **options)
    with pytest.raises(ValueError, match="expected max_length of at most"):
        generate(any_model, [[5, 6, 7]], max_length=10**6, **options)
    with pytest.raises(ValueError, match="expected min_length of at most"):
        generate(any_model, [[5, 6, 7]], min_length=10**6, **options)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 4}], ids=str)
def test_a_minimum_above_the_maximum_and_a_duplicate_end(any_model, options, caplog) -> None:
    inputs = [[5, 6, 7], [8, 9]]
    found = generate(any_model, inputs, min_new_tokens=9, max_new_tokens=4, **options)
    assert "min_new_tokens 9 is above max_new_tokens 4" in caplog.text
    assert torch.equal(found, generate(any_model, inputs, min_new_tokens=4, max_new_tokens=4, **options))
    assert not (found[:, -4:] == EOS).any()
    twice, once = (
        generate(any_model, inputs, max_new_tokens=9, eos_token_id=ends, **options) for ends in ([9, 5, 9], [9, 5])
    )
    assert torch.equal(twice, once)


@pytest.mark.parametrize("engine", [CPP, "kv_cache", "recompute"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "beam_rules": "transformers"}], ids=str)
def test_a_criterion_may_end_rows(model, options, engine) -> None:
    seen: list[torch.Tensor] = []

    def third(input_ids, scores, **more):
        assert scores is None
        seen.append(input_ids)
        return torch.full((len(input_ids),), input_ids.shape[1] == 1 + 3)

    inputs, given = [[5, 6, 7], [8, 9]], {"engine": engine, "min_new_tokens": 5, "max_new_tokens": 9, **options}
    found = generate(model, inputs, stopping_criteria=third, **given)
    assert found.shape[1] == 3 and seen and all(int(ids[0, 0]) == 0 for ids in seen)
    if not options:
        assert torch.equal(found, generate(model, inputs, **given)[:, :3])
    # Several may be asked; one alone may speak for all rows, and samples are asked like others.
    plain = [lambda ids, scores: False, lambda ids, scores: ids.shape[1] >= 3]
    assert generate(model, inputs, stopping_criteria=plain, **given).shape[1] == 2
    if not options:
        drawn = generate(model, inputs, stopping_criteria=plain, do_sample=True, num_return_sequences=3, **given)
        assert drawn.shape == (6, 2)
    never = generate(model, inputs, stopping_criteria=[lambda ids, scores: torch.zeros(len(ids), dtype=bool)], **given)
    assert torch.equal(never, generate(model, inputs, **given))
    for wrong in (None, 1, torch.ones(7, dtype=torch.bool), torch.ones(len(inputs)), "yes"):
        with pytest.raises(ValueError, match="expected a stopping criterion to return a boolean"):
            generate(model, inputs, stopping_criteria=lambda ids, scores, wrong=wrong: wrong, **given)


def test_one_id_may_end_a_row_and_fill_it(any_model) -> None:
    sources = [[5, 1, 6], [7, 8], [9, 10, 11, 1]]  # 1, the model's eos, is a token of theirs
    plain = generate(any_model, sources, max_new_tokens=12)
    width = 4 if isinstance(any_model, GPT) else 0
    eos = plain[0, width + 3].item()
    apart = generate(any_model, sources, eos_token_id=eos, max_new_tokens=12)
    found = generate(any_model, sources, eos_token_id=eos, pad_token_id=eos, max_new_tokens=12)
    assert (apart == eos).any()
    ends = (apart[:, width:] == eos).int().argmax(1)
    for row, other, end in zip(found.tolist(), apart.tolist(), ends.tolist(), strict=True):
        end = end + width if eos in other[width:] else len(other) - 1
        assert row[width : end + 1] == other[width : end + 1] and set(row[end + 1 :]) <= {eos}
    # Of a tensor nothing is padding, not even at its end, unless a mask says so.
    batch = torch.tensor([[5, eos, 6, eos]])
    options = {"pad_token_id": eos, "eos_token_id": eos, "max_new_tokens": 5, "return_dict_in_generate": True}
    whole = generate(any_model, batch, **options)
    for ids, mask in ((batch.tolist(), None), (batch, torch.ones(1, 4))):
        same = generate(any_model, ids, attention_mask=mask, **options)
        assert torch.equal(same.sequences, whole.sequences) and torch.equal(same.scores, whole.scores)
    masked = generate(any_model, batch, attention_mask=torch.tensor([[1, 1, 1, 0]]), **options)
    short = generate(any_model, [[5, eos, 6]], **options)
    assert torch.equal(masked.scores, short.scores) and not torch.equal(masked.scores, whole.scores)


def test_a_prefix_may_contain_pad_and_end_ids(reader) -> None:
    options = {"eos_token_id": 6, "pad_token_id": 6, "max_new_tokens": 3}
    for form in (torch.tensor([[5, 6]]), [[5, 6]]):
        out = generate(reader, [[7, 8]], decoder_input_ids=form, **options)
        assert out[0, :2].tolist() == [5, 6] and out.shape[1] > 2


# Scores, several hypotheses, and who else is there.


def test_missing_hypotheses_are_padding(model) -> None:
    # Everything but two tokens is forbidden: of a limit of two, two hypotheses of four exist.
    allowed = [EOS, 5]
    out = generate(
        model,
        mixed_sources(2),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=2,
        suppress_tokens=[token for token in range(VOCAB) if token not in allowed],
        return_dict_in_generate=True,
    )
    for source in range(2):
        rows = out.sequences[4 * source : 4 * source + 4].tolist()
        assert sorted(rows[:2]) == [[EOS, 0], [5, EOS]] and rows[2:] == [[5, 5], [0, 0]]
        scores = out.scores[4 * source : 4 * source + 4]
        assert scores[:3].isfinite().all() and scores[3] == -math.inf
        assert not out.token_log_probs[4 * source + 3].any()


def test_samples_depend_only_on_the_seed_and_their_place(any_model) -> None:
    sources = mixed_sources(6, 6)
    options = {"do_sample": True, "seed": 9, "max_new_tokens": 6, "num_return_sequences": 2, "eos_token_id": 39}
    whole = new_tokens(any_model, sources, generate(any_model, sources, **options))
    some = new_tokens(any_model, sources[:3], generate(any_model, sources[:3], **options))
    assert [row[:6] for row in whole[:6]] == [row[:6] for row in some]


def test_groups_of_beams_give_different_outputs(any_model) -> None:
    sources = mixed_sources(3, 6)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 4, "min_new_tokens": 4}
    out = generate(any_model, sources, num_beam_groups=4, diversity_penalty=1000.0, **options)
    for i in range(3):
        first = [row[-4] for row in out[4 * i : 4 * i + 4].tolist()]
        assert len(set(first)) == 4


def test_scores_are_computed_on_request(model, monkeypatch) -> None:
    calls = watch_steps(monkeypatch)
    for options, expected in (({}, False), ({"num_beams": 2}, True), ({"return_dict_in_generate": True}, True)):
        calls.clear()
        generate(model, [5, 6], max_new_tokens=2, **options)
        assert {call.log_probs for call in calls} == {expected}
