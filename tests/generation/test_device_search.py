"""Search by tensors goes where the search on the host goes, step by step, to the last tie."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.generation.engines.device_search import DeviceSearch
from fastformer.generation.native_search import SearchRules
from fastformer.generation.search import BeamSearch, RowSearch, Search
from tests.no_sync import NoSync

GROUPS, STEPS = 5, 4
CPU = torch.device("cpu")


def candidates(dice: random.Random, vocab: int, count: int, values: list[float]) -> tuple[list[int], list[float]]:
    """The best of a row, of few different values."""
    row = [dice.choice(values) for _ in range(vocab)]
    if dice.random() < 0.05:
        row = [-math.inf] * vocab
    row = torch.tensor(row).tolist()  # of 32 bits
    ranked = sorted(range(vocab), key=lambda token: (-row[token], token))[:count]
    return ranked, [row[token] for token in ranked]


VALUES = {
    "plain": [-0.25, -0.5, -0.75, -1.5, -1.1, -3.0],
    "impossible": [-0.25, -math.inf, -1.5, -math.inf],
    "equal": [-1.0],
    # What these differ by is lost in a sum of 64 bits, so that their ids decide.
    "absorbed": [-1e-20, -2e-20, -3e-20, -0.0],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("beams", [0, 1, 3, 4])
def test_what_goes_on_is_what_goes_on_on_the_host(beams: int, values: list[float]) -> None:
    dice = random.Random(beams)
    compared = 0
    for _ in range(12):
        vocab, eos = dice.choice([6, 9, 40]), tuple(sorted(dice.sample(range(6), dice.choice([1, 1, 2, 3]))))
        rules = SearchRules(beams, eos, 0, ())
        lanes = max(1, beams)

        def search(rules: SearchRules = rules) -> Search:
            if not rules.num_beams:
                return RowSearch(99, frozenset(rules.eos))
            return BeamSearch(99, frozenset(rules.eos), rules.num_beams, alpha=1.0)

        hosts = [search() for _ in range(GROUPS)]
        count = min(hosts[0].num_candidates, vocab)
        device = DeviceSearch(rules, GROUPS + 1, count, vocab, STEPS, CPU)  # one group is nobody's
        start = dice.choice([0.0, -40.0])  # of what was said before
        for host in hosts:
            if isinstance(host, BeamSearch):
                host._groups[0].alive[0].score = start
        scores = ([start] + [-math.inf] * (lanes - 1)) * GROUPS
        device.load([3] * (GROUPS * lanes), scores, [0] * GROUPS, [0] * GROUPS)
        rows = [1] * GROUPS
        found: list[Any] = []
        for step in range(STEPS):
            each = [candidates(dice, vocab, count, values) for _ in range((GROUPS + 1) * lanes)]
            ids, given = torch.tensor([one[0] for one in each]), torch.tensor([one[1] for one in each])
            index = torch.tensor([step])
            with NoSync():
                parents = device.advance(given, ids, index)
            assert (parents is None) == (beams == 0)
            lanes_of = torch.arange(len(each)) if parents is None else parents
            assert torch.equal(lanes_of // lanes, torch.arange(len(each)) // lanes)  # inside of their groups
            found.append((ids.numpy(), given.numpy(), lanes_of.numpy(), device.tokens.numpy().copy()))
            for group, host in enumerate(hosts):
                if not rows[group]:
                    continue
                first = group * lanes
                kept = host.advance([one[0] for one in each], [one[1] for one in each], first)
                rows[group] = len(kept)
                assert lanes_of[first : first + len(kept)].tolist() == [first + parent for parent in kept]
                if kept:
                    assert device.tokens[first : first + len(kept)].tolist() == host.last_tokens()
                compared += len(kept)
        record = device.read(STEPS)
        for name, column in zip(("ids", "values", "parents", "tokens"), zip(*found, strict=True), strict=True):
            assert np.array_equal(getattr(record, name), np.stack(column)), name
        if beams:
            for group, host in enumerate(hosts):
                assert isinstance(host, BeamSearch)
                alive = [one.score for one in host._groups[0].alive]
                if rows[group]:
                    first = group * lanes
                    assert record.scores[-1, first : first + rows[group]].tolist() == alive  # to the last bit
    assert compared > 60


def test_ids_are_forbidden_as_processors_would() -> None:
    rules = SearchRules(2, (1, 4), 0, (3,))
    device = DeviceSearch(rules, 2, 6, 6, 1, CPU)
    device.load([0] * 4, [0.0] * 4, [2, 1], [2, 2])  # the second group has to say one more before it may end
    logits = torch.arange(6.0).expand(4, 6).contiguous()
    with NoSync():
        values, ids = device.candidates(logits, True)
    assert ids[0, :5].tolist() == [5, 4, 2, 1, 0] and ids[2, :3].tolist() == [5, 2, 0]
    assert values.isinf().sum(-1).tolist() == [1, 1, 3, 3]
    due = torch.tensor([5.0, 2.0, 0.0]).log_softmax(-1)
    torch.testing.assert_close(values[3, :3], due)
    values, _ = device.candidates(logits, False)
    assert values[0, :3].tolist() == [5.0, 4.0, 2.0]
    # What was said counts on.
    device.advance(values, ids, torch.tensor([0]))
    values, ids = device.candidates(logits, True)
    assert ids[2, :5].tolist() == [5, 4, 2, 1, 0]
