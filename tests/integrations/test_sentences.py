"""An accelerated SentenceTransformer takes texts straight to the engine, where that changes no result."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastformer.integrations import accelerate, report, restore
from tests.covering import by_turns
from tests.encoding.folders import D_MODEL, MANY, TEXTS
from tests.integrations.test_sentence_transformers import (
    Call,
    Save,
    agree,
    dense_of,
    encode,
    layer,
    library,
    of_folder,
    pooling,
    saved,
)

__all__ = ["saved"]  # the fixture
QUERY: Call = lambda model: model.encode_query(MANY[:20])  # noqa: E731
ONE: Call = lambda model: model.encode(TEXTS[3])  # noqa: E731


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the batches that went the library's way."""
    found, plain = [0], library.SentenceTransformer._resolve_inference_device

    def counting(self: Any, device: Any) -> Any:
        found[0] += 1
        return plain(self, device)

    monkeypatch.setattr(library.SentenceTransformer, "_resolve_inference_device", counting)
    return found


def warm(plain: Any) -> Any:
    """Returns an accelerated copy in evaluation, which knows that its texts need no module."""
    ours = accelerate(copy.deepcopy(plain)).eval()
    ours.encode(TEXTS[3])
    return ours


def test_other_libraries_know_it_by_the_module_of_its_class(saved: Save) -> None:
    """BERTopic asks like this, and embeds with a model of its own else."""
    ours = accelerate(dense_of(saved, pooling("mean")))
    assert type(ours) is not library.SentenceTransformer
    assert "sentence_transformers" in str(type(ours))


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_every_pooling(mode: str, saved: Save, ways: list[int]) -> None:
    plain = dense_of(saved, pooling(mode))
    ours = warm(plain)
    ways[0] = 0
    for call in (encode(batch_size=len(MANY)), ONE, QUERY):
        before = ways[0]
        agree(ours, plain, (call,))
        assert ways[0] - before == 2  # those of the plain model, and of the exact one


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_states_that_are_not_finite_do_not_spread(mode: str, saved: Save, ways: list[int]) -> None:
    """A batch gives the row of each text alone. There, sentence-transformers multiplies infinity at padding by zero."""
    plain = dense_of(saved, pooling(mode))
    with torch.no_grad():
        norm = plain[0].model.encoder.layer[-1].output.LayerNorm
        norm.weight[3], norm.bias[5], norm.bias[7] = torch.inf, -torch.inf, torch.nan
    ours = warm(plain)
    ways[0] = 0
    found = ours.encode(MANY, batch_size=len(MANY))
    assert not ways[0]
    expected = np.stack([plain.encode(text) for text in MANY])
    assert not np.isfinite(expected[:, [3, 5, 7]]).any()
    for test in (np.isnan, np.isposinf, np.isneginf):
        assert (test(found) == test(expected)).all()


@pytest.mark.parametrize("name", ["RobertaModel", "DistilBertModel", "MPNetModel", "ModernBertModel"])
def test_families(name: str, saved: Save, ways: list[int]) -> None:
    options = {"MPNetModel": {"pad_token_id": 1}, "ModernBertModel": {"local_attention": 8}}
    plain = of_folder(name, **options.get(name, {})).make(saved)
    ours = warm(plain)
    ways[0] = 0
    agree(ours, plain, (ONE,))
    assert ways[0] == 2


OPTIONS: dict[str, dict[str, Any]] = {
    "normalize": {"normalize_embeddings": True},
    "truncate": {"truncate_dim": 5},
    "truncate and normalize": {"truncate_dim": 5, "normalize_embeddings": True},
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "device": {"device": "cpu"},
    "prompt": {"prompt": "a bird "},
    "prompt_name": {"prompt_name": "p"},
    "int8": {"precision": "int8"},
    "ubinary": {"precision": "ubinary"},
}


