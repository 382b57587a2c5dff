"""Decoder-only models convert to models.GPT and back, with the same logits, losses, gradients and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.checkpoints.hf import DECODER_FORMS
from fastformer.checkpoints.hf.mixtures import in_memory
from fastformer.checkpoints.hf.rope import without_old_names
from fastformer.integrations import from_huggingface, to_huggingface
from fastformer.models import GPT, GPTConfig
from fastformer.nn import SequenceLayout
from tests.checks import assert_accurate
from tests.integrations.conversions import until_end
from tests.integrations.decoders import (
    CASES,
    Case,
    Wide,
    drawn,
    gradients_of,
    ids_of,
    in_ours,
    loss_of,
)
from tests.nn.comparing import assert_same

# The other cases take a minute together, and differ from these in tables of settings and names.
FAST = ("gpt2 untied", "llama grouped heads")
# One of each of the others, without the rounding of fp32.
EXACT = ("llama yarn rope", "mistral window", "qwen2 windows", "qwen3 wide heads", "olmo3 yarn", "phi3 longrope",
         "gemma untied", "gemma2 capped", "gemma3_text linear", "gemma4_text shared keys", "gpt_neox parallel",
         "starcoder2 window",
         "mixtral window", "granitemoe factors", "olmoe three of five", "qwen2_moe shared, one layer dense",
         "qwen3_moe every other layer",
         "smollm3 windows", "granite factors", "phi tied", "stablelm parallel", "cwm windows",
         "exaone4 windows", "qwen3_5_text grouped heads", "qwen3_5_moe_text plain",
         "qwen3_next one layer dense", "lfm2 untied", "lfm2_moe one layer dense",
         "glm4_moe one layer dense", "afmoe windows", "ernie4_5_moe one layer dense",
         "seed_oss biased", "ernie4_5 wide heads", "helium plain", "glm a third", "glm4 norms on both sides",
         "hunyuan_v1_dense alpha", "ministral3 growing queries")  # fmt: skip
cases = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in FAST else pytest.mark.slow) for name, case in CASES.items()],
)
NEAR = 1e-4  # logits nearer than this are a tie


def check(case: Case, ids: Tensor, labels: Tensor, seeds: Sequence[int]) -> None:
    """Checks logits, loss and gradients by the rule, for the worst of several draws, because one draw may be lucky."""
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for seed in seeds:
        plain, exact = case.make(seed=seed), case.make(seed=seed, is_exact=True)
        ours = from_huggingface(plain)
        assert isinstance(ours, GPT)
        plain_logits, plain_loss = loss_of(plain, ids, labels)
        plain_loss.backward()
        with Wide():
            exact_logits, exact_loss = loss_of(exact, ids, labels)
            exact_loss.backward()
        found.setdefault("output", []).append((ours(ids), plain_logits, exact_logits))
        layout = SequenceLayout.packed(torch.full((len(ids),), ids.shape[1]), ids.shape[1])
        packed = ours(ids.flatten(), layout=layout).view_as(plain_logits)
        found.setdefault("packed output", []).append((packed, plain_logits, exact_logits))
        loss = ours.loss(ids, labels)
        loss.backward()
        found.setdefault("loss", []).append((loss, plain_loss, exact_loss))
        gradients = gradients_of(ours, case)
        for (name, one), (_, other) in zip(plain.named_parameters(), exact.named_parameters(), strict=True):
            if not one.requires_grad:
                continue
            assert one.grad is not None and other.grad is not None and other.grad.abs().max() > 1e-6, name
            found.setdefault(name, []).append((gradients[name], one.grad, other.grad))
    for name, tensors in found.items():
        each = [torch.stack(which) for which in zip(*tensors, strict=True)]
        # Errors of scores, which are relaxed, are in all gradients.
        assert_accurate(each[0], each[1], each[2], "dk" if name in gradients else name)


def check_exactly(case: Case, ids: Tensor, labels: Tensor) -> None:
    """Checks logits, loss and gradients in fp64, where only a different computation makes a difference."""
    theirs = case.make(is_exact=True)
    ours = from_huggingface(theirs)
    assert isinstance(ours, GPT)
    with Wide():
        logits, expected = loss_of(theirs, ids, labels)
        expected.backward()
    assert_same(ours(ids), logits, "output", 1e-11)
    loss = ours.loss(ids, labels)
    loss.backward()
    assert_same(loss, expected, "loss", 1e-11)
    gradients = gradients_of(ours, case)
    for name, parameter in theirs.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None
        assert_same(gradients[name], parameter.grad, name, 1e-9)


@cases
def test_logits_loss_and_gradients_are_the_same(case) -> None:
    check_exactly(case, *ids_of())
    # The norm of an output near 0 makes the error of some draws of linear attention much larger.
    check(case, *ids_of(), seeds=range(3, 19 if "linear_num_key_heads" in case.options else 7))


@pytest.mark.parametrize("name", EXACT)
def test_each_family_computes_the_same(name) -> None:
    check_exactly(CASES[name], *ids_of(2, 13))


@pytest.mark.slow  # every option with every other, at unusual sizes
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", DECODER_FORMS)
def test_random_configs_compute_and_say_the_same(kind, seed) -> None:
    case = drawn(kind, seed)
    check_exactly(case, *ids_of(length=37))
    check_tokens(case, ("kv_cache", "cpp", "recompute")[seed % 3], is_lively=False)


@cases
def test_a_model_survives_the_conversion_and_back(case, tmp_path) -> None:
    theirs = case.make()
    ours = from_huggingface(theirs)
    back = to_huggingface(ours)
    state, again = theirs.state_dict(), back.state_dict()
    if type(back) is type(theirs):
        assert state.keys() == again.keys()
    # Of several families that have these options it becomes the first.
    settings, own = DECODER_FORMS[case.kind].from_model(ours)
    own = in_memory(own, state)
    atol = 2e-7 if case.kind.startswith(("gemma", "qwen3_5", "qwen3_next")) else 0  # norms that are stored less 1
    for found in (own, *([again] if type(back) is type(theirs) else [])):
        assert own.keys() == state.keys()
        for name, weight in in_ours(case, state).items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=atol, msg=name)
    same = type(theirs.config)(**without_old_names(settings))
    assert from_huggingface(type(theirs)(same)).config == ours.config
    twin = from_huggingface(back)
    assert twin.config == ours.config
    assert all(map(torch.equal, twin.state_dict().values(), ours.state_dict().values()))
    ids, _ = ids_of()
    torch.testing.assert_close(back(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    ours.save_pretrained(tmp_path)
    loaded = GPT.from_pretrained(tmp_path)
    assert loaded.config == ours.config and torch.equal(loaded(ids), ours(ids))


def continued(theirs: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Returns transformers' continuation of prompts that are padded on the left."""
    pad, width = theirs.config.pad_token_id, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    with torch.inference_mode():
        found = theirs.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)[:, width:]
    return [until_end(row, theirs.config.eos_token_id) for row in found.tolist()]


