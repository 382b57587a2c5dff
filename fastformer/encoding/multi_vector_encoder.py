"""`MultiVectorEncoder`: a vector for each token of a text, and scores by late interaction, from a ColBERT's folder."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fastformer.encoding.batches import BATCH_TOKENS, check_limits, check_several, chunks, made_ahead, progress
from fastformer.encoding.folder import Folder
from fastformer.encoding.folder_model import FolderModel, check_ranking, named, one_of, ranking
from fastformer.encoding.late_interaction import LateInteraction, Task, Vectors, max_sim, max_sim_pairs
from fastformer.encoding.modules import Array, normalized
from fastformer.encoding.tokens import Rows
from fastformer.generation.text_io import expect_text
from fastformer.settings import check_value


class MultiVectorEncoder(FolderModel):
    """Computes a vector for each token of texts. Methods and arguments are called as in sentence-transformers.

    Args:
        folder: a folder of a multi-vector encoder, saved by sentence-transformers or PyLate, or of Stanford's ColBERT.
        precision: see `Encoder`.
        device: the device for the model; None: the CPU.
        prompts: prompts by name, in place of the folder's of the same names.
        default_prompt_name: replaces the folder's setting.
        similarity_fn_name: replaces the folder's setting.

    Attributes:
        prompts, default_prompt_name: see `Encoder`.
        similarity_fn_name: "maxsim": the sum, over a query's vectors, of the greatest dot product with a vector of the
            document; or "meanmaxsim": this sum divided by the number of the query's vectors.

    Raises:
        ImportError: a library that the folder needs is not installed.
        ValueError: the folder has one embedding for each text; or see `Encoder`.
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
    ) -> None:
        super().__init__(folder, precision, device, prompts, default_prompt_name)
        late = self._folder.late
        if late is None:
            raise ValueError(
                f"expected a folder with a vector for each token, got one with an embedding for each text in "
                f"{self._folder.path}: fastformer.Encoder computes it"
            )
        self._late: LateInteraction = late
        check_value("similarity_fn_name", similarity_fn_name, Literal["maxsim", "meanmaxsim"] | None)
        self.similarity_fn_name = late.similarity if similarity_fn_name is None else similarity_fn_name

    def get_embedding_dimension(self) -> int:
        """Returns the number of dimensions of a vector."""
        return self._late.width

    def encode(
        self,
        inputs: str | Iterable[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: Literal["token_embeddings"] = "token_embeddings",
        convert_to_numpy: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        pool: None = None,
        chunk_size: int | None = None,
        *,
        task: Task | None = None,
        sentences: str | Iterable[str] | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> Any:
        """Returns the vectors of texts, in their order.

        Args:
            inputs: a text, or texts, read a few thousand at a time; also by the name sentences.
            prompt_name, prompt, batch_size, show_progress_bar, device, pool, chunk_size: see `Encoder.encode`.
            output_value: "token_embeddings".
            convert_to_numpy: return arrays; False returns tensors.
            normalize_embeddings: divide each vector by its length, if the folder doesn't.
            task: "query" or "document", as `encode_query` and `encode_document` say; None: a document's vectors,
                without the limit of its length.
            batch_tokens: the most tokens that are computed together.

        Returns:
            For each text (tokens, dim) in fp32; without the list for a single text.

        Raises:
            ValueError: an item is not a text, or see `Encoder.encode`.
        """
        self._check_run(device, pool, chunk_size)
        texts = one_of(inputs, sentences)
        check_value("task", task, Task | None)
        check_value("output_value", output_value, Literal["token_embeddings"])
        check_value("normalize_embeddings", normalize_embeddings, bool)
        is_one = isinstance(texts, str)
        texts = [texts] if is_one else texts
        check_several("inputs", texts)
        limits, front = check_limits(batch_tokens, batch_size), self._prompt(prompt, prompt_name)
        nothing, vectors = np.zeros((0, self._late.width), np.float32), functools.partial(self._vectors, task=task)
        with progress(texts, show_progress_bar) as advance:
            found: list[Any] = self._each(self._rows(texts, front, task), nothing, limits, advance, vectors)
        if normalize_embeddings:
            found = [normalized(each) for each in found]
        if not convert_to_numpy:
            found = [torch.from_numpy(each).to(self.device) for each in found]
        return found[0] if is_one else found

    def encode_query(self, inputs: str | Iterable[str] | None = None, *arguments: Any, **options: Any) -> Any:
        """Calls `encode` with the task "query", and the prompt that `Encoder.encode_query` would choose."""
        return self.encode(
            inputs, **self._for_task("query", {"task": "query"} | named(self.encode, arguments, options))
        )

    def encode_document(self, inputs: str | Iterable[str] | None = None, *arguments: Any, **options: Any) -> Any:
        """Calls `encode` with the task "document", and the prompt that `Encoder.encode_document` would choose."""
        return self.encode(
            inputs, **self._for_task("document", {"task": "document"} | named(self.encode, arguments, options))
        )

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Returns the scores of documents for queries, (queries, documents).

        Args:
            embeddings1: the vectors of queries, a list of tensors or arrays (tokens, dim); or of one query.
            embeddings2: the vectors of documents, likewise.
        """
        mean = self.similarity_fn_name == "meanmaxsim"
        return max_sim(_lists(embeddings1), _lists(embeddings2), mean=mean)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Returns the score of each document for the query in the same place, (documents,); see `similarity`."""
        mean = self.similarity_fn_name == "meanmaxsim"
        return max_sim_pairs(_lists(embeddings1), _lists(embeddings2), mean=mean)

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> list[dict[str, Any]]:
        """Ranks documents by their scores for a query, best first; see `CrossEncoder.rank`."""
        top_k = check_ranking(query, documents, top_k)
        texts = list(documents)
        vectors = self.encode_document(
            texts, batch_size=batch_size, show_progress_bar=show_progress_bar, batch_tokens=batch_tokens
        )
        scores = self.similarity(self.encode_query([query]), vectors)[0].tolist()
        return ranking(scores, top_k, texts if return_documents else None)

    def _rows(self, texts: Iterable[str], prompt: str, task: str | None) -> Iterator[Rows]:
        return made_ahead(
            lambda chunk: self._read(chunk, prompt, task), chunks(texts, functools.partial(expect_text, "inputs"))
        )

    def _read(self, texts: Sequence[str], prompt: str, task: str | None, *, cuts: bool = True) -> Rows:
        most = self._late.max_len(task, self._reader.max_len)
        return self._reader.texts(texts, prompt, cuts=cuts, max_len=most)

    def _vectors(self, rows: Rows, task: str | None) -> Vectors:
        """Returns the vectors of texts, each of which has tokens."""
        ids, gaps, counts = self._late.expanded(rows.ids, task)
        hidden = self._engine.encode(ids, pooling="none", gaps=gaps)
        return self._late.vectors(hidden, ids, task, counts, is_first=gaps is not None)


def _lists(embeddings: Any) -> list[Array]:
    """Returns the vectors of each text as fp32 arrays; (tokens, dim) is one text."""
    if isinstance(embeddings, Tensor | np.ndarray) and embeddings.ndim == 2:
        embeddings = [embeddings]
    arrays = [np.asarray(each.cpu() if isinstance(each, Tensor) else each, np.float32) for each in embeddings]
    for each in arrays:
        if each.ndim != 2:
            raise ValueError(f"expected the vectors of a text as (tokens, dim), got {each.shape}")
    return arrays
