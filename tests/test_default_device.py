"""fastformer's tensors are made on the right device, whatever the default device is; "meta" represents a GPU here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fastformer
from fastformer import models
from fastformer.data.batching import collate, plan_epoch
from fastformer.data.examples import Example
from fastformer.generation import generate
from fastformer.nn import TransformerEncoder, TransformerEncoderLayer
from tests.generation.small import CPP
from tests.integrations.families import FAMILIES, IDS, make

MASK = torch.arange(9) < torch.tensor([[9], [4], [1], [7]])


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_of_transformers_models(family: str) -> None:
    model = make(family).float().eval()
    decodes = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    fastformer.accelerate(model)
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK.long(), **decodes).logits
        with torch.device("meta"):
            logits = model(IDS, attention_mask=MASK.long(), **decodes).logits
    assert torch.equal(logits, expected)


def test_a_padded_batch_on_the_default_device() -> None:
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(24, 3, 40, batch_first=True)
    assert isinstance(layer, nn.Module)
    encoder, x = TransformerEncoder(layer, 2).eval(), torch.randn(4, 9, 24)
    for mask in (~MASK, torch.zeros(4, 9).masked_fill(~MASK, -torch.inf)):
        expected = encoder(x, src_key_padding_mask=mask)
        with torch.device("meta"):
            assert torch.equal(encoder(x, src_key_padding_mask=mask), expected)


def test_a_loaded_model_is_on_the_cpu(tmp_path) -> None:
    model = models.Transformer.from_preset("tiny", vocab_size=40)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        loaded = models.Transformer.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("engine", ["kv_cache", "recompute", "graph", CPP])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation(engine: str, num_beams: int) -> None:
    torch.manual_seed(0)
    model = models.Transformer.from_preset("tiny", vocab_size=40).eval()
    source = np.asarray(IDS) % 40
    expected = generate(model, source, engine=engine, num_beams=num_beams, max_new_tokens=6)
    with torch.device("meta"):
        tokens = generate(model, source, engine=engine, num_beams=num_beams, max_new_tokens=6)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batching", ["bucketed", "random"])
def test_batches(batching: str, packed: bool) -> None:
    examples = [Example([5] * n, [6] * (n + 1)) for n in range(1, 9)]
    with torch.device("meta"):
        lengths = torch.tensor([example.lengths for example in examples], device="cpu")
        plan = plan_epoch(lengths, max_tokens=20, batching=batching, seed=0, epoch=0)
        batch = collate([examples[i] for i in plan[0]], packed=packed)
    assert plan == plan_epoch(lengths, max_tokens=20, batching=batching, seed=0, epoch=0)
    assert batch.source is not None and batch.source.device.type == batch.target_in.device.type == "cpu"
