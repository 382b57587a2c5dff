"""An accelerated Whisper of transformers gives what it gave before, with its encoder and its loops on the engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fastformer
from fastformer.audio.model import SpeechModel
from fastformer.integrations import whisper as on_engine
from tests.audio.whispers import SOT, TRANSCRIBE, features, whisper

CALL: dict[str, Any] = {"return_timestamps": True, "language": "en", "task": "transcribe", "max_new_tokens": 12}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"return_timestamps": False},
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2, "return_timestamps": False},
    {"do_sample": True},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    {"temperature": (0.0, 0.5), "logprob_threshold": -1.0, "compression_ratio_threshold": 1.35},
]


@pytest.fixture(scope="module")
def plain() -> Any:
    model = whisper()
    ids = {"task_to_id": {"transcribe": TRANSCRIBE, "translate": 65}, "prev_sot_token_id": 68}
    for name, value in {**ids, "max_initial_timestamp_index": 10, "max_length": 40}.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.fixture
def fast(plain: Any) -> Any:
    return fastformer.accelerate(copy.deepcopy(plain))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran on the engine."""
    found: list[str] = []

    def spy(owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)

        def called(*args: Any) -> Any:
            found.append(name)
            return original(*args)

        monkeypatch.setattr(owner, method, called)

    spy(SpeechModel, "encode", "encode")
    spy(on_engine.SpeechStepper, "__init__", "decode")
    return found


def generated(model: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(3)
    found = model.generate(input_features=features(3), **CALL | options)
    return found["sequences"] if isinstance(found, dict) else found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_generate_gives_the_same(plain: Any, fast: Any, calls: list[str], options: dict[str, Any]) -> None:
    expected = generated(plain, **options)
    assert torch.equal(generated(fast, **options), expected)
    assert calls[0] == "encode" and "decode" in calls[1:]


def test_states_and_languages_are_the_same(plain: Any, fast: Any, calls: list[str]) -> None:
    ids = torch.tensor([[SOT, TRANSCRIBE]] * 2)
    with torch.no_grad():
        expected = plain(features(2), decoder_input_ids=ids)
        found = fast(features(2), decoder_input_ids=ids)
    assert calls == ["encode"]
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.encoder_last_hidden_state, expected.encoder_last_hidden_state)
    assert torch.equal(fast.detect_language(features(2)), plain.detect_language(features(2)))


def test_other_calls_go_transformers_own_way(plain: Any, fast: Any, calls: list[str]) -> None:
    ids = torch.tensor([[SOT, TRANSCRIBE]] * 2)
    fast(features(2), decoder_input_ids=ids).logits.sum().backward()
    with torch.no_grad():
        assert fast(features(2), decoder_input_ids=ids, output_attentions=True).encoder_attentions is not None
        fast.train()(features(2), decoder_input_ids=ids)
    fast.eval()
    times = {"return_token_timestamps": True, "return_timestamps": False}
    assert torch.equal(generated(fast, **times), generated(plain, **times))
    assert "decode" not in calls
    calls.clear()
    hook = fast.model.encoder.layers[0].register_forward_hook(lambda *_: None)
    generated(fast)
    assert calls == []
    hook.remove()


def test_changed_weights_are_noticed(plain: Any, fast: Any) -> None:
    generated(fast)
    changed = copy.deepcopy(plain)
    for model in (fast, changed):
        with torch.no_grad():
            model.model.decoder.layers[0].fc1.weight.mul_(-1)
            model.model.encoder.conv1.weight.mul_(1.5)
    assert torch.equal(generated(fast), generated(changed))


def test_report_and_precision(plain: Any, fast: Any, calls: list[str]) -> None:
    assert "C++ engine in fp32" in str(fastformer.report(fast))
    fastformer.accelerate(fast, precision="int8")
    assert "C++ engine in int8" in str(fastformer.report(fast))
    generated(fast)
    assert calls[0] == "encode"
    calls.clear()
    fastformer.accelerate(fast, generate=False)
    generated(fast)
    fastformer.restore(fast)
    assert torch.equal(generated(fast), generated(plain)) and calls == []
