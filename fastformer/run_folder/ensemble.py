"""Several run folders whose models decode together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from fastformer.data import Tokenizer
from fastformer.data.pair import contents
from fastformer.run_folder import load_model


def load_models(
    runs: Sequence[str | os.PathLike[str]],
    expected: tuple[str, ...] = (),
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[list[Any], Tokenizer]:
    """The models of several folders, and the tokenizer that they share; see `load_model`.

    Raises:
        ValueError: what `load_model` raises; no folders, or tokenizers that give a text other ids or ids another text.
    """
    if not runs:
        raise ValueError("expected at least one run folder, got none")
    loaded = [load_model(run, expected, device=device, dtype=dtype) for run in runs]
    tokenizer = loaded[0][1]
    expected_contents = contents(tokenizer)
    for run, (_, other) in zip(runs[1:], loaded[1:], strict=True):
        if other.vocab_size != tokenizer.vocab_size or contents(other) != expected_contents:
            what = f"one of {other.vocab_size} ids" if other.vocab_size != tokenizer.vocab_size else "another one"
            raise ValueError(
                f"expected runs of one tokenizer: {runs[0]} has one of {tokenizer.vocab_size} ids, {run} has {what}; "
                "train the second run with --tokenizer and the folder of the first"
            )
    return [model for model, _ in loaded], tokenizer
