"""Stacks inside of models of transformers: packed where it is known that these don't read what there is at padding."""

from __future__ import annotations

import copy
import importlib
import weakref
from types import MethodType
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.bert.modeling_bert import BertForMaskedLM, BertModel, BertPreTrainedModel

import fastformer
from fastformer.integrations.acceleration import known_swaps
from fastformer.integrations.hugging_face import RETURNS_TUPLES
from fastformer.integrations.readers import _HANDING_ON, _MARK
from fastformer.nn.padding import Padding

VOCAB = 64
IDS = torch.randint(5, VOCAB - 1, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(9) < torch.tensor([[9], [5]])).long()
LABELS = IDS.masked_fill(MASK.roll(1, 1) * MASK == 0, -100)  # none at padding, and none that would be predicted there
needs_t5_stacks = pytest.mark.skipif(RETURNS_TUPLES, reason="T5's stacks are swapped from transformers 5 on")

SIZES: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "Bart": {
        **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
        **{"forced_eos_token_id": None, "use_cache": False},
    },
    "T5": {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "use_cache": False},
}
SIZES["DPR"] = SIZES["Bert"]
SIZES["Marian"] = SIZES["Bart"]


def config_of(family: str) -> Any:
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3}
    return getattr(transformers, f"{family}Config")(vocab_size=VOCAB, **SIZES[family], **ids)


