"""Random models of torch.nn with padding: accelerated, they compute what they computed before, at every position."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
import fastformer.nn as fast
from fastformer.ops import record_backends
from tests.covering import by_turns
from tests.nn.comparing import banded, padding_mask, randomised

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*nested tensors is in prototype")

N, S, T, E = 4, 6, 5, 12
DOUBLE = {"dtype": torch.float64}


class Centred(nn.Module):
    """A norm of the user's that is not zero at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(E, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * 0.5 + self.shift


class Reads(nn.Module):
    """A module of the user's that reads the output of one encoder or two."""

    def __init__(self, how: str, encoder: nn.Module, batch_first: bool) -> None:
        super().__init__()
        self.how, self.dim = how, 1 if batch_first else 0
        self.encoder = encoder
        self.second = encoder if how == "shared" else copy.deepcopy(encoder)
        self.scores = nn.Linear(E, 1, **DOUBLE)
        self.query = nn.Parameter(torch.randn(1, E, **DOUBLE))
        self.attention = nn.MultiheadAttention(E, 2, batch_first=batch_first, **DOUBLE)

    def forward(self, src: Tensor, mask: Tensor | None, padding: Tensor) -> Tensor:
        def encoded(encoder: nn.Module, x: Tensor) -> Tensor:
            return encoder(x, mask, src_key_padding_mask=padding)

        x = encoded(self.encoder, src)
        match self.how:
            case "mean":
                return x.mean(self.dim)
            case "max":
                return x.amax(self.dim)
            case "first":
                return x.select(self.dim, 0)
            case "last":
                return x.select(self.dim, -1)
            case "softmax":
                return (self.scores(x).softmax(self.dim) * x).sum(self.dim)
            case "attention":
                query = self.query.expand(src.shape[1 - self.dim], 1, E)
                return self.attention(query if self.dim else query.transpose(0, 1), x, x)[0]
            case "residual":
                return src + x
            case "concatenation":
                return torch.cat([src, x, encoded(self.second, x)], -1)
            case "two" | "shared":
                return encoded(self.second, x).mean(self.dim)
        raise AssertionError(self.how)


HOWS = ["mean", "max", "first", "last", "softmax", "attention", "residual", "concatenation", "two", "shared"]
KINDS = ["encoder", "encoder", "decoder", "transformer", "transformer", *HOWS]
MODES: dict[str, tuple[bool, Callable[[], Any]]] = {
    "training": (True, contextlib.nullcontext),
    "training without gradients": (True, torch.no_grad),
    "evaluation": (False, contextlib.nullcontext),
    "no_grad": (False, torch.no_grad),
    "inference_mode": (False, torch.inference_mode),
}


class Case(NamedTuple):
    """A model, the tensors of a call that get gradients, and the masks of the call in the model's order."""

    model: nn.Module
    inputs: list[Tensor]
    masks: dict[str, Tensor | None]
    told: str


def make(seed: int) -> Case:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind, is_usual = draw.choice(KINDS), draw.random() < 0.5

    def pick(usual: Any, *others: Any) -> Any:
        """Returns the usual choice in half of the models, as torch.nn's fast path needs it, and else any."""
        return usual if is_usual else draw.choice([usual, *others])

    batch_first = pick(True, False)
    options: dict[str, Any] = {
        "norm_first": pick(False, True),
        "activation": pick("relu", "gelu", F.silu, nn.GELU()),
        "batch_first": batch_first,
        "bias": pick(True, False),
        "dropout": 0.0,
        **DOUBLE,
    }
    heads, depth, nested = pick(2, 3, 4), draw.randint(1, 3), pick(True, False)
    norm = draw.choice([None, nn.LayerNorm(E, **DOUBLE), nn.LayerNorm(E, **DOUBLE), nn.RMSNorm(E, **DOUBLE), Centred()])
    masks: dict[str, Tensor | None]

    def padding(width: int) -> Tensor:
        least = 0 if draw.random() < 0.2 else 1
        mask = padding_mask([draw.randint(least, width) for _ in range(N)], width)
        shape = pick("right", "left", "holes", "none")
        if shape == "left":
            mask = mask.flip(1)
        elif shape == "holes":
            mask = torch.rand(N, width) < 0.4
        elif shape == "none":
            mask = torch.zeros_like(mask)
        added = draw.choice([None, -torch.inf]) if is_usual else draw.choice([None, -torch.inf, -2.0])
        return mask if added is None else torch.zeros(N, width, **DOUBLE).masked_fill(mask, added)

    def square(width: int) -> Tensor | None:
        causal = nn.Transformer.generate_square_subsequent_mask(width, **DOUBLE)
        return pick(None, causal, causal.isinf(), banded(width, 2, 1))

    def tensor(width: int) -> Tensor:
        return torch.randn(*((N, width) if batch_first else (width, N)), E, **DOUBLE)

    of_source = padding(S)
    of_memory = draw.choice([None, None, of_source, of_source.clone(), padding(S)])
    if kind == "transformer":
        model: nn.Module = nn.Transformer(E, heads, depth, depth, 16, **options)
        inputs = [tensor(S), tensor(T)]
        masks = {
            "src_mask": square(S),
            "tgt_mask": square(T),
            "src_key_padding_mask": of_source,
            "tgt_key_padding_mask": draw.choice([None, padding(T)]),
            "memory_key_padding_mask": of_memory,
        }
    elif kind == "decoder":
        model = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, heads, 16, **options), depth, norm)
        inputs = [tensor(T), tensor(S)]
        masks = {
            "tgt_mask": square(T),
            "tgt_key_padding_mask": draw.choice([None, padding(T)]),
            "memory_key_padding_mask": of_memory,
        }
    else:
        layer = nn.TransformerEncoderLayer(E, heads, 16, **options)
        model = nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=nested)
        inputs, masks = [tensor(S)], {"mask": square(S), "src_key_padding_mask": of_source}
        if kind != "encoder":
            model, masks = Reads(kind, model, batch_first), {"mask": masks["mask"], "padding": of_source}
    if draw.random() < 0.15:
        model.requires_grad_(False)
    return Case(randomised(model), inputs, masks, f"seed {seed}: {kind}")


