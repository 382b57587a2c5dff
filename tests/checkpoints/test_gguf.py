"""Reads GGUF files that llama.cpp's converter wrote: numbers, tokens, and errors that name what is wrong.

`tests.foreign.gguf_files` wrote the files, and what transformers computes of the same models.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastformer import Encoder
from fastformer.checkpoints import load_model
from fastformer.checkpoints.gguf.blocks import BLOCKS, Kind, int4_groups, numbers
from fastformer.checkpoints.gguf.file import GGUF, read_gguf
from fastformer.checkpoints.gguf.models import pooling_of
from fastformer.checkpoints.gguf.write import write_gguf
from fastformer.checkpoints.hf import FAMILIES, from_model, load_folder
from fastformer.checkpoints.run import architecture_of
from fastformer.cli import main
from fastformer.generation import Chat, generate
from fastformer.generation.folder_options import folder_options
from fastformer.integrations import to_huggingface
from fastformer.models import GPT
from fastformer.models.quantization import from_grid, from_groups, to_grid
from tests.covering import by_turns, covering, each
from tests.foreign.gguf_files import FOLDER, IDS, block_bytes, digest
from tests.generation.small import needs_cpp

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")

EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
DIGESTS = EXPECTED.pop("blocks")
ENCODERS = ("bert", "roberta", "nomic")
LLAMA = FOLDER / "llama.gguf"
Values = dict[str, tuple[int, Any]]  # by key: the number of the type, and the value
Tensors = dict[str, tuple[int, tuple[int, ...], bytes]]  # by name: the number of the kind, the sizes, the bytes


def load(path: Path, **options: Any) -> Any:
    return load_model(path, ("GPT", "BERT"), **options)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def to_bytes(values: Values, tensors: Tensors, version: int = 3, alignment: int = 32) -> bytes:
    """Writes a GGUF file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, (kind, value) in values.items():
        head += text(key) + struct.pack("<I", kind) + packed(kind, value)
    data = b""
    for name, (kind, sizes, part) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + struct.pack("<IQ", kind, len(data))
        data += part + b"\0" * (-len(part) % alignment)
    return head + b"\0" * (-len(head) % alignment) + data


def packed(kind: int, value: Any) -> bytes:
    forms = {4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}
    if isinstance(value, bytes):  # it is packed already
        return value
    if kind == 9:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(packed(inner, each) for each in values)
    return text(value) if kind == 8 else struct.pack(f"<{forms[kind]}", value)


def contents(path: Path) -> tuple[Values, Tensors]:
    """Returns the parts of a file, to be changed and written again."""
    file = read_gguf(path)
    kinds: dict[type, int] = {str: 8, bool: 7, int: 4, float: 6}
    values: Values = {}
    for key, value in file.values.items():
        kind = kinds.get(type(value), 9)
        inner = {str: 8, bool: 7, int: 5, float: 6}[type(value[0])] if kind == 9 else 0
        values[key] = kind, (inner, value) if kind == 9 else value
    tensors: Tensors = {
        name: (int(stored.kind), stored.shape[::-1], stored.data.numpy().tobytes())
        for name, stored in file.tensors.items()
    }
    return values, tensors


@each("name", DIGESTS)
def test_numbers_equal_ggml(name) -> None:
    kind = Kind[name]
    block = BLOCKS[kind]
    data = torch.frombuffer(bytearray(block_bytes(int(kind), block.size)), dtype=torch.uint8)
    assert digest(numbers(kind, (1, 64 * block.numbers), data)) == DIGESTS[name]


@pytest.mark.parametrize("kind", [kind for kind, block in BLOCKS.items() if block.groups is not None])
def test_groups_have_the_numbers(kind) -> None:
    block, draw = BLOCKS[kind], random.Random(5)
    data = torch.frombuffer(bytearray(draw.randbytes(6 * block.size)), dtype=torch.uint8)
    data.view(6, -1)[:, :2] = torch.tensor([[100 + i, 40] for i in range(6)])  # finite scales
    shape = (3, 2 * block.numbers)
    groups = int4_groups(kind, shape, data)
    assert groups is not None and groups.levels is block.levels
    assert torch.equal(from_groups(groups, shape[1], torch.float32), numbers(kind, shape, data))
    assert len(numbers(kind, shape, data).unique()) > 20


