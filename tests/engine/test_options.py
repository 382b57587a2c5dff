"""Tests options of decoder-only models, alone and combined, in an engine session, against the plain model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.generation.engines.cpp import pack_options, pack_tensors
from fastformer.models import GPT
from fastformer.ops import _extension
from tests.generation.small import needs_cpp
from tests.generation.weights import drawn
from tests.models.plain_gpt import plain_logits, weights_of

pytestmark = needs_cpp

EXT: Any = _extension.module()
VOCAB = 130  # no multiple of a panel
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 36, "num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "num_layers": 3, "d_ff": 44,
    "norm": "rms", "activation": "swiglu", "bias": False, "positions": "rotary", "rotary_base": 100.0, "max_len": 640,
}  # fmt: skip
WINDOWS = {"window_size": 5, "window_layers": (True, False, True)}
LINEAR = {"linear_key_heads": 3, "linear_key_dim": 6, "linear_value_dim": 20, "linear_conv_size": 3}
GLOBAL = {**WINDOWS, "local_rotary_base": 7.0}
# Caps are small enough to bend what they cap.
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"qkv_bias": True, "out_bias": True},
    "norms of heads": {"qk_norm": "head"},
    "norms over heads": {"qk_norm": "all"},
    "norms behind rotations": {"qk_norm": "rotated"},
    "growing queries": {"query_growth": 0.05, "query_growth_length": 7},
    "a window": {"window_size": 0},
    "windows of layers": WINDOWS,
    "long windows": {"window_size": 250, "window_layers": (False, True, True)},
    "two rotations": {**WINDOWS, "local_rotary_base": 7.0},
    "a part rotated": {"rotary_fraction": 0.625},
    "learned positions": {"positions": "learned", "rotary_base": 10000.0},
    "yarn": {"rotary_scaling": {"kind": "yarn", "factor": 4, "original_max_position_embeddings": 16}},
    "a scale": {"attention_scale": 0.2},
    "capped scores": {"attention_softcap": 1.5},
    "capped logits": {"logit_softcap": 1.2},
    "norms behind": {"norm_placement": "post"},
    "norms on both sides": {"norm_placement": "both"},
    "in parallel": {"parallel_residual": True, "norm": "layer", "activation": "gelu", "bias": True},
    "one norm for both": {"parallel_residual": True, "shared_norm": True, "norm": "layer", "norm_bias": True},
    "some layers rotated": {"rotary_layers": (True, False, True)},
    "a bias on the logits": {"output_bias": True},
    "embeddings scaled": {"embedding_scale": 6.0},
    "wide heads": {"head_dim": 64, "num_kv_heads": 1},
    "many heads": {"num_heads": 14, "num_kv_heads": 2, "head_dim": 128},
    "sinks": {"attention_sinks": True},
    "gates with limits": {"activation": "clamped_swiglu"},
    "gates of heads": {"attention_gate": True},
    "linear attention": {**LINEAR, "linear_layers": (True, False, True)},
    "linear attention, grouped": {**LINEAR, "linear_layers": (False, True, True), "linear_value_heads": 6},
    "linear attention, wide": {"linear_layers": (True, True, False), "linear_key_heads": 1, "linear_value_heads": 2},
    "short convolutions": {"conv_layers": (True, False, True), "conv_size": 4},
    "state spaces": {
        "mamba_layers": (True, False, True),
        "mamba_heads": 3,
        "mamba_head_dim": 20,
        "mamba_state_dim": 9,
    },
    "state spaces in groups": {
        "mamba_layers": (False, True, True),
        "mamba_heads": 6,
        "mamba_head_dim": 16,
        "mamba_state_dim": 33,
        "mamba_groups": 2,
        "mamba_conv_size": 3,
        "mamba_conv_bias": False,
    },
    "experts": {"num_experts": 5, "num_experts_per_tok": 3, "shared_expert_d_ff": 40},
    "experts by other numbers": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "shared_expert_d_ff": 40,
        "shared_expert_gate": False,
        "router_activation": "sigmoid",
        "choice_bias": True,
        "norm_topk_eps": 0.2,
        "expert_scale": 1.7,
        "sparse_layers": (False, True, True),
    },
    "global heads": {**GLOBAL, "global_head_dim": 16, "global_num_kv_heads": 4},
    "wide global heads": {**GLOBAL, "global_head_dim": 256, "global_num_kv_heads": 1},
    "few pairs turn": {"rotary_scaling": {"kind": "proportional", "partial_rotary_factor": 0.5}},
    "norms of values": {"value_norm": True},
    "keys as values": {"keys_as_values": True, "window_size": 5, "window_layers": (True, False, False)},
    "shared keys": {
        "num_layers": 4,
        "window_size": 5,
        "window_layers": (False, True, False, False),
        "shared_kv_layers": 1,
        "shared_kv_d_ff": 88,
    },
    "keys of one layer": {"num_layers": 4, "shared_kv_layers": 3},
    "inputs of layers": {"layer_input_dim": 40},
    "scalars": {"layer_scalars": True},
}
GEMMA4 = ("global heads", "norms of heads", "norms of values", "keys as values", "norms on both sides",
          "inputs of layers", "scalars", "few pairs turn")  # fmt: skip
_STATES = ("linear", "short", "state")
NOT_TOGETHER = [
    {"in parallel", "norms behind"}, {"in parallel", "norms on both sides"}, {"learned positions", "two rotations"},
    {"learned positions", "a part rotated"}, {"learned positions", "yarn"},
    {"learned positions", "some layers rotated"}, {"one norm for both", "norms behind"},
    {"one norm for both", "norms on both sides"}, {"one norm for both", "in parallel"},
    *map(set, itertools.combinations([name for name in OPTIONS if name.startswith(_STATES)], 2)),
    *({name, other} for name in ("shared keys", "keys of one layer") for other in (
        "windows of layers", "long windows", "two rotations", "some layers rotated", "global heads",
        "wide global heads", "keys as values", "learned positions",
        *(name for name in OPTIONS if name.startswith(_STATES)))),
    {"shared keys", "keys of one layer"},
    {"learned positions", "few pairs turn"}, {"learned positions", "global heads"},
    {"learned positions", "wide global heads"}, {"gates with limits", "inputs of layers"},
    {"norms over heads", "keys as values"}, {"many heads", "global heads"},
    *({"norms behind rotations", name} for name in ("keys as values", "shared keys", "keys of one layer")),
    *({"growing queries", name} for name in ("learned positions", "two rotations", "global heads", "wide global heads",
                                             "norms behind rotations")),
    {"in parallel", "inputs of layers"}, {"one norm for both", "inputs of layers"},
    {"experts", "experts by other numbers"}, {"experts by other numbers", "keys of one layer"},
    *({"shared keys", name} for name in OPTIONS if name.startswith("experts")),
]  # fmt: skip
FEW = [
    ("biases", "norms over heads", "norms behind"),
    ("norms of heads", "two rotations", "norms on both sides", "a scale", "embeddings scaled"),
    ("capped scores", "capped logits", "long windows", "norms on both sides", "wide heads"),
    ("in parallel", "a part rotated", "biases"),
    ("norms behind rotations", "windows of layers", "a part rotated"),
    ("growing queries", "norms of heads", "some layers rotated"),
    ("one norm for both", "some layers rotated", "a bias on the logits"),
    ("learned positions", "norms over heads", "capped scores", "windows of layers"),
    ("many heads", "capped scores", "windows of layers"),
    ("sinks", "long windows", "gates with limits", "biases"),
    ("linear attention, wide", "gates of heads", "biases", "norms of heads", "a part rotated"),
    ("short convolutions", "norms of heads", "a bias on the logits"),
    ("state spaces in groups", "norms of heads", "biases", "some layers rotated", "experts by other numbers"),
    ("experts by other numbers", "gates of heads", "some layers rotated", "norms on both sides"),
    GEMMA4,
    (*GEMMA4[1:3], "shared keys", *GEMMA4[4:]),
    ("wide global heads", "biases", "norms over heads", "inputs of layers"),
]
PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if set(pair) not in NOT_TOGETHER]
# Of the error, as a share of how far the logits lie apart; fp32 besides twice that of the plain model in fp32.
BOUNDS = {"fp32": 1e-6, "bf16": 0.1, "int8": 0.2}


def has_states(names: Sequence[str]) -> bool:
    """Whether a rounding may weigh more, by chance: it stays in a state, whose keys are brought to length 1."""
    return any(name.startswith("linear attention") for name in names)


def has_experts(names: Sequence[str]) -> bool:
    """Whether a rounding may choose other experts, which is another model."""
    return any(name.startswith("experts") for name in names)


class ModelCase:
    """A model in which every weight matters, for the engine and for the plain computation."""

    def __init__(self, names: Sequence[str]) -> None:
        options: dict[str, Any] = dict(BASE)
        for name in names:
            options |= OPTIONS[name]
        if options["positions"] == "learned":
            options.pop("rotary_base", None)
        model = drawn(GPT, **options)
        if options["activation"] == "clamped_swiglu":  # numbers beyond its limits
            for name, parameter in model.named_parameters():
                if name.endswith("linear1.weight"):
                    parameter.data.mul_(4)
        self.config = model.config
        self.weights = {name: weight.detach().double() for name, weight in weights_of(model).items()}
        self.options = pack_options(model, "fp32")
        self.tensors = pack_tensors(model, "fp32")

    def session(self, precision: str, cache_dtype: str | None = None) -> Any:
        return EXT.Session(EXT.PackedModel(self.options | {"precision": precision}, self.tensors), 1 << 18, cache_dtype)

    def plain(
        self,
        prompt: Sequence[int],
        new: Sequence[int],
        dtype: torch.dtype = torch.float64,
        cache_dtype: str | None = None,
    ) -> Tensor:
        """Returns the logits (len(new) + 1, vocab_size) of the prompt's last token and of the new ones."""
        weights = {name: weight.to(dtype) for name, weight in self.weights.items()}
        cached = (as_int8,) if cache_dtype else ()
        return plain_logits(self.config, weights, torch.tensor([*prompt, *new]), *cached)[len(prompt) - 1 :]


