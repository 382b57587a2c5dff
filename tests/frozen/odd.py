"""Lists what the readers of checkpoints make of odd settings and of tensors that don't fit: of each, a word.

"!" is a refusal, "=" what the whole folder gives, and results with the same letter are the same.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fastformer.checkpoints import load_model
from fastformer.checkpoints.ctranslate2 import as_tensors, load_transformer
from fastformer.checkpoints.gguf.models import load_file as load_gguf
from fastformer.checkpoints.hf import FAMILIES
from fastformer.checkpoints.hf.adapters import load_adapter
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.checkpoints.hf.decoder import special_ids
from fastformer.checkpoints.hf.fields import check_fields
from fastformer.checkpoints.hf.quantized import dequantized, quantization_settings
from fastformer.checkpoints.model_bin import MODEL, read_variables
from fastformer.checkpoints.speech import load_speech
from fastformer.integrations import from_huggingface
from tests.audio.whispers import whisper
from tests.checkpoints.conftest import FOLDERS as SAVED
from tests.checkpoints.present import PRESENT
from tests.checkpoints.test_ctranslate2 import written
from tests.checkpoints.test_gguf import contents, packed, to_bytes
from tests.checkpoints.test_omitted import MORE, REFUSED, SPECIFICATIONS, made_of, options_of, outcome
from tests.checkpoints.test_quantized_folders import checkpoint
from tests.foreign.compressed_folders import FOLDERS as COMPRESSED
from tests.foreign.ctranslate2_folders import DECODER_FOLDERS
from tests.foreign.ctranslate2_folders import FOLDERS as CTRANSLATE2
from tests.foreign.gguf_files import FOLDER as GGUF
from tests.generation.lora_folders import linears, write_adapter
from tests.integrations.config_fields import BASES, Change, Nested, config_of, made

VALUES: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3, 0.5, "", "x", [], {}, [1])
# Settings that config.json of any family may have.
OF_ANY = {
    *("attention_bias", "attention_chunk_size", "head_dim", "is_causal", "is_decoder", "layer_types", "mlp_bias"),
    *("num_key_value_heads", "partial_rotary_factor", "pruned_heads", "rope_scaling", "rope_theta", "sliding_window"),
    *("position_embedding_type", "tie_word_embeddings", "use_bidirectional_attention", "use_sliding_window"),
}
# The sides of an encoder-decoder are of different depths.
SIDES = {"t5": Nested(num_decoder_layers=3)}
OF_SEQ2SEQ = (None, True, False, 3, 0.5)
WITH_TENSORS = ("llama", "whisper")
NUMBERS = (0.0, -1.0, 0.5, 3.0)
Tensors = dict[str, Tensor]


def words(whole: Any, results: Iterable[Any]) -> str:
    """Returns a word for each result, compared with that of the whole folder."""
    others, found = [whole], list[str]()
    for result in results:
        if result != REFUSED and result not in others:
            others.append(result)
        found.append("!" if result == REFUSED else chr(ord("a") + others.index(result) - 1) if result != whole else "=")
    return " ".join(found)


def read_ones(found: dict[str, str]) -> dict[str, str]:
    """Returns the rows of what is read at all, and of what a family must not read."""
    return {name: row for name, row in found.items() if {*row} - {*"=| "} or name in OF_ANY}


@functools.cache
def state_of(kind: str) -> Tensors:
    """Returns the weights of a small model of a family."""
    state: Tensors = made(Change(kind, "", SIDES.get(kind, Nested()))).state_dict()
    return state


def read_settings(kind: str, settings: dict[str, Any]) -> Any:
    """Returns the options of a family's config, its ids, and whether an encoder may have it; of a translator all."""
    if FAMILIES[kind].kind == "seq2seq":
        return digest(FAMILIES[kind].to_model(Checkpoint(settings, state_of(kind), 3, [5])))
    check_fields(settings, FAMILIES[kind].kind)
    encodes = outcome(lambda: check_fields(settings, FAMILIES[kind].kind, encodes=True))
    return options_of(kind, settings), outcome(special_ids, settings, 60, None), encodes


def names_of(kind: str) -> list[str]:
    """Returns the settings that transformers writes for a family, and those that some family has."""
    own = config_of(kind, BASES[kind]).to_dict().keys() - {"model_type"}
    return sorted(own if FAMILIES[kind].kind == "seq2seq" else own | OF_ANY)


