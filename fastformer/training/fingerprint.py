"""What examples a run trains on, in few bytes: enough to notice other data, edited lines, or another order."""

from __future__ import annotations

from fastformer.data import Examples


def fingerprint(examples: Examples) -> dict[str, int | str]:
    """The examples' number, the tokens of both sides, and a SHA-256 of all ids in order."""
    source_tokens, target_tokens = examples.lengths.sum(0).tolist()
    return {
        "examples": len(examples),
        "source_tokens": source_tokens,
        "target_tokens": target_tokens,
        "sha256": examples.fingerprint(),
    }


def describe(found: dict[str, int | str]) -> str:
    """ "20,000 examples of 180,000 and 120,000 tokens"."""
    return f"{found['examples']:,} examples of {found['source_tokens']:,} and {found['target_tokens']:,} tokens"


def check_same(expected: dict[str, int | str], found: dict[str, int | str], run: object, flags: str = "") -> None:
    """Holds the data of a run that goes on against those that it began with.

    Args:
        expected, found: fingerprints.
        run: the checkpoint, for messages.
        flags: that name the data, for messages.

    Raises:
        ValueError: other data.
    """
    if expected == found:
        return
    before, now = describe(expected), describe(found)
    if before == now:
        now = "as many of other content or in another order"
    raise ValueError(
        f"expected {f'{flags} to hold ' if flags else ''}the training data that {run} is about, {before}, got {now}: "
        "give the same files, or train anew in another folder"
    )
