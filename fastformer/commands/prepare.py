"""`fastformer prepare`."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from jsonargparse import ArgumentParser

from fastformer.data.filters import Filters
from fastformer.settings import Count, Positive, Range
from fastformer.training.config import TrainConfig
from fastformer.training.interrupts import Interrupts
from fastformer.training.prepare import BPE_CHARACTERS, summary
from fastformer.training.prepare import prepare as make
from fastformer.training.sections import SEVERAL, Data, Machine, Tokens

logger = logging.getLogger("fastformer")

# The settings of a training that affect the shards.
_SKIPPED = {"task", "train_data", "shards_at_once", "held_out"}
_OF_MACHINE = {"seed"}
TEXTS = ("user_tokens",)
LISTED = frozenset(SEVERAL - {"tokenizer"})
USAGE = "fastformer prepare --out DIR [--SETTING VALUE ...]"
Processes = Annotated[int, Range(0, 256)]


def prepare(
    *,
    out: str,
    shards: Count = 0,
    processes: Processes = 0,
    bpe_characters: Positive = BPE_CHARACTERS,
    **settings: Any,
) -> None:
    """Tokenizes text that doesn't fit in memory into shards on disk, to train on.

    `fastformer train RUN --train_data DIR` reads them. The same command resumes an interrupted one.

    Args:
        out: the folder to write
        shards: the number of shards, each a fair sample of all sources; 0: shards of about 16 MiB
        processes: the number of parallel processes; 0: one for each core
        bpe_characters: the most characters that a BPE learns from; more text is sampled at random
        settings: the given flags, as `TrainConfig.from_dict` reads them
    """
    kind = {"model": "gpt"} if settings.get("train_text") else {}
    config = TrainConfig.from_dict({**settings, **kind})
    with Interrupts():
        prepared = make(config, out, shards=shards, processes=processes, bpe_characters=bpe_characters)
    print(summary(prepared))


def add_settings(parser: ArgumentParser) -> dict[str, Any]:
    """Adds a flag to a parser for each setting that affects the shards. Returns their types by the flags' names."""
    hints: dict[str, Any] = {}
    skipped = {Data: _SKIPPED, Machine: {f.name for f in fields(Machine)} - _OF_MACHINE}
    for section in (Data, Filters, Tokens, Machine):
        skip = skipped.get(section, set())
        parser.add_class_arguments(section, skip=skip)
        hints |= {k: v for k, v in get_type_hints(section, include_extras=True).items() if k not in skip}
    return hints
