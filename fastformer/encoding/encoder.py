"""`Encoder`: embeddings of texts, from a model, its tokenizer and the modules that its folder applies after it."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from fastformer.encoding.batches import BATCH_TOKENS, check_limits, check_several, chunks, made_ahead, progress
from fastformer.encoding.folder import Folder
from fastformer.encoding.folder_model import FolderModel, named, one_of
from fastformer.encoding.modules import Array, Normalize, Pooling, Stored, normalized, pooled, ranges_of, stored
from fastformer.encoding.similarity import ALL, PAIRED, Embeddings, as_rows
from fastformer.encoding.sparse import SparseEmbedding, Splade, sparse_of
from fastformer.encoding.tokens import Rows
from fastformer.generation.text_io import expect_text
from fastformer.settings import Positive, check_value, suggestion

logger = logging.getLogger("fastformer")

_SPARSE_TEXTS = 256  # texts whose numbers for all words are in memory at a time

Output = Literal["sentence_embedding", "token_embeddings"]


class Encoder(FolderModel):
    """Computes embeddings of texts. Methods and arguments are called as in sentence-transformers.

    Args:
        folder: a folder that sentence-transformers or transformers saved. For a folder of transformers, a text's
            embedding is the mean of its tokens' states, and the log says so.
        precision: the precision of the weights: "fp32", "bf16", "int8" or "int4", the last two on a CPU; None: as they
            were saved. Embeddings, pooling and norms are always fp32.
        device: the device for the model; None: the CPU.
        prompts: prompts by name, in place of the folder's of the same names.
        default_prompt_name, similarity_fn_name, truncate_dim: replace the folder's settings.
        chat_template: the template that writes each text as a message, with the prompt as the message of the system, in
            place of the folder's; None: the folder's, if sentence-transformers uses it.

    Attributes:
        prompts: prompts by name; one of them is put in front of each text.
        default_prompt_name: the name of the prompt for calls that don't name one; None: no prompt.
        similarity_fn_name: "cosine", "dot", "euclidean" or "manhattan".
        truncate_dim: the number of dimensions that an embedding is truncated to; None: all.
        ranges: the ranges of `encode` in calls that name none, such as `calibrate` finds them; None: no ranges.

    Raises:
        ImportError: a library that the folder needs is not installed.
        ValueError: a file is missing or damaged, or an architecture, a module or a precision is unknown.
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
        chat_template: str | None = None,
    ) -> None:
        check_value("truncate_dim", truncate_dim, Positive | None)
        super().__init__(folder, precision, device, prompts, default_prompt_name, chat_template)
        loaded = self._folder
        if loaded.late is not None:
            raise ValueError(
                f"expected a folder with an embedding for each text, got one with a vector for each token in "
                f"{loaded.path}: fastformer.MultiVectorEncoder computes them"
            )
        self.similarity_fn_name = loaded.similarity if similarity_fn_name is None else similarity_fn_name
        self.truncate_dim = loaded.truncate_dim if truncate_dim is None else truncate_dim
        if self.similarity_fn_name not in ALL:
            hint = suggestion(self.similarity_fn_name, ALL)
            raise ValueError(f"expected similarity_fn_name in {[*ALL]}, got {self.similarity_fn_name!r}{hint}")
        if loaded.pooling is None:
            logger.info("%s has no pooling: an embedding is the mean of the states of the tokens", loaded.path)
        self._pooling = loaded.pooling or Pooling()
        self.ranges: Array | None = None

    @property
    def pooling(self) -> str:
        """The kinds of pooling that turn the states of a text's tokens into its embedding, joined with +."""
        return "+".join(self._pooling.kinds)

    @property
    def normalizes(self) -> bool:
        """Whether embeddings are divided by their lengths unless a call says otherwise: the folder's setting."""
        return bool(self._folder.steps) and isinstance(self._folder.steps[-1], Normalize)

    def get_embedding_dimension(self) -> int:
        """Returns the number of dimensions of an embedding."""
        return self._finish(None, False, None)(None).shape[1]

    def get_sentence_embedding_dimension(self) -> int:
        """Returns the number of dimensions of an embedding; an older name of `get_embedding_dimension`."""
        return self.get_embedding_dimension()

    def encode(
        self,
        sentences: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: Output = "sentence_embedding",
        precision: Stored = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: None = None,
        chunk_size: int | None = None,
        *,
        inputs: str | Iterable[str] | None = None,
        normalize: bool | None = None,
        ranges: Array | None = None,
        calibration_embeddings: Array | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> Any:
        """Returns the embeddings of texts, in their order.

        Args:
            sentences: a text, or texts: a list, an array, a generator, ... They are read a few thousand at a time.
            prompt_name: the name of the prompt in front of each text; None: default_prompt_name.
            prompt: the text of the prompt, in place of a name.
            batch_size: the most texts that are computed together; None: the number that batch_tokens allows.
            show_progress_bar: whether to show a progress bar on standard error.
            output_value: "sentence_embedding", or "token_embeddings": a list with a tensor (seqlen, d_model) for each
                text.
            precision: the numbers of the embeddings: "float32"; "int8" or "uint8", 255 steps between the least and the
                greatest number of each dimension; "binary" or "ubinary", the signs, eight in a byte. It is not the
                precision of the computation, which the class has.
            convert_to_numpy: return an array; False returns a list of tensors.
            convert_to_tensor: return a tensor.
            device: the model's device, or None.
            pool: None: one process computes on all threads.
            chunk_size: has no effect without a pool.
            inputs: sentences, by their name in sentence-transformers 6.
            normalize: divide each embedding by its length; False: don't, even if the folder does so at the end;
                None: the folder's setting.
            normalize_embeddings: True is normalize=True; False is the folder's setting.
            ranges: the least and the greatest number of each dimension for "int8" and "uint8", (2, dim); None: those of
                calibration_embeddings, (texts, dim), or else the encoder's, or else those of this call.
            calibration_embeddings: see ranges.
            truncate_dim: the number of dimensions that an embedding is truncated to before it is normalized; None: the
                encoder's.
            batch_tokens: the most tokens that are computed together.

        Returns:
            (texts, dim), in fp32 unless precision says otherwise; (dim,) for a single text, (0, dim) for an empty list.

        Raises:
            ValueError: an item is not a text (the message has its position), prompt_name or precision is unknown, or
                the call names another device than the model's, or a pool.
        """
        self._check_run(device, pool, chunk_size)
        sentences = one_of(sentences, inputs)
        if precision not in (None, "float32"):
            check_value("precision", precision, Stored)
        if output_value == "token_embeddings" and precision not in (None, "float32"):
            raise ValueError(f"expected precision float32 along with token_embeddings, got {precision!r}")
        if output_value not in ("sentence_embedding", "token_embeddings"):
            raise ValueError(f"expected output_value sentence_embedding or token_embeddings, got {output_value!r}")
        is_one = isinstance(sentences, str)
        texts: Iterable[str] = [sentences] if isinstance(sentences, str) else sentences
        if not is_one:
            check_several("sentences", texts)
        limits = check_limits(batch_tokens, batch_size)
        prompt = self._prompt(prompt, prompt_name)
        finish = self._finish(normalize, normalize_embeddings, truncate_dim)
        if output_value == "token_embeddings":
            with progress(texts, show_progress_bar) as advance:
                nothing = torch.zeros(0, int(self._folder.model.config.d_model))
                states = self._each(self._rows(texts, prompt), nothing, limits, advance, self._states)
            return states[0] if is_one else states
        if is_one and not show_progress_bar:
            rows = self._one(cast(str, sentences), prompt, finish)
        else:
            with progress(texts, show_progress_bar) as advance:
                parts = list(self._parts(texts, prompt, limits, finish, advance))
            rows = np.concatenate(parts) if parts else np.zeros((0, finish(None).shape[1]), np.float32)
        if ranges is None:
            ranges = self.ranges if calibration_embeddings is None else ranges_of(calibration_embeddings)
        numbers = stored(rows, precision, None if ranges is None else np.asarray(ranges, np.float32))
        return self._converted(numbers, is_one, convert_to_numpy, convert_to_tensor)

    def calibrate(self, sentences: Iterable[str] | Array, **options: Any) -> Array:
        """Sets `ranges` to those of the embeddings of texts, and returns them.

        Args:
            sentences: the texts; or their embeddings (texts, dim), or the ranges themselves (2, dim), as an array.
            options: see `encode`; for texts alone.

        Raises:
            ValueError: see `encode`; or an array of another dim than the encoder's, with NaN or infinity, or options.
        """
        check_several("sentences", sentences)
        if isinstance(sentences, np.ndarray) and sentences.dtype.kind in "fiu":
            if options:
                raise ValueError(f"expected options of encode for texts alone, got {[*options]} for an array")
            self._check_embeddings(sentences)
        else:
            sentences = self.encode(sentences, **options)
        self.ranges = ranges_of(sentences)
        return self.ranges

    def _check_embeddings(self, rows: Array) -> None:
        dim = self.get_embedding_dimension()
        if rows.ndim != 2 or rows.shape[1] != dim or not np.isfinite(rows).all():
            raise ValueError(f"expected finite embeddings or ranges of shape (rows, {dim}), got {rows.shape}")

    def encode_query(self, sentences: str | Iterable[str] | None = None, *arguments: Any, **options: Any) -> Any:
        """Calls `encode` with the prompt "query", or without one if the folder lacks it, unless the call names one."""
        return self.encode(sentences, **self._for_task("query", named(self.encode, arguments, options)))

    def encode_document(self, sentences: str | Iterable[str] | None = None, *arguments: Any, **options: Any) -> Any:
        """Calls `encode` likewise, with the first of the prompts "document", "passage" and "corpus" that exists."""
        return self.encode(sentences, **self._for_task("document", named(self.encode, arguments, options)))

    @contextmanager
    def truncate_sentence_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Sets truncate_dim within the context."""
        check_value("truncate_dim", truncate_dim, Positive | None)
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

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
        """Encodes texts a few thousand at a time, so that memory does not grow with their number; see `encode`.

        Yields:
            The embeddings of the next texts, (texts, dim), in their order.
        """
        check_several("sentences", sentences)
        limits = check_limits(batch_tokens, batch_size)
        finish = self._finish(normalize, False, truncate_dim)
        return self._parts(sentences, self._prompt(prompt, prompt_name), limits, finish, lambda count: None)

    def encode_sparse(
        self,
        sentences: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        max_active_dims: int | None = None,
        batch_size: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> Any:
        """Returns the weights of words in texts, as SPLADE computes them: a `SparseEmbedding` for each text.

        Args:
            sentences, prompt_name, prompt, batch_size, batch_tokens: see `encode`.
            max_active_dims: the most words that an embedding has; the greatest weights count. None: all.

        Raises:
            ValueError: the folder has no SpladePooling; or see `encode`.
        """
        if not isinstance(self._pooling, Splade):
            raise ValueError(f"expected a folder with a SpladePooling, got one with pooling {self.pooling!r}")
        check_value("max_active_dims", max_active_dims, Positive | None)
        texts: Iterable[str] = [sentences] if isinstance(sentences, str) else sentences
        check_several("sentences", texts)
        limits, finish = check_limits(batch_tokens, batch_size), self._finish(None, False, None)
        prompt, rest, found = self._prompt(prompt, prompt_name), iter(texts), list[SparseEmbedding]()
        while some := list(itertools.islice(rest, _SPARSE_TEXTS)):
            for number, text in enumerate(some, len(found) + 1):
                expect_text("sentences", number, text)
            for rows in self._parts(some, prompt, limits, finish, lambda count: None):
                found += [sparse_of(row, max_active_dims) for row in rows]
        return found[0] if isinstance(sentences, str) else found

    def similarity(self, embeddings1: Embeddings, embeddings2: Embeddings) -> Tensor:
        """Returns the similarity of each row of embeddings1 to each row of embeddings2, (rows1, rows2)."""
        return ALL[self.similarity_fn_name](as_rows(embeddings1), as_rows(embeddings2))

    def similarity_pairwise(self, embeddings1: Embeddings, embeddings2: Embeddings) -> Tensor:
        """Returns the similarity of each row of embeddings1 to the same row of embeddings2, (rows,)."""
        return PAIRED[self.similarity_fn_name](as_rows(embeddings1), as_rows(embeddings2))

    def _finish(self, normalize: bool | None, also: bool, truncate_dim: int | None) -> _Finish:
        for name, value in (("normalize", normalize), ("normalize_embeddings", also)):
            if value not in (None, True, False):
                raise ValueError(f"expected {name} to be True or False, got {value!r}")
        if also and normalize is False:
            raise ValueError("expected normalize or normalize_embeddings, got normalize=False and the other True")
        if truncate_dim is not None:
            check_value("truncate_dim", truncate_dim, Positive)
        steps = list(self._folder.steps)
        while normalize is False and steps and isinstance(steps[-1], Normalize):
            steps.pop()
        width = int(self._folder.model.config.d_model) * len(self._pooling.kinds)
        if isinstance(self._pooling, Splade):
            width = len(self._pooling.output)
        dim = self.truncate_dim if truncate_dim is None else truncate_dim
        return _Finish(width, steps, dim, bool(normalize) or also)

    def _parts(
        self,
        texts: Iterable[str],
        prompt: str,
        limits: tuple[int, int | None],
        finish: _Finish,
        advance: Callable[[int], object],
    ) -> Iterator[Array]:
        pool = functools.partial(self._pooled, skipped=self._skipped(prompt))
        return map(finish, self._computed(self._rows(texts, prompt), finish.width, limits, advance, pool))

    def _one(self, text: str, prompt: str, finish: _Finish) -> Array:
        """Returns the embedding (1, dim) of a text. Chunks and batches would take longer than its tokens."""
        rows = self._reader.texts([text], prompt)
        if not rows.ids[0]:
            return finish(np.zeros((1, finish.width), np.float32))
        return finish(self._pooled(rows, self._skipped(prompt)))

    def _skipped(self, prompt: str) -> int:
        """Returns the number of tokens at the beginning of each text that are omitted from its embedding as prompt."""
        if self._pooling.includes_prompt or not prompt:
            return 0
        return self._reader.num_prompt_tokens(prompt)

    def _pooled(self, rows: Rows, skipped: int) -> Array:
        """Returns the pooled states of texts, each of which has tokens: (texts, d_model * kinds)."""
        kinds = self._pooling.kinds
        if len(kinds) == 1 and not skipped and not isinstance(self._pooling, Splade):
            return self._engine.encode(rows.ids, pooling=cast(Any, kinds[0]))
        hidden = self._engine.encode(rows.ids, pooling="none")
        if isinstance(self._pooling, Splade):
            return self._pooling(hidden, list(map(len, rows.ids)))
        return pooled(hidden, list(map(len, rows.ids)), kinds, skipped)

    def _states(self, rows: Rows) -> Sequence[Tensor]:
        """Returns the states of each text's tokens, (seqlen, d_model)."""
        hidden = torch.from_numpy(self._engine.encode(rows.ids, pooling="none"))
        return hidden.split([*map(len, rows.ids)])

    def _rows(self, texts: Iterable[str], prompt: str) -> Iterator[Rows]:
        checked = chunks(texts, functools.partial(expect_text, "sentences"))
        return made_ahead(lambda chunk: self._reader.texts(chunk, prompt), checked)


class _Finish:
    """The steps that turn pooled rows into embeddings.

    Attributes:
        width: the width of the rows.
    """

    def __init__(
        self, width: int, steps: Sequence[Callable[[Array], Array]], truncate_dim: int | None, normalizes: bool
    ) -> None:
        self.width, self._steps, self._truncate_dim, self._normalizes = width, steps, truncate_dim, normalizes

    def __call__(self, rows: Array | None) -> Array:
        """Returns the embeddings (rows, dim) for rows (rows, d_model * kinds); (0, dim) for None."""
        embeddings = np.zeros((0, self.width), np.float32) if rows is None else rows
        for step in self._steps:
            embeddings = step(embeddings)
        if self._truncate_dim is not None:
            embeddings = np.ascontiguousarray(embeddings[:, : self._truncate_dim])
        return normalized(embeddings) if self._normalizes else embeddings
