"""OpenAI's routes of any model: GET /v1/models, and /v1/models/ with a name."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response

from fastformer.serving.answers import answer
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import ERRORS, ModelBody, ModelsBody, check_model
from fastformer.serving.openai_bodies import error_response as error_response
from fastformer.serving.service import Service


def router(service: Service, limits: Limits) -> APIRouter:
    """Makes OpenAI's routes that list the model and its adapters."""
    routes = APIRouter()
    began = int(time.time())
    described = {
        name: {"id": name, "object": "model", "created": began, "owned_by": "fastformer"}
        | ({} if adapter is None else {"parent": service.name})
        for name, adapter in service.models.items()
    }
    known: dict[int | str, Any] = {status: ERRORS[status] for status in (401, 404, 503)}

    @routes.get("/v1/models", responses={200: {"model": ModelsBody}, **known})
    async def models() -> Response:
        """Lists the model that is served, and its adapters."""
        return answer({"object": "list", "data": [*described.values()]})

    @routes.get("/v1/models/{name:path}", responses={200: {"model": ModelBody}, **known})
    async def one_model(name: str) -> Response:
        """Describes the model of a name."""
        check_model(name, service.models)
        return answer(described.get(name, described[service.name]))

    return routes
