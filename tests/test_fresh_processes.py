"""What a process does that has not imported fastformer: it loads pickled accelerated models and their configs, replaces
functions before it accelerates a model, trains and decodes on a GPU, for which a stand-in binds launches and computes
nothing, and does everything without the C++ extension.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fastformer
from fastformer.integrations.attention_interface import patch_attention, patched_attention
from fastformer.ops import record_backends
from tests.integrations import families as small
from tests.integrations.families import IDS, RIGHT, TARGETS
from tests.training.tiny import write_pairs

ROOT = Path(__file__).parents[1]
SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert": ("DistilBertModel", {"vocab_size": 60, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", SIZES | {"num_key_value_heads": 1}),
    "roberta": ("RobertaForMaskedLM", SIZES),
}
# A fresh process runs each program in a child of its own: what one import leaves behind, no other sees.
RUNS = """
import os, sys, torch, transformers
import torch._dynamo  # which fastformer's ops import
import transformers.modeling_utils
from transformers import GPT2LMHeadModel, LlamaForCausalLM, MarianMTModel, Qwen2ForCausalLM, T5ForConditionalGeneration
failed = []
for program in sys.argv[1:]:
    if pid := os.fork():
        failed += [program] if os.waitpid(pid, 0)[1] else []
        continue
    status = 1
    try:
        assert not any(name.partition(".")[0] == "fastformer" for name in sys.modules)
        exec(program, {})
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(status)
sys.exit(f"failed: {failed}" if failed else 0)
"""
LOADS = """
import torch, transformers
made, inputs, expected, told = torch.load(PATH, weights_only=False)
if isinstance(made, transformers.PretrainedConfig):
    name, weights = told
    model = getattr(transformers, name)(made).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0][0], expected[0])
else:
    from fastformer.ops import record_backends
    with torch.no_grad(), record_backends() as ran:
        torch.testing.assert_close(made(**inputs)[0], expected)
    assert sorted(name for name, _ in ran) == told, ran
"""
TORCHS_FUNCTIONS = """
import torch, fastformer
from torch import nn
from torch.nn import functional as F
calls = []

def counting(name, function):
    def wrapped(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)
    return wrapped

F.multi_head_attention_forward = counting("attention", F.multi_head_attention_forward)
nn.LayerNorm.forward = counting("norm", nn.LayerNorm.forward)
nn.Linear.forward = counting("linear", nn.Linear.forward)
F.relu = counting("relu", F.relu)
model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
x = torch.randn(2, 3, 8)
model(x)
expected = sorted(calls)
fastformer.accelerate(model)
calls.clear()
model(x)
assert sorted(calls) == expected and "attention" in expected, calls
"""
# Now and then with transformers' own names.
TRANSFORMERS_FORWARDS = """
import functools, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

calls = []
theirs = llama.LlamaAttention.forward

@functools.wraps(theirs)
def own(self, *args, **kwargs):
    calls.append(kwargs["attention_mask"] is not None)
    return theirs(self, *args, **kwargs)

class Norm(llama.LlamaRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)

llama.LlamaAttention.forward, llama.LlamaRMSNorm = own, Norm
torch.manual_seed(0)
sizes = dict(vocab_size=60, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
ids, mask = torch.randint(60, (2, 9)), torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
expected = model(ids, attention_mask=mask).logits * mask[..., None]

import fastformer
left = fastformer.report(fastformer.accelerate(model)).left
assert left["model.layers.0.self_attn"] == "LlamaAttention.forward was replaced", left
assert left["model.norm"] == "Norm.forward was replaced", left
calls.clear()
torch.testing.assert_close(model(ids, attention_mask=mask).logits * mask[..., None], expected, rtol=1e-4, atol=1e-5)
assert calls == [True, True], calls
"""
# NUMBER: that of a function that is replaced while the first model of the process is accelerated.
RESTORED = """
from pytest import MonkeyPatch
from tests.integrations import test_padding_changes as changes
with MonkeyPatch.context() as patch:
    changes.test_a_replaced_function_of_transformers_may_read_padding(*changes.PATCHES[NUMBER], patch)
"""
# WHAT: the loss that is replaced.
LOSSES = """
import functools
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MarianConfig, MarianMTModel
from transformers.models.marian import modeling_marian

old = torch.nn.functional.cross_entropy

@functools.wraps(old)
def own(*args, **kwargs):
    return 3 * old(*args, **kwargs)

if WHAT == "function":
    nn.functional.cross_entropy = own
elif WHAT == "class":
    modeling_marian.CrossEntropyLoss = functools.partial(nn.CrossEntropyLoss, label_smoothing=0.3)
sizes = dict(vocab_size=60, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3)
sizes |= dict(decoder_attention_heads=3, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=64)
sizes |= dict(pad_token_id=1, eos_token_id=2, bos_token_id=0, dropout=0.0, decoder_start_token_id=1)
marian = MarianMTModel(MarianConfig(**sizes)).train()
sizes = dict(vocab_size=60, n_embd=24, n_layer=1, n_head=3, eos_token_id=2, bos_token_id=0)
gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).train()
ids = torch.randint(3, 60, (2, 9))
expected = [model(input_ids=ids, labels=ids).loss for model in (marian, gpt2)]

