"""Drafts change the number of passes, and no result: neither a token nor a draw."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.data import ByteTokenizer
from fastformer.generation import Generator, generate
from fastformer.generation.config import GenerationConfig
from fastformer.generation.drafts import Certainty, Drafter, DraftModel, PromptLookup
from fastformer.generation.engines.base import Candidates, DraftingBatch, Prompt
from fastformer.generation.engines.cpp import CppEngine
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler
from fastformer.models import GPT, Transformer
from tests.covering import by_turns
from tests.generation.small import needs_cpp, next_logits
from tests.generation.weights import CONFIGS, drawn

pytestmark = needs_cpp


LANGUAGE_MODELS = [name for name, (kind, _) in CONFIGS.items() if kind is GPT]


@cache
def configured(name: str, seed: int = 0) -> Any:
    kind, options = CONFIGS[name]
    return drawn(kind, seed, **options | {"max_len": 160})


def repeating(dice: random.Random, size: int) -> list[int]:
    """Returns ids in which some sequence occurs again and again."""
    part = [dice.randrange(3, size) for _ in range(dice.randint(1, 9))]
    return part * dice.randint(1, 3) + part[: dice.randrange(len(part))]


def last_twice(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Makes the last token likelier: what a caller's own processor sees has to be what was chosen."""
    return scores.scatter_add(1, input_ids[:, -1:], torch.full((len(scores), 1), 2.0))


class Counting:
    """A stopping criterion with a state: it ends a row at the second call in which its last token is even."""

    def __init__(self) -> None:
        self.even = 0

    def __call__(self, input_ids: Tensor, scores: object) -> bool:
        self.even += int(input_ids[0, -1]) % 2 == 0
        return self.even > 20


def some_options(dice: random.Random, size: int, *, is_alone: bool) -> dict[str, Any]:
    """Returns options of a call; those with a state are new objects."""
    ids = [dice.randrange(3, size) for _ in range(6)]
    choices: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {"no_repeat_ngram_size": dice.randint(2, 6)},
        {"suppress_tokens": ids[:3]},
        {"bad_words_ids": [ids[:2], ids[2:3]]},
        {"min_new_tokens": dice.randint(1, 40)},
        {"forced_eos_token_id": ids[0]},
        {"shortlist": [*range(3, size, 2)]},
        {"logits_processor": [last_twice]},
        {"stopping_criteria": [Counting()]} if is_alone else {},  # or its state would depend on the order of rows
        {"stop_strings": [chr(dice.randrange(40, 60)), "()"], "tokenizer": ByteTokenizer()} if size < 259 else {},
        {"eos_token_id": ids[:2]},
        {"max_time": 1000.0},
    ]
    options: dict[str, Any] = {"max_new_tokens": dice.randint(1, 50), "eos_token_id": 1}
    for one in dice.sample(choices, dice.choice([0, 0, 1, 1, 2])):
        options |= one
    kind = dice.random()
    if kind < 0.4:
        options |= {"do_sample": True, "seed": dice.randrange(10**9), "temperature": dice.choice([0.1, 0.5, 1.0])}
        options |= dice.choice([{}, {"top_k": 3}, {"top_p": 0.8}, {"num_return_sequences": 2}])
    elif kind < 0.5:
        options |= {"num_beams": 3}
    if options["min_new_tokens" if "min_new_tokens" in options else "max_new_tokens"] > options["max_new_tokens"]:
        del options["min_new_tokens"]
    return options


