"""Checks the declarations of cases; in every case, all providers agree at a tiny shape, and costs are counted."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases.models import bench_training_step
from benchmarks.cases.models.bench_modules import call, lengths_of, module_of
from benchmarks.cases.models.recompute_engines import RECOMPUTING
from benchmarks.measure.case import Benchmark, Inputs, Shape, results
from benchmarks.measure.checking import verdicts_of
from benchmarks.measure.execute import Outcome
from benchmarks.measure.suites import benchmarks
from fastformer.generation import generate
from fastformer.models import GPT, Transformer
from tests.benchmarks.running import run_case
from tests.benchmarks.test_run import SHAPE, TOY, square
from tests.covering import each


def cube(x: Inputs, shape: Shape) -> torch.Tensor:
    return x["x"] ** 3


def run(benchmark: Benchmark) -> Outcome:
    return run_case(benchmark, SHAPE, "fwdbwd")


def test_a_case_may_ask_several_questions() -> None:
    both = dataclasses.replace(TOY, providers={**TOY.providers, "cube": cube})
    assert list(run(both).wrong) == ["cube"]
    outcome = run(dataclasses.replace(both, oracles={"cube": lambda x, shape: x["x"] * x["x"] * x["x"]}))
    assert not outcome.wrong and [row["provider"] for row in outcome.rows] == ["fastformer", "power", "cube"]
    assert list(run(dataclasses.replace(both, oracles={"cube": square, "fastformer": square})).wrong) == ["cube"]
    # The one that ratios are against may have an answer to be held to, too.
    assert list(run(dataclasses.replace(both, oracles={"cube": cube, "power": cube})).wrong) == ["power"]


def test_an_omitted_provider_is_named_with_its_reason() -> None:
    def left_out(provider: str, shape: Shape) -> str | None:
        return "4 GiB of scores" if provider == "plain" and shape["rows"] > 4 else None

    case = dataclasses.replace(TOY, providers={**TOY.providers, "plain": cube}, left_out=left_out)
    outcome = run(case)
    assert [row["provider"] for row in outcome.rows] == ["fastformer", "power"]
    assert outcome.refused == {"plain": "4 GiB of scores"} and not outcome.wrong  # it is neither run nor checked
    shorter = run_case(case, {"rows": 4})
    assert list(shorter.wrong) == ["plain"] and not shorter.refused


def tiny_shapes() -> list[tuple[str, dict[str, Any]]]:
    """Returns, for each case, a shape that takes no time, with every option of its shapes."""
    modules = [
        (name + suffix, {"batch": 4, "seqlen": 14, "dim": 32, "heads": 4, "padding": padding, **options})
        for name in ("multihead_attention", "encoder_layer", "decoder_layer", "encoder", "decoder")
        for suffix, padding, options in (
            ("", "half", {}),
            ("_training", "none", {"dropout_p": 0.0}),
            ("_training", "half", {"dropout_p": 0.1}),
        )
    ]
    scaling = {"heads": 2, "head_dim": 64, "window": 127, "materialised": True}
    heads = {"batch": 3, "seqlen": 33, "heads": 2, "head_dim": 16}
    return [
        ("scaling", {"seqlen": 300, **scaling}),  # longer than the window
        ("scaling_lstm", {"seqlen": 5, "width": 16}),
        *modules,
        *(
            (name, {"dim": 16, "layers": 2, "heads": 2, "batch": 2, "seqlen": 5, "threads": 1, **options})
            for name, options in (("small_work", {}), ("small_work_training", {"dropout_p": 0.1}))
        ),
        *(("attention", heads | {"causal": causal, "dropout_p": 0.0}) for causal in (True, False)),
        *(("masked_attention", heads | {"mask": mask}) for mask in ("bool_keys", "additive")),
        *(("packed_attention", heads | {"causal": causal}) for causal in (True, False)),
        *(("add_layer_norm", {"rows": 5, "dim": 16, "dropout_p": p}) for p in (0.0, 0.1)),
        ("feed_forward", {"rows": 5, "dim": 16, "hidden_dim": 64, "activation": "gelu", "dropout_p": 0.0}),
        ("linear_cross_entropy", {"rows": 12, "dim": 16, "vocab_size": 40}),
        ("embedding", {"batch": 2, "seqlen": 5, "dim": 16, "vocab_size": 40, "dropout_p": 0.0}),
        ("rotary", heads),
        *(("linear_topk", {"rows": 4, "dim": 16, "vocab_size": 40, "k": k}) for k in (1, 8)),
        *(
            ("decode_attention", {"batch": 4, "beams": b, "seqlen": 20, "heads": 4, "kv_heads": 2, "head_dim": 16})
            for b in (0, 2)
        ),
        (
            "decoding_batches",
            {"preset": "tiny", "batch": 2, "source": 8, "new_tokens": 4, "num_beams": 1, "threads": 2},
        ),
    ]


@each("name, shape", tiny_shapes())
def test_all_providers_of_a_case_agree(name: str, shape: dict[str, Any]) -> None:
    """Functions made by torch.compile, which take seconds each, are left to the runner, which checks them before it
    times them.
    """
    case = benchmarks()[name]
    assert shape.keys() == (case.shapes.get("cpu") or case.shapes["cuda"])[0].keys()
    eager = {name: call for name, call in case.offered("cpu").items() if name not in case.compiled}
    for mode in case.modes:
        verdicts = verdicts_of(case, eager, shape, mode, torch.float32, "cpu")
        assert not verdicts.wrong and not verdicts.refused and verdicts.backends.keys() == eager.keys()
        if case.suite != "decoding":  # whose engines are all ours
            for provider, backends in verdicts.backends.items():
                if backends.get("linear") == "torch":  # so small a product is always PyTorch's
                    del backends["linear"]
                assert set(backends.values()) == ({"reference"} if provider.endswith("reference") else {"cpp"}) or (
                    not backends and not provider.startswith("fastformer")
                )


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["equal", "multi30k"])
def test_all_models_have_one_loss(lengths: str) -> None:
    case = benchmarks()["loss"]
    eager = {name: call for name, call in case.offered("cpu").items() if name not in case.compiled}
    verdicts = verdicts_of(case, eager, {"lengths": lengths, "sentences": 2}, "fwd", torch.float32, "cpu")
    bench_training_step._evaluated.cache_clear()
    assert not verdicts.wrong and not verdicts.refused and len(verdicts.backends) == 3


def counted(name: str, provider: str, shape: dict[str, Any], mode: str) -> float:
    """Returns the count of torch's FlopCounterMode for one call of a provider."""
    case = benchmarks()[name]
    inputs = case.make_inputs(shape, "cpu")
    with FlopCounterMode(display=False) as counter:
        if mode == "step":  # the counter's hooks on modules can't bear autograd.grad of parameters
            module = module_of(provider, name.removesuffix("_training"), inputs, shape, training=True)
            call(provider, name.removesuffix("_training"), module, inputs, shape).backward(inputs["dout"])
        else:
            results(case.providers[provider], inputs, shape, mode, None)
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    "name, shape",
    [
        ("attention", {"batch": 2, "seqlen": 9, "heads": 2, "head_dim": 16, "causal": False, "dropout_p": 0.0}),
        ("feed_forward", {"rows": 5, "dim": 16, "hidden_dim": 64, "activation": "relu", "dropout_p": 0.0}),
        ("linear_topk", {"rows": 4, "dim": 16, "vocab_size": 40, "k": 8}),
        ("decode_attention", {"batch": 4, "beams": 0, "seqlen": 20, "heads": 4, "kv_heads": 2, "head_dim": 16}),
        *(
            (name + suffix, {"batch": 2, "seqlen": 6, "dim": 32, "heads": 4, "padding": "none", **options})
            for name in ("multihead_attention", "encoder_layer", "encoder")
            for suffix, options in (("", {}), ("_training", {"dropout_p": 0.0}))
        ),
    ],
    ids=str,
)
def test_arithmetic_equals_a_counters_result(name: str, shape: dict[str, Any]) -> None:
    case = benchmarks()[name]
    for mode in {"fwd", "fwdbwd", "step"} & set(case.modes):
        assert case.flops(shape, mode) == counted(name, "fastformer", shape, mode), mode


