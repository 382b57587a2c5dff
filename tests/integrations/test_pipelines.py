"""A pipeline of transformers whose model is accelerated gives the results of the plain model."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

import fastformer  # noqa: E402

SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "unk_token": "."}
WORDS = [*SPECIAL.values(), "the", "dog", "runs", "in", "park", "a", "small", "cat", "sleeps", "where", "does", "it"]
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"vocab_size": len(WORDS), "max_position_embeddings": 64, "initializer_range": 0.5}
DECODER = SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LABELS = ("contradiction", "neutral", "entailment")
NLI = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
TEXTS = ["the dog runs", "where does a small cat sleep in the park .", "it"]
MASKED = ["the [MASK] runs", "a small [MASK] sleeps in the park"]
GREEDY = {"max_new_tokens": 6, "do_sample": False}
CASES: dict[str, tuple[str, str, dict[str, Any], list[str], list[dict[str, Any]]]] = {
    "text-classification": ("Bert", "ForSequenceClassification", NLI, TEXTS, [{"top_k": None}]),
    "token-classification": ("Bert", "ForTokenClassification", {"num_labels": 3}, TEXTS, [{"stride": 2}]),
    "zero-shot-classification": (
        "Bert", "ForSequenceClassification", NLI, TEXTS, [{"candidate_labels": ["dog", "park"], "multi_label": True}],
    ),
    "fill-mask": ("Bert", "ForMaskedLM", {}, MASKED, [{"targets": ["dog", "cat"]}]),
    "text-generation": (
        "Llama", "ForCausalLM", {}, TEXTS,
        [GREEDY, GREEDY | {"num_beams": 3, "num_return_sequences": 2}, {"max_new_tokens": 6, "do_sample": True}],
    ),
}  # fmt: skip


def made_tokenizer(**options: Any) -> Any:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="."))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **SPECIAL, **options)


def parts_of(found: Any) -> tuple[Any, list[float]]:
    """Returns what a pipeline gave without its numbers, and these."""
    numbers: list[float] = []
    return json.loads(json.dumps(found, default=float), parse_float=lambda x: numbers.append(float(x))), numbers


@pytest.mark.parametrize("task", CASES)
def test_results_are_those_of_the_plain_model(task: str) -> None:
    """One text at a time, and in batches, whose padding is on the left for a decoder."""
    family, head, options, texts, calls = CASES[task]
    torch.manual_seed(0)
    sizes = DECODER if family == "Llama" else SIZES
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    model = getattr(transformers, f"{family}{head}")(config).eval()
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if family == "Bert" else [])]
    tokenizer = made_tokenizer(padding_side="left" if family == "Llama" else "right", model_input_names=inputs)
    plain = transformers.pipeline(task, model=copy.deepcopy(model), tokenizer=tokenizer, device="cpu")
    before = transformers.pipeline(task, model=fastformer.accelerate(model), tokenizer=tokenizer, device="cpu")
    after = transformers.pipeline(task, model=copy.deepcopy(plain.model), tokenizer=tokenizer, device="cpu")
    fastformer.accelerate(after.model)
    for call in calls:
        for batch_size in (1, 3):
            parts = []
            for pipe in (plain, before, after):
                torch.manual_seed(1)
                parts.append(parts_of(pipe(texts, batch_size=batch_size, **copy.deepcopy(call))))
            words, numbers = parts[0]
            assert numbers or task == "text-generation"
            for found, values in parts[1:]:
                assert found == words and values == pytest.approx(numbers, abs=1e-4), (call, batch_size)
    assert fastformer.report(before.model).swapped and fastformer.report(after.model).swapped