def results(case: Case, model: nn.Module, mode: str) -> list[Tensor | None]:
    """Returns the output and, with gradients, those of the inputs and of all parameters."""
    training, context = MODES[mode]
    model.train(training)
    leaves = [each.clone().requires_grad_(mode in ("training", "evaluation")) for each in case.inputs]
    if not any(each.requires_grad for each in model.parameters()):
        leaves = [each.detach() for each in leaves]
    # torch.nn's fast path takes a mask that lowers scores for one that hides keys.
    lowers = any(each is not None and (each == -2).any() for each in case.masks.values())
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast and not lowers)
    try:
        with context():
            out = model(*leaves, **case.masks)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    if not out.requires_grad:
        return [out]
    generator = torch.Generator().manual_seed(0)
    dout = torch.randn(out.shape, generator=generator, **DOUBLE).masked_fill(~out.detach().isfinite(), 0)
    wanted = [each for each in (*leaves, *model.parameters()) if each.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, dout, allow_unused=True)]


def check(seed: int) -> bool:
    """Compares a random model before and after `accelerate` in all modes; returns whether padding was ever skipped."""
    case, packed = make(seed), False
    plain, ours = case.model, copy.deepcopy(case.model)
    assert not fastformer.report(fastformer.accelerate(ours)).left
    for mode in MODES:
        where = f"{case.told}, {mode}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = results(case, plain, mode)
            with record_backends() as ran:
                found = results(case, ours, mode)
        packed = packed or any(name == "varlen_attention_fwd" for name, _ in ran)
        for mine, theirs in zip(found, expected, strict=True):
            if theirs is None or mine is None:
                assert all(each is None or not each.any() for each in (theirs, mine)), where
                continue
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, where
            defined = theirs.isfinite()
            if defined.any():
                worst, largest = ((each[defined]).abs().max() for each in (mine - theirs, theirs))
                assert worst <= 1e-10 * largest.clamp(min=1e-2), f"{where}: differs by {worst:.1e}"
    return packed


def test_some_random_models() -> None:
    assert sum(map(check, range(16))) > 4


@pytest.mark.slow  # 284 more
@pytest.mark.parametrize("part", range(4))
def test_many_random_models(part: int) -> None:
    assert sum(map(check, range(16 + part, 300, 4))) > 10


def packs(call: Callable[[], object]) -> bool:
    """Returns whether attention ran on packed tokens."""
    with record_backends() as ran:
        call()
    return any(name == "varlen_attention_fwd" for name, _ in ran)


RIGHT = padding_mask([6, 3, 1, 4], S)
SIZES: dict[str, Any] = {"dropout": 0.0, "batch_first": True, **DOUBLE}


def transformers() -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """Returns torch.nn's Transformer, its accelerated copy, and their inputs."""
    torch.manual_seed(0)
    plain = randomised(nn.Transformer(E, 2, 2, 2, 16, **SIZES))
    inputs = torch.randn(N, S, E, **DOUBLE), torch.randn(N, T, E, **DOUBLE)
    return plain, fastformer.accelerate(copy.deepcopy(plain)), inputs


