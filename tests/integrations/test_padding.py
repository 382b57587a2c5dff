"""Stacks of transformers skip padding if the accelerated model is known not to read it."""

from __future__ import annotations

import copy
import inspect
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertForMaskedLM, BertModel

import fastformer
from fastformer.nn.layout import Padding
from tests.integrations.families import OPTIONS

VOCAB = OPTIONS["bert"]["vocab_size"]
IDS = torch.randint(5, VOCAB - 1, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(9) < torch.tensor([[9], [5]])).long()
LABELS = IDS.masked_fill(MASK.roll(1, 1) * MASK == 0, -100)  # none at padding, and none that would be predicted there

FAMILIES = ("Bert", "GPT2", "Llama", "Bart", "Marian", "T5", "DPR")


def config_of(family: str) -> Any:
    options = OPTIONS["bert" if family == "DPR" else family.lower()]
    if family in ("Bart", "Marian", "T5"):
        options = options | {"use_cache": False, "forced_eos_token_id": None}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3}
    return getattr(transformers, f"{family}Config")(**options | ids)


def drawn(model: nn.Module) -> Any:
    """Returns the model in evaluation mode, with fp64 parameters that reveal lost information."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.double().eval()


def make(name: str, **changes: Any) -> Any:
    config = config_of(next(family for family in FAMILIES if name.startswith(family)))
    config.update(changes)
    return drawn(getattr(transformers, name)(config))


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


def assert_real_outputs_equal(ours: Any, theirs: Any) -> None:
    """Compares the losses and logits of outputs; by position, only those of tokens."""
    names = [name for name in ("loss", "logits") if theirs.get(name) is not None]
    assert "logits" in names
    for name in names:
        by_token = theirs[name].shape[:2] == MASK.shape and theirs[name].dim() == 3
        assert_equal(*(each[name][MASK.bool()] if by_token else each[name] for each in (ours, theirs)))


def given_to(model: Any, labels: Tensor) -> dict[str, Tensor]:
    given = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    is_seq2seq = model.config.is_encoder_decoder
    return given | ({"decoder_input_ids": IDS, "decoder_attention_mask": MASK} if is_seq2seq else {})


def computed(report: Any, stack: str) -> bool:
    return report.padding[stack].startswith("padding is computed")


def test_a_softmax_over_positions_of_a_model_that_is_not_known():
    model = make("DPRReader")
    with torch.no_grad():
        theirs = model(IDS, attention_mask=MASK)
        report = fastformer.report(fastformer.accelerate(model))
        ours = model(IDS, attention_mask=MASK)
    assert computed(report, "span_predictor.encoder.bert_model.encoder") and "DPRReader" in str(report)
    assert_equal(ours.start_logits, theirs.start_logits)
    assert_equal(ours.end_logits, theirs.end_logits)
    assert report == fastformer.report(fastformer.accelerate(model))


def test_a_language_model_in_a_model_that_is_not_known():
    model, ids = make_llava(), IDS.clone()
    ids[:, :4] = VOCAB - 1
    given = {"input_ids": ids, "attention_mask": MASK, "pixel_values": torch.randn(2, 3, 16, 16).double()}

    def read() -> list[Tensor]:
        tokens = model.generate(**given, max_new_tokens=4, do_sample=False)
        return [model(**given, labels=ids).loss, model(**given, logits_to_keep=1).logits, tokens.double()]

    with torch.no_grad():
        theirs = read()
        report = fastformer.report(fastformer.accelerate(model))
        assert computed(report, "model.language_model")
        for mine, other in zip(read(), theirs, strict=True):
            assert_equal(mine, other)
    # A part that is taken out of the model keeps its rule, and so does a copy, and what is accelerated by itself.
    language_model = copy.deepcopy(model.model.language_model)
    assert not packs(lambda: language_model(input_ids=IDS, attention_mask=MASK))
    fastformer.accelerate(model.model.language_model)
    assert not packs(lambda: model.model.language_model(input_ids=IDS, attention_mask=MASK))
    fastformer.restore(model)
    fastformer.accelerate(model.model.language_model)
    assert packs(lambda: model.model.language_model(input_ids=IDS, attention_mask=MASK))


PARTS = [
    *(("BertForMaskedLM", "bert"), ("BertForQuestionAnswering", "bert")),
    *(("BertForTokenClassification", "bert.encoder"), ("GPT2ForSequenceClassification", "transformer")),
    ("GPT2LMHeadModel", "transformer"),
    *(("LlamaForCausalLM", "model"), ("BartForConditionalGeneration", "model"), ("MarianMTModel", "model")),
    *(("BartForConditionalGeneration", "model.decoder"), ("BartForConditionalGeneration", "model.encoder")),
    ("T5ForConditionalGeneration", "encoder"),
    ("T5ForConditionalGeneration", "decoder"),
    ("T5ForTokenClassification", "transformer.encoder"),
]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_part_that_is_handed_in_alone_keeps_its_rule_inside_of_its_head(name, part):
    """The head can't be seen from the part; it reads zeros at padding, and the same values as before elsewhere."""
    model = make(name)
    given = given_to(model, IDS)
    del given["labels"]
    real = MASK.bool()
    with torch.no_grad():
        theirs = model(**given)
        fastformer.accelerate(model.get_submodule(part))
        ours = model(**given)
        if "Sequence" not in name and "Question" not in name:
            assert_equal(ours.logits[real], theirs.logits[real])
        assert packs(lambda: model(**given)) or "decoder" in part  # which may have to fill a cache
        # What is known of the head counts from when it is handed in, too.
        fastformer.accelerate(model)
        given |= {} if "Question" in name else {"labels": (IDS % 2)[:, 0] if "Sequence" in name else IDS % 2}
        fastformer.restore(model)
        theirs = model(**given)
        fastformer.accelerate(model)
        ours = model(**given)
    for mine, other in zip(ours.to_tuple(), theirs.to_tuple(), strict=True):
        if isinstance(mine, Tensor) and (mine.dim() == 0 or "Question" in name):
            assert_equal(mine, other)


