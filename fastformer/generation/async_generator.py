"""`AsyncGenerator`: an asyncio interface to a language model, which decodes the requests of many tasks in one batch."""

from __future__ import annotations

import collections.abc
import functools
import logging
import operator
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from typing_extensions import Unpack

from fastformer.generation.chat import MAX_NEW_TOKENS
from fastformer.generation.chat_template import ChatTemplate, Message, TemplateTokenizer
from fastformer.generation.config import CacheDtype, GenerationConfig, GenerationOptions, Precision
from fastformer.generation.constraints import Grammar, Triggers, Vocabulary, is_installed, why_broken
from fastformer.generation.drafts import DraftModel
from fastformer.generation.engines import choose_engine
from fastformer.generation.evaluation import evaluating
from fastformer.generation.folder_options import load_adapters, load_draft_model, load_language_model
from fastformer.generation.jobs import Stream
from fastformer.generation.model_protocols import Model, as_model, check_precision, is_decoder_only
from fastformer.generation.request_builder import ModelFacts, RequestBuilder, check_vocabulary
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import check_sizes, new_scheduler
from fastformer.generation.session import Session
from fastformer.generation.streaming import (
    ByteRuns,
    Completion,
    Marked,
    Piece,
    SampleRequest,
    TextPieces,
    behind_ends,
)
from fastformer.settings import Count, check_value
from fastformer.special_ids import SpecialIds

logger = logging.getLogger("fastformer")

Prompt: TypeAlias = str | Sequence[int]

_SHOWN = 40  # the maximum number of characters of a prompt in an error message
_ONE_ANSWER = ("num_beams", "num_return_sequences", "max_length")  # not taken from a folder


class PromptTooLong(ValueError):
    """Raised if a prompt leaves no room for an answer among the model's positions."""


class ChatIds(list[int]):
    """The ids of a chat. Its answer is decoded as a text of its own, and ends at the end of a turn."""


