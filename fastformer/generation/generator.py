"""`Generator`: decodes repeatedly with one model, and reads the common beginnings of its prompts once."""

from __future__ import annotations

import collections.abc
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from typing_extensions import Unpack

from fastformer.generation.config import CacheDtype, GenerationConfig, GenerationOptions, Precision
from fastformer.generation.drafts import DraftModel
from fastformer.generation.engines import choose_engine
from fastformer.generation.evaluation import evaluating
from fastformer.generation.folder_options import load_adapters
from fastformer.generation.generating import (
    Call,
    GenerateOutput,
    Streamer,
    config_of,
    decode,
    shows_options,
)
from fastformer.generation.inputs import TokenIds, input_rows
from fastformer.generation.model_protocols import Model, as_model, check_precision
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import check_sizes, new_scheduler
from fastformer.generation.session import Session
from fastformer.generation.streaming import Detokenizer
from fastformer.requests import Load
from fastformer.settings import check_value

Stream: TypeAlias = collections.abc.Generator[int, None, None]


class Generator:
    """`generate` with a cache: the keys and values of prompts stay in memory, for later prompts that begin alike.

        generator = Generator(model, precision="int8")
        for turn in chat:  # each prompt begins with the one before
            for token in generator.stream(ids_of(turn), max_new_tokens=256):
                ...

    If a prompt and an earlier one share their first tokens, these are not read again, in whole blocks of 16 tokens.
    Only the first user of a system prompt pays for it, and each turn of a chat pays only for the tokens since the last
    prompt, including the last answer. A row's tokens are the same, bit for bit, whatever the cache contains. The C++
    engine supports this for decoder-only models (`Engine.reuses_prefixes`); other engines read each prompt whole.

    The memory is bounded by max_bytes. Of the prompts that no running request needs, the most recently used ones stay.
    The process gets the memory from the system when it is first used, and keeps it until `clear` or the end of the
    object. If weights have changed since the last call, they are packed again, and everything that was read with the
    old ones is dropped.

    Threads may share a Generator: their calls run one after another. Don't train the model meanwhile.

    Args:
        model: see `fastformer.generate`.
        precision: the precision of the computation: "fp32", "bf16", "fp16", "int8" or "int4"; None: the model's own.
        engine: one of `engines.ENGINES`; None: the fastest that can decode the model.
        cache_dtype: the dtype of keys and values: "int8", or None, that of the computation. See `GenerationConfig`.
        max_rows: the most rows that are decoded together; None: 512 on a CPU, 1,024 on a GPU.
        max_bytes: the approximate memory for keys and values. A call that needs more gets it while it runs. None: 512
            MiB on a CPU, a quarter of the free memory on a GPU.
        adapters: the folder of each LoRA adapter, by its name; see `load_adapter`.
        draft_model: a smaller model with the same vocabulary, which drafts tokens. The model checks several of them in
            one pass, so that the results are its own. It drafts fewer tokens, or none, while few of them are accepted,
            or many rows are decoded together. It has a cache of as many tokens.

    Raises:
        ValueError: an unknown engine or precision, or no engine can decode the model in the precision.
    """

    def __init__(
        self,
        model: Model | nn.Module,
        *,
        precision: Precision | None = None,
        engine: str | None = None,
        cache_dtype: CacheDtype | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        draft_model: Model | nn.Module | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        check_precision(precision)
        check_value("cache_dtype", cache_dtype, CacheDtype | None)
        check_sizes(max_rows, max_bytes)
        self.model, self.precision, self.cache_dtype = as_model(model), precision, cache_dtype
        with evaluating(self.model):
            self._engine = choose_engine(self.model, engine, precision, cache_dtype)
            load_adapters(self._engine, self.model, adapters or {})
        drafts = None if draft_model is None else DraftModel.of(draft_model, self.model, self._engine, precision)
        self._session: Session[Request] = Session(
            self.model, lambda: new_scheduler(self._engine, max_rows, max_bytes, is_endless=True, draft_model=drafts)
        )

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Loads a LoRA adapter, which calls then choose by `adapter=name`; others of that name are replaced.

        Each request has the adapter of its call, and all requests are decoded together: the model's weights are read
        once for all of them. A request reuses what earlier ones have read only if they had the same adapter.

        Args:
            name: the name.
            folder: a folder that peft saved, with adapter_config.json and adapter_model.safetensors. Its code, if it
                has any, does not run.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: a model that reads sources; an engine other than "cpp"; a file that is missing or damaged; a
                kind of adapter that isn't supported, such as DoRA; an adapter that doesn't fit the model.
        """
        load_adapters(self._engine, self.model, {name: folder})

    @shows_options
    def generate(
        self,
        input_ids: TokenIds,
        config: GenerationConfig | None = None,
        *,
        attention_mask: Tensor | None = None,
        decoder_input_ids: TokenIds | None = None,
        generation_config: Mapping[str, Any] | Any = None,
        tokenizer: Detokenizer | None = None,
        streamer: Streamer | None = None,
        return_dict_in_generate: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Tensor | GenerateOutput:
        """Decodes a batch, like `fastformer.generate`, which documents the arguments and the result.

        Raises:
            ValueError: see `fastformer.generate`; or a precision or an engine other than this object's.
            RuntimeError: a stream of this object is open in this thread.
        """
        config = self._config(options, config, generation_config)
        call = Call(input_ids, attention_mask, decoder_input_ids, tokenizer, streamer, return_dict_in_generate)
        return decode(self.model, config, call, self._session)

    @shows_options
    def stream(
        self,
        input_ids: TokenIds,
        config: GenerationConfig | None = None,
        *,
        attention_mask: Tensor | None = None,
        generation_config: Mapping[str, Any] | Any = None,
        tokenizer: Detokenizer | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Yields the new tokens of one input as they are generated.

        If you leave the loop, the request ends as soon as the iterator is deleted or closed; its prompt stays in
        memory. An error during a step, including a KeyboardInterrupt, clears the memory.

        Args:
            input_ids: one source or prompt; see `fastformer.generate`.
            config, attention_mask, generation_config, tokenizer, options: see `fastformer.generate`; neither beams nor
                several samples.

        Yields:
            Each new token, EOS included.

        Raises:
            ValueError, RuntimeError: see `generate`; a ValueError is raised by the call, before the first token.
        """
        config = self._config(options, config, generation_config)
        with evaluating(self.model):
            builder = RequestBuilder(self.model, config, log_probs=False, engine=self._engine, tokenizer=tokenizer)
            rows = input_rows(input_ids, attention_mask, builder.ids.pad, marks_padding=builder.ids.marks_padding)
            if len(rows) > 1 or config.num_beams > 1 or config.samples > 1:
                raise ValueError("expected one input, without beams or several samples, to stream")
            checked = builder.check(rows[0])

        def tokens() -> Stream:
            request = builder.build(checked)
            for new in self._session.tokens(request):
                yield from new
            if request.error is not None:
                raise request.error

        return tokens()

    def stats(self) -> Load:
        """Returns how many tokens of prompts were read so far, and how many were reused from earlier prompts."""
        return self._session.scheduler.load()

    def clear(self) -> None:
        """Drops all prompts and frees their memory."""
        with self._session.turn() as scheduler:
            scheduler.clear()

    def _config(self, options: GenerationOptions, config: GenerationConfig | None, foreign: Any) -> GenerationConfig:
        config = config_of(options, config, foreign)
        config.check_engine(self, self._engine.name, self.precision, self.cache_dtype)
        return config
