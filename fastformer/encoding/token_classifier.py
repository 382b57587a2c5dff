"""`TokenClassifier`: the classes of a text's tokens or words, such as names, also of long texts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.checkpoints.hf.common import read_numbers
from fastformer.encoding.batches import BATCH_TOKENS, check_limits, check_several, chunks
from fastformer.encoding.folder import Folder
from fastformer.encoding.folder_model import FolderModel
from fastformer.encoding.modules import Array
from fastformer.encoding.tokens import Rows
from fastformer.files import read_json
from fastformer.generation.text_io import expect_text
from fastformer.models.pretrained import CONFIG
from fastformer.settings import Count, check_value

Strategy: TypeAlias = Literal["none", "simple", "first", "average", "max"]
Entity: TypeAlias = dict[str, Any]

_CLASSIFIER = "ForTokenClassification"
_OUTPUT = "classifier"
# The activations of ModernBERT's head.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class TokenClassifier(FolderModel):
    """Classifies the tokens of texts. Results are those of transformers' pipeline "token-classification".

    Args:
        folder: the folder of a model for token classification, as transformers saves it, with its tokenizer.json.
        precision, device: see `Encoder`.

    Attributes:
        labels: the names of the classes, by index.

    Raises:
        ImportError: a library that the folder needs is not installed.
        ValueError: the model is of another kind; or see `Encoder`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Folder,
        *,
        precision: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(folder, precision, device)
        path = self._folder.path
        settings = read_json(path / CONFIG) if path.is_dir() else {}
        names = settings.get("architectures")
        if not isinstance(names, list) or not names or not str(names[0]).endswith(_CLASSIFIER):
            raise ValueError(f"expected a model for token classification in {path}, got {names}")
        self._head = _Head(path, settings)
        labels = self._folder.labels if len(self._folder.labels) == self._head.num_labels else ()
        self.labels = labels or tuple(f"LABEL_{i}" for i in range(self._head.num_labels))

    def classify(
        self,
        sentences: str | Iterable[str],
        aggregation_strategy: Strategy = "none",
        *,
        stride: int | None = None,
        ignore_labels: Sequence[str] = ("O",),
        batch_size: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> Any:
        """Returns the classes of each text's tokens.

        Args:
            sentences: a text, or texts.
            aggregation_strategy: "none": an entry for each token; else neighbours of one class are joined, and words
                have one class: "first": that of their first token, "average": of the mean scores, "max": of the token
                with the greatest score; "simple": each token has its own.
            stride: the number of tokens that neighbouring parts of a long text share, so that all of it is classified;
                None: it is cut to max_seq_length.
            ignore_labels: classes to leave out.
            batch_size, batch_tokens: see `Encoder.encode`.

        Returns:
            For each text a list of mappings: "entity" and "index", or "entity_group" if tokens are joined; "score";
            "word"; "start" and "end", the place in the text.

        Raises:
            ValueError: an item is not a text, the strategy is unknown, or a stride along with "none".
        """
        check_value("aggregation_strategy", aggregation_strategy, Strategy)
        check_value("stride", stride, Count | None)
        room = self._reader.max_len - self._reader.tokenizer.frame.num_special
        if stride is not None and (aggregation_strategy == "none" or stride >= room):
            raise ValueError(
                f"expected a stride below {room}, the tokens of a part, and an aggregation_strategy other than none, "
                f"got {stride} and {aggregation_strategy!r}"
            )
        if stride is not None and self._reader.tokenizer.side == "left":
            raise ValueError("expected no stride for a tokenizer that cuts texts at their beginning")
        texts = [sentences] if isinstance(sentences, str) else sentences
        check_several("sentences", texts)
        limits, found = check_limits(batch_tokens, batch_size), list[list[Entity]]()
        for chunk in chunks(texts, functools.partial(expect_text, "sentences")):
            found += self._classified(chunk, aggregation_strategy, stride, room, limits, set(ignore_labels))
        return found[0] if isinstance(sentences, str) else found

    def _classified(
        self,
        texts: list[str],
        strategy: Strategy,
        stride: int | None,
        room: int,
        limits: tuple[int, int | None],
        ignored: set[str],
    ) -> list[list[Entity]]:
        tokenizer = self._reader.tokenizer
        before = len(tokenizer.frame.prefix)
        parts: list[tuple[int, list[Any]]] = []  # of each row: its text, and its tokens, of `data.backend.Spelled`
        ids: list[list[int]] = []
        for place, tokens in enumerate(tokenizer.backend.spelled(texts)):
            for begin, end in _windows(len(tokens), room, stride, tokenizer.side):
                ids.append(tokenizer.frame.around([[token.id for token in tokens[begin:end]]])[0])
                parts.append((place, tokens[begin:end]))
        nothing = np.zeros((0, 0), np.float32)
        scores = self._each([Rows(ids)], nothing, limits, lambda count: None, self._scores)
        found: list[list[Entity]] = [[] for _ in texts]
        num_parts = [0] * len(texts)
        for (place, tokens), rows in zip(parts, scores, strict=True):
            entities = self._entities(tokens, rows[before : before + len(tokens)], strategy, before)
            found[place] += [each for each in entities if each.get("entity", each.get("entity_group")) not in ignored]
            num_parts[place] += 1
        return [_apart(each) if number > 1 else each for each, number in zip(found, num_parts, strict=True)]

    def _scores(self, rows: Rows) -> Iterator[Array]:
        """Yields the probabilities of the classes of each row's tokens, (tokens, num_labels)."""
        hidden = self._engine.encode(rows.ids, pooling="none")
        for states in np.split(hidden, np.cumsum([*map(len, rows.ids)])[:-1]):
            logits = self._head(states)
            shifted = np.exp(logits - logits.max(-1, keepdims=True))
            yield shifted / shifted.sum(-1, keepdims=True)

    def _entities(self, tokens: Sequence[Any], scores: Array, strategy: Strategy, first: int) -> list[Entity]:
        """Returns the entities of a part of a text, whose first token has the index `first` in its row."""
        unk = self._folder.model.config.special_ids.unk
        if strategy in ("none", "simple"):
            entities = [
                {
                    "entity": self.labels[int(row.argmax())],
                    "score": float(row.max()),
                    "index": index,
                    "word": token.text if token.id == unk else token.name,
                    "start": token.start,
                    "end": token.end,
                }
                for index, (token, row) in enumerate(zip(tokens, scores, strict=True), first)
            ]
            return entities if strategy == "none" else self._joined(entities)
        words: list[list[int]] = []
        for place, token in enumerate(tokens):
            if token.continues and token.id != unk and words:
                words[-1].append(place)
            else:
                words.append([place])
        entities = []
        for word in words:
            if strategy == "average":
                row = scores[word].mean(0)
            else:
                row = scores[word[0 if strategy == "first" else int(scores[word].max(1).argmax())]]
            names = [tokens[i].text if tokens[i].id == unk else tokens[i].name for i in word]
            entities.append(
                {
                    "entity": self.labels[int(row.argmax())],
                    "score": float(row.max()),
                    "word": self._reader.tokenizer.backend.joined(names),
                    "start": tokens[word[0]].start,
                    "end": tokens[word[-1]].end,
                }
            )
        return self._joined(entities)

    def _joined(self, entities: list[Entity]) -> list[Entity]:
        """Joins neighbours of one class; a class that begins with B- begins an entity."""
        groups: list[list[Entity]] = []
        for entity in entities:
            begins, tag = _tag(entity["entity"])
            if groups and not begins and _tag(groups[-1][-1]["entity"])[1] == tag:
                groups[-1].append(entity)
            else:
                groups.append([entity])
        return [
            {
                "entity_group": group[0]["entity"].split("-", 1)[-1],
                "score": float(np.mean([np.float32(each["score"]) for each in group])),
                "word": self._reader.tokenizer.backend.joined([each["word"] for each in group]),
                "start": group[0]["start"],
                "end": group[-1]["end"],
            }
            for group in groups
        ]


class _Head:
    """The logits of the classes of tokens, from their states.

    Attributes:
        num_labels: the number of classes.
    """

    def __init__(self, folder: Any, settings: Mapping[str, Any]) -> None:
        state = read_numbers(folder)

        def of(name: str) -> Tensor | None:
            return state[name].float() if name in state else None

        weight = of(f"{_OUTPUT}.weight")
        if weight is None or weight.dim() != 2:
            raise ValueError(
                f"expected the weights in {folder} to have a {_OUTPUT}.weight: was it saved without a head?"
            )
        self._weight, self._bias, self.num_labels = weight, of(f"{_OUTPUT}.bias"), len(weight)
        self._dense, self._norm = of("head.dense.weight"), of("head.norm.weight")
        self._dense_bias, self._norm_bias = of("head.dense.bias"), of("head.norm.bias")
        activation = settings.get("classifier_activation", "gelu")
        if self._dense is not None and activation not in _ACTIVATIONS:
            raise ValueError(f"expected a classifier_activation of {folder} in {[*_ACTIVATIONS]}, got {activation!r}")
        self._activation = _ACTIVATIONS.get(activation, F.gelu)
        self._eps = float(settings.get("norm_eps", 1e-5))

    def __call__(self, states: Array) -> Array:
        """Returns the logits (tokens, num_labels) of states (tokens, d_model) of one text."""
        with torch.inference_mode():
            x = torch.from_numpy(states)
            if self._dense is not None and self._norm is not None:
                x = self._activation(F.linear(x, self._dense, self._dense_bias))
                x = F.layer_norm(x, self._norm.shape, self._norm, self._norm_bias, self._eps)
            logits: Array = F.linear(x, self._weight, self._bias).numpy()
            return logits


def _windows(length: int, room: int, stride: int | None, side: str) -> list[tuple[int, int]]:
    """Returns the begin and the end of each part of a text of tokens."""
    if length == 0:
        return []
    if stride is None or length <= room:
        return [(0, min(length, room)) if side == "right" else (max(0, length - room), length)]
    return [(begin, min(length, begin + room)) for begin in range(0, length - stride, room - stride)]


def _tag(label: str) -> tuple[bool, str]:
    """Returns whether a label begins an entity, and its class."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _apart(entities: list[Entity]) -> list[Entity]:
    """Returns the entities of a text's parts without those that overlap a longer one, or one that is as long."""
    found: list[Entity] = []
    for entity in sorted(entities, key=lambda each: each["start"]):
        last = found[-1] if found else None
        if last is None or not last["start"] <= entity["start"] < last["end"]:
            found.append(entity)
        elif (entity["end"] - entity["start"], entity["score"]) > (last["end"] - last["start"], last["score"]):
            found[-1] = entity
    return found
