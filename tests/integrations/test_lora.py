"""peft's LoRA on accelerated models has the outputs and learns the adapters of the original models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

import fastformer
from fastformer.ops import record_backends
from tests.checks import error, small_draws
from tests.covering import by_turns, covering
from tests.integrations.families import FUSED, IDS, LEFT, PACKED, RIGHT, assert_all_same, exactly, gradients, run
from tests.integrations.families import make as make_small
from tests.nn.comparing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

FAMILIES = ("bert", "gpt2", "llama")
families = pytest.mark.parametrize("family", FAMILIES)
ATTENTIONS = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
HEADS = {"bert": "decoder", "gpt2": "lm_head", "llama": "lm_head"}


def make(family: str) -> Any:
    return make_small(family).train()


def adapt(model: Any, **options: Any) -> Any:
    """Gives both halves of each adapter random weights, because peft begins with zeros, which add nothing."""
    torch.manual_seed(8)
    settings = {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**settings | options))


def prepared(family: str, first: str, **options: Any) -> Any:
    """Returns the adapted model: plain, or accelerated before or after it was adapted."""
    model = make(family)
    if first == "accelerate":
        assert fastformer.report(fastformer.accelerate(model)).swapped
    adapted = adapt(model, **options)
    if first == "LoRA":
        assert fastformer.report(fastformer.accelerate(adapted)).swapped
    return adapted


class Step:
    """The logits at tokens, the adapters' gradients for a random dy, by name, and fastformer's ops that ran."""

    def __init__(self, model: Any, mask: Tensor | None, **options: Any) -> None:
        torch.manual_seed(7)
        model.zero_grad()
        given = {} if mask is None else {"attention_mask": mask.long()}
        with record_backends() as ran:
            logits = model(input_ids=IDS, **given, **options).logits
        self.ran = {name for name, _ in ran}
        self.logits = logits if mask is None else logits * mask[..., None]
        dy = torch.randn(logits.shape, dtype=torch.float64).to(logits.dtype)
        if self.logits.requires_grad:
            (self.logits * dy).sum().backward()
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def assert_same(self, other: Step) -> None:
        assert_same(self.logits, other.logits, "logits", 1e-9)
        assert self.gradients.keys() == other.gradients.keys()
        for name, gradient in other.gradients.items():
            assert_same(self.gradients[name], gradient, name, 1e-9)


def exact_step(family: str, model: Any, mask: Tensor | None, **options: Any) -> Step:
    with exactly(family):
        step = Step(model, mask, **options)
    assert not step.ran
    return step


ORDERS = ("accelerate", "LoRA")
MASKS = {"no mask": None, "right": RIGHT, "left": LEFT}


@pytest.mark.parametrize(
    "family, first, mask, where", covering(FAMILIES, ORDERS, [*MASKS], ["attention", "everywhere"])
)
def test_outputs_and_gradients_are_the_same(family, first, mask, where):
    """Padded batches are packed as without adapters, which read one token at a time."""
    options = {"target_modules": ATTENTIONS[family]} if where == "attention" else {}
    mask = MASKS[mask]
    expected = exact_step(family, prepared(family, "", **options), mask)
    model = prepared(family, first, **options)
    step = Step(model, mask)
    step.assert_same(expected)
    assert len(step.gradients) >= 2 * 2 and all("lora_" in name for name in step.gradients)
    # BERT's pooler reads the first token, and a loss outside of the call reads what a decoder predicts before it, so
    # padding on the left is computed.
    assert (PACKED in step.ran) == (mask is RIGHT)
    assert (FUSED in step.ran) == (where == "attention" and family != "llama")
    with model.disable_adapter(), exactly(family):
        assert not torch.allclose(Step(model, mask).logits, step.logits), "the adapters say something"


# In which order they came is told in fp64, above; the roundings are those of the same kernels.
@pytest.mark.parametrize("first, family", by_turns(ORDERS, FAMILIES))
def test_in_fp32_by_the_rule(family, first):
    """The logits and the gradients of adapters err at most twice as much as those of the original adapted model.

    The test compares the means, over 32 draws, of the largest error of a draw. Each draw has its own tokens, because
    draws over the same tokens share the errors of the forward pass. Sometimes one of the models, plain or accelerated,
    errs several times as much in one draw (a gradient of queries or keys, a small difference of large numbers).
    """
    results: dict[str, dict[str, list[Tensor]]] = {}
    for which in ("exact", "plain", first):
        model = prepared(family, which)
        if which != "exact":
            model.float()
        for draw in range(4 * small_draws()):
            torch.manual_seed(draw)
            ids = torch.randint(5, 60, IDS.shape)
            with exactly(family) if which == "exact" else contextlib.nullcontext():
                out = model(input_ids=ids, attention_mask=RIGHT.long()).logits * RIGHT[..., None]
            dy = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
            learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(out, [*learning.values()], dy)
            for name, value in [("logits", out), *zip(learning, gradients, strict=True)]:
                results.setdefault(which, {}).setdefault(name, []).append(value)
    exact, plain, ours = ({name: torch.stack(drawn) for name, drawn in each.items()} for each in results.values())
    assert ours.keys() == exact.keys() and len(ours) > 10
    for name, value in ours.items():
        err_ours, err_plain = mean_error(value, exact[name]), mean_error(plain[name], exact[name])
        ulp = torch.finfo(torch.float32).eps * float(exact[name].abs().max())
        assert err_ours <= 2 * err_plain + ulp, f"{name}: error {err_ours:.3e}, plain's {err_plain:.3e}, ulp {ulp:.3e}"


def mean_error(values: Tensor, exact: Tensor) -> float:
    """Returns the mean, over draws, of each draw's largest error."""
    return sum(map(error, values, exact)) / len(values)


