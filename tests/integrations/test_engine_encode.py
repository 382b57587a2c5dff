"""Encoders of transformers on the C++ engine: their results, and which calls run there."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.autograd import forward_ad

from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS, FAMILIES, encoding_family
from fastformer.integrations import accelerate, report
from tests.checkpoints.present import ENCODERS
from tests.checks import assert_accurate
from tests.integrations.config_fields import BASES
from tests.integrations.decoders import GRANITE4, Wide
from tests.integrations.encoders import BASE, CASES, HEAD, ONLY_EAGER, VOCAB, Case, drawn, padded, texts_of
from tests.memory import resident

TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")
CHOICE = "ForMultipleChoice"
SEVERAL = 4  # draws
HEADS = (HEAD, CHOICE, *TOKEN_HEADS)


def made(case: Case, **options: Any) -> Any:
    attention = "eager" if case.kind in ONLY_EAGER else "sdpa"
    return case.make(torch.float32, **{"attn_implementation": attention, **options})


TYPED = Case("bert", BASE, {"pad_token_id": 0, "type_vocab_size": 3})


def pair(name: str = "bert types", **options: Any) -> tuple[Any, Any]:
    """Returns a model, unchanged and accelerated."""
    plain = made(TYPED if name == "bert types" else CASES[name])
    return plain, accelerate(copy.deepcopy(plain), **options)


def tensors(out: Any) -> dict[str, Tensor]:
    found = {f"{i}": each for i, each in enumerate(out)} if isinstance(out, tuple) else dict(out.items())
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}


def check(
    case: Case, batch: dict[str, Tensor], mask: Tensor | None = None, *, several: bool = False, **options: Any
) -> None:
    """Compares the hidden states of tokens before and after acceleration, by the rule."""
    # Of few numbers, plain PyTorch's may be lucky once.
    seeds = range(3, 3 + SEVERAL) if several or case.head in (HEAD, CHOICE) else (3,)
    outs: list[tuple[Any, Any, Any]] = []
    for seed in seeds:
        plain = made(case, seed=seed)
        ours = accelerate(copy.deepcopy(plain))
        with torch.no_grad():
            found, expected = ours(**batch, **options), plain(**batch, **options)
            with Wide():
                outs.append((found, expected, case.make(seed=seed)(**batch, **options)))
    found, expected, _ = outs[0]
    assert type(found) is type(expected)
    if not isinstance(found, tuple):
        assert [*found.keys()] == [*expected.keys()]
    assert len(tensors(found)) == len(tensors(expected)) > 0
    for name in tensors(found):
        one, other, exact = (torch.stack([tensors(each)[name] for each in line]) for line in zip(*outs, strict=True))
        assert one.dtype == other.dtype and one.shape == other.shape
        if mask is not None and one.shape[1:3] == mask.shape:
            one, other, exact = one[:, mask], other[:, mask], exact[:, mask]
        if len(seeds) == 1:
            assert_accurate(one, other, exact)
        else:  # the rule for the mean, since the worst of a few numbers is luck
            errors = [float((each.double() - exact).square().mean().sqrt()) for each in (one, other)]
            assert errors[0] <= 2 * errors[1] + torch.finfo(one.dtype).eps * float(exact.abs().max())


names = pytest.mark.parametrize(
    "name",
    [
        # slow: more options of each family
        pytest.param(name, marks=pytest.mark.slow if case.head == HEAD else ())
        for name, case in CASES.items()
    ],
)


def batch_of(case: Case, side: str = "right", lengths: tuple[int, ...] = (13, 7, 1)) -> dict[str, Tensor]:
    theirs = made(case)
    batch = padded(theirs, texts_of(theirs, lengths), "left" if side == "left" else "right")
    batch.pop("position_ids", None)
    if side == "holes":
        batch["attention_mask"][0, [2, 3, 9]] = batch["attention_mask"][1, 0] = 0
    return batch


def read_of(batch: dict[str, Tensor]) -> Tensor:
    """Returns a mask that is True at tokens and at the first position of each row, which poolers and heads read."""
    read = batch["attention_mask"].bool()
    read[:, 0] = True
    return read


@names
def test_every_family_equals_its_modules(name: str, calls: list[int]) -> None:
    case = CASES[name]
    batch = batch_of(case)
    check(case, batch, batch["attention_mask"].bool())
    several = SEVERAL if case.head == HEAD else 1
    assert calls == [several]
    one = {key: value[:1] for key, value in batch.items() if key != "attention_mask"}  # without padding
    check(case, one, return_dict=False)
    assert calls == [2 * several]


# Heads that read padding (a softmax over all positions) or may do so for all that is known.
READS_PADDING = {("electra", CHOICE)}
_FEW = {("bert", HEAD), ("distilbert", "ForMaskedLM"), ("modernbert", "ForTokenClassification"),
        ("modernbert", HEAD), ("roberta", "ForQuestionAnswering")}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        # slow: each head of each family
        pytest.param(kind, end, marks=() if (kind, end) in _FEW else pytest.mark.slow)
        for kind in ENCODERS
        for end in HEADS
        if hasattr(transformers, ENCODER_FORMS[kind].classes + end)
    ],
)
def test_heads_read_the_engines_states(kind: str, end: str, calls: list[int]) -> None:
    case = Case(kind, end, {"num_labels": 2} if end == "ForQuestionAnswering" else {})
    batch = batch_of(case)
    if end == CHOICE:
        batch = {key: value[None] for key, value in batch.items()}
    reads_padding = end == "ForQuestionAnswering" or (kind, end) in READS_PADDING
    several = SEVERAL if end in (HEAD, CHOICE) else 1
    is_by_token = end in TOKEN_HEADS and not reads_padding
    check(case, batch, batch["attention_mask"].bool() if is_by_token else None)
    assert calls == [0 if reads_padding else several]
    calls[0] = 0
    # Eight texts without padding, since a head may give one number for each.
    check(case, {key: torch.cat([value[..., :1, :].roll(n, -1) for n in range(8)], -2) for key, value in batch.items()})
    assert calls == [several]


def test_labels_at_padding_count_in_a_model_with_a_loss_inside(calls: list[int]) -> None:
    plain = made(Case("distilbert", "ForMaskedLM", {}))
    ours, batch = accelerate(copy.deepcopy(plain)), batch_of(CASES["distilbert"])
    labels = batch["input_ids"]
    with torch.no_grad():
        assert_accurate(*(model(**batch, labels=labels).loss for model in (ours, plain, copy.deepcopy(plain).double())))
        assert calls == [0]
        ours(**batch, labels=labels.masked_fill(batch["attention_mask"] == 0, -100))
    assert calls == [1]


_TURNS = (("bert", "holes"), ("roberta labels", "left"), ("mpnet", "holes"), ("modernbert", "left"))


@pytest.mark.parametrize(
    "name, side",
    [
        # slow: each option of each family, at each side
        pytest.param(name, side, marks=() if (name, side) in _TURNS else pytest.mark.slow)
        for name, case in CASES.items()
        for side in ("left", "holes")
    ],
)
def test_padding_may_be_anywhere(name: str, side: str, calls: list[int]) -> None:
    case = CASES[name]
    batch = batch_of(case, side, (13, 12, 11))  # so that a window reaches from the first position to a token
    check(case, batch, read_of(batch), several=True)
    assert calls == [SEVERAL]
    calls[0] = 0
    batch = batch_of(case, side)
    check(case, batch, read_of(batch), several=True)  # a pooler's numbers are few
    sees_nothing = case.kind == "modernbert" and side == "left"  # windows from the first position end before a token
    assert (calls[0] == 0) == sees_nothing


_DECODER = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 40, "max_position_embeddings": 48, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
_WINDOWED = ("mistral", "ministral", "olmo3", "phi3", "gemma2", "gemma3_text", "starcoder2", "gpt_oss")


def decoder_of(kind: str, end: str = "Model", **options: Any) -> Any:
    options |= {"sliding_window": 4} if kind in _WINDOWED else {}
    options |= {"head_dim": 8, "query_pre_attn_scalar": 8} if kind.startswith(("gemma", "ministral")) else {}
    options |= GRANITE4 if kind == "granitemoehybrid" else {}
    options |= {"partial_rotary_factor": 0.5} if kind == "stablelm" else {}  # a quarter would be one dimension
    options["attn_implementation"] = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    config = getattr(transformers, FAMILIES[kind].config_class)(**_DECODER | options)
    config._experts_implementation = "eager"  # the others have no products in fp64
    name = FAMILIES[kind].headless.removesuffix("Model") + end
    torch.manual_seed(3)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.3)
    return model


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("qwen3", "llama", "gemma3_text") else pytest.mark.slow)
        for kind in DECODER_FORMS
        if kind not in ("gpt2", "gpt_neox", "phi", "gemma4_text") and encoding_family(kind) is not None
    ],
)
def test_a_decoder_embeds_without_a_cache(kind: str, side: str, calls: list[int]) -> None:
    plain = decoder_of(kind)
    ours, exact = accelerate(copy.deepcopy(plain)), copy.deepcopy(plain).double()
    inputs = padded(plain, texts_of(plain, (30, 21, 13, 7, 1)), side)
    batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        outs = [model(**batch, use_cache=False) for model in (ours, plain)]
        with Wide():
            outs.append(exact(**batch, use_cache=False))
        assert calls == [1] and type(outs[0]) is type(outs[1])
        assert_accurate(*(out.last_hidden_state[real] for out in outs))
        assert not outs[0].last_hidden_state[~real].any()
        ours(**batch, use_cache=True)
        assert type(ours(**batch, use_cache=False, return_dict=False)) is tuple
    assert calls == [2]


def test_a_decoder_whose_layers_share_keys_stays_with_transformers(calls: list[int]) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    options = {"num_hidden_layers": 4, "layer_types": types, "num_kv_shared_layers": 2, "sliding_window": 4}
    plain = decoder_of("gemma4_text", **options, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=6)
    ours, batch = accelerate(copy.deepcopy(plain)), {"input_ids": torch.tensor([[5, 6, 7, 9, 4, 8, 3]])}
    with torch.no_grad():
        found, expected = (model(**batch, use_cache=False).last_hidden_state for model in (ours, plain))
    torch.testing.assert_close(found, expected)
    assert calls == [0] and "by its modules: it encodes with no model whose layers" in str(report(ours))


@pytest.mark.parametrize("kind", [kind for kind in DECODER_FORMS if encoding_family(kind) is None])
def test_a_decoder_with_states_stays_with_transformers(kind: str, calls: list[int]) -> None:
    config = getattr(transformers, FAMILIES[kind].config_class)(**BASES[kind])
    ours = accelerate(getattr(transformers, FAMILIES[kind].headless)(config).eval())
    with torch.no_grad():
        ours(torch.tensor([[5, 6, 7, 9, 4, 8, 3]]), use_cache=False)
    assert calls == [0] and "by its modules: some of its layers have a state" in str(report(ours))


def test_a_decoder_inside_of_one_that_generates_stays_by_its_modules(calls: list[int]) -> None:
    ours = accelerate(decoder_of("qwen3", "ForCausalLM"), precision="int8")
    batch = {"input_ids": torch.tensor([[5, 6, 7]])}
    with torch.no_grad():
        ours(**batch, use_cache=False)
        ours.model(**batch, use_cache=False)
    assert calls == [0]


def test_a_decoders_classifier_reads_the_last_id_that_is_not_pad(calls: list[int]) -> None:
    """Tests rows whose last id is PAD's word, and one whose mask hides an id that the classifier reads."""
    plain = decoder_of("qwen3", "ForSequenceClassification", num_labels=3)
    ours, exact = accelerate(copy.deepcopy(plain)), copy.deepcopy(plain).double()
    for ids, mask, runs in (
        ([[5, 6, 7, 0], [8, 9, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]], 1),
        ([[0, 0, 7, 8], [5, 8, 9, 0]], [[0, 0, 1, 1], [1, 1, 1, 1]], 1),
        ([[5, 6, 7, 8], [8, 9, 6, 5]], [[1, 1, 1, 1], [1, 1, 0, 0]], 0),
        ([[0, 0, 0, 0], [8, 9, 6, 5]], [[0, 0, 0, 1], [1, 1, 1, 1]], 0),
    ):
        before, batch = calls[0], {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        with torch.no_grad():
            assert_accurate(*(model(**batch, use_cache=False).logits for model in (ours, plain, exact)))
        assert calls[0] == before + runs, (ids, mask)


def test_a_window_is_that_of_the_familys_form(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    form, batch, plain = ENCODER_FORMS["bert"], batch_of(CASES["bert"], "left"), made(CASES["bert"])
    local = form._replace(options=lambda settings: form.options(settings) | {"window_size": 3})
    monkeypatch.setitem(ENCODER_FORMS, "bert", local)
    agree(plain, accelerate(copy.deepcopy(plain)), batch)
    assert calls == [0]  # because a padded first position would see no token


def test_a_row_without_tokens_runs_the_modules(calls: list[int]) -> None:
    plain, ours = pair("bert")
    agree(plain, ours, inputs() | {"attention_mask": torch.tensor([[0] * 9, [1] * 9, [0] * 4 + [1] * 5])})
    assert calls == [0]


@pytest.mark.slow  # every option with every other, at unusual sizes
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ENCODERS)
def test_random_configs_compute_the_same(kind: str, seed: int, calls: list[int]) -> None:
    case = drawn(kind, seed)._replace(head=BASE)
    batch = batch_of(case, ("right", "holes", "left")[seed % 3])
    check(case, batch, read_of(batch), several=True)
    assert calls == [SEVERAL] or (kind == "modernbert" and seed % 3)


def inputs(batch: int = 3, seqlen: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"input_ids": torch.randint(5, VOCAB, (batch, seqlen), generator=generator)}


@torch.no_grad()
def agree(plain: Any, ours: Any, batch: dict[str, Tensor] | None = None) -> None:
    batch = inputs() if batch is None else batch
    found, expected = ours(**batch)[0], plain(**batch)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("owner", "name"), [(nn.Embedding, "forward"), (F, "embedding"), (F, "softmax")])
