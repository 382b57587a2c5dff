"""Compares GPT's options, alone and combined, with the plain model: logits, loss and gradients."""

from __future__ import annotations

import copy
import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastformer.models import GPT, GPTConfig
from fastformer.nn import AddLayerNorm, SequenceLayout
from fastformer.nn.mixture import MixtureOfExperts, recorded_router_logits
from fastformer.ops import use_backend
from tests.checks import RELAXED
from tests.conftest import missing_backend
from tests.covering import each
from tests.models.plain_gpt import plain_logits, weights_of
from tests.nn.comparing import assert_same, assert_same_gradients, randomised

V, LENGTHS = 23, [4, 7, 1]
SMALL: dict[str, Any] = {"vocab_size": V, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 24, "max_len": 12}
LLAMA3 = {
    "kind": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8,
}  # fmt: skip
YARN = {"kind": "yarn", "factor": 4, "original_max_position_embeddings": 16}
# What each option may be; a row of the tests has one of each.
AXES: list[list[dict[str, Any]]] = [
    [{"num_heads": 4}, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 12}, {"num_heads": 3, "head_dim": 8}],
    [
        {},
        {"bias": False},
        {"bias": False, "qkv_bias": True},
        {"out_bias": False},
        {"bias": False, "norm_bias": True},
        {"norm_bias": False},
    ],
    [{"norm": "layer"}, {"norm": "rms"}, {"layer_norm_eps": 0.3}],
    [{}, {"qk_norm": "head"}, {"qk_norm": "all"}, {"qk_norm": "rotated"}],
    [
        {},
        {"norm_placement": "post"},
        {"norm_placement": "both"},
        {"parallel_residual": True},
        {"parallel_residual": True, "shared_norm": True},
    ],
    [
        {},
        {"positions": "sinusoidal"},
        {"positions": "rotary", "rotary_base": 100.0},
        {"positions": "rotary", "rotary_base": 100.0, "rotary_fraction": 0.5},
        {"positions": "rotary", "rotary_base": 100.0, "rotary_scaling": LLAMA3},
        {"positions": "rotary", "rotary_base": 50.0, "rotary_scaling": YARN},
        {"positions": "rotary", "rotary_layers": (False, True)},
        {"positions": "rotary", "query_growth": 0.8, "query_growth_length": 2},
    ],
    [
        {},
        {"window_size": 2},
        {"window_size": 2, "window_layers": (True, False)},
        {"window_size": 1, "window_layers": (False, True), "local_rotary_base": 7.0},
    ],
    [{}, {"attention_scale": 0.7}],
    [{}, {"attention_softcap": 1.5}, {"logit_softcap": 2.0}],
    [{}, {"embedding_scale": 3.3}],
    [{"activation": name} for name in ("gelu", "gelu_tanh", "swiglu", "geglu_tanh")],
    [{}, {"tie_embeddings": False}, {"output_bias": True}, {"tie_embeddings": False, "output_bias": True}],
    [
        {},
        {"num_experts": 3},
        {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": False, "expert_d_ff": 9,
         "shared_expert_d_ff": 10, "sparse_layers": (False, True)},
        {"num_experts": 4, "router_activation": "sigmoid", "choice_bias": True, "norm_topk_eps": 0.3,
         "expert_scale": 1.7, "shared_expert_d_ff": 10, "shared_expert_gate": False},
    ],
]  # fmt: skip


def rows(axes: list[list[dict[str, Any]]], seed: int) -> list[dict[str, Any]]:
    """Returns rows of options in which each value of an option occurs with each value of every other option."""
    draw = random.Random(seed)
    missing = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.product(range(len(axes[i])), range(len(axes[j])))
    }
    combinations = []
    while missing:
        (i, a), (j, b) = min(missing)
        drawn = [[draw.randrange(len(axis)) for axis in axes] for _ in range(60)]
        for row in drawn:
            row[i], row[j] = a, b
        best = max(drawn, key=lambda row: len(missing & {*itertools.combinations(enumerate(row), 2)}))
        missing -= {*itertools.combinations(enumerate(best), 2)}
        options: dict[str, Any] = {}
        for axis, value in zip(axes, best, strict=True):
            options |= axis[value]
        if options.get("positions") != "rotary" or "query_growth" in options:
            options.pop("local_rotary_base", None)
        if "query_growth" in options and options.get("qk_norm") == "rotated":
            options["qk_norm"] = "head"
        combinations.append(options)
    return combinations


