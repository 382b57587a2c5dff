"""Lists what each field of each route makes of empty, absent, odd and extreme values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastformer.serving import open_service
from tests.serving.asking import serving
from tests.serving.test_fields import CASES, OF_COMPLETIONS, changed, told

# ... is an absent field. Bounds of numbers are in the schema, which is frozen, too.
VALUES: tuple[Any, ...] = (..., None, "", [], {}, False, 0, -1)
CHAT = "/v1/chat/completions"
# What a field needs beside it, if not what `CASES` says.
SEEDED = {"seed": 1}


def fields_of(route: str) -> list[str]:
    """Returns the fields of a route; of a chat those that completions don't have, too."""
    return [place for place in CASES[route][2] if route != CHAT or place not in OF_COMPLETIONS]


async def edges_now(route: str, folder: Path) -> dict[str, str]:
    """Returns of each field of a route a word for each value: the status of an error, or a letter.

    Answers with the same letter are the same.
    """
    kind, right, cases = CASES[route]
    pair = {"source_lang": "en", "target_lang": "de"} if kind == "translator" else {}
    found: dict[str, str] = {}
    async with serving(open_service(folder, **pair)) as client:
        for place in fields_of(route):
            more: dict[str, Any] = dict(*cases[place][2:])
            if "" in more:  # the text
                more = {next(name for name in ("inputs", "query") if name in right): "a bird " * 40}
            body, words, answers = {**right, **more}, list[str](), list[Any]()
            if place.startswith("parameters."):
                body = {**right, "parameters": {**right["parameters"], **SEEDED, **more}}
            elif kind == "generator" or route == "/v1/translate":
                body = {**right, **SEEDED, **more}
            for value in VALUES:
                answer = await client.post(route, json=changed(body, place, value))
                if answer.status_code != 200:
                    words.append(str(answer.status_code))
                    continue
                text = told(answer.text)
                if text not in answers:
                    answers.append(text)
                words.append(chr(ord("a") + answers.index(text)))
            found[place] = " ".join(words)
    return found
