"""ONNX Runtime on a forward pass, exported by torch.onnx, with all graph optimisations."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.job import needed
from benchmarks.peers.models import Workload
from benchmarks.peers.pytorch import Runtime


class FirstOutput(nn.Module):
    """A model of transformers as a function from tensors to one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns the first tensor of the model's output."""
        output: Tensor = self.model(input_ids, attention_mask=attention_mask)[0]
        return output


def exported(work: Workload, folder: Path) -> Path:
    """Returns the file of the model of a workload, exported by torch.onnx, for any shape if there are several."""
    shapes = None
    if work.orders:
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen", max=512)}
        shapes = {"input_ids": sizes, "attention_mask": sizes}
    file = folder / "model.onnx"
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            FirstOutput(copy.deepcopy(work.model)).eval(), work.inputs, file, dynamo=True, verbose=False,
            input_names=["input_ids", "attention_mask"], output_names=["hidden"], dynamic_shapes=shapes,
        )  # fmt: skip
    return file


class OnnxRuntime(Runtime):
    """The CPU provider of ONNX Runtime. With int8, quantize_dynamic rounds weights, and rows at run time."""

    name = "onnxruntime"
    precisions = ("int8", "fp32")  # the CPU kernels have no bf16

    def prepare(self, work: Workload) -> Any:
        install = "onnxruntime onnx onnxscript"
        onnxruntime, quantization = needed("onnxruntime", install), needed("onnxruntime.quantization", install)
        needed("onnxscript", install)  # for torch.onnx
        onnxruntime.set_default_logger_severity(3)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = self.threads, 1
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        with tempfile.TemporaryDirectory(prefix="fastformer-onnx-") as folder:
            file = exported(work, Path(folder))
            if self.precision == "int8":
                rounded = file.with_name("int8.onnx")
                quantization.quantize_dynamic(file, rounded, weight_type=quantization.QuantType.QInt8)
                file = rounded
            return onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])

    def run(self, work: Workload, prepared: Any) -> Tensor:
        return work.through(lambda ids, mask: self.states(prepared, ids, mask))

    def states(self, prepared: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the states of ids, (batch, seqlen, d_model)."""
        (output,) = prepared.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        return torch.from_numpy(output)
