"""A small random Whisper with a tokenizer of letters, and sounds that rise and fall as speech does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.audio.whispers import TASKS, draw_weights

FOREIGN = Path(__file__).parent.parent / "foreign" / "speech"  # folders of CTranslate2, without a tokenizer
LANGUAGES = ("en", "de", "fr")
LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]
FRAMES, LENGTH = 200, 60  # of a window, and the most tokens


def tokenizer(num_times: int = FRAMES // 2 + 1) -> Any:
    """Returns a tokenizer of bytes, and of letters that begin a word; then the special tokens, and times."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*bytes_, *("Ġ" + letter for letter in LETTERS)]
    letters = Tokenizer(models.BPE({text: place for place, text in enumerate(texts)}, [("Ġ", one) for one in LETTERS]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    names = ["endoftext", "startoftranscript", *LANGUAGES, *TASKS, *(f"{i * 0.02:.2f}" for i in range(num_times))]
    letters.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    return letters


def whisper(frames: int = FRAMES, length: int = LENGTH, *, is_multilingual: bool = True) -> tuple[Any, Any]:
    """Returns a random model of transformers, whose texts have words and times, and its tokenizer."""
    import transformers

    tokens = tokenizer(frames // 2 + 1)
    ids = {name: tokens.token_to_id(f"<|{name}|>") for name in ("endoftext", "startoftranscript", *LANGUAGES, *TASKS)}
    config = transformers.WhisperConfig(
        vocab_size=tokens.get_vocab_size(), d_model=16, num_mel_bins=80, max_source_positions=frames // 2,
        max_target_positions=length, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, eos_token_id=ids["endoftext"],
        bos_token_id=ids["endoftext"], pad_token_id=ids["endoftext"],
        decoder_start_token_id=ids["startoftranscript"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    draw_weights(model)
    with torch.no_grad():
        rows = model.model.decoder.embed_tokens.weight
        letters = rows[[tokens.token_to_id(text) for one in LETTERS for text in (one, "Ġ" + one)]]
        rows[: ids["endoftext"]] *= 0.3  # bytes, which are no letters, are rare
        rows[[tokens.token_to_id(text) for one in LETTERS for text in (one, "Ġ" + one)]] = letters * 1.2
        rows[ids["endoftext"]] *= 1.3
        rows[ids["notimestamps"] + 1 :] *= 0.5
    options = {
        "no_timestamps_token_id": ids["notimestamps"],
        "lang_to_id": {f"<|{name}|>": ids[name] for name in LANGUAGES},
        "is_multilingual": is_multilingual,
        "suppress_tokens": [],
        "begin_suppress_tokens": [ids["endoftext"]],
        "alignment_heads": [[0, 1], [1, 0]],
    }
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    return model, tokens


def folder(path: Path, **settings: Any) -> Path:
    """Saves `whisper` as transformers does."""
    model, tokens = whisper(**settings)
    model.save_pretrained(path)
    tokens.save(str(path / "tokenizer.json"))
    return path


def sound(seconds: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Returns tones that come and go, with some noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * 16_000)) / 16_000
    loudness = (np.sin(times * random.uniform(1, 3)) > -0.3) * np.abs(np.sin(times * random.uniform(3, 9)))
    tone = np.sin(2 * np.pi * random.uniform(100, 300) * times * (1 + 0.1 * np.sin(times)))
    result: np.ndarray[Any, Any] = loudness * (0.3 * tone + 0.02 * random.standard_normal(times.size))
    return result.astype(np.float32)


def ctranslate2_folder(path: Path) -> Path:
    """Copies a small Whisper in CTranslate2's format, with a tokenizer of its words, and returns the folder."""
    from tokenizers import Tokenizer, models

    shutil.copytree(FOREIGN / "fp16", path)
    words = json.loads((path / "vocabulary.json").read_text())
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=""))
    tokens.add_special_tokens([word for word in words if word.startswith("<|")])
    tokens.save(str(path / "tokenizer.json"))
    return path
