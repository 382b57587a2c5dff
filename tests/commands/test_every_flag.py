"""Every flag of every command changes something: another value gives another result, and the tables are whole."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import Mock

import pytest
import torch

from fastformer.cli import COMMANDS, main
from fastformer.commands import _words
from fastformer.commands._parsing import make_parser
from fastformer.data import ByteTokenizer
from fastformer.data.filters import Filters
from fastformer.models import GPT, Transformer
from fastformer.settings import choices
from fastformer.training import TrainConfig
from fastformer.training.sections import SEVERAL, Data, Tokens
from tests.audio import speech
from tests.audio.test_reading import wav
from tests.checkpoints import decoders
from tests.covering import each
from tests.encoding.folders import bert
from tests.generation.chat_templates import CHATML
from tests.generation.small import tiny
from tests.generation.test_chat import with_template

ROOT = Path(__file__).parents[2]
# Words that stand for files and folders are in braces. Of each row the first two texts are compared: the words without
# the value, and those with it; after the command's own words. A third text, if any, is standard input.
Row = tuple[str, ...]
DEVICE = ("--device cpu", "--device toaster")
FEW = "--max_new_tokens 8"
SCORED, COMPARED = "{run} --file {lines} --target {others}", "--hypotheses {lines} --reference {others}"
EMBEDDED, RANKED = "--out {out}/v.npy --file {lines}", "--query bird --file {lines}"
MANY = "--max_new_tokens 30 --min_new_tokens 30"
BEAMS = f"{FEW} --num_beams 4"
LONG = "--seed 1 --max_new_tokens 40"
SPOKEN = "--language en --beam_size 1"
SPOKEN_BEAMS = "--language en --beam_size 4 --repetition_penalty 3"  # of several lengths
CONSTRAINTS = {
    "schema": "--schema {schema}", "regex": "--regex [a-c]{{3}}", "choices": "--choices ab --choices ba",
    "grammar": "--grammar {lark}",
}  # fmt: skip
CASES: dict[str, dict[str, Row]] = {
    "translate {run}": {
        "file": (f"{FEW} --file {{lines}}", f"{FEW} --file {{others}}"),
        "reference": (f"{FEW} --file {{lines}}", f"{FEW} --file {{lines}} --reference {{others}}"),
        "bleu_tokenize": (
            f"{FEW} --file {{lines}} --reference {{others}}",
            f"{FEW} --file {{lines}} --reference {{others}} --bleu_tokenize char",
        ),
        "align": (f"'a b' {FEW}", f"'a b' {FEW} --align tokens"),
        "align_layer": (f"'a b' {FEW} --align tokens", f"'a b' {FEW} --align tokens --align_layer 9"),
        "align_head": (f"'a b' {FEW} --align tokens", f"'a b' {FEW} --align tokens --align_head 99"),
        "prefix": (f"a {FEW}", f"a {FEW} --prefix xy"),
        "prefix_file": (f"{FEW} --file {{lines}}", f"{FEW} --file {{lines}} --prefix_file {{others}}"),
        "source_lang": (f"a {FEW}", f"a {FEW} --source_lang en"),
        "target_lang": (f"a {FEW}", f"a {FEW} --target_lang de"),
        "device": tuple(f"a {FEW} {words}" for words in DEVICE),
        "precision": (f"a {BEAMS} --n_best 4", f"a {BEAMS} --n_best 4 --precision bf16"),
        "on_error": (f"{FEW} --file {{bad}}", f"{FEW} --file {{bad}} --on_error skip"),
        "skip_long": (f"{FEW} --file {{long}}", f"{FEW} --file {{long}} --skip_long"),
        "split": (f"'One dog. Two dogs.' {FEW}", f"'One dog. Two dogs.' {FEW} --split"),
        "max_batch_size": (f"a {FEW}", f"a {FEW} --max_batch_size 0"),
        "max_batch_bytes": (f"a {FEW}", f"a {FEW} --max_batch_bytes 0"),
        "config": (f"a {FEW} --seed 1", f"a {FEW} --seed 1 --config {{penalty}}"),
    },
    "translate {run},{second} a": {
        "ensemble_weights": (f"{FEW} --ensemble_weights 1,0.01", f"{FEW} --ensemble_weights 0.01,1"),
        "ensemble_mean": (f"{BEAMS} --n_best 4", f"{BEAMS} --n_best 4 --ensemble_mean log_probabilities"),
    },
    "generate {gpt}": {
        "window": ("a --greedy --max_new_tokens 60", "a --greedy --max_new_tokens 60 --window slide"),
        "file": (f"{FEW} --greedy --file {{lines}}", f"{FEW} --greedy --file {{others}}"),
        "stop": (f"a {FEW} --greedy --min_new_tokens 8", f"a {FEW} --greedy --min_new_tokens 8 --stop t --stop ' '"),
        "on_error": (f"{FEW} --seed 1 --file {{bad}}", f"{FEW} --seed 1 --file {{bad}} --on_error skip"),
        "device": tuple(f"a {FEW} --greedy {words}" for words in DEVICE),
        "precision": (f"'the dog' {MANY} --seed 1", f"'the dog' {MANY} --seed 1 --precision int4"),
        "config": (f"'the dog' {FEW} --config {{first}}", f"'the dog' {FEW} --config {{penalty}}"),
        "greedy": (f"a {FEW} --seed 1", f"a {FEW} --seed 1 --greedy"),
        "cut": (f"{'x' * 50} --greedy", f"{'x' * 50} --greedy --cut"),
        **{flag: (f"a {FEW} --greedy", f"a {FEW} --greedy {words}") for flag, words in CONSTRAINTS.items()},
    },
    "generate {llama}": {
        "parse_special": tuple(f"'<|im_start|>dog' --greedy {FEW} {flag}" for flag in ("", "--parse_special=false")),
    },
    "chat {llama}": {
        "system": (f"--greedy {FEW}", f"--greedy {FEW} --system 'be brief'", "two birds"),
        "greedy": (f"{FEW} --seed 1", f"{FEW} --seed 1 --greedy", "two birds"),
        "stop": (f"--greedy {FEW}", f"--greedy {FEW} --stop a", "two birds"),
        "drop_oldest": (f"--greedy {FEW}", f"--greedy {FEW} --drop_oldest", "two birds\n" * 30),
        "device": (*(f"--greedy {FEW} {words}" for words in DEVICE), "two birds"),
        "precision": (f"--greedy {FEW}", f"--greedy {FEW} --precision int4", "two birds"),
        "config": (f"--greedy {FEW}", f"--greedy {FEW} --config {{penalty}}", "two birds"),
        "max_new_tokens": (f"--greedy {FEW}", "--greedy --max_new_tokens 2", "two birds"),
        "min_new_tokens": (LONG, f"{LONG} --min_new_tokens 40", "two birds"),
        "temperature": (f"{FEW} --seed 1", f"{FEW} --seed 1 --temperature 0.01", "two birds"),
        "top_k": (f"{FEW} --seed 1", f"{FEW} --seed 1 --top_k 1", "two birds"),
        "top_p": (f"{FEW} --seed 1", f"{FEW} --seed 1 --top_p 0.01", "two birds"),
        "repetition_penalty": (f"--greedy {FEW}", f"--greedy {FEW} --repetition_penalty 9", "two birds"),
        "seed": (f"{FEW} --seed 1", f"{FEW} --seed 2", "two birds"),
        "prompt_lookup_num_tokens": (FEW, f"{FEW} --prompt_lookup_num_tokens 0", "two birds"),
        "draft": (FEW, f"{FEW} --draft {{gpt}}", "two birds"),
        "cache_dtype": (LONG, f"{LONG} --cache_dtype int8", "two birds"),
        **{flag: (f"--greedy {FEW}", f"--greedy {FEW} {words}", "two birds") for flag, words in CONSTRAINTS.items()},
    },
    "embed {encoder}": {
        "file": (EMBEDDED, "--out {out}/v.npy --file {others}"),
        "out": ("--file {lines} --out {out}/v.npy", "--file {lines} --out {out}/w.npy"),
        "prompt": (EMBEDDED, f"{EMBEDDED} --prompt bird"),
        "prompt_name": (EMBEDDED, f"{EMBEDDED} --prompt_name query"),
        "normalize": (EMBEDDED, f"{EMBEDDED} --normalize"),
        "precision": (EMBEDDED, f"{EMBEDDED} --precision bf16"),
        "device": tuple(f"{EMBEDDED} {words}" for words in DEVICE),
        "batch_tokens": (EMBEDDED, f"{EMBEDDED} --batch_tokens 0"),
    },
    "rank {ranker}": {
        "query": (RANKED, "--query dog --file {lines}"),
        "file": (RANKED, "--query bird --file {others}"),
        "top_k": (RANKED, f"{RANKED} --top_k 1"),
        "json_lines": (RANKED, f"{RANKED} --json_lines"),
        "precision": (RANKED, f"{RANKED} --precision bf16"),
        "device": tuple(f"{RANKED} {words}" for words in DEVICE),
        "batch_tokens": (RANKED, f"{RANKED} --batch_tokens 0"),
    },
    "score": {
        "file": ("{run} --target {others} --file {lines}", "{run} --target {others} --file {others}"),
        "target": (SCORED, "{run} --file {lines} --target {lines}"),
        "source_lang": (SCORED, f"{SCORED} --source_lang x"),
        "target_lang": (SCORED, f"{SCORED} --target_lang x"),
        "by_line": ("{gpt} --file {lines}", "{gpt} --file {lines} --by_line"),
        "context": ("{gpt} --file {long}", "{gpt} --file {long} --context 1"),
        "token_scores": ("{gpt} --file {lines}", "{gpt} --file {lines} --token_scores"),
        "device": tuple(f"{{gpt}} --file {{lines}} {words}" for words in DEVICE),
        "precision": ("{gpt} --file {lines}", "{gpt} --file {lines} --precision bf16"),
        "on_error": ("{gpt} --by_line --file {bad}", "{gpt} --by_line --file {bad} --on_error skip"),
        "skip_long": ("{run} --file {long} --target {long}", "{run} --file {long} --target {long} --skip_long"),
        "max_tokens": ("{gpt} --file {lines}", "{gpt} --file {lines} --max_tokens 0"),
        "hypotheses": ("--reference {others} --hypotheses {lines}", "--reference {others} --hypotheses {others}"),
        "reference": ("--hypotheses {lines} --reference {lines}", COMPARED),
        "baseline": (COMPARED, f"{COMPARED} --baseline {{lines}}"),
        "bleu_tokenize": (COMPARED, f"{COMPARED} --bleu_tokenize char"),
        "ter": (COMPARED, f"{COMPARED} --ter"),
    },
    "transcribe {whisper} {audio}": {
        "format": (SPOKEN, f"{SPOKEN} --format srt"),
        "out": (SPOKEN, f"{SPOKEN} --out {{out}}/new"),
        "language": (SPOKEN, "--language de --beam_size 1"),
        "task": (SPOKEN, f"{SPOKEN} --task translate"),
        "initial_prompt": (SPOKEN, f"{SPOKEN} --initial_prompt dog"),
        "precision": (f"{SPOKEN} --format json", f"{SPOKEN} --format json --precision bf16"),
        "threads": (SPOKEN, f"{SPOKEN} --threads=-1"),
        "batch_size": (SPOKEN, f"{SPOKEN} --batch_size 2"),
        "beam_size": (f"{SPOKEN} --format json", f"{SPOKEN} --format json --beam_size 4"),
        "patience": (SPOKEN, f"{SPOKEN} --patience 0"),
        "length_penalty": (f"{SPOKEN_BEAMS} --length_penalty -9", f"{SPOKEN_BEAMS} --length_penalty 9"),
        "repetition_penalty": (SPOKEN, f"{SPOKEN} --repetition_penalty 3"),
        "no_repeat_ngram_size": (SPOKEN, f"{SPOKEN} --no_repeat_ngram_size 1"),
        "condition_on_previous_text": (SPOKEN, f"{SPOKEN} --condition_on_previous_text=false"),
        "prefix": (SPOKEN, f"{SPOKEN} --prefix dog"),
        "hotwords": (SPOKEN, f"{SPOKEN} --hotwords bird"),
        "max_new_tokens": (SPOKEN, f"{SPOKEN} --max_new_tokens 4"),
        "without_timestamps": (SPOKEN, f"{SPOKEN} --without_timestamps"),
        "word_timestamps": (f"{SPOKEN} --format json", f"{SPOKEN} --format json --word_timestamps"),
        "vad_filter": (f"{SPOKEN} --format json", f"{SPOKEN} --format json --vad_filter=true"),
        "multilingual": (SPOKEN, f"{SPOKEN} --multilingual"),
    },
    "quantize {gpt} {out}/q": {"precision": ("", "--precision int4")},
}  # fmt: skip
# Flags without two values that differ in more than speed: a bad value is refused.
REFUSED = {"device", "batch_tokens", "max_batch_size", "max_batch_bytes", "max_tokens", "source_lang",
           "target_lang", "on_error", "skip_long", "align_layer", "align_head", "cut", "drop_oldest",
           "window", "threads", "patience", "prompt_lookup_num_tokens", "draft"}  # fmt: skip
# Flags whose other values are tried elsewhere: the search is called with them, or a GPU, a training, or several minutes
# have to be there.
REACHES = "tests/commands/test_options.py::test_each_flag_reaches_the_search"
DECODING = [
    "num_beams", "beam_rules", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty",
    "min_new_tokens", "max_new_tokens", "max_time", "prompt_lookup_num_tokens", "repetition_penalty",
    "no_repeat_ngram_size", "temperature", "top_k", "top_p", "seed", "cache_dtype",
]  # fmt: skip
ELSEWHERE = {
    "translate": {
        **dict.fromkeys([*DECODING, "do_sample", "n_best"], REACHES),
        "attention": "tests/commands/test_translate.py::test_attention_is_drawn",
    },
    "generate": {
        **dict.fromkeys([*DECODING, "num_return_sequences"], REACHES),
        "adapter": "tests/serving/test_adapters.py::test_the_commands_take_a_folder",
    },
    "chat": {"adapter": "tests/serving/test_adapters.py::test_the_commands_take_a_folder"},
    "average": {"last": "tests/commands/test_average.py::test_the_number_of_averaged_checkpoints"},
    "demo": dict.fromkeys(("out", "seed"), "tests/commands/test_every_flag.py::test_the_flags_of_demo_reach_it"),
    "warmup": dict.fromkeys(
        ("batch_size", "length", "training", "device", "precision", "out"), "tests/commands/test_warmup.py"
    ),
}


def flags_of(command: str) -> dict[str, Any]:
    """Returns the type of each flag of a command, from its parser."""
    if command == "doctor":
        return {}
    module = importlib.import_module(f"fastformer.commands.{command}")
    parameters = inspect.signature(getattr(module, command)).parameters.values()
    arguments = {each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    return {name: hint for name, hint in make_parser(module, command)[1].items() if name not in arguments}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Returns the paths of the models and files in the table."""
    folder = tmp_path_factory.mktemp("flags")
    for name, kind, seed in (("run", Transformer, 0), ("second", Transformer, 1), ("gpt", GPT, 0)):
        model = tiny(kind, max_len=40, tie_embeddings=False, seed=seed)
        said = torch.tensor([*ByteTokenizer().encode("the dogs,")[:9], ByteTokenizer().special_ids.first_eos])
        weight = model.output.weight.data.clone() * 8  # a fresh model is nearly uniform
        model.output.weight.data.zero_()[said] = weight[said]
        model.save_pretrained(folder / name, ByteTokenizer())
    decoders.llama3(folder / "llama")
    with_template(folder / "llama", CHATML)
    for name in ("encoder", "ranker"):
        (folder / name).mkdir()
        bert(folder / name, **({"num_labels": 1} if name == "ranker" else {}))
    (folder / "encoder" / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "q: "}}))
    files = {
        "keys": b"secret\n", "lines": b"the dog\na bird\n", "others": b"a dog\nthe bird\n", "bad": b"one\n\xff\n",
        "long": f"one\n{'x' * 60}\n".encode(), "beams": b"num_beams: 3\n", "first": b"seed: 1\n",
        "penalty": b"repetition_penalty: 9.0\nseed: 2\n", "schema": b'{"enum": [7]}', "lark": b'start: "ab"',
    }  # fmt: skip
    for name, data in files.items():
        (folder / name).write_bytes(data)
    speech.folder(folder / "whisper")
    (folder / "audio").write_bytes(wav([*speech.sound(5, 2), *[0.0] * 60_000, *speech.sound(2, 3)]))
    return {path.name: str(path) for path in folder.iterdir()}


