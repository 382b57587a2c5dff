"""torch.onnx exports fastformer's modules and accelerated models like plain ones, and onnxruntime computes the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fastformer
import fastformer.nn as fnn
from fastformer import ops

_WHY = "ONNX is exported and run with it (the extra `dev` has it)"
pytest.importorskip("onnxscript", reason=_WHY)
onnxruntime: Any = pytest.importorskip("onnxruntime", reason=_WHY)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
exporters = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "tracing"])

X, Y = (torch.randn(2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (5, 7))
REAL = torch.arange(5) < torch.tensor([[5], [3]])
CAUSAL = torch.ones(5, 5).triu(1).bool()
IDS = torch.randint(5, 60, (2, 5), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
DECODERS = SIZES | {"num_key_value_heads": 1}
BART = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 1}  # fmt: skip
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}


class CallModule(nn.Module):
    """A module with one kind of call, whose arguments are all tensors."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.call(self.module, *inputs)
        return out if isinstance(out, Tensor) else out[0]


def run(file: Path, inputs: tuple[Tensor, ...]) -> Tensor:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    read = {argument.name for argument in session.get_inputs()}  # without those that the graph doesn't use
    named = {f"x{i}": x.numpy() for i, x in enumerate(inputs) if f"x{i}" in read}
    return torch.from_numpy(session.run(None, named)[0])


def exported(file: Path, module: Any, inputs: tuple[Tensor, ...], dynamo: bool, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the older exporter, about constants in a trace
        names = [f"x{i}" for i in range(max(1, len(inputs)))]
        torch.onnx.export(module, inputs, file, dynamo=dynamo, verbose=False, input_names=names, **options)
    return file


def modules(package: Any) -> dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[Tensor, ...]]]:
    """Returns by name a function that makes a module of `package`, a call of it, and the arguments."""

    def layer(**options: Any) -> nn.Module:
        return package.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)

    def encoder(**options: Any) -> nn.Module:
        return package.TransformerEncoder(layer(**options), 1, enable_nested_tensor=False)

    def decoder() -> nn.Module:
        return package.TransformerDecoder(package.TransformerDecoderLayer(16, 4, 32, batch_first=True), 1)

    return {
        "encoder": (encoder, lambda m, x: m(x), (X,)),
        "causal": (lambda: encoder(norm_first=True), lambda m, x, mask: m(x, mask, is_causal=True), (X, CAUSAL)),
        "masked": (lambda: encoder(activation="gelu"), lambda m, x, mask: m(x, mask.float()), (X, CAUSAL)),
        "layer": (layer, lambda m, x, mask: m(x, mask), (X, CAUSAL)),
        "decoder": (decoder, lambda m, x, y, mask: m(x, y, mask), (X, Y, CAUSAL)),
        "both": (lambda: package.Transformer(16, 4, 1, 1, 32, batch_first=True), lambda m, x, y: m(x, y), (X, Y)),
        "attention": (
            lambda: package.MultiheadAttention(16, 4, add_bias_kv=True, add_zero_attn=True, batch_first=True),
            lambda m, x, y: m(x, y, y, need_weights=False),
            (X, Y),
        ),
        "weights": (lambda: package.MultiheadAttention(16, 4), lambda m, x: m(x, x, x)[1], (X,)),
    }


def ours() -> dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[Tensor, ...]]]:
    """Returns the modules that torch.nn has no equivalent for."""
    options: dict[str, Any] = {"norm": "rms", "num_kv_heads": 2, "window_size": (2, 1)}
    return {
        "window": (
            lambda: fnn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options), lambda m, x: m(x), (X,)
        ),
        "gpt": (lambda: fastformer.GPT.from_preset("tiny", vocab_size=60), lambda m, ids: m(ids), (IDS,)),
        "loss": (
            nn.Identity, lambda m, x, y: ops.linear_cross_entropy(x.flatten(0, 1), y[0], torch.arange(10) % 7), (X, Y)
        ),
    }  # fmt: skip


