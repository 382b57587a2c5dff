"""Fine-tunes a BERT for classification with transformers' Trainer, before and after `fastformer.accelerate`.

    python examples/finetune_bert.py bert-base-uncased --steps 20

The script makes its own texts: a text is positive if it has more good words than bad ones. Both trainings start from
the same weights and see the same batches. Dropout is off, so their losses agree up to rounding.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from typing import Any

import torch
import transformers

import fastformer

GOOD, BAD, OTHER = ["bird", "sings", "birds"], ["river", "slow", "answer"], ["the", "a", "over", "and", "hills"]


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts of different lengths with their labels."""

    def __init__(self, tokenizer: Any, count: int) -> None:
        generator = random.Random(0)
        self.items = []
        for _ in range(count):
            words = generator.choices(GOOD + BAD + OTHER, k=generator.randint(3, 12))
            label = int(sum(word in GOOD for word in words) > sum(word in BAD for word in words))
            self.items.append({**tokenizer(" ".join(words), truncation=True), "labels": label})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def train(folder: str, steps: int, *, accelerated: bool) -> tuple[float, float]:
    """Returns the mean loss, and the seconds that the training took."""
    transformers.set_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, **no_dropout)
    if accelerated:
        fastformer.accelerate(model)
        print(fastformer.report(model))
    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            out, max_steps=steps, per_device_train_batch_size=16, learning_rate=1e-3, logging_steps=steps,
            report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        collator = transformers.DataCollatorWithPadding(tokenizer)
        trainer = transformers.Trainer(model, arguments, data_collator=collator, train_dataset=Texts(tokenizer, 256))
        start = time.perf_counter()
        loss = trainer.train().training_loss
        return loss, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a BERT: a name, or a folder")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    for accelerated in (False, True):
        loss, seconds = train(options.model, options.steps, accelerated=accelerated)
        print(f"{'accelerated' if accelerated else 'as it is'}: mean loss {loss:.4f}, {seconds:.2f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