def as_int8(x: Tensor) -> Tensor:
    """Rounds keys or values (seqlen, heads, size) to whole multiples of 1/127 of the largest of a token and head."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round() * step


def logits_of(session: Any, prompts: Sequence[Sequence[int]], new: Sequence[Sequence[int]], threads: int = 1) -> Tensor:
    """Returns the engine's logits, (prompts, steps, vocab_size)."""
    session.admit([[]] * len(prompts), [list(prompt[:-1]) for prompt in prompts], threads)
    steps = []
    for tokens in zip(*([prompt[-1], *row] for prompt, row in zip(prompts, new, strict=True)), strict=True):
        logits = torch.empty(len(prompts), VOCAB)
        session.step(list(tokens), 1, False, list(range(len(prompts))), logits.numpy(), threads)
        steps.append(logits)
    return torch.stack(steps, 1)


def errors(logits: Tensor, due: Tensor) -> Tensor:
    """Returns the error of each prompt."""
    return (logits - due).square().mean((1, 2)).sqrt() / due.std((1, 2))


def max_error(logits: Tensor, due: Tensor) -> float:
    return errors(logits, due).max().item()


def ids(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(3, VOCAB) for _ in range(count)]


def assert_as_the_plain_model(names: Sequence[str], lengths: Sequence[int]) -> None:
    case, dice = ModelCase(names), random.Random(0)
    prompts, new = [ids(dice, n) for n in lengths], [ids(dice, 3) for _ in lengths]

    def plain(dtype: torch.dtype) -> Tensor:
        return torch.stack([case.plain(*pair, dtype=dtype) for pair in zip(prompts, new, strict=True)])

    due = plain(torch.float64)
    for precision, bound in BOUNDS.items():
        logits = logits_of(case.session(precision), prompts, new)
        error = max_error(logits, due)
        if precision == "fp32":
            bound += 2 * max_error(plain(torch.float32), due)
        elif error >= bound:  # as where scores are so large that their rounding to bf16 matters more than all else
            bound = max(bound, 2 * max_error(plain(torch.bfloat16), due))
        if precision == "fp32" or not has_experts(names):
            assert error < bound * (3 if has_states(names) else 1), precision
        # A row's bits depend on neither its neighbours nor the threads.
        for prompt, row, together in zip(prompts, new, logits, strict=True):
            assert torch.equal(logits_of(case.session(precision), [prompt], [row], threads=2)[0], together)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name) -> None:
    assert_as_the_plain_model([name], (1, 8, 41))


