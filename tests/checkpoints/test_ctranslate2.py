"""Folders that CTranslate2 converted: their numbers, what is refused, and damaged files."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer import cli
from fastformer.checkpoints import load_model
from fastformer.checkpoints.ctranslate2 import as_tensors, load_transformer
from fastformer.checkpoints.model_bin import MODEL, read_variables
from fastformer.checkpoints.run import architecture_of
from fastformer.generation import Translator, generate
from fastformer.models import quantization
from tests.covering import by_turns

FOLDERS = Path(__file__).parent.parent / "foreign" / "ctranslate2"
NAMES = sorted(path.name for path in FOLDERS.iterdir())
_CODES = {
    torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4, torch.bfloat16: 5
}  # fmt: skip


def expected(name: str) -> dict[str, Any]:
    return json.loads((FOLDERS / name / "expected.json").read_text())


def written(variables: dict[str, torch.Tensor], spec: str = "TransformerSpec", version: int = 6) -> bytes:
    """Returns a model.bin without aliases."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    out = struct.pack("<I", version) + text(spec) + struct.pack("<II", 7, len(variables))
    for name, tensor in variables.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        out += text(name) + struct.pack("<B", tensor.dim()) + struct.pack(f"<{tensor.dim()}I", *tensor.shape)
        out += struct.pack("<BI", _CODES[tensor.dtype], len(data)) + data
    return out + struct.pack("<I", 0)


def file_of(
    name: bytes = b"ab", shape: tuple[int, ...] = (1,), dtype: int = 0, size: int = 4, *, version: int = 6,
    times: int = 1, aliases: tuple[tuple[bytes, bytes], ...] = (), more: bytes = b"",
) -> bytes:  # fmt: skip
    """Returns a model.bin of one variable, as the file's format has it."""

    def text(value: bytes) -> bytes:
        return struct.pack("<H", len(value) + 1) + value + b"\0"

    sizes = struct.pack(f"<B{len(shape)}I", len(shape), *shape)
    variable = text(name) + sizes + struct.pack("<BI", dtype, size) + bytes(size)
    pairs = b"".join(text(alias) + text(of) for alias, of in aliases)
    head = struct.pack("<I", version) + text(b"Spec") + struct.pack("<II", 7, times)
    return head + variable * times + struct.pack("<I", len(aliases)) + pairs + more


# What a file has, and a word of the error; None: it is read.
BOUNDS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None), ({"shape": (1,) * 4}, None), ({"shape": (1,) * 5}, "dimensions"), ({"shape": (), "size": 4}, None),
    ({"dtype": 5, "size": 2}, None), ({"dtype": 6, "size": 2}, "dtype"), ({"dtype": 255}, "dtype"),
    ({"size": 8}, "bytes"), ({"size": 0}, "bytes"), ({"shape": (0,), "size": 0}, None), ({"version": 5}, "version"),
    ({"version": 7}, "version"), ({"times": 2}, "twice"), ({"aliases": ((b"cd", b"ab"),)}, None),
    ({"aliases": ((b"cd", b"ef"),)}, "aliases"), ({"aliases": ((b"ab", b"ab"),)}, "aliases"),
    ({"aliases": ((b"cd", b"ab"), (b"cd", b"ab"))}, "aliases"), ({"more": b"\0"}, "1 bytes more"),
    ({"name": b"\xff"}, "UTF-8"),
]  # fmt: skip


