"""The models and the inputs of the comparisons."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.job import Model, PeerJob, Tokens
from fastformer.checkpoints import load_model
from fastformer.data.text import read_lines
from fastformer.models import GPT, Transformer

LENGTHS = range(8, 61)  # of the sources of a trained model, each with another length
_SOURCE, _NEW = 32, 64  # numbers of tokens, for a model with random weights
_NEW_GPT = 128
_NEW_LLAMA = 32
# The prompts that are decoded together, and the tokens of each.
_LLAMA_PROMPTS = ((1, 32), (1, 512), (16, 32))


def _llama(vocab_size: int = 32000, **sizes: int) -> dict[str, Any]:
    """Returns the settings of Llama's form."""
    form = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "bias": False, "num_kv_heads": 4}
    return {"vocab_size": vocab_size, "dropout": 0.0, "attention_dropout": 0.0, **form, **sizes}


_MODELS: dict[str, tuple[type[Transformer] | type[GPT], str, dict[str, Any]]] = {
    "base": (Transformer, "base", {"vocab_size": 32000}),
    "base-paper": (Transformer, "base-paper", {"vocab_size": 32000}),
    "tiny": (Transformer, "tiny", {"vocab_size": 500}),
    "gpt2": (GPT, "gpt2", {"vocab_size": 50257}),
    # 168 M parameters.
    "llama": (GPT, "small", _llama(d_model=1024, num_heads=16, num_layers=12, d_ff=2816, max_len=1024)),
    # 41 M parameters, for servers that answer many.
    "llama-small": (GPT, "small", _llama(d_model=512, num_heads=8, num_layers=8, d_ff=1408, max_len=512)),
    # 360 M parameters, of which a token uses 100 M: 2 of 12 experts in each layer.
    "llama-experts": (
        GPT,
        "small",
        _llama(d_model=1024, num_heads=16, num_layers=6, d_ff=1408, max_len=1024, num_experts=12),
    ),
    "llama-tiny": (GPT, "tiny", _llama(500, num_heads=8, d_ff=96, num_layers=2)),
    "gpt-tiny": (GPT, "tiny", {"vocab_size": 500, "activation": "gelu_tanh"}),
}
CASES = (*_MODELS, "run")
GPTS = tuple(name for name, (kind, _, _) in _MODELS.items() if kind is GPT)
LLAMAS = tuple(name for name in GPTS if name.startswith("llama"))
LLAMA_BENCHES = ("llama_bench", "ik_llama_bench")  # options with paths: of llama.cpp's program and of ik_llama.cpp's


def make_model(case: dict[str, str]) -> Model:
    """Makes the model of a case, {"name": one of CASES, "run": a folder}; it is the same in each process.

    With random weights it never ends an output: the row of EOS is zeros, and a logit of 0 is never among the best. Nor
    does it generate PAD, which peers treat differently.
    """
    if case["name"] == "run":
        model, _ = load_model(case["run"], ("Transformer",))
        assert isinstance(model, Transformer)
        return model.eval()
    kind, preset, settings = _MODELS[case["name"]]
    torch.manual_seed(0)
    network = kind.from_preset(preset, **settings).eval()
    with torch.no_grad():
        ids = network.config.special_ids
        network.output_weight[[ids.pad, *ids.eos]] = 0.0
    return network


def jobs(
    case: dict[str, str], batches: Sequence[int], beams: Sequence[int]
) -> Iterator[tuple[dict[str, int], PeerJob]]:
    """Yields the jobs of a case, each with the fields that distinguish it from the others.

    For Llama's form there are prompts of two lengths, each in two jobs: up to the first new token, and with all new
    tokens.
    """
    for num_beams in beams:
        for batch in batches:
            if case["name"] not in LLAMAS:
                yield {"batch": batch, "num_beams": num_beams}, make_job(case, batch, num_beams)
                continue
            for prompt in [length for size, length in _LLAMA_PROMPTS if size == batch]:
                for new in (1, _NEW_LLAMA):
                    shape = {"batch": batch, "num_beams": num_beams, "prompt": prompt, "new": new}
                    yield shape, make_job(case, batch, num_beams, prompt, new)


def make_job(case: dict[str, str], batch: int, num_beams: int, prompt: int = 1, new_tokens: int = _NEW_GPT) -> PeerJob:
    """Makes a job for the peers.

    Args:
        case: see `make_model`; a case with a run also has "text": a text in the model's source language.
        batch: the number of outputs that are decoded together.
        num_beams: the number of beams; 1 is greedy.
        prompt, new_tokens: the numbers of a GPT's tokens.

    Raises:
        ValueError: the case has no batch of this kind, or the text is too short.
    """
    if case["name"] == "run":
        sources = mixed_sources(*_encoded(case))
        return PeerJob([sources[first : first + batch] for first in range(0, len(sources), batch)], num_beams, None)
    kind, _, settings = _MODELS[case["name"]]
    generator = torch.Generator().manual_seed(batch)
    length, new = (prompt, new_tokens) if kind is GPT else (_SOURCE, _NEW)
    if kind is GPT and num_beams != 1 or (case["name"] in GPTS and case["name"] not in LLAMAS and batch != 1):
        raise ValueError("expected batch 1 and no beams of a GPT, as llama-bench does it")
    if case["name"] in ("tiny", "gpt-tiny"):
        new = 12
    if case["name"] == "llama-tiny":
        length, new = min(length, 40), min(new, 4)
    sources = torch.randint(3, settings["vocab_size"], (batch, length), generator=generator).tolist()
    return PeerJob([sources], num_beams, new)


def mixed_sources(lines: Sequence[Sequence[int]], ends: Sequence[int]) -> Tokens:
    """Returns a source for each length of LENGTHS, in mixed order: a line of that length, or parts of several lines.

    Args:
        lines: the ids of lines, without an end.
        ends: the ids to append to each source.

    Raises:
        ValueError: the lines have too few ids.
    """
    of_length = {len(line): list(line) for line in reversed(lines)}
    rest = [token for line in lines for token in line]
    sources = []
    for length in LENGTHS:
        inner = length - len(ends)
        if inner in of_length:
            row = of_length[inner]
        else:
            row, rest = rest[:inner], rest[inner:]
        if len(row) < inner:
            raise ValueError(f"expected a text of more tokens, got {sum(map(len, lines))}")
        sources.append([*row, *ends])
    random.Random(0).shuffle(sources)
    return sources


def _encoded(case: dict[str, str]) -> tuple[Tokens, list[int]]:
    model, tokenizer = load_model(case["run"], ("Transformer",))
    assert tokenizer is not None
    eos = model.config.special_ids.first_eos
    lines = [tokenizer.encode(line) for line in read_lines(Path(case["text"]))]
    return [[token for token in line if token != eos] for line in lines], [eos]
