"""`generate` of an accelerated model runs on the engine unless the model was changed."""

from __future__ import annotations

import copy
import functools
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GenerationMixin, LogitsProcessorList

from fastformer.generation.engines.cpp import CppBatch
from fastformer.integrations import accelerate, engine_models, from_huggingface, report, restore
from tests.covering import by_turns
from tests.integrations.engine_calls import Pair, counted, outcome_of, pair_of

MOST = {"max_new_tokens": 6, "num_beams": 2}


@pytest.fixture
def pair() -> Pair:
    return pair_of("MBart real")


@functools.cache
def unchanged() -> torch.Tensor:
    """Returns the output of the model as it was made."""
    pair = pair_of("MBart real")
    said: torch.Tensor = pair.plain.generate(**pair.inputs, **MOST)
    return said


def agree(pair: Pair, *, is_served: bool) -> None:
    found, expected = pair.both(is_served=is_served, **MOST)
    assert torch.equal(found, expected)


def own_forward(model: Any) -> None:
    forward = model.model.encoder.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    model.model.encoder.forward = doubled


def own_method(model: Any) -> None:
    prepare = model.prepare_inputs_for_generation

    def cut(ids: torch.Tensor, **kwargs: Any) -> Any:
        return prepare(torch.cat((ids[:, :-1], ids[:, -1:] * 0 + 7), 1), **kwargs)

    model.prepare_inputs_for_generation = cut


def own_scale(model: Any) -> None:
    model.model.encoder.embed_tokens.embed_scale = model.model.decoder.embed_tokens.embed_scale = 3.0


def with_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "fc1"], "init_lora_weights": False, "task_type": "SEQ_2_SEQ_LM"}
    peft.inject_adapter_in_model(peft.LoraConfig(**options), model)


def layer(number: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: change(model.model.decoder.layers[number])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": layer(1, lambda layer: layer.fc1.register_forward_hook(lambda module, args, out: out * 0.5)),
    "another activation": layer(0, lambda layer: setattr(layer, "activation_fn", nn.Tanh())),
    "fewer layers": lambda model: setattr(model.model.decoder, "layers", model.model.decoder.layers[:2]),
    "a forward": own_forward,
    "a method": own_method,
    "a scale": own_scale,
    "an eps": layer(1, lambda layer: setattr(layer.final_layer_norm, "eps", 50.0)),
    "a parametrization": layer(0, lambda layer: nn.utils.parametrizations.weight_norm(layer.fc2)),
    "an adapter": with_adapter,
}


