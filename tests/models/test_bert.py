"""Tests BERT: padded and packed texts, pooling, labels, saving, quantising, and wrong settings and calls."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.encoding.engine import EncoderEngine
from fastformer.models import BERT, BERTConfig, SpecialIds
from fastformer.models.quantization import quantized_names
from fastformer.nn import SequenceLayout
from tests.covering import each
from tests.engine.plain_encoder import POOLINGS, pooled
from tests.memory import resident
from tests.nn.comparing import randomised

VOCAB = 50
SIZES: dict[str, Any] = {"d_model": 32, "num_heads": 4, "num_layers": 2, "d_ff": 40, "max_len": 24}
OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {"token_types": 2, "pooler": True, "num_labels": 3},
    "pre-norm": {"norm_first": True, "embedding_norm": False, "num_labels": 2, "head": "roberta", "norm": "rms"},
    "mpnet": {"positions": "learned-relative", "num_labels": 2, "head": "distilbert", "head_dim": 12},
    "t5": {"positions": "relative", "norm_first": True, "norm": "rms", "bias": False, "activation": "geglu_tanh"},
    "electra": {"embedding_size": 20, "token_types": 3, "num_labels": 1, "head": "electra", "activation": "relu"},
    "albert": {"embedding_size": 20, "num_layers": 5, "layer_groups": 2, "pooler": True, "num_labels": 2},
    "modernbert": {
        "positions": "rotary", "rotary_base": 160_000.0, "local_rotary_base": 10_000.0, "window_size": 2,
        "window_layers": (False, True), "norm_first": True, "first_norm": False, "bias": False, "activation": "geglu",
        "num_labels": 3, "head": "modernbert", "head_pooling": "mean",
    },
    "eurobert": {
        "positions": "rotary", "norm": "rms", "norm_first": True, "embedding_norm": False, "bias": False,
        "activation": "swiglu", "num_kv_heads": 2, "num_labels": 3, "head": "electra", "head_pooling": "late",
    },
    "sines": {"positions": "sinusoidal", "window_size": 3, "attention_bias": False},
}  # fmt: skip
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def made(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> BERT:
    torch.manual_seed(4)
    config = BERTConfig(VOCAB, **SIZES | options)
    return randomised(BERT(config, dtype=dtype)).eval()


def batch(model: BERT, lengths: tuple[int, ...] = (9, 4, 1)) -> tuple[Tensor, Tensor | None, SequenceLayout]:
    """Returns padded ids, their types, and the layout of the packed ids."""
    torch.manual_seed(5)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)))
    types = torch.randint(0, model.config.token_types, ids.shape) if model.config.token_types else None
    for row, length in enumerate(lengths):
        ids[row, length:] = model.config.special_ids.pad
    return ids, types, SequenceLayout.packed(torch.tensor(lengths), max(lengths))


@options
def test_padded_packed_and_single_texts_are_the_same(options) -> None:
    model = made(options)
    ids, types, layout = batch(model)
    padded = model.encode(ids, token_types=types)
    flat_types = None if types is None else layout.pack(types)
    packed = model.encode(layout.pack(ids), layout=layout, token_types=flat_types)
    torch.testing.assert_close(packed, layout.pack(padded), rtol=0, atol=1e-11)
    outputs = model(layout.pack(ids), layout=layout, token_types=flat_types)
    for row, length in enumerate(layout.seqlens.tolist()):
        text = ids[row : row + 1, :length]
        text_types = None if types is None else types[row : row + 1, :length]
        alone = model.encode(text, token_types=text_types)[0]
        torch.testing.assert_close(alone, padded[row, :length], rtol=0, atol=1e-11)
        if model.config.num_labels:
            torch.testing.assert_close(model(text, token_types=text_types)[0], outputs[row], rtol=0, atol=1e-11)
    if model.config.num_labels:
        torch.testing.assert_close(outputs, model(ids, token_types=types), rtol=0, atol=1e-11)
        assert outputs.shape == (3, model.config.num_labels)
    else:
        assert torch.equal(outputs, packed)


@options
def test_every_weight_is_trained(options) -> None:
    model = made(options)
    ids, types, layout = batch(model)
    hidden = model.encode(ids, token_types=types)
    real = layout.pack(hidden)
    loss = (real * torch.randn_like(real)).sum()
    if model.config.num_labels:
        logits = model.classify(ids, token_types=types)
        loss = loss + (logits * torch.randn_like(logits)).sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@options
def test_a_saved_model_is_the_same(options, tmp_path) -> None:
    model = made(options)
    ids, types, _ = batch(model)
    model.save_pretrained(tmp_path)
    loaded = BERT.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(ids, token_types=types), model(ids, token_types=types))


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantised_model_is_saved_small(precision, tmp_path) -> None:
    model = made(OPTIONS["bert"], torch.float32)
    ids, types, _ = batch(model)
    rounded = model.quantize(precision)
    assert not torch.equal(rounded.encode(ids, token_types=types), model.encode(ids, token_types=types))
    # A few rows read the pooler and the head, which keep their precision.
    assert not [name for name in quantized_names(model) if name.startswith(("pooler", "head"))]
    rounded.save_pretrained(tmp_path)
    loaded = BERT.from_pretrained(tmp_path)
    assert loaded.precision == precision
    assert torch.equal(loaded(ids, token_types=types), rounded(ids, token_types=types))


def test_pooling_follows_its_definition() -> None:
    model = made(OPTIONS["bert"])
    ids, _, layout = batch(model)
    hidden = model.encode(ids)
    hidden[1, 4:] = float("nan")  # what padding holds must not matter
    expected: dict[str, list[Tensor]] = {}
    for row, length in enumerate(layout.seqlens.tolist()):
        states = hidden[row, :length]
        for kind in POOLINGS:
            expected.setdefault(kind, []).append(pooled(kind, states))
        after_cls = torch.tanh(F.linear(states[0], model.pooler.weight, model.pooler.bias))
        expected.setdefault("pooler", []).append(after_cls)
    for kind, rows in expected.items():
        actual = model.pooled(hidden, model.layout_of(ids), kind)
        torch.testing.assert_close(actual, torch.stack(rows), rtol=0, atol=1e-12)
        assert torch.equal(model.pooled(layout.pack(hidden), layout, kind), actual)
    whole = model.pooled(hidden[:1], None, "mean")
    torch.testing.assert_close(whole[0], expected["mean"][0], rtol=0, atol=1e-12)
    empty = SequenceLayout.packed(torch.tensor([0, 2]), 2)
    assert not model.pooled(hidden[0, :2], empty, "mean")[0].any()


def test_a_pad_that_ends_texts_is_padding_only_by_a_layout() -> None:
    model = made({**OPTIONS["eurobert"], "special_ids": SpecialIds(pad=1, eos=(7, 1))})
    pairs = [[3, 4, 1, 5, 6, 1], [8, 1, 1]]  # each text of a pair has its end
    ids = torch.tensor([pairs[0], pairs[1] + [1] * 3])
    assert model.layout_of(ids).seqlens.tolist() == [6, 6]
    padded = model(ids, layout=SequenceLayout.padded(torch.tensor([6, 3]), 6))
    for row, text in zip(padded, pairs, strict=True):
        torch.testing.assert_close(model(torch.tensor([text]))[0], row, rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="PAD"):
        made({**OPTIONS["eurobert"], "special_ids": SpecialIds(pad=1, eos=7)})(ids)


def test_late_pooling_is_the_mean_of_the_logits_of_tokens() -> None:
    model = made(OPTIONS["eurobert"])
    ids, _, layout = batch(model)
    hidden, head = model.encode(ids), model.head
    assert head is not None
    hidden[1, 4:] = float("nan")
    due = torch.stack([head(hidden[row, :length]).mean(0) for row, length in enumerate(layout.seqlens.tolist())])
    torch.testing.assert_close(model.classify_hidden(hidden, model.layout_of(ids)), due, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(ids), due, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "electra", "modernbert", "pre-norm", "eurobert"])
def test_heads_apply_their_dropout(kind) -> None:
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.5}
    model = made({**OPTIONS[kind], **rates})
    ids, types, _ = batch(model)
    seen: list[tuple[int, ...]] = []
    assert model.head is not None
    model.head.dropout.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    expected = model(ids, token_types=types)
    assert not torch.equal(model.train()(ids, token_types=types), expected)
    # RoBERTa and ELECTRA drop out what their head reads, too.
    shape = (3, 9, 32) if kind == "eurobert" else (3, 32)
    assert seen == [shape] * (4 if model.config.head in ("roberta", "electra") else 2)


def test_losses_are_those_of_their_labels() -> None:
    model = made(OPTIONS["bert"])
    ids, types, _ = batch(model)
    logits = model(ids, token_types=types)
    classes, several = torch.tensor([2, -100, 0]), torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1]])
    loss = model.loss(ids, classes, token_types=types)
    torch.testing.assert_close(loss, F.cross_entropy(logits[[0, 2]], classes[[0, 2]]))
    assert model.loss(ids, classes, token_types=types, reduction="none")[1] == 0
    loss = model.loss(ids, several, token_types=types)
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits, several.double()))
    model = made(OPTIONS["electra"])
    numbers = torch.tensor([0.5, -1, 2])
    torch.testing.assert_close(model.loss(ids, numbers), (model(ids)[:, 0] - numbers).square().mean())


@each(
    "settings, name",
    [
        ({"num_labels": 2}, "pooler"),
        ({"num_labels": 2, "pooler": True, "head_pooling": "mean"}, "head_pooling"),
        ({"first_norm": False}, "norm_first"),
        ({"window_layers": [True, False]}, "window_size"),
        ({"window_size": 2, "window_layers": [True]}, "window_layers"),
        ({"window_size": 2, "window_layers": 1}, "window_layers"),
        ({"local_rotary_base": 100.0}, "local_rotary_base"),
        ({"rotary_scaling": {"kind": "linear", "factor": 2.0}}, "rotary_scaling"),
        ({"positions": "rotary", "rotary_scaling": {"kind": "linear"}}, "factor"),
        (
            {
                "positions": "rotary",
                "max_len": 9,
                "rotary_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
            },
            "max_len",
        ),
        ({"positions": "rotary", "local_rotary_base": 100.0}, "window_size"),
        ({"positions": "rotary", "head_dim": 3}, "even"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"positions": "sinusoidal", "embedding_size": 5}, "even"),
        ({"positions": "relative", "num_buckets": 32, "max_distance": 9}, "max_distance"),
        ({"positions": "absolute"}, "positions"),
        ({"activation": "tanh"}, "activation"),
        ({"num_heads": 5}, "num_heads"),
        ({"token_types": -1}, "token_types"),
        ({"special_ids": SpecialIds(pad=VOCAB)}, "pad"),
    ],
)
def test_bad_settings_are_named(settings, name) -> None:
    with pytest.raises(ValueError, match=name):
        BERTConfig(VOCAB, **SIZES | settings)


def test_bad_calls_are_named() -> None:
    model, plain = made(OPTIONS["bert"]), made(OPTIONS["sines"])
    ids, types, _ = batch(model)
    assert types is not None
    labels = torch.tensor([0, 1, 2])
    left = ids.flip(1)
    calls: list[tuple[Any, str]] = [
        (lambda: model(ids + VOCAB), "token ids"),
        (lambda: model(ids.repeat(1, 3)), "max_len"),
        (lambda: model(left), "PAD"),
        (lambda: model(ids, token_types=types + 2), "token_types"),
        (lambda: model(ids, token_types=types[:, :3]), "token_types"),
        (lambda: plain(ids, token_types=types), "token_types"),
        (lambda: plain.classify(ids), "num_labels"),
        (lambda: plain.pooled(plain(ids), None, "pooler"), "pooler"),
        (lambda: plain.pooled(plain(ids), None, "median"), "median"),
        (lambda: plain.pooled(plain(ids)[0], None), "shape"),
        (lambda: plain.pooled(plain(ids), model.layout_of(ids[:2])), "layout"),
        (lambda: model.loss(ids, labels + 1), "labels"),
        (lambda: model.loss(ids, labels[:2]), "labels"),
        (lambda: model.loss(ids, labels.double()), "labels"),
        (lambda: model.loss(ids, labels, reduction="max"), "reduction"),
        (lambda: BERT.from_preset("bas", vocab_size=9), "preset"),
        (lambda: BERT({"vocab_size": 9}), "BERTConfig"),
    ]
    for call, name in calls:
        with pytest.raises(ValueError, match=name):
            call()


def test_layers_that_share_weights_take_memory_once() -> None:
    model = BERT(BERTConfig(VOCAB, d_model=256, num_heads=2, num_layers=60, embedding_size=8, layer_groups=1)).eval()
    assert sum(each.numel() for each in model.parameters()) < 900_000
    assert {name.split(".")[2] for name in model.state_dict() if name.startswith("encoder.layers.")} == {"0"}
    for precision in ("bf16", "int8", "int4", "fp32"):
        before, engine = resident(), EncoderEngine(model, precision)
        expected = engine.encode([[3, 4, 5]])
        assert engine.name == "cpp" and resident() - before < 40, precision  # 59 to 185 MiB if each layer were packed
    for other in (copy.deepcopy(model), copy.deepcopy(model).bfloat16().float(), model.quantize()):
        assert sum(each.numel() for each in other.parameters()) < 900_000
    with torch.no_grad():
        model.encoder.layers[7].linear1.weight.mul_(2)  # of all layers
    assert not np.array_equal(engine.encode([[3, 4, 5]]), expected)
    model.encoder.layers[7] = copy.deepcopy(model.encoder.layers[7])  # which is one of its own from now on
    with torch.no_grad():
        model.encoder.layers[7].linear1.weight.mul_(2)
        found, hidden = engine.encode([[3, 4, 5]], pooling="none"), model.encode(torch.tensor([[3, 4, 5]]))
    np.testing.assert_allclose(found, hidden[0].numpy(), rtol=1e-4, atol=1e-4)
    assert {name.split(".")[2] for name in model.state_dict() if name.startswith("encoder.layers.")} == {"0", "7"}
