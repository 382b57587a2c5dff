"""Turns text files into a folder of shards, for `fastformer prepare`.

The work has three stages, each of which can resume: blocks of text become blocks of examples, the hashes of the
examples decide which ones are omitted, and each shard gathers its share of every block. The files of a stage stay in
`.work` until the index is written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy

from fastformer import console
from fastformer.checkpoints.lock import LOCK, RunLock
from fastformer.data import Examples, Tokenizer, load_tokenizer
from fastformer.data.bpe import LEARNING
from fastformer.data.cuts import pieces as pieces_of
from fastformer.data.files import STDIN, is_there
from fastformer.data.filters import Filters
from fastformer.data.pair import sides
from fastformer.data.shards.arrow_file import arrow, lists, write_table
from fastformer.data.shards.deal import Piles, write_rows, write_shard
from fastformer.data.shards.encode import TOO_LONG, Recipe, open_block
from fastformer.data.shards.left_out import LeftOut, find_left_out
from fastformer.data.shards.manifest import INDEX, Manifest, Shard, ShardSource, Stored, tokenizer_digest
from fastformer.data.shards.pool import Pool, encode_task, usable_cores
from fastformer.data.shards.reading import read_examples
from fastformer.data.streams import PairBlock, TextBlock, stream_documents, stream_pairs, stream_tsv
from fastformer.data.tables import file_of
from fastformer.data.text import documents_in
from fastformer.data.tokenizer import TOKENIZER, cuts_of
from fastformer.files import read_json, remove_left_overs, write_atomically
from fastformer.training.config import TrainConfig, paths_of
from fastformer.training.examples import (
    Pairs,
    characters_of,
    make_tokenizer,
    read_validation,
    tokenizer_of,
    validation_data,
    warn_of_line_ends,
    warn_of_unknown,
)
from fastformer.training.sections import Tokens

logger = logging.getLogger("fastformer")

_Text: TypeAlias = str | tuple[str, str]
_Drawn: TypeAlias = tuple[float, int, _Text]  # a random number, the size, the text or pair

Item = TypeVar("Item")
WORK = ".work"
SHARD_BYTES = 1 << 24  # the approximate size of a shard; a window of a few shards fits in any memory
BPE_CHARACTERS = 50_000_000
VALIDATION, VALIDATION_TEXTS = "validation.arrow", "validation.jsonl"
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".parquet", ".pq")
_PACKED_BY = 4  # the approximate compression ratio of text
_WORK_VERSION = 2  # of the blocks' files, whose hashes and counts a preparation continues with
_LEAST_SHARDS = 8  # the assumed size of a pipe


@dataclass(frozen=True)
class _Origin:
    """A source of text: the paths to open, and its name."""

    name: str
    paths: tuple[str, ...]
    weight: float

    def blocks(self, kind: str, cuts: re.Pattern[str] | None) -> Iterator[PairBlock | TextBlock]:
        if kind == "text":
            return stream_documents(self.paths[0], cuts)
        return stream_pairs(*self.paths) if len(self.paths) == 2 else stream_tsv(self.paths[0])

    def files(self) -> list[str]:
        """Lists the files, with a folder's documents one by one."""
        files: list[str] = []
        for path in map(file_of, self.paths):
            files += map(str, documents_in(path)[0]) if os.path.isdir(path) else [path]
        return files

    def check_there(self) -> None:
        """Raises a ValueError if a file doesn't exist."""
        for path in map(file_of, self.paths):
            if not (is_there(path) or os.path.isdir(path)):
                raise ValueError(f"expected a text file, but there is no file {path}")

    def tell(self) -> None:
        """Logs what is in a folder and is not read."""
        if os.path.isdir(self.paths[0]) and (left_out := documents_in(self.paths[0])[1]):
            logger.info("%s: left out %s", self.name, _told([left_out]))

    def size(self) -> int | None:
        """Returns the bytes of the files together; None: one of them is a pipe."""
        files = self.files()
        return sum(map(os.path.getsize, files)) if all(map(os.path.isfile, files)) else None


