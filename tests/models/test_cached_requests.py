"""Requests that join, fork, shrink and leave at any step decode as each would alone and without a cache."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fastformer.models import GPT, GPTConfig, Transformer, TransformerConfig
from fastformer.nn import AddLayerNorm, KVCache, SequenceLayout
from tests.nn.comparing import assert_same, randomised, taken

V, MAX_ROWS, MAX_LEN, MAX_SOURCE = 19, 7, 21, 6
SMALL = {"vocab_size": V, "d_model": 16, "num_heads": 4, "d_ff": 24, "max_len": MAX_LEN}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 2}


def model_of(kind: str, **options) -> Transformer | GPT:
    torch.manual_seed(0)
    model: Transformer | GPT
    if kind == "gpt":
        model = GPT(GPTConfig(**SMALL, num_layers=2, **options), dtype=torch.float64)
        with torch.no_grad():  # so that attention isn't flat
            for parameter in model.parameters():
                parameter.mul_(10 if parameter.dim() > 1 else 1)
    else:
        model = Transformer(TransformerConfig(**SMALL, **NO_DROPOUT, **LAYERS, **options), dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, AddLayerNorm):
            randomised(module)
    return model.eval()


class Requests:
    """A model's cache, and beside it what each row has read: its source and its tokens."""

    def __init__(self, model: Transformer | GPT, rng: random.Random) -> None:
        self.model, self.rng = model, rng
        self.cache: KVCache
        if isinstance(model, Transformer):
            self.cache = model.empty_cache(MAX_ROWS, MAX_LEN, MAX_SOURCE)
        else:
            self.cache = model.empty_cache(MAX_ROWS, MAX_LEN)
        self.cache.k[:, 1:] = self.cache.v[:, 1:] = torch.nan
        self.groups: list[list[list[int]]] = []
        self.sources: list[list[int]] = []

    def ids(self, n: int) -> list[int]:
        return [self.rng.randrange(3, V) for _ in range(n)]

    def expected(self, row: list[int], source: list[int]) -> Tensor:
        tokens = torch.tensor([row])
        if isinstance(self.model, GPT):
            return self.model.decode(tokens)[0]
        return self.model.decode(tokens, self.model.encode(torch.tensor([source])))[0]

    def admit(self) -> None:
        room = MAX_ROWS - self.cache.num_rows
        if not room:
            return
        first, new = len(self.groups), self.rng.randint(1, min(3, room))
        prompts = [self.ids(self.rng.choice([0, 1, 3, 8])) for _ in range(new)]
        prompts[0] = prompts[0] or [4]
        sources = [self.ids(self.rng.randint(1, MAX_SOURCE)) for _ in range(new)]
        self.cache.add(new)
        tail = self.cache.tail(first)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        layout = SequenceLayout.packed(lengths, int(lengths.max()))
        packed = torch.tensor([token for prompt in prompts for token in prompt])
        if isinstance(self.model, Transformer):
            memory_layout = SequenceLayout.packed(torch.tensor([len(source) for source in sources]), MAX_SOURCE)
            memory = self.model.encode(torch.tensor([token for source in sources for token in source]), memory_layout)
            if self.rng.random() < 0.5:
                self.model.store_memory(tail, memory, memory_layout)
                hidden = self.model.decode(packed, None, layout=layout, cache=tail)
            else:
                hidden = self.model.decode(packed, memory, memory_layout=memory_layout, layout=layout, cache=tail)
        else:
            hidden = self.model.decode(packed, layout=layout, cache=tail)
        begin = 0
        for prompt, source in zip(prompts, sources, strict=True):
            if prompt:
                assert_same(hidden[begin : begin + len(prompt)], self.expected(prompt, source), "prompt")
            begin += len(prompt)
        self.groups += [[prompt] for prompt in prompts]
        self.sources += sources

    def fork(self) -> None:
        spare = MAX_ROWS - self.cache.num_rows
        parents = []
        for group in self.groups:
            size = self.rng.randint(1, len(group) + min(2, spare))
            spare -= max(size - len(group), 0)
            parents.append([self.rng.randrange(len(group)) for _ in range(size)])
        self.cache.fork(parents)
        self.groups = [[list(group[i]) for i in origins] for group, origins in zip(self.groups, parents, strict=True)]

    def leave(self, which: list[int]) -> None:
        self.cache.free(which)
        self.groups = [group for i, group in enumerate(self.groups) if i not in which]
        self.sources = [source for i, source in enumerate(self.sources) if i not in which]

    def step(self, n: int) -> None:
        rows = [row for group in self.groups for row in group]
        fresh = [self.ids(n) for _ in rows]
        if isinstance(self.model, GPT):
            hidden = self.model.decode(torch.tensor(fresh), cache=self.cache)
        else:
            hidden = self.model.decode(torch.tensor(fresh), None, cache=self.cache)
        sources = [source for group, source in zip(self.groups, self.sources, strict=True) for _ in group]
        for row, tokens, source, found in zip(rows, fresh, sources, hidden, strict=True):
            row += tokens
            assert_same(found, self.expected(row, source)[-n:], "step")


@torch.inference_mode()
@pytest.mark.parametrize(
    "kind, options",
    [
        ("gpt", {}),
        ("gpt", {"positions": "rotary", "rotary_base": 100.0, "num_kv_heads": 2, "window_size": 3}),
        ("transformer", {}),
        ("transformer", {"norm_first": False, "window_size": 2}),
        ("transformer", {"positions": "relative"}),
    ],
    ids=str,
)
def test_each_row_decodes_as_it_would_alone(kind, options):
    requests, rng = Requests(model_of(kind, **options), rng := random.Random(3)), rng
    for _ in range(30):
        if not requests.groups or rng.random() < 0.25:
            requests.admit()
        if rng.random() < 0.6:
            requests.fork()
        finished = [i for i, length in enumerate(requests.cache.lengths) if length > MAX_LEN - 4]
        others = [i for i in range(len(requests.groups)) if i not in finished and rng.random() < 0.08]
        requests.leave(others + finished)
        if requests.groups:
            requests.step(rng.choice([1, 1, 1, 3]))
    requests.leave(list(range(len(requests.groups))))
    assert taken(requests.cache) == 0


@torch.inference_mode()
def test_packed_prompts_under_autocast():
    model = model_of("gpt", positions="rotary", num_kv_heads=2).float()
    assert isinstance(model, GPT)
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.empty_cache(3, MAX_LEN)
        assert cache.k.dtype == torch.bfloat16
        cache.k[:, 1:] = cache.v[:, 1:] = torch.nan
        cache.add(2)
        ids, further = torch.randint(3, V, (7,)), torch.randint(3, V, (3, 1))
        prompts = model.decode(ids, layout=SequenceLayout.packed(torch.tensor([4, 3]), 4), cache=cache)
        cache.fork([[0, 0], [0]])
        step = model.decode(further, cache=cache)
        whole = model.decode(torch.cat((ids[:4], further[1]))[None])[0]
    assert (prompts[:4] - whole[:4]).abs().max() < 0.05 * whole.abs().max()
    assert (step[1, 0] - whole[4]).abs().max() < 0.05 * whole.abs().max()
