"""Compares decoding of real models with teacher forcing, a plain loop, other engines, and each row alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fastformer.generation import generate, request_builder
from fastformer.generation.engines.cpp import CppBatch
from fastformer.generation.engines.kv_cache import KVCacheBatch
from fastformer.generation.engines.recurrent import RecurrentBatch
from fastformer.models import GPT, Transformer
from fastformer.nn import SequenceLayout
from tests.covering import by_turns
from tests.generation.small import EOS, VOCAB, mixed_sources, new_tokens, next_logits, plain_greedy, real
from tests.generation.weights import CONFIGS, drawn


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.5, "early_stopping": True},
        {"do_sample": True, "num_return_sequences": 2, "seed": 1, "temperature": 0.7},
    ],
    ids=["greedy", "beams", "early", "samples"],
)
def test_scores_are_those_of_teacher_forcing(any_model, options) -> None:
    # A beam whose state belongs to another hypothesis, or row, has the score of neither.
    sources, prefixes = mixed_sources(5, 6), [[5, 6, 7], [], [8], [*range(10, 30)], []]
    begins, given = prefixes, {"decoder_input_ids": prefixes}
    if isinstance(any_model, GPT):  # whose prompts come back with the output
        prefixes, given = [[]] * 5, {}
        begins = [row.roll(int((row == 0).sum())).tolist() for row in sources]
    out = generate(any_model, sources, max_new_tokens=10, return_dict_in_generate=True, **given, **options)
    returned = options.get("num_return_sequences", 1)
    alpha = options.get("length_penalty", 0.6) if "num_beams" in options else 0.0
    assert len(out.sequences) == len(out.scores) == 5 * returned
    assert out.scores.dtype == torch.float32
    found = []
    for i, row in enumerate(out.sequences.tolist()):
        source, prefix, begun = real(sources[i // returned]), prefixes[i // returned], len(begins[i // returned])
        tokens = row[begun : begun + 10]
        tokens = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        assert row[:begun] == begins[i // returned] and not any(row[begun + len(tokens) :])
        logits = next_logits(any_model, source, [*prefix, *tokens])[len(prefix) : -1]
        forced = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert abs(out.scores[i].item() - forced.sum().item() / ((5 + len(tokens)) / 6) ** alpha) < 2e-4
        assert (out.token_log_probs[i, : len(tokens)] - forced).abs().max() < 1e-4
        assert not out.token_log_probs[i, len(tokens) :].any()
        found.append(tokens)
    if "num_beams" in options:
        for place in range(5):
            group = range(place * returned, (place + 1) * returned)
            assert len({tuple(found[i]) for i in group}) == returned  # n different hypotheses
            for ended in (True, False):
                scores = [out.scores[i].item() for i in group if (found[i][-1] == EOS) == ended]
                assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 6}], ids=str
)
def test_greedy_equals_the_plain_loop(any_model, options) -> None:
    sources = mixed_sources(5, 6)
    found = new_tokens(any_model, sources, generate(any_model, sources, max_new_tokens=12, **options))
    factor, size = options.get("repetition_penalty", 1.0), options.get("no_repeat_ngram_size", 0)

    def change(logits: list[float], new: list[int], begin: list[int]) -> None:
        said = [*begin, *new]  # what the output begins with counts
        grams = {tuple(said[i : i + size]) for i in range(len(said) - size + 1)} if size else set()
        for token in range(VOCAB):
            if token in said:
                logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            if size and (*said[len(said) - size + 1 :], token) in grams:
                logits[token] = -math.inf
        if len(new) < options.get("min_new_tokens", 0):
            logits[EOS] = -math.inf

    for source, tokens in zip(sources, found, strict=True):
        begin = real(source) if isinstance(any_model, GPT) else [0]
        assert tokens == plain_greedy(any_model, real(source), 12, change=partial(change, begin=begin))


def test_padding_side_is_free_and_the_mask_is_read(any_model) -> None:
    sources = mixed_sources(5, 6)
    left = torch.stack([row.roll(int((row == 0).sum())) for row in sources])
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "seed": 3, "num_return_sequences": 2}):
        expected = generate(any_model, sources, max_new_tokens=8, **options)
        for ids in (sources, left):
            assert torch.equal(generate(any_model, ids, max_new_tokens=8, **options), expected)
            mask = (ids != 0).long()
            filled = ids.masked_fill(ids == 0, 7)  # what the mask leaves out may be any id
            found = generate(any_model, filled, attention_mask=mask, max_new_tokens=8, **options)
            assert torch.equal(found, expected)


def test_a_mask_may_keep_an_id_of_pad(model) -> None:
    source = torch.tensor([[5, 0, 9]])
    out = generate(model, source, attention_mask=torch.ones(1, 3), max_new_tokens=6, return_dict_in_generate=True)
    with torch.no_grad():
        layout = SequenceLayout.padded(torch.tensor([3]), 3)
        target_in = torch.nn.functional.pad(out.sequences[:, :-1], (1, 0))
        forced = model(source, target_in, source_layout=layout).log_softmax(-1)
    tokens = new_tokens(model, source, out.sequences)[0]
    expected = sum(forced[0, i, token].item() for i, token in enumerate(tokens))
    assert abs(out.scores.item() - expected) < 1e-4
    dropped = generate(model, source, max_new_tokens=6, return_dict_in_generate=True)
    assert abs(dropped.scores.item() - expected) > 1e-3


@pytest.mark.parametrize(
    "options, name",
    by_turns(
        [
            {},
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "num_return_sequences": 4},
            {"do_sample": True, "seed": 3, "num_return_sequences": 2, "top_p": 0.9},
            {"num_beams": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            {"decoder_input_ids": [[5, 6], [7], [], [8, 9, 10]], "num_beams": 3},
        ],
        ["t5", "gpt", "rotary windows"],
    ),
)
def test_a_cache_changes_no_result(name, options) -> None:
    kind, settings = CONFIGS[name]
    if kind is GPT:
        options = {key: value for key, value in options.items() if key != "decoder_input_ids"}
    model, sources = drawn(kind, **settings), mixed_sources(4, 6)
    given = {"max_new_tokens": 12, "eos_token_id": [1, *range(40, 50)], **options}
    due = generate(model, sources, use_cache=False, **given)
    assert torch.equal(generate(model, sources, engine="kv_cache", **given), due)


def test_sampling_is_seeded_and_follows_the_distribution(model) -> None:
    source = mixed_sources(1)

    def drawn(count: int = 50, **options) -> Any:
        return generate(model, source, do_sample=True, num_return_sequences=count, max_new_tokens=1, **options)

    one = drawn(seed=5)
    assert torch.equal(one, drawn(seed=5)) and not torch.equal(one, drawn(seed=6))
    unseeded = []
    for seed in (3, None, 3):  # without one of the call's own, PyTorch's counts
        if seed is not None:
            torch.manual_seed(seed)
        unseeded.append(drawn())
    assert not torch.equal(*unseeded[:2]) and torch.equal(unseeded[0], unseeded[2])
    logits = next_logits(model, real(source[0]), [])[0]
    for temperature in (1.0, 0.5, 3.0):
        found = drawn(2000, seed=5, temperature=temperature)
        counted = torch.bincount(found.flatten(), minlength=VOCAB) / 2000
        assert (counted - (logits / temperature).softmax(-1)).abs().max() < 5 * math.sqrt(0.25 / 2000)
        assert found.unique().numel() > 1


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str)
def test_sampling_from_one_token_is_greedy(any_model, options) -> None:
    sources = mixed_sources(5, 6)
    greedy = generate(any_model, sources, max_new_tokens=8)
    assert torch.equal(generate(any_model, sources, max_new_tokens=8, do_sample=True, **options), greedy)
    assert not torch.equal(generate(any_model, sources, max_new_tokens=8, do_sample=True), greedy)


def test_samples_of_one_input_differ_and_are_adjacent(model) -> None:
    sources = mixed_sources(3)
    out = generate(model, sources, do_sample=True, num_return_sequences=8, max_new_tokens=6, seed=0, top_k=2)
    assert out.shape[0] == 24 and len({tuple(row) for row in out[:8].tolist()}) > 1
    for i, row in enumerate(out.tolist()):
        allowed = next_logits(model, real(sources[i // 8]), row)[:-1].topk(2).indices
        end = row.index(EOS) + 1 if EOS in row else len(row)
        assert all(row[t] in allowed[t].tolist() for t in range(end))


def test_each_copy_of_an_input_has_its_limit(model, monkeypatch) -> None:
    monkeypatch.setattr(request_builder, "EXTRA_LENGTH", 2)
    sources = [[5, 6, 7, 8, 9, 10], [5], [5, 6, 7]]
    out = generate(model, sources, do_sample=True, num_return_sequences=2, seed=4, eos_token_id=VOCAB - 1)
    limits = [8, 8, 3, 3, 5, 5]
    assert out.shape == (6, 8)
    for row, limit in zip(out.tolist(), limits, strict=True):
        assert row[limit:] == [0] * (8 - limit)
        assert VOCAB - 1 in row or 0 not in row[:limit]


def test_lists_are_padded_with_the_id_that_counts_as_padding(any_model) -> None:
    rows = [[5, 6, 0, 8], [5], [9, 10]]
    found = generate(any_model, rows, pad_token_id=2, max_new_tokens=4, num_beams=2)
    for i, row in enumerate(rows):
        alone = any_model.generate([row], pad_token_id=2, max_new_tokens=4, num_beams=2)[0].tolist()  # the method
        assert [token for token in found[i].tolist() if token != 2] == [token for token in alone if token != 2]


def test_the_result_can_enter_a_graph(model) -> None:
    out = generate(model, mixed_sources(2), max_new_tokens=4, return_dict_in_generate=True)
    assert not out.sequences.is_inference() and not out.scores.is_inference()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_new_tokens": 100_000}, "max_new_tokens"),
        ({"min_new_tokens": 129}, "min_new_tokens"),
        ({"attention_mask": torch.ones(1, 1)}, "attention_mask"),
        ({"attention_mask": torch.zeros(2, 12)}, "input"),
    ],
)
def test_prompts_without_room_and_masks_of_other_shapes(model, options, name) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        generate(model, mixed_sources(2), **options)


def test_sizes_that_do_not_fit(model, gpt) -> None:
    with pytest.raises(ValueError, match=r"\bmax_len\b.*5000"):
        generate(gpt, torch.full((1, 5000), 5))
    with pytest.raises(ValueError, match=r"\bmax_new_tokens\b.*\b8\b.*\bmax_len\b"):
        generate(gpt, torch.full((1, 120), 5), max_new_tokens=9)
    assert generate(gpt, torch.full((1, 120), 5), max_new_tokens=8, min_new_tokens=8).shape == (1, 128)
    assert generate(model, [[5, 6]], min_new_tokens=120).shape[1] == 120  # more than the default limit


@pytest.mark.parametrize(
    ("kind", "ids", "options", "message"),
    [
        ("model", [[5], [5, VOCAB]], {}, "source .*40"),
        ("model", [[5, -1]], {}, "source .*-1"),
        ("lstm", [[5, VOCAB]], {}, "source .*40"),
        ("gpt", [[5, VOCAB]], {}, "token .*40"),
        ("model", [[5]], {"decoder_input_ids": [[VOCAB]]}, "target .*40"),
        ("model", [[5] * 129], {}, "max_len .*129"),
    ],
)
def test_inputs_are_checked_against_the_model_before_an_engine_gets_them(
    kind, ids, options, message, request, monkeypatch
) -> None:
    for engine in (CppBatch, KVCacheBatch, RecurrentBatch):  # which on a GPU don't look
        monkeypatch.setattr(engine, "prefill", Mock(side_effect=AssertionError("an engine had it")))
    with pytest.raises(ValueError, match=message):
        generate(request.getfixturevalue(kind), ids, **options)


def test_sources_have_a_vocabulary_of_their_own() -> None:
    sizes = {"vocab_size": 10, "d_model": 16, "d_ff": 16, "num_heads": 2, "num_decoder_layers": 1}
    model = Transformer.from_preset("tiny", source_vocab_size=20, tie_embeddings=False, **sizes).eval()
    assert generate(model, [[19]], decoder_input_ids=[[9]], max_new_tokens=2).shape[1] <= 3
    with pytest.raises(ValueError, match="source .*20"):
        generate(model, [[20]])
    with pytest.raises(ValueError, match="target .*10"):
        generate(model, [[19]], decoder_input_ids=[[10]])


@pytest.mark.parametrize("reads", [lambda m, s: m.encode(s), lambda m, s: m(s, s)], ids=["encode", "forward"])
def test_padding_on_the_left_is_reported_and_not_misread(reads, model, lstm) -> None:
    for which in (model, lstm):
        for row in ([0, 5, 6], [5, 0, 6]):
            with pytest.raises(ValueError, match="source .*right"):
                reads(which, torch.tensor([[5, 6, 7], row]))
        reads(which, torch.tensor([[5, 6, 7], [5, 0, 0]]))
