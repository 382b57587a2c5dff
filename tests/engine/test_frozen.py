"""An error names how a model differs from its config; a model whose weights change is packed again."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import os
import re
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fastformer.engine import frozen
from fastformer.generation import generate, repack
from fastformer.generation.engines import cpp_support
from fastformer.generation.engines.cpp_support import why_not_supported
from fastformer.models import GPT, GPTConfig, Transformer
from fastformer.models.as_made import tensors_of
from fastformer.nn import MultiheadAttention
from fastformer.ops import use_backend
from tests.covering import each
from tests.engine.test_thread_team import in_child


def stamp(model: Any) -> frozen.Stamp:
    return frozen.stamp_of(model, tensors_of(model))


packed = functools.partial(frozen.packed, find=tensors_of)

SOURCES = torch.tensor([[5, 6, 7, 1], [9, 8, 1, 0]])


@pytest.fixture(autouse=True)
def extension(monkeypatch) -> None:
    monkeypatch.setattr(cpp_support, "why_no_cpp_engine", lambda: None)


def fresh(kind: str = "tied", **options: Any) -> Any:
    torch.manual_seed(2)
    if kind == "gpt":
        return GPT.from_preset(
            "tiny", **{"vocab_size": 20, "d_model": 16, "num_layers": 2, "num_heads": 2, **options}
        ).eval()
    settings = {"vocab_size": 20, "d_model": 16, "num_heads": 2, "d_ff": 24, "tie_embeddings": kind == "tied"}
    return Transformer.from_preset("tiny", **{**settings, **options}).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("tied", {}),
        ("untied", {"source_vocab_size": 30, "num_kv_heads": 1, "activation": "swiglu", "attention_bias": True}),
        ("tied", {"norm_first": False, "norm": "rms", "positions": "interleaved", "window_size": 2}),
        ("tied", {"output_bias": True, "positions": "halves", "embed_pad": True, "activation": "silu"}),
        ("untied", {"norm_first": False, "positions": "learned", "embedding_norm": True, "dropout": 0.3}),
        ("gpt", {"activation": "gelu_tanh", "bias": False, "tie_embeddings": False}),
        ("gpt", {"positions": "rotary", "num_kv_heads": 1, "norm": "rms"}),
        ("gpt", {"positions": "sinusoidal", "window_size": 3}),
    ],
)
def test_models_of_a_config_can_be_packed_in_each_precision(kind, options, dtype) -> None:
    state = torch.get_rng_state()
    model = fresh(kind, dtype=dtype, **options)
    drawn = torch.get_rng_state()
    assert [why_not_supported(model, p) for p in (None, "fp32", "bf16", "int8", "int4")] == [None] * 5
    assert "fp16" in str(why_not_supported(model, "fp16"))
    assert torch.equal(torch.get_rng_state(), drawn) and not torch.equal(drawn, state)
    for copied in (copy.deepcopy(model), model.quantize(), model.requires_grad_(False)):
        assert why_not_supported(copied, None) is None


def put(path: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Replaces an attribute of a submodule by a function of its old value."""

    def change(model: Any) -> None:
        *names, last = path.split(".")
        for name in names:
            model = model[int(name)] if name.isdigit() else getattr(model, name)
        setattr(model, last, value(getattr(model, last)))

    return change


class Wide(nn.Linear):
    """Another library's linear layer, such as an adapter."""

    def forward(self, input):  # noqa: A002
        return super().forward(input) * 1.5


def wide(linear: nn.Linear) -> Wide:
    made = Wide(linear.in_features, linear.out_features, linear.bias is not None)
    made.load_state_dict(linear.state_dict())
    return made


def hook(path: str, kind: str) -> Callable[[Any], object]:
    """Registers a hook that changes nothing."""
    return lambda model: getattr(model.get_submodule(path), f"register_{kind}_hook")(lambda *given: given[-1])


def old_weight_norm(model: Any) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.encoder.layers[0].linear2)