def outcome(
    words: str, stdin: str | TextIO, places: dict[str, str], out: Path, capfdbinary: Any, monkeypatch: Any
) -> Any:
    """Returns what a command prints, its exit code, and the files that it writes."""
    out.mkdir()
    file = io.TextIOWrapper(io.BytesIO(stdin.encode())) if isinstance(stdin, str) else stdin
    monkeypatch.setattr(sys, "stdin", file)
    code = main(shlex.split(words.format(**places, out=out)))
    printed = capfdbinary.readouterr()
    written = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return code, printed.out, printed.err.replace(str(out).encode(), b""), written


@pytest.mark.parametrize("command", CASES)
def test_another_value_gives_another_result(command, places, tmp_path, capfdbinary, monkeypatch) -> None:
    outcomes: dict[Any, Any] = {}
    for flag, (first, second, *stdin) in CASES[command].items():
        found = []
        for words in (first, second):
            key = f"{command} {words}", *stdin
            if key not in outcomes:
                out = tmp_path / str(len(outcomes))
                outcomes[key] = outcome(key[0], "".join(stdin), places, out, capfdbinary, monkeypatch)
            found.append(outcomes[key])
        assert found[0] != found[1], flag
        codes = [code for code, *_ in found]
        assert codes == [0, 0] or (flag in REFUSED and {*codes} == {0, 1}), (flag, found)