def test_replaced_functions_of_torch_are_called(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made(TYPED, attn_implementation="eager")
    ours, theirs = accelerate(copy.deepcopy(plain)), getattr(owner, name)
    agree(plain, ours)
    with torch.no_grad():
        before = plain(**inputs())[0]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, lambda *args, **kwargs: theirs(*args, **kwargs).roll(1, -1))
        accelerate(ours)
        agree(plain, ours)
        with torch.no_grad():
            assert not torch.allclose(ours(**inputs())[0], before)
    agree(plain, accelerate(ours))


def test_a_derivative_through_a_substituted_weight_is_not_lost() -> None:
    plain = made(TYPED, attn_implementation="eager")  # which has forward derivatives
    ours, weight = accelerate(copy.deepcopy(plain)), torch.ones(24)
    with torch.no_grad(), forward_ad.dual_level():
        weights = {"embeddings.LayerNorm.weight": forward_ad.make_dual(weight, weight)}
        found, due = (torch.func.functional_call(model, weights, (), inputs())[0] for model in (ours, plain))
        assert due.isfinite().all()
        one, other = (forward_ad.unpack_dual(out).tangent for out in (found, due))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_arguments_by_position(calls: list[int]) -> None:
    plain, ours = pair()
    ids = inputs()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(
            ours(ids, torch.ones(3, 9))[0], plain(ids, torch.ones(3, 9))[0], rtol=1e-4, atol=1e-5
        )
        assert calls == [1]
        for model in (plain, ours):
            with pytest.raises(TypeError):
                model(ids, *[None] * 30)
            with pytest.raises(TypeError):
                model(ids, input_ids=ids)
    assert calls == [1]


