"""The ids that are not text: padding, the ends of a sequence, the unknown token, and a decoder's start.

They belong to a model, which saves them in its config, and to the tokenizer that it was trained with. Only this module
defines their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from fastformer.settings import suggestion


@dataclass(frozen=True, init=False)
class SpecialIds:
    """The ids with a special meaning.

    Args:
        pad: the id that fills a batch after shorter sequences. An encoder-decoder model embeds it as the zero vector,
            so it doesn't end sequences. A language model without a separate id for padding has one of its eos here: in
            that case no id in a prompt is padding, unless an attention_mask hides it.
        eos: the ids that end a sequence: one, or several, each of which ends generation. The first of them is appended
            to sources, targets and documents. None, an empty sequence, is for a language model whose texts end only at
            a limit; in this case, too, no id in its prompts is padding.
        unk: the id of text that the tokenizer has no token for; None: the vocabulary has no such id.
        start: the first input of an encoder-decoder model's decoder. If it equals pad, it is the zero vector
            (tensor2tensor); a separate token has a learned embedding.

    Raises:
        ValueError: a value isn't an id, an eos occurs twice, or unk equals another id.
    """

    pad: int = 0
    eos: tuple[int, ...] = (1,)
    unk: int | None = 2
    start: int = 0

    def __init__(
        self,
        pad: int = pad,
        eos: int | Sequence[int] = eos,
        unk: int | None = unk,
        start: int = start,
    ) -> None:
        _check_id("pad", pad)
        if isinstance(eos, str | bytes) or not isinstance(eos, int | Sequence):
            raise ValueError(f"expected eos to be an id or a sequence of ids, got {eos!r}")
        ends = (eos,) if isinstance(eos, int) else tuple(eos)
        for end in ends:
            _check_id("eos", end)
        if len(set(ends)) < len(ends):
            raise ValueError(f"expected different ids of eos, got {list(ends)}")
        if unk is not None:
            _check_id("unk", unk)
        _check_id("start", start)
        if unk is not None and unk in (pad, *ends):
            other = "pad" if unk == pad else "eos"
            raise ValueError(
                f"expected unk and {other} to be different ids, got {unk} for both: give unk too, None if there is none"
            )
        for name, value in (("pad", pad), ("eos", ends), ("unk", unk), ("start", start)):
            object.__setattr__(self, name, value)

    @property
    def first_eos(self) -> int:
        """The id of eos that is appended to sources, targets and documents.

        Raises:
            ValueError: the model has no eos.
        """
        if not self.eos:
            raise ValueError("expected a model with an id of eos, got one whose texts have no end")
        return self.eos[0]

    def check(self, vocab_size: int, *, reads_sources: bool = False) -> None:
        """Checks the ids against a vocabulary.

        The default unk may be outside of a vocabulary of two, because no model reads it.

        Args:
            vocab_size: the number of ids in the vocabulary.
            reads_sources: whether the model is an encoder-decoder, whose pad is not text.

        Raises:
            ValueError: the vocabulary lacks an id; or an encoder-decoder model has no eos, or pad as one.
        """
        if reads_sources and not self.eos:
            raise ValueError("expected eos to be at least one id, got none")
        if reads_sources and self.pad in self.eos:
            raise ValueError(f"expected pad and eos to be different ids, got {self.pad} for both")
        for name, ids in (("pad", (self.pad,)), ("eos", self.eos), ("unk", (self.unk,)), ("start", (self.start,))):
            size = max(vocab_size, SpecialIds.unk + 1) if name == "unk" else vocab_size  # type: ignore[operator]
            for i in ids:
                if i is not None and i >= size:
                    raise ValueError(f"expected special ids below the vocabulary's size {vocab_size}, got {name} {i}")

    def check_tokenizer(self, tokenizer_ids: SpecialIds, model: str) -> None:
        """Checks a model's ids against those of the tokenizer that it is used with.

        Args:
            tokenizer_ids: the ids of the tokenizer.
            model: the model's name in the message.

        Raises:
            ValueError: the ids differ.
        """
        if self != tokenizer_ids:
            raise ValueError(
                f"expected a tokenizer with the special ids of {model}, {self}, got one with {tokenizer_ids}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> SpecialIds:
        """Makes the ids from plain values, as `dataclasses.asdict` returns them; missing ones have their defaults.

        Raises:
            ValueError: an unknown name (the nearest one is suggested), or a value that is not allowed.
        """
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(f"special_ids has no {name!r}{suggestion(name, names)}")
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def of(cls, config: object) -> SpecialIds:
        """Returns the ids in the config of any model.

        They are its `special_ids`, or its own fields pad, eos, unk and start, if the model's class is independent of
        fastformer. If it has neither, they are the defaults.
        """
        special_ids = getattr(config, "special_ids", None)
        if isinstance(special_ids, cls):
            return special_ids
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)})


def _check_id(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected {name} to be an id, an integer of at least 0, got {value!r}")
