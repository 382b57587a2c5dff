"""Decodes with a `KVCache` and whole decode steps, including their search, that are captured as CUDA graphs.

The launch of one graph replaces the hundreds of kernel launches of a step. The host waits for the device only when it
looks for searches that have ended, once in several steps. There is a graph for each shape of a step
(`captured_step.Shape`): the numbers of rows, the lengths and the needs of the search. These are rounded up to a few
sizes, so that few graphs serve a batch whose requests come and go.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from fastformer.cache.block_pool import CacheFullError, Ints
from fastformer.engine.frozen import ModelGuards, UnfitError, notes_of, packed
from fastformer.generation.engines.base import Candidates, Limits, Prompt, SearchingBatch, Selection
from fastformer.generation.engines.captured_step import CapturedStep, Shape, check_capturable, rounded
from fastformer.generation.engines.device_search import Record
from fastformer.generation.engines.kv_cache import (
    KVCacheBatch,
    KVCacheEngine,
    choose_from_hidden,
    decode_cached,
    new_cache,
)
from fastformer.generation.engines.sampling import sampled_candidates
from fastformer.generation.model_protocols import (
    DecoderOnly,
    EncoderDecoder,
    Model,
    device_of,
    dtype_precision,
)
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.search import Sample
from fastformer.graphs import CaptureError, Graphs
from fastformer.models.quantization import QUANTIZED, quantized_weights
from fastformer.nn import KVCache
from fastformer.ops import _backends
from fastformer.ops.quantized_linear import QuantizedWeights, why_no_kernel

logger = logging.getLogger("fastformer")

STEPS_PER_LOOK = 8  # steps before the host looks for searches that have ended; their rows decode on until then
MAX_SAMPLINGS = 8  # kinds of sampling in these shapes; rows of others are drawn after a step that all kinds share
MAX_SHAPES = 32  # shapes of an engine, each with a graph; the graphs share the working memory of their operations
_KEPT_BYTES = 2**32  # the most bytes of a model's cache that stay allocated between two calls
# The device types that have graphs: there, this engine is the default, and caches and graphs stay between calls.
DEVICES = ("cuda",)


@dataclass
class _State:
    """The state that outlives an engine, for the next engine of the same model.

    Attributes:
        cache: the model's cache.
        graphs: captures the graphs.
        room: the numbers of rows and tokens that the cache was made for.
        spare: slots of the cache for batch slots without a row.
        captured: the step of each shape, the most recently used last.
        guards: the guards of the model, made after the first step; None: no step was taken.
        is_plain: whether all steps must run without a graph.
        num_batches: the number of batches that were opened with this state.
        weights: the quantised copies of the weights that the graphs read, or None.
    """

    cache: KVCache
    graphs: Graphs
    room: tuple[int, int] = (0, 0)
    spare: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    captured: OrderedDict[Shape, CapturedStep] = field(default_factory=OrderedDict)
    guards: ModelGuards | None = None
    is_plain: bool = False
    num_batches: int = 0
    weights: QuantizedWeights | None = None

    def is_current(self, model: object) -> bool:
        """Returns whether the graphs still match the model: its tensors and hooks have not changed place."""
        return self.guards is not None and isinstance(model, nn.Module) and self.guards.hold(model)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Lets the ops of a block read the quantised copies, if there are any."""
        return contextlib.nullcontext() if self.weights is None else self.weights.acting()

    def renew(self, model: object, precision: str | None) -> None:
        """Finds the copies of the current weights, and drops the graphs if these or the model's tensors are others."""
        weights = _quantized(model, precision)
        if weights is not self.weights or (self.guards is not None and not self.is_current(model)):
            self.forget()
        self.weights = weights

    def forget(self) -> None:
        """Drops the graphs, which would read memory that the model no longer uses, or omit its hooks."""
        self.captured.clear()
        self.guards, self.is_plain = None, False