def test_arithmetic_omits_useless_work() -> None:
    """Useless are the triangle that a causal mask hides, ignored targets, and padding."""
    cases = benchmarks()
    attention = {"batch": 1, "seqlen": 3, "heads": 1, "head_dim": 1, "causal": True, "dropout_p": 0.0}
    # As the published charts count it.
    assert [cases["attention"].flops(attention, mode) for mode in ("fwd", "bwd")] == [4 * 9 / 2, 2.5 * 4 * 9 / 2]
    lengths = {"batch": 2, "seqlen": 8, "heads": 3, "head_dim": 5}  # 8 and 6
    masked, packed = cases["masked_attention"], cases["packed_attention"]
    assert masked.flops(lengths | {"mask": "bool_keys"}, "fwd") == 4 * 3 * 5 * 8 * (8 + 6)
    assert masked.flops(lengths | {"mask": "additive"}, "bwd") == 10 * 3 * 5 * 8 * (8 + 8)
    for causal in (False, True):
        assert packed.flops(lengths | {"causal": causal}, "fwd") == 4 * 3 * 5 * (64 + 36) / (1 + causal)
    entropy = {"rows": 21, "dim": 2, "vocab_size": 5}
    ignored = int((cases["linear_cross_entropy"].make_inputs(entropy, "cpu")["target"] == -100).sum())
    assert cases["linear_cross_entropy"].flops(entropy, "fwdbwd") == 6 * (21 - ignored) * 2 * 5 and ignored == 3
    half = {"batch": 2, "seqlen": 8, "dim": 16, "heads": 2, "padding": "half"}
    assert lengths_of(half) == [2, 6]
    assert cases["encoder_layer"].flops(half, "fwd") == 2 * 8 * 12 * 16**2 + 4 * (4 + 36) * 16
    assert cases["decoder_layer"].flops(half, "fwd") == 2 * 8 * 16 * 16**2 + 6 * (4 + 36) * 16


