"""A folder of a translator with random weights, and an application in the process's own event loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.models import Transformer

SIZES = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.fixture(scope="session")
@torch.inference_mode(False)  # whichever test comes first
def translator_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-translator"
    torch.manual_seed(0)
    model = Transformer.from_preset("tiny", vocab_size=259, max_len=64, **SIZES)
    model.embedding.weight.data *= 3  # a fresh model is nearly uniform
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Any]:
    """Starts a real server of the module's `folder`."""
    from tests.serving.servers import running  # where the extra `serve` is not installed, tests skip before this

    with running(folder) as found:
        yield found


@pytest.fixture(scope="module")
def client(server) -> Iterator[Any]:
    """Returns OpenAI's client for the server."""
    openai = pytest.importorskip("openai", reason="the openai library is not installed")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found