@pytest.mark.parametrize(
    "family, first, how", covering(FAMILIES, ORDERS, ["merge_and_unload", "merge_adapter", "unload"])
)
def test_adapters_are_merged_and_removed(family, first, how):
    """Merging writes into the weights. An unloaded model is the original one: fused and packed, or restored."""
    expected, model = prepared(family, ""), prepared(family, first)
    with exactly(family):
        adapted = Step(expected, RIGHT).logits
    made = [(getattr(each, how)() or each).eval() for each in (expected, model)]
    with torch.no_grad():
        plain, step = exact_step(family, made[0], RIGHT), Step(made[1], RIGHT)
        step.assert_same(plain)
        assert PACKED in step.ran and ((FUSED in step.ran) == (how != "merge_adapter" and family != "llama"))
        same = torch.allclose(step.logits, adapted)
        assert same == (how != "unload")
        if how == "merge_adapter":
            model.unmerge_adapter()
            assert_same(Step(model, RIGHT).logits, adapted, "unmerged", 1e-9)
            return
        assert made[1].state_dict().keys() == made[0].state_dict().keys()
        assert fastformer.restore(made[1])
        exact_step(family, made[1], RIGHT).assert_same(plain)
        assert [type(module) for module in made[1].modules()] == [type(module) for module in made[0].modules()]


# Adapters that see more than a token: another one for each row of the batch; one that begins to act at a token of each
# row; one that goes by an average over the first batch that comes, padding and all.
WATCHED: dict[str, dict[str, Any]] = {
    "rows": {},
    "alora": {"alora_invocation_tokens": [int(IDS[0, 2])], "task_type": "CAUSAL_LM"},
    "velora": {"velora_config": peft.VeloraConfig(num_groups=2, init_type="batch_average_once")},
}


