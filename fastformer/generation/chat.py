"""`Chat`: a conversation with a language model that was trained for it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Generator as PythonGenerator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from typing_extensions import Unpack

from fastformer.generation.answers import AnswerStyle, Part, parser_of, style_behind
from fastformer.generation.chat_template import ChatTemplate, TemplateTokenizer
from fastformer.generation.config import CacheDtype, GenerationConfig, GenerationOptions, Precision
from fastformer.generation.constraints import Vocabulary
from fastformer.generation.folder_options import load_draft_model, load_language_model
from fastformer.generation.generator import Generator
from fastformer.generation.model_protocols import Model, is_decoder_only
from fastformer.generation.streaming import Marked, TextPieces, behind_ends
from fastformer.generation.tool_formats import reasoning_of
from fastformer.requests import Load
from fastformer.special_ids import SpecialIds

logger = logging.getLogger("fastformer")

Pieces: TypeAlias = PythonGenerator[str, None, None]

MAX_NEW_TOKENS = 1024  # the default maximum for an answer
_ONE_ANSWER = ("num_beams", "num_return_sequences")  # options that are not taken from a folder
_ROOM = 4  # when old turns are dropped, at most this part (1/4) of the model's positions is reserved for the answer


class Chat:
    """A conversation with a language model.

        chat = Chat.from_pretrained("folder-of-a-llama", system="You are brief.", precision="int8")
        print(chat.ask("What is the capital of France?"))
        for piece in chat.stream("And of Spain?"):
            print(piece, end="", flush=True)

    Each turn's prompt is the whole conversation, so it begins with the previous prompt. The model reads this common
    beginning once (`Generator`): a turn costs only the tokens since the last one, however long the system prompt is.

    If the model reasons before it answers, its reasoning is no part of the answer: `parts` has both.

    Args:
        model: a `models.GPT`.
        tokenizer: the tokenizer of the model's folder.
        template: the chat template; None: that of the tokenizer's folder.
        system: the system prompt, with which the conversation begins; None: the template's default.
        config: the options of decoding, by default those of the template's model; see `from_pretrained`.
        precision, cache_dtype: the precision of the computation, and the dtype of keys and values; see `Generator`.
        drop_oldest: if the conversation fills the model's positions, drop its oldest turns; if False, this is an error.
        max_bytes, draft_model, adapters: see `Generator`.

    Attributes:
        messages: the conversation so far, in the format of templates. You may change it between turns. An answer's
            "reasoning_content" is the model's reasoning.

    Raises:
        ImportError: jinja2 is not installed.
        ValueError: the model reads sources, the tokenizer has no template, or the template is damaged.
    """

    def __init__(
        self,
        model: Model | nn.Module,
        tokenizer: Any,
        *,
        template: ChatTemplate | None = None,
        system: str | None = None,
        config: GenerationConfig | None = None,
        precision: Precision | None = None,
        cache_dtype: CacheDtype | None = None,
        drop_oldest: bool = False,
        max_bytes: int | None = None,
        draft_model: Model | nn.Module | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        if system is not None and not isinstance(system, str):
            raise ValueError(f"expected system to be a str, got {type(system).__name__}")
        self.template = ChatTemplate.of(tokenizer) if template is None else template
        for name in ("encode_template", "decode", "encode"):
            if not callable(getattr(tokenizer, name, None)):
                raise ValueError(f"expected the tokenizer of a language model's folder, got {type(tokenizer).__name__}")
        self._generator = Generator(
            model,
            precision=precision,
            cache_dtype=cache_dtype,
            max_bytes=max_bytes,
            draft_model=draft_model,
            adapters=adapters,
        )
        if not is_decoder_only(self._generator.model):
            raise ValueError(f"expected a language model, got {type(model).__name__}, which reads a source")
        self.tokenizer: TemplateTokenizer = tokenizer
        self._decoder = tokenizer
        self._reasoning = reasoning_of(self.template.source)
        self.config = config or GenerationConfig()
        self.drop_oldest, self.system = drop_oldest, system
        self._max_len = int(self._generator.model.config.max_len)
        self._ends = self.template.end_ids(self.tokenizer, SpecialIds.of(self._generator.model.config).eos)
        self._turns = 0
        self.messages: list[dict[str, Any]] = []
        self._conversation = 0  # the number of calls of `reset`
        self.reset()

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        precision: Precision | None = None,
        cache_dtype: CacheDtype | None = None,
        system: str | None = None,
        drop_oldest: bool = False,
        max_bytes: int | None = None,
        draft: str | os.PathLike[str] | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        **options: Any,
    ) -> Chat:
        """Loads the model of a folder that transformers, or `fastformer quantize`, saved.

        Args:
            folder: has the model, its tokenizer and its chat template. Its generation_config.json gives the decoding
                options that `options` doesn't contain, as transformers applies them.
            device: the device of the model; None: the CPU.
            precision: see `Translator.from_pretrained`.
            cache_dtype, system, drop_oldest, max_bytes, adapters: see the class.
            draft: the folder of a smaller model with the same tokenizer, which drafts tokens; see `Generator`.
            options: fields of `GenerationConfig`.

        Raises:
            ImportError: jinja2 is not installed.
            ValueError: see the class; or the folder has no language model, or is damaged.
        """
        model, tokenizer, decoding = load_language_model(folder, options, _ONE_ANSWER, device, precision)
        small = None if draft is None else load_draft_model(draft, tokenizer, device, precision)
        return cls(
            model, tokenizer, cache_dtype=cache_dtype, system=system, drop_oldest=drop_oldest, max_bytes=max_bytes,
            draft_model=small, adapters=adapters, **decoding,
        )  # fmt: skip

    def ask(self, text: str, **options: Unpack[GenerationOptions]) -> str:
        """Answers a user's message.

        Args:
            text: the user's message.
            options: fields of `GenerationConfig`, which override the object's.

        Raises:
            ValueError: see `stream`.
        """
        return "".join(self.stream(text, **options))

    def stream(self, text: str, **options: Unpack[GenerationOptions]) -> Pieces:
        """Answers a user's message, piece by piece, without the model's reasoning; see `parts`."""
        return self._contents(self.parts(text, **options))

    def parts(self, text: str, **options: Unpack[GenerationOptions]) -> PythonGenerator[Part, None, None]:
        """Answers a user's message by parts, each of a kind: "reasoning" or "content".

        Closing the iterator ends the answer; the part that was generated stays in the conversation.

        Args:
            text: the user's message.
            options: fields of `GenerationConfig`, which override the object's; neither beams nor several samples.

        Raises:
            ValueError: an unknown option, messages that the template refuses, a conversation that leaves no room for an
                answer.
        """
        if not isinstance(text, str):
            raise ValueError(f"expected a text, got {type(text).__name__}")
        config = GenerationConfig.from_options(options, self.config)
        if config.num_beams > 1 or config.num_return_sequences > 1:
            raise ValueError("expected neither beams nor several samples: a conversation has one answer")
        message = {"role": "user", "content": text}
        ids, config, style = self._prompt(message, config)
        return self._parts(message, ids, config, style, self._conversation)

    @staticmethod
    def _contents(parts: PythonGenerator[Part, None, None]) -> Pieces:
        with contextlib.closing(parts):
            for part in parts:
                if part.kind == "content":
                    yield part.text

    def _parts(
        self, message: dict[str, Any], ids: list[int], config: GenerationConfig, style: AnswerStyle, conversation: int
    ) -> PythonGenerator[Part, None, None]:
        is_over, count, begin, told = False, 0, list[int](), list[Part]()
        if config.constraint is not None:
            begin = Vocabulary.of(self._decoder, self._generator.model.config.vocab_size).anchor
        parser, decoder = parser_of(style), Marked.of(self._decoder, style.marks)
        text = TextPieces(decoder, begin, is_told=bool(begin), stop=config.stop_strings)
        tokens = self._generator.stream(ids, config, tokenizer=self._decoder)
        try:
            with contextlib.closing(tokens):
                for count, token in enumerate(tokens, 1):  # noqa: B007
                    for part in parser.add(text.add([token])):
                        told.append(part)
                        yield part
            for part in parser.add(text.end(), is_end=True):
                told.append(part)
                yield part
            is_over = True
        finally:
            if (told or is_over) and conversation == self._conversation:
                self._turns += 1
                content, reasoning = (
                    "".join(part.text for part in told if part.kind == kind) for kind in ("content", "reasoning")
                )
                answer = {"role": "assistant", "content": content}
                self.messages += [message, answer | ({"reasoning_content": reasoning} if reasoning else {})]
                if is_over and reasoning and not content and count == config.max_new_tokens:
                    logger.warning(
                        "the model was still reasoning after %d new tokens; max_new_tokens allows more", count
                    )

    def reset(self) -> None:
        """Forgets the conversation, except for the system prompt, and with it an answer that has not ended."""
        self._conversation += 1
        self.messages[:] = [] if self.system is None else [{"role": "system", "content": self.system}]

    def stats(self) -> Load:
        """Returns how many tokens of prompts were read so far, and how many were reused from earlier prompts."""
        return self._generator.stats()

    def _prompt(
        self, message: dict[str, Any], config: GenerationConfig
    ) -> tuple[list[int], GenerationConfig, AnswerStyle]:
        """Returns the ids of the conversation with a new message, and the config and the style of the answer."""
        messages = list(self.messages)
        wanted = config.max_new_tokens
        least = min(wanted or MAX_NEW_TOKENS, max(1, self._max_len // _ROOM)) if self.drop_oldest else 1
        while True:
            ids = self.template.encode([*messages, message], self.tokenizer)
            prompt, is_constrained = behind_ends(ids, self._ends), config.constraint is not None
            style, first = style_behind(prompt, self._decoder, self._reasoning, is_constrained=is_constrained)
            ids = [*ids, *self.tokenizer.encode_template(first)] if first else ids
            room = self._max_len - len(ids)
            if room >= least:
                break
            oldest = next((place for place, turn in enumerate(messages) if turn.get("role") != "system"), None)
            if not self.drop_oldest or oldest is None:
                if room >= 1:
                    break
                advice = "" if oldest is None else "; drop_oldest leaves out the oldest turns, and reset begins anew"
                raise ValueError(
                    f"expected a conversation that leaves room for an answer in the model's {self._max_len:,} "
                    f"positions, got one of {len(ids):,} tokens{advice}"
                )
            behind = (place for place in range(oldest + 1, len(messages)) if messages[place].get("role") == "user")
            del messages[oldest : next(behind, len(messages))]
        if len(messages) < len(self.messages):
            logger.warning(
                "omitted the oldest %d messages: the conversation fills the model's %s positions",
                len(self.messages) - len(messages),
                f"{self._max_len:,}",
            )
            self.messages[:] = messages
        if wanted is None and config.max_length is not None:
            wanted = config.max_length - len(ids)
            if wanted < 1:
                raise ValueError(
                    f"expected max_length above the conversation's {len(ids):,}, got {config.max_length:,}"
                )
        limit = min(MAX_NEW_TOKENS if wanted is None else wanted, room)
        seed = None if config.seed is None else (config.seed + self._turns) % 2**63
        ends = config.eos_token_id or self._ends
        pad = SpecialIds.of(self._generator.model.config).pad if config.pad_token_id is None else config.pad_token_id
        return ids, replace(config, max_new_tokens=limit, seed=seed, eos_token_id=ends or None, pad_token_id=pad), style
