"""`TokenClassifier` has the results of transformers' pipeline, for long texts too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer import TokenClassifier
from tests.encoding.folders import D_MODEL, MANY, MAX_LEN, SPECIAL, TOKENIZER, WORDS, bert, write

transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC"]
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL + WORDS), "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": MAX_LEN + 8, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "id2label": dict(enumerate(LABELS)),
    "label2id": {label: place for place, label in enumerate(LABELS)},
}  # fmt: skip
LONG = ["slowly " * 20 + "birds hills river " * 30, " ".join(MANY), "", "unknown birds, slowlys ."]
MODELS: dict[str, dict[str, Any]] = {
    "Bert": {}, "DistilBert": {"dim": D_MODEL, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "Roberta": {}, "Electra": {"embedding_size": 16}, "ModernBert": {"local_attention": 8},
    "EuroBert": {"num_key_value_heads": 2, "mask_token_id": 4},
}  # fmt: skip


def pipeline(folder: Path, name: str) -> Any:
    """Writes a folder, and returns transformers' pipeline."""
    bert(folder)
    if name == "Roberta":  # with a tokenizer that has no mark of tokens that continue a word
        values = json.loads((folder / "tokenizer.json").read_text())
        values["model"] = {"type": "WordLevel", "vocab": values["model"]["vocab"], "unk_token": "[UNK]"}
        write(folder / "tokenizer.json", values)
    (folder / "model.safetensors").unlink()
    kind = getattr(transformers, f"{name}ForTokenClassification")
    model = kind(kind.config_class(**SIZES | MODELS[name])).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and key.endswith("weight") else 0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_max_length=MAX_LEN,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)),
    )  # fmt: skip
    write(folder / "tokenizer_config.json", TOKENIZER | {"unk_token": "[UNK]"})
    return transformers.pipeline("token-classification", model=model, tokenizer=tokenizer, device="cpu")


def check(found: Any, due: Any) -> None:
    assert len(found) == len(due)
    for one, other in zip(found, due, strict=True):
        assert [{**each, "score": 0} for each in one] == [{**each, "score": 0} for each in other]
        scores = [[each["score"] for each in entities] for entities in (one, other)]
        assert scores[0] == pytest.approx([float(score) for score in scores[1]], abs=1e-5)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("name", MODELS)
def test_results_equal_those_of_the_pipeline(name: str, tmp_path: Path) -> None:
    plain = pipeline(tmp_path, name)
    classifier = TokenClassifier.from_pretrained(tmp_path)
    assert classifier.labels == tuple(LABELS)
    texts = [text for text in MANY[:6] + LONG if text]
    check(classifier.classify(texts), plain(texts))
    # What follows the labels depends on the tokenizer alone, of which there are two.
    cases: list[tuple[Any, int | None]] = [("average", 3)]
    if name in ("Bert", "Roberta"):
        check(classifier.classify(texts, ignore_labels=["MISC"]), plain(texts, ignore_labels=["MISC"]))
        strategies = ("simple", "first", "average", "max")
        cases = [(each, None) for each in strategies] + [*zip(strategies, (9, 3, 0, 3), strict=True)]
    for strategy, stride in cases:
        given: dict[str, Any] = {} if stride is None else {"stride": stride}
        found = classifier.classify(texts, strategy, batch_tokens=64, **given)
        check(found, plain(texts, aggregation_strategy=strategy, **given))
    check([classifier.classify(texts[-1], "max", stride=2)], [plain(texts[-1], aggregation_strategy="max", stride=2)])


def test_a_long_text_is_classified_to_its_end(tmp_path: Path) -> None:
    pipeline(tmp_path, "Bert")
    classifier = TokenClassifier(tmp_path, precision="int8")
    ends = [classifier.classify(LONG[1], "simple", stride=stride, ignore_labels=())[-1]["end"] for stride in (None, 4)]
    assert ends[0] < len(LONG[1]) == ends[1]
    assert classifier.classify(["", LONG[0]], "first", stride=1)[0] == classifier.classify("") == []


def test_wrong_calls_and_folders_are_named(tmp_path: Path, plain: tuple[Path, Any]) -> None:
    pipeline(tmp_path, "Bert")
    classifier = TokenClassifier(tmp_path)
    wrong: Any
    for wrong, named in (({"stride": 3}, "stride"), ({"aggregation_strategy": "sum"}, "aggregation_strategy"),
                         ({"aggregation_strategy": "max", "stride": MAX_LEN - 2}, "stride")):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            classifier.classify("a bird", **wrong)
    with pytest.raises(ValueError, match=r"sentences\[1\]"):
        classifier.classify(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="token classification"):
        TokenClassifier(plain[0])
