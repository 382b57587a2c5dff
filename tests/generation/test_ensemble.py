"""Compares ensembles in every search with the plain mean of the models' predictions."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import ByteTokenizer
from fastformer.generation import Ensemble, Translator, generate, score
from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines.ensemble import EnsembleEngine
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.scheduler import new_scheduler, run
from fastformer.models import GPT
from fastformer.models.pretrained import save_model
from fastformer.special_ids import SpecialIds
from tests.generation.small import EOS, VOCAB, louder, mixed_sources, needs_cpp, next_logits, tiny
from tests.generation.toy import ToyEngine

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 3, "beam_rules": "transformers"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.4},
    {"do_sample": True, "seed": 3, "num_return_sequences": 2, "top_k": 9, "temperature": 1.3},
    {"no_repeat_ngram_size": 2, "suppress_tokens": [7, 8], "min_new_tokens": 5},
    {"shortlist": [*range(5, 30)]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "greedy")
@pytest.mark.parametrize("mean", ["probabilities", "log_probabilities"])
def test_an_ensemble_of_one_model_twice_equals_the_model(model, mean, options) -> None:
    options = {"max_new_tokens": 9, "return_dict_in_generate": True, **options}
    sources = mixed_sources(4)
    alone = generate(model, sources, **options)
    twice = generate(Ensemble([model, model], [1, 4], mean), sources, **options)
    assert torch.equal(twice.sequences, alone.sequences) and len(set(map(tuple, alone.sequences.tolist()))) > 1
    assert torch.allclose(twice.scores, alone.scores, atol=1e-4)
    assert torch.allclose(twice.token_log_probs, alone.token_log_probs, atol=1e-4)


def plain(models: list[Any], weights: list[float], mean: str, source: list[int], steps: int) -> tuple[list[int], float]:
    """Decodes the mean greedily, and recomputes everything for each token."""
    tokens: list[int] = []
    total = 0.0
    while len(tokens) < steps and EOS not in tokens:
        each = [next_logits(one, source, tokens)[-1].double().log_softmax(-1) for one in models]
        if mean == "probabilities":
            log_probs = sum(w * one.exp() for w, one in zip(weights, each, strict=True)).log()
        else:
            log_probs = sum(w * one for w, one in zip(weights, each, strict=True)).log_softmax(-1)
        tokens.append(int(log_probs.argmax()))
        total += float(log_probs.max())
    return tokens, total


@pytest.mark.parametrize(("mean", "engine"), [("probabilities", "kv_cache"), ("log_probabilities", None)])
def test_an_ensemble_of_two_models_predicts_their_mean(ensemble, lstm, mean, engine) -> None:
    sources = [row[row != 0].tolist() for row in mixed_sources(3)]
    members = [*ensemble.members, *([lstm] if engine is None else [])]
    weights = [0.5, 0.3, 0.2] if engine is None else [0.25, 0.75]
    both = Ensemble(members, [10 * weight for weight in weights], mean)
    out = generate(both, sources, max_new_tokens=8, engine=engine, return_dict_in_generate=True)
    alone = [plain(members, weights, mean, source, 8) for source in sources]
    forced = score(both, sources, [tokens for tokens, _ in alone])
    for place, (tokens, total) in enumerate(alone):
        assert out.sequences[place].tolist() == [*tokens, *[0] * (out.sequences.shape[1] - len(tokens))]
        assert out.scores[place] == pytest.approx(total, abs=1e-4)
        assert math.fsum(forced[place]) == pytest.approx(total, abs=1e-4)
    assert [tokens for tokens, _ in alone] != [plain(members[:1], [1], mean, source, 8)[0] for source in sources]


def test_language_models_decode_in_one_batch(gpt) -> None:
    torch.manual_seed(3)
    other = copy.deepcopy(gpt)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    both = Ensemble([gpt, other])
    prompt = [5, 9, 12]
    out = generate(both, [prompt], max_new_tokens=8, return_dict_in_generate=True)
    tokens, total = plain([gpt, other], [0.5, 0.5], "probabilities", prompt, 8)
    assert out.sequences[0, 3:].tolist() == tokens and out.scores[0] == pytest.approx(total, abs=1e-4)
    assert math.fsum(score(both, out.sequences[:1])[0][2:]) == pytest.approx(total, abs=1e-4)


def test_models_with_different_memory_needs_decode_together(lstm) -> None:
    large = tiny(vocab_size=VOCAB, max_len=128)
    config = GenerationConfig(num_beams=2, max_new_tokens=20, min_new_tokens=17)
    builder = RequestBuilder(Ensemble([large, lstm]), config)
    sources, found = [[5 + i % 7] * (1 + 5 * i % 23) for i in range(6)], []
    for max_bytes in (None, 1, 40_000):
        requests = [builder.build(builder.check(source)) for source in sources]
        run(new_scheduler(builder.engine, max_bytes=max_bytes), requests)
        found.append([request.results[0].tokens for request in requests])
    assert found[0] == found[1] == found[2]


class Memory(ToyEngine):
    """The free memory, and the memory that a step takes."""

    token_bytes = 3

    def __init__(self, free: int, step: int) -> None:
        super().__init__(1)
        self.free_tokens, self.step_tokens = (lambda: free), (lambda: step)


def test_there_is_room_for_a_step_if_each_model_has_room(ensemble) -> None:
    for pairs in ([(100, 16), (5, 0)], [(16, 16), (40, 40)], [(10, 16), (5, 0)], [(100, 16), (5, 6)], [(0, 0), (9, 0)]):
        memories = [Memory(*pair) for pair in reversed(pairs)]
        engine: Any = EnsembleEngine(ensemble, cast(Any, lambda _, left=memories: left.pop()))
        batch = engine.open(1, 1)
        assert (batch.step_tokens() <= batch.free_tokens()) == all(step <= free for free, step in pairs)
        assert batch.step_tokens() >= 0 and batch.free_tokens() == min(free for free, _ in pairs)
        assert engine.token_bytes == 6


@needs_cpp
def test_precision_and_engine_apply_to_each_model(ensemble) -> None:
    sources = mixed_sources(3)
    small = generate(ensemble, sources, max_new_tokens=6, precision="int8", return_dict_in_generate=True)
    full = generate(ensemble, sources, max_new_tokens=6, return_dict_in_generate=True)
    assert (small.token_log_probs - full.token_log_probs).abs().max() > 0
    with pytest.raises(ValueError, match="'kv_cache'.*int8"):
        generate(ensemble, sources, precision="int8", engine="kv_cache")


def test_invalid_ensembles_are_named(model, gpt, lstm, ensemble) -> None:
    larger, special = tiny(vocab_size=VOCAB + 1), tiny(vocab_size=VOCAB, special_ids=SpecialIds(start=3))
    for arguments, expected in (
        (([],), r"\bone model\b"),
        (([model, gpt],), "both kinds"),
        (([model, larger],), rf"\bvocab_size {VOCAB}\b.*\b{VOCAB + 1}\b"),
        (([model, special],), "special_ids"),
        (([model, ensemble],), "Ensemble"),
        (([torch.nn.Linear(2, 2)],), "Linear"),
        (([model, lstm], [1]), r"\bweight\b.*\b2 models\b.*1"),
        (([model, lstm], [1, 0]), r"\bweights\b.*got 0"),
        (([model, lstm], [1, math.nan]), r"\bweights\b.*nan"),
        (([model, lstm], None, "median"), "'median'"),
    ):
        with pytest.raises(ValueError, match=expected):
            Ensemble(*arguments)
    assert Ensemble([model, lstm]).config.max_len == 128 < lstm.config.max_len
    with pytest.raises(ValueError, match=r"\bmax_len = 128\b.*\b129\b"):
        generate(Ensemble([model, lstm]), [[5] * 129])


def test_folders_translate_together(tmp_path) -> None:
    models: dict[str, Any] = {}
    for seed, name in enumerate(["a", "b", "lstm"]):
        made = tiny(LSTMSeq2Seq) if name == "lstm" else tiny(seed=seed, max_len=40, tie_embeddings=False)
        models[name] = louder(made).train()
        models[name].output.weight.data[130:] = models[name].output.weight.data[:3] = 0  # it writes ASCII, mostly
        save_model(models[name], tmp_path / name, ByteTokenizer())
    texts, few = ["one", "a longer text", ""], {"max_new_tokens": 6}
    folders = [tmp_path / name for name in models]
    translator = Translator.from_pretrained(folders, ensemble_weights=[2, 1, 1])
    due = Translator(Ensemble(models.values(), [2, 1, 1]), ByteTokenizer())
    for options in (few, {**few, "num_beams": 3}):
        found = list(translator.stream(texts, **options))
        assert found == list(due.stream(texts, **options)) and found[2] == ""
    assert "".join(translator.stream("one", **few)) == translator.translate("one", **few)
    assert models["a"].training  # as it was
    made = translator.translate("one", **few, return_token_scores=True)
    forced = translator.score("one", made.text)
    assert [v for _, v in forced.tokens][: len(made.tokens)] == pytest.approx(
        [v for _, v in made.tokens], abs=1e-4
    ) or (
        "�" in made.text  # what it said is no UTF-8, and was given in another way
    )
    with pytest.raises(ValueError, match="attention_maps"):
        translator.attention("one")
    tiny(GPT).save_pretrained(tmp_path / "gpt", ByteTokenizer())
    for arguments, expected in (
        (([tmp_path / "a", tmp_path / "gpt"],), "GPT"),
        (([],), "folder"),
        (([tmp_path / "a", tmp_path / "nowhere"],), "nowhere"),
    ):
        with pytest.raises(ValueError, match=expected):
            Translator.from_pretrained(*arguments)
    with pytest.raises(ValueError, match="ensemble_weights"):
        Translator.from_pretrained(tmp_path / "a", ensemble_weights=[1])
    with pytest.raises(ValueError, match=r"\bweight\b.*\b2 models\b"):
        Translator.from_pretrained([tmp_path / "a", tmp_path / "b"], ensemble_weights=[1])
