"""A program that leaves an AsyncTranslator open exits with its own status and without messages from C++."""

from __future__ import annotations

import json
import subprocess
import sys
from textwrap import dedent

import pytest

# One process imports torch; each case is a fork of it, which ends as a program does.
PROGRAM = """
import asyncio, json, os, signal, sys, threading, time
import torch
import fastformer
from fastformer.data import ByteTokenizer
from fastformer.models import Transformer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it
torch.manual_seed(0)
SIZES = dict(d_model=64, d_ff=128, num_heads=2, num_encoder_layers=1, num_decoder_layers=2)
MODEL = Transformer.from_preset("tiny", vocab_size=259, max_len=4096, **SIZES).eval()

def front():
    return fastformer.AsyncTranslator(fastformer.Translator(MODEL, ByteTokenizer()))

LONG = dict(max_new_tokens=4000, min_new_tokens=4000)

async def leave(running, fronts=1):
    for _ in range(fronts):
        one = await front().__aenter__()
        for _ in range(running):
            asyncio.get_running_loop().create_task(one.translate("twenty-one", **LONG))
    await asyncio.sleep(0.03)

async def interrupted():
    await leave(3)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)

async def streamed():
    async for _ in (await front().__aenter__()).stream("twenty-one", **LONG):
        return

def in_thread():
    thread = threading.Thread(target=lambda: asyncio.run(leave(2)))
    thread.start()  # the main thread ends first

def beside_threads():
    # A thread that is no daemon goes on behind the main thread, and its translation comes.
    opened = threading.Event()
    async def late():
        async with front() as one:
            opened.set()
            await asyncio.sleep(0.2)
            assert isinstance(await one.translate("a", max_new_tokens=3), str)
            os._exit(7)
    threading.Thread(target=lambda: asyncio.run(late())).start()
    opened.wait()  # Python 3.12 starts no thread once the main thread has ended

def forked():
    asyncio.run(leave(1))
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(5)

CASES = {
    "idle": (lambda: asyncio.run(leave(0)), 0),
    "running": (lambda: asyncio.run(leave(3)), 0),
    "several": (lambda: asyncio.run(leave(2, fronts=3)), 0),
    "in a stream": (lambda: asyncio.run(streamed()), 0),
    "in a thread": (in_thread, 0),
    "beside a thread": (beside_threads, 7),
    "sys.exit": (lambda: (asyncio.run(leave(2)), sys.exit(3)), 3),
    "an exception": (lambda: (asyncio.run(leave(2, fronts=3)), 1 / 0), 1),
    "interrupted": (lambda: asyncio.run(interrupted()), -signal.SIGINT),
    "forked": (forked, 5),
}

report = {}
for name in sys.argv[2:] or CASES:
    for _ in range(int(sys.argv[1])):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            break
        end = time.monotonic() + 30
        while not (found := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.005)
        if not found[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        report.setdefault(name, []).append(os.waitstatus_to_exitcode(found[1]) if found[0] else "hangs")
    else:
        continue
    break
else:
    print(json.dumps({name: [CASES[name][1], found] for name, found in report.items()}))
    os._exit(0)
torch.set_num_threads(1)
CASES[name][0]()
"""


def run(times: int, *names: str) -> tuple[dict[str, list], str]:
    command = [sys.executable, "-c", dedent(PROGRAM), str(times), *names]
    found = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    return json.loads(found.stdout), found.stderr


@pytest.mark.parametrize(
    ("times", "names"),
    [
        (1, ["an exception"]),
        pytest.param(4, [], marks=pytest.mark.slow),  # slow: each way to end, and that none of many ends is chance
    ],
    ids=["a few", "all"],
)
def test_the_exit_status_is_the_programs_own(times, names) -> None:
    report, errors = run(times, *names)
    assert len(report) == len(names) or not names and len(report) >= 10
    for name, (expected, found) in report.items():
        assert found == [expected] * times, (name, errors[-2000:])
    assert "terminate called" not in errors and "Fatal Python error" not in errors
