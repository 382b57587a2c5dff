"""transformers' attention reaches fastformer's under its own name, and masks are understood."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

import fastformer
from fastformer.integrations import attention_interface
from fastformer.integrations.attention_interface import (
    _known,
    make_mask,
    patch_attention,
    patched_attention,
    unpatch_attention,
)
from fastformer.ops import record_backends
from tests.covering import by_turns, each
from tests.integrations import conversions
from tests.integrations import families as small
from tests.integrations.families import IDS
from tests.nn.comparing import assert_same

RIGHT = torch.arange(9) < torch.tensor([[9], [4], [2], [7]])


def make(family: str) -> Any:
    if family == "gpt2":
        return small.make(family)
    kind = LlamaForCausalLM if family == "llama" else MistralForCausalLM
    window = {"sliding_window": 3} if family == "mistral" else {}
    return small.make("llama", kind, hidden_size=32, num_attention_heads=4, **window)


def ran(call: Any) -> bool:
    with record_backends() as backends:
        call()
    return bool({name for name, _ in backends} & {"attention_fwd", "varlen_attention_fwd"})


@pytest.mark.parametrize("mask, family", by_turns([None, RIGHT, RIGHT.flip(1)], ["gpt2", "llama", "mistral"]))
def test_outputs_are_the_same_at_real_tokens(family, mask):
    model = make(family)
    options = {} if mask is None else {"attention_mask": mask.long()}
    labels = IDS if mask is None else IDS.masked_fill(~mask, -100)
    real = torch.ones(4, 9, 1).double() if mask is None else mask[..., None].double()
    results = []
    for is_led in (False, True):
        if is_led:
            patch_attention(model)
            assert patched_attention(model) == [""] and model.config._attn_implementation == "sdpa"
            assert ran(lambda: model(IDS, **options))
        out = model(IDS, labels=labels, **options)
        results.append([out.loss, out.logits * real, *small.gradients(model, out.loss)])
    small.assert_all_same(results[1], results[0], "output or gradient")
    prompt = {"attention_mask": RIGHT.flip(1).long(), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = model.eval().generate(IDS, **prompt)
    unpatch_attention(model)
    assert not patched_attention(model)
    assert torch.equal(model.generate(IDS, **prompt), tokens)
    assert not ran(lambda: model(IDS, **options))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_trace_of_a_causal_model(family):
    """In a trace, sizes are tensors, by which transformers' attention computes, too."""
    model = make(family).requires_grad_(False).eval()
    patch_attention(model)
    traced = torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, IDS, check_trace=False)
    assert_same(traced(IDS.flip(0)), model(IDS.flip(0)).logits, "logits")


def test_right_padding_becomes_lengths(calls_of):
    """A causal triangle becomes a bound, also if a mask contains it: no mask reaches the op."""
    model = make("gpt2")
    patch_attention(model)
    calls = calls_of(attention_interface, "attention")
    model(IDS, attention_mask=RIGHT.long())
    assert len(calls) == 2
    for call in calls:
        assert call.options["is_causal"] and call.options["seqlens_k"].tolist() == [9, 4, 2, 7]
        assert "attn_mask" not in call.options
    calls.clear()
    model(IDS, attention_mask=RIGHT.flip(1).long())
    assert not calls, "left padding is no length"


LED = make("llama")
patch_attention(LED)


def masked(real: Tensor = RIGHT, **options: Any) -> Any:
    seqlen = real.shape[1]
    sizes: dict[str, Any] = {"batch_size": 4, "q_length": seqlen, "kv_length": seqlen, "config": LED.config}
    return make_mask(**{**sizes, "mask_function": causal_mask_function, "attention_mask": real, **options})


def test_the_meaning_of_a_mask_is_remembered_until_it_changes():
    mask = masked()
    meaning = _known(mask)
    assert meaning is not None and meaning.is_causal and meaning.seqlens_k.tolist() == [9, 4, 2, 7]
    with torch.inference_mode():
        assert _known(masked()) is not None
    mask[0, 0, 3, 5] = True
    assert _known(mask) is None
    mask[0, 0, 3, 5] = False
    assert _known(mask) is meaning
    assert _known(masked(RIGHT.flip(1))) is None
    assert _known(masked(mask_function=sliding_window_causal_mask_function(3))) is None
    assert _known(torch.ones(4, 1, 9, 9, dtype=torch.bool)) is None and _known(None) is None


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda mask: mask.__setitem__((0, 0, -1, 0), False),
    "data": lambda mask: mask.data[0, 0, -1].__setitem__(0, False),
    "detach": lambda mask: mask.detach()[0, 0, -1].__setitem__(0, False),
    "numpy": lambda mask: mask.numpy().__setitem__((0, 0, -1, 0), False),
    "another's memory": lambda mask: setattr(mask, "data", mask.tril(-1)),
    "another's dtype": lambda mask: setattr(
        mask, "data", torch.zeros(mask.shape).masked_fill(~mask.tril(-1), -torch.inf)
    ),
}


@each("seqlen, write", itertools.product([8, 9], WRITES))
def test_every_write_into_a_mask_is_noticed(seqlen, write):
    """Most ways of writing don't change a tensor's version."""
    real = torch.arange(seqlen) < torch.tensor([[seqlen], [4], [2], [7]])
    mask = masked(real)
    attention = LED.model.layers[0].self_attn
    q, k = torch.randn(4, 4, seqlen, 8, dtype=torch.float64), torch.randn(4, 2, seqlen, 8, dtype=torch.float64)

    def attended() -> Tensor:
        return attention_interface.attention_forward(attention, q, k, k, mask)[0]

    def expected() -> Tensor:
        scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
        return (scores.softmax(-1).nan_to_num() @ k.repeat_interleave(2, 1)).transpose(1, 2)

    assert _known(mask) is not None
    before = attended()
    assert_same(before, expected(), "before", 1e-9)
    WRITES[write](mask)
    assert _known(mask) is None
    assert_same(attended(), expected(), "after", 1e-9)
    assert not torch.allclose(attended(), before), "the write says something else"