def own_method(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        setattr(model, name, types.MethodType(getattr(type(model), name), model))

    return change


def extra(model: Any) -> None:
    model.encoder.layers[0].adapter = nn.Linear(2, 2)


BIAS_KV: dict[str, Any] = {"bias": False, "batch_first": True, "add_bias_kv": True}
# Each with the place that the reason names, and what is wrong there.
CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (put("encoder.layers.0.linear1", wide), r"encoder\.layers\.0\.linear1\b.*Wide"),
    (
        lambda model: nn.utils.parametrizations.weight_norm(model.encoder.layers[0].linear2),
        r"encoder\.layers\.0\.linear2\b.*ParametrizedLinear",
    ),
    (old_weight_norm, r"encoder\.layers\.0\.linear2\b"),
    (hook("decoder.layers.1.norm3", "forward"), r"decoder\.layers\.1\.norm3\b.*hook"),
    (hook("encoder.layers.0", "forward_pre"), r"encoder\.layers\.0\b.*hook"),
    (hook("", "forward_pre"), r"hook"),
    (own_method("decode"), r"\bdecode\b"),
    (own_method("encode"), r"\bencode\b"),
    (own_method("logits"), r"\blogits\b"),
    (own_method("top_tokens"), r"\btop_tokens\b"),
    (put("decoder.layers.0.multihead_attn.forward", lambda old: old), r"layers\.0\.multihead_attn\b.*\bforward\b"),
    (lambda model: model.decoder.layers[1].dropout.train(), r"decoder\.layers\.1\.dropout\b.*model\.eval\(\)"),
    (lambda model: model.train(), r"model\.eval\(\)"),
    (extra, r"encoder\.layers\.0\b.*'adapter'"),
    (put("decoder.norm", lambda old: None), r"decoder\b.*'norm'"),
    (put("encoder.layers.0.self_attn", lambda old: MultiheadAttention(16, 2, **BIAS_KV)), r"\.self_attn\b.*\bbias_k\b"),
    (put("encoder.layers", lambda old: old[:1]), r"encoder\.layers\b.*'1'"),
    (put("encoder.layers.1.self_attn.window_size", lambda old: (1, 0)), r"\bwindow_size \(1, 0\).*\(None"),
    (put("encoder.layers.1.self_attn.add_zero_attn", lambda old: True), r"\badd_zero_attn True"),
    (put("encoder.layers.1.norm1.eps", lambda old: 0.1), r"encoder\.layers\.1\.norm1\b.*\beps 0\.1\b.*1e-06"),
    (put("embedding.scale", lambda old: 1.0), r"embedding\b.*\bscale 1\.0\b.*4\.0"),
    (put("embedding.scale", torch.tensor), r"embedding\b.*\bscale tensor\(4\.\)"),
    (put("embedding.padding_idx", lambda old: None), r"embedding\b.*\bpadding_idx None\b.*0"),
    (put("decoder.layers.0.norm_first", lambda old: False), r"\bnorm_first False\b.*True"),
    (put("decoder.layers.0.activation", lambda old: torch.tanh), r"\bactivation\b.*tanh.*'relu'"),
    (put("decoder.layers.0.activation", lambda old: "gelu"), r"\bactivation 'gelu'.*'relu'"),
    (put("encoder.layers.1.linear1.weight", lambda old: nn.Parameter(old.detach().double())), r"\bweight\b.*float64"),
    (put("encoder.layers.1.linear1.weight", lambda old: nn.Parameter(old.detach()[:3])), r"\bweight\b.*\(3, 16\)"),
    (put("encoder.layers.1.linear1.bias", lambda old: None), r"linear1\b.*\bbias\b"),
    (
        put("encoder.layers.1.linear1.bias", lambda old: nn.Parameter(old.detach().bfloat16())),
        r"linear1\.bias is bfloat16",
    ),
    (lambda model: model.half(), r"float16"),
    (lambda model: model.to("meta"), r"\bmeta\b"),
]


@each("change, reason", CHANGES)
def test_each_change_is_named(change, reason) -> None:
    model = fresh()
    assert why_not_supported(model, None) is None
    change(model)
    found = why_not_supported(model, None)
    assert found is not None
    assert re.search(reason, found), found


def test_an_activation_may_be_a_module() -> None:
    model = fresh()
    model.encoder.layers[0].activation = nn.ReLU()
    model.decoder.layers[1].activation = torch.relu
    assert why_not_supported(model, None) is None
    model.encoder.layers[0].activation = nn.GELU()
    assert "GELU" in str(why_not_supported(model, None))
    other = fresh(activation="gelu_tanh")
    other.encoder.layers[0].activation = nn.GELU(approximate="tanh")
    assert why_not_supported(other, None) is None
    other.encoder.layers[0].activation = nn.GELU()
    assert why_not_supported(other, None) is not None