def test_a_file_is_read_up_to_the_bounds_of_its_format(tmp_path) -> None:
    path = tmp_path / MODEL
    for parts, word in BOUNDS:
        path.write_bytes(file_of(**parts))
        if word is None:
            name, variables = read_variables(path)
            assert name == "Spec" and variables["ab"].shape == parts.get("shape", (1,)), parts
            assert variables.keys() == {"ab", *(["cd"] if parts.get("aliases") else [])}, parts
        else:
            with pytest.raises(ValueError, match=word):
                read_variables(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a folder, to change."""
    return Path(shutil.copytree(FOLDERS / "marian", tmp_path / "marian"))


@pytest.mark.parametrize("name", NAMES)
def test_probabilities_are_those_of_ctranslate2(name: str) -> None:
    model, vocabularies = load_transformer(FOLDERS / name)
    values, ids = expected(name), model.config.special_ids
    model = model.double()
    for source, target, log_probs in zip(values["sources"], values["targets"], values["log_probs"], strict=True):
        rows = [vocabularies.source.index(token) for token in source]
        ends = [vocabularies.target.index(token) for token in [*target, "</s>"]]
        logits = model(torch.tensor([rows]), torch.tensor([[ids.start, *ends[:-1]]]))[0].log_softmax(-1)
        found = logits[torch.arange(len(ends)), ends]
        # CTranslate2 rounds to fp32.
        torch.testing.assert_close(found, torch.tensor(log_probs).double(), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("beams, name", by_turns([1, 3], [*NAMES]))
def test_hypotheses_are_those_of_ctranslate2(name: str, beams: int) -> None:
    model, vocabularies = load_transformer(FOLDERS / name)
    values, ids = expected(name), model.config.special_ids
    rows = [[vocabularies.source.index(token) for token in source] for source in values["sources"]]
    found = generate(
        model.float(),
        rows,
        num_beams=beams,
        max_new_tokens=10,
        min_new_tokens=1,
        precision="fp32",
        beam_rules="transformers",
        length_penalty=1.0,
        early_stopping=True,
    )
    assert isinstance(found, torch.Tensor)
    texts = []
    for row in found.tolist():
        row = row[: row.index(ids.first_eos)] if ids.first_eos in row else row
        texts.append([vocabularies.target[i] for i in row])
    assert texts == values[f"hypotheses_{beams}"]
    assert len({*map(str, texts)}) > 1


@pytest.mark.parametrize("name", ["marian", "t5-gated"])
def test_int8_has_the_numbers_of_the_file(name: str) -> None:
    """Nothing is rounded a second time."""
    model, _ = load_transformer(FOLDERS / name)
    stored = as_tensors(read_variables(FOLDERS / name / MODEL)[1])
    assert model.precision == "int8"
    weight = model.get_parameter("decoder.layers.1.linear2.weight")
    assert torch.equal(quantization.to_grid(weight)[0], stored["decoder/layer_1/ffn/linear_1/weight"])
    weight = model.get_parameter("encoder.layers.0.self_attn.in_proj_weight")
    assert torch.equal(quantization.to_grid(weight)[0], stored["encoder/layer_0/self_attention/linear_0/weight"])


def test_what_bf16_cannot_hold_is_fp32(tmp_path: Path) -> None:
    """The queries of a T5 are scaled by the root of the width of a head, here of 8."""
    folder = Path(shutil.copytree(FOLDERS / "t5", tmp_path / "t5"))
    stored = as_tensors(read_variables(folder / MODEL)[1])
    halved = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    (folder / MODEL).write_bytes(written(halved))
    weight = load_transformer(folder)[0].get_parameter("encoder.layers.0.self_attn.in_proj_weight")
    expected = halved["encoder/layer_0/self_attention/linear_0/weight"].double()[:16] * 8**0.5
    torch.testing.assert_close(weight[:16].double(), expected, rtol=1e-6, atol=0)
    assert next(load_transformer(FOLDERS / "bart")[0].parameters()).dtype == torch.bfloat16


def test_models_of_both_sides_may_have_vocabularies_of_their_own(folder: Path) -> None:
    stored = as_tensors(read_variables(folder / MODEL)[1])
    embedding = stored["decoder/embeddings/weight"].float() / stored["decoder/embeddings/weight_scale"][:, None]
    for name in ("decoder/embeddings/weight", "decoder/projection/weight", "encoder/embeddings_0/weight"):
        del stored[f"{name}_scale"]
        stored[name] = embedding
    stored["encoder/embeddings_0/weight"] = embedding[:-6]
    (folder / MODEL).write_bytes(written(stored))
    tokens = json.loads((folder / "shared_vocabulary.json").read_text())
    (folder / "shared_vocabulary.json").unlink()
    (folder / "source_vocabulary.json").write_text(json.dumps(tokens[:-6]))
    (folder / "target_vocabulary.json").write_text(json.dumps(tokens))
    model, vocabularies = load_transformer(folder)
    assert [*map(len, vocabularies)] == [33, 39] and not model.config.tie_embeddings
    whole, _ = load_transformer(FOLDERS / "marian")
    source, target = torch.tensor([[5, 9, 0]]), torch.tensor([[39, 36, 8]])
    torch.testing.assert_close(model(source, target), whole(source, target))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"decoder/alibi": torch.tensor(1, dtype=torch.int8)}, "alibi"),
        ({"encoder/layer_0/self_attention/relative_position_keys": torch.ones(3, 8)}, "relative positions"),
        ({"encoder/layer_0/self_attention/rotary_dim": torch.tensor(8, dtype=torch.int32)}, "rotary"),
        ({"encoder/embeddings_1/weight": torch.ones(5, 16)}, "features"),
        ({"encoder/multi_query_attention": torch.tensor(1, dtype=torch.int8)}, "multi_query_attention"),
        ({"decoder/activation": torch.tensor(0, dtype=torch.int8)}, "activation"),
        *(
            (dict.fromkeys((f"encoder/{name}", f"decoder/{name}"), torch.tensor(value, dtype=torch.int8)), name)
            for name, value in (("activation", 4), ("activation", -1), ("num_heads", 0))
        ),
        ({"decoder/num_heads": torch.tensor(4, dtype=torch.int16)}, "num_heads"),
        ({"encoder/scale_embeddings": torch.tensor(3.0), "decoder/scale_embeddings": torch.tensor(3.0)}, "embeddings"),
        ({"encoder/scale_embeddings": None}, "scale_embeddings"),
        ({"decoder/layer_0/ffn/linear_0/weight_zero": torch.ones(4)}, "weight_zero"),
        ({"decoder/layer_0/ffn/linear_0/weight": None}, "linear"),
        ({"decoder/layer_1/ffn/linear_0/weight_scale": None}, "scale"),
        ({"encoder/num_heads": None, "decoder/num_heads": None}, "num_heads"),
        ({"decoder/layer_0/ffn/linear_1/bias": torch.ones(5)}, "linear2"),
        ({"decoder/position_encodings/encodings": torch.ones(9, 5)}, "position"),
        ({"encoder/position_encodings/encodings": None, "decoder/position_encodings/encodings": None}, "relative bias"),
        (
            {f"{side}/activation": torch.tensor(0, dtype=torch.int8) for side in ("encoder", "decoder")}
            | {"encoder/layer_0/ffn/linear_0_noact/weight": torch.ones(32, 16)},
            "gated activation",
        ),
        ({"decoder/scale_outputs": torch.tensor(0.3)}, "scale_outputs"),
        (
            {f"{side}/multi_query_attention": torch.tensor(1, dtype=torch.int8) for side in ("encoder", "decoder")},
            "heads of keys",
        ),
        ({"encoder/embeddings_merge": torch.tensor(1, dtype=torch.int8)}, "one embedding"),
        ({"decoder/embeddings/weight": torch.ones(39, 5), "decoder/embeddings/weight_scale": None}, "one width"),
        ({"encoder/scale_embeddings": torch.tensor(2.0)}, "scale_embeddings of encoder and decoder"),
        ({"decoder/scale_outputs": torch.tensor(float("nan"))}, "finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parts_that_no_model_has_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    stored = as_tensors(read_variables(folder / MODEL)[1])
    changed = {name: tensor for name, tensor in {**stored, **changes}.items() if tensor is not None}
    (folder / MODEL).write_bytes(written(changed))
    with pytest.raises(ValueError, match=words):
        load_transformer(folder)


def test_other_specifications_are_refused(folder: Path) -> None:
    (folder / MODEL).write_bytes(written({}, "WhisperSpec"))
    with pytest.raises(ValueError, match="WhisperSpec"):
        load_transformer(folder)
    (folder / MODEL).write_bytes(written({}, version=5))
    with pytest.raises(ValueError, match="version"):
        load_transformer(folder)


@pytest.mark.parametrize("change", [lambda tokens: tokens[:-1], lambda tokens: [*tokens, "more"]])
def test_a_vocabulary_has_a_token_for_each_row(folder: Path, change: Any) -> None:
    tokens = json.loads((folder / "shared_vocabulary.json").read_text())
    (folder / "shared_vocabulary.json").write_text(json.dumps(change(tokens)))
    with pytest.raises(ValueError, match="vocabular"):
        load_transformer(folder)


@pytest.mark.parametrize("name", ["shared_vocabulary.json", "config.json"])
def test_files_beside_the_weights(folder: Path, name: str) -> None:
    for content in ("", "3", '["a", 3]', '{"eos_token": "nowhere"}'):
        (folder / name).write_text(content)
        with pytest.raises(ValueError):
            load_transformer(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=r"vocabulary\.json|config\.json"):
        load_transformer(folder)


def test_a_decoder_whose_first_token_each_call_chooses_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS / "bart", tmp_path / "bart"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "decoder_start_token": None}))
    with pytest.raises(ValueError, match="decoder_start_token"):
        load_transformer(folder)


def test_damaged_files_are_errors(folder: Path) -> None:
    data = (folder / MODEL).read_bytes()
    draw = random.Random(3)
    for end in (0, 3, 10, 30, 100, *draw.choices(range(len(data)), k=40), len(data) - 1):
        (folder / MODEL).write_bytes(data[:end])
        with pytest.raises(ValueError):
            read_variables(folder / MODEL)
    (folder / MODEL).write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="model.bin"):
        read_variables(folder / MODEL)


def with_pieces(folder: Path, file: str | None = None) -> Any:
    """Gives a folder a SentencePiece model, whose pieces become the vocabulary. Returns the model."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
    text = folder / "text"
    text.write_text("the old dog sees a tree\na cat runs\nthe bird sees the old cat\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "source"), vocab_size=20, minloglevel=2, bos_id=-1
    )
    data = (folder / "source.model").read_bytes()
    for name in [file] if file else ["source.spm", "target.spm"]:
        (folder / name).write_bytes(data)
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size()) if not processor.is_unknown(i)]
    tokens = json.loads((folder / "shared_vocabulary.json").read_text())
    places = [i for i, token in enumerate(tokens) if token not in ("</s>", "<unk>", "<s>", "<pad>")]
    for i, piece in zip(places, (piece for piece in pieces if piece not in tokens), strict=False):
        tokens[i] = piece
    (folder / "shared_vocabulary.json").write_text(json.dumps(tokens))
    return processor


