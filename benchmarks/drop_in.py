"""Models that somebody else wrote, as they are and accelerated: torch.nn, transformers' BERT, GPT-2 and Marian.

    python -m benchmarks.drop_in [--case bert_base ...] [--dtype fp32 bf16] [--rounds 7] [--quick] [--out FILE]

Each case has one model with random weights and one batch. The model as it is, a copy after `fastformer.accelerate`, and
what else is installed (torch.compile with `--compile`, OpenVINO where it is importable) run round by round in turn;
printed are medians and how many times faster than the model as it is. Before anything is timed, what comes out at real
tokens, or the loss, has to agree. Lengths are drawn once: batches "of mixed length" hold padding, as said.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastformer
from benchmarks import record
from benchmarks.timing import Timing, keep_freed_memory, time_interleaved

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Largest difference at real tokens, as a share of the largest value: twice what rounding explains.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass
class Job:
    """What is done with a model.

    Attributes:
        model: as somebody wrote it.
        step: (model) -> what has to agree: outputs at real tokens, or the loss of a training step.
        inputs: the batch, for those who run another form of the model, or nothing; None where it learns.
        padding: the share of the batch's tokens that are padding.
    """

    model: nn.Module
    step: Callable[[Any], Tensor]
    inputs: tuple[Tensor, ...] | None
    padding: float


def lengths_of(batch: int, low: int, high: int) -> Tensor:
    """Lengths from low to high, the same ones each time; the first is high."""
    lengths = torch.randint(low, high + 1, (batch,), generator=torch.Generator().manual_seed(1))
    lengths[0] = high
    return lengths


def forward(model: nn.Module, call: Callable[[Any], Tensor], keep: Tensor, inputs: tuple[Tensor, ...]) -> Job:
    """Inference."""

    def step(model: Any) -> Tensor:
        with torch.inference_mode():
            return call(model)[keep]

    return Job(model.eval(), step, inputs, 1 - float(keep.float().mean()))


def training(model: nn.Module, loss_of: Callable[[Any], Tensor], keep: Tensor) -> Job:
    """Forward, backward; gradients are dropped afterwards, so that each step is alike."""

    def step(model: Any) -> Tensor:
        torch.manual_seed(0)
        loss = loss_of(model)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return Job(model.train(), step, None, 1 - float(keep.float().mean()))


def encoder(dtype: torch.dtype, seqlen: int, half: bool, learns: bool) -> Job:
    """torch.nn.TransformerEncoder, 6 layers, d 512, a batch of 8."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.1 if learns else 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6).to(dtype)
    x = torch.randn(8, seqlen, 512, generator=torch.Generator().manual_seed(2)).to(dtype)
    lengths = torch.full((8,), seqlen)
    if half:
        lengths = torch.linspace(1, seqlen, 8).long()
    keep = torch.arange(seqlen) < lengths[:, None]
    padding = ~keep if half else None
    if learns:
        # Not the mean square of it all, which a norm makes the same whatever went before.
        return training(
            model, lambda m: m(x, src_key_padding_mask=padding)[keep][:, :128].float().sum(1).square().mean(), keep
        )
    return forward(model, lambda m: m(x, src_key_padding_mask=padding), keep, ())


def bert_base(dtype: torch.dtype, low: int, high: int) -> Job:
    """BERT-base, a batch of 8."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(attn_implementation="sdpa"), add_pooling_layer=False).to(dtype)
    keep = torch.arange(high) < lengths_of(8, low, high)[:, None]
    ids = torch.randint(5, 30000, (8, high), generator=torch.Generator().manual_seed(2))
    mask = keep.long()
    return forward(model, lambda m: m(ids, attention_mask=mask).last_hidden_state, keep, (ids, mask))


def gpt2_small(dtype: torch.dtype, low: int, high: int) -> Job:
    """A training step of GPT-2's small shape with its dropout, a batch of 4."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa")).to(dtype)
    keep = torch.arange(high) < lengths_of(4, low, high)[:, None]
    ids = torch.randint(5, 50000, (4, high), generator=torch.Generator().manual_seed(2))
    labels, mask = ids.masked_fill(~keep, -100), keep.long()
    return training(model, lambda m: m(ids, attention_mask=mask, labels=labels).loss, keep)


