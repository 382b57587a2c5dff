"""Load on a server of your own, by locust: `pip install locust`.

    fastformer serve FOLDER --port 8000
    locust -f benchmarks/locustfile.py Translate --host http://127.0.0.1:8000 --headless -u 16 -r 16 -t 60s \
        --exit-code-on-error 1 --csv build/load --texts lines.txt

Name the users that the model can serve: Translate, StreamTranslation and LibreTranslate are for a translator, Complete,
Chat and StreamChat for a language model. A user sends the next request as soon as it has its answer, or after --pause
seconds. The key is read from FASTFORMER_API_KEY. A request that a full server refuses (429) counts as a failure, unless
you give --expect_429.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

_NAMES = ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald")
_texts = [
    f"{first} wrote to {second} {count} times before noon."
    for first in _NAMES
    for second in _NAMES
    for count in (2, 30)
]


def add_options(parser: LocustArgumentParser) -> None:
    """Adds fastformer's own flags."""
    parser.add_argument("--texts", default="", help="a file with a text in each line (short sentences in English)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between an answer and the next request")
    parser.add_argument("--max_tokens", type=int, default=64, help="new tokens that language models are asked for")
    parser.add_argument("--source_lang", default="", help="of the texts, where the model has several languages")
    parser.add_argument("--target_lang", default="", help="to translate into, where the model has several languages")
    parser.add_argument("--expect_429", action="store_true", help="count refusals by a full server as successes")


def read_texts(environment: Environment, **_: Any) -> None:
    """Reads the file of texts once."""
    options: Any = environment.parsed_options
    if options.texts:
        lines = Path(options.texts).read_text(encoding="utf-8").splitlines()
        _texts[:] = [line for line in lines if line.strip()]


events.init_command_line_parser.add_listener(add_options)
events.test_start.add_listener(read_texts)


class ApiUser(FastHttpUser):
    """The base class of all users."""

    abstract = True

    def wait_time(self) -> float:
        """Returns the seconds between an answer and the next request."""
        return float(self._options.pause)

    @property
    def _options(self) -> Any:
        return self.environment.parsed_options

    def on_start(self) -> None:
        """Reads the key."""
        key = os.environ.get("FASTFORMER_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, path: str, body: dict[str, Any], *, ends: str = "") -> None:
        """Sends a request and reads its answer to the end; `ends` is a text that every complete stream has."""
        headers = {**self._headers, "Content-Type": "application/json"}
        with self.client.post(path, data=json.dumps(body), headers=headers, catch_response=True) as answer:
            if answer.status_code == 429 and self._options.expect_429:
                answer.success()
            elif answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {(answer.text or '')[:200]}")
            elif ends not in (answer.text or ""):
                answer.failure("the stream ended before the answer did")

    def text(self) -> str:
        """Returns one of the texts."""
        return random.choice(_texts)

    def languages(self, source: str, target: str) -> dict[str, str]:
        """Returns the fields of a body for the languages on the command line."""
        codes = {source: self._options.source_lang, target: self._options.target_lang}
        return {name: code for name, code in codes.items() if code}


class Translate(ApiUser):
    """Uses fastformer's own route."""

    @task
    def translate(self) -> None:
        self.ask("/v1/translate", {"text": self.text(), **self.languages("source_lang", "target_lang")})


class StreamTranslation(ApiUser):
    """Uses fastformer's own route with a stream."""

    @task
    def translate(self) -> None:
        body = {"text": self.text(), "stream": True, **self.languages("source_lang", "target_lang")}
        self.ask("/v1/translate", body, ends='"done":true')


class LibreTranslate(ApiUser):
    """Uses LibreTranslate's route."""

    @task
    def translate(self) -> None:
        body = {"q": self.text(), "source": "auto", "target": "en", **self.languages("source", "target")}
        self.ask("/translate", body)


class Complete(ApiUser):
    """Uses OpenAI's route for completions."""

    @task
    def complete(self) -> None:
        self.ask("/v1/completions", {"prompt": self.text(), "max_tokens": self._options.max_tokens})


class Chat(ApiUser):
    """Uses OpenAI's route for chats."""

    @task
    def chat(self) -> None:
        self.ask("/v1/chat/completions", self._body())

    def _body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.text()}]
        return {"messages": messages, "max_tokens": self._options.max_tokens}


class StreamChat(Chat):
    """Uses OpenAI's route for chats with a stream."""

    @task
    def chat(self) -> None:
        self.ask("/v1/chat/completions", {**self._body(), "stream": True}, ends="data: [DONE]")
