"""Makes folders of multilingual translators, one for each way in which transformers selects the languages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.checkpoints import families
from tests.checkpoints.families import (
    SIZES,
    T5_IDS,
    TEXTS,
    Saved,
    draw,
    saved,
    tokenizers,
    without,
    write_pieces,
)

BOTH = [*families.ENGLISH, *families.GERMAN]
NLLB = ["eng_Latn", "deu_Latn", "zho_Hans", "zho_Hant", "fra_Latn"]
_FILE = "sentencepiece.bpe.model"


class Spoken(NamedTuple):
    """A folder of a multilingual translator.

    Attributes:
        saved: the folder, and the objects that transformers saved there.
        source, target: two of its languages; the source is None if the model isn't told it.
        short: short names of both.
        token: the text that tells transformers the target; None: the target is a forced id.
    """

    saved: Saved
    source: str | None
    target: str
    short: tuple[str | None, str]
    token: str | None = None

    @property
    def languages(self) -> dict[str, str | None]:
        return {"source_lang": self.source, "target_lang": self.target}

    def target_id(self) -> int:
        """Returns transformers' id of the target."""
        tokenizer = self.saved.tokenizer
        is_m2m100 = isinstance(tokenizer, M2M100Tokenizer)
        found = tokenizer.get_lang_id(self.target) if is_m2m100 else tokenizer.convert_tokens_to_ids(self.target)
        assert found != tokenizer.unk_token_id
        return int(found)

    def said(self, **options: Any) -> list[str]:
        """Returns the output of transformers' generate for the texts."""
        if self.token is not None:
            return self.saved._replace(texts=[f"{self.token} {text}" for text in self.saved.texts]).said(**options)
        self.saved.tokenizer.src_lang = self.source
        if self.saved.model.config.decoder_start_token_id != self.target_id():
            options = {"forced_bos_token_id": self.target_id(), **options}
        # transformers takes M2M100's languages for text.
        token, texts = f"__{self.target}__", self.saved.said(**options)
        return [text.removeprefix(token).lstrip() if text.startswith(token) else text for text in texts]

    def read(self, text: str) -> list[int]:
        """Returns transformers' ids of a source."""
        if self.token is None:
            self.saved.tokenizer.src_lang = self.source
        found: list[int] = self.saved.tokenizer(text if self.token is None else f"{self.token} {text}")["input_ids"]
        return found


def _model(kind: str, vocab_size: int, seed: int, **options: Any) -> Any:
    config_class, model_class = {
        "m2m_100": (M2M100Config, M2M100ForConditionalGeneration),
        "mbart": (MBartConfig, MBartForConditionalGeneration),
    }[kind]
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config: Any = config_class(vocab_size=vocab_size, scale_embedding=True, **SIZES | ids | options)
    model = model_class(config).eval()
    draw(model, seed, 0.2, 0.8)
    with torch.no_grad():
        model.model.decoder.layer_norm.weight.mul_(2)
        model.model.shared.weight[1] = 0  # PAD isn't said, for M2M100 counts none of it
    return model


def nllb(folder: Path, **options: Any) -> Spoken:
    write_pieces(folder / _FILE, BOTH, vocab_size=80, model_type="bpe")
    tokenizer = NllbTokenizer.from_pretrained(folder, extra_special_tokens=NLLB, **options)
    (folder / _FILE).unlink()
    model = _model("m2m_100", len(tokenizer) + 2, 7)
    return Spoken(saved(folder, model, tokenizer, TEXTS), "eng_Latn", "deu_Latn", ("en", "deu"))


def m2m100(folder: Path) -> Spoken:
    processor = write_pieces(folder / _FILE, BOTH, vocab_size=80, model_type="bpe")
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *reversed(pieces)])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = M2M100Tokenizer(str(folder / "vocab.json"), str(folder / _FILE))
    model = _model("m2m_100", len(vocab) + 108, 2)
    with torch.no_grad():
        model.model.shared.weight[len(vocab) :] *= 0.1  # languages, which aren't said behind the first token
    return Spoken(saved(folder, model, tokenizer, TEXTS), "en", "de", ("EN", "de"))


def mbart50(folder: Path) -> Spoken:
    write_pieces(folder / _FILE, BOTH, vocab_size=80)
    tokenizer = MBart50Tokenizer.from_pretrained(folder)
    model = _model("mbart", len(tokenizer), 3)
    return Spoken(saved(folder, model, tokenizer, TEXTS), "en_XX", "de_DE", ("en", "de"))


def mbart(folder: Path) -> Spoken:
    write_pieces(folder / _FILE, BOTH, vocab_size=80)
    tokenizer = MBartTokenizer.from_pretrained(folder)
    start = tokenizer.convert_tokens_to_ids("ro_RO")
    model = _model("mbart", len(tokenizer), 4, decoder_start_token_id=start)
    return Spoken(saved(folder, model, tokenizer, TEXTS), "en_XX", "ro_RO", ("en", "ro"))


def madlad(folder: Path) -> Spoken:
    """Makes a folder with both kinds of tokenizer."""
    symbols = [f"<2{name}>" for name in ("de", "fr", "zh", "zh_Hant")]
    processor = write_pieces(folder / "spiece.model", BOTH, vocab_size=70, user_defined_symbols=symbols, **T5_IDS)
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    # Not `T5Tokenizer`, which would read the symbols before it cuts the text, and SentencePiece doesn't.
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2, byte_fallback=False))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", T5_IDS["eos_id"])]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(pieces), d_model=32, d_kv=16, num_heads=3, d_ff=48, num_layers=2, decoder_start_token_id=0,
            feed_forward_proj="gated-gelu", relative_attention_max_distance=20, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    draw(model, 4, 0.3, 0.5)
    with torch.no_grad():
        model.decoder.final_layer_norm.weight.mul_(9)
        model.shared.weight[0] = 0
    return Spoken(saved(folder, model, tokenizer, TEXTS), None, "de", (None, "DE"), "<2de>")


def only(spoken: Spoken, folder: Path, *names: str) -> Spoken:
    """Returns a copy of a folder without some files."""
    return spoken._replace(saved=without(spoken.saved, folder, *names))


# By the kind of folder.
FOLDERS: dict[str, Callable[[Path], Spoken]] = {
    "nllb": nllb,
    "nllb-legacy": lambda folder: nllb(folder, legacy_behaviour=True),
    "m2m100": m2m100,
    "mbart50": mbart50,
    "mbart50-pieces": lambda folder: only(mbart50(folder.with_name("whole")), folder, "tokenizer.json"),
    "mbart": mbart,
    "madlad": madlad,
    "madlad-spiece": lambda folder: only(madlad(folder.with_name("whole")), folder, "tokenizer.json"),
}