def test_training_and_gradients_run_the_modules(calls: list[int]) -> None:
    plain, ours = pair()
    assert ours(**inputs())[0].requires_grad
    with torch.no_grad():
        ours.train()(**inputs())
        assert calls == [0]
        ours.eval()
        ours.encoder.layer[0].train()
        ours(**inputs())
        assert calls == [0]
        ours.eval()(**inputs())
    assert calls == [1]
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    for model in (plain, ours):
        model(**inputs())[0].square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            one.copy_(other)
    agree(plain, ours)
    assert calls == [2]


def test_requested_outputs_beside_the_states_are_returned(calls: list[int]) -> None:
    plain, ours = pair()
    for options in (
        {"output_hidden_states": True}, {"output_attentions": True},
        {"position_ids": torch.arange(9).flip(0)[None]},
    ):  # fmt: skip
        with torch.no_grad():
            found, expected = ours(**inputs(), **options), plain(**inputs(), **options)
        assert [*found.keys()] == [*expected.keys()]
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        embeds = plain.embeddings.word_embeddings(inputs()["input_ids"])
    agree(plain, ours, {"inputs_embeds": embeds})
    agree(plain, ours, {**inputs(), "attention_mask": torch.ones(3, 9, 9)})
    agree(plain, ours, {**inputs(), "attention_mask": torch.full((3, 9), 2)})
    assert calls == [0]
    agree(plain, ours, {**inputs(), "attention_mask": torch.ones(3, 9), "token_type_ids": torch.ones(3, 9).long()})
    with torch.inference_mode():
        agree(plain, ours, {name: value.clone() for name, value in inputs().items()})
    for model in (plain, ours):
        model.config.return_dict = False
    with torch.no_grad():
        assert type(ours(**inputs())) is type(plain(**inputs())) is tuple
        assert type(ours(**inputs(), return_dict=None)) is type(plain(**inputs(), return_dict=None))
    assert calls == [3]
    for model in (plain, ours):
        model.config.output_hidden_states = True
    with torch.no_grad():
        assert len(ours(**inputs())) == len(plain(**inputs())) == 3
    assert calls == [3]


