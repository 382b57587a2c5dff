"""Tests which special ids are allowed, and that models respect them in every form."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from fastformer.baseline.lstm import LSTMConfig
from fastformer.models import GPT, GPTConfig, Transformer, TransformerConfig
from fastformer.special_ids import SpecialIds

OTHER = SpecialIds(pad=3, eos=(7, 9), unk=4, start=5)
VOCAB = 20
SIZES = {"vocab_size": VOCAB, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_len": 32}
# The same ids with other numbers: decoding begins with padding, or with a separate token.
RENAMED = [
    pytest.param(SpecialIds(), SpecialIds(pad=3, eos=7, unk=4, start=3), id="start is pad"),
    pytest.param(SpecialIds(pad=0, eos=(1, 6), unk=2, start=8), OTHER, id="start is a token"),
]


def renaming(before: SpecialIds, after: SpecialIds, size: int = VOCAB) -> torch.Tensor:
    """Returns the new name of each id, (size,); the ids that are not special are permuted at random."""
    names = {b: a for b, a in zip(_flat(before), _flat(after), strict=True)}
    rest = [i for i in range(size) if i not in names.values()]
    shuffled = iter([rest[i] for i in torch.randperm(len(rest)).tolist()])
    return torch.tensor([names[i] if i in names else next(shuffled) for i in range(size)])


def _flat(ids: SpecialIds) -> list[int]:
    assert ids.unk is not None
    return [ids.pad, *ids.eos, ids.unk, ids.start]


def renamed(model: Transformer, ids: SpecialIds, names: torch.Tensor) -> Transformer:
    """Returns the same model with renamed ids."""
    twin = Transformer(dataclasses.replace(model.config, special_ids=ids), dtype=model.embedding.weight.dtype)
    weights = copy.deepcopy(model.state_dict())
    weights["embedding.weight"][names] = model.embedding.weight.detach()
    twin.load_state_dict(weights)
    return twin.train(model.training)


def test_the_defaults_and_one_end_as_a_number() -> None:
    assert dataclasses.asdict(SpecialIds()) == {"pad": 0, "eos": (1,), "unk": 2, "start": 0}
    assert SpecialIds(eos=7) == SpecialIds(eos=[7]) == SpecialIds(0, (7,), 2, 0) != SpecialIds()
    assert hash(SpecialIds(eos=[7, 9])) == hash(SpecialIds(eos=(7, 9)))
    assert SpecialIds(eos=[9, 7]).first_eos == 9
    assert SpecialIds(pad=0, eos=2, unk=None, start=2).unk is None  # decoding may begin with an end
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpecialIds().pad = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("pad", (-1, True, None)),
        ("start", (0.0, None)),
        ("unk", ("2", 0)),  # 0 is pad
        ("eos", (None, "1", True, [1, -1], [1, "3"], (3, 1, 3), (1, 2))),
    ],
)
def test_impossible_ids(name, wrong) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            SpecialIds(**{name: value})


def test_ids_lie_within_the_vocabulary() -> None:
    for name, ids in {
        "pad": SpecialIds(pad=10),
        "eos": SpecialIds(eos=(1, 10)),
        "unk": SpecialIds(unk=10),
        "start": SpecialIds(start=10),
    }.items():
        ids.check(11)
        with pytest.raises(ValueError, match=rf"\b10\b.*\b{name} 10\b"):
            ids.check(10)
        for make in (TransformerConfig, GPTConfig):
            make(11, special_ids=ids)
            with pytest.raises(ValueError, match=rf"\b10\b.*\b{name} 10\b"):
                make(10, special_ids=ids)
    SpecialIds().check(2)  # no model reads unk
    with pytest.raises(ValueError, match=r"\b8\b.*\beos 9\b"):
        TransformerConfig(20, source_vocab_size=8, tie_embeddings=False, special_ids=OTHER)


def test_a_language_model_alone_may_pad_with_an_end_or_never_end() -> None:
    for ids in (SpecialIds(pad=3, eos=(7, 3)), SpecialIds(eos=())):
        config = GPTConfig(VOCAB, d_model=16, num_heads=2, num_layers=1, max_len=16, special_ids=ids)
        model = GPT(config).eval()
        prompts = torch.tensor([[5, ids.pad, 6], [ids.pad, ids.pad, 4]])  # none of these is padding
        outputs = model.generate(prompts, max_new_tokens=3, engine="kv_cache", eos_token_id=None)
        for row, prompt in zip(outputs.tolist(), prompts.tolist(), strict=True):
            alone = model.generate([prompt], max_new_tokens=3, engine="recompute")[0].tolist()
            assert row[: len(alone)] == alone and set(row[len(alone) :]) <= {ids.pad}
        mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
        masked = model.generate(prompts, attention_mask=mask, max_new_tokens=3)
        assert masked[1, 3:].tolist() == model.generate([[4]], max_new_tokens=3)[0, 1:].tolist()
        with pytest.raises(ValueError, match=r"\beos\b"):
            TransformerConfig(VOCAB, special_ids=ids)
    with pytest.raises(ValueError, match=r"\beos\b"):
        _ = SpecialIds(eos=()).first_eos


def test_plain_values() -> None:
    written = json.loads(json.dumps(dataclasses.asdict(OTHER)))
    assert SpecialIds.from_dict(written) == OTHER
    assert SpecialIds.from_dict({"pad": 5}) == SpecialIds(pad=5)
    with pytest.raises(ValueError, match=r"\bspecial_ids\b.*'padd'.*'pad'"):
        SpecialIds.from_dict({"padd": 5})
    with pytest.raises(ValueError, match=r"\bspecial_ids\b.*\[3, 7\]"):
        Transformer.from_preset("tiny", vocab_size=20, special_ids=[3, 7])
    assert Transformer.from_preset("tiny", **SIZES, special_ids={"pad": 3}).config.special_ids == SpecialIds(pad=3)


def test_any_config_reports_its_ids() -> None:
    assert SpecialIds.of(TransformerConfig(20, special_ids=OTHER)) == OTHER
    assert SpecialIds.of(LSTMConfig(20, pad=3, eos=[7, 9], unk=4, start=5)) == OTHER
    assert SpecialIds.of(object()) == SpecialIds.of(LSTMConfig(20)) == SpecialIds.of(GPTConfig(20)) == SpecialIds()


def batch(ids: SpecialIds) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes padded sources and targets of several lengths, with ids 10 to 19 and ends."""
    lengths = [(5, 4), (3, 6), (6, 2)]
    rows = [
        [[*torch.randint(10, VOCAB, (n - 1,)).tolist(), ids.eos[n % len(ids.eos)]] for n in pair] for pair in lengths
    ]
    source = torch.tensor([[*s, *[ids.pad] * (6 - len(s))] for s, _ in rows])
    target_in = torch.tensor([[ids.start, *t[:-1], *[ids.pad] * (6 - len(t))] for _, t in rows])
    target_out = torch.tensor([[*t, *[-100] * (6 - len(t))] for _, t in rows])
    return source, target_in, target_out


