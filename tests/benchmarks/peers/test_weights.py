"""Other programs get fastformer's weights and give its tokens, for models without trivial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import ctranslate2, hugging_face
from benchmarks.peers.job import Missing, PeerJob
from benchmarks.peers.llama_cpp import tensors_of, write_gguf
from benchmarks.peers.ours import Ours
from fastformer.models import GPT, Transformer
from fastformer.special_ids import SpecialIds

SMALL = {"d_model": 32, "num_heads": 2, "d_ff": 48, "num_encoder_layers": 1, "num_decoder_layers": 2, "max_len": 64,
         "layer_norm_eps": 0.1}  # fmt: skip


def randomised(model):
    """Makes every parameter random, because biases of 0 and norms of 1 would hide omitted or swapped weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, scale, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()


def transformer(**options) -> Transformer:
    torch.manual_seed(0)
    return randomised(Transformer.from_preset("base", vocab_size=60, **SMALL, **options))


def gpt(**options) -> GPT:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "num_heads": 2, "num_layers": 2, "activation": "gelu_tanh", "layer_norm_eps": 0.1}
    return randomised(GPT.from_preset("tiny", vocab_size=60, **(sizes | options)))


def llama(**options) -> GPT:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "d_ff": 96, "layer_norm_eps": 0.1}
    form = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "bias": False}
    return randomised(GPT.from_preset("tiny", vocab_size=60, **(sizes | form | options)))


def peer(name: str, model, precision: str = "fp32") -> Any:
    pytest.importorskip(name, reason=f"not installed: pip install {name}")
    if name == "ctranslate2":
        return ctranslate2.CTranslate2(model, precision, 1, {})
    return hugging_face.HuggingFace(model, precision, 1, {})


def jobs(vocab_size: int = 60) -> list[PeerJob]:
    """Returns jobs for sources of several lengths in a batch, with and without an end, greedily and with beams of one
    length.
    """
    generator = torch.Generator().manual_seed(2)
    batch = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in (9, 3, 14, 1)]
    return [PeerJob([batch, batch[:1]], 1, 20), PeerJob([batch], 3, 10)]


OPTIONS = {
    "pre-norm": {},
    "post-norm": {"norm_first": False, "positions": "interleaved"},
    "untied": {"tie_embeddings": False},
    "biases": {"attention_bias": True},
}

# The run of slow tests installs CTranslate2.
NAMES = [pytest.param("ctranslate2", marks=pytest.mark.slow), "transformers"]

TARGETS = [[21, 8, 50, 33, 6, 11, 45], [14, 14, 59, 3, 27, 30, 8]]  # of one length: what was read before is any of them


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_equal_fastformers(name: str, options: dict) -> None:
    model = transformer(**options)
    ours = Ours(model, "fp32", torch.get_num_threads(), {})
    with torch.no_grad():
        model.output_weight[1] = 0.0  # no end, so that beams have one length
        if not model.config.tie_embeddings:
            model.target_embedding.weight[1] = 0.0
    rival = peer(name, model)
    for job in jobs():
        expected = ours.turn(job).tokens
        assert rival.turn(job).tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_fastformer_reads_the_folder_that_ctranslate2_reads(precision: str) -> None:
    rival = peer("ctranslate2", model := transformer(), precision)
    ours = ctranslate2.OursOfFolder(model, precision, torch.get_num_threads(), {})
    assert ours.model is not model and ours.model.precision == {"fp32": None, "int8": "int8"}[precision]
    expected = rival.turn(job := jobs()[0]).tokens
    assert expected is not None and sum(map(list.__eq__, ours.turn(job).tokens or [], expected)) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_outputs_end_with_their_end_token(name: str) -> None:
    model = transformer()
    # Of several ends that are likely the first that is said ends an output, and stands in it.
    tokens = Ours(model, "fp32", torch.get_num_threads(), {}).turn(jobs()[0]).tokens
    model.config.special_ids = SpecialIds(eos=tokens[0][4])
    expected = Ours(model, "fp32", torch.get_num_threads(), {}).turn(jobs()[0]).tokens
    assert expected[0][-1] == tokens[0][4] and len(expected[0]) <= 5
    assert peer(name, model).turn(jobs()[0]).tokens == expected