def test_padding_is_computed_on_request(calls: list[int]) -> None:
    plain, ours = pair("bert types", padding="compute")
    batch = inputs() | {"attention_mask": torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [1] + [0] * 8])}
    agree(plain, ours, batch)
    assert calls == [0]
    agree(plain, ours)
    assert calls == [1]


@pytest.mark.parametrize("case", [CASES["roberta"], Case("mpnet", BASE, {"pad_token_id": 0})])
def test_a_token_without_a_position(case: Case, calls: list[int]) -> None:
    plain = made(case)
    ours = accelerate(copy.deepcopy(plain))
    batch = inputs()
    batch["input_ids"][1, 4] = plain.embeddings.padding_idx
    batch["input_ids"][2, 6:] = 0
    agree(plain, ours, batch)
    assert calls == [1]


def test_bad_ids_are_named() -> None:
    _, ours = pair()
    for name, value in (("input_ids", VOCAB), ("input_ids", -1), ("token_type_ids", 3)):
        batch = {"input_ids": torch.full((1, 4), 5), "token_type_ids": torch.zeros(1, 4).long()}
        batch[name][0, 2] = value
        with (
            torch.no_grad(),
            pytest.raises(IndexError, match=r"\bids\b" if name == "input_ids" else r"\btoken_types\b"),
        ):
            ours(**batch)


