"""transformers' GPT-2 and Llama, accelerated: what decoder-only families have in common."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import fastformer
from fastformer.integrations.known import RETURNS_TUPLES
from fastformer.ops import record_backends
from tests.nn.comparing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")

IDS = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(0))
RIGHT = torch.arange(9) < torch.tensor([[9], [4], [1], [7]])
LEFT = RIGHT.flip(1)
HOLES = RIGHT & (torch.arange(9) != 2)
families = pytest.mark.parametrize("family", ["gpt2", "llama"])


def make(family: str, **options: Any) -> Any:
    torch.manual_seed(4)
    sizes = {"vocab_size": 60, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "max_position_embeddings": 64}
    sizes |= {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
    if family == "gpt2":
        dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
        made = GPT2LMHeadModel(GPT2Config(**sizes | dict.fromkeys(dropouts, 0.0) | options))
    else:
        sizes |= {"intermediate_size": 40, "num_key_value_heads": 2}
        made = LlamaForCausalLM(LlamaConfig(**sizes | options))
    made = made.double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.5 if parameter.dim() == 1 else 0))
    return made


@contextlib.contextmanager
def exactly(family: str) -> Iterator[None]:
    """While transformers' own code runs: nothing is rounded to fp32 on the way."""
    theirs = LlamaRMSNorm.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())

    LlamaRMSNorm.forward = forward
    yield
    LlamaRMSNorm.forward = theirs


def labels_of(mask: Tensor | None) -> Tensor:
    """The ids, but none at padding, and none that would be predicted there."""
    if mask is None:
        return IDS
    behind = torch.cat((mask[:, :1], mask[:, :-1]), 1)
    return IDS.masked_fill(~(mask & behind), -100)


def run(model: Any, mask: Tensor | None, **options: Any) -> Any:
    mask = None if mask is None else mask.long()
    return model(IDS, attention_mask=mask, **{"labels": labels_of(mask if mask is None else mask.bool())} | options)


def ran(call: Any) -> set[str]:
    with record_backends() as backends:
        call()
    return {name for name, _ in backends}


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return [g for g in torch.autograd.grad(loss, [*model.parameters()], allow_unused=True) if g is not None]


def assert_all_same(ours: list[Tensor], theirs: list[Tensor], name: str) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if other.abs().max() < 1e-12:
            assert mine.abs().max() < 1e-12
        else:
            assert_same(mine, other, name, 1e-9)


@families
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("mask", [None, RIGHT, LEFT, HOLES], ids=["no mask", "right", "left", "holes"])
def test_computes_the_same(mask, use_cache, mode, family):
    model = make(family)
    getattr(model, mode)()
    real = torch.ones(4, 9, 1) if mask is None else mask[..., None].double()
    results = []
    for accelerated in (False, True):
        if accelerated:
            report = fastformer.report(fastformer.accelerate(model))
            assert not report.left and report.attention == [""]
            names = ran(lambda: run(model, mask, use_cache=use_cache))
            assert "add_layer_norm_fwd" in names and ("feed_forward_fwd" in names) == (family == "gpt2")
            assert ("varlen_attention_fwd" in names) == (mask is not None)
            assert ("attention_fwd" in names) == (mask is None)
        with contextlib.nullcontext() if accelerated else exactly(family):
            out = run(model, mask, use_cache=use_cache)
            results.append([out.loss, out.logits * real, *gradients(model, out.loss)])
        assert (out.past_key_values is not None) == use_cache
    assert_all_same(results[1], results[0], "loss, logits or gradient")
    if mask is not None:
        given = {"input_ids": IDS, "attention_mask": mask.long()}
        assert model.base_model(**given).last_hidden_state[~mask].any()  # called by itself it may be read
        fastformer.accelerate(model.base_model, padding="skip")
        assert not model.base_model(**given).last_hidden_state[~mask].any()


@families
@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generates_the_same(num_beams, mask, family):
    model = make(family).eval()
    options = {"attention_mask": mask.long(), "max_new_tokens": 12, "num_beams": num_beams, "do_sample": False}
    with exactly(family):
        expected = model.generate(IDS, **options)
    fastformer.accelerate(model)
    names = ran(lambda: model.generate(IDS, **options))
    assert ("varlen_attention_fwd" if mask is LEFT else "attention_fwd") in names
    assert torch.equal(model.generate(IDS, **options), expected)
    assert fastformer.restore(model)
    assert model.config._attn_implementation == "sdpa" and not ran(lambda: run(model, RIGHT))
    assert not any("fastformer" in type(module).__module__ for module in model.modules())


