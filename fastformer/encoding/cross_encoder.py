"""`CrossEncoder`: scores of pairs of texts, and classes of texts, from a model with a classification head."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fastformer.encoding.batches import BATCH_TOKENS, check_limits, check_several, chunks, made_ahead, progress
from fastformer.encoding.folder import Folder
from fastformer.encoding.folder_model import FolderModel, check_ranking, one_of, ranking
from fastformer.encoding.modules import Array
from fastformer.encoding.tokens import Pair, Reader, Rows
from fastformer.generation.text_io import expect_text

logger = logging.getLogger("fastformer")

# A pair of texts, or a sequence of one text for a classifier.
Input: TypeAlias = Sequence[str]
Activation: TypeAlias = Callable[[Tensor], Tensor]


class CrossEncoder(FolderModel):
    """Scores pairs of texts, or classifies texts. Methods and arguments are called as in sentence-transformers.

    Args:
        folder: the folder of a model with a classification head, saved by sentence-transformers or transformers; or of
            a language model, whose scores are the logit of "yes" less that of "no", as in sentence-transformers.
        precision: the precision of the weights: "fp32", "bf16", "int8" or "int4", the last two on a CPU; None: as they
            were saved. Scores are always fp32.
        device: the device for the model; None: the CPU.
        activation_fn: the function applied to the logits, in place of the folder's. If neither is given, it is a
            sigmoid for one label, and the identity for several.
        prompts: prompts by name, in place of the folder's of the same names.
        default_prompt_name: replaces the folder's setting.
        chat_template: see `Encoder`; it reads a message of the role query and one of the role document.

    Attributes:
        prompts, default_prompt_name: see `Encoder`; a prompt is put in front of the first text of a pair.
        activation_fn: see the argument.
        labels: the folder's names of the labels, by index.

    Raises:
        ImportError: a library that the folder needs is not installed.
        ValueError: a file is missing or damaged, the model has no classification head, or its architecture is unknown.
    """

    _tasks = ()

    def __init__(
        self,
        folder: str | os.PathLike[str] | Folder,
        *,
        precision: str | None = None,
        device: torch.device | str | None = None,
        activation_fn: Activation | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(folder, precision, device, prompts, default_prompt_name, chat_template, ranks=True)
        loaded = self._folder
        if not loaded.num_labels:
            raise ValueError(
                f"expected a model with a head for classification, got one without in {loaded.path}: "
                "fastformer.Encoder computes its embeddings"
            )
        if loaded.pooling is not None:
            raise ValueError(f"expected no Pooling after the model of a CrossEncoder, got one in {loaded.path}")
        usual = nn.Sigmoid() if self.num_labels == 1 else nn.Identity()
        self.activation_fn: Activation = activation_fn or loaded.activation or usual
        labels = loaded.labels if len(loaded.labels) == self.num_labels else ()
        self.labels = labels or tuple(f"LABEL_{i}" for i in range(self.num_labels))

    @property
    def num_labels(self) -> int:
        """The number of scores that the head computes for a pair."""
        return self._folder.num_labels

    def predict(
        self,
        sentences: str | Input | Iterable[Input] | None = None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        pool: None = None,
        chunk_size: int | None = None,
        inputs: str | Input | Iterable[Input] | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> Any:
        """Returns the scores of pairs, or of texts, in their order.

        Args:
            sentences: pairs of texts, read a few thousand at a time; for a classifier of texts, lists of one text each.
                Two texts in a list or tuple are one pair, and a str is one text.
            prompt_name, prompt: see `Encoder.encode`; it is put in front of the first text of each pair.
            batch_size: the most pairs that are computed together; None: the number that batch_tokens allows.
            show_progress_bar: whether to show a progress bar on standard error.
            activation_fn: the function applied to the logits, (pairs, num_labels); None: the object's.
            apply_softmax: apply a softmax to the scores of several labels, after the activation.
            convert_to_numpy: return an array; False returns a list of tensors.
            convert_to_tensor: return a tensor.
            device, pool, chunk_size, inputs: see `Encoder.encode`.
            batch_tokens: the most tokens that are computed together.

        Returns:
            (pairs,) in fp32 for one label, (pairs, num_labels) for several; for a single pair or text, the same without
            the first dimension.

        Raises:
            ValueError: an item is neither a pair nor a text (the message has its position), or see `Encoder.encode`.
        """
        self._check_run(device, pool, chunk_size)
        limits, front = check_limits(batch_tokens, batch_size), self._prompt(prompt, prompt_name)
        is_one, read = _inputs(one_of(sentences, inputs))
        activation = activation_fn or self.activation_fn
        parts = []
        with progress(read, show_progress_bar) as advance:
            for logits in self._computed(self._rows(read, front), self.num_labels, limits, advance, self._classify):
                scores = self._activated(torch.from_numpy(logits), activation)
                parts.append(scores.softmax(1) if apply_softmax and scores.dim() > 1 else scores)
        shape = (0,) if self.num_labels == 1 else (0, self.num_labels)
        predictions = torch.cat(parts) if parts else torch.from_numpy(np.zeros(shape, np.float32))
        return self._converted(predictions.numpy(), is_one, convert_to_numpy, convert_to_tensor)

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        device: Any = None,
        pool: None = None,
        chunk_size: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> list[dict[str, Any]]:
        """Ranks documents by their scores for a query, best first. Equal scores stay in the order of the documents.

        Args:
            query: a text.
            documents: texts.
            top_k: the number of documents to return; None: all.
            return_documents: whether to return the texts too.
            prompt_name, prompt, batch_size, show_progress_bar, activation_fn, device, pool, chunk_size: see `predict`.
            batch_tokens: see `predict`.

        Returns:
            For each document a mapping of "corpus_id" (its index), "score" and, with return_documents, "text".

        Raises:
            ValueError: the model has several labels, or an item is not a text.
        """
        if self.num_labels != 1:
            raise ValueError(f"expected a model of one label to rank with, got one of {self.num_labels}: see predict")
        top_k = check_ranking(query, documents, top_k)
        texts: list[str] = []

        def pairs() -> Iterator[Pair]:
            for number, document in enumerate(documents, 1):
                if return_documents:
                    texts.append(document)
                yield query, expect_text("documents", number, document)

        scores = self.predict(
            pairs(), prompt_name=prompt_name, prompt=prompt, device=device, pool=pool, chunk_size=chunk_size,
            batch_size=batch_size, show_progress_bar=show_progress_bar, activation_fn=activation_fn,
            batch_tokens=batch_tokens,
        )  # fmt: skip
        return ranking(scores, top_k, texts if return_documents else None)

    def _activated(self, logits: Tensor, activation: Activation) -> Tensor:
        """Returns the scores for logits (pairs, num_labels); (pairs,) for one label."""
        with torch.inference_mode():
            scores = activation(logits)
        if self.num_labels == 1 and scores.dim() > 1:
            scores = scores.squeeze(-1)
        if scores.dim() == 0 or len(scores) != len(logits):
            raise ValueError(f"expected activation_fn to keep the {len(logits)} rows, got {tuple(scores.shape)}")
        return scores.to(torch.float32, copy=True)

    def _rows(self, inputs: Iterable[Input], prompt: str) -> Iterator[Rows]:
        return made_ahead(lambda chunk: rows_of(self._reader, chunk, prompt), chunks(inputs, check_input))

    def _tokenized(self, texts: Sequence[Any]) -> Rows:
        return rows_of(self._reader, [[text] if isinstance(text, str) else text for text in texts])

    def _classify(self, rows: Rows) -> Array:
        """Returns the logits of rows of pairs or texts, (rows, num_labels)."""
        head = self._folder.head
        if head is None:
            return self._engine.classify(rows.ids, rows.types)
        pad = None if head.compares else self._folder.model.config.special_ids.pad
        return head(self._engine.encode([_until_pad(ids, pad) for ids in rows.ids], pooling="lasttoken"))


def _until_pad(ids: list[int], pad: int | None) -> list[int]:
    """Returns ids without PAD at their end, unless all are PAD: transformers' classifiers read the last other token."""
    last = next((place for place in reversed(range(len(ids))) if ids[place] != pad), len(ids) - 1)
    return ids[: last + 1]