HEADS = [
    *(f"BertFor{what}" for what in ("MaskedLM", "MultipleChoice", "NextSentencePrediction")),
    *(f"BertFor{what}Classification" for what in ("Sequence", "Token")),
    *("GPT2LMHeadModel", "LlamaForCausalLM", "BartForConditionalGeneration", "MarianMTModel"),
    *("GPT2ForTokenClassification", "LlamaForTokenClassification", "BertLMHeadModel"),
    *("T5ForConditionalGeneration", "T5ForTokenClassification"),
]


@pytest.mark.parametrize("name", HEADS)
def test_known_heads_are_packed(name):
    """This also holds if their stacks were accelerated before the heads."""
    model = make(name)
    given = given_to(model, LABELS % 2 - 100 * (LABELS < 0) if "Token" in name else LABELS)
    if any(word in name for word in ("Sequence", "Next", "Choice")):
        del given["labels"]
    if "Choice" in name:
        given = {key: value[None] for key, value in given.items()}
    plain = copy.deepcopy(model)
    fastformer.accelerate(next(model.children()))
    assert not fastformer.report(fastformer.accelerate(model)).left
    assert packs(lambda: model(**given))
    assert_real_outputs_equal(model(**given), plain(**given))
    if "labels" in given and not model.config.is_encoder_decoder:  # labels at padding count like others
        labels = IDS % 2 if "Token" in name else IDS
        between = [None] * ([*inspect.signature(plain.forward).parameters].index("attention_mask") - 1)
        for args, options in (((IDS, *between, MASK), {}), ((), {"input_ids": IDS, "attention_mask": MASK})):
            ours, theirs = (each(*args, labels=labels, **options).loss for each in (model, plain))
            assert_equal(ours, theirs)
            assert not packs(lambda: model(*args, labels=labels, **options))  # noqa: B023
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    assert packs(lambda: lora(**given))
    assert_real_outputs_equal(lora(**given), plain(**given))