CASES = {f"{place}: {name}": case for place, package in (("ours", fnn), ("accelerated", nn))
         for name, case in modules(package).items()} | ours()  # fmt: skip


def made(make: Callable[[], nn.Module], call: Callable[..., Any]) -> CallModule:
    torch.manual_seed(0)
    module = make()
    fastformer.accelerate(module)
    return CallModule(module, call).eval()


QUICK = ("ours: causal", "ours: weights", "accelerated: decoder")


@pytest.mark.parametrize(
    ("name", "dynamo"),
    [
        pytest.param(name, dynamo, marks=() if name in QUICK and not dynamo else pytest.mark.slow)
        for name in CASES
        for dynamo in (False, True)
    ],
)
def test_modules(name, dynamo, tmp_path):
    """The slow cases cover every module with both exporters: they differ in the attributes of fastformer's ops."""
    module, inputs = made(*CASES[name][:2]), CASES[name][2]
    torch.testing.assert_close(run(exported(tmp_path / "m.onnx", module, inputs, dynamo), inputs), module(*inputs))


MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "bart": ("BartModel", BART, True),
    "bert": ("BertModel", SIZES, False),
    "distilbert": ("DistilBertModel", {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2}, False),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 2}, False),
    "llama": ("LlamaForCausalLM", DECODERS, False),
    "marian": ("MarianModel", BART, True),
    "qwen2": ("Qwen2ForCausalLM", DECODERS, False),
    "t5": ("T5Model", T5, True),
}


@pytest.mark.parametrize(
    ("family", "dynamo"),
    [
        pytest.param(family, dynamo, marks=() if (family, dynamo) == ("bert", False) else pytest.mark.slow)
        for family in MODELS
        for dynamo in (True, False)
    ],
)
def test_accelerated_models(family, dynamo, tmp_path):
    """Compares real tokens; a graph computes padding, too. The slow cases cover every family with both exporters."""
    if family == "t5" and dynamo:
        pytest.skip("PyTorch's exporter refuses transformers' T5 as it is, too")
    name, sizes, has_decoder = MODELS[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**sizes)).eval()
    fastformer.accelerate(model)
    model.config.use_cache = False

    def call(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        decoder_inputs = {"decoder_input_ids": ids} if has_decoder else {}
        return model(input_ids=ids, attention_mask=mask, **decoder_inputs)[0]

    module, inputs = CallModule(model, call).eval(), (IDS, REAL.long())
    output = run(exported(tmp_path / "m.onnx", module, inputs, dynamo), inputs)
    real = torch.ones_like(REAL) if has_decoder else REAL
    torch.testing.assert_close(output[real], module(*inputs)[real], atol=2e-5, rtol=2e-5)


def test_a_graph_serves_other_sizes(tmp_path):
    module = made(*CASES["ours: encoder"][:2])
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen")}
    program = torch.export.export(module, (X,), dynamic_shapes={"inputs": (dims,)})
    file = exported(tmp_path / "m.onnx", program, (), True)
    other = torch.randn(3, 9, 16)
    torch.testing.assert_close(run(file, (other,)), module(other))


@pytest.mark.slow
@exporters
def test_dropout_in_training_is_in_the_graph(dynamo, tmp_path):
    """Elements are dropped as often as in training, and the others scaled."""
    values = torch.eye(64)[None, :, None].expand(2, 64, 4, 64).contiguous()
    inputs = torch.zeros(2, 64, 4, 64), torch.ones(2, 64, 4, 64), values
    module = CallModule(nn.Identity(), lambda _, q, k, v: ops.attention(q, k, v, dropout_p=0.25)).train()
    options = {} if dynamo else {"training": torch.onnx.TrainingMode.TRAINING}
    output = run(exported(tmp_path / "m.onnx", module, inputs, dynamo, **options), inputs)
    nonzero = output[output != 0]
    assert 0.7 < len(nonzero) / output.numel() < 0.8
    torch.testing.assert_close(nonzero * 64, torch.full_like(nonzero, 4 / 3))
