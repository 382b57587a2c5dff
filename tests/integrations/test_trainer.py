"""transformers' Trainer gives the same losses and weights with accelerated models."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Trainer, TrainingArguments

import fastformer
from fastformer.ops import record_backends
from tests.covering import by_turns
from tests.integrations.families import PACKED, exactly
from tests.integrations.test_composition import batch, make
from tests.nn.comparing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

FUSED_LOSS = "linear_cross_entropy_fwd_bwd"
# Rows of 9, 4, 1 and 7 tokens: the mean over a step is not the mean of its batches' means.
EXAMPLES = [dict(zip(batch(), row, strict=True)) for row in zip(*batch().values(), strict=True)] * 2


class Trained:
    """A few updates by Trainer: its log, the resulting weights, the evaluation, and fastformer's ops that ran."""

    def __init__(self, model: Any, folder: Any, **options: Any) -> None:
        arguments = TrainingArguments(
            str(folder), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
            save_steps=3, disable_tqdm=True, seed=1, learning_rate=0.05, optim="sgd", **options,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=EXAMPLES, eval_dataset=EXAMPLES[:3])
        self.accepts_num_items = trainer.model_accepts_loss_kwargs
        with record_backends() as ran:
            trainer.train()
        self.ran = {name for name, _ in ran}
        self.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        self.eval_loss = trainer.evaluate()["eval_loss"]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True},
}


MODELS = [("marian", ""), ("bert", ""), ("gpt2", "LoRA")]
MORE = [("gpt2", ""), ("llama", ""), ("gpt2", "fused loss")]


@pytest.mark.parametrize(
    ("options", "family", "how"),
    [
        *by_turns(list(OPTIONS), MODELS),
        *(pytest.param(name, *model, marks=pytest.mark.slow) for name in OPTIONS for model in MORE),
    ],
)
def test_trainer(options, family, how, tmp_path):
    results: list[Trained] = []
    begun: dict[str, Tensor] = {}
    for ours in (False, True):
        model = make(family)
        begun = {name: weight.clone() for name, weight in model.state_dict().items()}
        if ours:
            assert fastformer.report(fastformer.accelerate(model, fused_loss=how == "fused loss")).swapped
        if how == "LoRA":
            torch.manual_seed(2)
            targets = {"target_modules": "all-linear", "init_lora_weights": False}
            model = get_peft_model(model, LoraConfig(r=2, **targets, task_type="CAUSAL_LM"))
            begun = {name: weight.clone() for name, weight in model.state_dict().items()}
        with contextlib.nullcontext() if ours else exactly(family):
            results.append(Trained(model, tmp_path / f"run{ours}", **OPTIONS[options]))
    expected, trained = results
    # Causal models of transformers compute their loss in fp32.
    tolerance = 1e-5 if family in ("gpt2", "llama") else 1e-9
    assert len(trained.losses) == 3 and trained.accepts_num_items == expected.accepts_num_items
    assert trained.losses == pytest.approx(expected.losses, rel=tolerance)
    assert trained.eval_loss == pytest.approx(expected.eval_loss, rel=tolerance)
    assert trained.weights.keys() == expected.weights.keys()
    moved = 0
    for name, weight in expected.weights.items():
        change, wanted = trained.weights[name] - begun[name], weight - begun[name]
        if wanted.abs().max() > 1e-12:  # a bias of keys has no gradient, but for rounding
            assert_same(change, wanted, name, tolerance)
            moved += 1
        else:
            assert change.abs().max() < 1e-12, name
    assert moved >= 8
    assert not expected.ran and (FUSED_LOSS in trained.ran) == (how == "fused loss")
    # Layers that are computed again, one by one, keep their padding.
    assert (PACKED in trained.ran) == (options != "checkpointed")
    files = [*tmp_path.glob("runTrue/**/*.json")]
    assert files and not any("fastformer" in file.read_text().lower() for file in files)