import fastformer
for model, loss in zip((marian, gpt2), expected):
    fastformer.accelerate(model, fused_loss=True)
    found = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.loss, loss, rtol=1e-4, atol=1e-5)
    is_replaced = WHAT == "function" or (WHAT == "class" and model is marian)
    assert (found.logits is not None) == is_replaced, (WHAT, type(model))
"""
# On a GPU, a training step launches few kernels; a step of decoding divides the keys of a row among programs, whichever
# way a model comes to its attention, and `generate` captures such steps, whose best tokens are chosen without logits in
# memory; and plain attention of a geometry that comes
# often runs on the kernel that was measured to be the fastest, all other attention on fastformer's.
ON_A_GPU = """
import os
os.environ.pop("TRITON_INTERPRET", None)
from tests.training import launches
launches.check()

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastformer
from benchmarks.gpu import stand_in
from fastformer import doctor
from fastformer.graphs import Graphs
from fastformer.models import GPT
from fastformer.ops import _fastest, attention, record_backends, varlen_attention

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
assert all("decode" not in kernel for kernel, _ in found.pop("many rows"))  # they fill the GPU by themselves
assert len(found) == 5
captured, capture = [], Graphs.capture
Graphs.capture = lambda self, work: captured.append(stand_in.grids.clear()) or capture(self, work)
gpt = GPT.from_preset("tiny", vocab_size=50, d_model=512, d_ff=16, num_layers=1, num_heads=8, max_len=8192).eval()
for name, options in dict(greedy={}, sampling=dict(do_sample=True), beams=dict(num_beams=4)).items():
    found[name] = launched(lambda: fastformer.generate(gpt, ids, max_new_tokens=3, **options))
    assert captured, name
    captured.clear()
    rows, chosen = 4 if name == "beams" else 1, [grid for grid in stand_in.grids if "topk" in grid[0]]
    kernels = [("_linear_topk_kernel", (2, 1)), ("_merge_topk_kernel", (rows,))]  # a block has 32 ids
    assert chosen == ([] if name == "sampling" else kernels), (name, chosen)
found["accelerated"] = launched(lambda: model.generate(ids, max_new_tokens=2, do_sample=False))
assert captured
for way, launches in found.items():
    ((kernel, (programs,)),) = launches
    assert kernel == "_decode_attention_kernel", way
    assert programs >= 132, (way, programs)  # the number of SMs

q, few = torch.zeros(1, 512, 8, 64), torch.zeros(1, 512, 2, 64)
starts, calls = torch.tensor([0, 512], dtype=torch.int32), _fastest.SEEN + 2
often = [launched(lambda: attention(q, q, q, is_causal=True)) for _ in range(calls)]
ours = [("_attention_fwd_kernel", (32,))]
assert often == [ours] * _fastest.SEEN + [[], []]  # then cuDNN's
with record_backends() as named:
    attention(q, q, q, is_causal=True)
assert named == {("attention_fwd", "cudnn")} and any("cudnn" in line for line in doctor.kernels())
long = torch.zeros(1, 512 + 2 * calls, 8, 64)
for x in (long[:, :n] for n in range(513, long.shape[1])):  # ever new lengths
    assert [kernel for kernel, _ in launched(lambda: attention(x, x, x, is_causal=True))] == ["_attention_fwd_kernel"]
for way, call in {
    "dropout": lambda: attention(q, q, q, is_causal=True, dropout_p=0.1, dropout_seed=starts.long()),
    "window": lambda: attention(q, q, q, is_causal=True, window_size=(8, 0)),
    "cap": lambda: attention(q, q, q, is_causal=True, softcap=5.0),
    "groups": lambda: attention(q, few, few, is_causal=True),
    "packed": lambda: varlen_attention(q[0], q[0], q[0], starts, starts, 512, 512, is_causal=True),
}.items():
    assert [launched(call) for _ in range(calls)] == [ours] * calls, way
"""

# PATHS: of a run and of pairs. A user's steps without the C++ extension (an old CPU, or no compiler), where everything
# works, with one warning: its modules are not found, as if never built. Nor is what Python lacks on Windows, where the
# wheel without compiled code runs, too.
WITHOUT_EXTENSION = """
import importlib.util, os, sys
os.environ["FASTFORMER_STRICT"] = "0"
find = importlib.util.find_spec
LIBRARIES = ("fastformer._ops_", "fastformer._engine_", "fastformer._host_")
importlib.util.find_spec = lambda name, *rest: None if name.startswith(LIBRARIES) else find(name, *rest)

import io, torch
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "pread", "pwrite", "sysconf", "sched_getaffinity", "fchmod"):
    delattr(os, name)

