"""The engine "graph" reads a quantised model's weights in int8 and int4 on a GPU, and gives its tokens.

On a CPU a graph is a tape here (tests/tape.py), and the product of int8 the reference or Triton's interpreter.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fastformer.data import ByteTokenizer
from fastformer.engine.frozen import repack
from fastformer.generation import Generator, Translator, generate
from fastformer.generation.engines import choose_engine, rounded_for_steps
from fastformer.generation.engines import graph as graph_module
from fastformer.generation.engines.base import Prompt
from fastformer.generation.engines.cpp import CppEngine
from fastformer.generation.folder_options import load_language_model
from fastformer.models import GPT
from fastformer.models.quantization import quantized_weights
from fastformer.ops import _extension, record_backends, use_backend
from fastformer.ops.quantized_linear import QuantizedWeights
from tests.covering import by_turns
from tests.generation.weights import CONFIGS, drawn
from tests.no_sync import NoSync
from tests.tape import TapeGraphs, as_gpu

pytestmark = pytest.mark.skipif(_extension.module() is None, reason="no C++ extension for this CPU")

SOURCES = [[3, 5, 7], [9, 4, 11, 6, 8], [10]]
SAMPLED = {"do_sample": True, "top_k": 5}


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> TapeGraphs:
    monkeypatch.setattr(CppEngine, "why_unsupported", classmethod(lambda *_: "the model is on a GPU"))
    return as_gpu(monkeypatch)


def quantized(name: str, precision: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    kind, options = CONFIGS[name]
    return drawn(kind, **options).to(dtype).quantize(precision)


def decoded(
    model: Any, sources: list[list[int]] = SOURCES, steps: int = 8, **options: Any
) -> tuple[list[list[int]], set[str]]:
    """Returns the new tokens, and the backends of the products of whole numbers."""
    with record_backends() as ran:
        out = generate(model, sources, max_new_tokens=steps, min_new_tokens=steps, **options)
    return out.tolist(), {backend for op, backend in ran if op == "quantized_linear"}


@pytest.mark.parametrize(
    "name, precision, way",
    by_turns(["gpt", "llama", "transformer", "two vocabularies"], ["int8", "int4"], [{}, {"num_beams": 3}, SAMPLED]),
)
def test_tokens_are_those_of_the_rounded_weights(name, precision, way, tapes) -> None:
    model, found = quantized(name, precision), []
    for engine in (None, "graph", "kv_cache"):
        torch.manual_seed(0)
        found.append(decoded(model, engine=engine, **way))
    (tokens, ran), named, (by_weights, none) = found
    assert ran == {"reference"} and none == set() and named == (tokens, ran) and tapes.replays > 4
    same = sum(a == b for a, b in zip(sum(tokens, []), sum(by_weights, []), strict=True))
    assert same >= 0.75 * len(sum(tokens, []))  # near ties of bf16
    assert choose_engine(model, precision=precision).name == "graph"


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"num_beams": 2, "suppress_tokens": [5]}, SAMPLED], ids=str)
def test_the_host_never_waits(way, monkeypatch) -> None:
    monkeypatch.setattr(graph_module, "Graphs", lambda device: NoSyncGraphs("cpu"))
    assert decoded(quantized("gpt", "int8"), **way)[1] == {"reference"}


class NoSyncGraphs(TapeGraphs):
    """Graphs whose steps may not make the host wait."""

    def warm_up(self, step: Any) -> None:
        def checked() -> None:
            with NoSync():
                step()

        super().warm_up(checked)


def test_the_host_chooses_by_them_too(monkeypatch) -> None:
    """Rows with options of their own, and transformers' loops: the copy of the last matrix gives 0 here."""

    def without_output(model: Any) -> QuantizedWeights:
        copies = quantized_weights(model)
        matrix = copies.find(model.output_weight)
        assert matrix is not None
        matrix.scale.zero_()
        return copies

    monkeypatch.setattr(graph_module, "quantized_weights", without_output)
    model = quantized("llama", "int8")
    assert all(set(row[-8:]) == {5} for row in decoded(model, suppress_tokens=[*range(5)], repetition_penalty=1.3)[0])
    with torch.inference_mode():
        batch: Any = choose_engine(model).open(2, 64)
        batch.prefill([Prompt(None, [3, 4, 5]), Prompt(None, [6, 7])])
        assert (batch.logits([5, 7]) == 0).all()


