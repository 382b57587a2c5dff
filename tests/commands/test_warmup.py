"""Tests the calls, the output and the files of `fastformer warmup`. Its kernels need a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer import checkpoints, generation
from fastformer.commands.warmup import calls, run_all, told, written
from fastformer.data import ByteTokenizer
from fastformer.models import BERT, GPT, BERTConfig, GPTConfig, Transformer, TransformerConfig
from tests.conftest import Ran

SIZES: dict[str, Any] = {"vocab_size": 20, "d_model": 16, "num_heads": 2, "max_len": 32}


def model(kind: str, **sizes: int) -> Any:
    if kind == "Transformer":
        return Transformer(TransformerConfig(**SIZES | sizes, d_ff=32, num_encoder_layers=1, num_decoder_layers=1))
    if kind == "GPT":
        return GPT(GPTConfig(**SIZES | sizes, d_ff=32, num_layers=1))
    return BERT(BERTConfig(**SIZES | sizes, d_ff=32, num_layers=1))


@pytest.mark.parametrize("kind", ["Transformer", "GPT", "BERT"])
def test_each_kind_of_model_is_used_as_it_will_be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call runs on texts that are cut to the model's positions, and leaves the model unchanged."""
    beams, rows, search = set[int](), set[int](), generation.generate

    def searched(*given: Any, **options: Any) -> Any:
        beams.add(options["num_beams"])
        rows.add(len(given[1]))
        return search(*given, **options)

    monkeypatch.setattr(generation, "generate", searched)
    used = model(kind).train()
    before = {name: value.clone() for name, value in used.state_dict().items()}
    modes: list[bool] = []
    embedding = next(module for module in used.modules() if "Embedding" in type(module).__name__)
    embedding.register_forward_pre_hook(lambda module, args: modes.append(torch.is_grad_enabled()))
    gradients = list[torch.Tensor]()
    next(used.parameters()).register_post_accumulate_grad_hook(gradients.append)
    for trains in (False, True):
        run_all(calls(used.train(not trains), 3, 100, trains))
        assert used.training is not trains and bool(gradients) == trains
    assert (beams, rows) == ((set(), set()) if kind == "BERT" else ({1, 4}, {1, 3}))
    assert True in modes and (kind != "BERT" or False in modes)  # on a CPU others decode by an engine
    assert all(torch.equal(value, before[name]) for name, value in used.state_dict().items())
    assert all(parameter.grad is None for parameter in used.parameters())


def test_warmup_reports_and_writes_the_prepared_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from fastformer.kernels._binaries import Binary, BinaryFile
    from fastformer.kernels._launch import Resolved

    assert len(list(told([], 1.0))) == 1 and "nothing" in written([], tmp_path)
    binary = Binary("kernel", 128, 0, "p00", (), b"code")
    made = [
        Resolved("_one_kernel", 90, "a", "file", 0.1, binary),
        Resolved("_two_kernel", 90, "b", "compiler", 2.0, binary),
        Resolved("_two_kernel", 90, "c", "compiler", 2.5, None),
    ]
    first, *rest = told(made, 9.0)
    assert (
        "3 kernels" in first
        and "1 from a file" in first
        and "2 from Triton" in first
        and "4.5 s" in first
        and "9.0 s" in first
    )
    assert rest == ["  _two_kernel 2"]
    assert "2 kernels" in written(made, tmp_path)
    written([made[1]._replace(key="d")], tmp_path)
    assert set(BinaryFile(tmp_path / "sm_90.kernels").keys()) == {"a", "b", "d"}  # beside what was there


@pytest.mark.parametrize("kind", ["Transformer", "GPT", "BERT"])
def test_both_alignments_of_short_and_long_texts_are_tried(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text leaves room for the tokens of a search, and a short one is the longest that is asked for."""
    seen = list[tuple[Any, ...]]()

    def noted(texts: torch.Tensor) -> torch.Tensor:
        assert texts.unique().tolist() == [19]  # the last id: a table of embeddings is read to its end
        seen.append((torch.is_inference_mode_enabled(), *texts.shape))
        return texts

    used = model(kind)
    name = "encode" if kind == "BERT" else "loss"
    plain, search = getattr(used, name), generation.generate
    monkeypatch.setattr(used, name, lambda texts, *others: plain(noted(texts), *others))
    monkeypatch.setattr(generation, "generate", lambda _, texts, **options: search(_, noted(texts), **options))
    for length, sizes in ((100, {16, 21, 24}), (18, {15, 16, 18}), (2, {2})):
        seen.clear()
        run_all(calls(used, 3, length, True))
        assert {*seen} == {(infers, rows, size) for infers in (True, False) for rows in (1, 3) for size in sizes}


@pytest.mark.parametrize("kind", ["Transformer", "GPT", "BERT"])
def test_warmup_takes_each_kind_of_model(kind: str, ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ByteTokenizer()
    model(kind, vocab_size=tokenizer.vocab_size).save_pretrained(tmp_path / kind, tokenizer)
    load = checkpoints.load_model

    def loaded(run: str, kinds: tuple[str, ...], **_: Any) -> Any:
        raise ValueError(f"loaded {type(load(run, kinds)[0]).__name__}")  # a GPU would have to compute

    monkeypatch.setattr(checkpoints, "load_model", loaded)
    monkeypatch.setattr("fastformer.devices.choose_device", lambda *_: torch.device("cuda"))
    assert f"loaded {kind}" in ran("warmup", str(tmp_path / kind), code=1).err


def test_without_a_gpu_warmup_is_an_error(ran: Ran, tmp_path: Path) -> None:
    assert "GPU" in ran("warmup", str(tmp_path), "--device", "cpu", code=1).err
    assert "GPU" in ran("warmup", str(tmp_path), *["--device", "cpu", "--batch_size", "1", "--length", "1"], code=1).err
    for flag in ("--batch_size", "--length"):
        assert "batch size" in ran("warmup", str(tmp_path), flag, "0", code=1).err