def prepare(
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    shards: int = 0,
    processes: int = 0,
    bpe_characters: int = BPE_CHARACTERS,
) -> Manifest:
    """Makes a folder of shards, or resumes one that was interrupted.

    Args:
        config: the settings: sources with their weights, filters, tokenizer, lengths, seed.
        out: the folder; it is new, or an interrupted call with the same arguments left it.
        shards: the number of shards; 0: shards of about SHARD_BYTES each.
        processes: the number of parallel processes; 0: one for each core.
        bpe_characters: the most characters that a BPE learns from; from a longer text they are sampled at random.

    Returns:
        A description of the folder's contents.

    Raises:
        ValueError: no sources, broken text, a folder with other contents, or with settings or files that differ from
            those of the interrupted call.
        ImportError: pyarrow, or a package that reads a source, is not installed.
    """
    arrow()
    kind, origins = _origins(config)
    validation = _validation_origin(config)
    folder, work = Path(out), Path(out) / WORK
    settings = _settings(config, kind, shards or _number_of_shards(origins), bpe_characters)
    if (folder / INDEX).is_file():
        existing = Manifest.load(folder)
        shutil.rmtree(work, ignore_errors=True)
        _check_complete(existing, folder, settings, origins, validation)
        logger.info("nothing is left to do: %s is complete", folder)
        return existing
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not work.is_dir())):
        raise ValueError(f"expected a new or an empty folder, but there are files in {folder}")
    for origin in (*origins, *([validation] if validation else [])):
        origin.check_there()
    work.mkdir(parents=True, exist_ok=True)
    lock = RunLock(work)
    lock.acquire()
    try:
        _check_same(work, settings, origins)
        for place in (folder, work):  # of an interrupted call
            remove_left_overs(place, ["*"])
        with Pool(processes or usable_cores()) as pool:
            manifest = _Preparation(config, kind, origins, folder, settings, pool).run()
    finally:
        lock.release()
    (work / LOCK).unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


