"""fastformer's encoder on a forward pass, from ids and from texts; and sentence-transformers from texts, by PyTorch, on
fastformer, and on ONNX Runtime and OpenVINO.

A text consists of words, each of which is one token: its ids are the same as for the other peers.
"""

from __future__ import annotations

import json
import tempfile
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.peers.job import Missing, needed
from benchmarks.peers.models import CLS, FIRST, SEP, Batch, Workload
from benchmarks.peers.onnxruntime import OnnxRuntime
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.pytorch import Runtime

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _rows(batch: Batch) -> list[list[int]]:
    ids, mask = batch
    return [row[:length] for row, length in zip(ids.tolist(), mask.sum(1).tolist(), strict=True)]


class EngineAlone(Runtime):
    """`fastformer.encoding.engine.EncoderEngine`, from ids."""

    name = "encoder engine"

    def prepare(self, work: Workload) -> Any:
        from fastformer.encoding.engine import EncoderEngine
        from fastformer.integrations import from_huggingface

        model: Any = from_huggingface(work.model.float())
        engine = EncoderEngine(model, self.precision)
        if engine.name != "cpp":
            raise Missing(f"the model runs by its modules: {engine.why_unsupported(engine.model, self.precision)}")
        orders = {order: [_rows(batch) for batch in batches] for order, batches in work.orders.items()}
        return engine, orders or _rows((work.inputs[0], work.inputs[1]))

    def run(self, work: Workload, prepared: Any) -> Tensor:
        engine, rows = prepared
        if work.order is None:
            return torch.from_numpy(engine.encode(rows, pooling="none"))
        return torch.cat([torch.from_numpy(engine.encode(batch, pooling="mean")) for batch in rows[work.order]])


class OfTexts(Runtime):
    """A library that encodes texts: one at a time, or all at once, in which case it makes its batches."""

    precisions: ClassVar[tuple[str, ...]] = ("fp32",)

    def prepare(self, work: Workload) -> Any:
        self.texts = {
            order: [text for batch in batches for text in _texts(batch)] for order, batches in work.orders.items()
        }
        with tempfile.TemporaryDirectory(prefix="fastformer-sentences-") as folder:
            _write_folder(Path(folder), work.model)
            return self.load(folder)

    @abstractmethod
    def load(self, folder: str) -> Any:
        """Loads the library's encoder."""

    def run(self, work: Workload, prepared: Any) -> Tensor:
        assert work.order is not None
        texts = self.texts[work.order]
        if work.order == "one by one":
            return torch.stack([torch.from_numpy(prepared.encode(text)) for text in texts])
        return torch.from_numpy(prepared.encode(texts))


class EncoderPeer(OfTexts):
    """`fastformer.Encoder`."""

    name = "fastformer.Encoder"
    precisions = ("int8", "bf16", "fp32")

    def load(self, folder: str) -> Any:
        import fastformer

        return fastformer.Encoder.from_pretrained(folder, precision=self.precision)


class SentenceTransformers(OfTexts):
    """SentenceTransformer, with batches of 32."""

    name = "sentence-transformers"

    def load(self, folder: str) -> Any:
        return needed("sentence_transformers", "sentence-transformers").SentenceTransformer(folder, device="cpu")


class AcceleratedSentenceTransformers(SentenceTransformers):
    """SentenceTransformer after `fastformer.accelerate`."""

    name = "sentence-transformers, accelerated"
    precisions = EncoderPeer.precisions

    def load(self, folder: str) -> Any:
        import fastformer

        precision: Any = self.precision
        return fastformer.accelerate(super().load(folder), precision=precision)


class _States:
    """A model of another runtime, in place of transformers' in a SentenceTransformer. It is no module of PyTorch."""

    def __init__(self, runtime: OnnxRuntime | OpenVino, config: Any) -> None:
        self.runtime, self.config = runtime, config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"last_hidden_state": self.runtime.states(self.runtime.prepared, input_ids, attention_mask)}


class OnRuntime(SentenceTransformers):
    """SentenceTransformer whose Transformer another runtime computes.

    Its own backends do the same by optimum, which takes more time for a call, and none of whose releases imports with
    transformers 5.24.
    """

    runtime: type[OnnxRuntime | OpenVino]

    def load(self, folder: str) -> Any:
        runtime = self.runtime(self.case, self.precision, self.threads, {})
        model = super().load(folder)
        config = model[0].model.config
        del model[0].model
        model[0].model = _States(runtime, config)
        return model


class SentenceTransformersOnnx(OnRuntime):
    """SentenceTransformer on ONNX Runtime."""

    name, runtime, precisions = "sentence-transformers, onnxruntime", OnnxRuntime, OnnxRuntime.precisions


class SentenceTransformersOpenVino(OnRuntime):
    """SentenceTransformer on OpenVINO."""

    name, runtime, precisions = "sentence-transformers, openvino", OpenVino, OpenVino.precisions


OF_TEXTS: tuple[type[OfTexts], ...] = (
    EncoderPeer,
    SentenceTransformers,
    AcceleratedSentenceTransformers,
    SentenceTransformersOnnx,
    SentenceTransformersOpenVino,
)


def _texts(batch: Batch) -> list[str]:
    return [" ".join(f"t{i}" for i in row[1:-1]) for row in _rows(batch)]  # without the ids around it


def _write_folder(folder: Path, model: Any) -> None:
    """Writes a folder of sentence-transformers, with a tokenizer whose words are "t5", "t6", ..."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    model.save_pretrained(folder)
    words = [f"t{i}" for i in range(FIRST, model.config.vocab_size)]
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *words])}
    assert (vocab["[CLS]"], vocab["[SEP]"]) == (CLS, SEP)
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", CLS), ("[SEP]", SEP)]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    backend.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    listed = [("Transformer", ""), ("Pooling", "1_Pooling")]
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **named},
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(listed)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": True
        },
    }  # fmt: skip
    for name, values in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))
