"""Each value of a GGUF file is an option of the model as llama.cpp reads it, or is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.test_gguf import Tensors, Values, contents, load, to_bytes
from tests.foreign.gguf_files import FOLDER

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")

NUMBER, FLOAT, FLAG, TEXT, LIST = 4, 6, 7, 8, 9  # types of values
NONE = (0, None)
ROW = (0, (64,), b"\0" * 256)  # of fp32


def read(path: Path, name: str, changes: dict[str, tuple[Any, ...]], kept: dict[str, tuple[Values, Tensors]]) -> Any:
    """Loads a file of which values, by their keys behind the architecture's name, or tensors are others."""
    if name not in kept:
        kept[name] = contents(FOLDER / f"{name}.gguf")
    values, tensors = dict(kept[name][0]), dict(kept[name][1])
    architecture = values["general.architecture"][1]
    for key, value in changes.items():
        place: Any = tensors if len(value) == 3 or key.startswith("blk.") else values
        whole = key if place is tensors or key.split(".")[0] in ("general", "tokenizer") else f"{architecture}.{key}"
        place.pop(whole, None)
        if value != NONE:
            place[whole] = value
    path.write_bytes(to_bytes(values, tensors))
    return load(path)[0]


# A file, its changes, and the options of the model.
READ: list[tuple[str, dict[str, tuple[Any, ...]], dict[str, Any]]] = [
    ("mistral", {"block_count": (LIST, (5, [2, 2]))}, {"num_layers": 2}),  # a number for each layer
    ("llama", {"attention.sliding_window": (NUMBER, 9)}, {"window_size": None, "bias": False}),
    ("starcoder2", {"attention.sliding_window": (NUMBER, 9)}, {"window_size": 8}),
    ("starcoder2", {"attention.sliding_window": (NUMBER, 0)}, {"window_size": None}),
    ("gemma2", {"attention.sliding_window_pattern": (LIST, (7, [False, True]))}, {"windows": (False, True)}),
    ("gemma3", {"attention.sliding_window_pattern": (NUMBER, 2)}, {"windows": (True, False) * 3}),
    ("gemma3", {"attention.sliding_window": NONE}, {"window_size": None}),
    ("gemma3", {"rope.freq_base_swa": (FLOAT, 500.0)}, {"local_rotary_base": 500.0}),
    ("gemma2", {"final_logit_softcapping": (FLOAT, 20.0), "attn_logit_softcapping": (FLOAT, 10.0)},
     {"logit_softcap": 20.0, "attention_softcap": 10.0}),
    ("qwen2moe", {"expert_weights_scale": (FLOAT, 1.0)}, {"norm_topk_prob": False}),
    ("qwen2moe", {"expert_weights_scale": (FLOAT, 0.0)}, {"norm_topk_prob": False}),
    ("stablelm", {"rope.dimension_count": NONE}, {"rotary_fraction": 0.25}),
    ("gemma4", {"attention.head_count_kv": (LIST, (5, [2] * 6))}, {"num_kv_heads": 2, "global_num_kv_heads": None}),
    ("gemma4", {"rope.freq_base_swa": NONE, "rope.freq_base": (FLOAT, 500.0)},
     {"local_rotary_base": 10_000.0, "rotary_base": 500.0}),
    ("gemma4", {"final_logit_softcapping": NONE}, {"logit_softcap": None}),
    ("qwen35", {"attention.recurrent_layers": NONE, "full_attention_interval": NONE},
     {"linear_layers": (True, True, True, False)}),
    ("qwen35", {"nextn_predict_layers": (NUMBER, 1), "block_count": (NUMBER, 5), "blk.4.nextn.enorm.weight": ROW},
     {"num_layers": 4}),
    ("mistral", {"rope.freq_base": NONE}, {"rotary_base": 10_000.0}),
]  # fmt: skip
# A file, its changes, and words of the error.
REFUSED: list[tuple[str, dict[str, tuple[Any, ...]], str]] = [
    ("mistral", {"block_count": (LIST, (5, [2, 3]))}, "block_count"),
    ("mistral", {"block_count": (LIST, (5, []))}, "block_count"),
    ("qwen2", {"expert_count": (NUMBER, 8)}, "no experts, got 8"),
    ("gemma4", {"attention.sliding_window_pattern": (LIST, (FLAG, [True]))}, "sliding_window_pattern"),
    ("gemma4", {"attention.head_count_kv": (LIST, (5, [2, 2, 1, 2, 2, 2]))}, "head_count_kv"),
    ("gemma4", {"feed_forward_length": (LIST, (5, [64, 64, 64, 128, 128, 128]))}, "feed_forward_length"),
    ("gemma4", {"attention.value_length_swa": (NUMBER, 32)}, "one length"),
    ("gemma4", {"rope.dimension_count_swa": (NUMBER, 8)}, "rotate whole heads"),
    ("gemma4", {"rope_freqs.weight": (0, (16,), b"\0\0\x80\x3f" * 4 + b"\0\0\0\x40" * 12)}, "rope_freqs"),
    ("gemma4", {"attention.key_length_swa": NONE}, "key_length_swa"),
    ("gemma4", {"expert_count": (NUMBER, 4)}, "no experts, got 4"),
    ("qwen35", {"attention.recurrent_layers": (LIST, (FLAG, [True]))}, "recurrent_layers"),
    ("lfm2", {"attention.head_count_kv": (LIST, (5, [0, 2, 1]))}, "head_count_kv"),
    ("lfm2", {"attention.head_count_kv": (LIST, (5, [0, 2]))}, "head_count_kv"),
    ("lfm2", {"attention.head_count_kv": (NUMBER, 0)}, "head_count_kv"),
    ("lfm2", {"shortconv.l_cache": NONE}, "l_cache"),
    ("qwen35", {"ssm.inner_size": (NUMBER, 130)}, "ssm.inner_size"),
    ("qwen35", {"ssm.time_step_rank": (NUMBER, 0)}, "value heads"),
    ("qwen35", {"ssm.group_count": (NUMBER, 3)}, "key heads"),
    ("qwen35", {"ssm.state_size": NONE}, "ssm.state_size"),
    ("qwen35", {"ssm.state_size": (NUMBER, 8)}, "ssm_conv1d"),
    ("qwen35", {"blk.0.ssm_a": (0, (4,), b"\0" * 16)}, "negative"),
    ("qwen35", {"blk.0.ssm_a": NONE}, "A_log"),
    ("qwen35", {"nextn_predict_layers": (NUMBER, 4)}, "num_hidden_layers"),
    ("qwen2moe", {"expert_count": (NUMBER, 0)}, "with experts, got 0"),
    ("mistral", {"attention.value_length": (NUMBER, 3)}, "one length"),
    ("qwen2moe", {"expert_weights_scale": (FLOAT, 2.0)}, "expert_weights_scale 2"),
    ("qwen2moe", {"blk.0.ffn_gate_exps.weight": NONE}, "ffn_gate_exps"),
    ("qwen2moe", {"blk.0.ffn_gate_shexp.weight": ROW}, "2 dimensions"),
    ("bert", {"attention.causal": (FLAG, True)}, "causal attention"),
    ("mistral", {"rope.scaling.type": (TEXT, "longrope"), "rope.scaling.factor": (FLOAT, 2.0)}, "longrope"),
    ("gemma3", {"rope.scaling.type": (TEXT, "yarn"), "rope.scaling.factor": (FLOAT, 2.0),
                "rope.scaling.attn_factor": (FLOAT, 2.0)}, "attn_factor"),
    ("mistral", {"tokenizer.ggml.scores": NONE}, "scores"),
    ("mistral", {"tokenizer.ggml.scores": (LIST, (6, [0.5]))}, "scores"),
]  # fmt: skip