def settings_now(kind: str, names: Iterable[str]) -> dict[str, str]:
    """Returns a word for each odd value of each setting of a family, in folders of several sizes."""
    wholes = [{"model_type": kind, **base, **SIDES.get(kind, {})} for base in (BASES[kind], *MORE.get(kind, ()))]
    values = VALUES if FAMILIES[kind].kind != "seq2seq" else OF_SEQ2SEQ
    found: dict[str, str] = {}
    for name in names:
        rows = [
            words(
                read_settings(kind, whole), (outcome(read_settings, kind, {**whole, name: value}) for value in values)
            )
            for whole in wholes
        ]
        found[name] = " | ".join(dict.fromkeys(rows))
    return found


def changes(tensor: Tensor) -> list[Tensor | None]:
    """Returns what may stand in a tensor's place: nothing, other shapes, another type."""
    other = tensor.to(torch.int32 if tensor.is_floating_point() else torch.float32)
    if not tensor.dim():
        return [None, tensor[None], other, *(torch.tensor(number).to(tensor.dtype) for number in NUMBERS)]
    return [None, tensor[None], tensor[:-1], tensor[..., :-1], other]


def digest(model: Any) -> Any:
    config, numbers = made_of(model)
    return config, {name: hash(each) for name, each in numbers.items()}


def tensors_now(
    tensors: Mapping[str, Tensor], read: Callable[[Tensors], Any], kind_of: Callable[[str], str]
) -> dict[str, str]:
    """Returns the words of the changes of a tensor of each kind."""
    found: dict[str, str] = {}
    whole = read(dict(tensors))
    for name, tensor in tensors.items():
        if (kind := kind_of(name)) and kind not in found:
            left = {key: each for key, each in tensors.items() if key != name}
            parts = [left if part is None else {**left, name: part} for part in changes(tensor)]
            found[kind] = words(whole, [outcome(read, part) for part in parts])
    return read_ones(found)


def of_ctranslate2(name: str) -> dict[str, str]:
    source, read = SPECIFICATIONS[name]
    spec, arrays = read_variables(source / MODEL)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(source, Path(place) / name))

        def written_and_read(tensors: Tensors) -> Any:
            (folder / MODEL).unlink()
            (folder / MODEL).write_bytes(written(tensors, spec))
            return read(folder)

        stored = as_tensors(arrays)
        numbers = {key.rpartition("/")[2] for key, tensor in stored.items() if not tensor.dim()}

        def kind_of(variable: str) -> str:
            *_, parent, last = re.sub(r"\d+", "", variable).split("/")
            return last if last in numbers else f"{parent}/{last}" if name in WITH_TENSORS else ""

        return tensors_now(stored, written_and_read, kind_of)


def of_quantized(name: str) -> dict[str, str]:
    if name in ("gptq", "awq"):
        settings, state, _ = checkpoint(name, 32)
    else:
        settings = json.loads((COMPRESSED / name / "config.json").read_text())
        state = load_file(COMPRESSED / name / "model.safetensors")
    settings |= {"num_hidden_layers": 1}
    state = {key: tensor for key, tensor in state.items() if ".layers.1." not in key}
    values = settings["quantization_config"]

    def read_as(values: Any, tensors: Tensors) -> Any:
        how = quantization_settings(COMPRESSED, {**settings, "quantization_config": values})
        if how is None:
            return None
        plain = dequantized({**settings, "quantization_config": values}, how, dict(tensors), COMPRESSED)
        return plain.settings, {key: tensor.sum().item() for key, tensor in plain.state.items()}

    def read(tensors: Tensors) -> Any:
        how = quantization_settings(COMPRESSED, settings)
        assert how is not None
        plain = dequantized(settings, how, tensors, COMPRESSED)
        return digest(FAMILIES["llama"].to_model(Checkpoint(plain.settings, plain.state, dtype=torch.float32)))

    found = tensors_now(state, read, lambda key: key.rpartition(".")[2])
    # Settings mean the same for other matrices of a group.
    few = {key: tensor for key, tensor in state.items() if not re.search(r"\.(k|o|gate|up)_proj\.", key)}
    whole = read_as(values, few)
    for place in places_in(values) if name in WITH_SETTINGS else ():
        odd = [changed_in(values, place, value) for value in (..., *IN_QUANTIZED)]
        found[".".join(place)] = words(whole, [outcome(read_as, each, few) for each in odd])
    return read_ones(found)


WITH_SETTINGS = ("gptq", "awq", "fp8", "actorder")  # folders of which settings are changed, too
IN_QUANTIZED: tuple[Any, ...] = (None, True, False, 0, 1, 3, 16, "x", [], ["lm_head"], {})