class GraphEngine(KVCacheEngine):
    """Steps a `models.Transformer` or a `models.GPT`, or a model that decodes like one.

    Greedy and beam searches of one kind (the same beams, ends and suppressed ids) run on the device. Other requests run
    step by step: if all rows are sampled by the same temperature, top_k and top_p, a graph draws their tokens, from
    numbers that the host gives it; else it ends with the hidden states, from which the host chooses. On a CPU a graph
    is a plain call with the same results.

    A new shape takes its first step without a graph, and is captured when it occurs again. If a capture fails, all
    steps run without graphs, and the log says so once. The cache and the graphs stay with the model, for the next
    engine.

    On a GPU, the steps of a quantised model in bf16 or fp16 read its weights in int8 or int4. These are copies beside
    the weights, which read prompts; so this saves time and no memory.

    One batch is open at a time: it uses the cache and the graphs of the previous batch.

    Args:
        model: the model to decode.
        precision: the precision of the model's modules, or that to which `quantize` rounded its weights; or None.
    """

    name: ClassVar[str] = "graph"

    def __init__(self, model: Model, precision: str | None = None) -> None:
        super().__init__(model, precision)
        self._precision = precision
        self._state = _State(self._empty, Graphs(self.device))
        self._keeper: weakref.finalize[..., GraphEngine] | None = None

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Returns a reason if `KVCacheEngine` can't decode the model or a graph would omit a part of it, or None."""
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "autocast is on, and a graph can't contain its copies of the weights: cast the model"
        if getattr(getattr(model, "config", None), "positions", None) == "relative":
            return "relative positions are a bias on the scores, which its captured steps don't add"
        if getattr(getattr(model, "config", None), "num_experts", None) is not None:
            return "experts compute a number of tokens that the host has to know, and a graph fixes it"
        if getattr(getattr(model, "config", None), "attention_sinks", False):
            return "steps with attention sinks gather as many keys as the host knows, and a graph fixes it"
        return super().why_unsupported(model, None if _is_read(model, precision) else precision)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the steps that were taken, the most recently used last."""
        return [*self._state.captured]

    def runs_searches(self) -> bool:
        """Returns True: batches advance greedy and beam searches themselves."""
        return True

    def open(self, max_rows: int, num_tokens: int) -> GraphBatch:
        # Not earlier: an engine without a batch leaves the model's state to others.
        if self._keeper is None and self.device.type in DEVICES and isinstance(self.model, nn.Module):
            before: _State | None = notes_of(self.model).findings.pop("graphs", None)
            if before is not None and before.cache.k.device == self._empty.k.device:
                self._state = before
            self._keeper = weakref.finalize(self, _keep, weakref.ref(self.model), self._state)
            self._keeper.atexit = False
        state, wanted = self._state, (max_rows, num_tokens)
        state.renew(self.model, self._precision)
        if state.guards is not None and all(new <= old for new, old in zip(wanted, state.room, strict=True)):
            state.cache.reset()
            return GraphBatch(self.model, self.device, state, self._precision)
        # Somewhat more than the caller asks for, so that a slightly longer request later needs no new graphs.
        rows, tokens = (max(rounded(new), old) for new, old in zip(wanted, state.room, strict=True))
        state.forget()
        state.room = 0, 0  # in case the allocation fails
        state.cache = self._empty  # there may not be enough memory for two caches
        # At most as many batch slots are empty as there are rows, because `bucket` rounds up by no more than that.
        state.cache = new_cache(self.model, rows, tokens + rows)
        state.spare, state.room = state.cache.take_slots(rows), (rows, tokens)
        return GraphBatch(self.model, self.device, state, self._precision)


class GraphBatch(KVCacheBatch, SearchingBatch):
    """Rows of a `KVCache` that are stepped by graphs; see `GraphEngine`."""

    def __init__(
        self, model: EncoderDecoder | DecoderOnly, device: torch.device, state: _State, precision: str | None
    ) -> None:
        super().__init__(model, device, state.cache)
        self._state, self._precision = state, precision
        state.num_batches += 1
        self._number = state.num_batches
        # The step whose tensors hold the state of searches, and these searches.
        self._loaded: tuple[CapturedStep, Sequence[NativeSearch]] | None = None

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        if not self._cache.num_groups:  # requests that are decoded together read the same copies
            self._state.renew(self.model, self._precision)
        super().prefill(prompts)

    def free(self, groups: Sequence[int]) -> None:
        self._loaded = None  # it would keep the searches alive
        super().free(groups)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        with torch.cuda.device_of(self._cache.k):
            samples = _samples_of_one_kind(selection, len(tokens))
            if not samples or not self._has_graphs_of(samples[0][:3]):
                (hidden,) = self._step_alone(tokens)
                with self._state.reading():
                    return choose_from_hidden(self.model, hidden, selection)
            count = min(selection.num_candidates, self.model.config.vocab_size)
            needs = (None, count, selection.log_probs, False, samples[0][:3])
            values, ids = self._step_alone(tokens, samples, *needs)
            return Candidates(ids.tolist(), values.tolist())

    def _has_graphs_of(self, sampling: tuple[float, int, float]) -> bool:
        """Returns whether a kind of sampling may have graphs: if each request has another, none is used again."""
        kinds = {shape.sampling for shape in self._state.captured} - {None}
        return sampling in kinds or len(kinds) < MAX_SAMPLINGS

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Appends a token to each row, and returns the logits of the next token, (rows, vocab_size) fp32."""
        with torch.cuda.device_of(self._cache.k):
            with torch.inference_mode():
                (hidden,) = self._step_alone(tokens)
            with self._state.reading():
                return self.model.logits(hidden).float()

    def _step_alone(self, tokens: Sequence[int], samples: Sequence[Sample] = (), *needs: Any) -> tuple[Tensor, ...]:
        """Appends a token to each row, and returns the output of the step, which the next one overwrites.

        Args:
            tokens: the token of each row.
            samples: how each row is sampled; empty: the output is the hidden states.
            needs: see `Shape.of`.
        """
        self._loaded = None
        captured = self._captured_of(Shape.of(self._cache, len(tokens), self._cache.length_bound + 1, *needs))
        captured.cache.reserve_run(1, np.full(len(tokens), captured.cache.width - 1, np.int32))
        captured.give(tokens, samples)
        self._replay(captured)
        captured.cache.sync(np.arange(captured.cache.num_rows, dtype=np.int32)[None])
        assert captured.out is not None
        return tuple([out[: len(tokens)] for out in captured.out])

    @torch.inference_mode()
    def run_searches(
        self, searches: Sequence[NativeSearch], tokens: Sequence[int], log_probs: bool, limits: Limits
    ) -> list[int]:
        """Checks every `STEPS_PER_LOOK` steps for searches that have ended, and returns when one has.

        It takes no steps if the searches aren't of one kind. See `SearchingBatch.run_searches`.
        """
        end, steps = time.monotonic() + limits.seconds, 0
        is_one_kind = len({search.rules._replace(min_tokens=0) for search in searches}) == 1
        while is_one_kind:
            with torch.cuda.device_of(self._cache.k):
                count = min(STEPS_PER_LOOK, limits.max_steps - steps)
                taken = self._run_captured(searches, tokens, log_probs, count)
            steps += taken
            is_done = taken == 0 or steps >= limits.max_steps or any(search.handle.is_done for search in searches)
            if is_done or time.monotonic() >= end:
                break
            tokens = [token for search in searches for token in search.last_tokens()]
        rows = [max(1, search.num_rows) for search in searches]
        if rows != self._cache.group_sizes:
            self._cache.fork(list(map(range, rows)))
        return [steps] * len(searches)

    def _run_captured(
        self, searches: Sequence[NativeSearch], tokens: Sequence[int], log_probs: bool, num_steps: int
    ) -> int:
        """Takes up to num_steps steps on the device. Returns their number; 0 without memory for the batch slots."""
        cache = self._cache
        beams = max(1, searches[0].rules.num_beams)
        before = cache.group_sizes
        if before != [beams] * len(searches):
            try:
                cache.fork([[*range(size), *[0] * (beams - size)] for size in before])
            except ValueError:  # other rows of the batch use them
                return 0
        lengths = np.array(cache.lengths, np.int32)
        limits = np.array([search.limit for search in searches], np.int32)
        counts = np.array([search.handle.num_tokens for search in searches], np.int32)
        last = lengths + limits - counts - 1  # the position of the last token that may be given
        num_steps = min(num_steps, int((limits - counts).max()))
        rules = searches[0].rules._replace(min_tokens=0)
        is_edited = bool(rules.suppressed) or any(search.rules.min_tokens for search in searches)
        count = min(searches[0].num_candidates, self.model.config.vocab_size)
        needs = (rules, count, log_probs, is_edited)
        captured = self._captured_of(Shape.of(cache, len(searches), int(lengths.max()) + num_steps, *needs))
        search = captured.search
        assert search is not None
        try:
            captured.cache.reserve_run(num_steps, last)
        except CacheFullError:
            return self._run_captured(searches, tokens, log_probs, num_steps // 2) if num_steps > 1 else 0
        if self._loaded != (captured, searches):
            search.load(tokens, searches, counts)
        self._loaded = None  # until nothing can fail any more
        for _ in range(num_steps):
            self._replay(captured)
        record = search.read(num_steps)
        captured.cache.sync(record.parents)
        self._loaded = captured, searches
        self._catch_up(searches, record, beams)
        return num_steps

    def _catch_up(self, searches: Sequence[NativeSearch], record: Record, beams: int) -> None:
        """Advances the searches on the host by the steps that the device has recorded.

        Raises:
            RuntimeError: the host's searches chose other tokens than the device's.
        """
        for ids, values, parents, tokens in zip(*(part.tolist() for part in record), strict=True):
            going = [(place * beams, search) for place, search in enumerate(searches) if not search.handle.is_done]
            here: list[int] = []  # the slots of the rows that go on
            for first, search in going:
                new_parents = search.handle.advance(ids, values, first)
                slots = range(first, first + len(new_parents))
                if [first + parent for parent in new_parents] != parents[first : slots.stop]:
                    raise RuntimeError(f"expected group {first // beams} to go on from {new_parents} on the device too")
                here += slots
            latest = [token for _, search in going if not search.handle.is_done for token in search.last_tokens()]
            if latest != [tokens[slot] for slot in here]:
                raise RuntimeError(f"expected the tokens {latest} on the device too")

    def _captured_of(self, shape: Shape) -> CapturedStep:
        if self._number != self._state.num_batches:
            raise RuntimeError("expected the batch that was opened last: another one has its cache by now")
        captured, vocab_size = self._state.captured, self.model.config.vocab_size
        if shape not in captured:
            captured[shape] = CapturedStep(shape, self._cache, self._state.spare, vocab_size, STEPS_PER_LOOK)
            if len(captured) > MAX_SHAPES:
                captured.popitem(last=False)
        captured.move_to_end(shape)
        return captured[shape]

    def _replay(self, captured: CapturedStep) -> None:
        if captured.graph is None and captured.is_warm and not self._state.is_plain:
            self._capture(captured)
        if captured.graph is not None:
            captured.graph.replay()
            return
        self._state.graphs.warm_up(lambda: self._step_once(captured))
        captured.is_warm = True
        if self._state.guards is None and isinstance(self.model, nn.Module):
            self._state.guards = ModelGuards(self.model)  # not earlier: modules store state in their first call

    def _capture(self, captured: CapturedStep) -> None:
        try:
            check_capturable(self.model)
            captured.graph = self._state.graphs.capture(lambda: self._step_once(captured))
        except CaptureError as error:
            self._state.is_plain = True
            message = f"engine 'graph' steps without graphs: {error}"
            if _backends.is_strict():
                raise RuntimeError(message) from error
            logger.warning(message)

    def _step_once(self, captured: CapturedStep) -> None:
        """Takes a step, including its search. The host reads no value."""
        with self._state.reading():
            self._compute(captured)

    def _compute(self, captured: CapturedStep) -> None:
        cache, search, model, shape = captured.cache, captured.search, self.model, captured.shape
        hidden = decode_cached(model, captured.tokens[:, None], cache)[:, -1]
        if search is None:
            out: tuple[Tensor, ...] = (hidden,)
            if shape.sampling is not None:
                logits, uniform = model.logits(hidden), captured.uniform
                out = sampled_candidates(logits, shape.num_candidates, shape.sampling, uniform, shape.log_probs)
            if captured.out is None:  # the first step runs without a graph
                captured.out = tuple(map(torch.empty_like, out))
            for kept, new in zip(captured.out, out, strict=True):
                kept.copy_(new)
            cache.end_step(None)
            return
        if shape.is_edited:
            values, ids = search.candidates(model.logits(hidden), shape.log_probs)
        else:
            values, ids = model.top_tokens(hidden, shape.num_candidates, log_probs=shape.log_probs)
        cache.end_step(search.advance(values, ids, cache.step))


def _is_read(model: object, precision: str | None) -> bool:
    """Returns whether steps read a model's weights in int8 or int4."""
    return (
        precision in QUANTIZED
        and getattr(model, "precision", None) == precision
        and device_of(cast(Model, model)).type in DEVICES
        and dtype_precision(model) in ("bf16", "fp16")
    )


def _quantized(model: object, precision: str | None) -> QuantizedWeights | None:
    """Returns the copies of a model's current weights for its steps; None: they read the weights themselves."""
    own: str | None = getattr(model, "precision", None)
    if not isinstance(model, nn.Module) or precision not in (None, own) or not _is_read(model, own):
        return None
    try:
        if (reason := why_no_kernel(next(model.parameters()))) is not None:
            raise UnfitError(reason)
        return packed(model, "quantised for steps", lambda: quantized_weights(model), find=_tensors_of)
    except (UnfitError, ValueError) as error:  # no kernel, weights of inference mode, or NaN
        logger.info("engine 'graph' reads a model's weights in their dtype: %s", error)
        return None


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _samples_of_one_kind(selection: Selection, num_rows: int) -> list[Sample]:
    """Returns how each row is sampled, if all are, by the same options and from logits as they are; else none."""
    samples = [one for one in selection.samples or () if one is not None]
    is_edited = selection.process is not None or selection.keeps is not None or len(selection.masked_rows) > 0
    return samples if len(samples) == num_rows and not is_edited and len({one[:3] for one in samples}) == 1 else []


def _keep(reference: weakref.ref[nn.Module], state: _State) -> None:
    """Stores an engine's state for the next engine of its model."""
    model = reference()
    if model is None or any(getattr(value, "__self__", None) is model for value in vars(model).values()):
        return  # the guards would keep a model with methods of its own alive
    if 2 * state.cache.k.nbytes <= _KEPT_BYTES:
        notes_of(model).findings["graphs"] = state