def equals_plain(seed: int) -> tuple[int, int]:
    """Compares a random call with and without drafts. Returns the numbers of drafted and of accepted tokens."""
    dice = random.Random(seed)
    model = configured(dice.choice([*CONFIGS]), seed % 3)
    size = min(model.config.vocab_size, getattr(model.config, "source_vocab_size", None) or 10**6)
    inputs = [repeating(dice, size) for _ in range(dice.choice([1, 1, 2, 5]))]
    options_seed = dice.random()
    options = {"precision": dice.choice(["fp32", "bf16", "int8"]), "return_dict_in_generate": True}
    if isinstance(model, GPT) and dice.random() < 0.15:
        options |= {"window": "slide", "max_new_tokens": 200}
    small = None
    if isinstance(model, GPT) and dice.random() < 0.5:  # the model itself, or another one, also drafts
        named = [name for name in LANGUAGE_MODELS if configured(name).config.vocab_size == size]
        small = dice.choice([model, configured(dice.choice(named))])
    found, counts = [], (0, 0)
    for lookup in (None, dice.randint(1, 16)):
        given = some_options(random.Random(options_seed), size, is_alone=len(inputs) == 1)
        if "window" in options:
            given |= {"num_beams": 1, "max_new_tokens": 200}
        generator = Generator(
            model, precision=options["precision"], max_bytes=2**21, draft_model=small if lookup else None
        )
        call = {**given, **options, "prompt_lookup_num_tokens": None if small and lookup and lookup % 2 else lookup}
        found.append(generator.generate(inputs, **call))
        counts = (generator.stats().drafted_tokens, generator.stats().accepted_tokens)
    # A search that runs in C++ sums the shares of a row by itself if ids are forbidden, torch if processors do that.
    exact = not {"suppress_tokens", "min_new_tokens", "forced_eos_token_id"} & {*given}
    for name in ("sequences", "scores", "token_log_probs"):
        one, other = (getattr(output, name) for output in found)
        is_alike = torch.equal if exact or name == "sequences" else torch.allclose
        assert is_alike(one, other), (seed, name, given)
    return counts


def test_a_call_with_drafts_is_the_same_call() -> None:
    counts = [equals_plain(seed) for seed in range(24)]
    drafted, accepted = map(sum, zip(*counts, strict=True))
    assert drafted > accepted > 100 and sum(one[1] > 0 for one in counts) > 6


@pytest.mark.slow
def test_2000_calls_with_drafts_are_the_same_calls() -> None:
    for seed in range(1000, 3000):
        equals_plain(seed)


@pytest.mark.parametrize("memory, small", by_turns([90, 400], [None, "sinusoidal", "gpt"]))
def test_requests_that_come_and_go_and_begin_again_are_as_if_alone(memory, small) -> None:
    """In little memory the youngest request is restarted, with what it drafts from."""
    model, dice = configured("sinusoidal"), random.Random(3)
    engine = CppEngine(model)
    kinds: list[dict[str, Any]] = [
        {"prompt_lookup_num_tokens": 5},
        {"prompt_lookup_num_tokens": 9, "do_sample": True, "temperature": 0.3, "seed": 4},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3, "seed": 5, "prompt_lookup_num_tokens": 4},
        {"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.05},
        {},
    ]
    builders = [RequestBuilder(model, GenerationConfig(max_new_tokens=40, **one), engine=engine) for one in kinds]
    inputs = [(dice.choice(builders), repeating(dice, 30)) for _ in range(14)]

    def request_of(place: int) -> Request:
        builder, row = inputs[place]
        return builder.build(builder.check(row), place=place)

    def results(request: Request) -> list[tuple[list[int], list[float]]]:
        assert request.error is None and request.is_done
        return [(one.tokens, one.log_probs) for one in request.results]

    alone = []
    for place, (builder, row) in enumerate(inputs):
        plain = RequestBuilder(
            model, GenerationConfig(**vars(builder.config) | {"prompt_lookup_num_tokens": None}), engine=engine
        )
        scheduler = Scheduler(engine, max_rows=4, max_bytes=10**6)
        request = plain.build(plain.check(row), place=place)
        scheduler.submit([request])
        while not scheduler.is_idle:
            scheduler.step()
        alone.append(results(request))
    drafts = small and DraftModel.of(configured(small), model, engine, None)
    scheduler = Scheduler(
        engine, max_rows=4, max_bytes=memory * engine.token_bytes, is_endless=True, draft_model=drafts
    )
    requests = [request_of(place) for place in range(len(inputs))]
    streams: list[list[int]] = []
    for request in requests:
        streams.append([])
        if request.search.peak_rows == 1:
            request.listen(streams[-1].append)
    arriving = iter(requests)
    while (arrived := next(arriving, None)) is not None or not scheduler.is_idle:
        if arrived is not None:
            scheduler.submit([arrived])
        scheduler.step()
    for request, stream, due in zip(requests, streams, alone, strict=True):
        assert results(request) == due
        assert not stream or stream == due[0][0]
    assert scheduler.load().accepted_tokens > 20