def places_in(values: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    """Yields the names of all settings of an object, with those of the objects in it."""
    for name, value in values.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *inner) for inner in places_in(value))


def changed_in(values: Mapping[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns an object with another value in a place; ... is none."""
    name, *inner = place
    if inner:
        return {**values, name: changed_in(values[name], (*inner,), value)}
    return {key: each for key, each in values.items() if key != name} | ({} if value is ... else {name: value})


ENCODERS = ("bert", "roberta")  # of which no size is tried
# A kind of a number in a GGUF file, and a value of it.
OF_GGUF = ((4, 0), (4, 3), (8, "x"))
OF_ENCODER = (*OF_GGUF, (6, 1.0), (7, True))


def of_gguf(name: str) -> dict[str, str]:
    plain, tensors = contents(GGUF / f"{name}.gguf")
    plain = {key: (kind, 1 if key.endswith(".block_count") else value) for key, (kind, value) in plain.items()}
    tensors = {key: each for key, each in tensors.items() if not key.startswith("blk.1.")}
    values: Any = {key: (kind, packed(kind, value)) for key, (kind, value) in plain.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.gguf"

        def read(values: Any, tensors: Any) -> Any:
            file.unlink(missing_ok=True)
            file.write_bytes(to_bytes(values, tensors))
            model, tokenizer = load_gguf(file)
            pair = tokenizer.encode_pair("the dog", "a dog") if name in ENCODERS else None
            return digest(model), tokenizer.special_ids, tokenizer.encode("the dog"), pair

        whole, found, is_encoder = read(values, tensors), dict[str, str](), name in ENCODERS
        for key in values:
            if key in ("general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
                continue
            if is_encoder and not key.startswith("tokenizer."):
                continue
            left = {other: each for other, each in values.items() if other != key}
            odd: list[Any] = [left, *({**left, key: each} for each in (OF_ENCODER if is_encoder else OF_GGUF))]
            found[key] = words(whole, (outcome(read, each, tensors) for each in odd))
        for key, (kind, sizes, data) in tensors.items() if not is_encoder else ():
            if (short := re.sub(r"\d+", "", key)) in found:
                continue
            rest: dict[str, Any] = {other: each for other, each in tensors.items() if other != key}
            shapes = (sizes[::-1], (*sizes[:-1], sizes[-1] - 1))
            bent: list[Any] = [rest, *({**rest, key: (kind, each, data)} for each in shapes)]
            found[short] = words(whole, (outcome(read, values, each) for each in bent))
        return read_ones(found)


# The settings in small files that readers of tokenizers and of searches know, by the kind of their family.
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "decoder": {
        "tokenizer_config.json": (
            *_TOKENS, "add_bos_token", "add_prefix_space", "added_tokens_decoder", "chat_template",
        ),
        "special_tokens_map.json": ("eos_token",),
        "added_tokens.json": ("<note>", "two"),
        "generation_config.json": ("eos_token_id", "pad_token_id"),
    },
    "encoder": {
        "tokenizer_config.json": (
            "add_prefix_space", "do_lower_case", "max_len", "model_input_names", "model_max_length", "pad_token",
            "strip_accents", "tokenize_chinese_chars", "tokenizer_class", "truncation_side",
        ),
    },
    "seq2seq": {
        "tokenizer_config.json": (
            *_TOKENS, "add_prefix_space", "language_codes", "legacy_behaviour", "separate_vocabs", "src_lang",
            "tgt_lang", "tokenizer_class",
        ),
        "generation_config.json": ("bad_words_ids", "forced_bos_token_id"),
    },
}  # fmt: skip
# A folder of each kind of tokenizer.
_SAVED = (
    "bart-merges", "t5-spiece", "merges", "llama3", "llama2", "pieces", "bert", "bert head",
    "roberta", "xlm-roberta pieces", "nllb", "m2m100", "mbart50-pieces",
)  # fmt: skip
IN_FILES: tuple[Any, ...] = (None, True, False, 3, "x", [])
_NOTE = {"content": "<note>", "special": False}
# Further values of a setting.
MORE_IN_FILES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_TOKENS, ("</s>", {"content": "<unk>"})),
    "added_tokens_decoder": ({"5": _NOTE}, {"5": {**_NOTE, "special": True}}, {"x": _NOTE}),
    "bad_words_ids": ([[4]], [[4, 5]], [[4], [6, 7]], [[4], [2], [1], [0]], [4], [["x"]], [[-1]], [[True]]),
    "chat_template": ([{"name": "y", "template": "z"}, {"name": "default", "template": "x"}], [{"name": "y"}]),
    "eos_token_id": ([2, 3], [3, 2, 3]),
    "language_codes": ("wmt21",),
    **dict.fromkeys(("src_lang", "tgt_lang"), ("de", "deu_Latn", "de_DE")),
    "model_input_names": (["input_ids"], ["input_ids", "token_type_ids"]),
    **dict.fromkeys(("model_max_length", "max_len"), (1, 0, 12, 1e30)),
    "truncation_side": ("left", "right"),
    "tokenizer_class": ("BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast"),
}
TEXTS = ("two birds", " the Dog, Café", "漢 <note> </s> [SEP] <|im_end|>", "the dog in the park " * 9)


def of_settings(
    folder: Path, files: Mapping[str, Iterable[str]], values: Callable[[str], Iterable[Any]], read: Callable[[str], Any]
) -> dict[str, str]:
    """Returns a word for each odd value of each setting in small files of a folder.

    Args:
        folder: the folder.
        files: the names of settings, by the names of their files. A file that isn't there has none.
        values: returns the odd values of a setting; the first word is of a setting that is left out.
        read: reads the folder, of which a file was written.
    """

    def changed(file: str, settings: Any) -> Any:
        (folder / file).unlink(missing_ok=True)  # ext4 waits for the disk if a file is written over
        (folder / file).write_text(json.dumps(settings))
        return read(file)

    found: dict[str, str] = {}
    for file, names in files.items():
        before = (folder / file).read_bytes() if (folder / file).is_file() else None
        settings: dict[str, Any] = {} if before is None else json.loads(before)
        whole = changed(file, settings)
        for name in names:
            less = {key: value for key, value in settings.items() if key != name}
            odd = [less, *({**less, name: value} for value in values(name))]
            found[f"{file} {name}"] = words(whole, [outcome(changed, file, each) for each in odd])
        (folder / file).unlink() if before is None else (folder / file).write_bytes(before)
    return read_ones(found)


def of_files(kind: str) -> dict[str, str]:
    """Reads the tokenizers and searches of transformers."""
    with tempfile.TemporaryDirectory() as place:
        saved = SAVED[kind](Path(place) / "model")
        folder = Path(getattr(getattr(saved, "saved", saved), "folder", Path(place) / "model"))
        config = load_model(folder, ("Transformer", "GPT", "BERT"))[0].config
        settings = json.loads((folder / "config.json").read_text())
        family = FAMILIES[settings["model_type"]]

        def read(file: str) -> Any:
            if file.startswith("generation"):
                return load_model(folder, ("Transformer", "GPT"))[0].config
            unk, make = family.read_tokenizer(folder, settings)
            tokenizer = make(config)
            read_by = tokenizer.encode_template if family.kind == "decoder" else tokenizer.encode_target
            ids = [(tokenizer.encode(text), read_by(text)) for text in TEXTS]
            said = [tokenizer.decode(row) for _, row in ids]
            return unk, tokenizer.to_json(), tokenizer.languages, tokenizer.added_tokens, ids, said

        def values(name: str) -> Iterable[Any]:
            return *IN_FILES, *MORE_IN_FILES.get(name, ())

        return of_settings(folder, FILES[family.kind], values, read)


# The settings of a Whisper that are read, by their files, and their odd values.
OF_SPEECH = {
    "config.json": (
        "activation_function", "d_model", "decoder_attention_heads", "decoder_layers", "encoder_attention_heads",
        "encoder_layers", "model_type", "num_mel_bins", "scale_embedding",
    ),
    "generation_config.json": (
        "alignment_heads", "begin_suppress_tokens", "decoder_start_token_id", "eos_token_id", "is_multilingual",
        "lang_to_id", "no_timestamps_token_id", "suppress_tokens",
    ),
}  # fmt: skip
IN_SPEECH: tuple[Any, ...] = (
    None, True, 0, 3, 8, 999, 0.5, "x", [], [5, 6], [[0, 0]], [[2, 1]], [[3, 0]], [[0, 2]], {"<|en|>": 62},
    {"<|en|>": 999},
)  # fmt: skip


def of_speech(name: str) -> dict[str, str]:
    """Reads a Whisper of transformers, whose sides differ."""
    with tempfile.TemporaryDirectory() as place:
        whisper(encoder_layers=1, decoder_layers=3, encoder_ffn_dim=24).save_pretrained(place)
        return of_settings(Path(place), OF_SPEECH, lambda _: IN_SPEECH, lambda _: load_speech(Path(place)).config)


_IN_CTRANSLATE2 = (None, False, 3, 0.5, "x", "<s>", "<pad>", "<unk>", "t7")
_OF_CTRANSLATE2 = ("decoder_start_token", "eos_token", "layer_norm_epsilon", "quantization_type", "unk_token")


def of_conversion(name: str) -> dict[str, str]:
    """Reads the settings and the vocabularies of a folder of CTranslate2."""
    is_decoder = (DECODER_FOLDERS / name).is_dir()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree((DECODER_FOLDERS if is_decoder else CTRANSLATE2) / name, Path(place) / name))

        def read(_: str) -> Any:
            if not is_decoder:
                return load_transformer(folder)[0].config
            model, tokenizer = load_model(folder, ("GPT",))
            return model.config, tokenizer.to_json(), [tokenizer.encode(text) for text in TEXTS]

        whole, found = read(""), of_settings(folder, {"config.json": _OF_CTRANSLATE2}, lambda _: _IN_CTRANSLATE2, read)
        for file in folder.glob("*vocabulary.json"):
            text = file.read_text()
            for token in ("<pad>", "<s>", "</s>", "<unk>"):
                file.write_text(text.replace(f'"{token}"', '"other"'))
                found[f"{file.name} {token}"] = words(whole, [outcome(read, "")])
            file.write_text(text)
        return read_ones(found)


_PATTERNS = (
    {"q_proj": 2},
    {"q_proj": 2.5},
    {"q*_p+roj?": 3},
    {"q*_p+r?oj?": 3},
    {"x" * 200: 3},
    {"x" * 201: 3},
    {"(": 3},
)
_OF_ADAPTER = (
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "modules_to_save", "peft_type", "r", "rank_pattern",
    "target_modules", "task_type", "use_rslora", "x",
)  # fmt: skip
_IN_ADAPTER: tuple[Any, ...] = (
    None,
    True,
    False,
    3,
    0,
    2.5,
    "x",
    [],
    {},
    "gaussian",
    "all-linear",
    ".*proj",
    ["q_proj"],
    {"q_proj": 2.5},
    *_PATTERNS,
)


def of_adapter(kind: str) -> dict[str, str]:
    """Reads the settings of a LoRA adapter."""
    theirs = made(Change(kind, "", Nested()))
    with tempfile.TemporaryDirectory() as place:
        folder, model = write_adapter(Path(place) / "x", theirs, linears(theirs)), from_huggingface(theirs)

        def read(_: str) -> Any:
            factors = load_adapter(folder, model).factors
            return {name: hash((a.numpy().tobytes(), b.numpy().tobytes())) for name, (a, b) in factors.items()}

        return of_settings(folder, {"adapter_config.json": _OF_ADAPTER}, lambda _: _IN_ADAPTER, read)


_MARKED = "the <s>dog</s>[SEP]<|im_end|> <unk>"


def of_tokens(name: str) -> dict[str, str]:
    """Returns the ids that the tokenizer of each file of GGUF gives a text with marks: as text, as marks, in a pair."""
    found = {}
    for file in sorted(GGUF.glob("*.gguf")):
        _, tokenizer = load_gguf(file)
        ids = [tokenizer.encode(_MARKED)]
        for read in (tokenizer.encode_template, lambda text: tokenizer.encode_pair(text, "a dog")):  # noqa: B023
            try:
                ids.append(read(_MARKED))
            except ValueError:
                ids.append([])
        found[file.stem] = repr(ids)
    return found


READERS: dict[str, tuple[Callable[[str], dict[str, str]], tuple[str, ...]]] = {
    "ctranslate2": (of_ctranslate2, ("llama", "whisper")),
    "quantized": (of_quantized, ("gptq", "awq", "w4a16_asym", "w8a8", "fp8", "actorder")),
    "gguf": (of_gguf, ("llama", "bert")),
    "gguf tokens": (of_tokens, ("all",)),
    "speech": (of_speech, ("transformers",)),
    "files": (of_files, _SAVED),
    "conversion": (of_conversion, ("m2m", "llama")),
    "adapter": (of_adapter, ("llama",)),
}
FOLDERS = {f"{reader} {name}": (read, name) for reader, (read, names) in READERS.items() for name in names}
# Of encoder-decoders, one for each form: its model is made for each value.
KINDS = sorted(kind for kind in PRESENT if FAMILIES[kind].kind != "seq2seq" or kind in ("marian", "m2m_100", "t5"))
