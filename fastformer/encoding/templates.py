"""Rows of texts and pairs that a folder's chat template writes, as those of generative rerankers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from fastformer.data.tokenizer import Tokenizer
from fastformer.encoding.tokens import Pair, Reader, Rows
from fastformer.generation.chat_template import ChatTemplate

Format: TypeAlias = Literal["flat", "structured"]
Messages: TypeAlias = list[dict[str, Any]]

_ROLES = ("query", "document")
_PROBES: tuple[Pair, ...] = (("0", "0"), ("1 2 3 4", "0"), ("0", "1 2 3 4"))
# What sentence-transformers recognises a template by whose contents are lists of parts.
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")


def format_of(template: str) -> Format:
    """Returns the format of the contents that a template reads: texts, or lists of parts."""
    return "structured" if any(pattern in template for pattern in _STRUCTURED) else "flat"


class TemplateReader(Reader):
    """Makes rows by a chat template: a text is the message of a user, a pair one of a query and one of a document.

    A prompt is the message of the system. A row that is too long is cut, and ends with what the template writes behind
    all texts, such as the beginning of an answer, whose logits are read.

    Args:
        tokenizer, max_len: see `Reader`.
        template: the chat template.
        structured: whether the content of a message is a list of parts, or else a text.
        variables: what the template may read beside the messages.
        restores: whether a row that was cut ends as the template ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_len: int,
        template: ChatTemplate,
        *,
        structured: bool,
        variables: Mapping[str, Any],
        restores: bool = True,
    ) -> None:
        super().__init__(tokenizer, max_len)
        self._template, self._structured, self._restores = template, structured, restores
        self._variables = {"add_generation_prompt": False, **variables}
        self._endings: dict[tuple[str, int], list[int]] = {}
        self._carries_pairs = False

    def texts(self, texts: Sequence[str], prompt: str = "", *, cuts: bool = True, max_len: int | None = None) -> Rows:
        """See `Reader.texts`."""
        return self._rows([(text,) for text in texts], prompt, cuts, max_len)

    def pairs(self, pairs: Sequence[Pair], prompt: str = "", *, cuts: bool = True) -> Rows:
        """See `Reader.pairs`.

        Raises:
            ValueError: also if the template doesn't write both texts of a pair.
        """
        if pairs and not self._carries_pairs:
            self._check_pairs()
        return self._rows(pairs, prompt, cuts)

    def num_prompt_tokens(self, prompt: str) -> int:
        """Returns 0: no pooling omits the message of the system."""
        return 0

    def _rows(self, texts: Sequence[Sequence[str]], prompt: str, cuts: bool, max_len: int | None = None) -> Rows:
        def encode(max_len: int, lengths: list[int]) -> list[list[int]]:
            return [self._encode(each, prompt, max_len, lengths) for each in texts]

        return Rows(self._encoded(encode, cuts, max_len))

    def _encode(self, texts: Sequence[str], prompt: str, max_len: int, lengths: list[int]) -> list[int]:
        ids = self._template.encode(self._messages(texts, prompt), self.tokenizer, **self._variables)
        lengths.append(len(ids))
        if len(ids) <= max_len:
            return ids
        ids = ids[:max_len] if self.tokenizer.side == "right" else ids[len(ids) - max_len :]
        ending = self._ending(prompt, len(texts))[-max_len:] if self._restores else []
        return ids[: len(ids) - len(ending)] + ending

    def _messages(self, texts: Sequence[str], prompt: str) -> Messages:
        roles = _ROLES if len(texts) == 2 else ("user",)
        named = [*([("system", prompt)] if prompt else []), *zip(roles, texts, strict=True)]
        return [
            {"role": role, "content": [{"type": "text", "text": text}] if self._structured else text}
            for role, text in named
        ]

    def _ending(self, prompt: str, num_texts: int) -> list[int]:
        """Returns the ids with which the template ends, whatever the texts."""
        key = (prompt, num_texts)
        if key not in self._endings:
            first, second = (
                self._template.encode(self._messages([text] * num_texts, prompt), self.tokenizer, **self._variables)
                for text in _PROBES[1]
            )
            common = os.path.commonprefix([first[::-1], second[::-1]])
            self._endings[key] = [*common][::-1] if len(common) < min(len(first), len(second)) else []
        return self._endings[key]

    def _check_pairs(self) -> None:
        written = [self._template.render(self._messages(pair, ""), **self._variables) for pair in _PROBES]
        missing = [role for role, text in zip(_ROLES, written[1:], strict=True) if text == written[0]]
        if missing:
            raise ValueError(
                f"expected a chat template that writes the messages of the roles {' and '.join(_ROLES)}, got one "
                f"without {' and '.join(missing)}: give chat_template, or put a chat_template.jinja in the folder"
            )
        self._carries_pairs = True