@pytest.fixture
def served(monkeypatch) -> list[Any]:
    """Records what `fastformer serve` makes its server of."""
    found: list[Any] = []

    def make(kind: str, *arguments: Any, **options: Any) -> Any:
        found.append((kind, [str(each) for each in arguments if isinstance(each, str | int)], options))
        return Mock(name=kind)

    monkeypatch.setattr("fastformer.serving.run.Server", functools.partial(make, "server"))
    monkeypatch.setattr("fastformer.serving.run.bound", functools.partial(make, "bound"))
    monkeypatch.setattr("fastformer.serving.open_service", functools.partial(make, "service"))
    monkeypatch.setattr("fastformer.serving.make_app", functools.partial(make, "app"))
    monkeypatch.delenv("FASTFORMER_API_KEYS", raising=False)
    return found


def other_value(name: str, hint: Any, default: Any) -> str:
    """Returns an allowed value of a flag of `serve` that isn't its default."""
    if name in SERVED:
        return SERVED[name]
    if _words.is_switch(hint):
        return str(not default).lower()
    for word in (*choices(hint), "7", "0.5", "other"):
        if word != str(default).lower() and _words.plain(word, hint) is not None or _words.is_text(hint):
            return word
    raise AssertionError(name)


# Values that must suit other flags, or files.
SERVED = {"device": "toaster", "config": "{beams}", "keys_file": "{keys}", "host": "127.0.0.2", "precision": "fp32",
          "adapter": "law={gpt}", "calibration": "{lines}"}  # fmt: skip