@pytest.mark.parametrize("family, first, what", covering(["gpt2", "llama"], ORDERS, [*WATCHED]))
def test_adapters_that_see_several_tokens_get_the_whole_batch(family, first, what):
    plain, model = (prepared(family, which, **WATCHED[what]) for which in ("", first))
    options = {}
    if what == "rows":
        options = {"adapter_names": ["default", "other", "__base__", "other"]}
        for each in (plain, model):
            torch.manual_seed(9)
            each.add_adapter("other", LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
            each.eval()
    expected, step = exact_step(family, plain, RIGHT, **options), Step(model, RIGHT, **options)
    step.assert_same(expected)
    assert PACKED not in step.ran and len(step.gradients) > 4


EMBEDDINGS = {"bert": "word_embeddings", "gpt2": "wte", "llama": "embed_tokens"}
# A norm of a weight; a whole copy of the head, in a wrapper of peft's, outside of the stack; adapters on the head and
# the embedding.
MORE: dict[str, Callable[[str], dict[str, Any]]] = {
    "DoRA": lambda family: {"use_dora": True},
    "a copy of the head": lambda family: {"modules_to_save": [HEADS[family]]},
    "the head": lambda family: {"target_modules": [*ATTENTIONS[family], EMBEDDINGS[family], HEADS[family]]},
}


@pytest.mark.parametrize("family, what, first", covering(FAMILIES, [*MORE], ORDERS))
def test_other_adapters_are_packed(family, what, first):
    expected = exact_step(family, prepared(family, "", **MORE[what](family)), RIGHT)
    step = Step(prepared(family, first, **MORE[what](family)), RIGHT)
    step.assert_same(expected)
    assert PACKED in step.ran and (what == "DoRA" or any(HEADS[family] in name for name in step.gradients))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("on_the_head", [False, True])
def test_the_fused_loss(family, on_the_head):
    """A head with an adapter returns its logits, because the loss would be that of the weight alone."""
    targets = [*ATTENTIONS[family], HEADS[family]] if on_the_head else ATTENTIONS[family]
    model, plain = (prepared(family, "", target_modules=targets) for _ in range(2))
    fastformer.accelerate(model, fused_loss=True)
    found = run(model, RIGHT)
    with exactly(family):
        expected = run(plain, RIGHT)
    assert (found.logits is None) == (not on_the_head)
    ours, theirs = ([out.loss, *gradients(each, out.loss)] for out, each in ((found, model), (expected, plain)))
    assert_all_same(ours, theirs, "loss or gradient", 1e-6)  # transformers takes a decoder's loss in fp32


@families
def test_dropout_works_in_the_adapters(family):
    """With a probability of one, the adapters add nothing in training, and everything in evaluation."""
    model = prepared(family, "accelerate", lora_dropout=1.0)
    with torch.no_grad():
        with_all = Step(model.eval(), RIGHT).logits
        without = Step(model.train(), RIGHT).logits
        with model.disable_adapter():
            assert_same(without, Step(model, RIGHT).logits, "dropped", 1e-12)
    assert not torch.allclose(with_all, without)


@families
def test_saved_adapters_are_loaded_into_either(family, tmp_path):
    expected = prepared(family, "", task_type="FEATURE_EXTRACTION")
    prepared(family, "accelerate", task_type="FEATURE_EXTRACTION").save_pretrained(tmp_path)
    assert "fastformer" not in (tmp_path / "adapter_config.json").read_text().lower()
    plain = exact_step(family, expected.eval(), RIGHT)
    for accelerated in (False, True):
        model = make(family).eval()
        if accelerated:
            fastformer.accelerate(model)
        loaded = PeftModel.from_pretrained(model, tmp_path)
        with contextlib.nullcontext() if accelerated else exactly(family):
            step = Step(loaded, RIGHT)
        assert_same(step.logits, plain.logits, "loaded", 1e-9)
        assert (PACKED in step.ran) == accelerated


def test_without_a_task_peft_writes_down_the_class_of_the_model(tmp_path):
    model = prepared("gpt2", "accelerate")
    model.save_pretrained(tmp_path)
    written = lambda: json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]  # noqa: E731
    assert written() == {"base_model_class": "GPT2LMHeadModel", "parent_library": "fastformer.integrations.gpt2"}
    fastformer.restore(model)
    model.save_pretrained(tmp_path)
    assert written()["parent_library"] == "transformers.models.gpt2.modeling_gpt2"
