"""With a shortlist only its ids are generated, and their probabilities sum to one, on every path."""

from __future__ import annotations

import math

import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.generation import GenerationConfig, Translator, generate
from fastformer.generation.engines import ENGINES, choose_engine
from fastformer.generation.engines.kv_cache import KVCacheEngine
from fastformer.generation.model_protocols import as_model
from fastformer.generation.request_builder import RequestBuilder
from tests.generation.small import CPP, EOS, mixed_sources, new_tokens, next_logits, real, tiny

ALLOWED = [4, 7, 9, 11, 12, 13, 20, 25, 31, 38]


def engines_of(model) -> list[str]:
    found = []
    for name in ENGINES:
        try:
            found.append(choose_engine(model, name).name)
        except ValueError:
            continue
    assert found
    return found


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 5}], ids=str)
def test_only_listed_ids_are_generated_and_their_probabilities_sum_to_one(any_model, options) -> None:
    prompts = mixed_sources(4)
    settings = {"max_new_tokens": 7, "return_dict_in_generate": True, **options}
    free = generate(any_model, prompts, **settings)
    assert not {t for row in new_tokens(any_model, prompts, free.sequences) for t in row} <= {*ALLOWED, EOS, 0}
    for name in engines_of(any_model):
        out = generate(any_model, prompts, shortlist=[*reversed(ALLOWED), 7], engine=name, **settings)
        for i, row in enumerate(new_tokens(any_model, prompts, out.sequences)):
            tokens = [token for token in row if token != 0]
            assert {*tokens} <= {*ALLOWED, EOS} and tokens, name
            logits = next_logits(any_model, real(prompts[i]), tokens)[: len(tokens)]
            masked = torch.full_like(logits, -math.inf)
            masked[:, [EOS, *ALLOWED]] = logits[:, [EOS, *ALLOWED]]
            expected = masked.log_softmax(-1)[torch.arange(len(tokens)), tokens]
            assert torch.allclose(out.token_log_probs[i, : len(tokens)], expected, atol=1e-4), name
            if not options:
                assert tokens == masked.argmax(-1).tolist(), name


def test_a_shortlist_may_be_shorter_than_the_number_of_beams(gpt) -> None:
    prompts = [[5, 6, 7], [9, 8]]
    options = {"max_new_tokens": 4, "num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True}
    for name in engines_of(gpt):
        out = generate(gpt, prompts, shortlist=[9], engine=name, **options)
        found = [tuple(row) for row in out.sequences[:, 3:].tolist()]  # behind the prompts
        assert {token for row in found for token in row} <= {9, EOS, 0}
        # There are four ways to end, and one not to.
        assert out.scores.isfinite().all() and len({*found[:4]}) == len({*found[4:]}) == 4, name


@pytest.mark.parametrize("engine", [CPP, "kv_cache"])
def test_a_shortlist_combines_with_other_options(model, engine) -> None:
    source, allowed = mixed_sources(3), {*ALLOWED, EOS, 0}
    options = {"shortlist": ALLOWED, "engine": engine, "max_new_tokens": 6}
    out = generate(model, source, suppress_tokens=[7, 9], min_new_tokens=6, **options)
    said = {token for row in out.tolist() for token in row}
    assert said <= allowed - {7, 9, EOS} and out.shape[1] == 6
    out = generate(model, source, forced_bos_token_id=5, forced_eos_token_id=6, min_new_tokens=6, **options)
    assert {*out[:, 0].tolist()} == {5} and {*out[:, -1].tolist()} == {6}
    assert {token for row in out[:, 1:-1].tolist() for token in row} <= allowed
    ends = generate(model, source, eos_token_id=3, **options)
    assert {token for row in ends.tolist() for token in row} <= allowed - {EOS} | {3}


def test_an_engine_that_supports_shortlists_gets_no_processor(model) -> None:
    settings = GenerationConfig(shortlist=(9, 4, 9))
    assert settings.shortlist == (4, 9)
    asked: list[list[int]] = []

    class Fast(KVCacheEngine):
        def limit_to(self, shortlist) -> bool:
            asked.append(list(shortlist))
            return True

    fast = Fast(model)
    assert not KVCacheEngine(model).limit_to([3, 4])
    # One that others share keeps its vocabulary.
    builder = RequestBuilder(as_model(model), settings, engine=fast)
    assert len(builder.build(builder.check([5, 6])).processors) == 2 and not asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastformer.generation.request_builder.choose_engine", lambda *args: fast)
        builder = RequestBuilder(as_model(model), settings)
        assert builder.build(builder.check([5, 6])).processors == () and asked == [[EOS, 4, 9]]
        RequestBuilder(as_model(model), GenerationConfig())
        assert len(asked) == 1


def test_a_translator_accepts_a_shortlist() -> None:
    allowed = ByteTokenizer().encode("abc")
    translator = Translator(tiny(), ByteTokenizer())
    assert {*translator.translate("xyz", shortlist=allowed, max_new_tokens=8, min_new_tokens=8)} <= {*"abc"}