class AsyncGenerator(Session[Request]):
    """Continues prompts and chats, for many tasks at once.

        async with AsyncGenerator.from_pretrained("folder-of-a-llama") as session:
            [completion] = await session.complete("Once upon a time", max_new_tokens=64)
            async for piece in session.stream(session.chat_ids([{"role": "user", "content": "Hello!"}])):
                print(piece.text, end="")

    Each call takes one prompt, with options of its own. All requests decode in one batch, in a thread of their own, and
    a beginning that prompts share is read once, as in a `Generator`. Don't use the model elsewhere meanwhile. A result
    doesn't depend on other requests: the same seed draws the same tokens. A task that is cancelled, or that leaves its
    stream, releases its memory.

    Args:
        model: a `models.GPT`.
        tokenizer: the tokenizer of the model's folder.
        template: the template of chats; None: that of the tokenizer's folder, if it has one.
        config: the default options; a request's own options override them.
        precision: the precision of the computation; see `Generator`.
        engine: one of `engines.ENGINES`; None: the fastest that can decode the model.
        cache_dtype, max_rows, max_bytes, draft_model, adapters: see `Generator`.
        max_waiting, max_waiting_tokens, when_full: see `Session`.

    Attributes:
        template: the template of chats, or None.

    Raises:
        ImportError: the tokenizer has a chat template, and jinja2 is not installed.
        ValueError: a model that reads sources, a damaged template, an unknown engine, a limit that is out of its range.
    """

    def __init__(
        self,
        model: Model | nn.Module,
        tokenizer: Any,
        *,
        template: ChatTemplate | None = None,
        config: GenerationConfig | None = None,
        precision: Precision | None = None,
        engine: str | None = None,
        cache_dtype: CacheDtype | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        draft_model: Model | nn.Module | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        max_waiting: int = 1024,
        max_waiting_tokens: int | None = None,
        when_full: Literal["wait", "refuse"] = "wait",
    ) -> None:
        check_precision(precision)
        check_value("cache_dtype", cache_dtype, CacheDtype | None)
        check_sizes(max_rows, max_bytes)
        checked: Model = as_model(model)
        if not is_decoder_only(checked):
            raise ValueError(f"expected a language model, got {type(model).__name__}, which reads a source")
        for name in ("encode", "decode"):
            if not callable(getattr(tokenizer, name, None)):
                raise ValueError(f"expected a tokenizer with encode and decode, got {type(tokenizer).__name__}")
        self.tokenizer: Any = tokenizer
        self._runs = ByteRuns(tokenizer)
        self.config, self.precision, self.cache_dtype = config or GenerationConfig(), precision, cache_dtype
        has_template = "chat_template" in (getattr(tokenizer, "chat", None) or {})
        self.template = ChatTemplate.of(tokenizer) if template is None and has_template else template
        self._max_len = int(checked.config.max_len)
        with evaluating(checked):
            self._engine = choose_engine(checked, engine, precision, cache_dtype)
            load_adapters(self._engine, checked, adapters or {})
        drafts = None if draft_model is None else DraftModel.of(draft_model, checked, self._engine, precision)
        self._special = SpecialIds.of(checked.config)
        eos = self._special.eos
        self._facts = ModelFacts.of(self._engine, self._special, is_prompted=True)
        self._ends = frozenset(eos)
        self._chat_ends = eos if self.template is None else self.template.end_ids(tokenizer, eos)
        super().__init__(
            checked,
            lambda: new_scheduler(self._engine, max_rows, max_bytes, is_endless=True, draft_model=drafts),
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            when_full=when_full,
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        precision: Precision | None = None,
        options: Mapping[str, Any] | None = None,
        draft: str | os.PathLike[str] | None = None,
        **limits: Any,
    ) -> AsyncGenerator:
        """Loads a run folder, or a language model's folder that transformers saved.

        Args:
            folder: has the model and its tokenizer. Its generation_config.json gives the decoding options that
                `options` doesn't contain.
            device: the device of the model; None: the CPU.
            precision: see `Translator.from_pretrained`.
            options: fields of `GenerationConfig`.
            draft: the folder of a smaller model with the same tokenizer, which drafts tokens; see `Generator`.
            limits: the other arguments of the class.

        Raises:
            ImportError, ValueError: see the class; or the folder has no language model, or is damaged.
        """
        model, tokenizer, decoding = load_language_model(folder, options or {}, _ONE_ANSWER, device, precision)
        if draft is not None:
            limits["draft_model"] = load_draft_model(draft, tokenizer, device, precision)
        return cls(model, tokenizer, **decoding, **limits)

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Loads a LoRA adapter, which calls then choose by `adapter=name`; see `Generator.load_adapter`."""
        load_adapters(self._engine, self.model, {name: folder})

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that were loaded."""
        return self._engine.adapters

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text or an answer."""
        return self._ends.union(self._chat_ends)

    def ends_of(self, *, is_chat: bool) -> tuple[int, ...]:
        """Returns the ids that end a text, or an answer in a chat."""
        return self._chat_ends if is_chat else self._special.eos

    max_len = property(
        operator.attrgetter("_max_len"), doc="The number of positions, which a prompt and its answer share."
    )

    def encode(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """Returns the ids of a prompt, which may be given as ids already.

        Args:
            prompt: the prompt.
            parse_special: whether special tokens that a text spells become their ids; if not, they are ordinary text.

        Raises:
            PromptTooLong, a ValueError: the prompt leaves no room for an answer.
            ValueError: an empty prompt, or one that the model can't read.
        """
        encode = self.tokenizer.encode
        if parse_special:
            encode = getattr(self.tokenizer, "encode_prompt", encode)  # other tokenizers have no such tokens
        if isinstance(prompt, str):
            return self._fitting(encode(prompt))
        ids = [*map(operator.index, prompt)]  # of an array, a tensor or an iterator, too
        check_vocabulary(ids, self.model.config.vocab_size, "token")
        return self._fitting(ids)

    def _fitting(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ValueError("expected a prompt of at least one token, got an empty one")
        if len(ids) >= self.max_len and self.config.window == "stop":
            raise PromptTooLong(
                f"expected a prompt of fewer tokens than the model's {self.max_len:,} positions, got {len(ids):,}"
            )
        return ids

    def chat_ids(self, messages: Iterable[Message], **variables: Any) -> ChatIds:
        """Returns the ids of a chat, as its template writes them.

        Args:
            messages, variables: see `ChatTemplate.encode`.

        Raises:
            ValueError: the model has no template, the template refuses the messages, or the chat leaves no room for an
                answer.
        """
        if self.template is None:
            raise ValueError("expected a model that was trained to chat, whose folder has a chat_template")
        tokenizer: TemplateTokenizer = self.tokenizer
        return ChatIds(self._fitting(self.template.encode(messages, tokenizer, **variables)))

    def _for_chat(self, config: GenerationConfig) -> GenerationConfig:
        """Returns a config by which answers end as those of a chat do, unless it has ends of its own."""
        if config.eos_token_id is not None:
            return config
        pad = self._special.pad if config.pad_token_id is None else config.pad_token_id
        return GenerationConfig.from_options({"eos_token_id": self._chat_ends or None, "pad_token_id": pad}, config)

    @property
    def anchor(self) -> Sequence[int]:
        """The ids behind which texts under a constraint are decoded; see `Vocabulary`."""
        return Vocabulary.of(self.tokenizer, self.model.config.vocab_size).anchor

    @functools.cached_property
    def can_constrain(self) -> bool:
        """Whether texts can be constrained: the library is installed, and the bytes of the model's tokens are known.

        It may take long at first, to find the bytes; see `aside`. The log says if the library is installed in vain.
        """
        if (reason := why_broken()) is not None:
            logger.error("calls of tools that the model begins by itself may break their schemas: %s", reason)
            return False
        try:
            return is_installed() and getattr(self.tokenizer, "token_bytes", None) is not None
        except ValueError:  # the tokenizer doesn't know them
            return False

    def check_constraint(self, options: Mapping[str, Any]) -> Grammar | None:
        """Compiles the constraint of some options, or raises the ValueError that `requests` would raise.

        Returns:
            The grammar, or None without a constraint. `requests` compiles nothing while you keep it.
        """
        constraint = GenerationConfig.from_options(options).constraint
        if constraint is None:
            return None
        return Vocabulary.of(self.tokenizer, self.model.config.vocab_size).grammar(constraint)

    async def complete(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        log_probs: bool = False,
        num_alternatives: int = 0,
        deadline: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Completion]:
        """Continues a prompt.

        Args:
            prompt: a text, the ids of a text, or the result of `chat_ids`.
            config: the options; None: the object's. Options that are given by name override it.
            log_probs: whether to return the tokens' log-probabilities.
            num_alternatives: the number of likeliest tokens to return at each position.
            deadline: a time of `time.monotonic`: a request that isn't complete by then raises TooLate; None: no
                deadline.
            options: fields of `GenerationConfig`. Each of num_return_sequences samples is a request of its own. With a
                seed the samples are those that `generate` draws.

        Returns:
            A list of num_return_sequences completions.

        Raises:
            ValueError: an unknown option, a prompt that is empty or too long.
            QueueFull: the queue is full, and when_full is "refuse".
            TooLate: the deadline has passed.
            RuntimeError: the object is closed, or the model or a processor failed.
        """
        requests = self.requests(prompt, config, log_probs=log_probs, num_alternatives=num_alternatives, **options)
        await self.submit(requests, deadline=deadline).results()
        return [request.completion() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        log_probs: bool = False,
        num_alternatives: int = 0,
        deadline: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream[Piece]:
        """Continues a prompt, piece by piece. The request has its place in the queue when this returns.

        If you leave the loop, the request is cancelled as soon as the iterator is closed or deleted.

        Args:
            prompt, config, log_probs, num_alternatives, deadline, options: see `complete`.

        Yields:
            The pieces. Those of several samples come as they are made; the last piece of each sample has a
            finish_reason.

        Raises:
            ValueError, QueueFull, RuntimeError: see `complete`; raised by the call, before the first piece.
            TooLate: see `complete`.
        """
        requests = self.requests(prompt, config, log_probs=log_probs, num_alternatives=num_alternatives, **options)
        job = self.submit(requests, deadline=deadline, streams=True)
        return Stream(job, _one_by_one(job.arrivals(SampleRequest.piece)))

    def requests(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        log_probs: bool = False,
        num_alternatives: int = 0,
        marks: Collection[str] = (),
        triggers: Triggers | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[SampleRequest]:
        """Makes the request of each sample; see `complete`. Several prompts' requests may be submitted together.

        Args:
            prompt, config, log_probs, num_alternatives, options: see `complete`.
            marks: special tokens that the text shows, such as those around the calls of tools.
            triggers: texts behind which the answer is under a constraint, if the options have none.
        """
        if num_alternatives != 0:
            check_value("num_alternatives", num_alternatives, Count)
        is_chat = isinstance(prompt, ChatIds)
        ids = prompt if isinstance(prompt, ChatIds) else self.encode(prompt)  # `chat_ids` has checked its own
        config = self.config if config is None else config
        lengths = [options.get(name, getattr(config, name, None)) for name in ("max_new_tokens", "max_length")]
        if lengths == [None, None]:
            options["max_new_tokens"] = min(MAX_NEW_TOKENS, self.max_len - len(ids))
        config = GenerationConfig.from_options(options, config)
        if is_chat:
            config = self._for_chat(config)
        if config.num_beams > 1:
            raise ValueError(f"expected num_beams 1, got {config.num_beams}: a beam search has no stream of tokens")
        config.check_engine(self, self._engine.name, self.precision, self.cache_dtype)
        builder = RequestBuilder(
            self.model,
            config,
            log_probs=log_probs or num_alternatives > 0,
            engine=self._engine,
            facts=self._facts,
            tokenizer=self.tokenizer,
            num_alternatives=num_alternatives,
            triggers=triggers,
        )
        begin = builder.anchor or (() if is_chat else behind_ends(ids, self._ends))
        decoder = Marked.of(self.tokenizer, marks)
        new_text = functools.partial(TextPieces, decoder, begin, is_told=True, runs=self._runs)
        kind = functools.partial(SampleRequest, new_text=new_text, ends=builder.ids.eos)
        checked, requests = builder.check(ids), list[SampleRequest]()
        name = f"prompt {prompt!r:.{_SHOWN}}" if isinstance(prompt, str) else f"a prompt of {len(ids):,} tokens"
        count = config.num_return_sequences
        for sample in range(count) if count > 1 else (None,):
            # All samples have place 0: they depend only on the seed and their own number.
            request = builder.build(checked, place=0, sample=sample, kind=kind)
            assert isinstance(request, SampleRequest)
            request.name = name
            requests.append(request)
        return requests


async def _one_by_one(
    pieces_together: collections.abc.AsyncGenerator[list[Piece], None],
) -> collections.abc.AsyncGenerator[Piece, None]:
    try:
        async for pieces in pieces_together:
            for piece in pieces:
                yield piece
    finally:
        await pieces_together.aclose()
