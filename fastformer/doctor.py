"""What this machine has, and which backend each op gets here, and why. `fastformer doctor` prints it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator

import torch

from fastformer.ops import _extension, _library

# (op, stem of its kernel file); decode_attention has no backward and is its own schema.
OPS = (
    ("attention_fwd", "attention"),
    ("varlen_attention_fwd", "attention"),
    ("attention_weights_fwd", "attention_weights"),
    ("decode_attention", "decode_attention"),
    ("add_layer_norm_fwd", "add_layer_norm"),
    ("feed_forward_fwd", "feed_forward"),
    ("linear_cross_entropy_fwd", "linear_cross_entropy"),
    ("embedding_fwd", "embedding"),
    ("rotary_fwd", "rotary"),
)
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "safetensors",
    "sacrebleu",
    "jsonargparse",
    "matplotlib",
    "transformers",
)


def versions() -> Iterator[str]:
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package} is not installed"


def machine() -> Iterator[str]:
    yield f"CPU capability {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    isa = _extension.load()
    if isa is not None:
        yield f"C++ extension: {isa}"
    elif platform.machine() not in ("x86_64", "AMD64"):
        yield f"C++ extension: none; it is written for x86-64 and this is {platform.machine()}"
    else:
        yield "C++ extension: not built; install a C++ compiler and run `pip install -e . --no-build-isolation`"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            arch = f"sm_{properties.major}{properties.minor}"
            yield f"GPU {index}: {properties.name}, {arch}, {properties.total_memory >> 30} GiB"
    else:
        yield "GPU: none that this PyTorch can use"


def choice(op_name: str, stem: str, device_type: str) -> tuple[str, str]:
    """(backend, why) for an op on "cpu" or "cuda", before its arguments are known."""
    if device_type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "reference", "triton is not installed"
        kernel = _library.triton_kernel(stem)
        if kernel is None or not hasattr(kernel, op_name):
            return "reference", "there is no Triton kernel for it yet"
        return "triton", f"kernels/{stem}.py"
    if _extension.load() is None:
        return "reference", "the C++ extension is not there"
    if _extension.function(op_name) is None:
        return "reference", "there is no C++ function for it yet"
    return "cpp", f"csrc/{stem}.cpp"


def report() -> str:
    """The whole report as text."""
    device_types = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    lines = ["versions", *(f"  {line}" for line in versions()), "", "machine", *(f"  {line}" for line in machine())]
    for device_type in device_types:
        lines += ["", f"backends on {device_type}"]
        for op_name, stem in OPS:
            backend, why = choice(op_name, stem, device_type)
            lines.append(f"  {op_name.removesuffix('_fwd'):<22} {backend:<10} {why}")
    lines += ["", "A call that a kernel can't take runs on the reference and is logged once with the kernel's reason;"]
    lines += ["FASTFORMER_STRICT=1 makes that an error."]
    return "\n".join(lines)
