"""Texts in, embeddings out: a model, its tokenizer, and what its folder puts behind it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from fastformer.encoding.batches import BATCH_TOKENS, check_limits, check_several, chunks, packed, progress
from fastformer.encoding.folder import Folder
from fastformer.encoding.folder_model import FolderModel
from fastformer.encoding.modules import Array, Normalize, Pooling, normalized, pooled
from fastformer.encoding.similarity import ALL, PAIRED, Embeddings, as_rows
from fastformer.encoding.tokens import Rows
from fastformer.settings import Positive, check_value, suggestion

logger = logging.getLogger("fastformer")

Output = Literal["sentence_embedding", "token_embeddings"]


class Encoder(FolderModel):
    """Computes embeddings of texts. Methods and arguments are called as in sentence-transformers.

    Args:
        folder: that sentence-transformers saved, or transformers alone: then a text's embedding is the mean of its
            tokens' states, which is said in the log.
        precision: of the weights: "fp32", "bf16", "int8" or "int4", the latter two on a CPU; None: as they were saved.
            Embeddings, pooling and norms are fp32 always.
        device: where the model goes; None: the CPU.
        prompts, default_prompt_name, similarity_fn_name, truncate_dim: in place of what the folder says.

    Attributes:
        prompts: texts by name, of which one is put in front of each text.
        default_prompt_name: of the prompt where a call names none; None: none.
        similarity_fn_name: "cosine", "dot", "euclidean" or "manhattan".
        truncate_dim: the numbers of an embedding that are kept; None: all.

    Raises:
        ImportError: a library that the folder needs is not installed.
        ValueError: a file is missing or damaged, or an architecture, a module or a precision that isn't known.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Folder,
        *,
        precision: str | None = None,
        device: torch.device | str | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        check_value("truncate_dim", truncate_dim, Positive | None)
        super().__init__(folder, precision, device)
        found = self._folder
        self.prompts = dict(found.prompts if prompts is None else prompts)
        self.default_prompt_name = found.default_prompt_name if default_prompt_name is None else default_prompt_name
        self.similarity_fn_name = found.similarity if similarity_fn_name is None else similarity_fn_name
        self.truncate_dim = found.truncate_dim if truncate_dim is None else truncate_dim
        if self.similarity_fn_name not in ALL:
            hint = suggestion(self.similarity_fn_name, ALL)
            raise ValueError(f"expected similarity_fn_name out of {[*ALL]}, got {self.similarity_fn_name!r}{hint}")
        self._prompt(None, self.default_prompt_name)
        if found.pooling is None:
            logger.info(
                "%s says nothing of a pooling: an embedding is the mean of the states of its tokens", found.path
            )
        self._pooling = found.pooling or Pooling()

    @property
    def pooling(self) -> str:
        """How the states of a text's tokens become its embedding, several ways with + between them."""
        return "+".join(self._pooling.kinds)

    def get_embedding_dimension(self) -> int:
        """The numbers of an embedding."""
        whole = int(self._folder.model.config.d_model) * len(self._pooling.kinds)
        for step in self._folder.steps:
            whole = step.out_features or whole
        return whole if self.truncate_dim is None else min(whole, self.truncate_dim)

    def get_sentence_embedding_dimension(self) -> int:
        """The numbers of an embedding, by the method's older name."""
        return self.get_embedding_dimension()

    def encode(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: Output = "sentence_embedding",
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        normalize: bool | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> Any:
        """The embeddings of texts, in their order.

        Args:
            sentences: a text, or texts: a list, an array, a generator, ... They are read a few thousand at a time.
            prompt_name: of the prompt in front of each text; None: that of default_prompt_name.
            prompt: this text in its place.
            batch_size: texts that are computed together at most; None: as many as batch_tokens allows.
            show_progress_bar: whether there is one on standard error.
            output_value: "sentence_embedding", or "token_embeddings": a list of a tensor (seqlen, d_model) each.
            convert_to_numpy: give an array; False gives a list of tensors.
            convert_to_tensor: give a tensor.
            normalize: divide each embedding by its length; False: don't, even where the folder does so at the end;
                None: as the folder says.
            normalize_embeddings: True is normalize=True; False is as the folder says.
            truncate_dim: the numbers of an embedding that are kept, before it is normalized; None: the encoder's.
            batch_tokens: that are computed together at most.

        Returns:
            (texts, dim) in fp32; of one text (dim,). Of an empty list (0, dim).

        Raises:
            ValueError: something that is no text (named by its place), an unknown prompt_name.
        """
        if output_value not in ("sentence_embedding", "token_embeddings"):
            raise ValueError(f"expected output_value sentence_embedding or token_embeddings, got {output_value!r}")
        is_one = isinstance(sentences, str)
        texts: Iterable[str] = [sentences] if isinstance(sentences, str) else sentences
        check_several("sentences", texts)
        limits = check_limits(batch_tokens, batch_size)
        prompt = self._prompt(prompt, prompt_name)
        finish = self._finish(normalize, normalize_embeddings, truncate_dim)
        if output_value == "token_embeddings":
            with progress(texts, show_progress_bar) as advance:
                states = self._states(texts, prompt, limits, advance)
            return states[0] if is_one else states
        with progress(texts, show_progress_bar) as advance:
            parts = list(self._parts(texts, prompt, limits, finish, advance))
        rows = np.concatenate(parts) if parts else np.zeros((0, finish(None).shape[1]), np.float32)
        found: Any = rows
        if convert_to_tensor:
            found = torch.from_numpy(rows).to(self.device)
        elif not convert_to_numpy:
            found = list(torch.from_numpy(rows))
        return found[0] if is_one else found

    def encode_query(self, sentences: str | Iterable[str], **options: Any) -> Any:
        """`encode` with the prompt "query", if the folder has one and the call names none."""
        return self.encode(sentences, **self._for_task(("query",), options))

    def encode_document(self, sentences: str | Iterable[str], **options: Any) -> Any:
        """`encode` with the first prompt that there is of "document", "passage", "corpus", if the call names none."""
        return self.encode(sentences, **self._for_task(("document", "passage", "corpus"), options))

    def stream(
        self,
        sentences: Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        batch_size: int | None = None,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> Iterator[Array]:
        """`encode`, some thousand texts after the other: memory does not grow with their number.

        Yields:
            (texts, dim) of the next texts, in their order.
        """
        check_several("sentences", sentences)
        limits = check_limits(batch_tokens, batch_size)
        finish = self._finish(normalize, False, truncate_dim)
        return self._parts(sentences, self._prompt(prompt, prompt_name), limits, finish, lambda count: None)

    def similarity(self, embeddings1: Embeddings, embeddings2: Embeddings) -> Tensor:
        """How similar each embedding of one is to each of the other, by similarity_fn_name: (rows1, rows2)."""
        return ALL[self.similarity_fn_name](as_rows(embeddings1), as_rows(embeddings2))

    def similarity_pairwise(self, embeddings1: Embeddings, embeddings2: Embeddings) -> Tensor:
        """How similar each embedding is to the one in its place: (rows,)."""
        return PAIRED[self.similarity_fn_name](as_rows(embeddings1), as_rows(embeddings2))

    def _for_task(self, names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
        if options.get("prompt") is None and options.get("prompt_name") is None:
            options["prompt_name"] = next((name for name in names if name in self.prompts), None)
        return options

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        """The text in front of each text."""
        if prompt is not None:
            if not isinstance(prompt, str):
                raise ValueError(f"expected prompt as a str, got {type(prompt).__name__}")
            return prompt
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            hint = suggestion(name, self.prompts)
            raise ValueError(f"expected a prompt_name out of {[*self.prompts]}, got {name!r}{hint}")
        return self.prompts[name]

    def _finish(self, normalize: bool | None, also: bool, truncate_dim: int | None) -> _Finish:
        for name, value in (("normalize", normalize), ("normalize_embeddings", also)):
            if value not in (None, True, False):
                raise ValueError(f"expected {name} to be True or False, got {value!r}")
        if also and normalize is False:
            raise ValueError("expected normalize or normalize_embeddings, got normalize=False and the other True")
        check_value("truncate_dim", truncate_dim, Positive | None)
        steps = list(self._folder.steps)
        while normalize is False and steps and isinstance(steps[-1], Normalize):
            steps.pop()
        width = int(self._folder.model.config.d_model) * len(self._pooling.kinds)
        kept = self.truncate_dim if truncate_dim is None else truncate_dim
        return _Finish(width, steps, kept, bool(normalize) or also)

    def _parts(
        self,
        texts: Iterable[str],
        prompt: str,
        limits: tuple[int, int | None],
        finish: _Finish,
        advance: Callable[[int], object],
    ) -> Iterator[Array]:
        skipped = self._skipped(prompt)
        for rows in self._rows(texts, prompt):
            found = np.zeros((len(rows.ids), finish.width), np.float32)
            for places in self._batches(rows, limits):
                found[places] = self._pooled(rows.some(places), skipped)
                advance(len(places))
            yield finish(found)

    def _skipped(self, prompt: str) -> int:
        """The tokens at the beginning of each text behind a prompt that don't count in its embedding."""
        return 0 if self._pooling.includes_prompt or not prompt else self._prompt_tokens(prompt)

    def _pooled(self, rows: Rows, skipped: int) -> Array:
        """(texts, d_model * kinds) of texts, each of which has tokens."""
        kinds = self._pooling.kinds
        if len(kinds) == 1 and not skipped:
            return self._engine.encode(rows.ids, pooling=cast(Any, kinds[0]))
        hidden = self._engine.encode(rows.ids, pooling="none")
        return pooled(hidden, list(map(len, rows.ids)), kinds, skipped)

    def _states(
        self,
        texts: Iterable[str],
        prompt: str,
        limits: tuple[int, int | None],
        advance: Callable[[int], object],
    ) -> list[Tensor]:
        """(seqlen, d_model) of each text."""
        all_states: list[Tensor] = []
        for rows in self._rows(texts, prompt):
            states: list[Tensor] = [torch.zeros(0, int(self._folder.model.config.d_model))] * len(rows.ids)
            for places in self._batches(rows, limits):
                lengths = [len(rows.ids[place]) for place in places]
                hidden = torch.from_numpy(self._engine.encode(rows.some(places).ids, pooling="none"))
                for place, part in zip(places, hidden.split(lengths), strict=True):
                    states[place] = part
                advance(len(places))
            all_states += states
        return all_states

    def _rows(self, texts: Iterable[str], prompt: str) -> Iterator[Rows]:
        numbers = itertools.count()
        for chunk in chunks(texts):
            for text, number in zip(chunk, numbers, strict=False):
                if not isinstance(text, str):
                    raise ValueError(f"sentences[{number}]: expected a str, got {type(text).__name__} {text!r:.40}")
            yield self._reader.texts([prompt + text for text in chunk] if prompt else chunk)

    @staticmethod
    def _batches(rows: Rows, limits: tuple[int, int | None]) -> Iterator[list[int]]:
        """Places of rows that are computed together; a row without tokens stays zeros."""
        some = [place for place, ids in enumerate(rows.ids) if ids]
        for batch in packed([len(rows.ids[place]) for place in some], *limits):
            yield [some[index] for index in batch]

    def _prompt_tokens(self, prompt: str) -> int:
        """The tokens that stand in front of a text behind this prompt: those of the prompt alone but for its end."""
        alone, nothing = self._reader.tokenizer.encode_batch([prompt, ""])
        # What stands behind every text, such as [SEP].
        return len(alone) - int(bool(nothing) and alone[-1] == nothing[-1])


class _Finish:
    """What becomes of pooled rows.

    Attributes:
        width: of the rows.
    """

    def __init__(
        self, width: int, steps: Sequence[Callable[[Array], Array]], kept: int | None, normalizes: bool
    ) -> None:
        self.width, self._steps, self._kept, self._normalizes = width, steps, kept, normalizes

    def __call__(self, rows: Array | None) -> Array:
        """(rows, dim) of (rows, d_model * kinds); of None, no rows."""
        found = np.zeros((0, self.width), np.float32) if rows is None else rows
        for step in self._steps:
            found = step(found)
        if self._kept is not None:
            found = np.ascontiguousarray(found[:, : self._kept])
        return normalized(found) if self._normalizes else found
