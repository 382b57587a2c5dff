"""Reports this machine's hardware, engines and the backend of each op, with reasons, for `fastformer doctor`."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fastformer.ops  # noqa: F401  (defines them)
from fastformer import extension
from fastformer.kernels import _host
from fastformer.ops import _backends, _dispatch, _extension, _fastest

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "safetensors",
    "sacrebleu",
    "jsonargparse",
    "docstring-parser",
    "tqdm",
    "matplotlib",
    "transformers",
    "av",
    "silero-vad",
    "onnxruntime",
)
# The numbers in the matrices of 12 layers of 768, with feed-forward networks of 3,072.
_BERT_BASE = 12 * (4 * 768 * 768 + 2 * 768 * 3072)


def versions() -> Iterator[str]:
    """Yields a line for Python and one for each relevant package."""
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package} is not installed"


def machine() -> Iterator[str]:
    """Yields lines about the CPU, the C++ extension and the GPUs."""
    yield f"CPU capability {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    isa = _extension.load()
    if isa is not None:
        yield f"C++ extension: {isa}"
    elif extension.failures:
        for name, failure in extension.failures.items():
            yield f"C++ extension: {name} does not load ({failure}); {extension.INSTALL_AGAIN}"
    elif (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        here = f"{platform.system()} on {platform.machine()}"
        yield f"C++ extension: none, because it needs Linux on x86-64 and this machine has {here}"
    else:
        yield f"C++ extension: not built; to build it, install a C++ compiler and {extension.INSTALL_AGAIN}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            arch = f"sm_{properties.major}{properties.minor}"
            yield f"GPU {index}: {properties.name}, {arch}, {properties.total_memory >> 30} GiB"
    else:
        yield "GPU: none that this PyTorch can use"


def forward_ops() -> list[_dispatch.Op[..., Any]]:
    """Returns the ops that a user calls; their backward passes have kernels in the same files."""
    others = ("linear_weight_grad", "quantized_linear", "quantized_topk")
    return [op for name, op in _dispatch.OPS.items() if "_bwd" not in name and name not in others]


def choice(op: _dispatch.Op[..., Any], device_type: str) -> tuple[str, str]:
    """Returns the backend of an op, as far as it is known without the arguments of a call.

    Args:
        op: one of `forward_ops`.
        device_type: "cpu" or "cuda".

    Returns:
        The backend ("triton", "cpp", "torch" or "reference"), and the file of its kernel, or why there is none.
    """
    backend, file = ("triton", f"kernels/{op.stem}.py") if device_type == "cuda" else ("cpp", f"csrc/ops/{op.stem}.cpp")
    if op.torch_is_faster is not None and (why := op.torch_is_faster(device_type)) is not None:
        return "torch", why
    if backend in op.reference_only:
        return "reference", op.reference_only[backend]
    missing = op.missing_kernel(backend)
    if missing is None:
        return backend, file
    return "torch" if device_type == "cpu" and op.torch_function is not None else "reference", missing


def decoding() -> Iterator[str]:
    """Yields lines about the engines that decode fastest."""
    yield from _decoding_in_cpp()
    graph = "engine 'graph' runs a whole decoding step, including the search, as one CUDA graph"
    if not torch.cuda.is_available():
        yield f"{graph}; without a GPU, it runs the same step as separate calls"
    elif _extension.module() is None:
        yield f"{graph}; without the C++ extension, it decodes like 'kv_cache'"
    else:
        yield f"{graph}: the default on a GPU; its speed there has not been measured yet"


def _decoding_in_cpp() -> Iterator[str]:
    missing = _extension.why_missing("Session")
    if missing is not None:
        yield f"engine 'cpp' is not available: {missing}"
        yield "models decode with their own modules and dtype (engine 'kv_cache')"
        return
    features: Callable[[], list[str]] = getattr(_extension.module(), "cpu_features", list)
    isa = getattr(_extension.module(), "instruction_set", "any CPU")
    yield f"engine 'cpp' computes in fp32, bf16, int8 or int4, with {', '.join([isa, *features()])}"
    yield "it decodes an unmodified Transformer or GPT that is on the CPU, in evaluation mode and without hooks;"
    yield "for any other model, generate(model, ..., engine='cpp') raises an error with the reason"


def encoding() -> Iterator[str]:
    """Yields lines about the C++ encoder."""
    missing = _extension.why_missing("Encoder")
    if missing is not None:
        yield f"the C++ encoder is not available ({missing}); encoders run their own modules, in their own dtype"
        return
    yield "one C++ call computes all layers in fp32, bf16, int8 or int4, on the CPU, in evaluation, without gradients:"
    yield "for Encoder and CrossEncoder, and for transformers' encoders after accelerate(model)"
    yield "fastformer.report(model) says whether a model's encoder runs in C++, and why not"
    sizes = ", ".join(
        f"{_BERT_BASE * bytes_per_weight / 1e6:.0f} MB in {name}"
        for name, bytes_per_weight in _extension.PACKED_BYTES.items()
    )
    yield f"it keeps a packed copy of the weights; for BERT-base, that is {sizes}"
    yield "fastformer.report(model) gives the size for a model; accelerate(model, encode=False) makes no copy"


def kernels() -> Iterator[str]:
    """Yields lines about the origin of kernels for the current GPU, and about those that compute attention."""
    capability = _host.capability_of(torch.cuda.current_device())
    yield from _fastest.report(capability)
    binaries: Any = _backends.triton_kernel("_binaries")
    if binaries is not None:
        yield binaries.describe(capability)


def report() -> str:
    """Returns the whole report as text."""
    device_types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    lines = ["versions", *(f"  {line}" for line in versions()), "", "machine", *(f"  {line}" for line in machine())]
    lines += ["", "decoding", *(f"  {line}" for line in decoding())]
    lines += ["", "encoding", *(f"  {line}" for line in encoding())]
    for device_type in device_types:
        lines += ["", f"backends on {device_type}"]
        for op in forward_ops():
            backend, why = choice(op, device_type)
            lines.append(f"  {op.name.removesuffix('_fwd'):<22} {backend:<10} {why}")
    if torch.cuda.is_available():
        lines += ["", "which kernels on cuda", *(f"  {line}" for line in kernels())]
    lines += ["", "A call that a kernel does not support runs on PyTorch's own kernel (torch) or on the reference, and"]
    lines += ["the reason is logged once. With FASTFORMER_STRICT=1, it is an error."]
    return "\n".join(lines)
