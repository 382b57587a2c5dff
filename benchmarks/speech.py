"""Transcribes recordings with fastformer, faster-whisper, transformers and whisper.cpp, and compares speed and texts.

    pip install faster-whisper && python -m benchmarks.speech FOLDER talk.wav [more.mp3] [--threads 1 2] [--out FILE]

FOLDER is a Whisper's folder of CTranslate2 or of transformers. --providers may name transformers and whisper.cpp, too.
transformers reads the folder that --transformers names, in fp32. whisper.cpp (`pip install pywhispercpp`) reads the
files that --whisper.cpp names, each for the precision of its weights; 16-bit weights count as fp32. It has no batches,
and is measured one by one. Each provider is a process for each precision and number of threads, of which the better
counts. "one by one" decodes windows in their order, "batched" cuts them at pauses, 8 at a time. Memory is the peak of
the process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure.commands import count, parser_of, positive

PROVIDERS = ("fastformer", "faster-whisper", "transformers", "whisper.cpp")
BATCH = 8
RATE = 16_000  # samples a second
_COMPUTE_TYPES = {"int8": "int8", "fp32": "float32", "bf16": "bfloat16"}
_GGML_TYPES = {1: "fp32", 7: "int8"}  # of fp16 and Q8_0
_GGML_MAGIC, _GGML_TYPE_AT = 0x67676D6C, 11  # the number of the type among those that a file begins with


class Job(NamedTuple):
    """What a worker does: a provider's model in a precision, on a number of threads."""

    provider: str
    precision: str
    threads: int