@families
def test_a_cache_is_filled_and_goes_on(family):
    """What a packed run leaves in the cache is what the tokens behind need of it."""
    model = make(family).eval()
    mask, more = LEFT.long(), torch.randint(5, 60, (4, 3))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    longer = torch.cat((mask, mask.new_ones(4, 3)), 1)
    behind = positions[:, -1:] + torch.arange(1, 4)
    results = []
    for accelerated in (False, True):
        if accelerated:
            fastformer.accelerate(model)
        with contextlib.nullcontext() if accelerated else exactly(family):
            first = model(IDS, attention_mask=mask, position_ids=positions, use_cache=True)
            assert first.past_key_values.get_seq_length() == 9
            options = {"attention_mask": longer, "position_ids": behind, "past_key_values": first.past_key_values}
            results.append(model(more, **options).logits)
    assert_same(results[1], results[0], "with a cache", 1e-9)


@families
def test_labels_at_padding_count_as_before(family):
    """Who gives the ids as labels gets the loss that transformers gives, padding included."""
    model = make(family)
    results = []
    for accelerated in (False, True):
        if accelerated:
            fastformer.accelerate(model)
            assert "varlen_attention_fwd" not in ran(lambda: run(model, RIGHT, labels=IDS))
            # A label at padding that a real token predicts changes nothing.
            next_too = labels_of(RIGHT)
            next_too[1, 4] = 7
            assert "varlen_attention_fwd" in ran(lambda labels=next_too: run(model, RIGHT, labels=labels))
        with contextlib.nullcontext() if accelerated else exactly(family):
            out = run(model, RIGHT, labels=IDS)
            results.append([out.loss, out.logits, *gradients(model, out.loss)])
    assert_all_same(results[1], results[0], "loss with padding")


@families
def test_a_loss_of_ones_own_sees_padding(family):
    """It may count whatever it likes there."""
    model = make(family)
    model.loss_function = lambda logits, labels, **options: logits.square().mean()
    results = []
    for accelerated in (False, True):
        if accelerated:
            fastformer.accelerate(model)
            assert "varlen_attention_fwd" not in ran(lambda: run(model, RIGHT))
            assert "varlen_attention_fwd" in ran(lambda: run(model, RIGHT, labels=None))
        with contextlib.nullcontext() if accelerated else exactly(family):
            out = run(model, RIGHT)
            results.append([out.loss, *gradients(model, out.loss)])
    assert_all_same(results[1], results[0], "a loss of one's own")


@families
@pytest.mark.parametrize("order", [[0, 1, 0, 1], [0, 0], [0, 0, 1]], ids=str)
def test_layers_that_are_there_several_times(order, family):
    model = make(family)
    stack = model.base_model
    name = "h" if family == "gpt2" else "layers"
    layers = getattr(stack, name)
    setattr(stack, name, nn.ModuleList([layers[i] for i in order]))
    stack.config.num_hidden_layers = len(order)
    with exactly(family):
        theirs = run(model, RIGHT, use_cache=False)
        expected = [theirs.loss, *gradients(model, theirs.loss)]
    fastformer.accelerate(model)
    assert ("varlen_attention_fwd" in ran(lambda: run(model, RIGHT, use_cache=False))) == (
        order[-1] == 1 and len(order) == 3
    )
    ours = run(model, RIGHT, use_cache=False)
    assert_all_same([ours.loss, *gradients(model, ours.loss)], expected, "layers again")


MORE = ["hidden states", "weights", "checkpointing", "a hook", "a tuple", "the last logits", "a forward of its own"]


