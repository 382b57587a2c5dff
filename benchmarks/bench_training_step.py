"""A training step of the `base` model: forward, backward, Adam. The learning rate is 0, so that all steps are alike."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import Benchmark, Inputs, Provider, Shape
from fastformer import baseline
from fastformer.data import Batch, Example, collate
from fastformer.models import Transformer
from fastformer.ops import sinusoidal_positions

VOCAB_SIZE, LABEL_SMOOTHING = 8000, 0.1
# Tokens of 64 random sentence pairs of Multi30k, English and German, under a joint BPE of 8,000.
MULTI30K = (
    (14, 16), (13, 12), (11, 11), (15, 16), (9, 12), (10, 7), (17, 20), (7, 7), (11, 11), (17, 15), (12, 13), (10, 11),
    (21, 18), (14, 18), (11, 12), (17, 24), (24, 16), (21, 27), (17, 15), (20, 17), (12, 12), (11, 11), (9, 9),
    (14, 17), (14, 15), (15, 14), (19, 17), (24, 26), (20, 14), (17, 16), (8, 9), (13, 12), (15, 16), (9, 9), (10, 9),
    (13, 14), (13, 15), (20, 20), (30, 30), (18, 24), (12, 11), (9, 9), (13, 11), (16, 19), (34, 30), (10, 11),
    (14, 15), (15, 16), (12, 13), (11, 11), (24, 24), (16, 15), (18, 17), (15, 15), (19, 14), (11, 15), (14, 16),
    (11, 13), (18, 21), (17, 23), (15, 16), (8, 8), (19, 20), (10, 10),
)  # fmt: skip


class TorchTransformer(nn.Module):
    """torch.nn.Transformer, which uses scaled_dot_product_attention, between embeddings and a tied projection."""

    positions: Tensor

    def __init__(self, d_model: int = 512, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.register_buffer("positions", sinusoidal_positions(512, d_model))
        self.dropout = nn.Dropout(dropout)
        self.transformer = nn.Transformer(d_model, batch_first=True, norm_first=True, dropout=dropout)

    def _embed(self, ids: Tensor) -> Tensor:
        weight = self.embedding.weight
        return self.dropout(self.embedding(ids) * weight.shape[1] ** 0.5 + self.positions[: ids.shape[1]])

    def loss(self, source: Tensor, target_in: Tensor, target_out: Tensor, *, label_smoothing: float) -> Tensor:
        """As fastformer.baseline.Transformer.loss."""
        causal = self.transformer.generate_square_subsequent_mask(target_in.shape[1], device=source.device)
        padding = source == 0
        hidden = self.transformer(
            self._embed(source), self._embed(target_in), tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        logits = F.linear(hidden, self.embedding.weight).float().flatten(0, 1)
        return F.cross_entropy(logits, target_out.flatten(), label_smoothing=label_smoothing, reduction="sum")


@functools.cache
def _examples(lengths: str) -> list[Example]:
    pairs = MULTI30K if lengths == "multi30k" else ((32, 32),) * 64
    generator = torch.Generator().manual_seed(0)
    return [
        Example(*(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in pair)) for pair in pairs
    ]


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Nothing but the dtype and the device of the step: models and batches are made once and kept."""
    return {"like": torch.zeros(1, device=device)}


@functools.cache
def _trained(kind: str, dtype: torch.dtype, device: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model with weights in fp32 (fp64 when that is asked for), and its optimizer."""
    torch.manual_seed(0)
    model: Any = Transformer.from_preset("base", vocab_size=VOCAB_SIZE)
    if kind == "baseline":
        plain = baseline.Transformer(VOCAB_SIZE)
        plain.load_state_dict(model.state_dict())
        model = plain
    elif kind == "torch.nn":
        model = TorchTransformer()
    model = copy.deepcopy(model).to(device, torch.float64 if dtype == torch.float64 else torch.float32).train()
    if kind == "torch.nn":
        model.loss = torch.compile(model.loss)
    return model, torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), fused=True)


@functools.cache
def _batch(lengths: str, packed: bool, device: str) -> Batch:
    return collate(_examples(lengths), packed=packed).to(device)


def step(kind: str) -> Provider:
    """The provider of one model."""

    def run(x: Inputs, shape: Shape) -> Tensor:
        dtype, device = x["like"].dtype, str(x["like"].device)
        model, optimizer = _trained(kind, dtype, device)
        packed = kind == "fastformer" and shape["lengths"] == "multi30k"
        batch = _batch(shape["lengths"], packed, device)
        layouts = {"source_layout": batch.source_layout, "target_layout": batch.target_layout}
        torch.manual_seed(0)  # the same dropout in every step, so that backends can be compared
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model.loss(
                batch.source, batch.target_in, batch.target_out, label_smoothing=LABEL_SMOOTHING,
                **(layouts if kind == "fastformer" else {}),
            )  # fmt: skip
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


def flops(shape: Shape, mode: str) -> float:
    """Products with weights only, forward and backward: 6 a weight and real token."""
    pairs = MULTI30K if shape["lengths"] == "multi30k" else ((32, 32),) * 64
    source, target = (sum(pair[side] for pair in pairs) for side in (0, 1))
    d_model, d_ff, layers = 512, 2048, 6
    encoder = layers * (4 * d_model**2 + 2 * d_model * d_ff) + layers * 2 * d_model**2  # and cross-attention's K, V
    decoder = layers * (6 * d_model**2 + 2 * d_model * d_ff) + d_model * VOCAB_SIZE
    return 6.0 * (source * encoder + target * decoder)


SHAPES = [{"lengths": lengths, "dropout_p": 0.1} for lengths in ("equal", "multi30k")]

BENCHMARKS = [
    Benchmark(
        name="training_step",
        shapes={"cpu": SHAPES, "cuda": SHAPES},
        make_inputs=make_inputs,
        providers={"fastformer": step("fastformer"), "baseline": step("baseline"), "torch.nn": step("torch.nn")},
        baseline="baseline",
        compiled=("torch.nn",),
        modes=("step",),
        quick=0,
        flops=flops,
        tokens=lambda shape: sum(map(sum, MULTI30K if shape["lengths"] == "multi30k" else ((32, 32),) * 64)),
    )
]
