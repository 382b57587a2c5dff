"""OpenVINO on a forward pass, converted from the PyTorch model for its shape, or for any shape if it has several."""

from __future__ import annotations

import copy
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
    """The CPU plugin of OpenVINO. With int8, nncf rounds the weights, and the plugin rounds rows at run time."""

    name = "openvino"

    def prepare(self, work: Workload) -> Any:
        openvino = needed("openvino")
        converted = _converted(openvino, work)
        type_of = openvino.Type.bf16 if self.precision == "bf16" else openvino.Type.f32
        settings = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": type_of,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if self.precision == "int8":
            nncf = needed("nncf")
            converted = nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_SYM)
            # A scale for each row. The setting accepts no Python int of this size.
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(2**64 - 1)
        return openvino.Core().compile_model(converted, "CPU", settings)

    def run(self, work: Workload, prepared: Any) -> Tensor:
        return work.through(lambda ids, mask: self.states(prepared, ids, mask))

    def states(self, prepared: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the states of ids, (batch, seqlen, d_model)."""
        return torch.from_numpy(prepared([ids.numpy(), mask.numpy()])[0])


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
