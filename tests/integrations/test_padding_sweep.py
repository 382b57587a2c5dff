"""Replaced, patched, hooked or wrapped heads and models never silently change results."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any
from unittest import mock

import accelerate
import peft
import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.nn.layout import Padding
from tests.integrations.families import Wrapped
from tests.integrations.test_padding import IDS, LABELS, MASK, make

REAL = MASK.bool()

# Each model's parts that read what its stacks give, by their names.
PARTS: dict[str, tuple[str, ...]] = {
    "BertModel": ("pooler", "pooler.activation"),
    "BertForMaskedLM": ("cls", "cls.predictions.transform", "cls.predictions.decoder"),
    "BertForTokenClassification": ("classifier", "dropout"),
    "BertForSequenceClassification": ("classifier", "bert.pooler"),
    "BertForQuestionAnswering": ("qa_outputs",),
    "BertForPreTraining": ("cls.predictions", "bert.pooler", "cls.seq_relationship"),
    "BertForNextSentencePrediction": ("cls", "bert.pooler.dense"),
    "GPT2Model": ("ln_f",),
    "GPT2LMHeadModel": ("lm_head", "transformer.ln_f"),
    "GPT2ForTokenClassification": ("classifier", "dropout"),
    "GPT2ForSequenceClassification": ("score",),
    "LlamaForCausalLM": ("lm_head", "model.norm"),
    "LlamaForTokenClassification": ("score", "dropout"),
    "BartForConditionalGeneration": ("lm_head",),
    "BartForSequenceClassification": ("classification_head", "classification_head.dense"),
    "MarianMTModel": ("lm_head",),
    "T5EncoderModel": ("encoder.final_layer_norm", "encoder.dropout"),
    "T5ForConditionalGeneration": ("lm_head", "decoder.final_layer_norm"),
    "T5ForTokenClassification": ("classifier", "dropout"),
}


def mixed(x: Tensor) -> Tensor:
    """Adds a little of all other positions of its row to each position."""
    return x + 0.5 * x.mean(1, keepdim=True) if x.dim() > 2 else x + 0.5 * x.mean(-1, keepdim=True)


class Mixing(Wrapped):
    """The original module, followed by a mix of the positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return mixed_output(super().forward(*args, **kwargs))


