"""Models that are trained here, in the files of other programs, against these programs: perplexity and tokens.

    pip install gguf xllamacpp && pytest -m slow tests/checkpoints/test_trained.py

Trained weights have what random ones lack: a few large numbers, and one likely token. The texts are number words,
and the training takes less than a minute.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fastformer.checkpoints.gguf.blocks import Kind
from fastformer.checkpoints.gguf.write import write_gguf
from fastformer.generation import generate
from fastformer.models import GPT
from fastformer.number_words import english, number_pairs
from tests.checkpoints.test_gguf import LLAMA, load
from tests.checkpoints.test_llama_cpp import LlamaCpp, with_floats

pytestmark = pytest.mark.slow
NUMBERS = number_pairs(21_000, seed=1)


def trained(model: Any, losses: Iterator[Tensor], steps: int, peak: float) -> None:
    """Trains a model by the mean losses of batches."""
    optimizer = torch.optim.Adam(model.parameters(), peak, betas=(0.9, 0.98))
    warm = max(1, steps // 8)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm))
    )
    for _ in range(steps):
        loss = next(losses)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


TEXT, CONTEXT, NEW, PROMPTS = 64, 24, 64, 8


@pytest.fixture(scope="module")
def llama() -> tuple[GPT, Any, Tensor]:
    """A small Llama that has read number words, its tokenizer, and rows of tokens that it hasn't read."""
    source, tokenizer = load(LLAMA, dtype=torch.float32)
    config = dataclasses.replace(
        source.config, d_model=128, num_heads=4, num_kv_heads=2, head_dim=None, num_layers=3, d_ff=256, max_len=256,
        rotary_scaling=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(config).train()
    ids = torch.tensor(tokenizer.encode(", ".join(map(english, NUMBERS))))
    rows = ids[: len(ids) // (TEXT + 1) * (TEXT + 1)].view(-1, TEXT + 1)
    unseen, rows = rows[:16], rows[16:]

    def losses() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(0)
        while True:
            batch = rows[torch.randint(len(rows), (32,), generator=draw)]
            yield model.loss(batch[:, :-1], batch[:, 1:], reduction="mean")

    trained(model, losses(), 300, 2e-3)
    return model.eval(), tokenizer, unseen


class Transformers:
    """A file in transformers, which reads it by the gguf package."""

    def __init__(self, path: Path) -> None:
        pytest.importorskip("gguf", reason="the gguf library is not installed")
        self._model = transformers.LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name)

    def log_probs(self, tokens: list[int], first: int, vocab_size: int) -> Tensor:
        """Returns those of the tokens at the places from `first` on."""
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([tokens[:-1]])).logits[0, first - 1 :]
        return logits.log_softmax(-1)


class OfLlamaCpp(LlamaCpp):
    def __init__(self, path: Path) -> None:
        pytest.importorskip("xllamacpp", reason="the xllamacpp library is not installed")
        super().__init__(path)

    def log_probs(self, tokens: list[int], first: int, vocab_size: int) -> Tensor:
        return torch.stack([self.next(tokens[:place], vocab_size) for place in range(first, len(tokens))])


# Programs, in how many rows near ties are decided otherwise, and by how much their log-probabilities differ at most.
PROGRAMS: dict[str, tuple[Callable[[Path], Any], int, float]] = {
    "transformers": (Transformers, 1, 1e-4),
    "llama.cpp": (OfLlamaCpp, PROMPTS, 0.1),  # it rounds the inputs of matrices
    "llama.cpp, with the numbers as floats": (lambda path: OfLlamaCpp(with_floats(path)), 1, 1e-3),
}


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("program", PROGRAMS)
def test_perplexity_and_greedy_tokens_are_those_of(
    program: str, kind: Kind, llama: Any, tmp_path: Path, record_property: Any
) -> None:
    model, tokenizer, unseen = llama
    write_gguf(path := tmp_path / "x.gguf", model, tokenizer, kind)
    make, most, gap = PROGRAMS[program]
    engine, ours, size = make(path), load(path, dtype=torch.float32)[0], model.config.vocab_size
    assert ours.precision == {Kind.Q8_0: "int8", Kind.Q4_0: "int4"}[kind]
    with torch.inference_mode():
        logs = ours(unseen[:, :-1]).log_softmax(-1).gather(-1, unseen[:, 1:, None])[:, 7:]
    theirs = torch.stack([engine.log_probs(row, 8, size) for row in unseen.tolist()]).gather(-1, unseen[:, 8:, None])
    found, due = (math.exp(-float(each.mean())) for each in (logs, theirs))
    prompts = unseen[:PROMPTS, :CONTEXT]
    tokens = generate(ours, prompts, engine="cpp", precision="fp32", min_new_tokens=NEW, max_new_tokens=NEW)
    different = 0
    for row in tokens:
        scores = engine.log_probs(row.tolist(), CONTEXT, size)
        for place in (scores.argmax(-1) != row[CONTEXT:]).nonzero()[:1]:
            assert scores[place].max() - scores[place, row[CONTEXT + place]] < gap
            different += 1
    record_property("perplexity here, the program's, rows that differ", (found, due, different))
    assert found < 10 and abs(found / due - 1) < 1e-3 and different <= most
