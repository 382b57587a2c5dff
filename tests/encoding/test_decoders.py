"""Decoder-only models as encoders: hidden states without a cache, and the folders of embedders such as Qwen3's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.checkpoints.hf import DECODER_FORMS, FAMILIES, encoding_family
from fastformer.checkpoints.hf.fields import FIELDS
from fastformer.encoding import EncoderEngine
from fastformer.integrations.conversion import convert, from_huggingface
from fastformer.models import GPT, GPTConfig
from tests.checks import assert_accurate
from tests.covering import by_turns
from tests.encoding.folders import D_MODEL, MANY, MAX_LEN, SPECIAL, TEXTS, WORDS, bert, modules, write

GEMMA: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EOS = SPECIAL.index("[SEP]")
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL + WORDS), "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": MAX_LEN + 8,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": EOS, "tie_word_embeddings": False,
}  # fmt: skip


def random_weights(model: Any, std: float = 0.3) -> Any:
    """Gives a model weights with which its results differ by their inputs."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=std)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter += 1
    return model.eval()


def decoder(folder: Path, kind: str = "Qwen3ForCausalLM", ends: tuple[str, ...] = ("eos",), **settings: Any) -> Any:
    """Writes a decoder of transformers with a tokenizer that puts these special tokens around texts, and returns it."""
    import tokenizers
    import transformers

    bert(folder)
    (folder / "model.safetensors").unlink()
    model = random_weights(getattr(transformers, kind)(getattr(transformers, kind).config_class(**SIZES | settings)))
    model.save_pretrained(folder)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "eos_token": "[SEP]"}
    write(folder / "tokenizer_config.json", {**named, "bos_token": "[CLS]", "model_max_length": MAX_LEN})
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join(["[CLS]"] * ("bos" in ends) + ["$A"] + ["[SEP]"] * ("eos" in ends)),
        pair="$A $B",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def expected(model: Any, folder: Path, texts: list[str], dtype: torch.dtype, most: int = MAX_LEN) -> list[Tensor]:
    """Returns the states of each text alone, by transformers' model and tokenizer."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = model.to(dtype)
    with torch.inference_mode():
        rows = [tokenizer(text, truncation=True, max_length=most, return_tensors="pt").input_ids for text in texts]
        found = [model.base_model(row, use_cache=False).last_hidden_state[0] for row in rows]
    model.float()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "rms", "activation": "swiglu", "qk_norm": "head", "num_kv_heads": 2, "positions": "rotary"},
        {"window_size": 3, "window_layers": (True, False), "positions": "rotary", "local_rotary_base": 100.0},
        {"norm": "rms", "norm_placement": "both", "attention_softcap": 5.0, "attention_scale": 0.2},
        {"positions": "learned", "embedding_scale": 3.0},
        {"window_size": 3, "window_layers": (True, False), "positions": "rotary", "is_causal": False},
    ],
    ids=["Qwen3", "windows", "Gemma 2", "GPT-2", "both sides"],
)
def test_hidden_states_equal_those_of_the_modules(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = GPTConfig(40, d_model=32, num_heads=4, num_layers=2, max_len=64, **options)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(40, (length,), generator=generator).tolist() for length in (1, 9, 30, 17, 64)]
    engine = EncoderEngine(model)
    assert engine.name == "cpp"
    found = torch.from_numpy(engine.encode(texts, pooling="none"))
    wide = GPT(config, dtype=torch.float64).eval()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    with torch.inference_mode():
        plain, exact = (torch.cat([each.decode(torch.tensor([text]))[0] for text in texts]) for each in (model, wide))
    assert_accurate(found, plain, exact)
    last = engine.encode(texts, pooling="lasttoken")
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    assert torch.equal(torch.from_numpy(last), found[ends])
    assert all((engine.encode([text]) == row).all() for text, row in zip(texts, engine.encode(texts), strict=True))


@pytest.mark.parametrize(
    ("kind", "ends", "mode", "settings"),
    [
        ("Qwen3ForCausalLM", ("eos",), "lasttoken", {}),
        ("MistralForCausalLM", ("bos", "eos"), "lasttoken", {}),
        ("Qwen3Model", (), "mean", {"is_causal": False}),
        ("LlamaForCausalLM", ("bos",), "weightedmean", {}),
        ("Gemma3TextModel", ("bos", "eos"), "mean", {"use_bidirectional_attention": True, **GEMMA}),
    ],
)
def test_folders_of_embedders(
    kind: str, ends: tuple[str, ...], mode: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Tests prompts, pooling, and that the tokens around a text survive when it is cut."""
    model = decoder(tmp_path, kind, ends, **settings)
    modules(tmp_path, ("Pooling", {"embedding_dimension": D_MODEL, "pooling_mode": mode}), ("Normalize", {}))
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "query : ", "document": ""}})
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 9})
    encoder = fastformer.Encoder(tmp_path)
    texts = [text for text in MANY if text or ends]
    long = "two birds sing over the slow river and the hills ."
    assert (encoder.tokenize([long])["input_ids"][0, -1] == EOS) == ("eos" in ends)

    def pooled(states: Tensor) -> Tensor:
        weights = torch.arange(1, len(states) + 1, dtype=states.dtype)[:, None]
        by_mode = {"lasttoken": states[-1], "mean": states.mean(0), "weightedmean": (states * weights).sum(0)}
        return torch.nn.functional.normalize(by_mode[mode], dim=0)

    for prompt, found in (("", encoder.encode_document(texts)), ("query : ", encoder.encode_query(texts))):
        plain, exact = (
            torch.stack(
                [pooled(each) for each in expected(model, tmp_path, [prompt + text for text in texts], dtype, 9)]
            )
            for dtype in (torch.float32, torch.float64)
        )
        assert_accurate(torch.from_numpy(found), plain, exact)


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        # slow: a family that has windows, without one
        pytest.param(kind, window, marks=pytest.mark.slow if window is None and has_windows else ())
        for kind in DECODER_FORMS
        if encoding_family(kind) is not None  # the states of linear attention are causal
        for has_windows in ["sliding_window" in FIELDS[kind]]
        for window in ((None, 5) if has_windows else (None,))
    ],
)
def test_decoders_whose_tokens_see_each_other(kind: str, window: int | None) -> None:
    """Tests every family: its settings say what a token sees, and only encoding reads such a model."""
    import transformers

    family, embeds = FAMILIES[kind], kind == "gemma3_text" and window is not None
    model_class = getattr(transformers, family.headless)
    settings: dict[str, Any] = {"use_bidirectional_attention": True} if embeds else {"is_causal": False}
    if window is not None:
        settings |= GEMMA | {"sliding_window": window, "use_sliding_window": True}
    sizes = {**SIZES}
    if kind == "gpt2":
        settings |= {"n_embd": D_MODEL, "n_head": 4, "n_layer": 2}
    if kind == "granitemoehybrid":
        settings |= {"num_local_experts": 0, "layer_types": ["full_attention"] * 2, "mamba_n_heads": 1}
    if kind == "gpt_neox":
        del sizes["num_key_value_heads"]
    model = random_weights(model_class(model_class.config_class(**sizes | settings, attn_implementation="eager")), 0.15)
    model.config._experts_implementation = "eager"  # the others have no products in fp64
    batches = [torch.randint(5, 29, (4, length)) for length in (1, 4, 9, 20, 24)]  # few errors are luck
    engine = EncoderEngine(convert(model, lambda settings: settings, headless=True))
    texts = [ids for batch in batches for ids in batch.tolist()]
    found = torch.from_numpy(engine.encode(texts, pooling="none"))
    with torch.inference_mode():
        plain, exact = (
            torch.cat([each(batch, use_cache=False).last_hidden_state.flatten(0, 1) for batch in batches])
            for each in (model, copy.deepcopy(model).double())
        )
    assert_accurate(found, plain, exact)
    whole = getattr(transformers, family.model_class)(model.config)
    with pytest.raises(ValueError, match="is_causal"):
        from_huggingface(whole)


