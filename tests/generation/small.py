"""Helpers of the tests of small models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import ByteTokenizer
from fastformer.generation.engines.base import Candidates, Selection
from fastformer.generation.engines.cpp import CppBatch, DraftingCppBatch
from fastformer.generation.engines.cpp_support import why_no_cpp_engine
from fastformer.generation.engines.kv_cache import KVCacheBatch
from fastformer.models import GPT, Transformer

EOS, VOCAB = 1, 40
HAS_CPP = why_no_cpp_engine() is None
DEFAULT = "cpp" if HAS_CPP else "kv_cache"  # what decodes a Transformer or a GPT on a CPU where no engine is asked for

# For parametrize: an engine by name; the default one where it says None.
needs_cpp = pytest.mark.skipif(not HAS_CPP, reason="there is no decoding engine in C++ here")
CPP = pytest.param("cpp", marks=needs_cpp)


@torch.no_grad()
def next_logits(model: Any, source: Sequence[int], tokens: Sequence[int], start: int = 0) -> torch.Tensor:
    """Returns the logits before each token and after the last one, (len(tokens) + 1, vocab_size), without a cache."""
    if isinstance(model, GPT):
        return model(torch.tensor([[*source, *tokens]]))[0, len(source) - 1 :]
    logits = model(torch.tensor([source]), torch.tensor([[start, *tokens]]))
    return (logits[0] if isinstance(model, LSTMSeq2Seq) else logits)[0]


def plain_greedy(which, source, limit: int, *, prefix=(), start: int = 0, ends=(EOS,), change=None) -> list[int]:
    """Returns the new tokens of a loop without a cache.

    `change` edits the logits, a list, given the new tokens so far.
    """
    said: list[int] = []
    while len(said) < limit and not (said and said[-1] in ends):
        logits = next_logits(which, source, [*prefix, *said], start)[-1].tolist()
        if change is not None:
            change(logits, said)
        said.append(logits.index(max(logits)))
    return said


def mixed_sources(count: int, longest: int = 12) -> torch.Tensor:
    source = torch.randint(3, VOCAB, (count, longest))
    for i in range(count):
        source[i, 2 + i % (longest - 1) :] = 0
    return source


def new_tokens(model: Any, prompts: torch.Tensor, sequences: torch.Tensor) -> list[list[int]]:
    """Returns the generated tokens, including EOS, without PAD after it."""
    if isinstance(model, GPT):
        sequences = sequences[:, int((prompts != 0).sum(1).max()) :]
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in sequences.tolist()]


def real(row: torch.Tensor) -> list[int]:
    return row[row != 0].tolist()


def tiny(kind: Any = Transformer, *, seed: int = 0, **options: Any) -> Any:
    """Returns a small model of bytes in evaluation mode, drawn with a seed."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 259, "d_model": 32}
    if kind is LSTMSeq2Seq:
        return kind(**sizes | options).eval()
    sizes |= {"num_heads": 4, "max_len": 64} | ({"num_layers": 2} if issubclass(kind, GPT) else {"d_ff": 64})
    return kind.from_preset("tiny", **sizes | options).eval()


def always(letter: str) -> LSTMSeq2Seq:
    """Returns a model of bytes that says the same one for ever."""
    model = LSTMSeq2Seq(vocab_size=259, d_model=32)
    model.output.weight.data.zero_()
    model.output.bias.data[ord(letter) + 3] = 9.0
    return model


class Foreign(ByteTokenizer):
    """A tokenizer of bytes that gives "!" an id that no model has."""

    def encode(self, text: str, max_len: int | None = None) -> list[int]:
        return [9999 if i == ord("!") + 3 else i for i in super().encode(text)]


def louder(model: Any, factor: float = 2.0) -> Any:
    """Returns the model with larger matrices, in evaluation mode; a fresh model repeats one token."""
    for parameter in model.parameters():
        parameter.data *= factor if parameter.dim() == 2 else 1
    return model.eval()


def coarse(model: Transformer | GPT) -> Any:
    """Returns a copy of a model that replaces its logits by coarse ones, many of which are equal."""
    kind, other = type(model), copy.deepcopy(model)
    other.__class__ = type("Coarse", (kind,), {"logits": lambda self, hidden: kind.logits(self, hidden).round()})
    return other


class Call(NamedTuple):
    """A call of an engine: its rows at the beginning, whether it returns log-probabilities, and the most steps of a
    row.
    """

    engine: str
    rows: int
    log_probs: bool
    steps: int


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Records the calls that step any batch of the engines cpp and kv_cache from now on."""
    calls: list[Call] = []
    names: dict[Any, str] = {DraftingCppBatch: "cpp", KVCacheBatch: "kv_cache"}
    steps, run = {kind: kind.step for kind in names}, CppBatch.run_searches

    def step(self: Any, tokens: Sequence[int], selection: Selection) -> Candidates:
        calls.append(Call(names[type(self)], len(tokens), selection.log_probs, 1))
        return steps[type(self)](self, tokens, selection)

    def watched_run(self: CppBatch, searches: Any, tokens: Sequence[int], log_probs: bool, limits: Any) -> list[int]:
        taken = run(self, searches, tokens, log_probs, limits)
        calls.append(Call("cpp", len(tokens), log_probs, max(taken)))
        return taken

    for kind in names:
        monkeypatch.setattr(kind, "step", step)
    monkeypatch.setattr(CppBatch, "run_searches", watched_run)
    return calls
