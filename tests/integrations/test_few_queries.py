"""On a GPU, a step of decoding divides the keys of a row among programs, whichever way a model comes to its attention.

A stand-in for the GPU, in a process of its own, binds launches and computes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.measure.record import ROOT

pytest.importorskip("triton")
pytest.importorskip("transformers")

SCRIPT = """
import json
from benchmarks.gpu import stand_in
stand_in.stand_in()

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastformer

def launched(call):
    stand_in.grids.clear()
    with torch.no_grad():
        call()
    return [grid for grid in stand_in.grids if "attention" in grid[0]]

torch.set_default_dtype(torch.bfloat16)
sizes = dict(hidden_size=512, intermediate_size=16, num_attention_heads=8, num_key_value_heads=8, vocab_size=50)
config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=8192, **sizes)
model = fastformer.accelerate(LlamaForCausalLM(config).eval())
ids, padded = torch.ones(1, 4096, dtype=torch.long), torch.ones(1, 4098, dtype=torch.long)
padded[:, 0] = 0
with torch.no_grad():
    cache = model(ids, use_cache=True).past_key_values
x = torch.zeros(1, 4096, 512)
heads = x.view(1, 4096, 8, 64).transpose(1, 2)
theirs, ours = (module.MultiheadAttention(512, 8, batch_first=True) for module in (torch.nn, fastformer.nn))
found = {
    "step": launched(lambda: model(ids[:, :1], past_key_values=cache)),
    "padded step": launched(lambda: model(ids[:, :1], past_key_values=cache, attention_mask=padded)),
    "nn": launched(lambda: ours(x[:, :1], x, x, need_weights=False)),
}
with fastformer.activate():
    function = torch.nn.functional.scaled_dot_product_attention
    found["activate"] = launched(lambda: function(heads[:, :, :1], heads, heads))
    found["torch.nn"] = launched(lambda: theirs(x[:, :1], x, x, need_weights=False))
    many = torch.zeros(64, 16, 512, 64)
    found["many rows"] = launched(lambda: function(many[:, :, :32], many, many))
print(json.dumps(found))
"""


def test_a_query_of_4096_keys_fills_the_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    proc = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert proc.returncode == 0, proc.stderr[-2000:]
    found = json.loads(proc.stdout.splitlines()[-1])
    assert all("decode" not in kernel for kernel, _ in found.pop("many rows"))  # they fill the GPU by themselves
    assert len(found) == 5
    for way, launches in found.items():
        ((kernel, (programs,)),) = launches
        assert kernel == "_decode_attention_kernel", way
        assert programs >= 132, way  # the number of SMs
