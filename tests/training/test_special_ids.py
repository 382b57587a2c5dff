"""A training with any special ids equals one with the default ids, and continues as it began."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fastformer.checkpoints.training_state import latest_checkpoint
from fastformer.data import ByteTokenizer
from fastformer.models import Transformer
from fastformer.special_ids import SpecialIds
from fastformer.training import TrainConfig, Trainer, start
from fastformer.training.sections import OF_TOKENIZER
from tests.covering import by_turns
from tests.test_special_ids import OTHER, RENAMED, renaming  # of bytes that no text here has
from tests.training.tiny import PAIRS, changed, losses

KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"batching": "bucketed"},
    "lstm": {"model": "lstm", "batching": "bucketed", "settings": {"d_model": 16}},
    "gpt": {"model": "gpt", "seqlen": 16, "settings": {"d_model": 16, "num_layers": 1, "num_heads": 2}},
}


class RenamedBytes(ByteTokenizer):
    """A tokenizer of bytes with other ids."""

    def __init__(self, ids: SpecialIds, names: Sequence[int] = range(259)) -> None:
        super().__init__()
        self.special_ids, self.names = ids, names

    def encode_batch(self, texts: Sequence[str], max_len: int | None = None, **options: Any) -> list[list[int]]:
        return [[self.names[i] for i in ids] for ids in super().encode_batch(texts, max_len, **options)]


def begin(config: TrainConfig, run, tokenizer: ByteTokenizer, monkeypatch, **options) -> Trainer:
    monkeypatch.setattr("fastformer.training.examples.make_tokenizer", lambda config, texts: tokenizer)
    monkeypatch.setattr("fastformer.training.build.load_tokenizer", lambda folder: tokenizer)
    return start(config, run, **options)


@pytest.fixture(params=KINDS)
def any_config(request, config, tmp_path) -> TrainConfig:
    options: dict[str, Any] = {"steps": 5, "val_examples": 0, "val_every": 2, **KINDS[request.param]}
    if request.param == "gpt":
        for i in range(4):  # documents, each with its end
            (tmp_path / f"{i}.txt").write_text(" ".join(source for source, _ in PAIRS[10 * i : 10 * i + 10]))
        options |= {"train_tsv": None, "val_tsv": None, "train_text": str(tmp_path), "val_text": str(tmp_path)}
    return changed(config, **options)


@pytest.mark.parametrize(
    "any_config, before, after", by_turns([*KINDS], [param.values for param in RENAMED]), indirect=["any_config"]
)
def test_renamed_ids_do_not_change_the_loss(any_config, tmp_path, monkeypatch, before, after) -> None:
    names = renaming(before, after, 259)
    one = begin(any_config, tmp_path / "one", RenamedBytes(before), monkeypatch)
    two = begin(any_config, tmp_path / "two", RenamedBytes(after, names.tolist()), monkeypatch)
    assert (SpecialIds.of(one.model.config), SpecialIds.of(two.model.config)) == (before, after)
    weights = one.model.state_dict()
    for name in ("embedding.weight", "output.weight", "output.bias"):
        if name in weights:
            weights[name] = weights[name][names.argsort()]
    two.model.load_state_dict(weights)
    for trainer in (one, two):
        torch.manual_seed(0)  # of dropout
        trainer.train()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0]
    found = [trainer.best.record.nll for trainer in (one, two)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_the_run_reports_its_ids_and_resumes(config, tmp_path, monkeypatch) -> None:
    config = changed(config, steps=4, val_examples=0)
    tokenizer = RenamedBytes(OTHER)
    whole = begin(changed(config, steps=6), tmp_path / "whole", tokenizer, monkeypatch)
    whole.train()
    begin(config, tmp_path / "parts", tokenizer, monkeypatch).train()
    assert Transformer.from_pretrained(tmp_path / "parts").config.special_ids == OTHER
    assert json.loads((tmp_path / "parts" / "config.json").read_text())["special_ids"]["pad"] == 3
    settings = (tmp_path / "parts" / "config.yaml").read_text()
    assert not any(f"{name}:" in settings for name in OF_TOKENIZER - {"vocab_size"})
    going_on = begin(changed(config, steps=6), tmp_path / "parts", tokenizer, monkeypatch, resume=True)
    assert going_on.step == 4 and going_on.model.config.special_ids == OTHER
    going_on.train()
    assert torch.equal(going_on.model.output_weight, whole.model.output_weight)
    for ids in (SpecialIds(), dataclasses.replace(OTHER, start=6)):
        with pytest.raises(ValueError, match=r"step-\d+.pt.*SpecialIds\(pad=3"):
            begin(changed(config, steps=6), tmp_path / "parts", RenamedBytes(ids), monkeypatch, resume=True)


def test_an_earlier_checkpoint_had_the_defaults(config, tmp_path) -> None:
    config = changed(config, steps=2)
    start(config, tmp_path / "run").train()
    found = latest_checkpoint(tmp_path / "run")
    assert found is not None
    _, state = found
    assert state.pop("special_ids") == {"pad": 0, "eos": (1,), "unk": 2, "start": 0}
    trainer = start(changed(config, steps=4), tmp_path / "run", resume=True)
    trainer.load_state_dict(state)
    trainer.identity.special_ids = OTHER
    with pytest.raises(ValueError, match=r"\bspecial ids\b.*\bcheckpoint\b"):
        trainer.load_state_dict(state)


def test_fine_tuning_keeps_the_ids_and_refuses_other_tokenizers(config, tmp_path, monkeypatch) -> None:
    config, tokenizer = changed(config, steps=2, val_examples=0), RenamedBytes(OTHER)
    begin(config, tmp_path / "first", tokenizer, monkeypatch).train()
    tuning = changed(config, init_from=str(tmp_path / "first"))
    with pytest.raises(ValueError, match=r"\bfirst\b.*SpecialIds\(pad=3"):
        start(tuning, tmp_path / "second")
    monkeypatch.setattr("fastformer.checkpoints.run.load_tokenizer", lambda folder: tokenizer)
    trainer = start(tuning, tmp_path / "second")
    assert trainer.model.config.special_ids == OTHER and trainer.data.train[0].target[-1] == 7
    assert not OF_TOKENIZER & trainer.config.settings.keys()


def test_a_trainer_refuses_a_tokenizer_of_other_ids(config, tmp_path) -> None:
    trainer = start(config, tmp_path / "run")
    trainer.data.tokenizer = RenamedBytes(OTHER)
    with pytest.raises(ValueError, match=r"\btokenizer\b.*\bspecial ids\b"):
        Trainer(config, tmp_path / "other", trainer.model, trainer.data, trainer.device)


@pytest.mark.parametrize("name", sorted(OF_TOKENIZER - {"vocab_size"}))
def test_the_tokenizer_decides_on_special_ids(config, name) -> None:
    for given in ({}, {"init_from": "somewhere"}):
        with pytest.raises(ValueError, match=rf"\b{name}\b.*\btokenizer\b"):
            changed(config, settings={name: 3}, **given)
