"""`generate` of accelerated models on a GPU runs on captured steps, and equals transformers' own.

On a CPU a graph is a tape here (tests/tape.py): what is decided while it is captured is decided for all replays.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from fastformer.cache import KVCache
from fastformer.engine.as_made import Made, why_not_as_made
from fastformer.generation import generate
from fastformer.generation.engines import graph as graph_module
from fastformer.integrations import accelerate, engine_models, from_huggingface, report
from fastformer.ops import record_backends
from tests.integrations import decoders
from tests.integrations.engine_calls import pair_of
from tests.integrations.test_engine_generate import SERVED, Listener
from tests.tape import TapeGraphs, as_gpu


@pytest.fixture(autouse=True)
def tapes(monkeypatch) -> TapeGraphs:
    return as_gpu(monkeypatch)


@pytest.mark.parametrize(
    "name", ["llama grouped heads", "gpt2 plain", "qwen3 wide heads", "gemma2 capped", "Marian real", "Bart real"]
)
def test_tokens_are_those_of_transformers(name, tapes):
    pair = pair_of(name, left=name in decoders.CASES)
    pair.check(max_new_tokens=20, do_sample=False)
    pair.check(max_new_tokens=9, num_beams=3, num_return_sequences=2, length_penalty=0.6, do_sample=False)
    assert pair.near_ties <= pair.rows // 10
    assert tapes.replays > 40 and tapes.captures <= tapes.warm_ups <= 8
    assert report(pair.ours).generate == {"": "by captured steps in fp32"}


@pytest.mark.parametrize("name", ["Marian real", "gpt2 plain"])
def test_options_have_transformers_meaning(name, tapes):
    pair = pair_of(name, left=name == "gpt2 plain")
    for key in ("least and most", "forbidden", "forced", "repetition", "n-grams", "a processor", "a criterion"):
        options = {"max_new_tokens": 8, "num_beams": 1, "do_sample": False} | SERVED[key]
        if "max_length" in options:
            del options["max_new_tokens"]
        pair.check(**options)
    found, expected = pair.both(max_new_tokens=12, **SERVED["sampled"])
    assert torch.equal(found, expected)  # the same generator draws from nearly the same numbers
    assert pair.near_ties <= pair.rows // 10 and tapes.replays > 50


@pytest.mark.parametrize("precision, dtype", [("int8", torch.bfloat16), ("int4", torch.float32)], ids=str)
def test_steps_read_rounded_weights(precision, dtype, tapes, tmp_path):
    """The tokens are those of this library's model of the same rounded numbers, in bf16."""
    pair_of("llama grouped heads", left=True).plain.save_pretrained(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    accelerate(ours, precision=precision)
    prompt = torch.tensor([[3, 9, 4, 7, 11]])
    with record_backends() as ran:
        found = ours.generate(prompt, max_new_tokens=12, do_sample=False)
    assert ("quantized_linear", "reference") in ran and tapes.replays > 4
    assert report(ours).generate == {"": f"by captured steps in {precision}"}
    rounded = from_huggingface(ours).bfloat16().quantize(precision)
    ends = ours.generation_config.eos_token_id
    expected = generate(rounded, prompt, engine="recompute", max_new_tokens=12, eos_token_id=ends)
    width = min(found.shape[1], expected.shape[1])
    assert (found[:, :width] == expected[:, :width]).float().mean() >= 0.75  # near ties of bf16


def test_the_next_call_finds_the_graphs_until_the_weights_change(tapes):
    pair = pair_of("gpt2 plain", left=True)
    for _ in range(2):
        found, expected = pair.both(max_new_tokens=12, do_sample=False)
        assert torch.equal(found, expected)
    before = tapes.captures
    pair.both(max_new_tokens=12, do_sample=False)
    assert tapes.captures == before
    for model in (pair.plain, pair.ours):
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.mul_(-1.0)
    changed, expected = pair.both(max_new_tokens=12, do_sample=False)
    assert torch.equal(changed, expected) and not torch.equal(changed, found)


@pytest.mark.parametrize("options", [{"do_sample": True, "top_k": 5}, {"num_beams": 3, "repetition_penalty": 1.2}])
def test_steps_of_transformers_loops_follow_a_whole_search(options):
    """Both use the cache that the model keeps."""
    pair = pair_of("gpt2 plain", left=True)
    for each in ({"num_beams": 3}, options, {}):
        found, expected = pair.both(**{"max_new_tokens": 8, "do_sample": False} | each)
        assert torch.equal(found, expected)


def test_a_streamer_gets_the_same_tokens(tapes):
    pair, told = pair_of("gpt2 plain", left=True), []
    inputs = {name: value[1:2] for name, value in pair.inputs.items()}
    for model in (pair.plain, pair.ours):
        listener = Listener()
        model.generate(**inputs, max_new_tokens=9, streamer=listener)
        told.append(listener.told)
    assert told[0] == told[1] and tapes.replays > 5


UNSERVED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "relative positions": ("T5 1.1", {}, {}),
    "compute in fp32": ("gpt2 plain", {"precision": "bf16"}, {}),
    "reads no drafts": ("gpt2 plain", {}, {"prompt_lookup_num_tokens": 2}),
    "use_cache=None": ("gpt2 plain", {}, {"use_cache": None}),
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_what_no_graph_holds_goes_transformers_way_and_the_log_says_why(reason, tapes, caplog):
    name, options, call = UNSERVED[reason]
    pair = pair_of(name, left=name == "gpt2 plain")
    accelerate(pair.ours, **options)
    pair.inputs = {name: value[:1] for name, value in pair.inputs.items()}
    with caplog.at_level(logging.DEBUG, "fastformer"):
        found, expected = pair.both(is_served=False, max_new_tokens=6, do_sample=False, **call)
    assert torch.equal(found, expected) and reason in caplog.text and not tapes.replays


def test_autocast_goes_transformers_way(caplog):
    pair = pair_of("gpt2 plain", left=True)
    with caplog.at_level(logging.DEBUG, "fastformer"), torch.autocast("cpu", torch.bfloat16):
        pair.both(is_served=False, max_new_tokens=4, do_sample=False)
    assert "autocast is on" in caplog.text


def test_no_copy_of_the_weights_takes_more_than_half_of_the_free_memory(monkeypatch, caplog):
    pair = pair_of("gpt2 plain", left=True)
    size = sum(parameter.nbytes for parameter in pair.ours.parameters())
    for free, is_served in ((size, False), (3 * size, True)):
        monkeypatch.setattr(engine_models, "free_bytes", lambda device, free=free: free)
        with caplog.at_level(logging.DEBUG, "fastformer"):
            pair.both(is_served=is_served, max_new_tokens=4, do_sample=False)
    assert caplog.text.count("more than half") == 1
    accelerate(pair.ours, precision="int8")  # rounding needs a second copy for a moment
    with caplog.at_level(logging.DEBUG, "fastformer"):
        pair.both(is_served=False, max_new_tokens=4, do_sample=False)
    assert caplog.text.count("more than half") == 2


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"repetition_penalty": 1.2}])
def test_a_call_whose_cache_does_not_fit_goes_transformers_way(options, monkeypatch, caplog):
    def full(*args: Any) -> KVCache:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pair = pair_of("gpt2 plain", left=True)
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, "fastformer"):
        patch.setattr(graph_module, "new_cache", full)
        found, expected = pair.both(**{"max_new_tokens": 6, "do_sample": False} | options)
    assert torch.equal(found, expected) and "no memory for its cache" in caplog.text
    found, expected = pair.both(**{"max_new_tokens": 6, "do_sample": False} | options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype, place, is_served", [("float16", "meta", True), ("float16", "cpu", False)])
def test_a_gpu_has_half_precision_while_the_cpp_engine_has_not(dtype, place, is_served):
    def make() -> torch.nn.Module:
        return torch.nn.Linear(4, 4, device="meta")

    made = Made(lambda module, name: False, lambda module, new: None, device=torch.device(place))
    reason = why_not_as_made(torch.nn.Linear(4, 4, device=place, dtype=getattr(torch, dtype)), make, made)
    assert (reason is None) == is_served
    assert "on meta" in (why_not_as_made(make(), make, replace(made, device=torch.device("cpu"))) or "")
