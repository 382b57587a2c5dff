"""A training step of the `base` model: forward, backward, Adam. The learning rate is 0, so that all steps are equal.

The case "loss" is the loss of the same batches in evaluation: all models have the same weights and are checked in fp64.

On a GPU there are steps as CUDA graphs as well; fastformer's batches are rounded up, as by `fastformer train
--cuda_graphs`. A graph keeps its memory, so the peak of a call doesn't show how much it uses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape
from fastformer import baseline
from fastformer.baseline.transformer import sinusoids
from fastformer.data import Batch, Example, collate
from fastformer.graphs import Graph, Graphs
from fastformer.models import Transformer
from fastformer.nn.copied_weights import copied_weights
from fastformer.training.graph_updates import pad_batch, size_of

VOCAB_SIZE, LABEL_SMOOTHING = 8000, 0.1
# The tokens of 64 random sentence pairs of Multi30k, English and German, under a joint BPE of 8,000.
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

    def __init__(self) -> None:
        super().__init__()
        d_model, dropout = 512, 0.1
        self.embedding = nn.Embedding(VOCAB_SIZE, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.register_buffer("positions", sinusoids(512, d_model, interleaved=False))
        self.dropout = nn.Dropout(dropout)
        self.transformer = nn.Transformer(
            d_model, batch_first=True, norm_first=True, dropout=dropout, layer_norm_eps=1e-6
        )

    def load(self, state: dict[str, Tensor]) -> None:
        """Copies the weights of `fastformer.models.Transformer`; its missing attention biases become 0."""
        parameters = {name.removeprefix("transformer."): parameter for name, parameter in self.named_parameters()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name in state:
                    parameter.copy_(state[name])
                elif name.endswith(("in_proj_bias", "out_proj.bias")):
                    parameter.zero_()
                else:
                    raise KeyError(name)

    def _embed(self, ids: Tensor) -> Tensor:
        weight = self.embedding.weight
        x = self.embedding(ids) * weight.shape[1] ** 0.5 * (ids != 0)[..., None]
        return self.dropout(x + self.positions[: ids.shape[1]])

    def loss(self, source: Tensor, target_in: Tensor, target_out: Tensor, *, label_smoothing: float) -> Tensor:
        """Computes the same as fastformer.baseline.Transformer.loss."""
        causal = self.transformer.generate_square_subsequent_mask(target_in.shape[1], device=source.device)
        padding = source == 0
        hidden = self.transformer(
            self._embed(source), self._embed(target_in), tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        logits = F.linear(hidden, self.embedding.weight).float().flatten(0, 1)
        return F.cross_entropy(logits, target_out.flatten(), label_smoothing=label_smoothing, reduction="sum")


def _pairs(shape: Shape) -> Sequence[tuple[int, int]]:
    """Returns the lengths of the sentences; "sentences" in a shape is their number."""
    pairs = MULTI30K if shape["lengths"] == "multi30k" else ((32, 32),) * len(MULTI30K)
    return pairs[: shape.get("sentences")]


@functools.cache
def _examples(pairs: Sequence[tuple[int, int]]) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    return [
        Example(*(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in pair)) for pair in pairs
    ]


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes a tensor with the dtype and the device of the step; models and batches are made once and cached."""
    return {"like": torch.zeros(1, device=device)}


def make_model(kind: str, dtype: torch.dtype, device: str) -> Any:
    """Makes a model; all kinds have the same weights, in fp32 (in fp64 if dtype is fp64)."""
    torch.manual_seed(0)
    model: Any = Transformer.from_preset("base", vocab_size=VOCAB_SIZE)
    state = model.state_dict()
    if kind == "baseline":
        model = baseline.Transformer(VOCAB_SIZE)
        model.load_state_dict(state)
    elif kind != "fastformer":
        model = TorchTransformer()
        model.load(state)
    model = model.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    if kind == "torch.compile":
        model.loss = torch.compile(model.loss, dynamic=False)
    return model


@functools.cache
def _evaluated(kind: str, dtype: torch.dtype, device: str) -> Any:
    return make_model(kind, dtype, device).eval()


@functools.cache
def _trained(kind: str, dtype: torch.dtype, device: str) -> tuple[Any, torch.optim.Optimizer]:
    """Returns a model and its optimizer."""
    model = make_model(kind, dtype, device).train()
    return model, torch.optim.Adam(
        model.parameters(), lr=0.0, betas=(0.9, 0.98), fused=True, capturable=device != "cpu"
    )


@functools.cache
def _collated(pairs: Sequence[tuple[int, int]], packed: bool, device: str) -> Batch:
    return collate(_examples(pairs), packed=packed).to(device)


def _batch(kind: str, shape: Shape, device: str) -> Batch:
    """Makes a batch; fastformer's is packed, the others are padded."""
    return _collated(_pairs(shape), kind == "fastformer" and shape["lengths"] == "multi30k", device)