def test_each_flag_of_serve_reaches_the_server(places, served, capsys) -> None:
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    parser, hints = make_parser(importlib.import_module("fastformer.commands.serve"), "serve")
    defaults = {option[2:]: action.default for action in parser._actions for option in action.option_strings}

    def made(flag: str, *words: str) -> Any:
        served.clear()
        code = main(["serve", places["run"], *words])
        assert code == 0 or flag in ("no_auth", "device"), capsys.readouterr().err
        return code, [*served]

    usual = made("")
    for flag in flags_of("serve"):
        word = f"--{flag}={other_value(flag, hints[flag], defaults[flag]).format(**places)}"
        if flag == "no_auth":
            assert made(flag, "--host=0.0.0.0") != made(flag, "--host=0.0.0.0", word)
        else:
            assert made(flag, word) != usual, flag


def test_an_adapter_has_the_folder_behind_its_name(places, served, capsys) -> None:
    words = ["--adapter", "a=x/rank=8", "--adapter", "b=y"]
    assert main(["serve", places["run"], *words]) == 0
    (options,) = (options for kind, _, options in served if kind == "service")
    assert options["adapters"] == {"a": "x/rank=8", "b": "y"}
    assert main(["serve", places["run"], *words, "--adapter", "b=z"]) == 1 and "'b' twice" in capsys.readouterr().err


