"""What a folder or a file omits has the value that the program has which wrote it, or is refused.

Of transformers, its own classes say the value; of CTranslate2 and llama.cpp, the tables here. A mistaken default gives
another config than the value that is written out.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fastformer.checkpoints import load_model
from fastformer.checkpoints.ctranslate2 import as_tensors, load_transformer
from fastformer.checkpoints.gguf.models import load_file, pooling_of
from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS, FAMILIES
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.checkpoints.model_bin import MODEL, read_variables
from fastformer.checkpoints.speech import from_state, load_speech
from fastformer.models import GPTConfig
from tests.audio.whispers import whisper
from tests.checkpoints.present import ENCODERS, PRESENT
from tests.checkpoints.test_ctranslate2 import FOLDERS, written
from tests.checkpoints.test_gguf import contents, to_bytes
from tests.foreign.ctranslate2_folders import DECODER_FOLDERS
from tests.foreign.gguf_files import FOLDER
from tests.foreign.speech_folders import FOLDERS as SPEECH_FOLDERS
from tests.integrations import config_fields
from tests.integrations.config_fields import BASES, Change, Nested, config_of

REFUSED = "refused"


def made_of(model: Any) -> Any:
    """Returns the config of a model and its numbers: a factor may be in either."""
    return model.config, {name: tensor.numpy().tobytes() for name, tensor in model.float().state_dict().items()}


def outcome(read: Callable[..., Any], *arguments: Any) -> Any:
    """Returns a result, or that it was refused."""
    try:
        return read(*arguments)
    except ValueError:
        return REFUSED


# ---- transformers ----

# Sizes with which the usual numbers of heads, of which all are below 64, and layers beyond the usual first ones of a
# window matter.
_LARGE = {"num_attention_heads": 64, "hidden_size": 2048, "num_hidden_layers": 30, "intermediate_size": 40,
          "max_position_embeddings": 64, "vocab_size": 60}  # fmt: skip
_WINDOWED = {**_LARGE, "use_sliding_window": True}
MORE: dict[str, list[dict[str, Any]]] = {
    **{kind: [_LARGE] for kind in (*DECODER_FORMS, *ENCODER_FORMS) if kind not in ("gpt2", "distilbert")},
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"), [_WINDOWED, _LARGE]),
    "granitemoehybrid": [{**_LARGE, "num_local_experts": 0, "layer_types": ["full_attention"] * 30}],
    "helium": [{**_LARGE, "num_attention_heads": 40, "hidden_size": 5120}],  # a multiple of its usual 20 heads of keys
    "phi3": [{**_LARGE, "original_max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}}],
}  # fmt: skip


def options_of(kind: str, settings: dict[str, Any]) -> Any:
    if kind in DECODER_FORMS:
        return GPTConfig(60, **DECODER_FORMS[kind].options(settings))
    return ENCODER_FORMS[kind].options(settings)


@pytest.mark.parametrize("kind", sorted({*DECODER_FORMS, *ENCODERS}))
def test_each_omitted_setting_is_as_in_transformers(kind) -> None:
    """Each field of a config is left out alone; sizes have no usual value here."""
    config_class, results = getattr(transformers, FAMILIES[kind].config_class), set()
    wholes = [config_of(kind, base).to_dict() for base in (BASES[kind], *MORE.get(kind, ()))]
    # Before version 5, the kinds of layers followed from other settings.
    wholes += [
        {name: value for name, value in whole.items() if name != "layer_types"}
        for whole in wholes
        if kind in DECODER_FORMS and "layer_types" in whole and kind != "granitemoehybrid"
    ]
    for whole in wholes:
        for name in whole.keys() - {"model_type"}:
            less = {key: copy.deepcopy(value) for key, value in whole.items() if key != name}
            try:
                full = config_class(**{key: copy.deepcopy(value) for key, value in less.items() if key != "model_type"})
            except Exception:  # sizes that don't fit the usual one
                continue
            found = outcome(options_of, kind, less)
            results.add(found == REFUSED)
            expected = outcome(options_of, kind, full.to_dict())
            is_size = name in ("d_model", "dim", "hidden_dim") or name.startswith(("n_", "num_hidden", "num_attention"))
            is_size |= name.endswith(("hidden_size", "intermediate_size", "max_position_embeddings", "layer_types"))
            assert expected in (found, REFUSED) or (is_size and found == REFUSED), name
    assert results == {True, False}


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_padding_that_an_encoder_omits_is_that_of_its_class(kind) -> None:
    usual = getattr(transformers, FAMILIES[kind].config_class)().pad_token_id
    theirs = config_fields.made(Change(kind, "", Nested(vocab_size=max(60, usual + 1))))
    settings = {name: value for name, value in theirs.config.to_dict().items() if name != "pad_token_id"}
    model = FAMILIES[kind].to_model(Checkpoint(settings, theirs.state_dict()))
    assert model.config.special_ids.pad == usual


@pytest.mark.parametrize("kind", PRESENT)
def test_all_omitted_settings_are_as_in_transformers(kind) -> None:
    """A folder has the sizes alone, and of tied matrices one."""
    theirs = config_fields.made(Change(kind, "", Nested()))
    state = theirs.state_dict()
    firsts = {tensor.data_ptr(): name for name, tensor in reversed(state.items())}
    # An mT5's files have its output, which transformers ties in memory.
    saved = {name: each for name, each in state.items() if kind == "mt5" or firsts[each.data_ptr()] == name}
    least = {**BASES[kind], "model_type": theirs.config.model_type}
    models = [FAMILIES[kind].to_model(Checkpoint(settings, saved)) for settings in (theirs.config.to_dict(), least)]
    assert models[0].config == models[1].config
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    is_tied = theirs.config.to_dict().get("tie_word_embeddings", True)
    headless = {name: tensor for name, tensor in state.items() if name not in ("lm_head.weight", "embed_out.weight")}
    if len(headless) < len(state) and FAMILIES[kind].kind == "decoder":
        assert (outcome(FAMILIES[kind].to_model, Checkpoint(least, headless)) == REFUSED) == (not is_tied)


def test_each_omitted_setting_of_a_whisper_is_as_in_transformers() -> None:
    theirs = whisper(num_mel_bins=80)
    whole, search = theirs.config.to_dict(), theirs.generation_config.to_dict()
    state, config_class = theirs.state_dict(), type(theirs.config)

    def config(settings: dict[str, Any]) -> Any:
        return from_state(settings, search, state).config

    for name in ("num_mel_bins", "activation_function", "scale_embedding", "dropout", "max_target_positions"):
        less = {key: value for key, value in whole.items() if key != name}
        assert config(less) == config(config_class(**less).to_dict()) != REFUSED, name


CJK = "Two 漢字 the dog, Café"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        *(("bert head", {"do_lower_case": None} | more) for more in (
            {}, {"tokenize_chinese_chars": False}, {"strip_accents": True}, {"strip_accents": False},
        )),
        *(("roberta", {"add_prefix_space": value}) for value in (None, True, False)),
        *(("merges", {"add_prefix_space": value}) for value in (None, True, False)),
        *((kind, {"add_bos_token": value}) for kind in ("llama2", "llama3") for value in (None, True)),
    ],
)  # fmt: skip
def test_a_tokenizer_without_a_setting_is_as_in_transformers(kind, values, copy) -> None:
    folder = copy(kind)
    settings = {**json.loads((folder / "tokenizer_config.json").read_text()), **values}
    kept = {name: value for name, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_model(folder, ("GPT", "BERT"))[1]
    for text in ("two birds", " the Dog", CJK):
        assert ours.encode(text) == theirs(text)["input_ids"], text


@pytest.mark.parametrize(("codes", "last"), [(None, "zu"), ("m2m100", "zu"), ("wmt21", "de")])
def test_the_languages_of_an_m2m100_are_its_hundred(codes, last, made, tmp_path) -> None:
    folder = shutil.copytree(made("m2m100").saved.folder, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"language_codes": codes}
    kept = {name: value for name, value in settings.items() if value is not None and not name.endswith("_lang")}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    ids = load_model(folder, ("Transformer",))[1].languages.ids
    assert [*ids][-1] == last and [*ids.values()] == [*range(min(ids.values()), min(ids.values()) + len(ids))]


# ---- CTranslate2 ----

# The number that CTranslate2 takes where a file has none; None: this library refuses such a file.
CTRANSLATE2 = {
    "alibi": 0, "start_from_zero_embedding": 0, "multi_query_attention": 0, "embeddings_merge": 0, "rotary_base": 1e4,
    "sliding_window": 0, "layer_norm_use_residual": 0, "scale_outputs": 1, "relative_attention_max_distance": 128,
    "multiply_by_sqrt_depth": 3.5, "rotary_low_freq_factor": 1.0, "rotary_high_freq_factor": 4.0,
    **dict.fromkeys(("activation", "pre_norm", "scale_embeddings", "num_heads", "num_heads_kv", "head_dim")),
    **dict.fromkeys(("rotary_dim", "rotary_interleave", "rotary_scaling_type", "rotary_scaling_factor")),
}  # fmt: skip


def speech_of(folder: Path) -> Any:
    """Returns the config of a Whisper, and the arrays of both sides."""
    config, _, read = load_speech(folder)
    return config, {side: {name: a.tobytes() for name, a in read(side).items()} for side in ("encoder", "decoder")}


SPECIFICATIONS: dict[str, tuple[Path, Callable[[Path], Any]]] = {
    **{name: (FOLDERS / name, lambda folder: made_of(load_transformer(folder)[0])) for name in ("marian", "t5")},
    **{
        name: (DECODER_FOLDERS / name, lambda folder: made_of(load_model(folder, ("GPT",))[0]))
        for name in ("llama", "gemma3", "gpt2")
    },
    "whisper": (SPEECH_FOLDERS / "fp16", speech_of),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_omitted_numbers_are_those_of_ctranslate2(name, tmp_path) -> None:
    source, read = SPECIFICATIONS[name]
    folder = Path(shutil.copytree(source, tmp_path / name))
    spec, arrays = read_variables(source / MODEL)
    stored = as_tensors(arrays)
    last = {key: key.rpartition("/")[2] for key, tensor in stored.items() if tensor.numel() == 1}
    due, tried = read(folder), set()

    def config_of_file(number: str, value: float | None) -> Any:
        changed = {key: tensor for key, tensor in stored.items() if last.get(key) != number}
        if value is not None:
            places = {key: stored[key] for key in stored if last.get(key) == number}
            changed |= {key: torch.full_like(tensor, value) for key, tensor in places.items()}
        (folder / MODEL).unlink()  # ext4 waits for the disk if a file is written over
        (folder / MODEL).write_bytes(written(changed, spec))
        return outcome(read, folder)

    for number in sorted(CTRANSLATE2.keys() & {*last.values()}):
        value, omitted = CTRANSLATE2[number], config_of_file(number, None)
        if value is None:
            assert omitted == REFUSED or number in ("head_dim", "num_heads_kv"), number
        else:
            assert omitted == config_of_file(number, value), number
            tried.add(omitted == due)
    assert True in tried


# ---- llama.cpp ----

# The number that llama.cpp takes where a file has none; None: this library refuses such a file.
LLAMA_CPP: dict[str, Any] = {
    **dict.fromkeys(("embedding_length", "block_count", "feed_forward_length", "context_length"), None),
    **dict.fromkeys(("attention.head_count", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")),
    **dict.fromkeys(("expert_count", "expert_used_count")),
    "attention.head_count_kv": 4, "attention.key_length": 8, "rope.dimension_count": 8, "rope.freq_base": 10_000.0,
    "rope.freq_base_swa": 10_000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0, "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0, "expert_weights_scale": 1.0, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "attention.scale": 8**-0.5, "embedding_scale": 1.0, "residual_scale": 1.0,
    "logit_scale": None, "use_parallel_residual": False, "attention.causal": True,
}  # fmt: skip
_ROPE: dict[str, tuple[int, Any] | None] = {"rope.freq_base": (6, 77.0)}
# Files with other values than these in place of theirs.
FILES: dict[str, dict[str, tuple[int, Any] | None]] = {
    "llama": {**_ROPE, "rope.scaling.type": (8, "linear"), "rope.scaling.factor": (6, 2.0)},
    "smollm": {**_ROPE, "rope.scale_linear": (6, 3.0)},
    "smollm3": {**_ROPE, "expert_weights_scale": (6, 0.0)},
    "gemma2": {"attn_logit_softcapping": (6, 7.0), "final_logit_softcapping": (6, 8.0)},
    "gemma3": {**_ROPE, "rope.freq_base_swa": (6, 78.0)},
    "granite": {**_ROPE, "attention.key_length": (4, 8)},
    "mixtral": _ROPE,
    "phi3": {"rope.scaling.attn_factor": (6, 1.5)},
    "starcoder2": _ROPE,
    "stablelm": {"use_parallel_residual": (7, False)},
    "nomic": {},
    "gpt2": {"feed_forward_length": None},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_omitted_numbers_are_those_of_llama_cpp(name, tmp_path) -> None:
    values, tensors = contents(FOLDER / f"{name}.gguf")
    prefix, file = values["general.architecture"][1], tmp_path / "x.gguf"
    whole = values | {f"{prefix}.{key}": value for key, value in FILES[name].items()}
    whole = {key: value for key, value in whole.items() if value is not None}

    def config_of_file(key: str | None = None, value: Any = None) -> Any:
        changed = {other: each for other, each in whole.items() if other != key}
        if value is not None:
            changed[str(key)] = ({bool: 7, str: 8, int: 4, float: 6}[type(value)], value)
        file.unlink(missing_ok=True)  # ext4 waits for the disk if a file is written over
        file.write_bytes(to_bytes(changed, tensors))
        result = outcome(lambda: made_of(load_file(file)[0]))
        if result == REFUSED or getattr(result[0], "attention_scale", None) is None:
            return result
        config, numbers = result
        scale = round(config.attention_scale, 6)  # a file's is fp32
        return dataclasses.replace(config, attention_scale=scale), numbers

    due, differ = config_of_file(), 0
    assert due != REFUSED
    for key in (each for each in whole if each.startswith(f"{prefix}.")):
        number = key.removeprefix(f"{prefix}.")
        if number not in LLAMA_CPP:
            continue
        omitted, value = config_of_file(key), LLAMA_CPP[number]
        assert omitted == (REFUSED if value is None else config_of_file(key, value)), key
        differ += omitted != due
    assert differ


@pytest.mark.parametrize("name", ["qwen3", "gemma", "gemma3"])
def test_the_size_of_heads_is_that_of_llama_cpp(name, tmp_path) -> None:
    """The families of transformers have another usual one; this model's weights don't fit it."""
    values, tensors = contents(FOLDER / f"{name}.gguf")
    for part in ("key", "value"):
        del values[f"{values['general.architecture'][1]}.attention.{part}_length"]
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    with pytest.raises(ValueError, match=r"\(32, 32\)|\(64, 32\)|shape"):
        load_file(tmp_path / "x.gguf")


@pytest.mark.parametrize(("name", "pad"), [("bert", 0), ("nomic", 0)])
def test_an_encoders_padding_is_the_first_token(name, pad, tmp_path) -> None:
    values, tensors = contents(FOLDER / f"{name}.gguf")
    del values["tokenizer.ggml.padding_token_id"]
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    assert load_file(tmp_path / "x.gguf")[0].config.special_ids.pad == pad
    assert pooling_of(tmp_path / "x.gguf") == {"bert": None, "nomic": "mean"}[name]
