"""Servers of one model over HTTP: fastformer, and others with the same weights. Each is a process of its own.

A model has random weights and never ends an output: a request has the number of new tokens, and its answer has as many
words, each of which is one token of a vocabulary "t3", "t4", ... A translator is compared with CTranslate2 behind
FastAPI, a language model with `transformers serve` and llama.cpp's server.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import record
from benchmarks.peers import ctranslate2, llama_cpp
from benchmarks.peers.cases import make_model
from benchmarks.peers.hugging_face import convert
from benchmarks.peers.job import Missing
from benchmarks.peers.load import Body
from fastformer.data.backend import ForeignIds, Renumbered
from fastformer.data.huggingface import LibraryBackend
from fastformer.data.tokenizer import Tokenizer
from fastformer.models import GPT, Transformer

OURS = "fastformer serve"
TRANSLATORS = {"base": "base", "tiny": "tiny"}
LANGUAGE_MODELS = {"llama-small": "llama-small", "llama-tiny": "llama-tiny"}
_SPECIAL = ("<pad>", "</s>", "<unk>")
_REQUESTS = 512
_LONGEST_START = 180.0  # seconds


class TextRequest(NamedTuple):
    """A text with a number of words, and the requested number of new tokens."""

    words: list[int]
    new_tokens: int


def requests(vocab_size: int, *, lengths: range, new_tokens: Callable[[int], int]) -> list[TextRequest]:
    """Makes texts of mixed lengths, the same in each run.

    Args:
        vocab_size: the size of the vocabulary; words are the ids that are not special.
        lengths: the lengths of the texts, in words.
        new_tokens: length of a text -> its number of new tokens.
    """
    drawn = random.Random(0)
    sizes = [drawn.choice(lengths) for _ in range(_REQUESTS)]
    return [
        TextRequest([drawn.randrange(len(_SPECIAL), vocab_size) for _ in range(size)], new_tokens(size))
        for size in sizes
    ]


class PeerServer:
    """A process that listens on this machine.

    Args:
        name, precision: the names in rows.
        command: the command that starts it; "PORT" in it becomes a free port.
        path: the path to post to.
        body: request -> its body.
        text_of: answer -> its text.
        threads: its number of threads; None: its own choice.
        health: a path that answers 200 once the server is ready.
    """

    def __init__(
        self,
        name: str,
        precision: str,
        command: Sequence[str],
        path: str,
        body: Callable[[TextRequest], Body],
        text_of: Callable[[Any], str],
        *,
        threads: int,
        health: str = "/health",
    ) -> None:
        self.name, self.precision, self.path, self.body, self.threads = name, precision, path, body, threads
        self.text_of, self._command, self._health = text_of, command, health
        self._process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}"

    def count(self, answer: Any) -> int:
        """Returns the number of new tokens in an answer: its words."""
        return len(self.text_of(answer).split())

    def start(self, log: Path) -> None:
        """Starts the process, and writes its output to a file; `wait` waits until it is ready."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        command = [str(self.port) if word == "PORT" else word for word in self._command]
        threads = str(self.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }  # fmt: skip
        self._log = log
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                command, cwd=record.ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def wait(self) -> None:
        """Returns when the server answers.

        Raises:
            Missing: it has ended, or doesn't answer in time; the message has its last output.
        """
        assert self._process is not None
        url, last = f"http://127.0.0.1:{self.port}{self._health}", time.monotonic() + _LONGEST_START
        while time.monotonic() < last and self._process.poll() is None:
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        log = self._log.read_text(errors="replace").strip().splitlines()
        raise Missing("it did not start: " + " / ".join(log[-2:]))

    def stop(self) -> None:
        """Ends the process, by force if necessary."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@dataclass
class LoadTest:
    """A model's servers and requests.

    Attributes:
        servers: the servers, with fastformer first.
        missing: (name, precision, reason) of the servers that are missing.
        requests: the requests, in the order in which clients take them.
    """

    servers: list[PeerServer]
    missing: list[tuple[str, str, str]]
    requests: list[TextRequest]


def text_of(request: TextRequest) -> str:
    """Returns the words of a request."""
    return " ".join(f"t{word}" for word in request.words)


def _backend(vocab_size: int) -> Any:
    """Makes a tokenizer whose words are "t3", "t4", ..., with an id for each special token before them."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocab = {token: i for i, token in enumerate([*_SPECIAL, *(f"t{i}" for i in range(len(_SPECIAL), vocab_size))])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(_SPECIAL))
    return backend


def _ours(
    folder: Path,
    precision: str,
    threads: int,
    path: str,
    body: Callable[[TextRequest], Body],
    text_of: Any,
    flags: Sequence[str],
) -> PeerServer:
    begin = "import sys; from fastformer.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", begin, "serve", str(folder), "--port", "PORT", "--precision", precision, *flags]
    return PeerServer(OURS, precision, command, path, body, text_of, threads=threads, health="/ready")


def write_translator(case: str, folder: Path) -> tuple[Transformer, Any]:
    """Writes the model of a case to a new folder; returns the model, and the backend of its tokenizer."""
    model = make_model({"name": case})
    assert isinstance(model, Transformer)
    with torch.no_grad():
        model.output_weight[: len(_SPECIAL)] = 0.0  # no special token is ever among the best
    ids, backend = ForeignIds(pad=0, eos=1, unk=2), _backend(model.config.vocab_size)
    model.save_pretrained(folder, Tokenizer(Renumbered(LibraryBackend(backend), ids)))
    return model, backend