def draws_follow_the_model(count: int) -> None:
    """Chi-square: the joint distribution of three new tokens, the first ones drafted, against the model in fp64."""
    model, wide = (drawn(GPT, vocab_size=5, max_len=16) for _ in range(2))
    prompt, wide = [1, 2, 3, 1, 2, 3, 1, 2], wide.double()
    due = {}
    for tokens in itertools.product(range(4), repeat=3):
        logits = next_logits(wide, prompt, tokens)[:3, :4] / 1.5
        due[tokens] = logits.log_softmax(-1)[range(3), tokens].sum().exp().item()
    generator = Generator(model, max_rows=2, max_bytes=2**16)
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 3, "seed": 1}
    options |= {"eos_token_id": 4, "suppress_tokens": [4], "prompt_lookup_num_tokens": 2}
    rows = generator.generate([prompt] * count, **options)[:, len(prompt) :].tolist()
    counts = {tokens: 0 for tokens in due}
    for row in rows:
        counts[tuple(row)] += 1
    stats = generator.stats()
    assert 0.05 * count < stats.accepted_tokens < stats.drafted_tokens
    square = sum((counts[tokens] - count * p) ** 2 / (count * p) for tokens, p in due.items())
    freedom = len(due) - 1
    assert square < freedom + 4.5 * (2 * freedom) ** 0.5, square


def test_draws_follow_the_model() -> None:
    draws_follow_the_model(600)


@pytest.mark.slow
def test_20000_draws_follow_the_model() -> None:
    draws_follow_the_model(20_000)


def test_what_followed_the_longest_match_is_drafted() -> None:
    costs = [0.01] * 6
    lookup = PromptLookup(6, [7, 8, 9, 4, 5, 8, 9, 6, 1])
    assert lookup.draft([], costs) == []
    assert lookup.draft([7, 8, 9], costs)[:2] == [4, 5]  # three tokens match there, and two at the later place
    lookup = PromptLookup(6, [3, 5, 6, 5, 6])
    assert (lookup.draft([], costs) + [6] * 6)[:5] + [6] == [5, 6] * 3  # a text that repeats goes on so
    assert PromptLookup(2, [5] * 9).draft([], costs) == [5, 5]
    assert PromptLookup(6, []).draft([], costs) == []


def test_drafts_that_are_never_right_are_given_up_and_tried_again() -> None:
    lookup, drafted = PromptLookup(8, [5] * 9), []
    for _ in range(300):
        draft = lookup.draft([5], [0.1] * 8)
        drafted.append(len(draft))
        if draft:
            lookup.learn(len(draft), 0)
    assert sum(drafted[:20]) > 5 and sum(drafted[50:]) <= 3 and any(drafted[50:])
    assert sum(map(bool, drafted)) <= 10, "of 300 passes"
    for _ in range(200):
        if draft := lookup.draft([5], [0.1] * 8):
            lookup.learn(len(draft), len(draft))
    assert len(draft) == 8