# The settings of trainings with other values than the defaults, as `TrainConfig.from_dict` reads them. What a setting
# then changes is in tests/training/test_every_setting.py.
TRAININGS: dict[str, dict[str, Any]] = {
    "files of pairs": {
        "train_source": "a,b", "train_target": "c,d", "val_source": "e", "val_target": "f", "data_weights": "2,0.5",
        "skip_bad_lines": True, "max_len": 99, "max_length_ratio": 1.5, "min_chars": 2, "max_chars": 77,
        "drop_duplicates": True, "drop_identical": True, "vocab_size": 300, "shared_vocab": False,
        "normalization": "nfc", "spaces": "keep", "max_token_length": 5, "user_tokens": "<a>,<b>",
        "drop_user_tokens": True, "batching": "bucketed", "max_tokens": 999, "accumulate": 3, "steps": 17,
        "max_minutes": 2.5, "schedule": "cosine", "lr": 0.25, "warmup": 13, "beta1": 0.5, "beta2": 0.75, "eps": 1e-4,
        "weight_decay": 0.125, "clip": 2.0, "label_smoothing": 0.2, "smooth_others": True, "ema": 0.625,
        "average_last": 2, "val_every": 11, "save_every": 12, "log_every": 14, "keep_last": 4, "patience": 5,
        "val_examples": 15, "bleu_tokenize": "char", "samples": 6, "report": True, "best_by": "chrf",
        "precision": "bf16", "checkpointing": True, "seed": 8, "device": "cpu", "sharding": "fsdp",
        "dropout_seeds": "run", "rank_timeout": 44,
        "model": {
            "preset": "base", "d_model": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "d_ff": 64,
            "num_encoder_layers": 1, "num_decoder_layers": 3, "norm_first": False, "norm": "rms",
            "layer_norm_eps": 0.5, "activation": "swiglu", "dropout": 0.25, "attention_dropout": 0.375,
            "activation_dropout": 0.5, "positions": "relative", "num_buckets": 8, "max_distance": 64,
            "scale_embedding": False, "embedding_norm": True, "embed_pad": True, "tie_embeddings": False,
            "output_bias": True, "scale_output": True, "attention_bias": True, "bias": False, "max_len": 110,
            "suppress_tokens": [5, 6],
        },
    },
    "tables": {
        "train_tsv": "a", "val_tsv": "b", "epochs": 2.5, "tokenizer": "bytes", "cuda_graphs": True,
        "model": {"window_size": 7, "positions": "interleaved", "first_position": 2},
    },
    "a text": {
        "train_text": "a", "val_text": "b", "seqlen": 33,
        "model": {
            "name": "gpt", "preset": "llama-small", "num_layers": 2, "rotary_base": 500.0, "window_size": 9,
            "qkv_bias": True, "out_bias": False, "qk_norm": "head", "norm_placement": "both",
            "rotary_fraction": 0.5, "local_rotary_base": 300.0, "window_layers": [True, False],
            "attention_scale": 0.5, "attention_softcap": 20.0, "logit_softcap": 30.0, "embedding_scale": 2.0,
            "rotary_scaling": {"kind": "linear", "factor": 2.0}, "positions": "rotary",
            "rotary_layers": [False, True], "norm_bias": True, "output_bias": True, "is_causal": False,
            "num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": False, "expert_d_ff": 40,
            "shared_expert_d_ff": 24, "sparse_layers": [False, True], "router_aux_loss_coef": 0.125,
            "router_bias": True, "attention_sinks": True, "embedding_dropout": 0.125, "router_activation": "sigmoid",
            "choice_bias": True, "norm_topk_eps": 0.25, "expert_scale": 1.5, "shared_expert_gate": False,
        },
    },
    "a text with states": {
        "train_text": "a",
        "model": {
            "name": "gpt", "num_layers": 2, "attention_gate": True, "linear_layers": [True, False],
            "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 16, "linear_value_dim": 24,
            "linear_conv_size": 3,
        },
    },
    "a text with other states": {
        "train_text": "a",
        "model": {
            "name": "gpt", "num_layers": 2, "mamba_layers": [True, False], "mamba_heads": 4, "mamba_head_dim": 24,
            "mamba_state_dim": 16, "mamba_groups": 2, "mamba_conv_size": 3, "mamba_conv_bias": False,
        },
    },
    "layers that differ": {
        "train_text": "a",
        "model": {
            "name": "gpt", "norm": "rms", "num_layers": 4, "num_heads": 4, "d_model": 96, "positions": "rotary",
            "window_size": 9, "local_rotary_base": 300.0,
            "window_layers": [True, False, True, False], "global_head_dim": 16, "global_num_kv_heads": 2,
            "value_norm": True, "keys_as_values": True, "shared_kv_layers": 2, "shared_kv_d_ff": 50,
            "layer_input_dim": 8, "layer_scalars": True,
        },
    },
    "a text with convolutions": {
        "train_text": "a",
        "model": {
            "name": "gpt", "num_layers": 2, "conv_layers": [True, False], "conv_size": 5, "positions": "rotary",
            "query_growth": 0.25, "query_growth_length": 16,
        },
    },
    "parallel": {"train_text": "a", "model": {"name": "gpt", "parallel_residual": True, "shared_norm": True}},
    "pairs held out": {"train_tsv": "a", "held_out": "last"},
    "shards": {"train_data": "a", "shards_at_once": 7, "init_from": "b"},
    "an lstm": {"train_tsv": "a", "batching": "random", "model": {"name": "lstm", "score": "dot"}},
    "a task": {"task": "numbers"},
}  # fmt: skip
# By the names of flags that only one of the two commands has.
OF_PREPARE = {"out": "o", "shards": 5, "processes": 2, "bpe_characters": 1000}
OF_TRAIN = {"resume": "test_train.py::test_a_preempted_job_resumes_with_the_same_command",
            "model.help": "test_train.py::test_the_help_names_the_default_model",
            "config": "test_every_flag.py::test_the_flags_of_train_reach_the_training"}  # fmt: skip


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Returns settings by the names of their flags."""
    model = values.get("model", {})
    return {name: value for name, value in values.items() if name != "model"} | {
        f"model.{name}": value for name, value in model.items()
    }


def words_of(values: dict[str, Any]) -> list[str]:
    """Returns settings as flags."""
    plain = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return [f"--{name}={value}" for name, value in plain.items()]


def check_all_differ(rows: list[dict[str, Any]], command: str) -> None:
    """Checks that every setting has a row with another value than its default."""
    parser, _ = make_parser(importlib.import_module(f"fastformer.commands.{command}"), command)
    defaults = {flag[2:]: each.default for each in parser._actions for flag in each.option_strings}
    for row in rows:
        assert not [name for name, value in row.items() if defaults[name] == value], command
    given = {name for row in rows for name in row}
    others = set(OF_PREPARE) if command == "prepare" else set(OF_TRAIN)
    assert given | others == set(flags_of(command)), command


@pytest.mark.parametrize("kind", TRAININGS)
def test_the_flags_of_train_reach_the_training(kind, tmp_path, monkeypatch, ran) -> None:
    trained: list[TrainConfig] = []

    def start(config: TrainConfig, run: str, **options: Any) -> Any:
        assert run == str(tmp_path)
        trained.append(config)
        return Mock(config=config, interrupted=False)

    monkeypatch.setattr("fastformer.commands.train.start", start)
    values = TRAININGS[kind]
    expected = TrainConfig.from_dict(values)
    out = ran("train", str(tmp_path), *words_of(flat(values))).out
    assert ("fastformer generate" in out) == (expected.model == "gpt")  # what the command says to do next
    (file := tmp_path / "settings.yaml").write_text(json.dumps(values))
    ran("train", str(tmp_path), "--config", str(file))
    ran("train", str(tmp_path), "--config", str(file), "--seed", "99", "--model.dropout", "0.875")
    first, second, third = trained
    assert first == second == expected
    settings = {**expected.settings, "dropout": 0.875}
    assert third == dataclasses.replace(expected, seed=99, settings=settings) and not trained[3:]


def test_a_process_that_torchrun_starts_again_resumes(tmp_path, monkeypatch, ran) -> None:
    how: list[Any] = []

    def start(config: TrainConfig, run: str, *, resume: Any, **options: Any) -> Any:
        how.append(resume)
        return Mock(config=config, interrupted=False)

    monkeypatch.setattr("fastformer.commands.train.start", start)
    for count in ("0", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        ran("train", str(tmp_path), "--task", "numbers")
    assert how == [False, "auto"]


def test_the_flags_of_demo_reach_it(monkeypatch, ran) -> None:
    made: list[Any] = []
    monkeypatch.setattr("fastformer.demo.run_demo", lambda out, *, seed: made.append((str(out), seed)))
    ran("demo")
    ran("demo", "--out", "there", "--seed", "7")
    assert made == [("demo", 0), ("there", 7)]


def test_settings_without_effect_are_named_by_train(tmp_path, monkeypatch, ran, caplog) -> None:
    monkeypatch.setattr("fastformer.commands.train.start", lambda config, *_, **__: Mock(config=config, interrupted=0))
    ran("train", str(tmp_path), "--train_tsv", "a", "--tokenizer", "bytes", "--vocab_size", "300")
    assert "vocab_size" in caplog.text and "train_tsv" not in caplog.text


@pytest.mark.parametrize("kind", ["files of pairs", "tables", "a text", "pairs held out"])
def test_the_flags_of_prepare_reach_the_preparation(kind, monkeypatch, ran) -> None:
    made: list[Any] = []
    monkeypatch.setattr("fastformer.commands.prepare.make", lambda *given, **options: made.append((given, options)))
    monkeypatch.setattr("fastformer.commands.prepare.summary", lambda found: "made")
    values = {name: value for name, value in TRAININGS[kind].items() if name in flags_of("prepare")}
    assert ran("prepare", "--out=o", *words_of(values)).out == "made\n"
    model = {"model": "gpt"} if kind == "a text" else {}
    expected = TrainConfig.from_dict(values | model)
    usual = {"shards": 0, "processes": 0, "bpe_characters": 50_000_000}
    assert made == [((expected, "o"), usual)]
    ran("prepare", *words_of({**values, **OF_PREPARE}))
    assert made[1:] == [((expected, "o"), {name: value for name, value in OF_PREPARE.items() if name != "out"})]


def test_prepare_has_no_flag_that_changes_no_shard() -> None:
    """Of a training's settings that say how and where it runs, the seed alone changes shards."""
    of_shards = {field.name for section in (Data, Filters, Tokens) for field in dataclasses.fields(section)}
    assert {*flags_of("prepare")} - of_shards - {*OF_PREPARE} == {"seed"}