def drawn(model: nn.Module) -> Any:
    """In evaluation, with parameters in fp64 that show what is lost."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.double().eval()


def make(name: str) -> Any:
    family = next(family for family in SIZES if name.startswith(family))
    return drawn(getattr(transformers, name)(config_of(family)))


def make_llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        text_config=config_of("Llama"), vision_config=vision, image_token_index=VOCAB - 1, image_seq_length=4
    )
    return drawn(transformers.LlavaForConditionalGeneration(config))


def packs(call: Any) -> bool:
    with mock.patch.object(Padding, "pack", autospec=True, side_effect=Padding.pack) as pack, torch.no_grad():
        call()
    return bool(pack.called)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # RMSNorms of transformers round to fp32


def given_to(model: Any, labels: Tensor) -> dict[str, Tensor]:
    given = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    is_seq2seq = model.config.is_encoder_decoder
    return given | ({"decoder_input_ids": IDS, "decoder_attention_mask": MASK} if is_seq2seq else {})


READS = "around it may read what it gives at padding, which it computes"


def test_a_softmax_over_positions_of_a_model_that_is_not_known():
    model = make("DPRReader")
    with torch.no_grad():
        theirs = model(IDS, attention_mask=MASK)
        report = fastformer.accelerate(model)
        ours = model(IDS, attention_mask=MASK)
    assert report.left == {"span_predictor.encoder.bert_model.encoder": f"DPRReader {READS}"}
    assert_equal(ours.start_logits, theirs.start_logits)
    assert_equal(ours.end_logits, theirs.end_logits)
    assert READS in str(report) and report.left == fastformer.accelerate(model).left


def test_a_language_model_in_a_model_that_is_not_known():
    model, ids = make_llava(), IDS.clone()
    ids[:, :4] = VOCAB - 1
    given = {"input_ids": ids, "attention_mask": MASK, "pixel_values": torch.randn(2, 3, 16, 16).double()}

    def read() -> list[Tensor]:
        tokens = model.generate(**given, max_new_tokens=4, do_sample=False)
        return [model(**given, labels=ids).loss, model(**given, logits_to_keep=1).logits, tokens.double()]

    with torch.no_grad():
        theirs = read()
        report = fastformer.accelerate(model)
        assert report.left == {"model.language_model": f"LlavaForConditionalGeneration {READS}"}
        for mine, other in zip(read(), theirs, strict=True):
            assert_equal(mine, other)
    # What is taken out of the model is still what it was marked as, and so is a copy.
    language_model = copy.deepcopy(model.model.language_model)
    assert not packs(lambda: language_model(input_ids=IDS, attention_mask=MASK))
    fastformer.restore(model)
    assert not any(_MARK in vars(module) for module in model.modules())
    fastformer.accelerate(model.model.language_model)
    assert packs(lambda: model.model.language_model(input_ids=IDS, attention_mask=MASK))
    assert not packs(lambda: model(**given))


PARTS = [
    *(
        ("BertForMaskedLM", "bert"),
        ("BertForQuestionAnswering", "bert"),
        ("BertForTokenClassification", "bert.encoder"),
    ),
    *(("GPT2LMHeadModel", "transformer"), ("GPT2ForSequenceClassification", "transformer")),
    *(("LlamaForCausalLM", "model"), ("BartForConditionalGeneration", "model"), ("MarianMTModel", "model")),
    *(("BartForConditionalGeneration", "model.decoder"), ("BartForConditionalGeneration", "model.encoder")),
    pytest.param("T5ForConditionalGeneration", "encoder", marks=needs_t5_stacks),
    pytest.param("T5ForConditionalGeneration", "decoder", marks=needs_t5_stacks),
    pytest.param("T5ForTokenClassification", "transformer.encoder", marks=needs_t5_stacks),
]


@pytest.mark.parametrize(("name", "part"), PARTS)
@pytest.mark.parametrize("how", ["called", "forward", "in a method"])
def test_a_part_whose_head_is_not_accelerated(how, name, part):
    model = make(name)
    given = given_to(model, IDS % 2 if "Classification" in name else IDS)
    if "Question" in name:
        del given["labels"]
    if "Sequence" in name:
        given["labels"] = given["labels"][:, 0]

    class Mine(nn.Module):
        def read(self) -> Any:
            return model(**given)

    def read() -> tuple[Tensor, ...]:
        call = {"called": lambda: model(**given), "forward": lambda: model.forward(**given), "in a method": Mine().read}
        out = call[how]()
        return (out.start_logits, out.end_logits) if "Question" in name else (out.loss, out.logits)

    with torch.no_grad():
        theirs = read()
        report = fastformer.accelerate(model.get_submodule(part))
        assert report.swapped and not report.left
        for mine, other in zip(read(), theirs, strict=True):
            assert_equal(mine, other)
    assert not packs(read)


HEADS = [
    *(
        "BertForMaskedLM",
        "BertForTokenClassification",
        "BertForSequenceClassification",
        "BertForNextSentencePrediction",
    ),
    *("GPT2LMHeadModel", "LlamaForCausalLM", "BartForConditionalGeneration", "MarianMTModel"),
    *(pytest.param(f"T5For{what}", marks=needs_t5_stacks) for what in ("ConditionalGeneration", "TokenClassification")),
]


@pytest.mark.parametrize("name", HEADS)
def test_known_heads_are_packed(name):
    """Also where their stacks were accelerated before they were themselves."""
    model = make(name)
    given = given_to(model, LABELS)
    if "Classification" in name or "Next" in name:
        del given["labels"]
    fastformer.accelerate(next(model.children()))
    assert not packs(lambda: model(**given)) or name.startswith(("BertForSequence", "BertForNext"))
    assert not fastformer.accelerate(model).left
    assert packs(lambda: model(**given))
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    assert packs(lambda: lora(**given))


def test_multiple_choice_is_packed():
    model = make("BertForMultipleChoice")
    fastformer.accelerate(model)
    assert packs(lambda: model(input_ids=IDS[None], attention_mask=MASK[None]))


class Mine(nn.Module):
    """A model of somebody's own: what it reads at padding is zeros."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        read: Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return read


BODIES = [
    *("BertModel", "GPT2Model", "LlamaModel"),
    *(pytest.param("T5EncoderModel", marks=needs_t5_stacks),),
]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("around", [False, True], ids=["the model", "what is inside"])
def test_models_of_ones_own_are_packed(around, name):
    model = Mine(make(name))
    assert not fastformer.accelerate(model if around else model.encoder).left
    assert packs(lambda: model(IDS, MASK)) and packs(lambda: model.encoder(input_ids=IDS, attention_mask=MASK))
    with torch.no_grad():
        assert (model(IDS, MASK)[MASK == 0] == 0).all()


