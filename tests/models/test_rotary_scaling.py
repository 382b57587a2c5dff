"""Compares the frequencies of scaled rotary positions with transformers'; unsupported types are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
from typing import Any

import pytest
import torch

from fastformer.models import GPT, GPTConfig
from fastformer.models.pretrained import config_from_dict
from fastformer.models.rotary_scaling import RotaryScaling, plain_speeds
from fastformer.nn import RotaryEmbedding
from tests.covering import each

LENGTH = "original_max_position_embeddings"


def drawn(kind: str, draw: random.Random, rotary_dim: int) -> dict[str, Any]:
    """Draws parameters of one kind."""
    factor, length = draw.choice([1.0, 1.5, 2.0, 8.0, 32.0]), draw.choice([64, 1000, 8192])
    if kind == "linear":
        return {"factor": factor}
    if kind == "llama3":
        low = draw.uniform(0.5, 2)
        return {
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": low * draw.uniform(1.5, 8),
            LENGTH: length,
        }
    if kind == "longrope":
        factors = {n: [draw.uniform(1, 9) for _ in range(rotary_dim // 2)] for n in ("short_factor", "long_factor")}
        extra = draw.choice([{"factor": factor}, {"attention_factor": 1.3}])
        return {**factors, **extra, LENGTH: length}
    values: dict[str, Any] = {"factor": factor, LENGTH: length}
    if kind == "yarn":
        for name, choices in (
            ("attention_factor", [0.7, 1.2]), ("beta_fast", [16.0, 40.0]), ("beta_slow", [0.5, 2.0]),
            ("truncate", [True, False]),
        ):  # fmt: skip
            if draw.random() < 0.4:
                values[name] = draw.choice(choices)
        if draw.random() < 0.4:
            values |= {"mscale": draw.choice([0.707, 1.0]), "mscale_all_dim": draw.choice([0.5, 1.0, 0.0])}
    return values


def of_transformers(
    kind: str, values: dict[str, Any], head_dim: int, fraction: float, base: float
) -> tuple[torch.Tensor, float]:
    """Returns transformers' frequencies, in fp32, and its factor for cosines and sines."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = values.get(LENGTH, 2048)
    settings: dict[str, Any] = {
        "hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim,
        "max_position_embeddings": length, LENGTH: length,
    }  # fmt: skip
    scaling = {"rope_type": kind, **values, "partial_rotary_factor": fraction, "rope_theta": base}
    if kind == "dynamic":
        del scaling[LENGTH]
    config = LlamaConfig(**settings, rope_parameters=scaling)
    speeds, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return speeds, scale


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope"])
def test_speeds_are_those_of_transformers(kind):
    draw = random.Random(kind)
    for _ in range(25):
        head_dim, fraction = draw.choice([8, 64, 96]), draw.choice([1.0, 0.5])
        rotary_dim, base = int(head_dim * fraction), draw.choice([500.0, 10000.0, 500000.0])
        values = drawn(kind, draw, rotary_dim)
        expected, scale = of_transformers(kind, values, head_dim, fraction, base)
        ours = RotaryScaling({"kind": kind, **values}).speeds(rotary_dim, base)
        # Theirs are rounded at each step; the base's logarithm multiplies that of the power.
        torch.testing.assert_close(ours.speeds, expected.double(), rtol=4e-6, atol=0, msg=str(values))
        assert ours.scale == pytest.approx(scale, rel=1e-12)


def test_tables_are_made_from_speeds_and_scale():
    speeds = torch.tensor([0.5, 0.01], dtype=torch.float64)
    rotary = RotaryEmbedding(4, 100, speeds=speeds, scale=1.25)
    angle = torch.arange(100)[:, None] * speeds
    assert torch.equal(rotary.cos, (1.25 * angle.cos()).float()) and torch.equal(
        rotary.sin, (1.25 * angle.sin()).float()
    )
    plain = RotaryEmbedding(8, 50, 300.0)
    assert torch.equal(plain.cos, RotaryEmbedding(8, 50, speeds=plain_speeds(8, 300.0)).cos)
    with pytest.raises(ValueError, match=r"\bspeeds\b"):
        RotaryEmbedding(8, 50, speeds=speeds)


