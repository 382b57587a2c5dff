"""Decoding never applies dropout, even to a model in training mode, and restores the modes."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import ByteTokenizer
from fastformer.generation import AsyncGenerator, Translator, generate
from fastformer.generation.evaluation import evaluating
from fastformer.generation.model_protocols import dtype_precision
from fastformer.models import GPT, Transformer
from tests.generation.small import tiny


def transformer() -> Transformer:
    return tiny(seed=2, dropout=0.5).train()


@pytest.fixture
def often():
    """Makes threads switch so often that each step of one overlaps with the others."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("engine", ["kv_cache", None])
def test_concurrent_threads_never_apply_dropout(engine, often) -> None:
    model = transformer()
    translator, texts = Translator(model.eval(), ByteTokenizer()), ["ab", "c", "def"]
    options = {"max_new_tokens": 6} | ({"engine": engine} if engine else {})
    ids = [[5, 6, 7], [8]]
    due = translator.translate(texts, **options), generate(model, ids, **options).tolist()
    model.train()
    model.encoder.layers[0].eval()
    modes = [module.training for module in model.modules()]

    def work(number: int) -> list[bool]:
        found = []
        for turn in range(4):
            if (number + turn) % 3 == 0:
                found.append(generate(model, ids, **options).tolist() == due[1])
            elif (number + turn) % 3 == 1:
                found.append(translator.translate(texts, **options) == due[0])
            else:
                with pytest.raises(ValueError, match="at most|too long"):
                    translator.translate(["x" * 3000], **options)
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [one for row in pool.map(work, range(8)) for one in row]
    assert len(found) > 20 and all(found)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("kind", [Transformer, GPT, LSTMSeq2Seq])
def test_generate_decodes_in_evaluation(kind) -> None:
    model = tiny(kind, dropout=0.5)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "seed": 1}):
        due = generate(model.eval(), [[5, 6, 7]], max_new_tokens=12, **options)
        found = generate(model.train(), [[5, 6, 7]], max_new_tokens=12, **options)
        assert torch.equal(found, due) and all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="ids from 0 to"):
        generate(model, [[10**6]])
    assert all(module.training for module in model.modules())


def test_the_last_decoder_restores_training_mode() -> None:
    shared = nn.Dropout(0.5)
    one, other = nn.Sequential(shared, nn.Linear(2, 2)), nn.Sequential(shared, nn.Linear(2, 2).eval())
    with evaluating(one):
        with evaluating(one), evaluating(other):  # also within each other
            assert not shared.training and not other.training
        assert other.training and not other[1].training and not shared.training and not one.training
        with pytest.raises(KeyError), evaluating(other):
            raise KeyError
        assert not shared.training and not one[1].training
    assert shared.training and one.training and one[1].training and not other[1].training
    # Two that overlap, of which the first to come leaves first.
    first, second = evaluating(one), evaluating(other)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert one.training and one[1].training and not shared.training and not other.training
    second.__exit__(None, None, None)
    assert shared.training and other.training and not other[1].training


def test_a_module_that_is_put_into_a_model_later_is_seen() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(2, 2))).eval()
    with evaluating(model):
        assert dtype_precision(model) == "fp32"
    model[1][0] = nn.Linear(2, 2, dtype=torch.bfloat16)
    model[1].append(nn.Dropout(0.5))
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert dtype_precision(model) == "bf16"
    assert [module.training for module in model[1].children()] == [True, True]
    del model[1][0]
    with torch.autocast("cpu"):
        assert dtype_precision(model.append(nn.Linear(2, 2))) == "bf16"
    assert dtype_precision(model) == "fp32"


def test_a_mode_that_is_set_during_decoding_takes_effect_afterwards() -> None:
    model = transformer().eval()
    with evaluating(model) as mode:
        model.train()
        mode.hold()
        assert not any(module.training for module in model.modules())
        with evaluating(model):
            model.decoder.train()
        mode.hold()
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())


def test_a_training_thread_waits_for_each_decoding_step(often) -> None:
    model = transformer()
    translator, steps = Translator(model.eval(), ByteTokenizer()), []
    due = translator.translate(["ab", "c"], max_new_tokens=8, engine="kv_cache")
    decode = model.decode

    def watched(*args, **options):
        steps.append(any(module.training for module in model.modules()))
        done = decode(*args, **options)
        model.train()  # as another thread might, between any two steps
        return done

    model.decode = watched
    assert translator.translate(["ab", "c"], max_new_tokens=8, engine="kv_cache") == due
    assert "".join(translator.stream("ab", max_new_tokens=8, engine="kv_cache")) == due[0]
    assert len(steps) > 8 and not any(steps)


@pytest.mark.parametrize("engine", ["kv_cache", "recompute"])
async def test_a_call_that_sets_training_mode_changes_no_step(engine) -> None:
    model = tiny(GPT, seed=2, dropout=0.5)
    async with AsyncGenerator(model, ByteTokenizer(), engine=engine) as front:
        [due] = await front.complete("ab", max_new_tokens=8)
        stream = front.stream("ab", max_new_tokens=8)
        found = []
        async for piece in stream:
            found += [one.token for one in piece.tokens]
            await front.call(lambda: model.train())
        assert found == [one.token for one in due.tokens]
        model.eval()
        request = asyncio.create_task(front.complete("ab", max_new_tokens=8))
        await front.call(lambda: model.train())  # before the first step
        [whole] = await request
        assert whole.tokens == due.tokens


@pytest.mark.parametrize("kind", [Transformer, GPT, LSTMSeq2Seq])
def test_models_without_values_are_refused(kind) -> None:
    with torch.device("meta"):
        model = tiny(kind)
    calls = [lambda: generate(model, [[5, 6]]), lambda: model.generate(torch.tensor([[5, 6]]), num_beams=2)]
    if kind is not LSTMSeq2Seq:
        calls.append(lambda: Translator(model, ByteTokenizer()))
    for call in calls:
        with pytest.raises(ValueError, match=f"expected a {kind.__name__} .* on the device meta"):
            call()


def test_one_part_without_values_is_named() -> None:
    model = transformer().eval()
    model.decoder.layers[1].linear1.to("meta")
    with pytest.raises(ValueError, match=r"'decoder.layers.1.linear1.weight' on the device meta"):
        generate(model, [[5, 6]])


class Around:
    """A model that is no module, but has the attributes of one."""

    __slots__ = ("inner",)

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_model_around_a_module_decodes() -> None:
    model = tiny(GPT, dropout=0.0).train()
    options: dict[str, Any] = {"max_new_tokens": 4, "engine": "kv_cache"}
    assert torch.equal(generate(Around(model), [[5, 6]], **options), generate(model, [[5, 6]], **options))
