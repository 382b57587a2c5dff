"""Tests a vocabulary for each side, from training to everything that reads a run."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fastformer.checkpoints import load_model
from fastformer.commands.average import average
from fastformer.commands.quantize import quantize
from fastformer.data import PairTokenizer, load_tokenizer
from fastformer.generation import Translator
from fastformer.training import TrainConfig, start
from fastformer.training.run_config import run_config
from tests.training.tiny import SIZES

PAIRS = [(f"{'a' * (i % 5 + 1)} {i % 10}", f"{i % 10} {'bcdefgh'[i % 7] * (i % 5 + 1)} äöü") for i in range(60)]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainConfig:
    file = tmp_path_factory.mktemp("two") / "train.tsv"
    file.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    return TrainConfig(
        train_tsv=str(file), val_tsv=str(file), settings=dict(SIZES), shared_vocab=False, vocab_size=40, max_tokens=256,
        steps=4, save_every=2, warmup=2, val_examples=2, max_len=64, device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(config) -> Path:
    run = Path(config.train_tsv).parent / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        start(config, run).train()
    return run


def test_a_run_has_both(run, config) -> None:
    model, tokenizer = load_model(run)
    assert isinstance(tokenizer, PairTokenizer) and tokenizer.vocab_size != tokenizer.source_vocab_size
    assert model.config.vocab_size == tokenizer.vocab_size and not model.config.tie_embeddings
    assert model.config.source_vocab_size == tokenizer.source_vocab_size
    # Each side has learned its own characters alone.
    assert "b" not in tokenizer.source.tokens(range(259, tokenizer.source_vocab_size))
    assert "b" in tokenizer.target.tokens(range(259, tokenizer.vocab_size))
    assert max(map(len, (tokenizer.encode("ab"), tokenizer.encode_target("ab")))) <= 3


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return shutil.copytree(run, tmp_path / "copy")


def test_everything_that_reads_a_run_accepts_it(copy, tmp_path) -> None:
    options = {"max_new_tokens": 6}
    translator = Translator.from_pretrained(copy)
    texts = [source for source, _ in PAIRS[:5]]
    due = translator.translate(texts, **options)
    by_modules = translator.translate(texts, engine="kv_cache", **options)
    assert due == by_modules and any(due)
    assert translator.translate(texts[0], target_prefix="3 b ", **options).startswith("3 b")
    assert len(translator.translate(texts[0], num_beams=2, num_return_sequences=2, **options)) == 2
    assert "".join(translator.stream(texts[0], **options)) == due[0]
    source_tokens, target_tokens, weights = translator.attention(texts[0])
    assert weights.shape[2:] == (len(target_tokens), len(source_tokens)) and source_tokens[-1] == "</s>"
    assert Translator.from_pretrained([copy, copy]).translate(texts, **options) == due  # an ensemble
    quantize(str(copy), str(tmp_path / "small"))
    assert len(Translator.from_pretrained(tmp_path / "small").translate(texts, **options)) == 5
    average(str(copy), last=2)
    assert len(Translator.from_pretrained(copy).translate(texts, **options)) == 5


def test_a_run_with_two_vocabularies_resumes_and_is_fine_tuned(run, copy, config, tmp_path) -> None:
    again = start(run_config(copy, {"steps": 5}, True), copy, resume=True)
    assert isinstance(again.data.tokenizer, PairTokenizer) and again.step == 4
    again.train()
    del again
    with pytest.raises(ValueError, match=r"\bshared_vocab\b"):
        start(run_config(copy, {"steps": 6, "shared_vocab": True}, True), copy, resume=True)
    before: Any = load_model(run)[1]
    plain = TrainConfig(train_tsv=config.train_tsv, val_tsv=config.val_tsv, max_tokens=256, steps=1, device="cpu")
    for name, changes in (
        ("tuned", {"init_from": str(run)}),
        ("tuned too", {"init_from": str(run), "shared_vocab": False}),
        ("its tokenizer", {"tokenizer": str(run), "shared_vocab": False, "settings": dict(SIZES)}),
    ):
        trainer = start(dataclasses.replace(plain, **changes), tmp_path / name)
        assert trainer.data.tokenizer.encode("aa 3") == before.encode("aa 3")
        assert trainer.model.config.source_vocab_size == before.source_vocab_size and not trainer.config.shared_vocab
        assert isinstance(load_tokenizer(tmp_path / name), PairTokenizer)


def test_two_tokenizers_by_their_paths(run, config, tmp_path) -> None:
    pair = load_tokenizer(run)
    assert isinstance(pair, PairTokenizer)
    for side in ("source", "target"):
        (tmp_path / side).mkdir()
        getattr(pair, side).save(tmp_path / side)
    given = f"{tmp_path / 'source'},{tmp_path / 'target'}"
    trainer = start(dataclasses.replace(config, tokenizer=given), tmp_path / "run")
    trainer.train()
    assert (trainer.data.tokenizer.vocab_size, trainer.model.config.source_vocab_size) == (
        pair.vocab_size, pair.source_vocab_size,
    )  # fmt: skip
    moved = f"{shutil.copytree(tmp_path / 'source', tmp_path / 's')},{shutil.move(tmp_path / 'target', tmp_path / 't')}"
    assert start(run_config(tmp_path / "run", {"tokenizer": moved}, True), tmp_path / "run", resume=True).step == 4
    other = f"{tmp_path / 't'},{tmp_path / 's'}"
    with pytest.raises(ValueError, match=r"\btokenizer\b"):
        start(run_config(tmp_path / "run", {"tokenizer": other}, True), tmp_path / "run", resume=True)


def test_impossible_arguments(run, copy, config, tmp_path) -> None:
    plain = {"train_tsv": config.train_tsv, "val_tsv": config.val_tsv, "device": "cpu"}
    for changes, named in (
        ({"settings": {"tie_embeddings": True}}, r"\btie_embeddings\b"),
        ({"settings": {"source_vocab_size": 40}}, r"\bsource_vocab_size\b"),
        ({"model": "lstm", "batching": "bucketed"}, r"\bmodel\b.*\blstm\b"),
    ):
        with pytest.raises(ValueError, match=named):
            TrainConfig(**plain, shared_vocab=False, **changes)
    with pytest.raises(ValueError, match=r"\bshared_vocab\b"):
        start(TrainConfig(**plain, tokenizer=str(run)), tmp_path / "run")
    with pytest.raises(ValueError, match=r"\btokenizers\b"):
        start(TrainConfig(**plain, tokenizer=f"{run},{run},{run}", shared_vocab=False), tmp_path / "run")
    pair = load_tokenizer(run)
    assert isinstance(pair, PairTokenizer)
    PairTokenizer(pair.target, pair.target).save(copy)
    with pytest.raises(ValueError, match=r"\btokenizer\b.*copy"):
        load_model(copy)
    shared = dataclasses.replace(config, shared_vocab=True, steps=1, val_examples=0)
    start(shared, tmp_path / "shared").train()
    with pytest.raises(ValueError, match=r"\binit_from\b.*\bshared_vocab\b"):
        start(TrainConfig(**plain, init_from=str(tmp_path / "shared"), shared_vocab=False), tmp_path / "tuned")
