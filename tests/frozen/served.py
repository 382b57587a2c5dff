"""Lists what a server of each kind of model tells about itself, what its routes take and answer, the types, bounds and
defaults of the fields of both, and which values of the fields of other servers ask for nothing.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from fastapi import UploadFile
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from fastformer.serving import make_app, open_service
from fastformer.serving.embeddings import EmbeddingsBody
from fastformer.serving.openai_audio import TranslationBody
from fastformer.serving.openai_bodies import (
    Body,
    ChatBody,
    CompletionBody,
    MessageBody,
    StreamOptions,
    unsupported_field,
)
from fastformer.serving.rerank import DocumentsBody
from fastformer.serving.tei import EmbedBody
from fastformer.serving.tgi import GenerateBody, Parameters
from tests.audio.speech import sound
from tests.audio.test_reading import wav
from tests.serving.models import folder_of, services
from tests.serving.test_fields import CASES

# Of each kind of body, what it can't do without.
BODIES: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
    GenerateBody: {"inputs": "a"},
    Parameters: {},
    MessageBody: {"role": "user", "content": "a"},
    StreamOptions: {},
    EmbeddingsBody: {"input": "a"},
    EmbedBody: {"inputs": "a"},
    DocumentsBody: {"query": "a", "documents": ["b"]},
    TranslationBody: {"file": UploadFile(io.BytesIO()), "model": "whisper-1"},
}
# What clients send if they ask for nothing, as their defaults, and what may not be mistaken for it.
VALUES: tuple[Any, ...] = (
    False, True, 0, 1, -1, 0.5, "", "none", "auto", "medium", "float", "json", [], {}, ["text"], ["float"],
    {"type": "text"}, {"type": "disabled"}, ["a"], {"a": 1},
)  # fmt: skip
SOUND = wav(sound(3, 2))
# By route of speech: the fields of its forms.
ALL = {"language": "en", "response_format": "verbose_json"}
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/audio/transcriptions": ({**ALL, "timestamp_granularities[]": ["word", "segment"]}, {"language": "en"}),
    "/v1/audio/translations": (ALL, {}),
}
# What no test can promise, and routes that answer with a page or with counts.
VARIES = ("version", "created", "sha", "docker_label", "model_sha")
OTHERS = ("/", "/metrics", "/openapi.json")
OF_FASTAPI = ("HTTPValidationError", "ValidationError")


def folders(folder: Path) -> dict[str, Path]:
    """Makes a folder of each kind of service."""
    found = services(folder)
    for kind in ("cross-encoder", "speech"):
        (folder / kind).mkdir()
        found[kind] = folder_of(kind, folder / kind, folder)
    return found


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _kept(each) for key, each in value.items() if key not in VARIES}
    return [_kept(each) for each in value] if isinstance(value, list) else value


def _kinds(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the names of the schemas, or the fields of one without a name, by the kind of the content."""
    found = {}
    for kind, each in content.items():
        names = re.findall(r"#/components/schemas/(?:\w+__)?(\w+)", json.dumps(each))
        found[kind] = " | ".join(names) or _fields(each.get("schema", {}))
    return found


def _fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a schema with their types, bounds and defaults, and whether they are described."""
    return {
        field: {key: value for key, value in each.items() if key not in ("title", "description")}
        | {"required": field in schema.get("required", ())}
        | ({"described": True} if each.get("description") else {})
        for field, each in schema.get("properties", {}).items()
    }


def served_now(folder: Path) -> dict[str, Any]:
    """Returns the answers of a folder's server to GET, and of each of its routes what it takes and answers.

    The fields of the schemas that several routes have are beside the routes, and of each metric its kind and the bounds
    of its buckets.
    """
    names = {"source_lang": "en", "target_lang": "de"} if folder.name == "tiny-translator" else {}
    app = make_app(open_service(folder, **names))
    schema = app.openapi()
    schemas = {name: each for name, each in schema["components"]["schemas"].items() if name not in OF_FASTAPI}
    found = {f"schema {name}": _fields(each) for name, each in schemas.items()}
    with TestClient(app) as client:
        for path, methods in schema["paths"].items():
            for method, route in methods.items():
                body = route.get("requestBody", {})
                row: dict[str, Any] = {
                    "takes": _kinds(body.get("content", {})),
                    "required": body.get("required", False),
                    "answers": {code: _kinds(each.get("content", {})) for code, each in route["responses"].items()},
                }
                if method == "get" and path not in OTHERS and "{" not in path:
                    row["told"] = _kept(client.get(path).json())
                if path in CASES:
                    row["shape"] = _shape(client.post(path, json=CASES[path][1]).json())
                if path in FORMS:
                    forms = (client.post(path, data=form, files={"file": SOUND}) for form in FORMS[path])
                    row["shape"] = [_shape(answer.json()) for answer in forms]
                found[f"{method} {path}"] = row
        found["metrics"] = _metrics(client.get("/metrics").text)
    return found


def _shape(value: Any, name: str = "") -> Any:
    """Returns the fields of an answer, with the kinds of their values, and those that say what something is."""
    if isinstance(value, dict) and name == "top_logprobs":  # the names are tokens
        value = [*value.values()]
    if isinstance(value, dict):
        return {key: _shape(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_shape(each, name) for each in value[:1]]
    is_name = isinstance(value, str) and name in ("object", "type", "role", "finish_reason", "error_type", "task")
    return value if is_name or value is None else "number" if type(value) is float else type(value).__name__


def _metrics(text: str) -> dict[str, str]:
    """Returns the kind of each metric, and the bounds of its buckets."""
    found = {}
    for metric in text_string_to_metric_families(text):
        if metric.name.endswith("_created"):  # a setting of the library
            continue
        bounds = dict.fromkeys(sample.labels["le"] for sample in metric.samples if "le" in sample.labels)
        found[metric.name] = " ".join([metric.type, *bounds])
    return found


def idle_now(kind: type[Body]) -> dict[str, str]:
    """Returns the values of further fields that a body accepts, since they ask for nothing."""
    found = {}
    for name in sorted({*kind.unsupported} - {*kind.model_fields}):
        bodies = ((value, kind.model_validate({**BODIES[kind], name: value})) for value in (None, *VALUES))
        found[name] = json.dumps([value for value, body in bodies if unsupported_field(body) is None])
    return found