def test_a_scaled_config_is_saved_and_copied(tmp_path):
    scaling = {"kind": "longrope", "factor": 4, "short_factor": [1, 2.5], "long_factor": [3, 4], LENGTH: 16}
    config = GPTConfig(
        9, d_model=8, num_heads=2, num_layers=1, positions="rotary", max_len=16, rotary_scaling=scaling,
        window_size=3, window_layers=[True],
    )  # fmt: skip
    for other in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        dataclasses.replace(config),
        config_from_dict(GPTConfig, json.loads(json.dumps(dataclasses.asdict(config)))),
    ):
        assert other == config and hash(other.rotary_scaling) == hash(config.rotary_scaling)
    model = GPT(config).eval()
    model.save_pretrained(tmp_path)
    loaded = GPT.from_pretrained(tmp_path)
    tokens = torch.randint(0, 9, (2, 16))
    assert loaded.config == config and torch.equal(loaded(tokens), model(tokens))
    with pytest.raises(TypeError):
        config.rotary_scaling["factor"] = 2.0


HUGE = 10**400  # JSON may hold it, and a float may not
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kind": "lama3"}, "llama3"),
    ({"kind": None}, "kind"),
    ({"factor": 2}, "kind"),
    ({"kind": "linear"}, "factor"),
    ({"kind": "linear", "factor": 0}, "factor"),
    ({"kind": "linear", "factor": "2"}, "factor"),
    ({"kind": "linear", "factor": float("nan")}, "factor"),
    ({"kind": "linear", "factor": 2, "facter": 3}, "facter"),
    ({"kind": "dynamic", "factor": 2}, LENGTH),
    ({"kind": "dynamic", "factor": 2, LENGTH: 100}, "max_len"),
    ({"kind": "yarn", "factor": 2, LENGTH: True}, LENGTH),
    ({"kind": "yarn", "factor": 2, LENGTH: 9, "truncate": 1}, "truncate"),
    ({"kind": "llama3", "factor": 2, LENGTH: 9, "low_freq_factor": 4, "high_freq_factor": 1}, "low_freq_factor"),
    ({"kind": "longrope", "short_factor": [1], "long_factor": [1], LENGTH: 2000}, "attention_factor"),
    ({"kind": "longrope", "short_factor": [1], "long_factor": [1], LENGTH: 2000, "factor": 1}, "short_factor"),
    ({"kind": "longrope", "short_factor": 1, "long_factor": [1], LENGTH: 2000, "factor": 1}, "short_factor"),
    ({"kind": "longrope", "short_factor": [1] * 4, "long_factor": [1] * 4, LENGTH: 99, "factor": 1}, "max_len"),
    ({"kind": "linear", "factor": HUGE}, "factor"),
    ({"kind": "yarn", "factor": 2, LENGTH: HUGE}, LENGTH),
    ({"kind": "longrope", "short_factor": [HUGE], "long_factor": [1], LENGTH: 2000, "factor": 1}, "short_factor"),
]


@each("scaling, named", WRONG)
def test_impossible_scalings(scaling, named):
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        GPTConfig(9, d_model=32, num_heads=4, positions="rotary", rotary_scaling=scaling)


def test_yarn_refuses_indistinguishable_pairs():
    """yarn finds the pairs by the logarithm of the base, and would divide by it."""
    sizes: dict[str, Any] = {"d_model": 32, "num_heads": 4, "positions": "rotary", "rotary_base": 1.0}
    with pytest.raises(ValueError, match=r"\brotary_base\b"):
        GPTConfig(9, **sizes, rotary_scaling={"kind": "yarn", "factor": 4, LENGTH: 16})
    assert GPT(GPTConfig(9, **sizes, num_layers=1, rotary_scaling={"kind": "linear", "factor": 4})).rotary is not None