class _Preparation:
    """The stages, from top to bottom."""

    def __init__(
        self,
        config: TrainConfig,
        kind: str,
        origins: Sequence[_Origin],
        folder: Path,
        settings: dict[str, Any],
        pool: Pool,
    ) -> None:
        self.config, self.origins, self.folder, self.settings = config, origins, folder, settings
        self.work, self.pool = folder / WORK, pool
        self.sizes = [origin.size() for origin in origins]
        self.validation = _validation_origin(config)
        self.validation_size = None if self.validation is None else self.validation.size()
        self.recipe = Recipe(
            "text" if kind == "text" else "pairs",
            settings["shards"],
            config.seed,
            config.pair_filter(),
            config.skip_bad_lines,
            config.max_len,
            config.seqlen,
            hold_out=self.validation is None,
        )

    def run(self) -> Manifest:
        for origin in self.origins:
            origin.tell()
        texts = read_validation(self.config)  # first, because what is wrong with them shouldn't show after hours
        tokenizer = self._tokenizer()
        given = validation_data(self.config, tokenizer, *texts) if self.validation else None
        paths, sources = self._encode(cuts_of(tokenizer))
        self._warn(paths, sources)
        left_out = find_left_out(paths, self.recipe)
        mask = self.work / "left_out.bin"
        write_atomically(mask, left_out.mask.tobytes())
        piles = Piles(paths, sources, left_out.starts, mask, self.config.seed)
        tasks = [(piles, number, self.folder) for number in range(self.recipe.shards)]
        shards = list(_bar(self.pool.run(write_shard, tasks), "writing shards", "shard", len(tasks)))
        if not sum(shard.examples for shard in shards):
            raise ValueError(f"nothing is left of the text: {_told(self._counts(paths, sources, left_out)[1])}")
        validation, validation_texts, characters = self._validation(tokenizer, piles, left_out, given)
        tokenizer.save(self.folder)
        manifest = Manifest(
            self.recipe.kind, tokenizer_digest(tokenizer), self.settings,
            self._sources(paths, sources, left_out, shards), shards, validation, validation_texts, characters,
            self.validation_size,
        )  # fmt: skip
        manifest.save(self.folder)
        return manifest

    def _tokenizer(self) -> Tokenizer:
        """Makes the tokenizer, trained on a sample of all sources if the settings ask for it."""
        if (self.work / TOKENIZER).is_file():
            return load_tokenizer(self.work)
        make: Callable[..., Tokenizer] = make_tokenizer if self.recipe.kind == "text" else tokenizer_of
        tokenizer = make(self.config, self._sample() if self.config.tokenizer == "bpe" else [])
        if self.recipe.kind == "text":
            warn_of_line_ends(tokenizer)
        else:
            sides(tokenizer)
        tokenizer.save(self.work)
        return load_tokenizer(self.work)

    def _sample(self) -> list[_Text]:
        """Samples the texts for a BPE: all of them, or, if they are too many, each with the same probability."""
        if any(not os.path.isfile(file) for origin in self.origins for file in origin.files()):
            raise ValueError("expected files to learn a BPE from, which are read twice, got a pipe: give --tokenizer")
        sample: list[_Drawn] = []
        most, size, limit = self.settings["bpe_characters"], 0, 1.0
        for number, origin in enumerate(self.origins):
            for place, block in enumerate(
                _bar(origin.blocks(self.recipe.kind, LEARNING), f"reading {origin.name} for the BPE", "block")
            ):
                texts = self._texts(block)
                drawn = numpy.random.default_rng([self.config.seed, 3, number, place]).random(len(texts))
                for value, text in zip(drawn.tolist(), texts, strict=True):
                    if value < limit:
                        sample.append((value, len(text) if isinstance(text, str) else sum(map(len, text)), text))
                        size += sample[-1][1]
                if size > 2 * most:
                    sample, size, limit = _thinned(sample, most)
        return [text for _, _, text in _thinned(sample, most)[0]]

    def _texts(self, block: PairBlock | TextBlock) -> Sequence[_Text]:
        if isinstance(block, TextBlock):
            return [
                piece
                for text, _ in block.documents(skip_bad=self.recipe.skip_bad)[0]
                for piece in pieces_of(text, LEARNING)
            ]
        pairs = block.pairs(skip_bad=self.recipe.skip_bad)[0]
        filters = self.recipe.filters
        return [pair for pair in pairs if filters.why_not(pair) is None] if filters else pairs

    def _encode(self, cuts: re.Pattern[str] | None) -> tuple[list[Path], list[int]]:
        """Encodes all sources to blocks; returns the blocks and the number of each block's source."""
        paths, sources = [], []
        done = 0

        def tasks() -> Iterator[tuple[object, ...]]:
            nonlocal done
            for number, origin in enumerate(self.origins):
                for place, block in enumerate(origin.blocks(self.recipe.kind, cuts)):
                    path = self.work / f"block-{number:04}-{place:07}.arrow"
                    paths.append(path)
                    sources.append(number)
                    if path.is_file():
                        done += 1
                        continue
                    yield block, self.recipe, self.work, path, [number, place]

        for _ in _bar(self.pool.run(encode_task, tasks()), "tokenizing", "block"):
            pass
        if done:
            logger.info("%s of %s blocks were there already", f"{done:,}", f"{len(paths):,}")
        return paths, sources

    def _warn(self, paths: Sequence[Path], sources: Sequence[int]) -> None:
        """Logs what a training would warn of: bad lines, long examples, characters that the tokenizer lacks."""
        bad = [Counter[str]() for _ in self.origins]
        long, unknown, characters = Counter[str](), Counter[str](), 0
        for path, source in zip(paths, sources, strict=True):
            block = open_block(path)[1]
            bad[source].update(block.bad)
            long.update({reason: count for reason, count in block.left_out.items() if reason.startswith(TOO_LONG)})
            unknown.update(block.unknown)
            characters += block.characters
        for number, origin in enumerate(self.origins):
            if bad[number]:
                skipped = f"{bad[number].total():,}"
                logger.warning("skipped %s lines of %s: %s", skipped, origin.name, _told([bad[number]]))
        for reason, count in long.items():
            logger.warning("left out %s training examples %s", f"{count:,}", reason)
        warn_of_unknown(unknown, characters, "training")

    def _validation(
        self, tokenizer: Tokenizer, piles: Piles, left_out: LeftOut, given: tuple[Examples, Pairs, int] | None
    ) -> tuple[Stored, Stored | None, int]:
        """Writes the validation examples, those of `validation_data` or the held-out ones, and their texts."""
        path, characters = self.folder / VALIDATION, 0
        if given is not None:
            examples, texts, characters = given
            write_table(path, _table(examples))
        else:
            write_rows(piles, [row for _, row in left_out.validation], path)
            texts = [(source, target) for pair, _ in left_out.validation if pair for source, target in [pair]]
            if self.recipe.kind == "text":
                characters = characters_of(read_examples(path), tokenizer)
        if self.recipe.kind == "text":
            return Stored.of(path), None, characters
        lines = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in texts)
        write_atomically(self.folder / VALIDATION_TEXTS, lines.encode("utf-8", "surrogatepass"))
        return Stored.of(path), Stored.of(self.folder / VALIDATION_TEXTS), 0

    def _counts(
        self, paths: Sequence[Path], sources: Sequence[int], left_out: LeftOut
    ) -> tuple[Counter[int], list[Counter[str]], Counter[int]]:
        """Counts for each source the examples that were read, omitted by reason, and held out."""
        read, held_out = Counter[int](), Counter[int]()
        reasons = [Counter[str]() for _ in self.origins]
        for path, source, again, held in zip(paths, sources, left_out.duplicates, left_out.held_out, strict=True):
            block = open_block(path)[1]
            read[source] += block.read
            held_out[source] += held
            reasons[source].update(block.left_out)
            reasons[source].update({"duplicate": again} if again else {})
        return read, reasons, held_out

    def _sources(
        self, paths: Sequence[Path], sources: Sequence[int], left_out: LeftOut, shards: Sequence[Shard]
    ) -> list[ShardSource]:
        read, reasons, held_out = self._counts(paths, sources, left_out)
        return [
            ShardSource(
                origin.name,
                origin.weight,
                read[number],
                sum(shard.by_source[number] for shard in shards),
                held_out[number],
                dict(sorted(reasons[number].items())),
                self.sizes[number],
            )
            for number, origin in enumerate(self.origins)
        ]