def test_a_model_whose_tokens_see_each_other_predicts_no_next_token() -> None:
    model = GPT(GPTConfig(40, d_model=32, num_heads=4, num_layers=1, max_len=64, is_causal=False))
    for predict in (
        lambda: fastformer.generate(model, [[1, 2]]),
        lambda: model.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])),
        lambda: model.decode(torch.tensor([[1, 2]]), cache=model.new_cache(1, 8)),
    ):
        with pytest.raises(ValueError, match="causal"):
            predict()


def test_a_folder_without_modules_pools_as_its_architecture_does(tmp_path: Path) -> None:
    model = decoder(tmp_path / "whole")
    rows = fastformer.Encoder(tmp_path / "whole").encode(TEXTS)
    states = expected(model, tmp_path / "whole", TEXTS, torch.float32)
    torch.testing.assert_close(torch.from_numpy(rows), torch.stack([each[-1] for each in states]), rtol=1e-4, atol=1e-4)
    model = decoder(tmp_path / "bare", "Qwen3Model")
    rows = fastformer.Encoder(tmp_path / "bare").encode(TEXTS)
    states = expected(model, tmp_path / "bare", TEXTS, torch.float32)
    torch.testing.assert_close(torch.from_numpy(rows), torch.stack([s.mean(0) for s in states]), rtol=1e-4, atol=1e-4)


