"""Late interaction, as ColBERT has it: a vector for each token of a text, and scores by the best match of each token.

sentence-transformers, PyLate and Stanford's ColBERT name the same settings differently; `late_settings` reads all
three.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastformer.checkpoints.hf.common import flag_of, number_of
from fastformer.encoding.engine import Gaps
from fastformer.encoding.modules import Array, Dense, RowLayer
from fastformer.files import read_json
from fastformer.settings import Positive, check_value

Task: TypeAlias = Literal["query", "document"]
Vectors: TypeAlias = npt.NDArray[np.object_]  # of one array (tokens, dim) for each text

TASKS: tuple[Task, ...] = ("query", "document")
_SIMILARITIES = ("maxsim", "meanmaxsim")
_EMPTY_DOCUMENT = -1e9  # the score of a document without a vector, as in sentence-transformers
_MASK = "MultiVectorMask"
_COLBERT = "ColBERT"  # PyLate's name
_STANFORD = "HF_ColBERT"
_STANFORD_SETTINGS = "artifact.metadata"
_USUAL_LENGTH = 32  # of a query with its expansion, if the folder doesn't name one
# Settings by which PyLate's folders are known, if they don't name their kind.
_PYLATE = (
    "query_length", "document_length", "query_expansion", "query_prefix", "document_prefix", "skiplist_words",
    "do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Expansion:
    """The tokens that are appended to queries.

    Attributes:
        token: their id.
        length: the number of tokens that a shorter query is expanded to.
        cuts: whether longer queries are cut to this length.
        attends: whether the other tokens attend to them.
    """

    token: int
    length: int
    cuts: bool = True
    attends: bool = False


@dataclass(frozen=True)
class LateInteraction:
    """How the states of a text's tokens become its vectors.

    Attributes:
        steps: the layers behind the model, on each token.
        width: the number of dimensions of a vector.
        expansion: the expansion of queries; None: they aren't expanded.
        lengths: the most tokens of a text, by its task.
        skipped: ids whose vectors are left out.
        skips: the tasks whose texts leave them out.
        only: ids to which the vectors of documents are restricted; empty: all.
        keeps_expansion: whether the vectors of expansions count.
        similarity: "maxsim", or "meanmaxsim", which divides by the number of the query's vectors.
        window: how far tokens see each other in the layers that see the least; None: everywhere.
    """

    steps: tuple[RowLayer, ...]
    width: int
    expansion: Expansion | None = None
    lengths: Mapping[str, int] | None = None
    skipped: frozenset[int] = frozenset()
    skips: frozenset[str] = frozenset({"document"})
    only: frozenset[int] = frozenset()
    keeps_expansion: bool = True
    similarity: str = "maxsim"
    window: int | None = None

    def max_len(self, task: str | None, most: int) -> int:
        """Returns the most tokens of a text, without its expansion.

        Args:
            task: "query", "document" or None.
            most: the most tokens of a text of no task.
        """
        length = (self.lengths or {}).get(task or "")
        if task == "query" and self.expansion is not None:
            if self.expansion.cuts:
                return self.expansion.length
            length = None if length is None else max(length, self.expansion.length)
        return most if length is None else length

    def expanded(self, ids: Sequence[list[int]], task: str | None) -> tuple[list[list[int]], Gaps | None, list[int]]:
        """Returns the ids of texts with their expansions, the places of these tokens, and the expansions' lengths.

        Expansions that aren't attended to come before the other tokens.
        """
        if task != "query" or self.expansion is None:
            return list(ids), None, [0] * len(ids)
        token, length = self.expansion.token, self.expansion.length
        counts = [max(0, length - len(row)) for row in ids]
        if self.expansion.attends or not any(counts):
            return [[*row, *[token] * count] for row, count in zip(ids, counts, strict=True)], None, counts
        if self.window is not None and max(counts) > self.window:
            raise ValueError(
                f"expected queries that their expansions to {length} tokens can see through a window of "
                f"{self.window} tokens, got one of {length - max(counts)}: expansions would see no token"
            )
        places = [
            [*range(len(row), len(row) + count), *range(len(row))] if count else []
            for row, count in zip(ids, counts, strict=True)
        ]
        whole = [[*[token] * count, *row] for row, count in zip(ids, counts, strict=True)]
        return whole, Gaps(places, places, counts), counts

    def vectors(
        self, hidden: Array, ids: Sequence[list[int]], task: str | None, counts: Sequence[int], *, is_first: bool
    ) -> Vectors:
        """Returns the vectors of texts, (tokens, width) each.

        Args:
            hidden: (tokens, d_model), the states of all tokens, the texts concatenated.
            ids: the ids of each text, with its expansion.
            task: the task of the texts.
            counts: the number of tokens in each text's expansion.
            is_first: whether expansions come before the other tokens; their vectors come behind them.
        """
        vectors = np.empty(len(ids), object)
        skipped = self.skipped if (task or "document") in self.skips else frozenset[int]()
        only = self.only if task != "query" else frozenset[int]()
        begin = 0
        for place, (row, count) in enumerate(zip(ids, counts, strict=True)):
            states = hidden[begin : begin + len(row)]
            begin += len(row)
            order = [*range(count, len(row)), *range(count)] if is_first else [*range(len(row))]
            order = order if self.keeps_expansion else order[: len(row) - count]
            kept = [i for i in order if row[i] not in skipped and (not only or row[i] in only)]
            vectors[place] = self._finished(states if kept == [*range(len(row))] else states[kept])
        return vectors

    def _finished(self, rows: Array) -> Array:
        # Text by text: a product with other rows sums in a different order.
        for step in self.steps:
            rows = step.of_text(rows) if isinstance(step, Dense) else step(rows)
        return np.array(rows, np.float32)


def max_sim(queries: Sequence[Array], documents: Sequence[Array], *, mean: bool = False) -> Tensor:
    """Returns the score of each document for each query, (queries, documents).

    A score is the sum, over the query's vectors, of the greatest dot product with a vector of the document.

    Args:
        queries, documents: the vectors (tokens, dim) of each text.
        mean: divide by the number of the query's vectors.
    """
    counts = [len(query) for query in queries]
    scores = torch.full((len(queries), len(documents)), _EMPTY_DOCUMENT)
    if not counts:
        return scores
    rows = torch.from_numpy(np.concatenate(list(queries)))
    places = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    with torch.inference_mode():
        for place, document in enumerate(documents):
            if len(document):
                best = (rows @ torch.from_numpy(document).T).amax(1)
                scores[:, place] = torch.zeros(len(counts)).index_add_(0, places, best)
        return scores / torch.tensor(counts).clamp(min=1)[:, None] if mean else scores


def max_sim_pairs(queries: Sequence[Array], documents: Sequence[Array], *, mean: bool = False) -> Tensor:
    """Returns the score of each document for the query in the same place, (documents,); see `max_sim`."""
    if len(queries) != len(documents):
        raise ValueError(f"expected as many documents as queries, {len(queries)}, got {len(documents)}")
    pairs = zip(queries, documents, strict=True)
    return torch.cat([torch.zeros(0), *(max_sim([one], [other], mean=mean)[0] for one, other in pairs)])


def is_late(kinds: Sequence[str], settings: Mapping[str, Any], foreign: Mapping[str, Any]) -> bool:
    """Returns whether a folder has a vector for each token.

    Args:
        kinds: the modules of its modules.json.
        settings, foreign: its config_sentence_transformers.json and config.json.
    """
    names = foreign.get("architectures")
    is_stanford = not kinds and isinstance(names, list) and _STANFORD in names
    return is_stanford or _MASK in kinds or settings.get("model_type") in ("MultiVectorEncoder", _COLBERT)


@dataclass(frozen=True)
class LateSettings:
    """The settings of a folder, as sentence-transformers names them.

    Attributes:
        expansion: query_expansion; None: queries aren't expanded.
        lengths: query_length and document_length, by task.
        prompts: the prompts, by name.
        markers: the beginnings of prompts that are to be one token each, if the vocabulary has it.
        mask: skiplist_words, skiplist_tasks and keep_only_token_ids; None: no vectors are left out.
        has_projection: whether the model's own file has the projection.
        adds_norm: whether the vectors are normalised, though modules.json doesn't say so.
    """

    expansion: Mapping[str, Any] | None
    lengths: dict[str, int]
    prompts: dict[str, str]
    markers: tuple[str, ...] = ()
    mask: Mapping[str, Any] | None = None
    has_projection: bool = False
    adds_norm: bool = False


def late_settings(
    folder: Path,
    settings: Mapping[str, Any],
    model_settings: Mapping[str, Any],
    mask: Mapping[str, Any] | None,
    prompts: Mapping[str, str],
    *,
    has_modules: bool,
) -> LateSettings:
    """Returns the settings of a folder for which `is_late` is True.

    Args:
        folder: the folder.
        settings: its config_sentence_transformers.json.
        model_settings: the settings next to the model.
        mask: the config.json of its MultiVectorMask; None: there is none.
        prompts: the prompts of `settings`.
        has_modules: whether it has a modules.json; if not, it is one of Stanford's ColBERT.
    """
    if not has_modules:
        return _stanford_settings(folder)
    own = {name: model_settings[name] for name in ("query_length", "document_length", "query_expansion")
           if name in model_settings}  # fmt: skip
    inherited = {name: settings[name] for name in ("query_length", "document_length") if settings.get(name) is not None}
    if "query_expansion" in settings:
        inherited["query_expansion"] = settings["query_expansion"]
    elif settings.get("do_query_expansion") is False:
        inherited["query_expansion"] = None
    elif any(name in settings for name in _PYLATE):
        attends = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        length = inherited.pop("query_length", _USUAL_LENGTH)
        inherited["query_expansion"] = {"strategy": "fixed", "attend": bool(attends), "length": length}
    values = {**inherited, **own}
    markers, texts = list[str](), dict(prompts)
    for key, name in (("query_prefix", "query"), ("document_prefix", "document")):
        if key in settings:
            marker = settings[key] or ""
            if not isinstance(marker, str):
                raise ValueError(f"expected {key} of {folder} to be a text, got {marker!r:.60}")
            markers.append(marker)
            texts[name] = marker + texts.get(name, "").removeprefix(marker)
    is_pylate = settings.get("model_type") == _COLBERT and mask is None
    words = settings.get("skiplist_words")
    pylate_mask = {"skiplist_words": list(string.punctuation) if words is None else words}
    lengths: dict[str, int] = {
        task: number_of(values, f"{task}_length") for task in TASKS if values.get(f"{task}_length") is not None
    }
    return LateSettings(
        values.get("query_expansion"),
        lengths,
        texts,
        tuple(marker for marker in markers if marker.strip()),
        pylate_mask if is_pylate else mask,
        adds_norm=is_pylate,
    )


def _stanford_settings(folder: Path) -> LateSettings:
    file = folder / _STANFORD_SETTINGS
    values = read_json(file) if file.is_file() else {}
    prompts = {
        "query": (values.get("query_token_id") or "[unused0]") + " ",
        "document": (values.get("doc_token_id") or "[unused1]") + " ",
    }
    lengths = {} if values.get("doc_maxlen") is None else {"document": number_of(values, "doc_maxlen")}
    expansion = {
        "strategy": "fixed",
        "attend": flag_of(values, "attend_to_mask_tokens", False),
        "length": values.get("query_maxlen") or _USUAL_LENGTH,
    }
    words = list(string.punctuation) if flag_of(values, "mask_punctuation", True) else []
    mask = {"skiplist_words": words}
    return LateSettings(expansion, lengths, prompts, tuple(prompts.values()), mask, has_projection=True, adds_norm=True)


def make_late(
    folder: Path,
    settings: LateSettings,
    steps: tuple[RowLayer, ...],
    tokenizer: Any,
    config: Any,
    similarity: object,
    mask_token: str | None,
) -> LateInteraction:
    """Returns the late interaction of a folder.

    Args:
        folder: the folder.
        settings: its settings.
        steps: the layers behind the model.
        tokenizer: the model's tokenizer.
        config: the model's config.
        similarity: the similarity that the folder names; those of single vectors don't count.
        mask_token: the tokenizer's mask token, or, if it has none, its end of texts; None: it has neither.

    Raises:
        ValueError: a setting is unknown, or names a token that the vocabulary doesn't have.
    """
    ids = {tokenizer.backend.id_to_token(i): i for i in range(tokenizer.backend.size)}
    for marker in settings.markers:
        _make_whole(tokenizer, marker, ids)
    mask = settings.mask or {}
    for name, kind in (("skiplist_words", str), ("skiplist_tasks", str), ("keep_only_token_ids", int)):
        given = mask.get(name) or ()
        if isinstance(given, str) or not all(isinstance(value, kind) for value in given):
            raise ValueError(f"expected {name} of {folder} to be a list, got {given!r:.60}")
    tasks = mask.get("skiplist_tasks")
    width = next((step.out_features for step in reversed(steps) if step.out_features), None) or int(config.d_model)
    return LateInteraction(
        steps=steps,
        width=width,
        expansion=_expansion(folder, settings.expansion, ids, mask_token),
        lengths={task: min(length, config.max_len) for task, length in settings.lengths.items()},
        skipped=frozenset(ids[word] for word in mask.get("skiplist_words") or () if word in ids),
        skips=frozenset(("document",) if tasks is None else tasks),
        only=frozenset(mask.get("keep_only_token_ids") or ()),
        keeps_expansion=settings.mask is not None,
        similarity=str(similarity) if similarity in _SIMILARITIES else _SIMILARITIES[0],
        window=int(config.window_size) if any(config.windows) else None,
    )


def _expansion(
    folder: Path, values: Mapping[str, Any] | None, ids: Mapping[str | None, int], mask_token: str | None
) -> Expansion | None:
    if values is None:
        return None
    strategy, length, token = values.get("strategy"), values.get("length"), values.get("token") or mask_token
    if strategy not in ("fixed", "min"):
        raise ValueError(f"expected a query_expansion of {folder} with a strategy of fixed or min, got {strategy!r}")
    check_value("query_expansion's length", length, Positive)
    if token not in ids:
        raise ValueError(f"expected a query_expansion of {folder} with a token of the vocabulary, got {token!r}")
    return Expansion(ids[token], int(length or 0), strategy == "fixed", flag_of(values, "attend", False))


def _make_whole(tokenizer: Any, marker: str, ids: Mapping[str | None, int]) -> None:
    """Makes the tokenizer recognise a marker of prompts as one token, if its vocabulary has it."""
    for token in (marker, marker.split()[0]):
        if token in ids:
            if tokenizer.encode_template(token) != [ids[token]]:
                tokenizer.backend.add_control(token)
            return


def mask_token_of(folder: Path) -> str | None:
    """Returns the mask token of a tokenizer's folder, or else its end of texts; None: it names neither."""
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    settings = [read_json(file) for file in files if file.is_file()]
    for token in (values.get(name) for name in ("mask_token", "eos_token") for values in settings):
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None