def _inputs(sentences: Any) -> tuple[bool, Iterable[Input]]:
    """Returns whether `sentences` is a single pair or text, and the inputs as an iterable."""
    if isinstance(sentences, str):
        return True, [[sentences]]
    if isinstance(sentences, np.ndarray):
        sentences = sentences.tolist()
    check_several("sentences", sentences)
    if isinstance(sentences, list | tuple) and sentences and isinstance(sentences[0], str):
        if len(sentences) != 2:
            raise ValueError(
                f"expected a pair of texts, or a list of pairs, got {len(sentences)} texts: texts by themselves are "
                "lists of one text each"
            )
        return True, [sentences]
    return False, sentences  # each item is checked when it is read


def check_input(number: int, pair: object) -> None:
    """Raises a ValueError unless a pair, or a list of one text, is one; it has a number from 1 on."""
    if isinstance(pair, str) or not isinstance(pair, Sequence) or not 1 <= len(pair) <= 2:
        raise ValueError(f"sentences[{number - 1}]: expected a pair of texts, or a list of one text, got {pair!r:.60}")
    for text in pair:
        expect_text("sentences", number, text)


def rows_of(reader: Reader, inputs: Sequence[Input], prompt: str = "", *, cuts: bool = True) -> Rows:
    """Returns a row for each pair or text, in their order; see `Reader.texts` and `Reader.pairs`."""
    pairs = [index for index, texts in enumerate(inputs) if len(texts) == 2]
    single = [index for index, texts in enumerate(inputs) if len(texts) == 1]
    paired = reader.pairs([(inputs[index][0], inputs[index][1]) for index in pairs], prompt, cuts=cuts)
    single_rows = reader.texts([inputs[index][0] for index in single], prompt, cuts=cuts)
    by_index = dict(zip([*pairs, *single], [*paired.ids, *single_rows.ids], strict=True))
    ids = [by_index[index] for index in range(len(inputs))]
    if paired.types is None:
        return Rows(ids)
    types = dict(zip(pairs, paired.types, strict=True))
    return Rows(ids, [types.get(index, [0] * len(row)) for index, row in enumerate(ids)])