def _thinned(sample: list[_Drawn], most: int) -> tuple[list[_Drawn], int, float]:
    """Returns the texts of the lowest draws, up to a total of characters, in order; their size; the highest draw."""
    size, limit = 0, 1.0
    for value, length, _ in sorted(sample, key=lambda item: item[0]):
        if size and size + length > most:
            limit = value
            break
        size += length
    return [item for item in sample if item[0] < limit], size, limit


def _origins(config: TrainConfig) -> tuple[str, list[_Origin]]:
    """Returns the kind of examples that the settings ask for, and their sources."""
    if config.train_text:
        kind, names = "text", [(path,) for path in paths_of(config.train_text)]
    elif config.train_tsv:
        kind, names = "pairs", [(path,) for path in paths_of(config.train_tsv)]
    elif config.train_source and config.train_target:
        kind = "pairs"
        names = list(zip(paths_of(config.train_source), paths_of(config.train_target), strict=True))  # type: ignore[arg-type]
    else:
        raise ValueError(
            "expected text to prepare, got none: give train_source with train_target, or train_tsv, or train_text"
        )
    weights = config.weights() or [1.0] * len(names)
    return kind, [_Origin(" and ".join(some), tuple(some), weight) for some, weight in zip(names, weights, strict=True)]


def _validation_origin(config: TrainConfig) -> _Origin | None:
    """Returns the files of the validation data that the settings name, as one source; None: it is held out."""
    given = (config.val_source, config.val_target, config.val_tsv, config.val_text)
    paths = tuple(path for name in given if name for path in paths_of(name))
    return _Origin(" and ".join(paths), paths, 1.0) if paths else None