# What hides the padding of the source from the decoder, and whether the encoder and the memory are packed then.
MEMORIES = {
    "the same mask": (RIGHT, True),
    "an equal mask": (RIGHT.clone(), True),
    "an added mask": (torch.zeros(N, S, **DOUBLE).masked_fill(RIGHT, -torch.inf), True),
    "a mask that hides more": (padding_mask([6, 2, 1, 1], S), True),
    "a mask that hides less": (padding_mask([6, 3, 2, 4], S), False),
    "a penalty": (torch.where(RIGHT, -1e9, 0.0).double(), False),
    "none": (None, False),
}


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_encoders_padding_is_skipped_if_the_decoder_does_not_read_it(memory: str) -> None:
    plain, ours, inputs = transformers()
    mask, is_hidden = MEMORIES[memory]
    # A decoder with padding of its own computes it, so that what is packed is the encoder.
    options = {"tgt_key_padding_mask": padding_mask([5, 2, 4, 1], T), "memory_key_padding_mask": mask}
    options["src_key_padding_mask"] = RIGHT
    assert_equal(ours(*inputs, **options), plain(*inputs, **options))
    assert packs(lambda: ours(*inputs, **options)) is is_hidden
    seen: list[Tensor] = []
    for model in (plain, ours):
        model.encoder.register_forward_hook(lambda module, args, out: seen.append(out))
        model(*inputs, **options)
    assert_equal(seen[1], seen[0])


@pytest.mark.parametrize("part", ["decoder", "cross-attention", "custom encoder"])
def test_code_inside_of_a_transformer_may_read_padding(part: str) -> None:
    plain, ours, inputs = transformers()
    seen: list[Tensor] = []
    for model in (plain, ours):
        if part == "custom encoder":
            model.encoder = Doubled(model.encoder, seen)
        else:
            read = model.decoder if part == "decoder" else model.decoder.layers[1].multihead_attn
            read.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        model(*inputs, src_key_padding_mask=RIGHT, memory_key_padding_mask=RIGHT)
    assert_equal(seen[1], seen[0])


class Doubled(nn.Module):
    """A caller's encoder around torch.nn's."""

    def __init__(self, inside: nn.Module, seen: list[Tensor]) -> None:
        super().__init__()
        self.inside, self.seen = inside, seen

    def forward(self, *args: Any, **options: Any) -> Tensor:
        self.seen.append(2 * self.inside(*args, **options))
        return self.seen[-1]


@pytest.mark.parametrize("padding", [RIGHT, RIGHT.flip(1), RIGHT.roll(1, 1)], ids=["right", "left", "around"])
def test_evaluation_skips_padding_on_the_right(padding: Tensor) -> None:
    plain, ours, (src, _) = transformers()
    for encoder in (plain.encoder, ours.encoder):
        encoder.eval().requires_grad_(False)
    assert_equal(ours.encoder(src, None, padding), plain.encoder(src, None, padding))
    assert packs(lambda: ours.encoder(src, None, padding)) is (padding is RIGHT)


def test_a_memorys_padding_is_skipped() -> None:
    plain, ours, inputs = transformers()
    options = {"memory_key_padding_mask": RIGHT}
    assert packs(lambda: ours.decoder(*inputs[::-1], **options))
    assert_equal(ours.decoder(*inputs[::-1], **options), plain.decoder(*inputs[::-1], **options))


def test_the_report_says_which_padding_is_skipped() -> None:
    plain, ours, (src, tgt) = transformers()
    options = {"src_key_padding_mask": RIGHT, "memory_key_padding_mask": RIGHT}
    fastformer.accelerate(ours, padding="compute")
    said = fastformer.report(ours).padding
    assert said.keys() == {"encoder", "decoder"} and all("compute" in each for each in said.values())
    assert not packs(lambda: ours(src, tgt, **options))
    computed = plain.encoder(src, None, RIGHT)
    assert_equal(ours.encoder(src, None, RIGHT), computed)
    with torch.no_grad():
        assert_equal(ours.eval().encoder(src, None, RIGHT), computed)
    fastformer.accelerate(ours.train(), padding="skip")
    assert all("zero" in each for each in fastformer.report(ours).padding.values())
    assert not ours.encoder(src, None, RIGHT)[RIGHT].any()
    assert_equal(ours(src, tgt, **options), plain(src, tgt, **options))
    ours.encoder.layers[1].norm1 = Centred()
    assert "layers.1" in fastformer.report(ours).padding["encoder"]
    fastformer.accelerate(ours)
    assert "padding" not in vars(ours.encoder)
    fastformer.accelerate(ours, padding="skip")
    fastformer.restore(ours)
    assert vars(ours.encoder).keys() == vars(plain.encoder).keys()