def test_what_has_no_equal_is_refused(tmp_path: Path) -> None:
    decoder(tmp_path, "GemmaForCausalLM")
    write(tmp_path / "sentence_bert_config.json", {"modality_config": {"message": {"method": "forward"}}})
    with pytest.raises(ValueError, match="chat template"):
        fastformer.Encoder(tmp_path)
    with pytest.raises(ValueError, match="head"):
        decoder(tmp_path / "plain", "Qwen3Model")
        fastformer.CrossEncoder(tmp_path / "plain")


PAIRS = [("a bird sings", text) for text in MANY if text]


def logits_of(model: Any, folder: Path, dtype: torch.dtype) -> Tensor:
    """Returns the logits of the pairs' last tokens, each pair alone, by transformers."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = model.to(dtype)
    with torch.inference_mode():
        rows = [tokenizer(*pair, truncation=True, max_length=9, return_tensors="pt").input_ids for pair in PAIRS]
        # A classifier's logits are (1, num_labels), those of words (1, seqlen, vocab_size).
        logits = torch.cat([model(row, use_cache=False).logits.flatten(0, -2)[-1:] for row in rows])
    model.float()
    return logits


def test_a_decoder_with_a_classifier_scores_pairs(tmp_path: Path) -> None:
    for num_labels in (1, 3):
        folder = tmp_path / str(num_labels)
        model = decoder(folder, "Qwen3ForSequenceClassification", (), num_labels=num_labels, pad_token_id=7)
        write(folder / "sentence_bert_config.json", {"max_seq_length": 9})
        ranker = fastformer.CrossEncoder(folder, activation_fn=torch.nn.Identity())
        found = torch.from_numpy(ranker.predict(PAIRS)).reshape(len(PAIRS), -1)
        assert any(ids[-1] == 7 for ids in ranker._reader.pairs(PAIRS).ids)  # a text that ends with PAD's word
        assert_accurate(found, *(logits_of(model, folder, dtype) for dtype in (torch.float32, torch.float64)))
        assert ranker.num_labels == len(ranker.labels) == num_labels


@pytest.mark.parametrize("tied, false_token", by_turns([False, True], [9, None]))
def test_a_decoder_scores_pairs_by_the_logits_of_its_words(tied: bool, false_token: int | None, tmp_path: Path) -> None:
    model = decoder(tmp_path, ends=(), tie_word_embeddings=tied)
    modules(tmp_path, ("LogitScore", {"true_token_id": 8, "false_token_id": false_token}))
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 9})
    ranker = fastformer.CrossEncoder(tmp_path, activation_fn=torch.nn.Identity())
    plain, exact = (logits_of(model, tmp_path, dtype) for dtype in (torch.float32, torch.float64))
    due = [each[:, 8] if false_token is None else each[:, 8] - each[:, false_token] for each in (plain, exact)]
    assert_accurate(torch.from_numpy(ranker.predict(PAIRS)), *due)
    best = ranker.rank("a bird sings", [text for _, text in PAIRS], top_k=3)
    assert [entry["corpus_id"] for entry in best] == due[1].argsort(descending=True)[:3].tolist()
    write(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 10**6})
    with pytest.raises(ValueError, match="tokens"):
        fastformer.CrossEncoder(tmp_path)