@pytest.mark.parametrize("make", [gpt, llama])
def test_gpts(make) -> None:
    model = make()
    job = PeerJob([[[5, 7, 9], [11, 4]], [[8]]], 1, 12)
    expected = Ours(model, "fp32", torch.get_num_threads(), {}).turn(job).tokens
    rival = peer("transformers", model)
    assert rival.turn(job).tokens == expected
    tokens = torch.tensor(TARGETS)
    with torch.no_grad():
        torch.testing.assert_close(rival.model(tokens).logits, model(tokens), atol=1e-4, rtol=1e-4)


def test_gguf_contains_each_weight_once(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="not installed: pip install gguf")
    model = gpt()
    for kind, error in (("F32", 0.0), ("Q8_0", 0.02)):
        file = tmp_path / f"{kind}.gguf"
        write_gguf(model, file, kind)
        tensors = {
            tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in gguf.GGUFReader(file).tensors
        }
        assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())
        layer = model.decoder.layers[1]
        for name, weight in {
            "token_embd.weight": model.embedding.weight,
            "position_embd.weight": model.embedding.position.table,
            "output_norm.bias": model.decoder.norm.bias,
            "blk.1.attn_norm.weight": layer.norm1.weight,
            "blk.1.attn_qkv.weight": layer.self_attn.in_proj_weight,
            "blk.1.attn_output.bias": layer.self_attn.out_proj.bias,
            "blk.1.ffn_norm.bias": layer.norm2.bias,
            "blk.1.ffn_up.weight": layer.linear1.weight,
            "blk.1.ffn_down.weight": layer.linear2.weight,
        }.items():
            stored = tensors[name].reshape(weight.shape)
            assert (stored - weight).abs().max() <= error * weight.abs().max()


def test_gguf_of_llama_turns_neighbours(tmp_path: Path) -> None:
    """Queries and keys of the file, with adjacent features rotated in pairs, give fastformer's scores."""
    gguf = pytest.importorskip("gguf", reason="not installed: pip install gguf")
    model = llama()
    write_gguf(model, tmp_path / "model.gguf", "F32")
    tensors = {t.name: torch.from_numpy(t.data.copy()) for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())
    layer = model.decoder.layers[1]
    q, k, v = layer.self_attn.in_proj_weight.detach().split([64, 32, 32])
    assert torch.equal(tensors["blk.1.attn_v.weight"], v)
    assert torch.equal(tensors["blk.1.ffn_gate.weight"], layer.linear1.weight[:96])
    assert torch.equal(tensors["blk.1.ffn_up.weight"], layer.linear1.weight[96:])
    assert torch.equal(tensors["blk.1.ffn_norm.weight"], layer.norm2.weight)
    cos, sin = (table[3].repeat_interleave(2)[:, None] for table in (model.rotary.cos, model.rotary.sin))
    x, sign = torch.randn(64, generator=torch.Generator().manual_seed(1)), torch.tensor([-1.0, 1.0] * 8)[:, None]
    for name, ours in (("q", q), ("k", k)):
        half, pairs = ours.view(-1, 2, 8, 64) @ x, tensors[f"blk.1.attn_{name}.weight"].view(-1, 16, 64) @ x
        swapped = pairs.view(-1, 8, 2).flip(-1).flatten(1)
        turned = pairs * cos[:, 0] + swapped * sign[:, 0] * sin[:, 0]
        c, s = model.rotary.cos[3], model.rotary.sin[3]
        expected = torch.stack([half[:, 0] * c - half[:, 1] * s, half[:, 1] * c + half[:, 0] * s], -1).flatten(1)
        torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama, {"window_size": 3}),
        (llama, {"tie_embeddings": False}),
        (llama, {"activation": "geglu_tanh"}),
        (gpt, {"activation": "gelu"}),
        (gpt, {"positions": "rotary"}),
        (gpt, {"bias": False}),
        (gpt, {"num_kv_heads": 1}),
    ],
)
def test_a_gguf_of_another_form_is_refused(make, options: dict) -> None:
    with pytest.raises(Missing, match=next(iter(options))):
        tensors_of(make(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "rms"},
        {"window_size": 3},
        {"num_kv_heads": 1},
        {"activation": "swiglu"},
        {"positions": "relative"},
        {"scale_output": True},
        {"bias": False},
    ],
)
def test_unmapped_memory_is_refused(options: dict, tmp_path: Path) -> None:
    model = transformer(**options)
    with pytest.raises(Missing, match="conversion"):
        ctranslate2.convert(model, tmp_path / "model", "float32")
    with pytest.raises(Missing, match="conversion"):
        hugging_face.convert(model)
