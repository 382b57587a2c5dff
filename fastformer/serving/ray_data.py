"""Translates a corpus on many machines with Ray Data. Needs the extra `ray`.

    translate_corpus("s3://bucket/source", "s3://bucket/translated", "/models/opus-mt", num_cpus=8, max_actors=64)

Actors hold the model and process blocks of rows. If a machine dies, the other machines repeat the blocks that it was
processing. With a checkpoint, an interrupted run resumes where it stopped, by the ids of its rows.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import ray
import torch
from ray.data import ActorPoolStrategy, DataContext, Dataset

from fastformer.generation import Translator

Batch = dict[str, Any]


class TranslateRows:
    """An actor: it loads the model once, and adds a column of translations to each batch of rows.

    Args:
        folder: the model's folder.
        text_column, translation_column: the names of the columns.
        precision: see `Translator.from_pretrained`.
        options: options of `Translator.translate`.
    """

    def __init__(
        self, folder: str, text_column: str, translation_column: str, precision: Any, options: dict[str, Any]
    ) -> None:
        context: Any = ray.get_runtime_context()
        cpus = context.get_assigned_resources().get("CPU", 1)
        torch.set_num_threads(max(1, int(cpus)))  # otherwise each actor would use all cores
        self.translator = Translator.from_pretrained(folder, precision=precision)
        self.text_column, self.translation_column, self.options = text_column, translation_column, options

    def __call__(self, batch: Batch) -> Batch:
        """Returns a batch with its translations; rows of similar length decode together."""
        texts = [str(text) for text in batch[self.text_column]]
        translations = self.translator.translate(texts, **self.options)
        return {**batch, self.translation_column: np.array(translations, dtype=object)}


def translate_corpus(
    source: str,
    target: str,
    folder: str,
    *,
    id_column: str = "id",
    text_column: str = "text",
    translation_column: str = "translation",
    checkpoint: str | None = None,
    num_cpus: float = 1,
    max_actors: int = 1,
    batch_size: int = 1024,
    precision: str | None = None,
    actor: type[TranslateRows] = TranslateRows,
    **options: Any,
) -> int:
    """Translates Parquet files to Parquet files, and counts the translated rows.

    Args:
        source: a file, or a folder of files, with a text and an id in each row. No two rows have the same id.
        target: an output folder for this corpus alone.
        folder: the model's folder, which has to exist on every machine.
        id_column, text_column, translation_column: names of columns.
        checkpoint: a folder that all machines see. It stores the ids of the written rows, and a later run with the same
            folders skips those rows. Ray empties it at the end. None: an interrupted run begins anew.
        num_cpus: the CPUs of an actor, and the number of its threads.
        max_actors: the most actors; Ray starts them if there is work and room for them.
        batch_size: rows that are translated in one call; a large one keeps the batch full.
        precision: see `Translator.from_pretrained`.
        actor: `TranslateRows`, or a class that is derived from it.
        options: options of `Translator.translate`, such as num_beams, source_lang, split and on_error.

    Returns:
        The number of rows, each of which is in the target once.

    Raises:
        ValueError: options has max_time, which would cut translations short without an error.
        RuntimeError: the target's ids differ from the source's.
    """
    if "max_time" in options:
        raise ValueError("expected no max_time: it ends translations early, and no row would show it")
    context = DataContext.get_current()
    before = context.checkpoint_config
    if checkpoint is not None:
        from ray.data.checkpoint import CheckpointConfig

        context.checkpoint_config = CheckpointConfig(id_column=id_column, checkpoint_path=os.fspath(checkpoint))
    try:
        rows = ray.data.read_parquet(source).map_batches(
            actor,
            fn_constructor_args=(folder, text_column, translation_column, precision, options),
            batch_size=batch_size,
            num_cpus=num_cpus,
            compute=ActorPoolStrategy(min_size=1, max_size=max_actors),
        )
        rows.write_parquet(target)
    finally:
        context.checkpoint_config = before
    expected, written = (
        _count(ray.data.read_parquet(path, columns=[id_column]), id_column) for path in (source, target)
    )
    if expected != written:
        raise RuntimeError(
            f"expected each of {expected[0]:,} rows of {source} once in {target}, got {written[0]:,} rows"
            + ("" if expected[0] != written[0] else " with other ids")
        )
    return expected[0]


def _count(rows: Dataset, id_column: str) -> tuple[int, int]:
    """Returns the number of rows and the sum of their ids' hashes, which shows a lost row beside a doubled one."""

    def part(batch: Batch) -> Batch:
        digests = (hashlib.blake2b(str(each).encode(), digest_size=8).digest() for each in batch[id_column])
        total = sum(int.from_bytes(digest, "big") for digest in digests) % 2**64
        return {"rows": np.array([len(batch[id_column])]), "hashes": np.array([total], dtype=np.uint64)}

    parts = rows.map_batches(part, batch_size=65_536).take_all()
    return sum(int(each["rows"]) for each in parts), sum(int(each["hashes"]) for each in parts) % 2**64