class Mine(nn.Module):
    """A user's model."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        read: Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return read


BODIES = ["BertModel", "GPT2Model", "LlamaModel", "T5EncoderModel"]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("how", ["the model", "its part", "the model, to skip", "the model, to compute"])
def test_a_model_of_your_own(how, name):
    """It is unknown what it reads. Its part omits padding if you say so, or if you pass in only the part."""
    model = Mine(make(name))
    with torch.no_grad():
        theirs = model(IDS, MASK)
        padding = {"to skip": "skip", "to compute": "compute"}.get(how.partition(", ")[2], "auto")
        report = fastformer.report(fastformer.accelerate(model.encoder if "part" in how else model, padding=padding))
        ours = model(IDS, MASK)
        real = MASK.bool()
        assert_equal(ours[real], theirs[real])
        if how in ("the model", "the model, to compute"):
            assert all(text.startswith("padding is computed") for text in report.padding.values()) and report.padding
            assert_equal(ours, theirs)
        else:
            assert not ours[~real].any() and "the output is zero there" in str(report)


@pytest.mark.parametrize("name", ["BartModel", "MarianModel"])
def test_stacks_by_themselves_are_packed(name):
    model = make(name)
    for stack in (model.encoder, model.decoder):
        fastformer.accelerate(stack)
        assert packs(lambda: stack(input_ids=IDS, attention_mask=MASK))  # noqa: B023
    fastformer.accelerate(model)
    for stack in (model.encoder, model.decoder):
        assert not packs(lambda: stack(input_ids=IDS, attention_mask=MASK))  # noqa: B023
    assert packs(lambda: model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=IDS, decoder_attention_mask=MASK))


class MyHead(BertForMaskedLM):  # type: ignore[misc]
    """Reads the same as its base class, which accelerate doesn't replace here."""