@pytest.mark.parametrize("name", EXPECTED)
def test_models_and_tokens_equal_transformers(name) -> None:
    model, tokenizer = load(FOLDER / f"{name}.gguf", dtype=torch.float32)
    size = model.config.vocab_size if name == "nomic" else max(IDS) + 1
    with torch.inference_mode():
        result = model(torch.tensor([[i % size for i in IDS]]))
    torch.testing.assert_close(result[0, -1], torch.tensor(EXPECTED[name]["numbers"]), rtol=1e-5, atol=2e-5)
    assert architecture_of(FOLDER / f"{name}.gguf") == type(model).__name__
    if name == "nomic":  # whose linear layers have no bias, so that it can be saved as transformers' model
        assert from_model(model)[0]["model_type"] == "nomic_bert"
    for line, ids in EXPECTED[name]["texts"].items():
        if name in ENCODERS and "<" in line:  # a special token that a text spells is text here
            continue
        parses = name not in ENCODERS and tokenizer.backend.library == "tokenizers"  # as transformers does
        assert (tokenizer.encode_prompt if parses else tokenizer.encode)(line) == ids, line


def test_dtypes_and_precisions_are_those_of_the_file() -> None:
    files = {name: load(FOLDER / f"{name}.gguf")[0] for name in ("llama", "smollm", "qwen3", "gptoss")}
    found = {name: (model.precision, next(model.parameters()).dtype) for name, model in files.items()}
    assert found == {
        "llama": ("int8", torch.float32), "smollm": (None, torch.bfloat16), "qwen3": (None, torch.float32),
        "gptoss": ("int4", torch.float32),
    }  # fmt: skip


def test_the_precision_is_that_of_most_numbers_those_of_experts_too(tmp_path) -> None:
    values, tensors = contents(FOLDER / "mixtral.gguf")
    sizes_of = {dims: sum(np.prod(sizes) for _, sizes, _ in tensors.values() if len(sizes) == dims) for dims in (2, 3)}
    assert sizes_of[3] > sizes_of[2]
    for name, (_, sizes, _) in tensors.items():
        if len(sizes) == 2:
            tensors[name] = int(Kind.F32), sizes, np.full(sizes, 0.1, np.float32).tobytes()
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    assert load(tmp_path / "x.gguf")[0].precision == "int8"


