"""Batching texts of several callers is bit-identical to encoding them alone; budgets, cancellation and errors."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from fastformer import CrossEncoder, Encoder
from fastformer.encoding.requests import EncodeRequest, embed_request, score_request
from fastformer.encoding.scheduler import EncodingScheduler
from tests.encoding.folders import D_MODEL, MANY, TEXTS, bert, dense, modules, write

pytest.importorskip("transformers", reason="the folders are written by transformers")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Encoder:
    folder = tmp_path_factory.mktemp("encoder")
    bert(folder)
    pooling = {"pooling_mode": ["mean", "cls"], "embedding_dimension": D_MODEL, "include_prompt": False}
    dense(modules(folder, ("Pooling", pooling), ("Dense", {}), ("Normalize", {}))[1], 2 * D_MODEL, 20)
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "query : "}})
    return Encoder(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> CrossEncoder:
    folder = tmp_path_factory.mktemp("classifier")
    bert(folder, num_labels=3)
    return CrossEncoder(folder)


def run(scheduler: EncodingScheduler, requests: list[EncodeRequest]) -> int:
    """Runs requests to their end, and returns the number of steps."""
    scheduler.submit(requests)
    steps, ended = 0, []
    while not scheduler.is_idle:
        ended += scheduler.step()
        steps += 1
    assert {id(request) for request in ended} == {id(request) for request in requests} and len(ended) == len(requests)
    return steps


@pytest.mark.parametrize("step_tokens", [1, 40, 4096])
def test_each_caller_gets_the_bits_of_the_library(step_tokens, encoder, classifier) -> None:
    option_sets: list[dict[str, Any]] = [{}, {"prompt_name": "query"}, {"normalize": False}, {"truncate_dim": 7}, {}]
    groups = [MANY[start : start + 9] for start in range(0, 45, 9)]
    requests = [embed_request(encoder, texts, **options) for texts, options in zip(groups, option_sets, strict=True)]
    pairs = [[first, second] for first, second in zip(MANY[:7], MANY[7:], strict=False)] + [["a bird"]]
    requests += [score_request(classifier, pairs), score_request(classifier, pairs[:2], apply_softmax=True)]
    random.Random(step_tokens).shuffle(order := list(range(len(requests))))
    run(EncodingScheduler(step_tokens), [requests[place] for place in order])
    for request, texts, options in zip(requests, groups, option_sets, strict=False):
        np.testing.assert_array_equal(request.results, encoder.encode(texts, **options))
    np.testing.assert_array_equal(requests[5].results, classifier.predict(pairs))
    np.testing.assert_array_equal(requests[6].results, classifier.predict(pairs[:2], apply_softmax=True))


def test_waiting_texts_share_a_step_within_its_budget(encoder) -> None:
    requests = [embed_request(encoder, [text]) for text in MANY[:20]]
    assert run(EncodingScheduler(10_000), requests) == 1
    total = sum(request.num_tokens for request in requests)
    repeated = [embed_request(encoder, [text]) for text in MANY[:20]]
    scheduler = EncodingScheduler(total // 4)
    assert 4 <= run(scheduler, repeated) <= 7 and scheduler.load().read_tokens == total


def test_cancelled_and_late_requests_are_skipped(encoder) -> None:
    scheduler = EncodingScheduler(1)
    long, other = embed_request(encoder, MANY[:9]), embed_request(encoder, TEXTS[:2])
    late = embed_request(encoder, TEXTS[:2], max_time=1e-6)
    time.sleep(0.001)
    scheduler.submit([long, other, late])
    assert scheduler.step() == [late] and late.results is None and scheduler.load().running == 1
    long.cancel()
    assert long in scheduler.step() and long.results is None
    while not scheduler.is_idle:
        scheduler.step()
    np.testing.assert_array_equal(other.results, encoder.encode(TEXTS[:2]))
    load = scheduler.load()
    assert load.running == load.waiting == load.waiting_tokens == 0


def test_an_error_in_one_callers_layers_affects_only_this_caller(classifier) -> None:
    def broken(logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    bad, good = score_request(classifier, [["a"]], activation_fn=broken), score_request(classifier, [["a"]])
    run(EncodingScheduler(), [bad, good])
    assert isinstance(bad.error, ValueError) and good.error is None
    np.testing.assert_array_equal(good.results, classifier.predict([["a"]]))


def test_long_texts_are_an_error_unless_they_may_be_cut(encoder, classifier) -> None:
    long = "a bird sings " * 20
    with pytest.raises(ValueError, match=r"\b24\b"):
        embed_request(encoder, ["a", long], cuts=False)
    with pytest.raises(ValueError, match=r"\b24\b"):
        score_request(classifier, [["a", long]], cuts=False)
    request = embed_request(encoder, [long])
    run(EncodingScheduler(), [request])
    np.testing.assert_array_equal(request.results, encoder.encode([long]))
    with pytest.raises(ValueError):
        request.listen(print)