ROWS = rows(AXES, 0)
FAMILIES: dict[str, dict[str, Any]] = {
    "neox": {"positions": "rotary", "rotary_fraction": 0.5, "num_heads": 4, "parallel_residual": True},
    "qwen3": {
        "positions": "rotary", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "bias": False, "qk_norm": "head",
        "norm": "rms", "activation": "swiglu",
    },
    "olmo2": {
        "positions": "rotary", "num_heads": 4, "bias": False, "qk_norm": "all", "norm": "rms", "norm_placement": "post",
        "activation": "swiglu",
    },
    "gemma3": {
        "positions": "rotary", "num_heads": 4, "num_kv_heads": 1, "head_dim": 12, "bias": False, "qk_norm": "head",
        "norm": "rms", "norm_placement": "both", "activation": "geglu_tanh", "window_size": 2,
        "window_layers": (True, False), "local_rotary_base": 7.0, "rotary_base": 100.0, "attention_scale": 0.4,
        "rotary_scaling": {"kind": "linear", "factor": 2}, "embedding_scale": 4.0,
    },
}  # fmt: skip
FAMILIES["hunyuan"] = {**FAMILIES["qwen3"], "qk_norm": "rotated"}
FAMILIES["ministral3"] = {**FAMILIES["qwen3"], "qk_norm": None, "query_growth": 0.8, "query_growth_length": 3}
FAMILIES["gemma2"] = {
    **{name: value for name, value in FAMILIES["gemma3"].items() if name not in ("qk_norm", "local_rotary_base")},
    "rotary_scaling": None, "attention_softcap": 2.0, "logit_softcap": 3.0,
}  # fmt: skip
every = pytest.mark.parametrize("options", ROWS, ids=map(str, range(len(ROWS))))
# A graph can't contain its experts, whose tokens are counted.
_MIXTURE = {**FAMILIES["qwen3"], "num_experts": 4, "shared_expert_d_ff": 10, "sparse_layers": (False, True)}
families = pytest.mark.parametrize(
    "options", [*FAMILIES.values(), {**_MIXTURE, "router_aux_loss_coef": 3.0}], ids=[*FAMILIES, "mixture"]
)


def model_of(dtype: torch.dtype = torch.float64, gain: float = 10.0, **options: Any) -> GPT:
    """Makes a model with larger weights than initial ones, with which attention would be flat."""
    model = GPT(GPTConfig(**{**SMALL, **options}), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain if parameter.dim() > 1 else 1)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("choice_bias"):
                buffer.normal_(std=0.3)
    for module in model.modules():
        if isinstance(module, AddLayerNorm):
            randomised(module)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, following = torch.randint(0, V, (3, 7)), torch.randint(0, V, (3, 7))
    return tokens, following.masked_fill(torch.arange(7)[None] >= torch.tensor(LENGTHS)[:, None], -100)


@every
def test_equals_the_plain_model(options):
    model = model_of(**options)
    tokens, following = batch()
    weights = weights_of(model)
    logits = model(tokens)
    expected = [plain_logits(model.config, weights, tokens[row, :length]) for row, length in enumerate(LENGTHS)]
    for row, length in enumerate(LENGTHS):
        assert_same(logits[row, :length], expected[row], f"logits of row {row}")
    real = torch.cat([following[row, :length] for row, length in enumerate(LENGTHS)])
    loss = model.loss(tokens, following, reduction="mean")
    assert_same_gradients(loss, F.cross_entropy(torch.cat(expected), real), model)