def test_a_mask_that_lowers_scores() -> None:
    """It is added in every mode; torch.nn's fast path takes it for one that hides keys."""
    plain, ours, (src, _) = transformers()
    options = {"src_key_padding_mask": torch.where(RIGHT, -2.0, 0.0).double()}
    added = plain.encoder(src, **options)
    with torch.no_grad():
        assert_equal(ours.eval().encoder(src, **options), added)
        assert not torch.allclose(plain.eval().encoder(src, **options), added)


def test_modules_of_fastformer_compute_padding_unless_told() -> None:
    plain, _, (src, tgt) = transformers()
    ours = fast.Transformer(E, 2, 2, 2, 16, **SIZES)
    ours.load_state_dict(plain.state_dict())
    assert_equal(ours(src, tgt, src_key_padding_mask=RIGHT), plain(src, tgt, src_key_padding_mask=RIGHT))
    for training in (True, False):
        for module in (plain, ours):
            module.train(training)
        with torch.set_grad_enabled(training):
            assert_equal(ours.encoder(src, None, RIGHT), plain.encoder(src, None, RIGHT))
    encoder: Any = ours.encoder
    encoder.padding = "skip"
    fastformer.accelerate(ours)
    assert not ours.encoder(src, None, RIGHT)[RIGHT].any(), "accelerate leaves the setting of fastformer's modules"
    encoder.padding = "always"
    with pytest.raises(ValueError, match=r"\bpadding\b"):
        ours.encoder(src, None, RIGHT)


@pytest.mark.parametrize("norm_first, final", by_turns([False, True], [False, True]))
def test_a_cpus_autocast_gives_the_dtypes_of_torch_nn(norm_first: bool, final: bool) -> None:
    for heads, activation, batch_first in ((2, "relu", True), (3, "relu", True), (2, F.silu, True), (2, "gelu", False)):
        layer = nn.TransformerEncoderLayer(
            E, heads, 16, 0.0, activation, norm_first=norm_first, batch_first=batch_first
        )
        plain = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E) if final else None, enable_nested_tensor=False)
        ours, x = fastformer.accelerate(copy.deepcopy(plain)), torch.randn(N, S, E)
        for training, grad in ((True, True), (True, False), (False, True), (False, False)):
            plain.train(training), ours.train(training)
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
                for mine, theirs in ((ours, plain), (ours.layers[0], plain.layers[0])):
                    for masks in ({}, {"src_key_padding_mask": RIGHT if batch_first else RIGHT[:, :N].new_zeros(S, N)}):
                        found, expected = mine(x, **masks), theirs(x, **masks)
                        assert found.dtype == expected.dtype, (heads, activation, batch_first, training, grad)
                        torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)


class Mixture(nn.TransformerEncoderLayer):
    """A layer of the user's with a forward of its own, without the feed-forward network of torch.nn's."""

    def __init__(self) -> None:
        super().__init__(E, 2, 16, 0.0, batch_first=True)
        del self.linear1, self.linear2
        self.expert = nn.Linear(E, E)

    def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:
        return src + self.expert(src).float()


class Unlike(nn.Module):
    """An attention of the user's that has none of the attributes of torch.nn's."""

    batch_first = True

    def forward(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return query, None


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_layers_with_a_forward_of_their_own(autocast: bool) -> None:
    plain = nn.TransformerEncoder(Mixture(), 2, nn.LayerNorm(E), enable_nested_tensor=False).eval()
    ours = fast.TransformerEncoder(Mixture(), 2, fast.AddLayerNorm(E)).eval()
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(N, S, E)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = plain(x, src_key_padding_mask=RIGHT)
        for model in (ours, fastformer.accelerate(copy.deepcopy(plain))):
            found = model(x, src_key_padding_mask=RIGHT)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_an_attention_unlike_torchs(norm_first: bool, autocast: bool) -> None:
    """torch.nn refuses it in evaluation; here it gives what it gives in training."""
    layer = fast.TransformerEncoderLayer(E, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    layer.self_attn = Unlike()  # type: ignore[assignment]
    ours, x = fast.TransformerEncoder(layer, 2), torch.randn(N, S, E)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for masks in ({}, {"src_key_padding_mask": RIGHT}):
            expected = ours.train()(x, **masks)
            found = ours.eval()(x, **masks)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_a_hook_decides_what_an_encoder_returns() -> None:
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 2, 16, 0.0, batch_first=True), 2).eval()
    for model in (plain, fastformer.accelerate(copy.deepcopy(plain))):
        model.layers[-1].register_forward_hook(lambda module, args, out: (out, "more"))
        assert model(torch.randn(N, S, E))[1] == "more"
