"""/v1/translate gives what the library gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from fastformer.generation import Translator
from fastformer.serving import make_app, open_service


def asked(folder, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        app = make_app(open_service(folder))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                await work(client)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_texts_equal_the_librarys(translator_folder) -> None:
    texts = ["one", "twenty-one", "x y z"]
    expected = Translator.from_pretrained(translator_folder).translate(texts)

    async def work(client: httpx.AsyncClient) -> None:
        for text, right in zip(texts, expected, strict=True):
            assert (await client.post("/v1/translate", json={"text": text})).json() == {"text": right}
        assert (await client.post("/v1/translate", json={"text": texts})).json() == {"text": expected}
        streamed = await client.post("/v1/translate", json={"text": texts[1], "stream": True})
        *pieces, last = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
        assert last == {"done": True, "text": expected[1]}
        assert "".join(piece["text"] for piece in pieces) == expected[1]
        for wrong in ({"text": 7}, {"text": ""}, {"text": "a", "txt": 1}, {}):
            answer = await client.post("/v1/translate", json=wrong)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == 400

    asked(translator_folder, work)