def test_changed_models_that_still_decode_equal_their_modules() -> None:
    for change, _ in (*CHANGES[:7], CHANGES[17], *CHANGES[19:21]):
        model = fresh()
        change(model)
        assert torch.equal(
            generate(model, SOURCES, max_new_tokens=5), generate(model, SOURCES, max_new_tokens=5, engine="kv_cache")
        )


class OwnGPT(GPT):
    """A subclass of GPT."""


def test_other_models() -> None:
    config = GPTConfig(vocab_size=20, d_model=16, num_heads=2, num_layers=1)
    for model, name in ((OwnGPT(config), "OwnGPT"), (nn.Linear(2, 2), "Linear"), (None, "NoneType")):
        assert name in str(why_not_supported(model, None))
    changed = fresh("gpt")
    changed.config = dataclasses.replace(changed.config, num_layers=3)
    assert "num_layers 2" in str(why_not_supported(changed, None))
    changed.config.d_model = 15
    assert "d_model" in str(why_not_supported(changed, None))
    with pytest.raises(ValueError, match=r"\bprecision\b.*'int2'"):
        why_not_supported(fresh(), "int2")


def test_modes_around_a_call_do_not_change_the_packing(monkeypatch) -> None:
    model = fresh()
    for backend, packs in (("reference", False), ("triton", False), ("cpp", True)):
        with use_backend(backend):
            assert (why_not_supported(model, None) is None) == packs
    with FlopCounterMode(display=False):
        assert "TorchDispatchMode" in str(why_not_supported(model, None))
    with torch.autocast("cpu", torch.float16):
        assert "fp16" in str(why_not_supported(model, None))
        assert why_not_supported(model, "int8") is None and why_not_supported(model.quantize(), None) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert why_not_supported(model, None) is None
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    assert "global forward hook" in str(why_not_supported(model, None))
    handle.remove()
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    assert "global forward hook" in str(why_not_supported(model, None))
    handle.remove()
    with monkeypatch.context() as patch:
        patch.setattr(MultiheadAttention, "forward", lambda self, *args, **options: None)
        assert why_not_supported(model, None) is None  # the contract: a class is examined when it is handed over
        repack(model)
        assert "MultiheadAttention.forward" in str(why_not_supported(model, None))
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert "Linear.forward" in str(why_not_supported(model, None))
    assert why_not_supported(model, None) is None
    monkeypatch.setattr(cpp_support, "why_no_cpp_engine", lambda: "it is not built")
    assert why_not_supported(model, None) == "it is not built"


def test_parameters_of_inference_mode() -> None:
    with torch.inference_mode():
        assert why_not_supported(fresh(), None) is not None
        model = fresh()
    assert "inference mode" in str(why_not_supported(model, None))
    with torch.inference_mode():  # as generate is, the first time that it sees a config
        assert why_not_supported(fresh("untied", d_ff=25), None) is not None
    assert why_not_supported(fresh("untied", d_ff=25), None) is None


# The fingerprint, and what is kept under it.


def data_of(model: Any) -> torch.Tensor:
    return model.decoder.layers[1].linear2.weight.data


def load(model: Any) -> None:
    model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})


@torch.no_grad()
def add(model: Any) -> None:
    model.decoder.layers[0].norm1.bias.add_(1.0)