def is_tie(theirs: Any, prompt: list[int], expected: list[int], found: list[int]) -> bool:
    """Returns whether the first tokens that differ have equal scores."""
    place = next(i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt + expected[:place]])).logits[0, -1]
    return bool((logits[expected[place]] - logits[found[place]]).abs() < NEAR)


def check_tokens(case: Case, engine: str, count: int = 64, *, is_lively: bool = True) -> None:
    """Checks greedy tokens after prompts of different lengths. Not all rows may diverge at a tie.

    Args:
        is_lively: whether the model has to generate different tokens.
    """
    has_states = not {"linear_attention", "conv"}.isdisjoint(case.options.get("layer_types", ()))
    if engine == "kv_cache" and has_states:  # which it has no place for
        engine = "recompute"
    theirs = case.make(seed=4)
    ids, _ = ids_of()
    prompts = [ids[0].tolist(), ids[1, :5].tolist(), ids[2, :1].tolist()]
    expected = continued(theirs, prompts, count)
    ours, width = from_huggingface(theirs), ids.shape[1]
    pad = ours.config.special_ids.pad
    ties, found = 0, []
    for rows in (
        prompts,
        torch.tensor([[pad] * (width - len(row)) + row for row in prompts]),
        torch.tensor([row + [pad] * (width - len(row)) for row in prompts]),
    ):
        out = ours.generate(rows, max_new_tokens=count, engine=engine)[:, width:].tolist()
        found.append([until_end(row, theirs.config.eos_token_id) for row in out])
    assert found[0] == found[1] == found[2]
    for prompt, row, said in zip(prompts, expected, found[0], strict=True):
        if row != said:
            assert is_tie(theirs, prompt, row, said), (row, said)
            ties += 1
    assert ties < len(prompts) and (not is_lively or len({*map(tuple, expected)}) > 1)


@pytest.mark.parametrize("engine", ["kv_cache", "cpp"])
@cases
def test_generates_the_same_tokens(case, engine) -> None:
    check_tokens(case, engine)


GATED: dict[str, Any] = {"norm": "rms", "activation": "geglu_tanh", "positions": "rotary", "bias": False}
SIZES: dict[str, Any] = {"vocab_size": 31, "d_model": 16, "num_heads": 4, "num_layers": 2}


@pytest.mark.parametrize("options", [{}, {"qk_norm": "head"}], ids=["gemma2", "gemma3"])
def test_a_family_of_windows_computes_a_model_without_one(options) -> None:
    config = GPTConfig(**SIZES, **GATED, **options, norm_placement="both", embedding_scale=4.0, layer_norm_eps=1e-6)
    ours = GPT(config).eval()
    theirs = to_huggingface(ours)
    ids = torch.randint(3, 31, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids).index_fill_(1, torch.tensor([0]), 0)
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)
    assert theirs(ids, attention_mask=mask).logits.isfinite().all()
    assert from_huggingface(theirs).config.windows == config.windows


def test_a_scaling_of_positions_that_no_family_has_is_refused() -> None:
    scaling = {"kind": "linear", "factor": 2.0}
    # Of those that rotate a part, GLM-4 has no windows, and a Phi-3 another scaling.
    options = {**GATED, "activation": "swiglu", "rotary_fraction": 0.5, "rotary_scaling": scaling, "window_size": 3}
    with pytest.raises(ValueError, match=r"\brotary_scaling\b"):
        to_huggingface(GPT(GPTConfig(**SIZES, **options)))