class MyReader(BertModel):  # type: ignore[misc]
    """Reads the last position."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).last_hidden_state[:, -1]


class MyBert(BertModel):  # type: ignore[misc]
    """Reads nothing itself."""


@pytest.mark.parametrize("kind", [MyHead, MyReader, MyBert])
def test_subclasses(kind):
    model = drawn(kind(config_of("Bert")))
    with torch.no_grad():
        theirs = model(IDS, attention_mask=MASK)
        report = fastformer.report(fastformer.accelerate(model))
        ours = model(IDS, attention_mask=MASK)
    assert not packs(lambda: model(IDS, attention_mask=MASK)) and kind.__name__ in str(report)
    assert_equal(*((ours, theirs) if kind is MyReader else (ours[0], theirs[0])))


@pytest.mark.parametrize("around", [False, True], ids=["the encoder", "the model"])
def test_generate_of_a_model_that_is_not_known_calls_its_encoder(around):
    """No forward of the model is active in this call."""
    config = config_of("GPT2")
    config.is_decoder = config.add_cross_attention = True
    decoder = transformers.GPT2LMHeadModel(config)
    model = drawn(transformers.EncoderDecoderModel(encoder=make("BertModel"), decoder=decoder))
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 3
    model.config.pad_token_id = model.generation_config.pad_token_id = 1
    fastformer.accelerate(model if around else model.encoder)
    assert packs(lambda: model.generate(IDS, attention_mask=MASK, max_new_tokens=2)) != around
    assert not around or not packs(lambda: model.encoder(IDS, attention_mask=MASK))


def test_a_part_compiles_with_its_head():
    model = make("GPT2LMHeadModel", n_layer=1)
    with torch.no_grad():
        theirs = model(IDS, attention_mask=MASK).logits
        fastformer.accelerate(model)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_equal(compiled(IDS, attention_mask=MASK).logits, theirs)


def test_another_word_for_padding_is_refused():
    with pytest.raises(ValueError, match="padding"):
        fastformer.accelerate(make("BertModel"), padding="leave")


@pytest.mark.parametrize("name", ["BertForTokenClassification", "GPT2LMHeadModel"])
def test_padding_is_still_skipped_under_accelerates_mixed_precision(name):
    """Its wrapper is a forward on the instance, and so is the wrapped function."""
    model = make(name).float()
    with torch.no_grad():
        theirs = model(IDS, attention_mask=MASK).logits[MASK.bool()]
        fastformer.accelerate(model, encode=False)
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        prepared = accelerator.prepare_model(model)
        assert packs(lambda: prepared(IDS, attention_mask=MASK))
        assert prepared(IDS, attention_mask=MASK).logits.dtype == torch.float32
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert packs(lambda: unwrapped(IDS, attention_mask=MASK))
        given = given_to(unwrapped, IDS % 2)
        ours = unwrapped(**given).loss
        fastformer.restore(unwrapped)
        torch.testing.assert_close(ours, unwrapped(**given).loss)
        torch.testing.assert_close(unwrapped(IDS, attention_mask=MASK).logits[MASK.bool()], theirs)
    AcceleratorState._reset_state(True)


def test_padding_is_skipped_again_after_a_failed_call():
    """A single layer that is called afterwards is not part of a run of its stack."""
    model = make("BertModel")
    fastformer.accelerate(model)
    layer = model.encoder.layer[0]
    with torch.no_grad():
        alone = layer(model.embeddings(IDS))
        broken = model.encoder.layer[1].intermediate.dense.weight
        model.encoder.layer[1].intermediate.dense.weight = nn.Parameter(broken[:, :-1])
        with pytest.raises((RuntimeError, ValueError)):
            model(IDS, attention_mask=MASK)
        after = layer(model.embeddings(IDS))
    assert torch.equal(after, alone)
    model.encoder.layer[1].intermediate.dense.weight = nn.Parameter(broken)
    assert packs(lambda: model(IDS, attention_mask=MASK))


def test_more_layers_than_the_config_says():
    """Llama calls as many layers as its config says."""
    config = config_of("Llama")
    config.num_hidden_layers = 3
    model = drawn(transformers.LlamaForCausalLM(config))
    model.config.num_hidden_layers = 2
    with torch.no_grad():
        theirs = model(IDS, attention_mask=MASK).logits[MASK.bool()]
        fastformer.accelerate(model)
        assert_equal(model(IDS, attention_mask=MASK).logits[MASK.bool()], theirs)
        assert packs(lambda: model(IDS, attention_mask=MASK))


@pytest.mark.parametrize("padding", ["auto", "compute"])
def test_no_mask_is_read_if_padding_cannot_be_skipped(padding):
    """On a GPU, the host would wait for the mask in each step."""
    model = make("GPT2LMHeadModel")
    fastformer.accelerate(model, padding=padding)
    with torch.no_grad(), mock.patch.object(type(model), "reads_padding", return_value=False) as asked:
        model(input_ids=IDS, attention_mask=MASK)
    assert asked.called == (padding == "auto")


def test_a_mask_that_lowers_scores_hides_no_token():
    penalty = torch.where(MASK == 0, -3.0, 0.0).double()[:, None, None]
    model = make("BertModel")
    expected = model(input_ids=IDS, attention_mask=penalty).last_hidden_state
    fastformer.accelerate(model, padding="skip", encode=False)
    assert_equal(model(input_ids=IDS, attention_mask=penalty).last_hidden_state, expected)


def test_the_report_names_the_stacks_of_both_libraries():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    both = nn.ModuleDict({"theirs": make("BertModel"), "torchs": nn.TransformerEncoder(layer, 1)})
    assert fastformer.report(fastformer.accelerate(both)).padding.keys() >= {"theirs.encoder", "torchs"}