def test_looks_for_drafts_become_rare_until_one_is_found() -> None:
    """A run of the engine between two looks costs nothing where nothing repeats, and the first repetition ends it."""
    model = configured("gpt")
    engine = CppEngine(model)
    builder = RequestBuilder(model, GenerationConfig(max_new_tokens=90, prompt_lookup_num_tokens=4), engine=engine)
    drafter, batch = Drafter(engine, None, 1, 200), engine.open(1, 200)

    def look(text: list[int], *, begins: bool = False) -> tuple[list[int], float]:
        request = builder.build(builder.check(text))
        if not begins:
            request.advance(Candidates([[50]], [[-1.0]]), 0)
        seconds = drafter.run_seconds([request])
        [draft] = drafter.drafts([request], batch)
        return draft, seconds

    plain = [*range(5, 30)]
    looks = [look(plain) for _ in range(8)]
    assert not any(draft for draft, _ in looks)
    assert [seconds for _, seconds in looks] == sorted(seconds for _, seconds in looks)
    longest = looks[-1][1]
    draft, _ = look([50, 6, 7, 8] * 4)
    assert draft == [6, 7, 8, 50] and look(plain)[1] < longest / 5
    for _ in range(8):
        look(plain)
    assert look(plain)[1] == longest
    assert look(plain, begins=True)[1] < longest / 5, "the next request doesn't wait for the pauses of the one before"


@pytest.mark.parametrize("more", [{}, {"do_sample": True, "seed": 1}], ids=["in C++", "in Python"])
def test_new_tokens_are_told_from_any_place_on(more) -> None:
    model = configured("gpt")
    builder = RequestBuilder(model, GenerationConfig(max_new_tokens=9, **more), engine=CppEngine(model))
    request = builder.build(builder.check([5, 6]))
    assert request.tokens_after(0) == []
    for token in (7, 8, 9, 10):
        request.advance(Candidates([[token]], [[-1.0]]), 0)
    assert [request.tokens_after(count) for count in range(5)] == [[7, 8, 9, 10], [8, 9, 10], [9, 10], [10], []]


def test_a_lookup_of_no_tokens_is_refused(gpt) -> None:
    for value in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
            generate(gpt, [[5, 6]], prompt_lookup_num_tokens=value)


@pytest.mark.parametrize("window", ["stop", "slide"])
def test_a_draft_ends_where_the_models_positions_do(window) -> None:
    model, prompt = drawn(GPT, max_len=24), [5, 6, 7] * 4
    options: dict[str, Any] = {"max_new_tokens": 12 if window == "stop" else 50, "window": window}
    options |= {"logits_processor": lambda ids, scores: scores.index_fill(1, ids[0, -3:][:1], 1e4)}  # 5, 6, 7, 5 ...
    generator = Generator(model, max_bytes=2**20)
    found = generator.generate([prompt], **options, prompt_lookup_num_tokens=9)
    assert torch.equal(found, generator.generate([prompt], **options))
    assert generator.stats().accepted_tokens > 6


@pytest.mark.parametrize("source_vocab_size", [None, 70])
def test_a_source_is_drafted_from_if_it_has_the_vocabulary_of_the_text(source_vocab_size) -> None:
    model, source = drawn(Transformer, source_vocab_size=source_vocab_size, tie_embeddings=False), [*range(5, 35)]

    def copied(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor(source[ids.shape[1] - 1]), 1e4)

    options: dict[str, Any] = {"max_new_tokens": len(source), "logits_processor": copied}
    generator = Generator(model, max_bytes=2**20)
    found = generator.generate([source], **options, prompt_lookup_num_tokens=9)
    assert found[0, -len(source) :].tolist() == source
    accepted = generator.stats().accepted_tokens
    assert accepted > 10 if source_vocab_size is None else accepted == 0


def test_a_model_that_cannot_draft_is_refused(gpt, model) -> None:
    other = drawn(GPT, vocab_size=41)
    for decoding, small, options, why in [
        (gpt, other, {}, "vocabulary"), (gpt, model, {}, "language models"), (model, gpt, {}, "language models"),
        (gpt, object(), {}, "got object"), (gpt, gpt, {"engine": "kv_cache"}, "engine 'cpp'"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=why):
            Generator(decoding, draft_model=small, **options)


def test_a_good_draft_model_saves_passes() -> None:
    """The larger model has layers that change nothing, so that every draft of the smaller one is right."""
    options, prompt = CONFIGS["llama"][1] | {"max_len": 160}, [5, 9, 20]
    model, small = drawn(GPT, **options | {"num_layers": 8}), drawn(GPT, **options | {"num_layers": 1})
    for layer in model.decoder.layers[1:]:
        for name, parameter in layer.named_parameters():
            parameter.data *= "out_proj" not in name and "linear2" not in name
    small.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in small.state_dict()})
    generator = Generator(model, draft_model=small, max_bytes=2**20)
    call: dict[str, Any] = {"max_new_tokens": 100, "eos_token_id": 1, "suppress_tokens": [1]}
    found = generator.generate([prompt], **call)
    assert torch.equal(found, Generator(model, max_bytes=2**20).generate([prompt], **call))
    stats = generator.stats()
    assert stats.drafted_tokens >= stats.accepted_tokens > 60


