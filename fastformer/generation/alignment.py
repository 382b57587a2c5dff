"""Word alignments of sources and translations, from the decoder's cross-attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from fastformer.generation.evaluation import evaluating
from fastformer.generation.inputs import batches_by_length, pad
from fastformer.generation.model_protocols import Model, device_of
from fastformer.generation.scoring import encoded_pair
from fastformer.generation.text_io import ErrorPolicy, TextError
from fastformer.settings import Positive, check_value
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    from fastformer.generation.pair_encoder import PairEncoder
    from fastformer.generation.text_io import Answer

Unit = Literal["words", "tokens"]
Alignment: TypeAlias = list[tuple[int, int]]  # pairs of a source and a target place, in the order of the target
Places: TypeAlias = list[range]  # the words that each token belongs to; a token that is only a space belongs to none

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_PAIRS = 2**17  # of positions in a batch: the attention maps of all heads and layers are in memory together


class Side(NamedTuple):
    """A text as a model reads or writes it.

    Attributes:
        ids: the ids, without EOS.
        places: the words that each id belongs to.
        num_places: the number of words, or of tokens.
    """

    ids: Sequence[int]
    places: Places
    num_places: int


def cross_attention(model: Model, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """Returns the decoder's cross-attention while it produces given tokens.

    Args:
        model: a model with `attention_maps`; it is set to evaluation while it runs.
        pairs: ids of a source and of its translation, without the start token.

    Returns:
        For each pair (num_layers, num_heads, len(target), len(source)), fp32, on the CPU. A row holds the
        weights with which its token is chosen.

    Raises:
        ValueError: a model without `attention_maps`.
    """
    attention_maps = check_attention(model)
    special, device = SpecialIds.of(model.config), device_of(model)
    maps: list[Any] = [None] * len(pairs)
    lengths = {place: max(map(len, pair)) for place, pair in enumerate(pairs)}
    for places in batches_by_length(lengths, lambda count, longest: count * longest**2 <= _MOST_PAIRS):
        sources = pad([pairs[place][0] for place in places], special.pad).to(device)
        shifted = pad([[special.start, *pairs[place][1][:-1]] for place in places], special.pad).to(device)
        with evaluating(model), torch.inference_mode():
            weights = attention_maps(sources, shifted)["cross"]
        for row, place in enumerate(places):
            source, target = pairs[place]
            maps[place] = weights[:, row, :, : len(target), : len(source)].float().cpu().clone()
    return maps


def check_attention(model: Model) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """Returns the `attention_maps` of a model.

    Raises:
        ValueError: the model has no `attention_maps`.
    """
    attention_maps: Callable[[Tensor, Tensor], dict[str, Tensor]] | None = getattr(model, "attention_maps", None)
    if attention_maps is None:
        raise ValueError(f"expected a model with attention_maps, which {type(model).__name__} doesn't have")
    return attention_maps


class Aligner:
    """Aligns sources with their translations.

    Each word of a translation is aligned with the one source word that its tokens look at most while they are chosen:
    their weights on the tokens of the source word are summed. EOS counts on neither side, and neither does a language
    token.

    Args:
        translator: has the model and the tokenizer.
        unit: align "words", which are separated by spaces, or "tokens".
        layer: the decoder layer, from 1, whose attention is used; None: see `default_layer`.
        head: the head of that layer, from 1; None: the mean of all heads.

    Raises:
        ValueError: the model has no `attention_maps`; another unit; a layer or a head that isn't an integer of at least
            1.
    """

    def __init__(
        self, translator: PairEncoder, unit: Unit = "words", layer: int | None = None, head: int | None = None
    ) -> None:
        check_attention(translator.model)
        if unit not in get_args(Unit):
            raise ValueError(f"expected unit to be 'words' or 'tokens', got {unit!r}")
        for name, value in (("layer", layer), ("head", head)):
            check_value(name, value, Positive | None)
        self.translator, self._unit, self._layer, self._head = translator, unit, layer, head
        self._eos = SpecialIds.of(translator.model.config).eos
        languages = getattr(translator.tokenizer, "languages", None)
        if languages is not None and languages.places not in ("front", "asked"):
            raise ValueError("expected a model whose language token comes before the text, to align, got one after it")
        self._languages = frozenset() if languages is None else frozenset(languages.ids.values())
        self._most_told = 0 if languages is None else 1 + len(languages.lead)

    def source(self, text: str, ids: Sequence[int]) -> Side:
        """Makes the `Side` of a source from its text and ids."""
        return self._written(text, ids, self.translator.tokenizer.encode)

    def target(self, text: str, ids: Sequence[int]) -> Side:
        """Makes the `Side` of a translation from its text and ids."""
        return self._written(text, ids, self.translator.encode_target)

    def said(self, ids: Sequence[int], text: str) -> Side:
        """Makes the `Side` of a generated translation. A stop text may end its text before its last token."""
        ids = self._without_eos(ids)
        if self._unit == "tokens":
            return self._each(ids)
        offset = self._told(ids)
        places, count = said_words(ids[offset:], self.translator.tokenizer.decode)
        count = min(count, len(text.split()))
        places = [range(0)] * offset + [range(min(mine.start, count), min(mine.stop, count)) for mine in places]
        return Side(ids, places, count)

    def _written(self, text: str, ids: Sequence[int], encode: Callable[[str], Sequence[int]]) -> Side:
        ids = self._without_eos(ids)
        if self._unit == "tokens":
            return self._each(ids)
        offset = self._told(ids)
        return Side(ids, [range(0)] * offset + written_words(text, ids[offset:], encode), len(text.split()))

    def _each(self, ids: Sequence[int]) -> Side:
        """Makes a `Side` with one place for each token, except tokens that name the language."""
        offset = self._told(ids)
        count = len(ids) - offset
        return Side(ids, [range(0)] * offset + [range(place, place + 1) for place in range(count)], count)

    def _told(self, ids: Sequence[int]) -> int:
        """Returns the number of ids at the beginning that name the language."""
        return next(
            (place + 1 for place in range(self._most_told) if ids[place : place + 1] and ids[place] in self._languages),
            0,
        )

    def _without_eos(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self._eos else ids

    def align(self, pairs: Sequence[tuple[Side, Side]]) -> list[Alignment]:
        """Aligns sources with their translations. An alignment is empty if either side has no words.

        Raises:
            ValueError: the model doesn't have the layer or the head.
        """
        eos = self._eos[0]
        worth = [place for place, (source, target) in enumerate(pairs) if source.num_places and target.num_places]
        alignments: list[Alignment] = [[] for _ in pairs]
        ids = [([*pairs[place][0].ids, eos], [*pairs[place][1].ids, eos]) for place in worth]
        for place, weights in zip(worth, cross_attention(self.translator.model, ids), strict=True):
            source, target = pairs[place]
            chosen = self._chosen(weights)[: len(target.ids), : len(source.ids)].double()
            scores = _members(target) @ chosen @ _members(source).T
            covered = [word for word in range(target.num_places) if any(word in places for places in target.places)]
            alignments[place] = [(int(scores[word].argmax()), word) for word in covered]
        return alignments

    def _chosen(self, weights: Tensor) -> Tensor:
        """Returns the weights of the layer and of the head, or of the mean of its heads: (target, source)."""
        layer = default_layer(len(weights)) if self._layer is None else self._layer
        for name, value, most in (("layer", layer, len(weights)), ("head", self._head or 1, weights.shape[1])):
            if value > most:
                raise ValueError(f"expected a {name} from 1 to {most}, as the model's decoder has, got {value}")
        heads = weights[layer - 1]
        return heads.mean(0) if self._head is None else heads[self._head - 1]


def default_layer(num_layers: int) -> int:
    """Returns the layer, from 1, that usually aligns best: the last but one (Garg et al. 2019), or the only one."""
    return max(num_layers - 1, 1)


def _members(side: Side) -> Tensor:
    """Returns a matrix (num_places, len(ids)) that is 1 if a token belongs to a word, else 0."""
    members = torch.zeros(side.num_places, len(side.ids), dtype=torch.float64, device="cpu")
    for place, words in enumerate(side.places):
        members[list(words), place] = 1.0
    return members


def written_words(text: str, ids: Sequence[int], encode: Callable[[str], Sequence[int]]) -> Places:
    """Returns for each token of a text the words that it belongs to.

    Args:
        text: the text; whitespace separates its words.
        ids: the ids of the text, without EOS.
        encode: the function that made the ids.
    """
    places: Places = [range(0)] * len(ids)
    end = done = 0
    for word, spelled in enumerate(text.split()):
        begin = text.index(spelled, end)
        end = begin + len(spelled)
        # Tokens that the text up to a place shares with the whole text are complete there: up to the word, and up to
        # its end.
        first, last = (len(commonprefix([list(encode(text[:place])), list(ids)])) for place in (begin, end))
        first = max(first, done)
        done = max(last, first)
        places[first:done] = [range(word, word + 1)] * (done - first)
    return places


def said_words(ids: Sequence[int], decode: Callable[[Iterable[int]], str]) -> tuple[Places, int]:
    """Returns for each token of a decoded text the words that it belongs to, and the number of words."""
    places: Places = []
    before = ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end])
        added = text[len(commonprefix([before.rstrip(), text])) :]
        count, known = len(text.split()), len(before.split())
        goes_on = known > 0 and not added[:1].isspace()
        # A token that is one byte of a character may leave the decoded text unchanged.
        is_said = bool(added.strip()) or (not added and text.endswith(_BROKEN))
        places.append(range(known - goes_on, count) if is_said else range(0))
        before = text
    return places, len(before.split())


def align_texts(
    aligner: Aligner, pairs: Iterable[tuple[str | TextError, str | TextError]], errors: ErrorPolicy
) -> list[Alignment]:
    """Yields the alignment of each text with its translation; see `Translator.align`."""
    sides: list[tuple[Side, Side]] = []
    nothing = Side((), [], 0)
    for number, (text, translation) in enumerate(pairs, 1):
        try:
            encoded = encoded_pair(aligner.translator, text, translation, number)
        except TextError as error:
            errors.handle(error)
            encoded = None
        if encoded is None:
            sides.append((nothing, nothing))
            continue
        source, target = encoded
        sides.append((aligner.source(str(text), source), aligner.target(str(translation), target)))
    errors.report(len(sides))
    return aligner.align(sides)


def align_answers(aligner: Aligner, texts: Sequence[str], answers: Sequence[Answer]) -> list[list[Alignment]]:
    """Returns the alignments of texts with each of the translations that a translator made."""
    pairs = [
        (aligner.source(text, source), aligner.said(target, translation))
        for text, answer in zip(texts, answers, strict=True)
        for (source, target), translation in zip(answer.sequences, answer.texts(), strict=True)
    ]
    alignments = iter(aligner.align(pairs))
    return [[next(alignments) for _ in answer.sequences] for answer in answers]


def pharaoh(alignment: Alignment) -> str:
    """Formats an alignment as "0-0 1-2": the source and target place, from 0, of each pair."""
    return " ".join(f"{source}-{target}" for source, target in alignment)