def _loss(kind: str, model: Any, batch: Batch, dtype: torch.dtype) -> Tensor:
    layouts = {"source_layout": batch.source_layout, "target_layout": batch.target_layout}
    device = batch.target_in.device.type
    # As `fastformer train` does on a GPU.
    copies = copied_weights(model) if kind == "fastformer" and device == "cuda" else contextlib.nullcontext()
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16), copies:
        loss: Tensor = model.loss(
            batch.source, batch.target_in, batch.target_out, label_smoothing=LABEL_SMOOTHING,
            **(layouts if kind == "fastformer" else {}),
        )  # fmt: skip
    return loss


def _step(kind: str, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Runs forward, backward and Adam, and returns the loss."""
    model, optimizer = _trained(kind, dtype, str(batch.target_in.device))
    loss = _loss(kind, model, batch, dtype)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def step(kind: str) -> Provider:
    """Makes the provider of one model."""

    def run(x: Inputs, shape: Shape) -> Tensor:
        torch.manual_seed(0)  # the same dropout in every step, so that backends can be compared
        return _step(kind, _batch(kind, shape, str(x["like"].device)), x["like"].dtype)

    return run


def evaluation(kind: str) -> Provider:
    """Makes the provider of one model's loss, without dropout."""

    def run(x: Inputs, shape: Shape) -> Tensor:
        dtype, device = x["like"].dtype, str(x["like"].device)
        return _loss(kind, _evaluated(kind, dtype, device), _batch(kind, shape, device), dtype)

    return run


@functools.cache
def _captured(kind: str, lengths: str, dtype: torch.dtype, device: str) -> tuple[Graph, Tensor]:
    """Captures a step as a graph; returns it and the tensor that receives the loss."""
    batch = _batch(kind, {"lengths": lengths}, "cpu")
    if kind == "fastformer" and lengths == "multi30k":  # packed
        most = max(batch.num_source_tokens, batch.num_target_tokens)
        batch = pad_batch(batch, size_of([batch], 2 * most, 512), pad=0)
    batch = batch.to(device)
    loss = torch.zeros((), device=device, dtype=torch.promote_types(dtype, torch.float32))

    def once() -> None:
        loss.copy_(_step(kind, batch, dtype))

    graphs = Graphs(device)
    for _ in range(3):  # torch.compile compiles in the first call, and may again later
        graphs.warm_up(once)
    return graphs.capture(once), loss


def graph_step(kind: str) -> Provider:
    """Makes the provider of the same step, captured and replayed."""

    def run(x: Inputs, shape: Shape) -> Tensor:
        graph, loss = _captured(kind, shape["lengths"], x["like"].dtype, str(x["like"].device))
        graph.replay()
        return loss

    return run


def flops(shape: Shape, mode: str) -> float:
    """Counts products with weights only: 2 a weight and real token forward, 4 backward."""
    source, target = (sum(pair[side] for pair in _pairs(shape)) for side in (0, 1))
    d_model, d_ff, layers = 512, 2048, 6
    encoder = layers * (4 * d_model**2 + 2 * d_model * d_ff) + layers * 2 * d_model**2  # and cross-attention's K, V
    decoder = layers * (6 * d_model**2 + 2 * d_model * d_ff) + d_model * VOCAB_SIZE
    return (2.0 if mode == "fwd" else 6.0) * (source * encoder + target * decoder)


SHAPES = [{"lengths": lengths, "dropout_p": 0.1} for lengths in ("equal", "multi30k")]

# The provider "torch.nn" was once the compiled one; so neither has this name now.
KINDS = {
    "fastformer": "fastformer",
    "baseline": "baseline",
    "torch.nn eager": "torch.nn",
    "torch.compile": "torch.compile",
}
COMMON: dict[str, Any] = {
    "suite": "model",
    "make_inputs": make_inputs,
    "baseline": "baseline",
    "compiled": ("torch.compile",),
    "quick": 0,
    "flops": flops,
    "tokens": lambda shape: sum(map(sum, _pairs(shape))),
    # In fp64 and plain operations, all sentences would take minutes.
    "checked": lambda shape: {"sentences": 8, **shape},
}

BENCHMARKS = [
    Benchmark(
        name="training_step",
        shapes={"cpu": SHAPES, "cuda": SHAPES},
        providers={
            **{name: step(kind) for name, kind in KINDS.items()},
            "fastformer graph": graph_step("fastformer"),
            "torch.compile graph": graph_step("torch.compile"),
        },
        also_ours=("fastformer graph",),
        only_on={"fastformer graph": "cuda", "torch.compile graph": "cuda"},
        modes=("step",),
        without_dropout=lambda shape: None,  # "loss" checks it; torch.compile would take minutes
        **COMMON,
    ),
    Benchmark(
        name="loss",
        shapes={device: [{"lengths": shape["lengths"]} for shape in SHAPES] for device in ("cpu", "cuda")},
        providers={name: evaluation(kind) for name, kind in KINDS.items()},
        modes=("fwd",),
        **COMMON,
    ),
]