def test_each_value_is_an_option_or_refused(tmp_path) -> None:
    kept: dict[str, tuple[Values, Tensors]] = {}
    for name, changes, options in READ:
        config = read(tmp_path / "x.gguf", name, changes, kept).config
        assert {option: getattr(config, option) for option in options} == options, (name, changes)
    for name, changes, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            raise AssertionError((read(tmp_path / "x.gguf", name, changes, kept), name, changes))


@pytest.mark.parametrize("name", ["mistral", "qwen2", "llama"])
def test_tokens_and_their_types_are_checked(name, tmp_path) -> None:
    values, tensors = contents(FOLDER / f"{name}.gguf")
    tokens, types = (values[f"tokenizer.ggml.{key}"][1][1] for key in ("tokens", "token_type"))
    place = next(i for i, kind in enumerate(types) if kind == 1)

    def load_with(**changes: Any) -> Any:
        other = {f"tokenizer.ggml.{key}": (LIST, value) for key, value in changes.items()}
        (tmp_path / "x.gguf").write_bytes(to_bytes({**values, **other}, tensors))
        return load(tmp_path / "x.gguf")

    assert load_with(tokens=(8, tokens))[0].config.vocab_size == len(tokens)
    same = [*tokens[:place], tokens[place + 1], *tokens[place + 1 :]]
    with pytest.raises(ValueError, match="differ"):
        load_with(tokens=(8, same))
    if values["tokenizer.ggml.model"][1] == "llama":
        for kind in (0, 7):
            with pytest.raises(ValueError, match="types 1 to 6"):
                load_with(token_type=(5, [*types[:place], kind, *types[place + 1 :]]))


def test_a_llama_may_have_biases(tmp_path) -> None:
    values, tensors = contents(FOLDER / "llama.gguf")
    for parts, options in ((("attn_q", "attn_k", "attn_v", "attn_output"), (True, True, False)),
                           (("ffn_up", "ffn_gate", "ffn_down"), (True, True, True))):  # fmt: skip
        given = {}
        for part in parts:
            for layer in range(2):
                given[part] = torch.rand(tensors[f"blk.{layer}.{part}.weight"][1][-1])
                tensors[f"blk.{layer}.{part}.bias"] = (0, tuple(given[part].shape), given[part].numpy().tobytes())
        (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
        model = load(tmp_path / "x.gguf")[0]
        config, layer = model.config, model.decoder.layers[1]
        found = tuple(config.bias if one is None else one for one in (config.qkv_bias, config.out_bias, config.bias))
        assert found == options
        due = layer.linear2.bias if config.bias else layer.self_attn.out_proj.bias
        assert torch.equal(due, given[parts[-1]])


def test_queries_keys_and_values_may_be_one_matrix(tmp_path) -> None:
    values, tensors = contents(FOLDER / "qwen2.gguf")
    expected = load(FOLDER / "qwen2.gguf")[0].state_dict()
    for layer in range(values["qwen2.block_count"][1]):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            if len({part[0] for part in parts}) == 1:
                sizes = (*parts[0][1][:-1], sum(part[1][-1] for part in parts))
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = parts[0][0], sizes, b"".join(part[2] for part in parts)
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    found = load(tmp_path / "x.gguf")[0].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    tensors["blk.0.attn_qkv.bias"] = (0, (60,), bytes(240))
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    with pytest.raises(ValueError, match="attn_qkv.bias"):
        load(tmp_path / "x.gguf")