def test_a_draft_goes_on_while_it_is_probably_right() -> None:
    model, prompts = configured("llama"), [[5, 9, 20], [7, 8], [11, 12, 13]]
    rows = [generate(model, [prompt], max_new_tokens=6)[0].tolist()[len(prompt) :] for prompt in prompts]
    batch = CppEngine(model).open(3, 400)
    assert isinstance(batch, DraftingBatch)
    batch.prefill([Prompt(None, prompt) for prompt in prompts])
    lasts = [prompt[-1] for prompt in prompts]
    sure, unsure = [-1.0] * 8, [-5.0] * 8  # logarithms
    [first, none, third] = batch.draft([lasts[0], lasts[2]], [1, 0, 1], sure, [[-2.5] * 5, [], [-9.0] * 3])
    assert first[0] == rows[0][:3], "the third token makes it improbable"
    assert none == ([], []) and third[0] == rows[2][:3], "as many as it has limits"
    # The last tokens of drafts were not appended: they are the next ones to read.
    drafts = batch.draft([first[0][-1], lasts[1], third[0][-1]], [1, 1, 1], unsure, [[-4.0] * 5] * 3)
    assert [draft for draft, _ in drafts] == [rows[0][3:4], rows[1][:1], rows[2][3:4]]
    with pytest.raises(ValueError, match="limit"):
        batch.draft([5], [1, 0, 0], sure, [[], [], []])
    for counts in ([1, 1, 0], [0, 0, 0]):
        with pytest.raises(ValueError, match="tokens for each row"):
            batch.draft([], counts, sure, [[-9.0] * 3] * 3)


def test_what_a_model_is_sure_of_is_drafted_only_while_it_is_right() -> None:
    certainty = Certainty()
    first = certainty.chances()
    for _ in range(30):
        certainty.learn([7, 0], 1)  # the surest tokens are right, and the others wrong
    chances = certainty.chances()
    assert chances[7] > math.log(0.9) > math.log(0.1) > chances[0] and chances[3] == first[3]
    for _ in range(1500):
        certainty.learn([7], 1)
    assert certainty.chances()[0] == pytest.approx(first[0], abs=0.01), "they are tried again one day"


def test_engines_that_read_no_drafts_decode_without(gpt) -> None:
    options: dict[str, Any] = {"max_new_tokens": 9, "engine": "kv_cache"}
    found = generate(gpt, [[5, 6, 5, 6]], prompt_lookup_num_tokens=3, **options)
    assert torch.equal(found, generate(gpt, [[5, 6, 5, 6]], **options))


def test_a_draft_is_held_to_the_constraint_token_by_token() -> None:
    pytest.importorskip("llguidance", reason="the llguidance library is not installed")
    model = drawn(GPT, vocab_size=300, max_len=160)
    generator = Generator(model, max_rows=2, max_bytes=2**21)
    prompts = [ByteTokenizer().encode(text)[:-1] for text in ("ab ab ab ab ", "12, 12, 12, ", "cab cab cab")]
    for more in ({}, {"do_sample": True, "seed": 2}, {"repetition_penalty": 1.2}):
        options: dict[str, Any] = {"regex": r"([a-c]{1,3} ){5,30}", "tokenizer": ByteTokenizer(), "max_new_tokens": 60}
        found = generator.generate(prompts, **options, **more, prompt_lookup_num_tokens=6)
        assert torch.equal(found, generator.generate(prompts, **options, **more))
    assert generator.stats().accepted_tokens > 20