@families
@pytest.mark.parametrize("what", MORE)
def test_what_asks_for_more_is_answered(what, family):
    model = make(family, **({"attn_implementation": "eager"} if what == "weights" else {}))
    model.train(what == "checkpointing")
    seen: list[Tensor] = []
    options: dict[str, Any] = {}
    layer = (model.transformer.h if family == "gpt2" else model.model.layers)[1]
    if what == "hidden states":
        options["output_hidden_states"] = True
    elif what == "weights":
        options["output_attentions"] = True
    elif what == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif what == "a hook":
        layer.mlp.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    elif what == "a tuple":
        options["return_dict"] = False
    elif what == "the last logits":
        options |= {"logits_to_keep": 2, "labels": None}
    elif what == "a forward of its own":
        layer.mlp.forward = lambda x: 3 * x
    results = []
    for accelerated in (False, True):
        if accelerated:
            report = fastformer.report(fastformer.accelerate(model))
            # Before 5 who recorded hidden states put the forwards back as attributes.
            was_touched = what == "a forward of its own" and family == "gpt2"
            assert bool(report.left) == was_touched or (RETURNS_TUPLES and what == "hidden states")
            packs = "varlen_attention_fwd" in ran(lambda: run(model, RIGHT, **options))
            assert not packs or what == "a tuple"
            seen = seen[:1]
        with contextlib.nullcontext() if accelerated else exactly(family):
            out = run(model, RIGHT, **options)
            if what == "a tuple":
                results.append([out[0], out[1] * RIGHT[..., None]])
                continue
            loss = out.logits.square().sum() if out.loss is None else out.loss
            more = [*(out.hidden_states or ()), *(out.attentions or ())]
            results.append([out.logits, *more, *gradients(model, loss)])
    assert_all_same(results[1], results[0], what)
    if what == "a hook":
        assert_same(seen[-1], seen[0], "what the hook saw", 1e-9)


@families
def test_packs_again_when_nothing_is_recorded(family):
    model = make(family).eval()
    fastformer.accelerate(model)
    run(model, RIGHT, output_hidden_states=True)
    assert "varlen_attention_fwd" in ran(lambda: run(model, RIGHT))
    assert "varlen_attention_fwd" not in ran(lambda: run(model, RIGHT, output_hidden_states=True))


class Adapter(nn.Module):
    """What adapters put around a linear layer."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def adapt(model: nn.Module, names: tuple[str, ...]) -> None:
    torch.manual_seed(5)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names:
                sizes = (child.nx, child.nf) if hasattr(child, "nf") else (child.in_features, child.out_features)
                setattr(parent, name, Adapter(child, *sizes).double())


@families
@pytest.mark.parametrize("names", [("c_attn", "q_proj", "v_proj"), ("c_fc", "c_proj", "up_proj", "down_proj")])
def test_adapters_act(names, family):
    results = []
    for accelerated in (False, True):
        model = make(family)
        if accelerated:
            fastformer.accelerate(model)
        adapt(model, names)
        with contextlib.nullcontext() if accelerated else exactly(family):
            out = run(model, RIGHT)
        adapted = [p for name, p in model.named_parameters() if "down" in name or "up." in name]
        results.append([out.loss, *torch.autograd.grad(out.loss, [p for p in adapted if p.requires_grad])])
    assert_all_same(results[1], results[0], "adapters")


@families
def test_dropout_acts_in_training(family):
    names = ["resid_pdrop", "embd_pdrop", "attn_pdrop"] if family == "gpt2" else ["attention_dropout"]
    for name in names:
        model = make(family, **{name: 0.4})
        fastformer.accelerate(model)
        assert not torch.equal(run(model, RIGHT).logits, run(model, RIGHT).logits)
        model.eval()
        assert torch.equal(run(model, RIGHT).logits, run(model, RIGHT).logits)


def test_a_hooked_attention_drops_once():
    """GPT-2's attention has a dropout of its own, which is called with it where something listens to it."""
    model = make("gpt2", resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0, n_layer=1).train()
    fastformer.accelerate(model)
    block, dropped = model.transformer.h[0], []
    block.attn.register_forward_hook(lambda module, args, out: None)
    before: list[Tensor] = []
    block.ln_1.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    block.ln_2.register_forward_pre_hook(lambda module, args: dropped.append(args[0] - before[-1]))
    for _ in range(20):
        run(model, None)
    share = float(torch.stack(dropped).eq(0).double().mean())
    assert abs(share - 0.5) < 0.03