@pytest.mark.parametrize("name", ["BartModel", "MarianModel"])
def test_stacks_by_themselves_are_packed(name):
    model = make(name)
    fastformer.accelerate(model)
    for stack in (model.encoder, model.decoder):
        assert packs(lambda: stack(input_ids=IDS, attention_mask=MASK))  # noqa: B023
    assert packs(lambda: model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=IDS, decoder_attention_mask=MASK))


class MyHead(BertForMaskedLM):  # type: ignore[misc]
    """Reads as the class that it is derived from, which isn't swapped here."""


class MyReader(BertModel):  # type: ignore[misc]
    """Reads the last position."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).last_hidden_state[:, -1]


class MyBert(BertModel):  # type: ignore[misc]
    """Reads nothing of its own."""


@pytest.mark.parametrize("kind", [MyHead, MyReader, MyBert])
def test_subclasses(kind):
    model = drawn(kind(config_of("Bert")))
    with torch.no_grad():
        theirs = model(IDS, attention_mask=MASK)
        report = fastformer.accelerate(model)
        ours = model(IDS, attention_mask=MASK)
    marked = [name for name, reason in report.left.items() if reason == f"{kind.__name__} {READS}"]
    if kind is MyBert:
        assert not marked and packs(lambda: model(IDS, attention_mask=MASK))
        return
    assert len(marked) == 1 and not packs(lambda: model(IDS, attention_mask=MASK))
    assert_equal(*((ours, theirs) if kind is MyReader else (ours.logits, theirs.logits)))


class Reader(BertPreTrainedModel):  # type: ignore[misc]
    """What somebody keeps beside transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = BertModel(config)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return weigh(self, ids, mask)


def weigh(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    read: Tensor = model.bert(ids, attention_mask=mask).last_hidden_state
    return read.softmax(1)


@pytest.mark.parametrize("how", ["called", "forward", "a forward of its own"])
@pytest.mark.parametrize("around", [False, True], ids=["the stack", "the model"])
def test_a_model_that_somebody_else_wrote(around, how):
    model = drawn(Reader(config_of("Bert")))
    if how == "a forward of its own":
        model.forward = MethodType(weigh, model)
    call = model.forward if how == "forward" else model
    with torch.no_grad():
        theirs = call(IDS, MASK)
        report = fastformer.accelerate(model if around else model.bert)
        assert report.left == ({"bert.encoder": f"Reader {READS}"} if around else {})
        assert_equal(call(IDS, MASK), theirs)


def test_a_replaced_forward_of_a_head_may_read_padding(monkeypatch):
    model = make("LlamaForCausalLM")
    fastformer.accelerate(model)
    assert packs(lambda: model(IDS, attention_mask=MASK))
    own = transformers.LlamaForCausalLM.forward
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs)
    )
    assert not packs(lambda: model(IDS, attention_mask=MASK))
    monkeypatch.undo()
    assert packs(lambda: model(IDS, attention_mask=MASK))


@pytest.mark.parametrize("around", [False, True], ids=["the encoder", "the model"])
def test_generate_of_a_model_that_is_not_known_calls_its_encoder(around):
    """Which no forward of the model is around then."""
    model = drawn(
        transformers.EncoderDecoderModel(
            encoder=make("BertModel"), decoder=transformers.GPT2LMHeadModel(gpt2_that_crosses())
        )
    )
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 3
    model.config.pad_token_id = model.generation_config.pad_token_id = 1
    fastformer.accelerate(model if around else model.encoder)
    assert not packs(lambda: model.generate(IDS, attention_mask=MASK, max_new_tokens=2))
    assert packs(lambda: model.encoder(IDS, attention_mask=MASK)) != around


