"""OpenVINO on a forward pass, converted from the PyTorch model for its shape, or for any shape if it has several."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.job import needed
from benchmarks.peers.models import Workload
from benchmarks.peers.onnxruntime import FirstOutput, exported
from benchmarks.peers.pytorch import Runtime


class OpenVino(Runtime):
    """The CPU plugin of OpenVINO.

    With int8, nncf rounds weights and activations by their ranges in the inputs of the workload, as
    `export_static_quantized_openvino_model` of sentence-transformers does, and the plugin chooses the type of
    everything else. Weights in int8 alone (`nncf.compress_weights`) take as long as fp32 in batches.
    """

    name = "openvino"

    def prepare(self, work: Workload) -> Any:
        openvino = needed("openvino")
        converted = _converted(openvino, work)
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": self.threads, "PERFORMANCE_HINT": "LATENCY"}
        if self.precision == "int8":
            converted = _quantized(converted, work)
        else:
            type_of = openvino.Type.bf16 if self.precision == "bf16" else openvino.Type.f32
            settings["INFERENCE_PRECISION_HINT"] = type_of
        return openvino.Core().compile_model(converted, "CPU", settings)

    def run(self, work: Workload, prepared: Any) -> Tensor:
        return work.through(lambda ids, mask: self.states(prepared, ids, mask))

    def states(self, prepared: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the states of ids, (batch, seqlen, d_model)."""
        return torch.from_numpy(prepared([ids.numpy(), mask.numpy()])[0])


def _quantized(converted: Any, work: Workload) -> Any:
    nncf = needed("nncf")
    batches = next(iter(work.orders.values())) if work.orders else [work.inputs]
    examples = [dict(enumerate(x.numpy() for x in batch)) for batch in batches]
    with contextlib.redirect_stdout(io.StringIO()):  # its progress
        return nncf.quantize(
            converted, nncf.Dataset(examples), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(examples)
        )


def _converted(openvino: Any, work: Workload) -> Any:
    """Converts a model from PyTorch, or from ONNX if OpenVINO doesn't trace it, such as a decoder's masks."""
    plain = FirstOutput(copy.deepcopy(work.model).float()).eval()
    shapes = [[-1, -1] if work.orders else list(x.shape) for x in work.inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return openvino.convert_model(plain, example_input=work.inputs, input=shapes)
        except Exception:
            needed("onnxscript", "onnx onnxscript")
            with tempfile.TemporaryDirectory(prefix="fastformer-onnx-") as folder:
                return openvino.convert_model(exported(work, Path(folder)))