@every
def test_packed_and_cached_equal_padded(options):
    model = model_of(**options)
    tokens, following = batch()
    layout = SequenceLayout.packed(torch.tensor(LENGTHS), 7)
    packed = model.loss(layout.pack(tokens), layout.pack(following), layout=layout)
    assert_same_gradients(packed, model.loss(tokens, following), model)

    model.eval()
    further = torch.randint(0, V, (3, 3))
    for prompt in (SequenceLayout.padded(torch.tensor(LENGTHS), 7), layout):
        with torch.inference_mode():
            cache = model.new_cache(3, 12)
            prompts = model.decode(layout.pack(tokens) if prompt.is_packed else tokens, layout=prompt, cache=cache)
            steps = torch.cat([model.decode(further[:, :1], cache=cache), model.decode(further[:, 1:], cache=cache)], 1)
            prompts = layout.unpack(prompts) if prompt.is_packed else prompts
            for row, length in enumerate(LENGTHS):
                expected = model.decode(torch.cat([tokens[row, :length], further[row]])[None])[0]
                assert_same(prompts[row, :length], expected[:length], "prompt")
                assert_same(steps[row], expected[length:], "steps")


@families
def test_training_uses_the_same_paths(options):
    """This includes gradient checkpointing, and modules that are called because they have hooks."""
    model = model_of(**options)
    tokens, following = batch()
    expected = model.loss(tokens, following)
    model.decoder.gradient_checkpointing = True
    assert_same_gradients(model.loss(tokens, following), expected, model)
    model.decoder.gradient_checkpointing = False
    names = [name for name, module in model.named_modules() if isinstance(module, AddLayerNorm | nn.Linear)]
    names = [name for name in names if name.startswith("decoder.")]
    seen: list[str] = []
    for chosen in (names, names[1::3]):
        seen.clear()
        handles = [
            model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name)) for name in chosen
        ]
        called = model.loss(tokens, following)
        for handle in handles:
            handle.remove()
        assert {*seen} >= {*chosen}
        assert_same_gradients(called, model.loss(tokens, following), model)


@families
def test_dropout_applies_to_the_added_branch(options):
    """In fused and in called layers, with almost everything dropped, little is added to the embeddings."""
    model = model_of(**{**options, "dropout": 0.996})
    tokens = torch.randint(0, V, (8, 12))
    x = torch.randn(8, 12, 16, dtype=torch.float64)
    for hooked in (False, True):
        if hooked:
            model.decoder.layers[0].linear1.register_forward_hook(lambda *_: None)
            model.decoder.layers[0].dropout1.register_forward_hook(lambda *_: None)
        assert model.rotary is not None
        added = model.decoder.layers[0](x, is_causal=True, rotary=model.rotary()) - x
        assert 0.9 < (added.abs() < 1e-12).double().mean() < 1
    assert model.eval()(tokens).isfinite().all()


# Of one layer in every run: what takes long grows with the depth.
FEW = [
    pytest.param({**FAMILIES["gemma3"], "num_layers": 1, "window_layers": (True,)}, id="gemma3, one layer"),
    *(pytest.param(options, id=name, marks=pytest.mark.slow) for name, options in FAMILIES.items()),
]
few = pytest.mark.parametrize("options", FEW)


@pytest.mark.parametrize("options", [*FEW, pytest.param({"num_heads": 4}, id="gpt", marks=pytest.mark.slow)])
def test_compiles_in_one_graph(options):
    """The dropout is the same, too. The slow cases are all families."""
    model = model_of(**options, dropout=0.1, attention_dropout=0.1)
    tokens, following = batch()
    losses = []
    for loss in (torch.compile(model.loss, backend="aot_eager", fullgraph=True), model.loss):
        torch.manual_seed(3)
        losses.append(loss(tokens, following))
    assert_same_gradients(losses[0], losses[1], model)


@few
def test_exports(options):
    """The slow cases are all families."""
    model = model_of(**options).eval()
    tokens, _ = batch()
    exported = torch.export.export(model, (tokens,)).module()
    with torch.no_grad():
        assert_same(exported(tokens), model(tokens), "logits")