@pytest.mark.parametrize("name, file", [("marian", None), ("marian", "spiece.model"), ("m2m", "sentencepiece.model")])
def test_texts_are_translated(tmp_path: Path, name: str, file: str | None, capsys: Any) -> None:
    folder = Path(shutil.copytree(FOLDERS / name, tmp_path / name))
    processor = with_pieces(folder, file)
    model, vocabularies = load_transformer(folder)
    text = "the old cat sees a dog"
    ids = [vocabularies.source.index(piece) for piece in processor.encode(text, out_type=str)]
    rows = generate(model.float(), [[*ids, model.config.special_ids.first_eos]], max_new_tokens=8, precision="fp32")
    assert isinstance(rows, torch.Tensor)
    end = model.config.special_ids.first_eos
    tokens = [vocabularies.target[i] for i in rows[0].tolist() if i not in (end, model.config.special_ids.pad)]
    expected = processor.decode_pieces([token for token in tokens if not token.startswith("<")]).strip()
    assert Translator.from_pretrained(folder, precision="fp32").translate(text, max_new_tokens=8) == expected
    assert architecture_of(folder) == "Transformer"
    assert not cli.main(["translate", str(folder), text, "--max_new_tokens", "8", "--precision", "fp32"])
    assert capsys.readouterr().out.strip() == expected
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from fastformer.serving import open_service

    assert open_service(folder).kind == "translator"
    with pytest.raises(ValueError, match="fastformer translate"):
        load_model(folder, ("GPT",))