@pytest.mark.parametrize("names", [*FEW, ("linear attention", "windows of layers", "norms behind")], ids=" + ".join)
def test_options_together(names) -> None:
    assert_as_the_plain_model(names, (1, 23))


def assert_as_with_rounded_cache(names: Sequence[str], lengths: Sequence[int], seed: int = 0) -> None:
    """Checks a cache of int8 against attention, in fp64, to the keys and values that it stands for.

    Where a number of the cache lies between two whole ones, the last bit of a product decides which one it becomes, in
    the plain model in fp32 too. Most prompts of a few tokens have no such number, and long ones have some always. So a
    quarter of the short ones have to be as near as the plain model in fp32, and none may be further away than if all of
    its numbers were rounded anew. In bf16 and int8 half of those of a model with states may, and one of a model whose
    layers have inputs, which a norm behind a gate enlarges.
    """
    case, dice = ModelCase(names), random.Random(seed)
    short = [1, 2, 3, 4] * 3
    prompts = [ids(dice, n) for n in (*short, *lengths)]
    new = [ids(dice, 3) for _ in prompts]
    due, rounded, exact = (
        torch.stack([case.plain(*pair, dtype, cache) for pair in zip(prompts, new, strict=True)])
        for dtype, cache in ((torch.float64, "int8"), (torch.float32, "int8"), (torch.float64, None))
    )
    for precision, bound in BOUNDS.items():
        logits = logits_of(case.session(precision, "int8"), prompts, new)
        error = errors(logits, due)
        if precision == "fp32":
            near = error[: len(short)].sort().values[len(short) // 4 - 1]
            assert near < bound + 2 * errors(rounded, due)[: len(short)].median()
        beyond = (error - errors(exact, due)).sort().values
        outliers = 0 if precision == "fp32" else len(beyond) // 2 if has_states(names) else "inputs of layers" in names
        assert beyond[-1 - outliers] < bound, precision
        for prompt, row, together in zip(prompts, new, logits, strict=True):
            assert torch.equal(logits_of(case.session(precision, "int8"), [prompt], [row], threads=2)[0], together)


@pytest.mark.parametrize("names", [("llama",), *(few for few in FEW if not has_experts(few))], ids=" + ".join)
def test_a_cache_of_int8_is_attended_to_as_the_numbers_it_stands_for(names) -> None:
    assert_as_with_rounded_cache(names, (17, 30, 83))


@pytest.mark.slow
@pytest.mark.parametrize("names", [pair for pair in PAIRS if not has_experts(pair)], ids=" + ".join)
def test_a_cache_of_int8_with_each_pair_of_options(names) -> None:
    assert_as_with_rounded_cache(names, (40, 70, 530), len(names[0]))


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_each_pair_of_options(names) -> None:
    """Tests all pairs of options, also with prompts that are split into chunks."""
    assert_as_the_plain_model(names, (1, 7, 70, 530))


@pytest.mark.parametrize("precision", BOUNDS)
def test_states_continue_from_chunk_to_chunk(precision) -> None:
    """598 tokens are prefilled as 512 and 86, or divided elsewhere beside another prompt, or read one by one."""
    case, dice = ModelCase(["linear attention, grouped", "gates of heads"]), random.Random(1)
    prompt, new = ids(dice, 599), ids(dice, 2)
    logits = logits_of(case.session(precision), [prompt], [new])
    for before in (1, 2, 30, 77, 511):
        both = logits_of(case.session(precision), [ids(dice, before + 1), prompt], [ids(dice, 2), new], threads=2)
        assert torch.equal(both[1], logits[0]), before
    one_by_one, found = case.session(precision), torch.empty(1, VOCAB)
    one_by_one.admit([[]], [[]], 1)
    for token in prompt:
        one_by_one.step([token], 1, False, [0], found.numpy(), 1)
    due, rounded = (case.plain(prompt, new, dtype)[None] for dtype in (torch.float64, torch.float32))
    bound = BOUNDS[precision] + 2 * max_error(rounded, due)
    if precision != "int8":  # whose error varies from prompt to prompt
        assert max_error(logits, due) < bound
        assert max_error(found[None], due[:, :1]) < bound


def test_a_state_that_keeps_all_tokens_gives_none_back() -> None:
    case = ModelCase(["linear attention"])
    session = case.session("fp32")
    session.admit([[]], [[5, 6]], 1)
    session.step([7, 8], 1, False, [], None, 1, None, None, [2])
    with pytest.raises(ValueError, match="state"):
        session.cut([1])
    with pytest.raises(ValueError, match="state"):
        session.align(0, 0, [5, 6, 7, 8], [6, 7, 8, 9], VOCAB, [], 1)
    # No prompt begins with the blocks of another one, which have no state.
    long = [*range(3, 60)]
    assert session.known(long) == (0, 0) and session.admit([[]], [long], 1) == [0] == session.admit([[]], [long], 1)


def test_windows_and_caps_of_a_prompt_that_is_cut() -> None:
    """530 tokens are prefilled as 512 and 18, whose keys are in other slices than their queries."""
    case, dice = ModelCase(["capped scores", "long windows"]), random.Random(1)
    prompt, new = ids(dice, 531), ids(dice, 2)
    logits = logits_of(case.session("fp32"), [prompt], [new])
    due, rounded = (case.plain(prompt, new, dtype)[None] for dtype in (torch.float64, torch.float32))
    assert max_error(logits, due) < 1e-6 + 2 * max_error(rounded, due)


@pytest.mark.parametrize("shortlist", [[], [*range(5, 128, 3)]])
def test_choices_are_of_capped_logits(shortlist) -> None:
    """Capped are the best tokens, their log-probabilities, and the logits for processors."""
    case, dice = ModelCase(["capped logits"]), random.Random(2)
    prompt = ids(dice, 9)
    (due,) = case.plain(prompt, []).double()
    assert due.abs().max() < 1.2 and (due.abs() > 1.0).any()
    if shortlist:
        hidden = torch.ones(VOCAB, dtype=torch.bool)
        hidden[shortlist] = False
        due = due.masked_fill(hidden, float("-inf"))
    for log_probs in (False, True):
        session = case.session("fp32")
        if shortlist:
            session.set_shortlist(shortlist)
        session.admit([[]], [prompt[:-1]], 1)
        logits = torch.empty(1, VOCAB)
        best, values = session.step([prompt[-1]], 6, log_probs, [0], logits.numpy(), 1)
        expected = (due.log_softmax(0) if log_probs else due).topk(6)
        assert best[0].tolist() == expected.indices.tolist()
        torch.testing.assert_close(torch.from_numpy(values[0]).double(), expected.values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits[0].double(), due, atol=1e-5, rtol=1e-5)


def test_a_window_is_all_that_a_layer_reads() -> None:
    """Tokens out of reach of three layers with windows of five don't change any bit."""
    case, dice = ModelCase(["a window"]), random.Random(3)
    case.options["decoder_windows"] = [5, 5, 5]
    near, new = ids(dice, 16), ids(dice, 2)
    for precision in BOUNDS:
        for length in (24, 520):
            first, second = (logits_of(case.session(precision), [[*ids(dice, length), *near]], [new]) for _ in range(2))
            assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"decoder_windows": [1, 2]}, "window"),
        ({"head_dim": 0}, "heads"),
        ({"norm_placement": "middle"}, "norm_placement"),
        ({"norm_placement": "both", "parallel_residual": True}, "parallel"),
        ({"head_dim": 12}, "shape"),
    ],
)
def test_options_that_do_not_make_a_model_are_refused(wrong, what) -> None:
    case = ModelCase(["llama"])
    with pytest.raises(ValueError, match=rf"\b{what}\b"):
        EXT.PackedModel(case.options | wrong, case.tensors)
