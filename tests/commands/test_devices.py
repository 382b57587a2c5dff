"""The device and the precision that a command is given are those that its model is loaded with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

import fastformer.checkpoints
from fastformer import Chat, CrossEncoder, Encoder
from fastformer.cli import main
from fastformer.data import ByteTokenizer
from fastformer.generation import Translator
from fastformer.models import GPT, Transformer
from tests.generation.small import tiny

CHOSEN = torch.device("cuda", 1)
# A command, what loads its model, and whether the precision decides about the device, too.
COMMANDS: list[tuple[str, Any, str, bool]] = [
    ("translate {run} a", Translator, "from_pretrained", True),
    ("translate {run},{run} a", Translator, "from_pretrained", True),
    ("generate {gpt} a", fastformer.checkpoints, "load_model", True),
    ("chat {gpt}", Chat, "from_pretrained", True),
    ("embed {gpt} a --out {gpt}.npy", Encoder, "from_pretrained", True),
    ("rank {gpt} --query a", CrossEncoder, "from_pretrained", True),
    ("score {run} --file {lines} --target {lines}", Translator, "from_pretrained", False),
    ("score {gpt} --file {lines}", fastformer.checkpoints, "load_models", False),
    ("warmup {gpt}", fastformer.checkpoints, "load_model", True),
]


class LoadedError(Exception):
    """Ends a command."""


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("devices")
    for name, kind in (("run", Transformer), ("gpt", GPT)):
        tiny(kind).save_pretrained(folder / name, ByteTokenizer())
    (folder / "lines").write_text("a\n")
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.mark.parametrize(("command", "owner", "name", "decides"), COMMANDS, ids=[row[0] for row in COMMANDS])
def test_the_model_is_loaded_on_the_device_in_the_precision(
    command: str, owner: Any, name: str, decides: bool, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    loaded: list[dict[str, Any]] = []

    def choose(*given: Any) -> torch.device:
        asked.append(given)
        return CHOSEN

    def load(*given: Any, **options: Any) -> NoReturn:
        loaded.append(options)
        raise LoadedError

    loader: Callable[..., Any] = load
    monkeypatch.setattr("fastformer.devices.choose_device", choose)
    monkeypatch.setattr(owner, name, loader)
    monkeypatch.setattr("sys.stdin", None)
    main([*command.format(**places).split(), "--device", "cuda:1", "--precision", "bf16"])
    assert asked == [("cuda:1", "bf16") if decides else ("cuda:1",)]
    (options,) = loaded
    assert options["device"] == CHOSEN
    assert options.get("precision", options.get("dtype")) in ("bf16", torch.bfloat16)