def marian_base(dtype: torch.dtype, low: int, high: int) -> Job:
    """A training step of Marian's base shape (6 + 6 layers, d 512, vocabulary 32,000) with dropout, a batch of 16."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=32000, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, dropout=0.1, pad_token_id=1,
        decoder_start_token_id=1, attn_implementation="sdpa",
    )  # fmt: skip
    model = MarianMTModel(config).to(dtype)
    keep = torch.arange(high) < lengths_of(16, low, high)[:, None]
    ids = torch.randint(5, 32000, (16, high), generator=torch.Generator().manual_seed(2)).masked_fill(~keep, 1)
    labels, mask = ids.masked_fill(~keep, -100), keep.long()
    return training(model, lambda m: m(ids, attention_mask=mask, decoder_attention_mask=mask, labels=labels).loss, keep)


# name -> (what it is called, how it is made, its arguments) in turn; the first of each is the quick one.
CASES: dict[str, list[tuple[dict[str, Any], Callable[[torch.dtype], Job]]]] = {
    "encoder": [
        (
            {"seqlen": seqlen, "padding": "half" if half else "none", "mode": "training" if learns else "eval"},
            lambda dtype, seqlen=seqlen, half=half, learns=learns: encoder(dtype, seqlen, half, learns),  # type: ignore[misc]
        )
        for seqlen in (128, 512)
        for half in (False, True)
        for learns in (False, True)
    ],
    "bert_base": [
        ({"seqlen": "32 to 128"}, lambda dtype: bert_base(dtype, 32, 128)),
        ({"seqlen": "512"}, lambda dtype: bert_base(dtype, 512, 512)),
    ],
    "gpt2_small": [
        ({"seqlen": "256", "mode": "training"}, lambda dtype: gpt2_small(dtype, 256, 256)),
        ({"seqlen": "16 to 256", "mode": "training"}, lambda dtype: gpt2_small(dtype, 16, 256)),
    ],
    "marian_base": [
        ({"seqlen": "8 to 64", "mode": "training"}, lambda dtype: marian_base(dtype, 8, 64)),
    ],
}


def providers(job: Job, *, compiled: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """What is compared, the model as it is first."""
    yield "as it is", lambda: job.step(job.model)
    ours = copy.deepcopy(job.model)
    fastformer.accelerate(ours)
    yield "accelerated", lambda: job.step(ours)
    if compiled:
        torch._dynamo.reset()
        theirs = torch.compile(copy.deepcopy(job.model))
        yield "torch.compile", lambda: job.step(theirs)
    if job.inputs and importlib.util.find_spec("openvino") is not None:
        yield "openvino", _openvino(job)


class _FirstOutput(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        """The tensor that the model's forward gives first."""
        return self.model(*inputs)[0]


def _openvino(job: Job) -> Callable[[], Tensor]:
    import openvino

    assert job.inputs is not None
    dtype = next(job.model.parameters()).dtype
    plain = _FirstOutput(copy.deepcopy(job.model).float()).eval()
    converted = openvino.convert_model(plain, example_input=job.inputs)
    precision = openvino.Type.bf16 if dtype == torch.bfloat16 else openvino.Type.f32
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": precision}
    compiled = openvino.Core().compile_model(converted, "CPU", {**settings, "PERFORMANCE_HINT": "LATENCY"})
    inputs = [each.numpy() for each in job.inputs]
    keep = job.inputs[-1].bool()
    return lambda: torch.from_numpy(compiled(inputs)[0])[keep].to(dtype)


def run_case(job: Job, dtype: torch.dtype, rounds: int, *, compiled: bool) -> Mapping[str, Timing]:
    """Checks, then times.

    Raises:
        ValueError: ours gives something else than the model as it is.
    """
    functions = dict(providers(job, compiled=compiled))
    expected = functions["as it is"]().float()
    for name in list(functions):
        error = float((functions[name]().float() - expected).abs().max() / expected.abs().max())
        drops = job.inputs is None and any(isinstance(m, nn.Dropout) and m.p for m in job.model.modules())
        if not error <= (0.2 if drops else _TOLERANCE[dtype]):  # other masks are drawn
            if name == "accelerated":
                raise ValueError(f"{name} gives something else: a relative error of {error:.2g}")
            print(f"  {name} gives something else (a relative error of {error:.2g}), and is left out", flush=True)
            del functions[name]
    return time_interleaved(functions, rounds=rounds, device="cpu", seconds=120.0)


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each provider of each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drop_in", description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES, help="some of the cases")
    parser.add_argument("--dtype", nargs="+", default=["fp32"], choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    parser.add_argument("--quick", action="store_true", help="the first form of each case alone")
    parser.add_argument("--compile", action="store_true", help="torch.compile beside, which takes minutes")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    shared = record.environment("cpu")
    print(f"{shared['device']}, {shared['threads']} threads, commit {shared['commit']}")
    for name in options.case:
        for shape, make in CASES[name][: 1 if options.quick else None]:
            for dtype in options.dtype:
                torch.manual_seed(0)
                job = make(DTYPES[dtype])
                title = " ".join(f"{key}={value}" for key, value in shape.items())
                print(f"{name} {title} {dtype}, {100 * job.padding:.0f} % padding", flush=True)
                timings = run_case(job, DTYPES[dtype], options.rounds, compiled=options.compile)
                for provider, timing in timings.items():
                    faster = timings["as it is"].p50 / timing.p50
                    print(f"  {provider:14} {timing.p50 * 1e3:9.1f} ms  {faster:5.2f} x", flush=True)
                    row = {
                        "op": "drop_in", "model": name, "shape": shape, "dtype": dtype, "provider": provider,
                        "ms_p50": round(timing.p50 * 1e3, 3), "ms_p20": round(timing.p20 * 1e3, 3),
                        "ms_p80": round(timing.p80 * 1e3, 3), "speedup": round(faster, 3),
                        "padding": round(job.padding, 3),
                    }  # fmt: skip
                    if options.out is not None:
                        record.append(options.out, row | shared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