def our_translator(folder: Path, precision: str, threads: int, *flags: str) -> PeerServer:
    """Makes fastformer's server of a folder from `write_translator`; flags are those of `fastformer serve`."""

    def body(request: TextRequest) -> Body:
        return {"text": text_of(request), "max_new_tokens": request.new_tokens}

    def read(answer: Any) -> str:
        return str(answer["text"])

    return _ours(folder, precision, threads, "/v1/translate", body, read, flags)


def translators(case: str, folder: Path, precisions: Sequence[str], threads: int) -> LoadTest:
    """Makes fastformer's server and CTranslate2 behind FastAPI, and writes CTranslate2's model as well.

    Args:
        case: one of TRANSLATORS.
        folder: a new folder to write to.
        precisions: the precisions of fastformer; CTranslate2's is int8.
        threads: the number of threads of a server.
    """
    model, backend = write_translator(case, folder / case)
    servers = [our_translator(folder / case, precision, threads) for precision in precisions]
    body, text_of = servers[0].body, servers[0].text_of
    missing = []
    name = "ctranslate2, fastapi"
    if importlib.util.find_spec("ctranslate2") is None:
        missing.append((name, "int8", "not installed: pip install ctranslate2"))
    else:
        other = folder / "other"
        other.mkdir()
        ctranslate2.convert(model, other / "ctranslate2", "int8")
        backend.save(str(other / "tokenizer.json"))
        ways = {
            f"{name}, {threads} threads": (1, threads, 0),
            f"{name}, {threads} workers": (threads, 1, 0),
            f"{name}, batching": (1, threads, 32),
        }
        for way, (workers, threads_each, together) in ways.items():
            command = [
                sys.executable, "-m", "benchmarks.peers.ctranslate2_server", str(other), "PORT", "int8",
                str(workers), str(threads_each), "--together", str(together),
            ]  # fmt: skip
            servers.append(PeerServer(way, "int8", command, "/v1/translate", body, text_of, threads=threads_each))
    return LoadTest(servers, missing, translations(case, model.config.vocab_size))


def translations(case: str, vocab_size: int) -> list[TextRequest]:
    """Makes the requests for a translator."""
    lengths = range(8, 33) if case == "base" else range(3, 9)
    return requests(vocab_size, lengths=lengths, new_tokens=lambda length: length + 4)


def language_models(
    case: str, folder: Path, precisions: Sequence[str], threads: int, llama_server: str = ""
) -> LoadTest:
    """Makes fastformer's server, `transformers serve` and llama.cpp's server, with one model of Llama's form.

    Args:
        case: one of LANGUAGE_MODELS.
        folder: a new folder to write to.
        precisions: the precisions of fastformer; transformers' is fp32, llama.cpp's int8.
        threads: the number of threads of a server.
        llama_server: the path of llama.cpp's server; "": on PATH.
    """
    import transformers

    model = make_model({"name": case})
    assert isinstance(model, GPT)
    with torch.no_grad():
        model.output_weight[: len(_SPECIAL)] = 0.0
    vocab_size = model.config.vocab_size
    backend = _backend(vocab_size)
    convert(model).save_pretrained(folder / case)
    names = dict(zip(("pad_token", "eos_token", "unk_token"), _SPECIAL, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder / case)

    def body(request: TextRequest) -> Body:
        limits = {"max_tokens": request.new_tokens, "temperature": 0}
        return {"model": case, "prompt": text_of(request), **limits}

    def read(answer: Any) -> str:
        return str(answer["choices"][0]["text"])

    path = "/v1/completions"
    servers = [_ours(folder / case, precision, threads, path, body, read, ()) for precision in precisions]
    missing = []
    if importlib.util.find_spec("transformers.cli.serve") is None:
        missing.append(("transformers serve", "fp32", "not installed: pip install 'transformers[serving]>=5'"))
    else:
        command = [
            sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder / case), "--port", "PORT",
            "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32",
        ]  # fmt: skip

        def by_folder(request: TextRequest) -> Body:
            return {**body(request), "model": str(folder / case)}

        servers.append(PeerServer("transformers serve", "fp32", command, path, by_folder, read, threads=threads))
    program = llama_server or shutil.which("llama-server")
    try:
        if not program:
            raise Missing("no llama-server: build it from llama.cpp, and have it on PATH or name it by --llama_server")
        # "Ġ" is how GPT-2's tokenizer writes a space.
        words = [*_SPECIAL, *(f"Ġt{i}" for i in range(len(_SPECIAL), vocab_size))]
        llama_cpp.write_gguf(model, folder / "model.gguf", "Q8_0", words)
    except Missing as error:
        missing.append(("llama.cpp's server", "int8", str(error)))
    else:
        command = [
            str(program), "-m", str(folder / "model.gguf"), "--port", "PORT", "--host", "127.0.0.1",
            "-t", str(threads), "-tb", str(threads), "-np", "16", "-c", str(16 * 512), "--no-webui",
        ]  # fmt: skip

        def by_ids(request: TextRequest) -> Body:  # these servers' tokenizers know no whole words
            return {"prompt": request.words, "n_predict": request.new_tokens, "temperature": 0, "cache_prompt": False}

        said_by_it: Callable[[Any], str] = lambda answer: str(answer["content"])  # noqa: E731
        servers.append(
            PeerServer("llama.cpp's server", "int8", command, "/completion", by_ids, said_by_it, threads=threads)
        )
    lengths = range(16, 49) if case == "llama-small" else range(3, 9)
    return LoadTest(servers, missing, requests(vocab_size, lengths=lengths, new_tokens=lambda length: 8 + length % 17))