@pytest.mark.parametrize("change", ["a write", "another weight", "a write that nothing counts"])
def test_changed_weights_are_copied_again(change, tapes) -> None:
    model = quantized("gpt", "int8")
    before, weight = decoded(model)[0], model.decoder.layers[0].linear2.weight
    captures = tapes.captures
    assert decoded(model)[0] == before and tapes.captures == captures
    with torch.no_grad():
        if change == "a write":
            weight.mul_(-2)
        elif change == "another weight":
            model.decoder.layers[0].linear2.weight = nn.Parameter(-2 * weight)
        else:
            weight.data.mul_(-2)
            repack(model)
    changed, ran = decoded(model)
    assert changed != before and ran == {"reference"} and tapes.captures > captures
    assert changed == decoded(copy.deepcopy(model))[0]


def test_an_open_batch_reads_changed_weights() -> None:
    """A generator or a server opens one batch for all of its calls."""
    model = quantized("gpt", "int8")
    generator = Generator(model)
    options: Any = {"max_new_tokens": 8, "min_new_tokens": 8}
    before = generator.generate(SOURCES, **options)
    with torch.no_grad():
        model.decoder.layers[0].linear2.weight.mul_(-2)
    changed = generator.generate(SOURCES, **options)
    assert not torch.equal(changed, before) and torch.equal(
        changed, Generator(copy.deepcopy(model)).generate(SOURCES, **options)
    )


def test_a_call_in_the_dtype_reads_the_weights() -> None:
    model = quantized("gpt", "int8")
    assert decoded(model)[1] == {"reference"}
    assert decoded(model, precision="bf16", engine="graph")[1] == set()


def test_a_model_is_freed_with_its_copies() -> None:
    model = quantized("gpt", "int4")
    decoded(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("what", ["fp32", "NaN", "a cpu", "not quantised", "other engine", "no kernel"])
def test_other_models_decode_by_their_weights(what, monkeypatch) -> None:
    model = quantized("gpt", "int8", torch.float32 if what == "fp32" else torch.bfloat16)
    if what == "NaN":
        model.decoder.layers[0].linear1.weight.data[3, 4] = float("nan")
    elif what == "no kernel":
        monkeypatch.setattr(graph_module, "why_no_kernel", lambda weight: "the GPU is too old")
    elif what == "a cpu":
        monkeypatch.setattr(graph_module, "DEVICES", ())
    elif what == "not quantised":
        model.precision = None
    engine = "kv_cache" if what == "other engine" else "graph"
    if what == "NaN":
        with pytest.raises(ValueError, match="NaN"), record_backends() as seen:
            decoded(model, engine=engine)
        assert not any(op == "quantized_linear" for op, _ in seen)
        return
    found, ran = decoded(model, engine=engine)
    assert ran == set() and found == decoded(model, engine="recompute")[0]


def test_a_precision_that_steps_lack_is_refused() -> None:
    for model, precision in (
        (quantized("gpt", "int8", torch.float32), "int8"),
        (quantized("gpt", "int8"), "int4"),
        (drawn(GPT, **CONFIGS["gpt"][1]).bfloat16(), "int8"),
    ):
        with pytest.raises(ValueError, match=f"quantize.*{precision}"):
            choose_engine(model, precision=precision)


def test_a_folder_in_int8_that_is_asked_for_int4_is_rounded_again() -> None:
    model = quantized("gpt", "int8")
    assert rounded_for_steps(model, "int8") is model and rounded_for_steps(model, None) is model
    assert rounded_for_steps(model, "int4").precision == "int4"


@pytest.mark.parametrize("precision, dtype", [("int8", torch.float32), ("int4", torch.float16)], ids=str)
def test_a_folder_is_rounded_when_it_is_loaded(precision, dtype, tmp_path) -> None:
    """As `quantize` rounds it; in bf16 if it was saved in fp32."""
    tokenizer = ByteTokenizer()
    for name in ("gpt", "transformer"):
        kind, options = CONFIGS[name]
        model = drawn(kind, **options | {"vocab_size": tokenizer.vocab_size}).to(dtype)
        folder = tmp_path / name
        model.save_pretrained(folder, tokenizer)
        if name == "gpt":
            loaded, *_ = load_language_model(folder, {"max_new_tokens": 4}, (), None, precision)
        else:
            loaded = Translator.from_pretrained(folder, precision=precision).model
        kept = torch.bfloat16 if dtype == torch.float32 else dtype
        expected = model.to(kept).quantize(precision)
        assert loaded.precision == precision and loaded.output_weight.dtype == kept
        assert torch.equal(loaded.output_weight, expected.output_weight)
        assert choose_engine(loaded, precision=precision).name == "graph"


def test_steps_of_triton_kernels_give_the_same_tokens() -> None:
    pytest.importorskip("triton")
    model = quantized("gpt", "int8", torch.float16)
    with use_backend("reference"):
        expected = decoded(model, SOURCES[:2], 3)[0]
    with use_backend("triton"):  # without the graphs of the first call
        assert decoded(copy.deepcopy(model), SOURCES[:2], 3) == (expected, {"triton"})
