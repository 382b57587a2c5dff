"""A server of a model and its LoRA adapters, and the commands: the name of the model in a request chooses one."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fastformer.checkpoints import load_model
from fastformer.generation import Generator
from fastformer.integrations import from_huggingface
from fastformer.serving import open_service
from tests.generation.lora_folders import linears, write_adapter
from tests.generation.small import needs_cpp
from tests.integrations.decoders import CASES
from tests.serving import models
from tests.serving.servers import running

openai = pytest.importorskip("openai", reason="the openai client is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
pytestmark = needs_cpp

PROMPT = "two men walk the dog"
MESSAGES: list[Any] = [{"role": "user", "content": "two birds"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, tokenizer = tmp_path_factory.mktemp("adapters"), models.tokenizer()
    llama = CASES["llama grouped heads"].make(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=256, pad_token_id=2, eos_token_id=1
    )
    from_huggingface(llama).save_pretrained(folder / "base", tokenizer)
    for seed, name in enumerate(("a", "b")):
        write_adapter(folder / name, llama, linears(llama), seed=seed)
    return {name: folder / name for name in ("base", "a", "b")}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str | None, str]:
    """The library's texts, by the name of the adapter."""
    model, tokenizer = load_model(folders["base"], ("GPT",))
    generator = Generator(model, adapters={name: folders[name] for name in ("a", "b")})
    ids = tokenizer.encode(PROMPT)
    texts: dict[str | None, str] = {}
    for name in (None, "a", "b"):
        texts[name] = tokenizer.decode([*generator.stream(ids, adapter=name, max_new_tokens=9)])
    assert len({*texts.values()}) == 3
    return texts


def test_a_request_names_the_adapter(folders, expected):
    service = open_service(folders["base"], adapters={name: folders[name] for name in ("a", "b")})
    with running(service) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert [one.id for one in client.models.list()] == ["base", "base:a", "a", "base:b", "b"]
        assert client.models.retrieve("base:a").parent == "base" == client.models.retrieve("b").parent
        for model, name in {"base": None, "a": "a", "base:b": "b", "b": "b"}.items():
            options: dict[str, Any] = {"model": model, "max_tokens": 9, "temperature": 0}
            found = client.completions.create(prompt=PROMPT, **options)
            assert (found.choices[0].text, found.model) == (expected[name], model)
            pieces = client.completions.create(prompt=PROMPT, stream=True, **options)
            assert "".join(piece.choices[0].text for piece in pieces) == expected[name]
            assert client.chat.completions.create(messages=MESSAGES, **options).model == model
        for model in ("c", "base:c", "a:base", "base:"):
            with pytest.raises(openai.NotFoundError) as error:
                client.completions.create(model=model, prompt=PROMPT, max_tokens=2)
            assert error.value.code == "model_not_found"
        said = ask(server.url, {"adapter_id": "b", "max_new_tokens": 9})
        assert said["generated_text"] == expected["b"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(server.url, {"adapter_id": "c", "max_new_tokens": 9})
        assert refused.value.code == 422


def ask(url: str, parameters: dict[str, Any]) -> Any:
    data = json.dumps({"inputs": PROMPT, "parameters": parameters}).encode()
    request = urllib.request.Request(f"{url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)


def test_names_that_would_be_unclear_and_other_kinds_of_models(folders, tmp_path):
    for name in ("base", ""):
        with pytest.raises(ValueError, match="name"):
            open_service(folders["base"], adapters={name: folders["a"]})
    with pytest.raises(ValueError, match="adapters"):
        open_service(models.translator(tmp_path / "translator"), adapters={"a": folders["a"]})


def test_the_commands_take_a_folder(folders, expected, ran, tmp_path, monkeypatch):
    flags = ("--greedy", "--max_new_tokens", "9")
    base, adapter = str(folders["base"]), str(folders["a"])
    assert ran("generate", base, PROMPT, *flags).out == f"{PROMPT}{expected[None]}\n"
    for more in ((), ("--precision", "int8")):
        assert ran("generate", base, PROMPT, "--adapter", adapter, *flags, *more).out == f"{PROMPT}{expected['a']}\n"
    (tmp_path / "prompts").write_text(f"{PROMPT}\n")
    found = ran("generate", base, "--file", str(tmp_path / "prompts"), "--adapter", adapter, *flags).out
    assert found.rstrip("\n") == (PROMPT + expected["a"]).replace("\r", "\\r").replace("\n", "\\n")
    (tmp_path / "turns").write_text("two birds\n")
    answers = []
    for more in ((), ("--adapter", adapter)):
        with (tmp_path / "turns").open() as turns:
            monkeypatch.setattr("sys.stdin", turns)
            answers.append(ran("chat", base, *more, *flags).out)
    assert answers[0] != answers[1]
    for wrong in ("a", "a=", f"={adapter}"):
        assert "NAME=FOLDER" in ran("serve", base, "--adapter", wrong, "--port", "0", code=1).err
