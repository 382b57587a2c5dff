"""Every field of every config of transformers: its other values are computed as transformers does, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError

from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS, FAMILIES
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.checkpoints.hf.fields import FIELDS, with_usual_ids
from fastformer.integrations import accelerate, from_huggingface, report
from tests.checkpoints.present import ENCODERS, PRESENT
from tests.covering import each
from tests.integrations.config_fields import (
    BASES,
    IDS,
    LEFT,
    RIGHT,
    ROPES,
    TARGETS,
    Change,
    Nested,
    changes,
    config_of,
    converted_results,
    differences,
    made,
    outcomes,
    results,
)

kinds = pytest.mark.parametrize("kind", PRESENT)
# The rest of these take ten minutes together.
FAST = [
    *(Change(kind, "is_causal", value) for kind in ("bert", "bart", "t5", "gpt2", "llama") for value in (True, False)),
    Change("mistral", "sliding_window", 1),
    Change("llama", "sliding_window", 4),
    Change("gpt2", "attention_chunk_size", 4),
    Change("t5", "dense_act_fn", "silu"),
    Change("mt5", "is_gated_act", False),
    Change("gemma2", "hidden_activation", "gelu"),
    Change("gemma3_text", "hidden_activation", "gelu"),
    Change("bert", "torchscript", True),
    Change("bart", "torchscript", True),
]
LATER: dict[str, tuple[str, Any]] = {
    "gpt2": ("n_inner", 5),
    "llama": ("mlp_bias", True),
    "bert": ("type_vocab_size", 5),
    "bart": ("dropout", 0.3),
    "t5": ("layer_norm_epsilon", 0.25),
}


def check(change: Change, folder: Any) -> bool:
    """Checks all uses of a model with a change; returns whether transformers computes such a model at all."""
    found = outcomes(change, folder)
    if "plain" in found:
        return False
    for way, result in found.items():
        is_refused = isinstance(result, ValueError) and way != "accelerated"
        assert result == {} or is_refused, (change, way, result)
    return True


@pytest.mark.parametrize("change", FAST, ids=str)
def test_a_changed_field_gives_the_results_of_transformers(change, tmp_path) -> None:
    assert check(change, tmp_path)


@pytest.mark.slow
@kinds
def test_each_field_gives_the_results_of_transformers(kind, tmp_path) -> None:
    """Proves for each family that each value of each field is computed as transformers does, or refused: by
    conversions, saved folders and accelerated models, in forwards and in `generate`."""
    found = [check(change, tmp_path / str(i)) for i, change in enumerate(changes(kind))]
    assert sum(found) > len(found) / 2


# Another value of each field that changes what a family computes, sizes apart; True: the contrary of the usual one.
UNUSUAL: dict[str, Any] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), 0.3),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation"), "silu"),
    "feed_forward_proj": "gated-silu",
    **dict.fromkeys(
        ("scale_embedding", "tie_word_embeddings", "scale_decoder_outputs", "share_encoder_decoder_embeddings"), True
    ),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_parallel_residual"), True),
    "classifier_pooling": "mean", "local_attention": 4, "sliding_window": 3, "query_pre_attn_scalar": 5,
    "relative_attention_num_buckets": 4, "relative_attention_max_distance": 7,
    "final_logit_softcapping": 60.0, "attn_logit_softcapping": 2.0,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "activation_dropout"), 0.25),
    **dict.fromkeys(("attention_dropout", "dropout_rate", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.25),
    **dict.fromkeys(("hidden_dropout", "residual_dropout", "embedding_dropout", "classifier_dropout"), 0.25),
    **dict.fromkeys(("seq_classif_dropout", "mlp_dropout", "classifier_dropout_prob"), 0.25),
}  # fmt: skip
# Values that a family refuses, or that mean its usual ones.
REFUSED = {
    "modernbert": ("embedding_dropout", "attention_dropout", "mlp_bias"), "phi3": ("resid_pdrop",),
    "stablelm": ("hidden_dropout",), "afmoe": ("attention_bias",),
    "gemma3_text": ("attn_logit_softcapping",), "mpnet": ("relative_attention_num_buckets",),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), ("hidden_act",)),
}  # fmt: skip


def unusual(kind: str) -> dict[str, Any]:
    """Returns the options of a config with the values of `UNUSUAL`."""
    before = config_of(kind, BASES[kind]).to_dict()
    found = {name: value for name, value in UNUSUAL.items() if name in before and name not in REFUSED.get(kind, ())}
    for name, value in found.items():
        if value is True:
            found[name] = not before[name]
        elif value == before[name]:
            found[name] = "gelu_new"
    if rope := before.get("rope_parameters"):
        bases = {"full_attention": 123.0, "sliding_attention": 55.0}
        nested = {place: {"rope_type": "default", "rope_theta": theta} for place, theta in bases.items()}
        found["rope_parameters"] = nested if "full_attention" in rope else {**rope, "rope_theta": 123.0}
    return found


@kinds
def test_all_fields_at_once_give_the_results_of_transformers(kind) -> None:
    """As quick a check of every field as there can be; the slow test takes them one by one."""
    theirs = made(Change(kind, "", Nested(unusual(kind)), FAMILIES[kind].kind == "encoder"))
    settings = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    ours = FAMILIES[kind].to_model(Checkpoint(settings, theirs.state_dict()))
    with torch.no_grad():
        if FAMILIES[kind].kind == "seq2seq":
            found, expected = ours(IDS, TARGETS), theirs(IDS, decoder_input_ids=TARGETS).logits
        else:
            found, expected = ours(IDS), theirs(IDS).logits
    assert differences({"logits": found}, {"logits": expected}) == {}
    dropouts = {name: value for name, value in vars(ours.config).items() if "dropout" in name and value is not None}
    others = {0.0} if FAMILIES[kind].kind != "seq2seq" else set()  # dropouts that the family doesn't have
    own = {value for name, value in unusual(kind).items() if "drop" in name}  # none in an LFM2 or an ERNIE 4.5
    assert own <= {*dropouts.values()} <= own | others, dropouts


# As versions before 5 write them, for families that read them and for families that don't.
OLDER: dict[str, tuple[Any, ...]] = {
    "rope_theta": (123.0,), "partial_rotary_factor": (0.5,), "rotary_emb_base": (123.0,), "rotary_pct": (0.5,),
    "rope_local_base_freq": (123.0,), "global_rope_theta": (123.0,), "local_rope_theta": (123.0,),
    "rope_scaling": (ROPES[0], ROPES[1], ROPES[6], {**ROPES[6], "type": "llama3"}), "head_dim": (8,),
    "sliding_window_pattern": (3,), "global_attn_every_n_layers": (2,), "position_embedding_type": ("relative_key",),
    "scale_decoder_outputs": (True, False), "tie_word_embeddings": (True, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted({*DECODER_FORMS, *ENCODERS}))
def test_older_spellings_are_read_as_transformers_reads_them(kind) -> None:
    """The settings as a file has them, and what transformers makes of them, give the same model."""
    form, read = (DECODER_FORMS | ENCODER_FORMS)[kind], 0
    for name, values in OLDER.items():
        for value in values:
            if kind == "olmo3" and "rope_theta" in (name, *(value if isinstance(value, dict) else ())):
                continue  # version 5 takes it for one kind of layers only, and version 4 for both
            settings = {**BASES[kind], "model_type": kind, name: value}
            try:
                theirs = getattr(transformers, FAMILIES[kind].config_class).from_dict(copy.deepcopy(settings)).to_dict()
                found = form.options(settings)
            except (ValueError, KeyError, StrictDataclassClassValidationError):  # either of the two refuses it
                continue
            assert found == form.options(theirs), (name, value)
            read += 1
    assert read > 9


@each("kind", PRESENT)
def test_each_field_is_known(kind) -> None:
    fields = {name for name in config_of(kind, {}).to_dict() if name[0] != "_"}
    assert fields <= FIELDS[kind]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_each_rope_is_computed(rope) -> None:
    kind = "phi3" if rope["rope_type"] == "longrope" or "partial_rotary_factor" in rope else "llama"
    lengths = {"original_max_position_embeddings": 32}  # conversions have no positions beyond that of "longrope"
    own = rope | (lengths if rope["rope_type"] == "longrope" else {})
    theirs = made(Change(kind, "", Nested(rope_parameters=own, **(lengths if kind == "phi3" else {}))))
    expected = results(theirs, kind, generates=False)
    assert differences(converted_results(from_huggingface(theirs), kind), expected) == {}


class Omitting:
    """A family's small model, of which fields of its config are omitted."""

    def __init__(self, kind: str) -> None:
        self.family = FAMILIES[kind]
        self.theirs = made(Change(kind, "use_cache", True, self.family.kind == "encoder"))
        self.saved, self._state = self.theirs.config.to_dict(), self.theirs.state_dict()

    def loaded(self, settings: dict[str, Any]) -> Any:
        """Returns the config of the model that a folder with these settings has; None: it is refused."""
        settings = {**settings, "architectures": [type(self.theirs).__name__]}
        try:
            return self.family.to_model(Checkpoint(settings, self._state)).config
        except ValueError:
            return None

    def filled(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings that transformers makes of some."""
        return type(self.theirs.config).from_dict(copy.deepcopy(settings)).to_dict()


@kinds
def test_omitted_fields_have_the_defaults_of_their_class(kind) -> None:
    """What a folder without fields loads as is what transformers makes of its config. Sizes of the small model stay."""
    model = Omitting(kind)
    usual = type(model.theirs.config)().to_dict()

    def is_needed(name: str) -> bool:  # a size of the small model, or an id of its vocabulary
        value = model.saved[name]
        is_other = isinstance(value, int) and not isinstance(value, bool) and value != usual.get(name)
        # Whose usual ones, in so few layers, have no attention, or nothing else.
        is_kind = name == "layer_types" and (
            kind in ("granitemoehybrid", "lfm2", "lfm2_moe") or "linear_num_key_heads" in usual
        )
        is_kind |= (kind, name) == ("gemma4_text", "per_layer_config")  # whose usual heads are larger than the others
        return is_other or is_kind or name in ("model_type", "num_heads") or name.endswith("_token_id")

    less = {name: value for name, value in model.saved.items() if is_needed(name)}
    assert model.loaded(less) == model.loaded(model.filled(less)) is not None
    assert len(less) < len(model.saved) - 10


@pytest.mark.slow
@kinds
def test_each_omitted_field_has_the_default_of_its_class(kind) -> None:
    model = Omitting(kind)
    omitted, unchanged = [], model.loaded(model.saved)
    for name in model.saved.keys() - {"model_type", "architectures"}:
        less = {other: value for other, value in model.saved.items() if other != name}
        try:
            whole = model.filled(less)
        except Exception:  # transformers makes no such config
            continue
        config, expected = model.loaded(less), unchanged if whole == model.saved else model.loaded(whole)
        if config is not None and expected is not None:
            assert config == expected, name
            omitted.append(name)
    assert len(omitted) > 10


@each("kind", PRESENT)
def test_usual_ids_are_those_of_the_class(kind) -> None:
    """A small model can't have them: they are beyond its vocabulary."""
    usual, found = type(config_of(kind, {}))().to_dict(), with_usual_ids({"model_type": kind})
    for name, value in found.items():
        if name.endswith("_token_id"):
            assert value == usual[name], name
    if FAMILIES[kind].kind != "seq2seq":
        assert found.get("eos_token_id") == usual.get("eos_token_id")
    if FAMILIES[kind].kind == "decoder":
        assert found.get("pad_token_id") == usual.get("pad_token_id")
    if kind in ENCODER_FORMS:
        assert ENCODER_FORMS[kind].pad == usual["pad_token_id"]


@each("kind", PRESENT)
def test_an_is_causal_that_contradicts_the_family_is_refused(kind) -> None:
    wrong = {"decoder": (False,), "encoder": (True,), "seq2seq": (True, False)}[FAMILIES[kind].kind]
    for value in wrong:
        with pytest.raises(ValueError, match=r"\bis_causal\b"):
            from_huggingface(made(Change(kind, "is_causal", value)))


@pytest.mark.parametrize("kind", LATER)
def test_a_field_of_a_later_version_is_refused(kind, monkeypatch) -> None:
    """A field that is missing in the table stands for one that a later version adds."""
    name, value = LATER[kind]
    monkeypatch.setitem(FIELDS, kind, FIELDS[kind] - {name})
    theirs = made(Change(kind, name, value))
    with pytest.raises(ValueError, match=rf"\b{name} = {value}"):
        from_huggingface(theirs)
    expected = results(theirs, kind)
    fast = accelerate(copy.deepcopy(theirs))
    assert all(name in reason for reason in report(fast).left.values())
    assert fast.__class__ is theirs.__class__ and not differences(results(fast, kind), expected)
    from_huggingface(made(Change(kind, "use_cache", False)))  # the field has its default


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("kind", LATER)
def test_is_causal_as_an_argument_of_a_forward(kind, value) -> None:
    plain = made(Change(kind, "use_cache", False))
    ours = accelerate(copy.deepcopy(plain))
    rows = {"decoder_input_ids": TARGETS} if FAMILIES[kind].kind == "seq2seq" else {}
    for mask in (None, RIGHT, LEFT):
        for is_training in (True, False):
            outs = []
            for model in (plain, ours):
                with torch.set_grad_enabled(is_training):
                    out = model(IDS, attention_mask=mask, is_causal=value, **rows)[0]
                real = torch.ones_like(out[..., :1]) if mask is None or rows else mask[..., None]
                outs.append(out.detach() * real)
            assert not differences({"out": outs[1]}, {"out": outs[0]}), (mask, is_training)
