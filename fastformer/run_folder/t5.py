"""The folder of a T5 or an mT5 as transformers saves it: read without transformers.

tokenizer.json               as the tokenizers library has it; or spiece.model, a SentencePiece model

`run_folder.hugging_face` says what else there is.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fastformer.data.bart import BartTokenizer
from fastformer.data.marian import read_sentencepiece
from fastformer.data.t5 import T5Tokenizer
from fastformer.data.tokenizer import TOKENIZER, read_backend
from fastformer.files import read_json
from fastformer.models import Transformer
from fastformer.models.pretrained import CONFIG
from fastformer.run_folder.hugging_face import load_weights, read_file, special_tokens

_NAMES = {"unk": "<unk>", "eos": "</s>", "pad": "<pad>"}
_SENTENCEPIECE = "spiece.model"


def load_t5(
    folder: Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, BartTokenizer | T5Tokenizer]:
    """The model and the tokenizer.

    Texts have to begin with their task, "translate English to German: " say, as the model learnt it.

    Args:
        folder: see above.
        device, dtype: see `load_weights`.

    Raises:
        ImportError: safetensors, or tokenizers or sentencepiece is not installed.
        ValueError: a file that is missing or damaged, or files that don't belong together.
    """
    settings = read_json(folder / CONFIG)
    file = folder / TOKENIZER
    if file.is_file():
        backend = read_backend(file, read_json(file))
        vocab = backend.get_vocab()
    else:
        file = folder / _SENTENCEPIECE
        processor = read_sentencepiece(file, read_file(file))
        vocab = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    special = special_tokens(folder, settings, vocab, _NAMES, ["unk"])
    try:
        model = load_weights(folder, settings, unk=special["unk"], device=device, dtype=dtype)
        sizes = model.config.vocab_size, model.config.special_ids
        if file.name == TOKENIZER:
            return model, BartTokenizer(backend, *sizes, None, str(file))
        return model, T5Tokenizer(processor, *sizes)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{folder}: {error}") from error
