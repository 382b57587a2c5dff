"""Filters of training pairs drop the pairs that they describe, and count them by reason."""

from __future__ import annotations

from fastformer.data.filters import PairFilter

PAIRS = [("one", "eins"), ("one ", "one"), ("one", "eins"), ("a", "x" * 9), ("  a  ", "b"), ("x" * 20, "y" * 20)]


def test_each_filter_alone() -> None:
    for options, left_out in (
        ({"max_length_ratio": 8.9}, {3: "of a length ratio above 8.9"}),
        ({"max_length_ratio": 9.0}, {}),
        ({"min_chars": 2}, {3: "of fewer than 2 characters", 4: "of fewer than 2 characters"}),
        ({"min_chars": 1}, {}),
        ({"min_chars": 3}, {3: "of fewer than 3 characters", 4: "of fewer than 3 characters"}),  # "one" has three
        ({"max_chars": 19}, {5: "of more than 19 characters"}),
        ({"max_chars": 20}, {}),
        ({"drop_duplicates": True}, {2: "duplicate"}),
        ({"drop_identical": True}, {1: "with identical sides"}),
    ):
        kept, reasons = PairFilter(**options).apply([PAIRS])
        assert kept == [[pair for place, pair in enumerate(PAIRS) if place not in left_out]], options
        assert sorted(reasons.elements()) == sorted(left_out.values())


def test_filters_together_count_a_pair_once() -> None:
    every = PairFilter(max_length_ratio=3, min_chars=2, max_chars=10, drop_duplicates=True, drop_identical=True)
    kept, reasons = every.apply([PAIRS[:2], PAIRS[2:], [("one", "eins"), ("two", "zwei")]])
    assert kept == [[("one", "eins")], [], [("two", "zwei")]]  # of a pair in two corpora the first stays
    assert reasons.total() == sum(map(len, (PAIRS[:2], PAIRS[2:], [1, 2]))) - 2 and reasons["duplicate"] == 2
    assert every and not PairFilter()