@pytest.mark.parametrize("ends, name", by_turns([(), ("Normalize",)], [*OPTIONS]))
def test_options(name: str, ends: tuple[str, ...], saved: Save, ways: list[int]) -> None:
    plain = dense_of(saved, pooling(), *map(layer, ends), prompts={"p": "the hills "})
    ours = warm(plain)
    ways[0] = 0
    if "precision" in OPTIONS[name]:  # the steps of int8 depend on the last bits of the least and the greatest
        found, expected = (model.encode(MANY[:9], **OPTIONS[name]) for model in (ours, plain))
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape) and (found == expected).mean() > 0.95
        assert ways[0] == 1
    else:
        agree(ours, plain, (lambda model: model.encode(MANY[:9], **OPTIONS[name]),))
        assert ways[0] == 2


def test_rows_of_fewer_dimensions_have_memory_of_their_own(saved: Save) -> None:
    plain = dense_of(saved, pooling())
    forms = []
    for model in (plain, warm(plain)):
        found = model.encode(MANY[:9], truncate_dim=5)
        tensor = model.encode(MANY[:9], truncate_dim=5, convert_to_tensor=True)
        forms.append((found.flags.c_contiguous, found.strides, tensor.stride(), tensor.untyped_storage().nbytes()))
    assert forms[0] == forms[1]