class MeanPooler(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


class Across(nn.LSTM):
    """An LSTM in place of a layer that preserves the number of features."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def softmax_behind(part: nn.Module) -> nn.Module:
    return nn.Sequential(part, nn.Softmax(1))


def pooled(out: Any) -> Any:
    """Returns an output whose first hidden tensor is mixed along positions."""
    first = next(name for name in ("last_hidden_state", "logits", "prediction_logits", "start_logits") if name in out)
    out[first] = mixed(out[first])
    return out


def mixed_output(out: Any) -> Any:
    """Returns the output of a module, mixed along positions."""
    if isinstance(out, Tensor):
        return mixed(out)
    if isinstance(out, tuple):
        return tuple(mixed(each) if isinstance(each, Tensor) else each for each in out)
    return pooled(out)


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def replace_part(model: Any, draw: random.Random) -> None:
    name = draw.choice(PARTS[model.kind])
    part = model.get_submodule(name)
    if name.endswith("pooler"):
        _set(model, name, draw.choice((MeanPooler(), Mixing(part))))
        return
    kinds: list[Callable[[nn.Module], nn.Module]] = [Mixing, softmax_behind]
    if isinstance(part, nn.Linear) and part.in_features == part.out_features:
        kinds.append(lambda _: Across(part.in_features, part.in_features, batch_first=True).double())
    _set(model, name, draw.choice(kinds)(part))


def replace_by_its_kind(model: Any, draw: random.Random) -> None:
    """Replaces a module by another of the same class with other weights, which reads no other positions."""
    name = draw.choice(PARTS[model.kind])
    other = copy.deepcopy(model.get_submodule(name))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    _set(model, name, other)


def base_of(model: Any) -> tuple[str, Any]:
    """Returns the part of a head that gives hidden states, and its name; without a head, the model itself."""
    is_base = model.kind in ("BertModel", "GPT2Model", "T5EncoderModel")
    name = next(
        (each for each in ("bert", "transformer", "model", "decoder") if not is_base and hasattr(model, each)), ""
    )
    return name, model.get_submodule(name)


def forward_on_the_head(model: Any, draw: random.Random) -> None:
    own = type(model).forward
    if draw.random() < 0.5:
        model.forward = MethodType(lambda self, *args, **kwargs: pooled(own(self, *args, **kwargs)), model)
    else:
        bound = model.forward
        model.forward = lambda *args, **kwargs: pooled(bound(*args, **kwargs))


def forward_that_calls_the_base(model: Any, draw: random.Random) -> None:
    name, base = base_of(model)
    base_call = base if name else base.forward

    def forward(input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name.startswith("decoder")}
        return (mixed(base_call(input_ids=input_ids, attention_mask=attention_mask, **given)[0]),)

    model.forward = draw.choice((forward, functools.partial(forward)))


def forward_on_the_base(model: Any, draw: random.Random) -> None:
    _, base = base_of(model)
    bound = base.forward  # of the head itself, where it has no other base

    base.forward = lambda *args, **kwargs: mixed_output(bound(*args, **kwargs))


def wrapped_base(model: Any, draw: random.Random) -> None:
    name, base = base_of(model)

    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = base
            self.config = getattr(base, "config", None)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return pooled(self.inner(*args, **kwargs))

    if name:
        setattr(model, name, Wrap())


def hook(model: Any, draw: random.Random) -> None:
    names = [base_of(model)[0], *PARTS[model.kind]]

    part = model.get_submodule(draw.choice(names))
    part.register_forward_hook(lambda module, args, out: mixed_output(out))


def patched_class(model: Any, draw: random.Random) -> Callable[[], None]:
    """Patches the class of the model, or of a part of its family; returns the function that undoes it."""
    kinds = [type(model), *(type(model.get_submodule(name)) for name in PARTS[model.kind])]
    kinds = [next(each for each in kind.__mro__ if each.__module__.startswith("transformers.")) for kind in kinds
             if any(each.__module__.startswith("transformers.models") for each in kind.__mro__)]  # fmt: skip
    kind = draw.choice(kinds)
    own = kind.forward
    patch = pytest.MonkeyPatch()  # which takes back a method of a class that had inherited it
    patch.setattr(kind, "forward", lambda self, *args, **kwargs: mixed_output(own(self, *args, **kwargs)))
    return patch.undo


def unwrapped(model: Any, draw: random.Random) -> None:
    """Leaves the model as Accelerator does after mixed precision, which has no effect in fp64."""
    accelerate.state.AcceleratorState._reset_state(True)
    made = accelerate.Accelerator(mixed_precision=draw.choice(("no", "bf16")), cpu=True)
    prepared = made.prepare_model(model, evaluation_mode=True)
    kept = made.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert kept is model


def nothing(model: Any, draw: random.Random) -> None:
    """Leaves the model unchanged."""


EDITS: list[Callable[[Any, random.Random], Callable[[], None] | None]] = [
    *(nothing, replace_part, replace_part, replace_by_its_kind, forward_on_the_head, forward_that_calls_the_base),
    *(forward_on_the_base, wrapped_base, hook, patched_class, unwrapped),
]


class Reading(nn.Module):
    """A user's model around one of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> Any:
        return tuple(mixed(each) if each.dim() > 2 else each for each in tensors(self.model(**given)))


def tensors(out: Any) -> list[Tensor]:
    values = out if isinstance(out, tuple) else out.to_tuple()
    return [value for value in values if isinstance(value, Tensor)]


def arguments(model: Any, draw: random.Random) -> dict[str, Tensor]:
    given = {"input_ids": IDS, "attention_mask": MASK}
    if model.kind == "BartForSequenceClassification":  # which reads the last ends of the sequences
        given["input_ids"] = IDS.index_fill(1, torch.tensor([4]), model.config.eos_token_id)
    if getattr(model.config, "is_encoder_decoder", False) and "Encoder" not in model.kind:
        given |= {"decoder_input_ids": given["input_ids"], "decoder_attention_mask": MASK}
    if draw.random() < 0.5 and model.kind.endswith(("LM", "LMHeadModel", "MTModel", "Generation")):
        given["labels"] = draw.choice((LABELS, IDS))
    elif draw.random() < 0.5 and model.kind.endswith("TokenClassification"):
        given["labels"] = IDS % 2
    return given


def compared(out: Any) -> Iterator[Tensor]:
    """Returns the results to compare: everything except padding, where an accelerated model may have zeros."""
    for value in tensors(out):
        yield value[REAL] if value.dim() > 2 and value.shape[:2] == REAL.shape else value


def check(seed: int) -> bool:
    """Checks that the results are the plain model's, and returns whether padding was omitted."""
    draw = random.Random(seed)
    kind = draw.choice(list(PARTS))
    edit = draw.choice(EDITS)
    order = draw.choice(("before", "after", "after, once called"))
    wrapping = draw.choice((None, None, None, Reading, "peft")) if order == "before" else None
    plain, ours = make(kind), make(kind)
    for model in (plain, ours):
        model.config.use_cache = False
        model.kind = kind
    given = arguments(plain, draw)
    state = draw.getstate()

    def edited(model: Any, undone: contextlib.ExitStack) -> None:
        draw.setstate(state)
        torch.manual_seed(seed)
        undone.callback(edit(model, draw) or (lambda: None))

    def wrapped(model: Any) -> Any:
        if wrapping == "peft" and kind.startswith("Bert"):
            torch.manual_seed(seed)
            config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
            return peft.get_peft_model(model, config).double().eval()
        return wrapping(model) if wrapping is Reading else model

    with torch.no_grad(), mock.patch.object(Padding, "pack", autospec=True, side_effect=Padding.pack) as pack:
        with contextlib.ExitStack() as undone:
            if order == "before":
                edited(ours, undone)
                target = wrapped(ours)
                assert fastformer.accelerate(target) is target
            else:
                target = fastformer.accelerate(ours)
                if "called" in order:
                    target(**given)
                    pack.reset_mock()
                edited(ours, undone)
                if edit is patched_class:  # a class is examined when a model is handed over
                    fastformer.accelerate(target)
            mine = list(compared(target(**given)))
            packed = bool(pack.called)
        with contextlib.ExitStack() as undone:
            edited(plain, undone)
            theirs = list(compared(wrapped(plain)(**given)))
    case = f"{kind}, {edit.__name__}, {order}, {wrapping}, {sorted(given)}, seed {seed}"
    assert len(mine) == len(theirs) > 0, case
    for got, expected in zip(mine, theirs, strict=True):
        scale = expected.abs().max().clamp(min=1e-6)
        limit = 1e-5 if kind.startswith(("Llama", "T5")) else 1e-9  # RMSNorms of transformers round to fp32
        limit = 3e-2 if edit is unwrapped and got.dtype != torch.float64 else limit
        assert bool((got - expected).abs().max() <= limit * scale), case
    return packed


# None silently different; and padding is left out in many of them.
@pytest.mark.parametrize(
    ("seeds", "least"), [(range(60), 3), pytest.param(range(1000, 1500), 50, marks=pytest.mark.slow)]
)
def test_edited_models_give_the_plain_models_results(seeds, least):
    assert sum(map(check, seeds)) > least