def gpt2_that_crosses() -> Any:
    config = config_of("GPT2")
    config.is_decoder = config.add_cross_attention = True
    return config


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("around", [False, True], ids=["the stack", "the model"])
def test_what_is_computed_again_in_the_backward_pass_stays_padded(around, use_reentrant):
    """There the models around it aren't to be seen."""
    model = make("DPRReader")
    encoder = model.span_predictor.encoder.bert_model.encoder

    def step(checkpoints: bool) -> list[Tensor]:
        def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            def run(x: Tensor) -> Tensor:
                return own(self, x, *args, **kwargs).last_hidden_state

            x = checkpoint(run, x, use_reentrant=use_reentrant)
            return transformers.modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=x)

        if checkpoints:
            type(encoder).forward = forward
        try:
            loss = model(IDS, attention_mask=MASK).start_logits.square().sum()
            model.zero_grad()
            loss.backward()
            return [parameter.grad for parameter in encoder.parameters()]
        finally:
            if checkpoints:
                type(encoder).forward = own

    fastformer.accelerate(model if around else encoder)
    own = type(encoder).forward
    theirs = step(False)
    for mine, other in zip(step(True), theirs, strict=True):
        assert_equal(mine, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["GPT2ForSequenceClassification", "LlamaForSequenceClassification"])
def test_what_is_computed_again_for_a_head_that_reads_padding_stays_padded(name, use_reentrant):
    """There the head isn't to be heard, nor does the last call of the stack tell what that one was."""
    model = make(name)
    base = model.base_model_prefix
    stack = getattr(model, base)

    class Checkpointed(nn.Module):
        def forward(self, ids: Tensor, **kwargs: Any) -> Any:
            def run(_: Tensor) -> Tensor:
                return stack(ids, **kwargs | {"return_dict": True, "use_cache": False}).last_hidden_state

            x = checkpoint(run, torch.zeros(1, requires_grad=True), use_reentrant=use_reentrant)
            return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=x)

    def gradients() -> list[Tensor]:
        stack.zero_grad()
        read = model(IDS, attention_mask=MASK, use_cache=False).logits.square().sum()
        assert packs(lambda: stack(IDS, attention_mask=MASK))
        read.backward()
        return [parameter.grad.clone() for parameter in stack.parameters() if parameter.grad is not None]

    fastformer.accelerate(model)
    theirs = gradients()
    setattr(model, base, Checkpointed())
    for mine, other in zip(gradients(), theirs, strict=True):
        assert_equal(mine, other)


def test_nothing_of_the_callers_is_kept():
    """Asking a frame for its locals makes a copy of them, before Python 3.13."""
    bert = make("BertModel")
    freed = []

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, ids: Tensor) -> Any:
            x = self.bert.embeddings.word_embeddings(ids)
            there = weakref.ref(x)
            out = self.bert(inputs_embeds=x, attention_mask=MASK).last_hidden_state
            del x
            freed.append(there() is None)
            return out

    fastformer.accelerate(bert)
    with torch.no_grad():
        Own()(IDS)
    assert freed == [True]


def test_a_part_compiles_with_its_head():
    model = make("GPT2LMHeadModel")
    with torch.no_grad():
        theirs = model(IDS, attention_mask=MASK).logits
        fastformer.accelerate(model.transformer)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_equal(compiled(IDS, attention_mask=MASK).logits, theirs)


@pytest.mark.parametrize("family", ["bart", "bert", "gpt2", "llama", "marian", "t5"])
def test_of_each_model_of_a_family_it_is_known_what_it_reads(family):
    source = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds: list[type[nn.Module]] = [
        kind
        for kind in vars(source).values()
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == source.__name__
    ]
    readers = {kind for kind in kinds if kind.forward is not nn.Module.forward}
    importlib.import_module(f"fastformer.integrations.{family}")
    assert readers and (family == "t5" and RETURNS_TUPLES or readers <= {*known_swaps(), *_HANDING_ON})