@pytest.mark.parametrize("mask", [None, RIGHT], ids=["no mask", "right"])
@pytest.mark.parametrize(
    "family, name",
    [("gpt2", "resid_pdrop"), ("gpt2", "embd_pdrop"), ("gpt2", "attn_pdrop"), ("llama", "attention_dropout")],
)
def test_what_is_dropped_wholly_is_gone(family, name, mask):
    """With a probability of one nothing is left to chance: each dropout acts, and where transformers' acts."""
    model = make(family, **{name: 1.0})
    real = 1.0 if mask is None else mask[..., None]
    with exactly(family):
        expected = run(model, mask).logits * real
    fastformer.accelerate(model)
    assert_same(run(model, mask).logits * real, expected, name, 1e-9)


@families
def test_copies_and_pickles_and_keeps_its_signature(family):
    model = make(family).eval()
    signature = inspect.signature(model.forward)
    fastformer.accelerate(model)
    assert inspect.signature(model.forward) == signature
    expected = run(model, RIGHT).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert "varlen_attention_fwd" in ran(lambda other=other: run(other, RIGHT))
        assert torch.equal(run(other, RIGHT).logits, expected)
    assert type(model).__name__ in ("GPT2LMHeadModel", "LlamaForCausalLM")


@families
def test_autocast_errs_no_more_than_before(family):
    torch.manual_seed(6)
    ids, mask = torch.randint(5, 60, (8, 40)), torch.arange(40) < torch.tensor([40, 33, 20, 7, 40, 12, 9, 1])[:, None]
    labels = ids.masked_fill(~mask, -100)
    model = make(family).float().eval()

    def results(model: Any, **options: Any) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, **options):
            out = model(ids, attention_mask=mask.long(), labels=labels)
        return [out.logits.double() * mask[..., None], *(each.double() for each in gradients(model, out.loss))]

    with exactly(family):
        exact = results(copy.deepcopy(model).double(), enabled=False)
    plain = results(model)
    fastformer.accelerate(model)
    for ours, theirs, each in zip(results(model), plain, exact, strict=True):
        # Errors of whole tensors: the largest of few elements is a matter of luck.
        assert (ours - each).norm() <= 1.5 * (theirs - each).norm() + 1e-6 * each.norm()


@families
def test_generates_the_same_from_the_logits_at_padding(family):
    model = make(family).eval()
    options = {"attention_mask": RIGHT.long(), "max_new_tokens": 5, "do_sample": False, "logits_to_keep": 0}
    with exactly(family):
        expected = model.generate(IDS, **options)
    fastformer.accelerate(model)
    assert torch.equal(model.generate(IDS, **options), expected)


@families
@pytest.mark.parametrize("how", ["told", "configured"])
def test_a_tuple_holds_what_a_dict_does(how, family):
    model = make(family).eval()
    stack = model.base_model
    fastformer.accelerate(model, padding="skip")
    given = {"input_ids": IDS, "attention_mask": RIGHT.long()}
    with torch.no_grad():
        expected = stack(**given).to_tuple()
        logits = model(**given).logits
        if how == "told":
            assert torch.equal(model(**given, return_dict=False)[0], logits)
        # transformers' own heads go with no stack whose config says so.
        model.config.return_dict = how == "told"
        found = stack(**given, **({"return_dict": False} if how == "told" else {}))
    assert type(found) is tuple and len(found) == len(expected)
    assert torch.equal(found[0], expected[0]) and not found[0][~RIGHT].any()


@families
@pytest.mark.slow
def test_compiles(family):
    model = make(family).eval()
    fastformer.accelerate(model)
    expected = run(model, RIGHT).logits * RIGHT[..., None]
    compiled = torch.compile(model)
    # The angles of rotary embeddings are fp32, whose cosine the compiler takes otherwise.
    assert_same(run(compiled, RIGHT).logits * RIGHT[..., None], expected, "compiled", 1e-6)


@pytest.mark.parametrize("name", ["GPT2DoubleHeadsModel", "GPT2ForQuestionAnswering", "LlamaForQuestionAnswering"])
def test_heads_that_read_padding_see_it(name):
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    family = transformers.LlamaConfig if "Llama" in name else transformers.GPT2Config
    model = getattr(transformers, name)(family(**sizes)).double().eval()
    ids, mask = torch.randint(0, 20, (2, 6)), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    expected = model(input_ids=ids, attention_mask=mask)[0]
    fastformer.accelerate(model)
    assert torch.allclose(model(input_ids=ids, attention_mask=mask)[0], expected, atol=1e-6)
