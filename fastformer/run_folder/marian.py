"""The folder of a Marian as transformers saves it: read without transformers.

source.spm, target.spm       SentencePiece models
vocab.json                   the ids of pieces; target_vocab.json where the target has its own

`run_folder.hugging_face` says what else there is.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fastformer.data.marian import MarianTokenizer, check_vocab, read_sentencepiece
from fastformer.files import read_json
from fastformer.models import Transformer
from fastformer.models.pretrained import CONFIG
from fastformer.run_folder.hugging_face import load_weights, read_file, special_tokens

_NAMES = {"unk": "<unk>", "eos": "</s>", "pad": "<pad>"}


def load_marian(
    folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, MarianTokenizer]:
    """The model and the tokenizer.

    Args:
        folder: see above.
        device, dtype: see `load_weights`.

    Raises:
        ImportError: safetensors or sentencepiece is not installed.
        ValueError: a file that is missing or damaged, or files that don't belong together.
    """
    settings = read_json(folder / CONFIG)
    # All small files first: they name what is wrong in no time.
    vocab = check_vocab(folder / "vocab.json", read_json(folder / "vocab.json"))
    own = folder / "target_vocab.json"
    target_vocab = check_vocab(own, read_json(own)) if own.is_file() else vocab
    source, target = (
        read_sentencepiece(file, read_file(file)) for file in (folder / "source.spm", folder / "target.spm")
    )
    special = special_tokens(folder, settings, target_vocab, _NAMES, ["unk"])
    try:
        model = load_weights(folder, settings, unk=special["unk"], device=device, dtype=dtype)
        config = model.config
        if max(vocab.values()) >= (config.source_vocab_size or config.vocab_size):
            raise ValueError(f"its vocab.json has ids up to {max(vocab.values())}, which the model doesn't have")
        tokenizer = MarianTokenizer(source, target, vocab, target_vocab, config.vocab_size, config.special_ids)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{folder}: {error}") from error
    return model, tokenizer