def _number_of_shards(origins: Sequence[_Origin]) -> int:
    total, least = 0, 1
    for file in (file for origin in origins for file in origin.files()):
        if os.path.isfile(file):
            total += os.path.getsize(file) * (_PACKED_BY if file.lower().endswith(_PACKED) else 1)
        else:
            least = _LEAST_SHARDS
    return max(least, -(-total // SHARD_BYTES))


def _settings(config: TrainConfig, kind: str, shards: int, bpe_characters: int) -> dict[str, Any]:
    """Returns everything but the text on which the bytes of the shards depend."""
    names = [f.name for f in fields(Tokens)]
    names += ["seed", "skip_bad_lines", "val_source", "val_target", "val_tsv", "val_text"]
    names += ["seqlen"] if kind == "text" else ["max_len", *(f.name for f in fields(Filters))]
    values = {name: getattr(config, name) for name in names}
    return {"shards": shards, "bpe_characters": bpe_characters, **values}


def _check_complete(
    manifest: Manifest, folder: Path, settings: dict[str, Any], origins: Sequence[_Origin], validation: _Origin | None
) -> None:
    """Checks, by sizes, that a complete folder is the one that the call would make.

    Raises:
        ValueError: settings, weights or files differ.
    """
    before = [(source.name, source.weight) for source in manifest.sources]
    if (manifest.settings, before) != (settings, [(origin.name, origin.weight) for origin in origins]):
        raise ValueError(f"{folder} holds shards that were prepared with other settings: give another folder")
    files = list(zip(origins, [source.size for source in manifest.sources], strict=True))
    for origin, was in [*files, *([(validation, manifest.validation_size)] if validation else [])]:
        size = origin.size()
        if size is None:
            logger.warning("%s is complete, so %s was not read", folder, origin.name)
        elif was not in (None, size):
            raise ValueError(
                f"{folder} holds shards of {was:,} bytes of {origin.name}, which has {size:,} now: give another folder"
            )


def _check_same(work: Path, settings: dict[str, Any], origins: Sequence[_Origin]) -> None:
    """Checks that settings and files are those of the interrupted call; with a pipe, removes its files to begin anew.

    A call that ended before its first block left nothing to go on with, so that another one begins anew. Bad lines may
    be skipped from here on, for no block has one.

    Raises:
        ValueError: settings or files differ.
    """
    state = work / "settings.json"
    files = {
        file: [os.path.getsize(file), os.stat(file).st_mtime_ns] if os.path.isfile(file) else None
        for origin in origins
        for file in (origin.files() if origin.paths != (STDIN,) else [STDIN])
    }
    sources = [[origin.name, origin.weight] for origin in origins]
    now: dict[str, Any] = {"version": _WORK_VERSION, "settings": settings, "sources": sources, "files": files}
    before = read_json(state) if state.is_file() else now
    if not any(work.glob("block-*.arrow")):
        if before != now:
            (work / TOKENIZER).unlink(missing_ok=True)
        before = now
    if before.get("version") != _WORK_VERSION:
        raise ValueError(f"{work.parent} was begun by another version of fastformer: give another folder")
    for name, is_now in settings.items():
        was = before["settings"].get(name)
        if was != is_now and (name, was) != ("skip_bad_lines", False):
            raise ValueError(
                f"{work.parent} was begun with {name} {was!r}, got {is_now!r}: give the same again, or another folder"
            )
    if before["sources"] != sources:
        raise ValueError(f"{work.parent} was begun with other sources: give the same again, or another folder")
    if before["files"] != files:
        raise ValueError(f"{work.parent} was begun with files that have changed since: give another folder")
    if None in files.values():  # a pipe begins anew
        for path in [*work.glob("block-*.arrow"), *work.parent.glob("shard-*.arrow")]:
            path.unlink()
    write_atomically(state, json.dumps(now).encode())


def _table(examples: Examples) -> Any:
    sides = {name: lists([getattr(example, name) for example in examples]) for name in ("source", "target")}
    return arrow().table({**sides, "origin": arrow().array(numpy.zeros(len(examples), numpy.uint16))})


def _told(reasons: Iterable[Counter[str]]) -> str:
    total = sum(reasons, Counter[str]())
    return ", ".join(f"{count:,} {reason}" for reason, count in total.most_common()) or "there is none"


def _bar(items: Iterable[Item], what: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """Yields the same items, with a progress bar if a terminal and tqdm are available."""
    bar = console.progress_bar(iterable=items, desc=what, total=total, unit=unit, dynamic_ncols=True, leave=False)
    return items if bar is None else bar


def summary(manifest: Manifest) -> str:
    """Describes the contents of a folder in a few lines."""
    tokens = sum(shard.source_tokens + shard.target_tokens for shard in manifest.shards)
    lines = [f"{manifest.examples:,} examples of {tokens:,} tokens in {len(manifest.shards):,} shards"]
    for source in manifest.sources:
        out = "".join(f", {count:,} {reason}" for reason, count in source.left_out.items())
        weight = f" (weight {source.weight:g})" if source.weight != 1.0 else ""
        lines.append(
            f"{source.name}{weight}: {source.read:,} read, {source.examples:,} in shards, {source.held_out:,} held "
            f"out{f'; left out{out[1:]}' if out else ''}"
        )
    return "\n".join(lines)