def test_the_tokenizer_json_of_transformers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    folder = Path(shutil.copytree(FOLDERS / "bart", tmp_path / "bart"))
    tokens = json.loads((folder / "shared_vocabulary.json").read_text())
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({t: i for i, t in enumerate(tokens)}, "<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    library.save(str(folder / "tokenizer.json"))
    assert load_model(folder, ("Transformer",))[1].encode("t9 t12 t8") == [0, 9, 12, 8]
    (folder / "shared_vocabulary.json").write_text(
        json.dumps([*tokens[:9], tokens[12], *tokens[10:12], tokens[9], *tokens[13:]])
    )
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_model(folder, ("Transformer",))


def test_languages_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS / "m2m", tmp_path / "m2m"))
    with_pieces(folder, "sentencepiece.bpe.model")
    tokens = json.loads((folder / "shared_vocabulary.json").read_text())
    for names, short in (
        (["eng_Latn", "deu_Latn"], "deu_Latn"),
        (["__en__", "__de__"], "de"),
        ([">>en<<", ">>de<<"], "de"),
    ):
        (folder / "shared_vocabulary.json").write_text(json.dumps([*tokens[:-2], *names]))
        languages = load_model(folder, ("Transformer",))[1].languages
        assert languages is not None and languages.ids[short] == len(tokens) - 1
        assert (languages.places == "asked") == names[0].startswith(">>")


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_what_a_config_omits_is_as_in_ctranslate2(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(FOLDERS / name, tmp_path / name))
    tokens = json.loads((folder / "shared_vocabulary.json").read_text())
    if "<s>" not in tokens:
        tokens[5] = "<s>"
        (folder / "shared_vocabulary.json").write_text(json.dumps(tokens))
    usual: dict[str, Any] = {"eos_token": "</s>", "unk_token": "<unk>", "decoder_start_token": "<s>"}
    usual["layer_norm_epsilon"] = 1e-6 if name == "t5" else 1e-5
    other = {"eos_token": "t7", "unk_token": "t8", "decoder_start_token": "t9", "layer_norm_epsilon": 0.25}
    configs = []
    for settings in ({}, usual, other):
        (folder / "config.json").write_text(json.dumps(settings))
        configs.append(load_transformer(folder)[0].config)
    omitted, explicit, changed = configs
    assert omitted == explicit
    ids = changed.special_ids
    assert (ids.eos, ids.unk, changed.layer_norm_eps) == ((7,), 8, 0.25)
    starts = (tokens.index("<s>"), 9)
    if name == "marian":  # its decoder begins with a zero embedding, which is an id more
        starts = (len(tokens), len(tokens))
    assert (omitted.special_ids.start, ids.start) == starts


def test_a_vocabulary_without_padding_has_an_id_more(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS / "bart", tmp_path / "bart"))
    text = (folder / "shared_vocabulary.json").read_text()
    (folder / "shared_vocabulary.json").write_text(text.replace("<pad>", "pad"))
    model, whole = load_transformer(folder)[0], load_transformer(FOLDERS / "bart")[0]
    assert (model.config.special_ids.pad, whole.config.special_ids.pad) == (40, 1)
    source, target = torch.tensor([[5, 1, 9, 2]]), torch.tensor([[2, 7, 8]])  # the token is a word now
    logits = model.float()(source, target)
    assert logits[..., 40].max() < -9000 and logits.shape[-1] == 41


def test_a_folder_needs_a_tokenizer(folder: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        load_model(folder, ("Transformer",))
