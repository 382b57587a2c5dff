"""The common base of `Encoder`, `CrossEncoder`, `MultiVectorEncoder` and `TokenClassifier`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from fastformer.encoding.batches import as_int, check_several, packed
from fastformer.encoding.engine import EncoderEngine
from fastformer.encoding.folder import Folder, read_folder
from fastformer.encoding.late_interaction import TASKS
from fastformer.encoding.modules import Array
from fastformer.encoding.tokens import Rows
from fastformer.models.stored import stand_in
from fastformer.settings import Positive, check_value, suggestion

T = TypeVar("T")

# The names of a task's prompts; the first that the folder has counts.
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}


class FolderModel:
    """The model of a folder, its engine and its tokenizer.

    Args:
        folder: a path, or the result of `read_folder`.
        precision: the precision of the weights; None: as they were saved.
        device: the device for the model; None: the CPU.
        prompts: prompts by name, in place of the folder's of the same names.
        default_prompt_name, chat_template: replace the folder's settings.
        ranks: see `read_folder`.

    Attributes:
        prompts: prompts by name; one of them is put in front of each text.
        default_prompt_name: the name of the prompt for calls that don't name one; None: no prompt.
    """

    _tasks: Collection[str] = TASKS  # the names of prompts that are empty if the folder has none

    def __init__(
        self,
        folder: str | os.PathLike[str] | Folder,
        precision: str | None,
        device: torch.device | str | None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        chat_template: str | None = None,
        *,
        ranks: bool = False,
    ) -> None:
        if isinstance(folder, Folder) and chat_template is not None:
            raise ValueError("expected no chat_template along with a folder that was read")
        if not isinstance(folder, Folder):
            folder = read_folder(folder, device=device, chat_template=chat_template, ranks=ranks)
        self._folder = loaded = folder
        self.prompts = {**loaded.prompts, **(prompts or {})}
        self.default_prompt_name = loaded.default_prompt_name if default_prompt_name is None else default_prompt_name
        self._prompt(None, self.default_prompt_name)
        self._reader = self._folder.reader
        self._engine = EncoderEngine(self._folder.model, precision)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        precision: str | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Makes an object from a folder. The arguments are those of the class."""
        return cls(folder, precision=precision, device=device, **options)

    @property
    def prompt_names(self) -> list[str]:
        """The names of prompts: those of `prompts`, and in an encoder "query" and "document", empty if missing."""
        return [*dict.fromkeys([*self.prompts, *self._tasks])]

    @property
    def max_seq_length(self) -> int:
        """The most tokens in a row, including special ones. Texts are cut to it, in a pair the longer one. Settable."""
        return self._reader.max_len

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._reader.set_max_len(value, self._folder.model.config.max_len)

    @property
    def num_cut(self) -> int:
        """The number of texts or pairs so far that were cut because they were longer than max_seq_length."""
        return self._reader.num_cut

    @property
    def model(self) -> Any:
        """The `models.BERT`."""
        return self._folder.model

    @property
    def precision(self) -> str:
        """The precision that the model computes in."""
        return self._engine.precision

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        model_device: torch.device = next(stand_in(self._folder.model).parameters()).device
        return model_device

    @property
    def tokenizer(self) -> Any:
        """The folder's tokenizer, a `Tokenizer`: `encode` and `decode`, and `encode_pair` for two texts."""
        return self._reader.tokenizer

    def tokenize(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Returns the model's inputs for texts, (texts, seqlen), with padding on the right.

        Returns:
            input_ids, attention_mask (1 for tokens, 0 for padding) and, if the model has them, token_type_ids.
        """
        rows = self._tokenized(texts)
        shape = len(rows.ids), max(map(len, rows.ids), default=0)
        ids = torch.full(shape, self._folder.model.config.special_ids.pad)
        mask, types = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        for index, row in enumerate(rows.ids):
            ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
            if rows.types is not None:
                types[index, : len(row)] = torch.tensor(rows.types[index])
        features = {"input_ids": ids, "attention_mask": mask}
        return features | ({"token_type_ids": types} if self._reader.tokenizer.has_token_types else {})

    def eval(self) -> Self:
        """Returns the object, whose model is always in evaluation."""
        return self

    def to(self, device: torch.device | str) -> Self:
        """Returns the object. A ValueError says that the model is on another device."""
        self._check_run(device, None, None)
        return self

    def half(self) -> Self:
        """Raises a ValueError: the argument `precision` of the class converts the weights."""
        raise ValueError("expected no half(): make the object with precision='bf16' instead")

    def start_multi_process_pool(self, *args: Any, **options: Any) -> Any:
        """Raises a ValueError: one process computes on all threads."""
        raise ValueError("expected no start_multi_process_pool(): one process computes on all threads, without a pool")

    def _tokenized(self, texts: Sequence[Any]) -> Rows:
        """Returns the rows of texts as the class reads them."""
        return self._reader.texts(texts)

    def _computed(
        self,
        chunks: Iterable[Rows],
        width: int,
        limits: tuple[int, int | None],
        advance: Callable[[int], object],
        compute: Callable[[Rows], Array],
    ) -> Iterator[Array]:
        """Yields what `compute` returns for the rows of each chunk, (texts, width); zeros for rows without tokens."""
        for rows in chunks:
            results = np.zeros((len(rows.ids), width), np.float32)
            for indices in batches(rows, limits):
                results[indices] = compute(rows.select(indices))
                advance(len(indices))
            yield results

    def _each(
        self,
        chunks: Iterable[Rows],
        nothing: T,
        limits: tuple[int, int | None],
        advance: Callable[[int], object],
        compute: Callable[[Rows], Iterable[T]],
    ) -> list[T]:
        """Returns what `compute` returns for each row of all chunks; `nothing` for rows without tokens."""
        every: list[T] = []
        for rows in chunks:
            results = [nothing] * len(rows.ids)
            for indices in batches(rows, limits):
                for index, result in zip(indices, compute(rows.select(indices)), strict=True):
                    results[index] = result
                advance(len(indices))
            every += results
        return every

    def _check_run(self, device: Any, pool: Any, chunk_size: int | None) -> None:
        """Checks the arguments by which sentence-transformers distributes a call.

        Raises:
            ValueError: another device than the model's, or a pool of processes.
        """
        if device is not None:
            devices = [device] if isinstance(device, str | torch.device) else list(device)
            targets = {(target.type, target.index or 0) for target in map(torch.device, devices)}
            if targets != {(self.device.type, self.device.index or 0)} or len(devices) != 1:
                raise ValueError(
                    f"expected device {str(self.device)!r}, on which the model is, got {device!r}: give it to the class"
                )
        if pool is not None:
            raise ValueError(f"expected pool None, got one: see start_multi_process_pool ({type(pool).__name__})")
        if chunk_size is not None:
            check_value("chunk_size", chunk_size, Positive)

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        """Returns the prompt to put in front of each text."""
        if prompt is not None:
            if not isinstance(prompt, str):
                raise ValueError(f"expected prompt as a str, got {type(prompt).__name__}")
            return prompt
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in (known := self.prompt_names):
            raise ValueError(f"expected a prompt_name in {known}, got {name!r:.60}{suggestion(name, known)}")
        return self.prompts.get(name, "")

    def _prompt_of(self, task: str) -> str:
        """Returns the prompt of a task's texts. Without one it is empty: the default prompt may be another task's."""
        return next((self.prompts[name] for name in _PROMPTS[task] if name in self.prompts), "")

    def _for_task(self, task: str, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of `encode`, with the prompt of a task unless they name one."""
        if options.get("prompt") is None and options.get("prompt_name") is None:
            options["prompt"] = self._prompt_of(task)
        return options

    def _converted(self, rows: Any, is_one: bool, convert_to_numpy: bool, convert_to_tensor: bool) -> Any:
        """Returns results, an array, in the form that the caller asks for; for one text, its row."""
        if not convert_to_numpy or convert_to_tensor:
            rows = torch.from_numpy(rows)
            rows = rows.to(self.device) if convert_to_tensor else list(rows)
        return rows[0] if is_one else rows


def batches(rows: Rows, limits: tuple[int, int | None]) -> Iterator[list[int]]:
    """Yields the indices of rows that are computed together, without rows that have no tokens."""
    nonempty = [i for i, ids in enumerate(rows.ids) if ids]
    for batch in packed([len(rows.ids[i]) for i in nonempty], *limits):
        yield [nonempty[index] for index in batch]


def check_ranking(query: object, documents: object, top_k: int | None) -> int | None:
    """Returns the number of documents to return from `rank`; None: all.

    Raises:
        ValueError: an argument of another type, or a top_k below 1.
    """
    check_several("documents", documents)
    top_k = as_int(top_k)
    check_value("top_k", top_k, Positive | None)
    if not isinstance(query, str):
        raise ValueError(f"expected query as a str, got {type(query).__name__}")
    return top_k


def ranking(scores: Sequence[float], top_k: int | None, texts: Sequence[str] | None) -> list[dict[str, Any]]:
    """Returns the result of `rank`: the places of documents, best first, with their scores, and with their texts."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_k]
    return [
        {"corpus_id": index, "score": float(scores[index]), **({} if texts is None else {"text": texts[index]})}
        for index in order
    ]


def one_of(sentences: Any, inputs: Any) -> Any:
    """Returns the texts of a call, which sentence-transformers calls sentences before version 6, and then inputs.

    Raises:
        ValueError: neither or both are given.
    """
    if (sentences is None) == (inputs is None):
        raise ValueError(f"expected sentences or inputs, got {'neither' if inputs is None else 'both'}")
    return inputs if sentences is None else sentences


def named(encode: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a bound `encode` after the texts by name."""
    names = [name for name, one in inspect.signature(encode).parameters.items() if one.kind is not one.KEYWORD_ONLY]
    by_name = dict(zip(names[1:], arguments, strict=False))
    if len(arguments) >= len(names) or by_name.keys() & options.keys():
        raise TypeError(f"expected each argument of encode once, got {len(arguments)} by position and {[*options]}")
    return {**by_name, **options}
