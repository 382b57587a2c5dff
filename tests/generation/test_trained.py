"""Trained models give the same tokens with any engine, in any batch, and next to any other requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.cli import main
from fastformer.generation import GenerateOutput, GenerationConfig, generate
from fastformer.generation.engines import ENGINES, choose_engine
from fastformer.generation.generate import new_scheduler
from fastformer.generation.request_builder import RequestBuilder
from fastformer.number_words import english
from tests.generation.small import HAS_CPP

pytestmark = pytest.mark.slow

NEAR_TIE = 1e-4
COUNT = 200
Found = tuple[list[list[int]], list[float]]


@pytest.fixture(scope="module", params=["transformer", "lstm", "gpt"])
def trained(request, tmp_path_factory) -> tuple[Any, list[list[int]]]:
    """A model, and inputs of mixed length."""
    folder = tmp_path_factory.mktemp(request.param)
    run, rng = str(folder / "run"), random.Random(0)
    words = [english(rng.randrange(10 ** rng.randrange(1, 9))) for _ in range(3000)]
    common = ["--model", request.param, "--val_every", "300"]
    if request.param == "gpt":
        (folder / "text.txt").write_text("\n".join(words), encoding="utf-8")
        sizes = ["--model.d_model", "128", "--model.num_layers", "2", "--model.num_heads", "4", "--seqlen", "128"]
        data = ["--train_text", str(folder / "text.txt"), "--tokenizer", "bytes", "--steps", "150"]
        assert main(["train", run, *common, *data, *sizes]) == 0
    else:
        assert main(["train", run, *common, "--task", "numbers", "--steps", "300"]) == 0
    model, tokenizer = load_model(Path(run), ("Transformer", "LSTMSeq2Seq", "GPT"))
    if request.param == "gpt":
        return model.eval(), [tokenizer.encode(word)[: 3 + i % 30] for i, word in enumerate(words[:COUNT])]
    return model.eval(), [[*tokenizer.encode(word), tokenizer.special_ids.first_eos] for word in words[:COUNT]]


def decode(model: Any, inputs: list[list[int]], num_beams: int, **options: Any) -> Found:
    width = 0 if hasattr(model, "encode") else max(map(len, inputs))
    out = generate(model, inputs, num_beams=num_beams, max_new_tokens=60, return_dict_in_generate=True, **options)
    assert isinstance(out, GenerateOutput)
    rows = [row[width:] for row in out.sequences.tolist()]
    return [row[: row.index(1) + 1] if 1 in row else row for row in rows], out.scores.tolist()


def assert_same(found: Found, expected: Found) -> None:
    """The same tokens; others are allowed where both are as likely, and counted."""
    ties = 0
    for tokens, score, wanted, wanted_score in zip(*found, *expected, strict=True):
        if tokens != wanted:
            assert abs(score - wanted_score) < NEAR_TIE
            ties += 1
    assert ties <= COUNT // 100


@pytest.mark.parametrize("num_beams", [1, 4])
def test_engines_and_batches(trained, num_beams) -> None:
    model, inputs = trained
    expected = decode(model, inputs, num_beams)
    engines = 0
    for engine in ENGINES:
        if choose_engine(model).name != engine:
            try:
                choose_engine(model, engine)
            except ValueError:  # not of this kind of model; test_engines.py says which are
                continue
            assert_same(decode(model, inputs, num_beams, engine=engine), expected)
            engines += 1
    # The default is the C++ engine where there is one, and the others are held against it.
    assert engines == {"Transformer": 2 + HAS_CPP, "GPT": 2 + HAS_CPP, "LSTMSeq2Seq": 0}[type(model).__name__]
    for size in (1, 7):
        count = COUNT if size > 1 else 40
        batches = [decode(model, inputs[start : start + size], num_beams) for start in range(0, count, size)]
        rows = [row for batch in batches for row in batch[0]]
        scores = [score for batch in batches for score in batch[1]]
        assert_same((rows, scores), (expected[0][:count], expected[1][:count]))


@pytest.mark.parametrize("num_beams", [1, 4])
def test_threads_do_not_change_bits(trained, num_beams) -> None:
    """The C++ engine sums whole: one thread gives the tokens and scores of two, in whatever batch."""
    model, inputs = trained
    if not HAS_CPP or type(model).__name__ == "LSTMSeq2Seq":
        pytest.skip("the C++ engine is not built, or has no LSTM")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            whole = decode(model, inputs, num_beams, engine="cpp")
            parts = [decode(model, inputs[start : start + 7], num_beams, engine="cpp") for start in range(0, 70, 7)]
            found.append((whole, parts))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    assert_same(found[0][0], decode(model, inputs, num_beams, engine="kv_cache"))


def test_tokens_do_not_depend_on_other_requests(trained) -> None:
    # Greedy and beams beside samples and diverse beams, which arrive step by step in too little memory; some leave.
    model, inputs = trained
    rng, engine = random.Random(1), choose_engine(model)
    scheduler = new_scheduler(engine, 40, 8 * 2**20)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "beams": {"num_beams": 4},
        "samples": {"do_sample": True, "seed": 1, "num_return_sequences": 3},
        "diverse": {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.5},
    }
    builders = {
        kind: RequestBuilder(model, GenerationConfig(max_new_tokens=60, **options), engine=engine)
        for kind, options in kinds.items()
    }
    waiting = [(i, kind) for i in range(COUNT) for kind in ("greedy", "beams")]
    rng.shuffle(waiting)
    requests, others = {}, []
    while waiting or not scheduler.is_idle:
        for _ in range(min(rng.randrange(4), len(waiting))):
            i, kind = waiting.pop()
            requests[i, kind] = builders[kind].build(builders[kind].check(inputs[i]))
            scheduler.submit([requests[i, kind]])
        if waiting and rng.random() < 0.3:
            builder = builders[rng.choice(list(kinds))]
            others.append(builder.build(builder.check(rng.choice(inputs))))
            scheduler.submit(others[-1:])
        if others and rng.random() < 0.1:
            rng.choice(others).cancel()
        scheduler.step()
    for kind, num_beams in (("greedy", 1), ("beams", 4)):
        best = [requests[i, kind].results[0] for i in range(COUNT)]
        found = [hypothesis.tokens for hypothesis in best], [hypothesis.score for hypothesis in best]
        assert_same(found, decode(model, inputs, num_beams))