def test_empty_and_longer_texts_run_the_modules(calls: list[int]) -> None:
    plain, ours = pair()
    with torch.no_grad():
        assert ours(input_ids=torch.zeros(0, 4).long())[0].shape == (0, 4, 24)
        for model in (plain, ours):
            with pytest.raises((RuntimeError, IndexError)):
                model(input_ids=torch.full((1, 60), 5))
    plain, ours = pair("modernbert")  # whose rotary positions end nowhere
    agree(plain, ours, {"input_ids": torch.full((1, 60), 5)})
    assert calls == [0]


def test_nan_weights_give_nan(calls: list[int]) -> None:
    plain, ours = pair()
    for model in (plain, ours):
        with torch.no_grad():
            model.embeddings.word_embeddings.weight[7] = float("nan")
    batch = {"input_ids": torch.tensor([[5, 6, 8], [5, 7, 8]])}
    with torch.no_grad():
        found, expected = ours(**batch)[0], plain(**batch)[0]
    assert torch.equal(found.isnan(), expected.isnan()) and found[1].isnan().any() and not found[0].isnan().any()
    assert calls == [1]


# Each bound is below twice the error that the precision has, as one lost bit would double it.
@pytest.mark.parametrize("precision, bound", [("bf16", 0.009), ("int8", 0.032), ("int4", 0.3)])
def test_a_precision_is_that_of_evaluation(precision: Any, bound: float, calls: list[int]) -> None:
    plain, ours = pair("bert types", precision=precision)
    with torch.no_grad():
        found, expected = ours(**inputs()), plain(**inputs())
    assert calls == [1] and found[0].dtype == torch.float32
    assert not torch.equal(found[0], expected[0])
    assert (found[0] - expected[0]).norm() <= bound * expected[0].norm()
    # A pooler stays what it is.
    torch.testing.assert_close(found[1], ours.pooler(found[0]))
    accelerate(ours)  # which leaves it
    with torch.no_grad():
        assert torch.equal(ours(**inputs())[0], found[0])