def test_calls_of_both_ways_share_the_tokenizer_in_threads(saved: Save, ways: list[int]) -> None:
    plain = dense_of(saved, pooling())
    ours = warm(plain)
    failed: list[object] = []
    ways[0] = 0

    def call(count: int, batch_size: int) -> None:
        try:
            for _ in range(60):
                np.testing.assert_allclose(
                    ours.encode(MANY[:count], batch_size=batch_size), expected[:count], atol=1e-4
                )
        except (AssertionError, RuntimeError, ValueError) as error:
            failed.append(error)

    expected = plain.encode(MANY[:20])
    threads = [threading.Thread(target=call, args=each) for each in ((9, 32), (20, 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and ways[0] == 61, failed


def test_a_call_leaves_the_tokenizer_as_the_library_does(saved: Save) -> None:
    plain = dense_of(saved, pooling())
    ours = warm(plain)
    states = []
    for model in (plain, ours):
        model.encode(MANY[:9])
        backend = model.tokenizer.backend_tokenizer
        states.append((backend.padding, backend.truncation))
    assert states[0] == states[1]


def _hooked(model: Any, place: Callable[[Any], nn.Module]) -> None:
    place(model).register_forward_hook(lambda module, args, output: output)


def _longer(model: Any) -> None:
    model[0].model.embeddings.word_embeddings.weight.data.mul_(2)


def _patched(model: Any) -> None:
    plain = model.preprocess
    model.preprocess = lambda inputs, **options: plain([f"the {text}" for text in inputs], **options)


def _reads(model: Any) -> None:
    plain = model.tokenizer._encode_plus
    model.tokenizer._encode_plus = lambda text, **options: plain(text=[f"the {each}" for each in text], **options)


# Changes after which the engine gets the texts again, at the latest in the second call, and those that it can't follow.
FOLLOWED: dict[str, Callable[[Any], object]] = {
    "a shorter limit": lambda model: setattr(model, "max_seq_length", 5),
    "the other side is cut": lambda model: vars(model.tokenizer).update(truncation_side="left"),
    "another pooling": lambda model: setattr(model[1], "pooling_mode", "max"),
    "weights": _longer,
    "no Normalize": lambda model: model.pop(2),
    "another Pooling": lambda model: model.__setitem__(1, pooling("cls")),
    "fewer tokens": lambda model: model.tokenizer.add_tokens(["over"]),
}  # fmt: skip
LEFT: dict[str, Callable[[Any], object]] = {
    "a hook of the model": lambda model: _hooked(model, lambda each: each),
    "a hook of the Transformer": lambda model: _hooked(model, lambda each: each[0]),
    "a hook of the Pooling": lambda model: _hooked(model, lambda each: each[1]),
    "a hook of the BERT": lambda model: _hooked(model, lambda each: each[0].model),
    "a patched preprocess": _patched,
    "a patched tokenizer": _reads,
    "a forward": lambda model: setattr(model[1], "forward", type(model[1])(D_MODEL, "max").forward),
    "options of the tokenizer": lambda model: model[0].processing_kwargs.update(text={"max_length": 5}),
    "another output of the BERT": lambda model: (
        model[0].modality_config["text"].update(method_output_name=("last_hidden_state",))
    ),
    "several poolings": lambda model: setattr(model[1], "pooling_mode", ("mean", "max")),
    "special tokens are split": lambda model: setattr(model.tokenizer, "split_special_tokens", True),
    "padding in front": lambda model: setattr(model.tokenizer, "padding_side", "left"),
    "hidden states": lambda model: setattr(model[0].model.config, "output_hidden_states", True),
    "another module": lambda model: model.append(layer("Dropout")),
}


@pytest.mark.parametrize("name", [*FOLLOWED, *LEFT])
def test_changes_are_followed(name: str, saved: Save, ways: list[int]) -> None:
    plain = dense_of(saved, pooling(), layer("Normalize"))
    plain.max_seq_length = 9
    ours = warm(plain)
    for model in (ours, plain):
        (FOLLOWED | LEFT)[name](model)
    texts = [*MANY[:9], "a [MASK] bird sings over the hills and the river"]
    expected = plain.encode(texts)
    for _ in range(2):
        before = ways[0]
        np.testing.assert_allclose(ours.encode(texts), expected, atol=1e-5)
        went = ways[0] - before
    assert went == (name in LEFT)


CALLS: dict[str, Call] = {
    "tokens": encode(output_value="token_embeddings"),
    "several batches": encode(batch_size=2),
    "a progress bar": encode(batch_size=64, show_progress_bar=True),
    "options of the processor": encode(batch_size=64, processing_kwargs={"text": {"max_length": 5}}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_library(name: str, saved: Save, ways: list[int]) -> None:
    plain = dense_of(saved, pooling())
    ours = warm(plain)
    ways[0] = 0
    agree(ours, plain, (CALLS[name],))
    assert ways[0] == 3


def test_a_prompt_that_is_not_pooled(saved: Save, ways: list[int]) -> None:
    plain = dense_of(saved, pooling(include_prompt=False))
    ours = warm(plain)
    ways[0] = 0
    agree(ours, plain, (encode(prompt="the "),))
    assert ways[0] == 3
    agree(ours, plain, (ONE,))
    assert ways[0] == 5


def test_autocast_other_dtypes_and_training(saved: Save, ways: list[int]) -> None:
    plain = dense_of(saved, pooling())
    ours = warm(plain)
    ways[0] = 0
    with torch.autocast("cpu", torch.bfloat16):
        ours.encode(TEXTS[3])
    assert ways[0] == 1
    assert ours.train().encode(TEXTS[3]).dtype == np.float32 and not ours.training
    half = ours.bfloat16().encode(TEXTS[3], convert_to_tensor=True)
    assert half.dtype == torch.bfloat16 and ways[0] == 3


def test_the_class_is_given_back(saved: Save) -> None:
    plain = dense_of(saved, pooling())
    ours = warm(plain)
    assert report(ours).swapped[""] == "SentenceTransformer"
    again = pickle.loads(pickle.dumps(ours))
    np.testing.assert_array_equal(again.encode(TEXTS[3]), ours.encode(TEXTS[3]))
    assert "" in restore(ours) and type(ours) is library.SentenceTransformer

    class Mine(library.SentenceTransformer):  # type: ignore[misc]
        pass

    mine = accelerate(Mine(modules=[*dense_of(saved, pooling())], device="cpu"))
    assert type(mine) is Mine and "subclass" in report(mine).left[""]