@pytest.mark.parametrize(
    ("kind", "stays"), [(Kind.Q4_0, True), (Kind.Q4_0, False), (Kind.IQ4_NL, True), (Kind.MXFP4, True)]
)
def test_numbers_of_4_bits_keep_their_integers_and_scales(kind, stays, tmp_path, monkeypatch) -> None:
    if not stays:  # as on a GPU
        monkeypatch.setattr("fastformer.checkpoints.hf.common._stays", lambda device: False)
    values, tensors = contents(LLAMA)
    draw = random.Random(3)
    for name, (_, sizes, _) in tensors.items():
        if len(sizes) == 2 and name != "output.weight":
            scales = np.array([draw.uniform(0.01, 0.05) for _ in range(sizes[0] * sizes[1] // 32)], np.float16)
            if kind == Kind.MXFP4:
                scales = np.array([draw.randrange(119, 126) for _ in scales], np.uint8)
            data = b"".join(scale.tobytes() + draw.randbytes(16) for scale in scales)
            tensors[name] = int(kind), sizes, data
    others = {"output.weight"}
    if kind == Kind.IQ4_NL:  # a map and its gate, which are one matrix, with different levels
        tensors["blk.0.ffn_up.weight"] = int(Kind.Q4_0), *tensors["blk.0.ffn_up.weight"][1:]
        others.add("decoder.layers.0.linear1.weight")
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    model, _ = load(tmp_path / "x.gguf")
    assert model.precision == "int4"
    state = model.state_dict()
    matrices = {name for name, tensor in state.items() if tensor.dim() == 2}
    assert {*model.int4_groups} == matrices - others
    for name, groups in model.int4_groups.items():
        assert torch.equal(from_groups(groups, state[name].shape[1], torch.float32), state[name])
    plain = numbers(kind, (64, 32), read_gguf(tmp_path / "x.gguf").tensors["blk.1.ffn_up.weight"].data)
    assert torch.equal(state["decoder.layers.1.linear1.weight"][64:], plain)
    model.save_pretrained(tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved").int4_groups
    for name, groups in model.int4_groups.items():
        assert all(torch.equal(a, b) for a, b in zip(groups, saved[name], strict=True) if a is not None)


def test_a_split_model_is_read_from_any_of_its_files(tmp_path) -> None:
    values, tensors = contents(LLAMA)
    split = {"split.count": (4, 2), "split.tensors.count": (4, len(tensors))}
    names = [*tensors]
    for number, part in enumerate((names[:7], names[7:]), 1):
        data = to_bytes({**(values if number == 1 else {}), **split}, {name: tensors[name] for name in part})
        (tmp_path / f"m-{number:05}-of-00002.gguf").write_bytes(data)
    whole = load(LLAMA)[0].state_dict()
    for number in (1, 2):
        state = load(tmp_path / f"m-{number:05}-of-00002.gguf")[0].state_dict()
        assert all(torch.equal(state[name], whole[name]) for name in whole)
        assert architecture_of(tmp_path / f"m-{number:05}-of-00002.gguf") == "GPT"
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "other.gguf")
    for path in ("m-00002-of-00002.gguf", "other.gguf"):
        with pytest.raises(ValueError, match="m-00001-of-00002|NAME-00001-of-00002"):
            load(tmp_path / path)


@pytest.mark.parametrize(("values", "alignment"), [
    ({"split.count": (4, 0)}, 32), ({"split.count": (4, 1)}, 32), ({"general.alignment": (4, 8)}, 8),
    ({"general.alignment": (4, 64)}, 64),
])  # fmt: skip
def test_a_whole_model_of_any_alignment_is_the_same(values, alignment, tmp_path) -> None:
    own, tensors = contents(LLAMA)
    (tmp_path / "x.gguf").write_bytes(to_bytes(own | values, tensors, alignment=alignment))
    whole = load(LLAMA)[0].state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load(tmp_path / "x.gguf")[0].state_dict().items())


@pytest.mark.parametrize(("values", "scaling"), [
    ({"type": (8, "linear"), "factor": (6, 2.0)}, {"kind": "linear", "factor": 2.0}),
    ({"type": (8, "linear"), "factor": (6, 1.0)}, None), ({"type": (8, "none"), "factor": (6, 4.0)}, None),
    (
        {"type": (8, "yarn"), "factor": (6, 4.0), "original_context_length": (4, 32), "attn_factor": (6, 1.5),
         "yarn_beta_fast": (6, 16.0), "yarn_beta_slow": (6, 2.0)},
        {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor":
         1.5 * (1 + 0.1 * math.log(4)), "beta_fast": 16.0, "beta_slow": 2.0},  # llama.cpp multiplies both
    ),
])  # fmt: skip
def test_the_scaling_of_positions_is_the_files(values, scaling, tmp_path) -> None:
    own, tensors = contents(LLAMA)
    tensors.pop("rope_freqs.weight", None)
    own = {key: value for key, value in own.items() if ".rope.scaling" not in key}
    given = {f"llama.rope.scaling.{key}": value for key, value in values.items()}
    (tmp_path / "x.gguf").write_bytes(to_bytes(own | given, tensors))
    found = load(tmp_path / "x.gguf")[0].config.rotary_scaling
    assert (None if found is None else {**found}) == scaling


@pytest.mark.parametrize(("kind", "scale"), [("linear", 2.0), ("longrope", 2.0), (None, 2.0), ("none", 1.0)])
def test_factors_of_positions_are_scaled_too(kind, scale, tmp_path) -> None:
    own, tensors = contents(LLAMA)
    given: Values = {"llama.rope.scaling.factor": (6, 2.0), "llama.rope.scaling.attn_factor": (6, 0.5)}
    given |= {} if kind is None else {"llama.rope.scaling.type": (8, kind)}
    (tmp_path / "x.gguf").write_bytes(to_bytes(own | given, tensors))
    before, after = (load(path)[0].config.rotary_scaling for path in (LLAMA, tmp_path / "x.gguf"))
    for name in ("short_factor", "long_factor"):
        assert after[name] == tuple(scale * each for each in before[name])
    assert (before["attention_factor"], after["attention_factor"]) == (1.0, 0.5)


def test_queries_may_share_a_single_head_of_keys(tmp_path) -> None:
    values, tensors = contents(LLAMA)
    values["llama.attention.head_count_kv"] = 4, 1
    whole = load(LLAMA, dtype=torch.float32)[0].state_dict()
    for name in [name for name in tensors if "attn_k" in name or "attn_v" in name]:
        kind, (inner, rows), data = tensors[name]
        tensors[name] = kind, (inner, rows // 2), data[: len(data) // 2]
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    model, _ = load(tmp_path / "x.gguf", dtype=torch.float32)
    name = "decoder.layers.0.self_attn.in_proj_weight"
    assert model.config.num_kv_heads == 1 and len(model.state_dict()[name]) < len(whole[name])
    size = model.config.d_model + model.config.size_of_head  # of queries, and of the keys of the first head
    assert torch.equal(model.state_dict()[name][:size], whole[name][:size])


def test_the_pooling_is_the_files(tmp_path) -> None:
    own, tensors = contents(FOLDER / "bert.gguf")
    own.pop("bert.pooling_type", None)
    for kind, name in ((None, None), (0, None), (1, "mean"), (2, "cls"), (3, "lasttoken")):
        given = {} if kind is None else {"bert.pooling_type": (4, kind)}
        (tmp_path / "x.gguf").write_bytes(to_bytes(own | given, tensors))
        assert pooling_of(tmp_path / "x.gguf") == name
    (tmp_path / "x.gguf").write_bytes(to_bytes(own | {"bert.pooling_type": (4, 9)}, tensors))
    with pytest.raises(ValueError, match="pooling_type"):
        pooling_of(tmp_path / "x.gguf")


def test_rows_that_no_block_divides_are_written_as_fp16(tmp_path) -> None:
    small, tokenizer = load(LLAMA)
    model = GPT(dataclasses.replace(small.config, d_ff=40))
    write_gguf(tmp_path / "x.gguf", model, tokenizer, Kind.Q8_0)
    found = load(tmp_path / "x.gguf", dtype=torch.float32)[0].state_dict()["decoder.layers.0.linear2.weight"]
    assert torch.equal(found, model.state_dict()["decoder.layers.0.linear2.weight"].half().float())


def test_special_ids_templates_and_options_are_the_files(tmp_path) -> None:
    model, tokenizer = load(LLAMA)
    assert model.config.special_ids.eos == (1, 3) and model.config.special_ids.pad == 3
    assert tokenizer.chat["bos_token"] == "<|begin|>" and "im_start" in tokenizer.chat["chat_template"]
    assert tokenizer.encode("the")[0] == 0 and 1 not in tokenizer.encode("<|im_end|>")
    before, behind = tokenizer.encode_template("a "), tokenizer.encode_template(" b")
    assert tokenizer.encode_template("a <|im_end|> b") == [*before, 1, *behind]  # it takes no spaces
    assert folder_options(LLAMA) == {}
    values, tensors = contents(LLAMA)
    values |= {"general.sampling.temp": (6, 0.7), "general.sampling.top_k": (5, 9)}
    values |= {"tokenizer.ggml.add_bos_token": (7, False), "tokenizer.ggml.eot_token_id": (4, 2)}
    types = values["tokenizer.ggml.token_type"][1][1]
    types[1] = 4  # a token of the user's that ends texts is special
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    model, tokenizer = load(tmp_path / "x.gguf")
    assert 1 not in tokenizer.encode("a<|im_end|>") and 1 in tokenizer.encode_template("a<|im_end|>")
    assert model.config.special_ids.eos == (1, 2, 3) and tokenizer.encode("the")[0] != 0
    assert folder_options(tmp_path / "x.gguf") == {"do_sample": True, "temperature": 0.7, "top_k": 9}


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("dbrx", False)])
def test_a_word_that_no_merges_make_is_a_token_by_its_name(pre, is_whole, tmp_path) -> None:
    values, tensors = contents(LLAMA)
    values["tokenizer.ggml.tokens"][1][1][200] = "zqz"
    values["tokenizer.ggml.pre"] = 8, pre
    merges = [merge for merge in values["tokenizer.ggml.merges"][1][1] if "zq" not in merge.replace(" ", "")]
    values["tokenizer.ggml.merges"] = 9, (8, merges[:20])
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    assert (200 in load(tmp_path / "x.gguf")[1].encode("zqz")) == is_whole


@pytest.mark.parametrize(
    "name, kind",
    by_turns(["llama", "mistral", "smollm", "qwen2", "gemma3", "olmo2", "starcoder2", "gpt2"], ["q8_0", "q4_0"]),
)
def test_a_written_file_has_the_same_model_and_tokens(name, kind, tmp_path, capsys) -> None:
    path = tmp_path / "small.gguf"
    assert main(["quantize", str(FOLDER / f"{name}.gguf"), str(path), "--precision", kind]) == 0
    (model, tokenizer), (written, other) = load(FOLDER / f"{name}.gguf", dtype=torch.float32), load(path)
    assert written.config == model.config and written.precision == {"q8_0": "int8", "q4_0": "int4"}[kind]
    for key, tensor in model.state_dict().items():
        error = (written.state_dict()[key] - tensor).abs().max() / tensor.abs().max()
        assert error <= (0 if tensor.dim() == 1 else 1 / 200 if kind == "q8_0" else 1 / 6)
        if kind == "q8_0" and name in ("llama", "qwen2", "gemma3", "olmo2", "gpt2"):  # they are of Q8_0
            assert error == 0
    for line in EXPECTED[name]["texts"]:
        assert other.encode_prompt(line) == tokenizer.encode_prompt(line)
        assert other.decode(other.encode(line)) == tokenizer.decode(tokenizer.encode(line))
    before, now = (read_gguf(each).values for each in (FOLDER / f"{name}.gguf", path))
    free = ("vocab_size", "tokenizer.ggml.pre", "add_eos_token", "add_sep_token")
    own = {key for key in before if not key.startswith("general.") and not key.endswith(free)}
    assert {key: now.get(key) for key in own} == {key: before[key] for key in own}
    tokenizer.chat.pop("bos_token", None)  # of a tokenizer that no template needs
    write_gguf(path, model, tokenizer, Kind[kind.upper()])
    assert read_gguf(path).values.get(key := "tokenizer.ggml.bos_token_id") == (
        now.get(key) if now["tokenizer.ggml.add_bos_token"] else None
    )


def drawn(name: str, kind: Kind, path: Path) -> None:
    """Writes a file of the kind, with weights that are on no grid."""
    values, tensors = contents(FOLDER / f"{name}.gguf")
    draw = torch.Generator().manual_seed(4)
    for key, stored in read_gguf(FOLDER / f"{name}.gguf").tensors.items():
        plain = numbers(*stored[:3]).float()
        if key == "rope_freqs.weight":  # its folder has the settings from which it was computed
            continue
        plain = (plain * (1 + 0.05 * torch.randn(plain.shape, generator=draw))).to(BLOCKS[kind].dtype)
        used = kind if plain.dim() > 1 else Kind.F32
        data = plain.to(BLOCKS[used].dtype).view(torch.uint8).numpy().tobytes()
        tensors[key] = int(used), stored.shape[::-1], data
    path.write_bytes(to_bytes(values, tensors))


@needs_cpp
@pytest.mark.parametrize(
    "name, kind, precision",
    covering(["llama", "qwen2", "gpt2"], [Kind.F16, Kind.BF16], ["fp32", "bf16", "int8", "int4"]),
)
def test_floats_compute_in_each_precision_what_their_folder_does(name, kind, precision, tmp_path) -> None:
    drawn(name, kind, tmp_path / "x.gguf")
    model, _ = load(tmp_path / "x.gguf")
    theirs = to_huggingface(load(tmp_path / "x.gguf", dtype=torch.float32)[0])
    theirs.to(BLOCKS[kind].dtype).save_pretrained(tmp_path / "folder")
    family = FAMILIES[theirs.config.model_type]._replace(read_tokenizer=lambda *_: (None, lambda config: None))
    folder, _ = load_folder(tmp_path / "folder", family)
    options: dict[str, Any] = {"precision": precision, "max_new_tokens": 24, "return_dict_in_generate": True}
    ours, due = (generate(each, [IDS, IDS[::-1]], engine="cpp", **options) for each in (model, folder))
    assert torch.equal(ours.sequences, due.sequences) and torch.equal(ours.token_log_probs, due.token_log_probs)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_floats_that_are_written_as_q8_0_are_rounded_in_blocks_and_in_int8_in_rows(name, tmp_path) -> None:
    drawn(name, Kind.F16, tmp_path / "f16.gguf")
    assert main(["quantize", str(tmp_path / "f16.gguf"), str(tmp_path / "q8_0.gguf"), "--precision", "q8_0"]) == 0
    source, written = (load(tmp_path / file)[0].state_dict() for file in ("f16.gguf", "q8_0.gguf"))
    for key, plain in source.items():
        if plain.dim() < 2 or plain.shape[1] % 32:
            assert torch.equal(written[key], plain.half().float() if plain.dim() > 1 else plain)
            continue
        blocks = plain.view(len(plain), -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
        by_block = blocks * (0.5 / 127 + 2**-11)  # a step of a block, and its scale in fp16
        assert ((written[key] - plain).abs() <= by_block).all() and not torch.equal(written[key], plain)
        by_row = written[key].abs().amax(1, keepdim=True) * (0.5 / 127 + 1e-6)
        assert ((from_grid(*to_grid(written[key]), torch.float32) - plain).abs() <= by_block + by_row).all()


def test_what_has_no_form_in_gguf_is_refused(tmp_path, capsys) -> None:
    for source, options, message in (
        ("phi3", ["--precision", "q8_0"], "scaling"),
        ("granite", ["--precision", "q8_0"], "granite"),
        ("mixtral", ["--precision", "q8_0"], "mixtral"),
        ("qwen35", ["--precision", "q8_0"], "'qwen3',"),  # it is read, but only families such as this are written
        ("bert", ["--precision", "q8_0"], "expected"),
    ):
        assert main(["quantize", str(FOLDER / f"{source}.gguf"), str(tmp_path / "x.gguf"), *options]) == 1
        assert message in capsys.readouterr().err
    model, tokenizer = load(FOLDER / "gemma3.gguf")
    model.config = dataclasses.replace(model.config, attention_scale=1.0)
    with pytest.raises(ValueError, match="attention_scale"):
        write_gguf(tmp_path / "x.gguf", model, tokenizer, Kind.Q8_0)
    assert main(["quantize", str(LLAMA), str(tmp_path / "x"), "--precision", "q4_0"]) == 1
    assert "int4" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_commands_and_classes_take_a_file(capsys) -> None:
    assert main(["generate", str(LLAMA), "the dog", "--greedy", "--max_new_tokens", "4", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the dog") and len(said) > len("the dog\n")
    assert "".join(Chat.from_pretrained(LLAMA, max_new_tokens=4).stream("two birds"))
    encoder = Encoder.from_pretrained(FOLDER / "nomic.gguf")
    rows = encoder.encode(["the dog", "a book"], normalize=False)
    features = encoder.tokenize(["the dog"])
    with torch.inference_mode():
        states = encoder.model(features["input_ids"])
    np.testing.assert_allclose(rows[0], states[0].mean(0).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pooling", "adds_eos", "is_causal"),
    [("qwen2", 3, True, True), ("qwen2", 1, False, False), ("mistral", None, False, True), ("mistral", 2, True, True)],
)
def test_a_language_model_embeds(name: str, pooling: Any, adds_eos: bool, is_causal: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="reads the file, too")
    values, tensors = contents(FOLDER / f"{name}.gguf")
    kind = values["general.architecture"][1]
    added = {"tokenizer.ggml.add_eos_token": (7, adds_eos), f"{kind}.attention.causal": (7, is_causal)}
    if pooling is not None:
        added[f"{kind}.pooling_type"] = (4, pooling)
    file = tmp_path / "embedder.gguf"
    file.write_bytes(to_bytes(values | added, tensors))
    encoder = Encoder.from_pretrained(file, precision="fp32")
    assert encoder.pooling == {1: "mean", 2: "cls"}.get(pooling, "lasttoken") and encoder.normalizes
    texts = [line for line in EXPECTED[name]["texts"] if line and "<" not in line]  # which may spell special tokens
    model = transformers.AutoModel.from_pretrained(FOLDER, gguf_file=f"{name}.gguf", dtype=torch.float32).eval()
    model.config.is_causal = is_causal
    eos = [encoder.model.config.special_ids.eos[0]] if adds_eos else []
    bos = [values["tokenizer.ggml.bos_token_id"][1]] if name == "mistral" else []
    for row, line in zip(encoder.encode(texts), texts, strict=True):
        ids = [*EXPECTED[name]["texts"][line], *eos]
        assert encoder.tokenize([line])["input_ids"][0].tolist() == ids and ids[: len(bos)] == bos
        with torch.inference_mode():
            states = model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        due = states.mean(0) if pooling == 1 else states[0] if pooling == 2 else states[-1]
        np.testing.assert_allclose(row, torch.nn.functional.normalize(due, dim=0).numpy(), rtol=1e-3, atol=1e-5)


def changed(key: str, value: tuple[int, Any] | None) -> Callable[[Values, Tensors], None]:
    def change(values: Values, tensors: Tensors) -> None:
        values.pop(key, None)
        if value is not None:
            values[key] = value

    return change


def resized(name: str, sizes: tuple[int, ...] | None = None, kind: int | None = None) -> Any:
    def change(values: Values, tensors: Tensors) -> None:
        old = tensors[name]
        tensors[name] = old[0] if kind is None else kind, old[1] if sizes is None else sizes, old[2]

    return change


def removed(name: str) -> Any:
    return lambda values, tensors: tensors.pop(name)


BAD = {
    "architecture": (changed("general.architecture", (8, "rwkv7")), "rwkv7"),
    "no architecture": (changed("general.architecture", None), "llama"),
    "experts": (changed("llama.expert_count", (4, 8)), "expert_used_count"),
    "pre-tokenizer": (changed("tokenizer.ggml.pre", (8, "zzz")), "zzz.*llama-bpe|llama-bpe.*zzz"),
    "a number for a text": (changed("tokenizer.ggml.pre", (4, 3)), r"tokenizer\.ggml\.pre .*str"),
    "a text for a list": (changed("tokenizer.ggml.tokens", (8, "a")), r"tokenizer\.ggml\.tokens"),
    "half an alignment": (changed("general.alignment", (4, 4)), "alignment"),
    "no pre-tokenizer": (changed("tokenizer.ggml.pre", None), "tokenizer.ggml.pre"),
    "tokenizer": (changed("tokenizer.ggml.model", (8, "rwkv")), "rwkv"),
    "no tokens": (changed("tokenizer.ggml.tokens", None), "tokens"),
    "a type too few": (changed("tokenizer.ggml.token_type", (9, (5, [1, 2]))), "token_type"),
    "an id beyond": (changed("tokenizer.ggml.eos_token_id", (4, 10**6)), "eos_token_id"),
    "merges": (changed("tokenizer.ggml.merges", (9, (8, ["a"]))), "merges"),
    "depth": (changed("llama.block_count", (4, 2**31 - 1)), "2147483647"),
    "width": (changed("llama.embedding_length", (4, 2**30)), "embed|shape|expected"),
    "heads": (changed("llama.attention.head_count", (4, 0)), "head"),
    "context": (changed("llama.context_length", (4, 2**31 - 1)), "max_len|positions|length"),
    "no context": (changed("llama.context_length", (4, 0)), "original_max_position_embeddings|context|position"),
    "text for a number": (changed("llama.block_count", (8, "two")), "block_count"),
    "alignment": (changed("general.alignment", (4, 3)), "alignment"),
    "scaling": (changed("llama.rope.scaling.type", (8, "ntk")), "ntk"),
    "scaling and factors": (changed("llama.rope.scaling.type", (8, "yarn")), "yarn"),
    "scaling of attention": (changed("llama.rope.scaling.attn_factor", (6, 2.0)), "attn_factor"),
    "later tokens": (changed("llama.attention.causal", (7, False)), "later tokens"),
    "kind": (resized("output_norm.weight", kind=19), "19"),
    "huge": (resized("output_norm.weight", (2**62, 2)), "output_norm"),
    "wraps to nothing": (resized("output_norm.weight", (2**32, 2**32)), "output_norm"),
    "half a block": (resized("output.weight", (33, 1)), "32"),
    "no rows": (resized("output_norm.weight", (0,)), "output_norm"),
    "dimensions": (resized("output_norm.weight", (1,) * 9), "9"),
    "smaller": (resized("token_embd.weight", (32, 8)), "."),
    "no norm": (removed("output_norm.weight"), "norm"),
    "another tensor": (lambda values, tensors: tensors.update({"blk.0.x.weight": (0, (1,), b"\0" * 4)}), "blk.0.x"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_what_is_wrong(name, tmp_path) -> None:
    change, message = BAD[name]
    values, tensors = contents(LLAMA)
    change(values, tensors)
    (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    if name == "scaling of attention":  # which next to factors is read
        tensors.pop("rope_freqs.weight")
        (tmp_path / "x.gguf").write_bytes(to_bytes(values, tensors))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "x.gguf")


def test_files_that_are_cut_or_no_gguf_are_refused(tmp_path) -> None:
    data, path = LLAMA.read_bytes(), tmp_path / "x.gguf"
    for end in (0, 3, 4, 8, 20, 100, 4000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match="expected"):
            load(path)
    for version in (1, 4, 3 << 24):
        path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
        with pytest.raises(ValueError, match="version 2 or 3"):
            load(path)
    (tmp_path / "link.gguf").symlink_to("/dev/zero")
    for missing in ("none.gguf", "link.gguf"):
        with pytest.raises(ValueError, match="no file"):
            load(tmp_path / missing)
    values, tensors = contents(LLAMA)
    twice = to_bytes(values, tensors).replace(text("blk.1.attn_k.weight"), text("blk.1.attn_q.weight"))
    path.write_bytes(twice)
    with pytest.raises(ValueError, match="twice"):
        load(path)
    overlapping = bytearray(to_bytes(values, tensors))
    place = overlapping.index(text("blk.1.attn_k.weight")) + len(text("blk.1.attn_k.weight")) + 4 + 16 + 4
    overlapping[place : place + 8] = struct.pack("<Q", 0)
    path.write_bytes(overlapping)
    with pytest.raises(ValueError, match="one after another"):
        load(path)


@pytest.mark.slow
def test_the_gguf_package_reads_the_same(tmp_path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    assert main(["quantize", str(LLAMA), str(tmp_path / "x.gguf"), "--precision", "q4_0"]) == 0
    for path in (*(FOLDER / f"{name}.gguf" for name in EXPECTED), tmp_path / "x.gguf"):
        file: GGUF = read_gguf(path)
        reader = gguf.GGUFReader(path)
        for tensor in reader.tensors:
            stored = file.tensors[tensor.name]
            plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            assert digest(numbers(*stored[:3])) == digest(plain.copy())
        for key, field in reader.fields.items():
            if not key.startswith("GGUF."):
                assert file.values[key] == field.contents(), key