@pytest.mark.parametrize("name", ["drop_duplicates", "model.bias"])
def test_a_file_of_settings_has_no_text_for_a_switch(name, tmp_path, ran) -> None:
    outer, _, inner = name.rpartition(".")
    settings = {outer: {inner: "true"}} if outer else {inner: "true"}
    (file := tmp_path / "settings.yaml").write_text(json.dumps({"train_tsv": "a", **settings}))
    error = ran("train", str(tmp_path / "run"), "--config", str(file), code=1).err
    assert f"expected {name} " in error and "'true'" in error, error


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_list_is_given_once(command, ran) -> None:
    flags = SEVERAL & set(flags_of(command)) - {"tokenizer"}
    assert len(flags) > 7
    for flag in flags:
        words = [command, *(["run"] if command == "train" else ["--out=o"])]
        assert flag in ran(*words, f"--{flag}=first", f"--{flag}=second", code=2).err


@each("command", sorted({*COMMANDS} - {"doctor"}))
def test_the_help_says_what_every_flag_does(command) -> None:
    parser, _ = make_parser(importlib.import_module(f"fastformer.commands.{command}"), command)
    for action in parser._actions:
        assert str(action.help or "").strip(), action.option_strings or action.dest


def test_the_tables_are_whole() -> None:
    """Every flag of every command has a row, and no row is of a flag that is gone."""
    for command in {*COMMANDS} - {"serve", "train", "prepare"}:  # serve's are above
        rows = {flag for words, rows in CASES.items() if words.split()[0] == command for flag in rows}
        rows |= set(ELSEWHERE.get(command, ()))
        assert rows == set(flags_of(command)), command
    settings = [flat(values) for values in TRAININGS.values()]
    check_all_differ(settings, "train")
    names = flags_of("prepare")
    check_all_differ([{name: row[name] for name in row if name in names} for row in settings], "prepare")
    elsewhere = {place for rows in ELSEWHERE.values() for place in rows.values()}
    for place in elsewhere | {f"tests/commands/{place}" for place in OF_TRAIN.values()}:
        file, _, name = place.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), place