def step_of(model: GPT, backend: str | None = None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns the losses and gradients of the model on a backend, or of the plain model, and the experts of the tokens.

    The experts are (rows, layers with experts, positions, num_experts_per_tok), each token's in ascending order.
    """
    generator = torch.Generator().manual_seed(1)
    tokens, following = (torch.randint(0, V, (3, 7), generator=generator) for _ in range(2))
    count = model.config.num_experts_per_tok
    experts = torch.empty(3, 0, 7, count)
    with use_backend(backend or "reference"):
        if backend is not None:
            with recorded_router_logits() as scores:
                losses = model.loss(tokens, following, reduction="none")
            if scores:
                mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
                found = []
                for module, each in zip(mixtures, scores, strict=True):
                    wide = each.to(torch.promote_types(each.dtype, torch.float32))
                    wide = wide.sigmoid() if model.config.router_activation == "sigmoid" else wide.softmax(-1)
                    added = 0.0 if module.router.choice_bias is None else module.router.choice_bias
                    found.append((wide + added).topk(count).indices.view(3, 7, count))
                experts = torch.stack(found, 1)
        else:
            weights = weights_of(model)
            chosen: list[torch.Tensor] = []
            logits = torch.cat([plain_logits(model.config, weights, row, routed=chosen.append) for row in tokens])
            if chosen:
                experts = torch.stack(chosen).view(3, -1, 7, count)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            losses = F.cross_entropy(wide, following.flatten(), reduction="none").view(3, 7)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad((losses * torch.arange(21).view(3, 7)).sum(), parameters)
    return {"losses": losses.detach(), **dict(zip(names, gradients, strict=True))}, experts.sort(-1).values


def check_step(options: dict[str, Any], backend: str, dtype: torch.dtype, our_draws: int = 8, draws: int = 8) -> None:
    """Checks fastformer's step against the plain one in the same dtype, by the rule of tests/checks.py on root mean
    squares.

    A query norm has a dozen numbers, whose largest error is a matter of luck. If fastformer's steps take long, there
    are fewer of them than plain ones. Draws in which bf16 makes either model send a token to other experts than fp64
    does are left out: the scores nearly tie there, and an error is that of another expert.
    """
    if (reason := missing_backend(backend, "attention")) is not None:
        pytest.skip(reason)
    kept: list[list[dict[str, torch.Tensor]]] = []
    for draw in range(draws):
        torch.manual_seed(draw)
        model = model_of(dtype, gain=4.0, **options)  # larger ones make errors a matter of luck
        plain = step_of(model)
        ours = step_of(model, backend) if draw < our_draws else plain
        exact = step_of(copy.deepcopy(model).double())
        if all(torch.equal(experts, exact[1]) for _, experts in (ours, plain)):
            kept.append([values for values, _ in (ours, plain, exact)])
    ties = draws // 4 if dtype == torch.bfloat16 else 0
    assert len(kept) >= draws - ties, f"in {draws - len(kept)} of {draws} draws, tokens went to other experts"
    for name in kept[0][0]:
        actual, usual, right = (
            torch.stack([step[name].double() for step in steps]) for steps in zip(*kept, strict=True)
        )
        # What the gradients of queries and keys are relaxed by, which those of their norms are sums of.
        factor = 3.0 if "dq" in RELAXED and name.endswith(("q_norm.weight", "k_norm.weight")) else 2.0
        err_ours, err_plain = ((values - right).square().mean().sqrt() for values in (actual, usual))
        allowed = factor * err_plain + torch.finfo(dtype).eps * right.abs().max()
        assert err_ours <= allowed, f"{name}: {err_ours:.3e} > {factor:g} x {err_plain:.3e} + 1 ulp"


@families
def test_a_step_in_fp32(options):
    check_step(options, "cpp", torch.float32, draws=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpp"])
@every
def test_a_step_by_the_rule(options, backend, dtype):
    """Tests every row of options in the dtypes of training, on the backends of a CPU."""
    check_step(options, backend, dtype, 24, 24)  # of 8 draws, one in some hundred tests exceeds the rule by luck


@few
def test_a_step_by_kernels(options):
    """The kernels are Triton's, in its interpreter. The slow cases are all families."""
    check_step({**options, "head_dim": 16, "num_heads": 2}, "triton", torch.float32, 1)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 5, "positions": "rotary"}, "heads"),
    ({"rotary_fraction": 0.5}, "rotary_fraction"),
    ({"rotary_fraction": 1.5, "positions": "rotary"}, "rotary_fraction"),
    ({"rotary_scaling": LLAMA3}, "rotary_scaling"),
    ({"local_rotary_base": 10.0}, "local_rotary_base"),
    ({"local_rotary_base": 10.0, "positions": "rotary"}, "window_size"),
    ({"window_layers": (True, False)}, "window_size"),
    ({"window_layers": (True,), "window_size": 2}, "window_layers"),
    ({"window_layers": (1, 0), "window_size": 2}, "window_layers"),
    ({"window_layers": "ab", "window_size": 2}, "window_layers"),
    ({"parallel_residual": True, "norm_placement": "both"}, "norm_placement"),
    ({"norm_placement": "none"}, "norm_placement"),
    ({"qk_norm": "heads"}, "qk_norm"),
    ({"qk_norm": "rotated", "positions": "rotary", "shared_kv_layers": 1}, "shared_kv_layers"),
    ({"query_growth": 0.1}, "query_growth"),
    ({"query_growth": 0.1, "positions": "rotary", "qk_norm": "rotated"}, "query_growth"),
    ({"query_growth": 0.1, "positions": "rotary", "local_rotary_base": 7.0, "window_size": 2}, "query_growth"),
    ({"embedding_dropout": 1.5}, "embedding_dropout"),
    ({"attention_scale": 0}, "attention_scale"),
    ({"logit_softcap": -1.0}, "logit_softcap"),
    ({"head_dim": 8, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
    ({"num_heads": 5}, "num_heads"),
]


@each("options, named", OPTIONS)
def test_invalid_configs(options, named):
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        GPTConfig(**{**SMALL, **options})


def test_the_embeddings_scale_is_rounded_to_their_dtype():
    """As in Gemma, this applies to the current dtype of the model."""
    model = model_of(num_heads=4, positions="rotary", embedding_scale=3.3)
    tokens = torch.arange(V)[None]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        weight = model.to(dtype).embedding.weight
        with use_backend("reference"):  # which alone computes in fp16 on a CPU
            assert torch.equal(model.embedding(tokens)[0], weight * torch.tensor(3.3, dtype=dtype))


# Tests GPT: loss, initial weights, presets, room in its cache, and wrong calls; see test_gpt_options.py.


def test_each_option_of_the_loss_takes_effect():
    model = model_of()
    tokens, following = batch()
    logits, target = model(tokens).flatten(0, 1), following.flatten()
    for options, smoothing in (
        ({}, 0.0),
        ({"label_smoothing": 0.2}, 0.2),
        ({"label_smoothing": 0.2, "smooth_others": True}, 0.2 * V / (V - 1)),
    ):
        expected = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none").view_as(following)
        assert_same(model.loss(tokens, following, **options), expected.sum(), "sum, the default")
        mean = model.loss(tokens, following, reduction="mean", **options)
        assert_same(mean, expected.sum() / (following != -100).sum(), "mean")
        assert_same(model.loss(tokens, following, reduction="none", **options), expected, "none")


def test_initialisation_and_presets():
    model = GPT.from_preset("tiny", vocab_size=200)
    # The projections into the residual stream are narrower.
    layer = model.decoder.layers[0]
    for parameter, std in (
        (layer.self_attn.in_proj_weight, 0.02),
        (layer.linear1.weight, 0.02),
        (layer.linear2.weight, 0.02 / math.sqrt(8)),
        (layer.self_attn.out_proj.weight, 0.02 / math.sqrt(8)),
        (model.embedding.weight, 0.02),
        (model.embedding.position.table, 0.02),
    ):
        assert abs(parameter.std() - std) < 0.1 * std
    untied = GPT.from_preset("tiny", vocab_size=200, tie_embeddings=False)
    assert abs(untied.output.weight.std() - 0.02) < 0.002 and untied.output.bias is None
    gpt2 = GPT.from_preset("gpt2", vocab_size=50257, device="meta")
    assert sum(p.numel() for p in gpt2.parameters()) == 124_439_808  # as published
    llama = GPT.from_preset("llama-small", vocab_size=100)
    assert llama.config.d_ff == 1024 and llama.decoder.layers[0].linear1.weight.shape == (2048, 384)
    assert not any(name.endswith("bias") for name, _ in llama.named_parameters())
    assert GPT.from_preset("small", vocab_size=65).config.max_len == 256
    names = [name for name, _ in GPT.from_preset("tiny", vocab_size=9).named_parameters()]
    assert len(names) == len(set(names)) and "output.weight" not in names


@pytest.mark.parametrize("d_model, d_ff", [(384, 1024), (96, 256), (100, 320), (512, 1408), (24, 64)])
def test_swiglus_width_is_rounded_up(d_model, d_ff):
    """The width is two thirds of 4 * d_model, rounded up to a multiple of 64."""
    assert GPTConfig(9, d_model=d_model, num_heads=2, activation="swiglu").d_ff == d_ff
    assert GPTConfig(9, d_model=d_model, num_heads=2).d_ff == 4 * d_model
    assert GPTConfig(9, d_model=d_model, num_heads=2, activation="swiglu", d_ff=7).d_ff == 7


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_cache_may_have_room_beyond_max_len_and_the_model_has_not(positions):
    model = model_of(positions=positions).eval()
    with torch.inference_mode():
        cache = model.new_cache(2, 20)
        model.decode(torch.ones(2, 9, dtype=torch.int64), cache=cache)
        model.decode(torch.ones(2, 3, dtype=torch.int64), cache=cache)
        with pytest.raises(ValueError, match=r"\bmax_len\b"):
            model.decode(torch.ones(2, 1, dtype=torch.int64), cache=cache)


def test_dropouts_of_the_config_arrive():
    model = GPT(GPTConfig(**SMALL, dropout=0.1, attention_dropout=0.2, activation_dropout=0.3))
    assert model.embedding.dropout == 0.1
    for layer in model.decoder.layers:
        assert (layer.dropout1.p, layer.dropout2.p, layer.self_attn.dropout, layer.dropout.p) == (0.1, 0.1, 0.2, 0.3)


def test_bad_input():
    model = model_of()
    with pytest.raises(ValueError):
        model(torch.tensor([[1, 30]]))
    with pytest.raises(ValueError, match=r"\bmax_len\b"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\bpositions\b"):
        GPTConfig(5, positions="alibi")
    with pytest.raises(ValueError, match=r"\bvocab_size\b"):
        GPTConfig(0)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@torch.inference_mode()
def test_a_batch_of_other_rows_than_the_cache_has_is_refused(positions):
    model = model_of(positions=positions).eval()
    cache = model.new_cache(3, 5)
    for rows in (1, 2, 4):
        with pytest.raises(ValueError, match=rf"\b3\b.*\b{rows}\b"):
            model.decode(torch.ones(rows, 1).long(), cache=cache)
    assert cache.lengths == [0, 0, 0] and cache.blocks_needed(1) == 3


@torch.inference_mode()
def test_packed_prompts_under_autocast():
    model = model_of(gain=10.0, positions="rotary", num_kv_heads=2).float().eval()
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.empty_cache(3, 12)
        assert cache.k.dtype == torch.bfloat16
        cache.k[:, 1:] = cache.v[:, 1:] = torch.nan
        cache.add(2)
        ids, further = torch.randint(3, V, (7,)), torch.randint(3, V, (3, 1))
        prompts = model.decode(ids, layout=SequenceLayout.packed(torch.tensor([4, 3]), 4), cache=cache)
        cache.fork([[0, 0], [0]])
        step = model.decode(further, cache=cache)
        whole = model.decode(torch.cat((ids[:4], further[1]))[None])[0]
    assert (prompts[:4] - whole[:4]).abs().max() < 0.05 * whole.abs().max()
    assert (step[1, 0] - whole[4]).abs().max() < 0.05 * whole.abs().max()