@pytest.mark.parametrize("name", ["bert types", "electra", "electra labels", "albert"])  # with narrow embeddings
def test_bf16_follows_autocast_and_the_parameters(name: str, calls: list[int]) -> None:
    plain, ours = (each.base_model for each in pair(name))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = ours(**inputs()), plain(**inputs())
        assert [each.dtype for each in tensors(found).values()] == [each.dtype for each in tensors(expected).values()]
        half = accelerate(copy.deepcopy(plain).bfloat16())
        assert half(**inputs())[0].dtype == torch.bfloat16
        assert calls == [2]
        torch.testing.assert_close(half(**inputs())[0].float(), found[0].float(), rtol=0.05, atol=0.05)
    assert calls == [3]


def test_a_copy_and_a_pickle_pack_their_own(calls: list[int]) -> None:
    plain, ours = pair("electra labels")
    agree(plain, ours)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        agree(plain, twin)
    assert calls == [3]
    freed = weakref.ref(ours.electra.encoder.layer[0])
    del ours, twin
    gc.collect()
    assert freed() is None


@pytest.mark.slow  # a model of 4 MiB a hundred times: nothing of it, nor of its packed copy, may stay
def test_a_hundred_models_leave_no_memory_behind() -> None:
    config = transformers.BertConfig(vocab_size=4000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=512, _attn_implementation="sdpa")  # fmt: skip
    seen = []
    for _ in range(100):
        model = accelerate(transformers.BertModel(config).eval())
        with torch.no_grad():
            model(**inputs())
        del model
        seen.append(resident())
    assert max(seen[50:]) - max(seen[10:20]) < 20, seen


@pytest.mark.slow  # 100,000 texts in batches: memory stays where it is
def test_memory_is_flat_over_many_texts(calls: list[int]) -> None:
    _, ours = pair("roberta labels")
    seen = []
    with torch.no_grad():
        for number in range(2000):
            ours(**inputs(50, 2 + number % 40))
            if number % 200 == 199:
                seen.append(resident())
    assert calls == [2000] and max(seen[5:]) - seen[1] < 10, seen