class Worker:
    """The run's side of a process that holds a model and transcribes on demand."""

    def __init__(self, job: Job, folder: str, beams: int, files: list[str]) -> None:
        self.job = job
        words = [*map(str, job), folder, str(beams), *files]
        threads = {"OMP_NUM_THREADS": str(job.threads), "MKL_NUM_THREADS": str(job.threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.speech", "--worker", *words],
            env=os.environ | threads, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.missing = self.ask("")

    def ask(self, mode: str) -> Any:
        """Returns the answer to a line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if mode:
            with contextlib.suppress(BrokenPipeError):  # the process ended, or is about to
                self._process.stdin.write(mode + "\n")
                self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return {"missing": "the process ended"}

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def work(provider: str, precision: str, threads: str, folder: str, beams: str, *files: str) -> None:
    """The worker's side: loads the model, and for each line of standard input transcribes all files."""
    try:
        run = _LOADED.get(provider, _like_faster_whisper)(provider, precision, int(threads), folder, int(beams))
    except (ImportError, OSError, ValueError) as error:
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        mode = line.strip()
        began, texts, seconds = time.perf_counter(), [], 0.0
        for file in files[:1] if mode == "first" else files:
            text, length = run(file, mode)
            texts.append(text)
            seconds += length
        elapsed = time.perf_counter() - began
        print(json.dumps({"elapsed": elapsed, "seconds": seconds, "texts": texts, "peak_mib": _peak()}), flush=True)


Run = Callable[[str, str], tuple[str, float]]  # from a file and a mode to its text and its seconds


def _like_faster_whisper(provider: str, precision: str, threads: int, folder: str, beams: int) -> Run:
    module = __import__("faster_whisper" if provider == "faster-whisper" else "fastformer")
    model = module.WhisperModel(folder, device="cpu", compute_type=_COMPUTE_TYPES[precision], cpu_threads=threads)
    batched = module.BatchedInferencePipeline(model)

    def run(file: str, mode: str) -> tuple[str, float]:
        more = {"batch_size": BATCH} if mode == "batched" else {"clip_timestamps": [0, 30]} if mode == "first" else {}
        transcribe = batched.transcribe if mode == "batched" else model.transcribe
        segments, info = transcribe(file, language="en", beam_size=beams, temperature=0.0, **more)
        return "".join(segment.text for segment in segments), info.duration

    return run


def _transformers(provider: str, precision: str, threads: int, folder: str, beams: int) -> Run:
    import torch
    import transformers

    torch.set_num_threads(threads)
    pipe = transformers.pipeline(
        "automatic-speech-recognition", folder, dtype=torch.float32, chunk_length_s=30, device="cpu"
    )
    kinds: dict[str, Any] = {"num_beams": beams}
    if getattr(pipe.model.generation_config, "is_multilingual", True):
        kinds |= {"language": "en", "task": "transcribe"}

    def run(file: str, mode: str) -> tuple[str, float]:
        samples = _samples(file, mode)
        size = BATCH if mode == "batched" else 1
        return pipe(samples, batch_size=size, generate_kwargs=kinds)["text"], len(samples) / RATE

    return run


def _whisper_cpp(provider: str, precision: str, threads: int, file: str, beams: int) -> Run:
    from pywhispercpp.model import Model

    model = Model(file, params_sampling_strategy=int(beams > 1), redirect_whispercpp_logs_to=None)
    options: dict[str, Any] = {"n_threads": threads, "language": "en", "temperature": 0.0, "temperature_inc": 0.0}
    options |= {"beam_search": {"beam_size": beams, "patience": -1.0}} if beams > 1 else {}

    def run(file: str, mode: str) -> tuple[str, float]:
        samples = _samples(file, mode)
        return " ".join(part.text for part in model.transcribe(samples, **options)), len(samples) / RATE

    return run


def _samples(file: str, mode: str) -> Any:
    from fastformer.audio import decode_audio

    return decode_audio(file)[: 30 * RATE if mode == "first" else None]


_LOADED = {"transformers": _transformers, "whisper.cpp": _whisper_cpp}
_LACKING = (("whisper.cpp", "batched"),)  # modes that a provider doesn't have


def ggml_file(file: str) -> tuple[str, str]:
    """Returns the precision under which a file of whisper.cpp is measured, and its name."""
    try:
        numbers = np.fromfile(file, "<u4", _GGML_TYPE_AT + 1)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len(numbers) <= _GGML_TYPE_AT or numbers[0] != _GGML_MAGIC:
        raise argparse.ArgumentTypeError(f"expected a file of whisper.cpp, got {file}")
    kind = int(numbers[_GGML_TYPE_AT]) % 1000  # the thousands are the version of quantised weights
    if kind not in _GGML_TYPES:
        raise argparse.ArgumentTypeError(f"expected weights of fp16 or Q8_0 in {file}, got type {kind}")
    return _GGML_TYPES[kind], file


def _peak() -> float:
    """Returns the most memory that this process has had, in MiB; unlike getrusage, without that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


def word_errors(text: str, reference: str) -> float:
    """Returns the least number of words to insert, delete or replace, as a share of the reference's words."""
    words, others = ("".join(c.lower() for c in each if c.isalnum() or c == " ").split() for each in (text, reference))
    row = [*range(len(others) + 1)]
    for place, word in enumerate(words, 1):
        before, row[0] = row[0], place
        for other, each in enumerate(others, 1):
            before, row[other] = row[other], min(row[other] + 1, row[other - 1] + 1, before + (word != each))
    return row[-1] / max(1, len(others))


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each provider, precision and mode."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--worker"]:
        work(*arguments[1:])
        return 0
    parser = parser_of("speech", __doc__, out=True)
    parser.add_argument("folder", help="the folder of a Whisper")
    parser.add_argument("files", nargs="+", help="recordings of English speech")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS[:2])
    parser.add_argument("--transformers", metavar="FOLDER", help="the same model's folder of transformers")
    parser.add_argument(
        "--whisper.cpp", metavar="FILE", type=ggml_file, nargs="+", default=[], dest="ggml", help="its files of ggml"
    )
    parser.add_argument("--precisions", nargs="+", choices=[*_COMPUTE_TYPES], default=["int8", "fp32"])
    parser.add_argument("--threads", type=positive, nargs="+", default=[os.cpu_count() or 1])
    parser.add_argument("--modes", nargs="+", choices=["one by one", "batched"], default=["one by one", "batched"])
    parser.add_argument("--num_beams", **count(1, "beams of the search; 1 is greedy"))
    parser.add_argument("--rounds", **count(3, "turns of each"))
    options = parser.parse_args(arguments)
    from benchmarks.measure import record  # imports PyTorch, which a worker must not: its memory is measured

    texts: dict[tuple[str, ...], str] = {}
    run = record.environment("cpu")  # the same in all rows, of which tables show those of the latest run
    for precision in options.precisions:
        for row in compare(options, precision, texts):
            record.append(options.out, row | run | {"threads": row["threads"]})
    for (precision, mode, provider), text in texts.items():
        if precision != "fp32" and (exact := texts.get(("fp32", mode, provider))) is not None:
            print(f"{provider}, {precision}, {mode}: {100 * word_errors(text, exact):.2f} % other words than in fp32")
    return 0


