"""Tests the work of a case in other libraries' models, and the comparison of their outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fastformer
from benchmarks.peers import models, worker
from benchmarks.peers.job import StepJob
from benchmarks.peers.models import StepResults, gradients, make_work, outputs
from benchmarks.peers.pytorch import Accelerated, AsItIs, FusedLossPeer
from fastformer.ops import record_backends

BERT, MINILM, ENCODER, GPT2 = models.QUICK


def results(peer: type, case: dict, file: Path) -> StepResults:
    peer(case, "fp32", torch.get_num_threads(), {}).turn(StepJob(str(file)))
    return StepResults(*torch.load(file))


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.pytorch.keep_freed_memory", lambda: None)  # it can't be undone


@pytest.mark.parametrize("case", [BERT, ENCODER], ids=["bert", "encoder"])
def test_an_accelerated_model_is_right_and_a_wrong_one_is_noticed(case, tmp_path, monkeypatch) -> None:
    if case is BERT:
        pytest.importorskip("transformers", reason="not installed: pip install transformers")
    file = tmp_path / "results.pt"
    expected = results(AsItIs, case, file)
    assert results(AsItIs, case, file).error(expected) == 0.0  # the same in each process, dropout or not
    assert results(Accelerated, case, file).error(expected) < 2e-3

    accelerate = fastformer.accelerate

    def wrong(model: nn.Module, **options: bool) -> object:
        with torch.no_grad():
            norms = (p for name, p in model.named_parameters() if "norm2.weight" in name or "LayerNorm.weight" in name)
            next(norms)[0] = 0.9
        return accelerate(model, **options)

    monkeypatch.setattr(fastformer, "accelerate", wrong)
    assert results(Accelerated, case, file).error(expected) > 2e-3
    monkeypatch.setattr(fastformer, "accelerate", lambda model, **options: model)
    with pytest.raises(ValueError, match="left all of it"):
        Accelerated(case, "fp32", 1, {})


def test_a_training_step_of_torch_nns_encoder_skips_padding(tmp_path: Path) -> None:
    with record_backends() as ran:
        results(Accelerated, ENCODER, tmp_path / "results.pt")
    names = {name for name, _ in ran}
    assert "varlen_attention_fwd" in names and "attention_fwd" not in names


def test_encoders_of_sentences_are_right_in_each_order(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="not installed: pip install transformers")
    pytest.importorskip("sentence_transformers", reason="not installed: pip install sentence-transformers")
    from benchmarks.peers import sentences

    others = (sentences.EngineAlone, sentences.EncoderPeer, sentences.SentenceTransformers)
    kinds = (AsItIs, *others, sentences.AcceleratedSentenceTransformers)
    peers = [kind(MINILM, "fp32", torch.get_num_threads(), {}) for kind in kinds]
    for order in models.ORDERS:
        measured = []
        for peer in peers:
            peer.turn(StepJob(str(tmp_path / "results.pt"), order))
            measured.append(StepResults(*torch.load(tmp_path / "results.pt")))
        assert all(r.error(measured[0]) < 2e-3 for r in measured), order
        assert measured[0].values.shape == (MINILM["sentences"], 128)


@pytest.mark.slow  # 10 s: ONNX Runtime's model is exported
def test_sentence_transformers_on_another_runtime_is_right(tmp_path: Path) -> None:
    for package in ("transformers", "sentence_transformers", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"not installed: pip install {package}")
    from benchmarks.peers.sentences import SentenceTransformersOnnx

    measured = []
    for peer in (AsItIs, SentenceTransformersOnnx):
        peer(MINILM, "fp32", torch.get_num_threads(), {}).turn(StepJob(str(tmp_path / "results.pt"), "mixed"))
        measured.append(StepResults(*torch.load(tmp_path / "results.pt")))
    assert measured[1].error(measured[0]) < 2e-3


def test_a_fused_loss_is_correct(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="not installed: pip install transformers")
    expected = results(AsItIs, GPT2, tmp_path / "results.pt")
    assert results(FusedLossPeer, GPT2, tmp_path / "results.pt").error(expected) < 2e-3
    peer = FusedLossPeer(GPT2, "fp32", torch.get_num_threads(), {})
    with record_backends() as ran:
        peer.turn(StepJob())
    assert "linear_cross_entropy_fwd_bwd" in {op for op, _ in ran}
    assert FusedLossPeer.name in worker.peers(GPT2) and FusedLossPeer.name not in worker.peers(ENCODER) | worker.peers(
        BERT
    )


def test_gradients_are_dropped_between_turns() -> None:
    peer = AsItIs(ENCODER, "fp32", torch.get_num_threads(), {})
    assert peer.turn(StepJob()).seconds > 0
    assert all(p.grad is None for p in peer.work.model.parameters())
    assert any(isinstance(m, nn.Dropout) and m.p for m in peer.work.model.modules())  # it is timed with dropout


def test_any_different_gradient_is_noticed() -> None:
    work = make_work(ENCODER, torch.float32, drops=False)
    loss = work.step(work.model)
    parameters = list(work.model.parameters())
    expected = gradients(loss, parameters)
    assert len(expected.values) == 1 + len(parameters)
    for parameter in parameters[:6]:
        gradient = parameter.grad
        assert gradient is not None
        for other in (None, 1.1 * gradient, -gradient):
            parameter.grad = other
            assert gradients(loss, parameters).error(expected) > 2e-3
        parameter.grad = gradient
    assert gradients(1.01 * loss, parameters).error(expected) == pytest.approx(0.01, rel=1e-3)
    assert gradients(loss, parameters).error(expected) == 0.0


def test_errors() -> None:
    expected = outputs(torch.tensor([1.0, -4.0]))
    assert outputs(torch.tensor([1.0, -3.0])).error(expected) == 0.25
    assert outputs(torch.tensor([1.0])).error(expected) == float("inf")
    assert outputs(torch.tensor([1.0, float("nan")])).error(expected) == float("inf")
