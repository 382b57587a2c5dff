"""Requests inside and outside of /openapi.json never give a 5xx, and responses follow the schema."""

from __future__ import annotations

from typing import Any

import pytest

from fastformer.serving import Limits
from tests.serving import models
from tests.serving.servers import running

schemathesis = pytest.importorskip("schemathesis", reason="the schemathesis library is not installed")
hypothesis = pytest.importorskip("hypothesis", reason="the hypothesis library is not installed")
pytest.importorskip("transformers", reason="the folders are written by transformers")

KINDS = ["translator", "generator", "encoder", "multi-vector", "cross-encoder", "ranker", "speech"]
CASES = 500  # of an application, over all of its routes


@pytest.mark.slow  # 500 requests to each application, with bodies drawn from the schema and against it
@pytest.mark.parametrize("kind", KINDS)
def test_no_request_breaks_the_schema(kind, tmp_path, translator_folder) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    kept: list[Any] = [
        not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_schema_conformance, checks.response_headers_conformance,
    ]  # fmt: skip
    limits = Limits(max_new_tokens=8, max_texts=8, max_beams=3)
    with running(models.folder_of(kind, tmp_path / "model", translator_folder), limits) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        posts = [operation for operation in operations if operation.method == "post"]
        assert posts
        total = 0
        for operation in operations:
            count = CASES // (2 * len(posts)) + 1 if operation in posts else 5
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation in posts else (None,):
                chosen = {} if mode is None else {"generation_mode": mode}

                @hypothesis.settings(
                    max_examples=count,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    suppress_health_check=list(hypothesis.HealthCheck),
                )
                @hypothesis.given(case=operation.as_strategy(**chosen))
                def check(case: Any) -> None:
                    nonlocal total
                    total += 1
                    if isinstance(case.body, dict) and isinstance(case.body.get("timeout"), int | float):
                        del case.body["timeout"]  # less than an answer takes is a 504, as it should be
                    case.call_and_validate(checks=kept, timeout=60)

                check()
        assert total >= CASES
        assert server.service.session.is_alive