import threading
import fastformer.generation
start, loaded = threading.Event(), []  # threads that use other names first don't meet in a cycle of imports
def use(name):
    start.wait()
    loaded.append(getattr(fastformer.generation, name))
threads = [threading.Thread(target=use, args=(name,)) for name in 3 * fastformer.generation.__all__]
for thread in threads: thread.start()
start.set()
for thread in threads: thread.join()
assert len(loaded) == len(threads)

from fastformer.cli import main
from fastformer.generation import generate
from fastformer.models import GPT

run, pairs = PATHS
sys.stdout, sys.stderr = out, err = io.StringIO(), io.StringIO()
assert main(["doctor"]) == 0
sizes = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
flags = ["--steps=2", "--val_examples=0", "--tokenizer=bytes", *(f"--model.{name}={n}" for name, n in sizes.items())]
assert main(["train", run, "--train_tsv", pairs, *flags]) == 0
assert main(["translate", run, "aa 1", "--max_new_tokens", "4", "--num_beams", "2"]) == 0
model = GPT.from_preset("tiny", vocab_size=40, d_model=16, num_layers=1, num_heads=2).eval()
assert generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=3).shape == (1, 6)
assert not any(name.startswith(LIBRARIES) for name in sys.modules)
assert not any("fastformer/_" in line for line in open("/proc/self/maps"))
said = err.getvalue()
assert said.count("no C++ extension for this CPU") == said.count("fastformer doctor") == 1, said
assert " runs on " not in said, said
assert any(line.split()[:2] == ["attention", "torch"] for line in out.getvalue().splitlines()), out.getvalue()
"""


def make(family: str) -> tuple[Any, dict[str, Any]]:
    """Makes a small model in evaluation mode, and the arguments of a call."""
    torch.manual_seed(0)
    if family == "torch":
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), {"src": torch.randn(3, 7, 16)}
    inputs = {"input_ids": IDS, "attention_mask": RIGHT.long()}
    if family in small.SEQ2SEQ:
        inputs["decoder_input_ids"] = TARGETS
    if family in small.FAMILIES:
        return small.make(family).float().eval(), inputs
    name, sizes = OTHERS[family]
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes)).eval(), inputs


def written(folder: Path, family: str, kind: str) -> Path:
    """Writes a file with an accelerated model or its config, a call, its result, and the expected result."""
    model, inputs = make(family)
    if kind == "led alone":
        patch_attention(model)
        assert patched_attention(model)
    else:
        fastformer.accelerate(model)
    with torch.no_grad(), record_backends() as ran:
        out = model(**inputs)[0]
    told: Any = (type(model).__name__, model.state_dict()) if kind == "config" else sorted(name for name, _ in ran)
    path = folder / f"{family}, {kind}.pt"
    torch.save((model.config if kind == "config" else model, inputs, out, told), path)
    return path


# What is found again by a class, a function, a module of torch and a config; the slow ones are each family.
FEW = [("t5", "accelerated"), ("torch", "accelerated"), ("qwen2", "led alone")]
FEW.append(("distilbert", "config"))
ALL = [
    *((family, "accelerated") for family in (*small.FAMILIES, *OTHERS, "torch")),
    ("qwen2", "led alone"),
    ("bert", "config"),
    FEW[-1],
]


EARLY = [TORCHS_FUNCTIONS, TRANSFORMERS_FORWARDS, LOSSES.replace("WHAT", "'function'")]
EARLY += [RESTORED.replace("NUMBER", "0"), *([ON_A_GPU] if importlib.util.find_spec("triton") else [])]
ALL_EARLY = [
    *EARLY,
    *(RESTORED.replace("NUMBER", str(i)) for i in (2, 3)),
    *(LOSSES.replace("WHAT", repr(what)) for what in ("class", "nothing")),
]


@pytest.mark.parametrize(
    ("kinds", "early"), [(FEW, EARLY), pytest.param(ALL, ALL_EARLY, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_a_fresh_process_loads_files_and_accelerates_what_was_replaced(kinds, early, tmp_path):
    files = [written(tmp_path, *each) for each in kinds]
    programs = [*(LOADS.replace("PATH", repr(str(file))) for file in files), *early]
    paths = str(tmp_path / "run"), write_pairs(tmp_path / "train.tsv")
    programs.append(WITHOUT_EXTENSION.replace("PATHS", repr(paths)))
    done = subprocess.run([sys.executable, "-c", RUNS, *programs], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_config_does_not_mention_fastformer(tmp_path):
    model, _ = make("bert")
    before = copy.deepcopy(model.config)
    fastformer.accelerate(model)
    for config in (model.config, copy.copy(model.config), pickle.loads(pickle.dumps(model.config))):
        assert config._attn_implementation == "sdpa" and config.to_dict() == before.to_dict()
    model.config.save_pretrained(tmp_path)
    assert "fastformer" not in (tmp_path / "config.json").read_text()