def optimize(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()


def transpose_data(model: Any) -> None:
    parameter = model.decoder.layers[0].self_attn.out_proj.weight  # a square
    parameter.data = parameter.data.T


WEIGHT_CHANGES: dict[str, Callable[[Any], object]] = {
    "load_state_dict": load,
    "in place": add,
    "optimizer": optimize,
    "data in place": lambda model: data_of(model).mul_(1.001),
    "data transposed": transpose_data,
    "data replaced": put("decoder.layers.1.linear2.weight.data", torch.clone),
    "parameter replaced": put("decoder.layers.1.linear2.weight", lambda old: nn.Parameter(old.detach().clone())),
    "shared parameter": put("decoder.layers.1.linear2.weight", lambda old: nn.Parameter(old.detach())),
    "module replaced": put("decoder.layers.1.linear2", copy.deepcopy),
    "layer replaced": put("encoder.layers.0", copy.deepcopy),
    "buffer": lambda model: model.embedding.position.table.mul_(2),
    "buffer's data": lambda model: model.embedding.position.table.data.mul_(2),
    "dtype": lambda model: model.bfloat16(),
}


@each("name", WEIGHT_CHANGES)
def test_each_change_of_weights_packs_again(name) -> None:
    model = fresh()
    made: list[int] = []

    def pack() -> list[int]:
        made.append(len(made))
        return [made[-1]]

    first = packed(model, "int8", pack)
    before = stamp(model)
    assert packed(model, "int8", pack) is first and stamp(model) == before
    generate(model, SOURCES, max_new_tokens=2)
    model.train()
    model.eval()
    assert packed(model, "int8", pack) is first
    WEIGHT_CHANGES[name](model)
    assert stamp(model) != before
    assert packed(model, "int8", pack) == [1] and packed(model, "int8", pack) == [1]


def test_a_model_that_is_no_longer_supported_is_an_error() -> None:
    """An engine that was chosen before reads the weights."""
    for change in (lambda model: setattr(model.config, "layer_norm_eps", 1e-3), hook("encoder", "forward"), extra):
        model = fresh()
        packed(model, "int8", lambda: 1)
        change(model)
        with pytest.raises(ValueError, match="engine was chosen"):
            packed(model, "int8", lambda: 2)


def test_each_precision_has_its_own_copy_and_a_failure_leaves_none() -> None:
    model = fresh()
    assert packed(model, "int8", lambda: "a") == "a" and packed(model, "fp32", lambda: "b") == "b"
    assert packed(model, "int8", lambda: "c") == "a" and packed(copy.deepcopy(model), "int8", lambda: "c") == "c"
    add(model)
    with pytest.raises(MemoryError):
        packed(model, "int8", Mock(side_effect=MemoryError))
    assert packed(model, "int8", lambda: "d") == "d"


@pytest.mark.parametrize("first", ["fp32", "int8", "bf16"])
def test_a_change_ages_the_copies_of_every_precision(first) -> None:
    model, names = fresh(), ["fp32", "int8", "bf16"]
    for name in names:
        packed(model, name, lambda: "old")
    add(model)
    assert [packed(model, name, lambda: "new") for name in (first, *names)] == ["new"] * 4


class Kept:
    """An object whose deletion can be observed."""


def test_a_packed_copy_is_freed_with_its_model_and_before_the_next_one() -> None:
    model = fresh()
    first = weakref.ref(packed(model, "int8", Kept))
    assert first() is not None
    add(model)

    def pack() -> Kept:
        assert first() is None, "there would be two"
        return Kept()

    second, gone = weakref.ref(packed(model, "int8", pack)), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and second() is None


def test_threads_share_a_copy_that_is_packed_once() -> None:
    model, made = fresh(), []
    barrier = threading.Barrier(4)

    def pack() -> object:
        made.append(1)
        threading.Event().wait(0.05)
        return object()

    def ask(_: int) -> object:
        barrier.wait()
        return packed(model, "bf16", pack)

    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(ask, range(4))]
    assert len(made) == 1 and len(set(map(id, found))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_is_not_stopped_by_a_lock_of_its_parent() -> None:
    model = fresh()

    def ask() -> None:
        assert packed(copy.copy(model), "int8", lambda: "child") == "child"

    def pack() -> str:
        in_child(ask)
        return "parent"

    assert packed(model, "int8", pack) == "parent"


@pytest.mark.parametrize("kind", ["tied", "gpt"])
def test_an_uncounted_write_to_a_part_is_not_noticed_before_repack(kind) -> None:
    model = fresh(kind, vocab_size=60)
    options: dict[str, Any] = {"max_new_tokens": 8}
    before, weight = generate(model, SOURCES[:1], **options), model.embedding.weight
    row = int(before[0, -8])
    weight.data[row] *= -1
    due = generate(model, SOURCES[:1], engine="kv_cache", **options)
    assert torch.equal(generate(model, SOURCES[:1], **options), before) and not torch.equal(before, due)
    repack(nn.ModuleList([model]))  # or what holds it
    assert torch.equal(generate(model, SOURCES[:1], **options), due)
    repack(model)  # more often than needed
    with pytest.raises(ValueError, match=r"\bmodel\b.*\bdict\b"):
        repack({})