def test_bytes_equal_the_tensors() -> None:
    """All inputs and outputs count once."""
    cases = benchmarks()

    def of(*sizes: tuple[int, ...]) -> int:
        return sum(4 * math.prod(size) for size in sizes)

    rows, w1 = (5, 16), (64, 16)
    shape: dict[str, Any] = {"rows": 5, "dim": 16, "hidden_dim": 64, "activation": "relu", "dropout_p": 0.0}
    moved = cases["feed_forward"].moved
    assert moved(shape, "fwd", 4) == of(rows, w1, w1, rows)
    assert moved(shape, "fwdbwd", 4) - moved(shape, "fwd", 4) == of(rows, rows, rows, *[w1] * 4)
    shape = {"batch": 2, "seqlen": 5, "dim": 16, "vocab_size": 40, "dropout_p": 0.1}
    moved = cases["embedding"].moved
    assert moved(shape, "fwd", 4) == of((2, 5, 16), (2, 5, 16))
    assert moved(shape, "fwdbwd", 4) - moved(shape, "fwd", 4) == of((2, 5, 16), (40, 16))
    heads = {"batch": 2, "seqlen": 8, "heads": 3, "head_dim": 5}
    q = (16, 3, 5)
    assert cases["masked_attention"].moved(heads | {"mask": "additive"}, "fwd", 4) == of(*[q] * 4, (3, 8, 8))
    assert cases["masked_attention"].moved(heads | {"mask": "bool_keys"}, "bwd", 4) == of(*[q] * 8) + 2 * 8
    assert cases["packed_attention"].moved(heads | {"causal": True}, "fwd", 4) == of(*[(14, 3, 5)] * 4)
    shape = {"rows": 12, "dim": 16, "vocab_size": 40}
    assert cases["linear_cross_entropy"].moved(shape, "fwdbwd", 4) == 2 * of((12, 16), (40, 16))
    moved = cases["add_layer_norm"].moved
    for p, gradients in ((0.1, 2), (0.0, 1)):
        shape = {"rows": 5, "dim": 16, "dropout_p": p}
        assert moved(shape, "fwd", 4) == of(*[rows] * 4) and moved(shape, "bwd", 4) == of(*[rows] * (3 + gradients))
        assert moved(shape, "fwdbwd", 4) == moved(shape, "fwd", 4) + moved(shape, "bwd", 4)