def test_calls_that_the_ops_do_not_support_go_to_transformers():
    model = make("llama")
    patch_attention(model)
    attention = model.model.layers[0].self_attn
    q, k = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 2, 5, 8, dtype=torch.float64)
    with record_backends() as backends, pytest.raises(ValueError, match="softcap"):
        attention_interface.attention_forward(attention, q, k, k, None, softcap=3.0)
    assert not backends
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    with record_backends() as backends:
        out, _ = attention_interface.attention_forward(attention, q, k, k, None, position_bias=bias, is_causal=False)
    assert backends
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5 + bias
    assert_same(out, (scores.softmax(-1) @ k.repeat_interleave(2, 1)).transpose(1, 2), "with a bias")


SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SPARSE = SMALL | {
    "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 3,
    "index_n_heads": 2, "index_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("family, options", [("Falcon", SMALL), ("DeepseekV32", SPARSE), ("GlmMoeDsa", SPARSE)])
def test_code_that_looks_up_the_name_sdpa_finds_it(family, options):
    """Under another name, the code would add a mask of ones to the scores, or attend to all keys."""
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for given in ({}, {"attention_mask": RIGHT.long()}):
        real = RIGHT if given else torch.ones_like(RIGHT)
        with torch.no_grad():
            expected = model(IDS, **given).logits
            assert fastformer.report(fastformer.accelerate(model)).attention == [""]
            assert_same(model(IDS, **given).logits[real], expected[real], "logits", 1e-5)
        fastformer.restore(model)


def test_properties_are_not_changed():
    refuses = property(Mock(side_effect=RuntimeError("not to be asked for")))
    model = type("Guarded", (torch.nn.Sequential,), {"config": refuses})(torch.nn.Linear(3, 3))
    assert fastformer.report(fastformer.accelerate(model)).attention == []


def test_a_part_is_routed_without_its_own_parts():
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**SMALL, intermediate_size=40),
        transformers.BertConfig(**SMALL, intermediate_size=40, is_decoder=True, add_cross_attention=True),
    )
    model = transformers.EncoderDecoderModel(config)
    model.encoder.config._attn_implementation = "eager"
    model.decoder.config._attn_implementation = model.config._attn_implementation_internal = "sdpa"
    patch_attention(model)
    assert "encoder" not in patched_attention(model) and "decoder" in patched_attention(model)
    assert model.encoder.config._attn_implementation == "eager"


def test_another_model_of_the_same_config_is_not_changed():
    model = make("llama")
    other = LlamaForCausalLM(model.config).double()
    fastformer.accelerate(model)
    assert patched_attention(model) and not patched_attention(other)
    assert ran(lambda: model(IDS)) and not ran(lambda: other(IDS))
    fastformer.restore(model)
    assert not ran(lambda: model(IDS))


def test_a_copy_is_routed_and_its_masks_are_understood():
    model = fastformer.accelerate(make("mistral"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(IDS, attention_mask=RIGHT.long()).logits
        for _ in range(2):
            assert torch.equal(other(IDS, attention_mask=RIGHT.long()).logits, expected)
    assert patched_attention(other) and ran(lambda: other(IDS))


@pytest.mark.slow  # it makes and compiles a cache of its own, twice
def test_continuous_batching_accepts_the_name():
    model = make("llama").float().eval()
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    found = []
    for accelerated in (False, True):
        if accelerated:
            fastformer.accelerate(model)
        try:
            out = model.generate_batch(inputs=[[5, 6, 7]], generation_config=transformers.GenerationConfig(**options))
            found.append(repr([each.generated_tokens for each in out.values()]))
        except Exception as error:  # where this machine can't
            found.append(repr(error))
    assert found[0] == found[1]


def test_the_report_names_it():
    model = make("mistral")
    report = fastformer.report(fastformer.accelerate(model))
    assert report.attention == [""] and "attention" in str(report)
    eager = make("mistral")
    eager.set_attn_implementation("eager")
    assert (
        fastformer.report(fastformer.accelerate(eager)).attention == [] and eager.config._attn_implementation == "eager"
    )


@torch.no_grad()
def test_a_mask_that_does_not_fit_the_memory():
    """transformers broadcasts one of length 1 and refuses others, although all of them are right padding."""
    plain = conversions.CASES["Bart real"].make(torch.float32)
    ours = fastformer.accelerate(copy.deepcopy(plain))
    generator = torch.Generator().manual_seed(1)
    given = {
        "encoder_outputs": (torch.randn(4, 9, 24, generator=generator),),
        "decoder_input_ids": torch.tensor([[2, 7, 9]] * 4),
    }
    for length in (1, 3, 9, 12):
        mask = (torch.arange(length) < torch.tensor([[9], [length - 1], [length], [1]])).long()
        try:
            expected = plain(**given, attention_mask=mask).logits
        except RuntimeError:
            assert length not in (1, 9)
            with pytest.raises((RuntimeError, ValueError)):
                ours(**given, attention_mask=mask)
        else:
            torch.testing.assert_close(ours(**given, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4)
