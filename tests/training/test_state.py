"""Every change of the examples is noticed and named; a state keeps its values."""

from __future__ import annotations

import pytest
import torch

from fastformer.data import Example, Examples
from fastformer.training.state import check_same, fingerprint, split

EXAMPLES = [Example([5, 6, 1], [7, 1]), Example([8, 1], [9, 9, 1]), Example([], [3, 4])]


@pytest.mark.parametrize(
    "other",
    [
        [EXAMPLES[1], EXAMPLES[0], EXAMPLES[2]],  # another order
        [Example([5, 6, 1], [7, 2]), *EXAMPLES[1:]],  # an edited line
        [Example([5, 6], [1, 7, 1]), *EXAMPLES[1:]],
        [Example([5], [7, 1]), Example([6, 1, 8, 1], [9, 9, 1]), EXAMPLES[2]],  # the same ids, cut elsewhere
        EXAMPLES[:2],
    ],
)
def test_a_change_is_noticed(other) -> None:
    with pytest.raises(ValueError, match=r"\brun\b.*\b3 examples\b.*\b5\b.*\b6\b"):
        check_same(fingerprint(Examples(EXAMPLES)), fingerprint(Examples(other)), "run")


def test_the_same_examples_are_the_same() -> None:
    whole = fingerprint(Examples(EXAMPLES))
    check_same(whole, fingerprint(Examples([Example(list(e.source), list(e.target)) for e in EXAMPLES])), "run")
    assert (whole["examples"], whole["source_tokens"], whole["target_tokens"]) == (3, 5, 6)


def test_a_state_that_is_written_later_belongs_to_its_update() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def update() -> None:
        model(torch.ones(2)).sum().backward()
        optimizer.step()

    update()
    losses = [[1, 2.0]]
    rest = split({"optimizer": optimizer.state_dict(), "losses": losses})[1]
    update()
    losses[0][1] = 3.0
    assert {int(kept["step"]) for kept in rest["optimizer"]["state"].values()} == {1}
    assert rest["losses"] == [[1, 2.0]]