def test_a_missing_package_is_a_row_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "fa3_fwd_interface", "xformers", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, absent in {
        "attention": {"flash-attn", "fa3", "xformers"},
        "packed_attention": {"fa3"},
        **dict.fromkeys(("add_layer_norm", "embedding", "rotary", "linear_cross_entropy"), {"liger"}),
    }.items():
        benchmark = benchmarks()[name]
        missing = benchmark.missing("cuda")
        assert {other for other in missing if "pip install" in missing[other]} >= absent
        assert not absent & benchmark.offered("cpu").keys()
        assert benchmark.ours == "fastformer" and benchmark.baseline == "eager"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embedding", {"batch": 2, "seqlen": 6, "dim": 16, "vocab_size": 40, "dropout_p": 0.0}),
        ("rotary", {"batch": 4, "seqlen": 6, "heads": 3, "head_dim": 16}),
        ("linear_cross_entropy", {"rows": 30, "dim": 16, "vocab_size": 50}),
    ],
)
def test_liger_computes_the_same(name: str, shape: dict[str, Any]) -> None:
    """Its norm is left out: the interpreter passes `eps` as a plain number, of which the kernel wants a method."""
    pytest.importorskip("liger_kernel")
    benchmark = benchmarks()[name]
    for mode in benchmark.modes:
        verdicts = verdicts_of(benchmark, {"liger": benchmark.providers["liger"]}, shape, mode, torch.float32, "cpu")
        assert verdicts.passed("liger"), (mode, verdicts)


# Engines that recompute give the tokens of the cached engine, and each caches only what its name says.


NAMES = [engine.name for engine in RECOMPUTING]
SOURCES = [[5, 9, 7, 4, 8], [6, 3], [4, 4, 9, 10]]


def small() -> Transformer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_encoder_layers": 2}
    return Transformer.from_preset("tiny", vocab_size=40, num_decoder_layers=2, **sizes).eval()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_same_tokens_as_with_a_cache(num_beams: int) -> None:
    model = small()
    want = generate(model, SOURCES, engine="kv_cache", max_new_tokens=9, num_beams=num_beams)
    assert len(set(map(tuple, want.tolist()))) > 1
    for engine in NAMES:
        assert torch.equal(generate(model, SOURCES, engine=engine, max_new_tokens=9, num_beams=num_beams), want)


@pytest.mark.parametrize("engine", [*NAMES, "recompute"])
def test_recomputed_layers(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder runs for each token or once; cross_cache doesn't recompute the keys and values of the source."""
    model = small()
    encode, plain = model.encode, model.decode
    encoded: list[Any] = []
    memories: list[Any] = []

    def note_encode(*args: Any, **rest: Any) -> Any:
        encoded.append(args)
        return encode(*args, **rest)

    def note_decode(ids: Any, memory: Any, **rest: Any) -> Any:
        memories.append(memory)
        return plain(ids, memory, **rest)

    monkeypatch.setattr(model, "encode", note_encode)
    monkeypatch.setattr(model, "decode", note_decode)
    tokens = generate(model, SOURCES[:1], engine=engine, max_new_tokens=6, min_new_tokens=6)
    assert tokens.shape == (1, 6) and len(memories) == 6
    assert len(encoded) == (6 if engine == "recompute" else 1)
    assert (memories[0] is None) == (engine == "cross_cache")


def test_a_model_without_an_encoder_is_refused() -> None:
    gpt = GPT.from_preset("tiny", vocab_size=40)
    for engine in NAMES:
        with pytest.raises(ValueError, match=engine):
            generate(gpt, [[5, 6]], engine=engine, max_new_tokens=2)