@pytest.mark.parametrize(("before", "after"), RENAMED)
def test_renamed_ids_change_nothing(before, after) -> None:
    sizes = {**SIZES, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = Transformer.from_preset("tiny", **sizes, special_ids=before, dtype=torch.float64).eval()
    names = renaming(before, after)
    twin = renamed(model, after, names)
    source, target_in, target_out = batch(before)
    twin_ids = names[source], names[target_in], torch.where(target_out < 0, target_out, names[target_out.clamp(min=0)])
    # The layers see only vectors, so they give the same bits; only the order of the logits depends on the names.
    memory, their_memory = model.encode(source), twin.encode(twin_ids[0])
    assert torch.equal(memory, their_memory)
    assert torch.equal(model.decode(target_in, memory), twin.decode(twin_ids[1], their_memory))
    assert (model(source, target_in) - twin(*twin_ids[:2])[..., names]).abs().max() < 1e-12
    maps, their_maps = model.attention_maps(source, target_in), twin.attention_maps(*twin_ids[:2])
    assert all(torch.equal(maps[name], their_maps[name]) for name in maps)
    for a, b in zip(train(model, source, target_in, target_out), train(twin, *twin_ids), strict=True):
        assert abs(a - b) < 1e-9
    assert (model.embedding.weight - twin.embedding.weight[names]).abs().max() < 1e-9


def train(model: torch.nn.Module, *batch: torch.Tensor) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(4):
        loss = model.loss(*batch, label_smoothing=0.1)
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize("tied", [True, False])
def test_only_pad_is_the_zero_vector(tied) -> None:
    model = Transformer.from_preset("tiny", **SIZES, tie_embeddings=tied, special_ids=OTHER).eval()
    for embedding in {model.embedding} if tied else {model.source_embedding, model.target_embedding}:
        rows = embedding(torch.arange(VOCAB)[:, None])[:, 0]
        assert ((rows - embedding.position.table[0]).abs().sum(1) == 0).nonzero().flatten().tolist() == [OTHER.pad]


def test_padding_uses_the_models_pad_id() -> None:
    model = Transformer.from_preset("tiny", **SIZES, special_ids=OTHER).eval()
    source, target = torch.randint(10, VOCAB, (2, 5)), torch.randint(10, VOCAB, (2, 4))
    source[:, 2] = 0  # a token like any other
    padded = torch.nn.functional.pad(source, (0, 3), value=OTHER.pad)
    assert (model(source, target) - model(padded, target)).abs().max() < 1e-5
    zeros = torch.nn.functional.pad(source, (0, 3))
    assert (model(source, target) - model(zeros, target)).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"\bid 3\b.*\brow 1\b"):
        model.encode(torch.tensor([[10, 0, 11], [3, 10, 11]]))


def test_ids_are_saved_and_an_old_config_has_the_defaults(tmp_path) -> None:
    for kind in (Transformer, GPT):
        model = kind.from_preset("tiny", vocab_size=VOCAB, d_model=16, num_heads=2, special_ids=OTHER)
        model.save_pretrained(tmp_path)
        loaded = kind.from_pretrained(tmp_path)
        assert loaded.config == model.config and loaded.config.special_ids == OTHER
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["special_ids"] == {"pad": 3, "eos": [7, 9], "unk": 4, "start": 5}
        del config["special_ids"]  # configs were written this way before the setting existed
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert kind.from_pretrained(tmp_path).config.special_ids == SpecialIds()
        for wrong, message in (({"pad": -3}, "pad"), ({"bos": 3}, "'bos'"), ([3], "SpecialIds")):
            (tmp_path / "config.json").write_text(json.dumps({**config, "special_ids": wrong}))
            with pytest.raises(ValueError, match=message):
                kind.from_pretrained(tmp_path)