def compare(options: argparse.Namespace, precision: str, texts: dict[tuple[str, ...], str]) -> list[dict[str, Any]]:
    """Returns the rows of a precision, and adds its texts by precision, mode and provider."""
    files = [os.path.abspath(file) for file in options.files]
    folders = dict.fromkeys(PROVIDERS[:2], options.folder)
    if (file := dict(options.ggml).get(precision)) is not None:
        folders["whisper.cpp"] = file
    if precision == "fp32":
        folders["transformers"] = options.transformers or options.folder
    providers = [name for name in options.providers if name in folders]
    for name in options.providers:
        if name not in folders:
            print(f"{name}, {precision}: not measured, since it has no {precision} here")
    workers = [
        Worker(Job(name, precision, threads), os.path.abspath(folders[name]), options.num_beams, files)
        for name in providers
        for threads in options.threads
    ]
    rows: list[dict[str, Any]] = []
    try:
        for mode in options.modes:
            turns: dict[Job, list[dict[str, Any]]] = {}
            for number in range(options.rounds + 1):  # the first warms up, with a window
                for worker in workers:
                    if not worker.missing and (worker.job.provider, mode) not in _LACKING:
                        turn = worker.ask(mode if number else "first")
                        if number and "elapsed" in turn:
                            turns.setdefault(worker.job, []).append(turn)
            best = {}
            for job, each in sorted(turns.items(), key=lambda item: -statistics.median(t["elapsed"] for t in item[1])):
                best[job.provider] = (job, each)  # the faster number of threads comes last
            rows += [_row(provider, mode, best, options) for provider in options.providers if provider in best]
            texts |= {(precision, mode, name): " ".join(each[-1]["texts"]) for name, (_, each) in best.items()}
    finally:
        for worker in workers:
            if worker.missing:
                print(f"{worker.job.provider}, {precision}: {worker.missing['missing']}")
            worker.close()
    return rows


def _row(provider: str, mode: str, best: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    job, turns = best[provider]
    times = [turn["elapsed"] for turn in turns]
    seconds = max(turn["seconds"] for _, each in best.values() for turn in each)
    compared: dict[str, Any] = {"speedup": None, "baseline": None}
    beside = ""
    if "faster-whisper" in best:
        _, others = best["faster-whisper"]
        speedup = _times_faster(turns, others)
        errors = word_errors(" ".join(turns[-1]["texts"]), " ".join(others[-1]["texts"]))
        compared = {"speedup": speedup, "baseline": "faster-whisper", "error": errors}
        if provider == "faster-whisper" and "fastformer" in best:
            compared["ours"] = _times_faster(best["fastformer"][1], others)
        beside = f"{speedup:.2f} times faster-whisper, {100 * errors:.1f} % other words, "
    windows = BATCH if mode == "batched" else 1
    rate = seconds / statistics.median(times)
    print(
        f"{provider}, {job.precision}, {mode}, {job.threads} threads: {rate:.1f} s of audio a second, {beside}"
        f"{turns[-1]['peak_mib']:.0f} MiB"
    )
    from benchmarks.measure.timing import Timing  # as `record` in `main`

    return {
        "suite": "decoding", "op": "speech", "provider": provider, "precision": job.precision,
        "model": Path(options.folder).name, "data": "speech",
        "shape": {"seconds": round(seconds), "windows": windows, "num_beams": options.num_beams},
        **Timing.of(times).fields(),
        "rounds": len(times), **compared, "value": rate, "unit": "seconds of audio a second",
        "peak_mib": turns[-1]["peak_mib"], "threads": job.threads,
    }  # fmt: skip


def _times_faster(turns: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Returns how many times faster the turns are than others of the same rounds."""
    return statistics.median(b["elapsed"] / a["elapsed"] for a, b in zip(turns, others, strict=True))


if __name__ == "__main__":
    sys.exit(main())