def other_class(model: Any) -> None:
    kind = type(model)

    class Turned(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.flip(-1)
            return out

    model.__class__ = Turned


def other_places(model: Any) -> None:
    for place, decoder_layer in zip((1, 0), model.model.layers, strict=False):
        decoder_layer.self_attn.layer_idx = place


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "a table": lambda m: next(table for name, table in m.named_buffers() if name.endswith("inv_freq")).mul_(3.0),
    "a window": lambda m: m.config.layer_types.__setitem__(0, "full_attention"),  # which the model's forward reads
    "a class": other_class,
    "a function": lambda model: setattr(model.model.layers[0].mlp.act_fn, "act", torch.sin),
    "the places of layers": other_places,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_changes_in_place_use_transformers_code(name):
    pair = pair_of("gemma3_text two bases", left=True)
    for is_served in (True, False):
        if not is_served:
            for model in (pair.plain, pair.ours):
                IN_PLACE[name](model)
        assert outcome_of(pair, **pair.inputs, **MOST) == int(is_served)


@pytest.mark.parametrize("name", ["Marian real", "llama grouped heads"])
def test_a_resized_vocabulary_stays_on_the_engine(name):
    pair = pair_of(name, left=name.startswith("llama"))
    agree(pair, is_served=True)
    for model in (pair.plain, pair.ours):
        torch.manual_seed(1)
        model.resize_token_embeddings(71)
        if name.startswith("llama"):
            model.config.pad_token_id = model.config.eos_token_id
    agree(pair, is_served=True)


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", ["llama grouped heads", "qwen3 wide heads"])
def test_hidden_states_that_were_recorded_change_nothing(name, is_early):
    """transformers records them by hooks on the layers, and leaves the hooks there."""
    pair = pair_of(name, left=True)
    expected = report(pair.ours)
    recorded = pair.plain if is_early else pair.ours
    recorded(**pair.inputs, output_hidden_states=True)
    if is_early:
        pair.ours = accelerate(copy.deepcopy(pair.plain))
    assert report(pair.ours) == expected
    agree(pair, is_served=True)


@pytest.mark.parametrize("is_late", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["later", "before"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_uses_transformers_code(pair, name, is_late):
    if is_late:
        agree(pair, is_served=True)
    else:
        restore(pair.ours)
    for model in (pair.plain, pair.ours):
        CHANGES[name](model)
    accelerate(pair.ours)
    agree(pair, is_served=False)
    assert "transformers' own" in report(pair.ours).generate[""]
    if name not in ("an eps", "a parametrization"):  # the others say something else
        assert not torch.equal(unchanged(), pair.ours.generate(**pair.inputs, **MOST))


def test_a_removed_hook_and_a_mode_that_has_ended(pair):
    handle = pair.ours.model.encoder.register_forward_hook(lambda *args: None)
    agree(pair, is_served=False)
    handle.remove()
    agree(pair, is_served=True)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    agree(pair, is_served=False)
    handle.remove()
    pair.ours.train()
    with counted() as opened:
        pair.ours.generate(**pair.inputs, **MOST)
    assert opened == [0]
    pair.ours.eval()
    agree(pair, is_served=True)


def test_a_function_of_transformers_that_was_replaced(pair, monkeypatch):
    agree(pair, is_served=True)
    plain = GenerationMixin._beam_search
    monkeypatch.setattr(GenerationMixin, "_beam_search", lambda self, ids, **kwargs: plain(self, ids, **kwargs) * 0)
    accelerate(pair.ours)
    found, expected = pair.both(is_served=False, **MOST)
    assert torch.equal(found, expected) and not found.any()


def test_a_subclass_is_not_swapped():
    class Mine(transformers.MarianMTModel):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = -out.logits
            return out

    pair = pair_of("Marian real")
    mine = Mine(pair.plain.config)
    mine.load_state_dict(pair.plain.state_dict())
    pair.plain, pair.ours = mine.eval(), accelerate(copy.deepcopy(mine).eval())
    agree(pair, is_served=False)


def test_weights_that_an_optimizer_changed_are_packed_again(pair):
    agree(pair, is_served=True)
    target = torch.tensor([[2, 5, 9, 30], [2, 7, 7, 7], [2, 8, 1, 4], [2, 2, 2, 6]])
    for model in (pair.plain, pair.ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        model(**pair.inputs, labels=target).loss.backward()
        optimizer.step()
    agree(pair, is_served=True)
    assert not torch.equal(unchanged(), pair.ours.generate(**pair.inputs, **MOST))
    with torch.no_grad():
        for model in (pair.plain, pair.ours):
            model.model.decoder.layers[0].fc1.weight.data.mul_(-1)
    agree(pair, is_served=True)


def test_untied_weights_are_read_each():
    pair = pair_of("Bart real")
    agree(pair, is_served=True)
    for model in (pair.plain, pair.ours):
        torch.manual_seed(3)
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.5)
    agree(pair, is_served=True)


def roundtrip(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("how, name", by_turns([copy.deepcopy, roundtrip, compiled], ["MBart real", "gpt2 plain"]))
def test_copies_and_wrappers_decode_on_the_engine(name, how):
    pair = pair_of(name, left=name == "gpt2 plain")
    agree(pair, is_served=True)
    pair.ours = how(pair.ours)
    agree(pair, is_served=True)


def test_saved_models_do_not_mention_the_engine(pair, tmp_path):
    keys, config = [*pair.plain.state_dict()], pair.plain.config.to_dict()
    agree(pair, is_served=True)
    assert [*pair.ours.state_dict()] == keys and pair.ours.config.to_dict() == config
    pair.ours.save_pretrained(tmp_path)
    loaded = transformers.MBartForConditionalGeneration.from_pretrained(tmp_path)
    assert type(loaded) is transformers.MBartForConditionalGeneration
    pair.ours = accelerate(loaded.eval())
    agree(pair, is_served=True)


def test_restore_removes_the_engine(pair):
    agree(pair, is_served=True)
    restore(pair.ours)
    assert type(pair.ours) is type(pair.plain) and vars(pair.ours).keys() == vars(pair.plain).keys()
    agree(pair, is_served=False)
    agree(Pair(pair.plain, accelerate(pair.ours), pair.inputs), is_served=True)
    accelerate(pair.ours, generate=False)
    agree(pair, is_served=False)
    assert "asked for" in report(pair.ours).generate[""]


def test_modes_of_autograd_make_no_difference(pair):
    expected = pair.plain.generate(**pair.inputs, **MOST)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        ours = accelerate(copy.deepcopy(pair.plain))  # packed in this mode, and used in the others
        with mode(), counted() as opened:
            found = ours.generate(**pair.inputs, **MOST)
        assert opened == [1] and torch.equal(found, expected)
        with counted() as opened:
            again = ours.generate(**pair.inputs, **MOST)
        assert opened == [1] and torch.equal(again, expected) and not again.is_inference()


def test_precisions(pair):
    with pytest.raises(ValueError, match=r"\bprecision\b"):
        accelerate(pair.ours, precision="fp4")
    rounded = pair_of("MBart real", dtype=torch.bfloat16)
    with counted() as opened:
        rounded.ours.generate(**pair.inputs, **MOST)
        assert "bf16" in report(rounded.ours).generate[""]
        accelerate(pair.ours, precision="bf16")
        assert "bf16" in report(pair.ours).generate[""]
        expected = pair.ours.generate(**pair.inputs, **MOST)
        accelerate(pair.ours, precision="int8")
        assert pair.ours.generate(**pair.inputs, **MOST).shape[0] == 4
        assert accelerate(pair.ours) is pair.ours and "int8" in report(pair.ours).generate[""]
    assert opened == [3]
    fresh = pair_of("MBart real")
    with torch.autocast("cpu", torch.bfloat16), counted() as opened:
        torch.testing.assert_close(fresh.ours.generate(**pair.inputs, **MOST), expected)
    assert opened == [1]
    assert "float64" in report(accelerate(copy.deepcopy(pair.plain).double())).generate[""]


def test_threads_that_share_a_model(pair):
    expected = pair.plain.generate(**pair.inputs, **MOST)

    def decode(options: dict[str, Any]) -> bool:
        return all(torch.equal(pair.ours.generate(**pair.inputs, **MOST, **options), expected) for _ in range(4))

    processors = LogitsProcessorList([lambda ids, scores: scores])
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(decode, ({}, {"logits_processor": processors})))


def test_a_processor_may_call_generate(pair):
    """A call within a call decodes separately, with and without the engine."""
    inner: list[Any] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inner.append(pair.ours.generate(**pair.inputs, **MOST))
        return scores

    expected = pair.plain.generate(**pair.inputs, **MOST)
    found = pair.ours.generate(**pair.inputs, **MOST, logits_processor=LogitsProcessorList([processor]))
    assert torch.equal(found, expected) and inner and all(torch.equal(one, expected) for one in inner)


def test_whole_searches_take_no_steps_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    single: list[str] = []
    for name in ("logits", "step"):
        plain = getattr(CppBatch, name)

        def step(self: Any, *args: Any, name: str = name, plain: Callable[..., Any] = plain) -> Any:
            single.append(name)
            return plain(self, *args)

        monkeypatch.setattr(CppBatch, name, step)
    pair = pair_of("Bart real")
    for options in ({}, {"num_beams": 3}, {"num_beams": 3, "min_new_tokens": 2, "renormalize_logits": True}):
        pair.both(max_new_tokens=20, **options)
    assert not single
    found, expected = pair.both(max_new_tokens=20, num_beams=3, forced_bos_token_id=7, forced_eos_token_id=2)
    assert torch.equal(found, expected) and len(single) == 1  # at which the first token is forced; the last takes none


def test_the_converted_copy_is_freed(pair):
    made: list[weakref.ref[torch.Tensor]] = []
    plain = from_huggingface

    def converting(model: nn.Module) -> Any:
        converted = plain(model)
        made.extend(map(weakref.ref, converted.parameters()))
        return converted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_models, "from_huggingface", converting)
        agree(pair, is_served=True)
    assert made and not any(ref() is not None for ref in made)
