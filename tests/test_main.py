"""Tests the exit status of the process `python -m fastformer`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
from fastformer.__main__ import leave
atexit.register(print, "taken apart", flush=True)
sys.stdout.write("said ")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("code", "launched", "taken_apart"), [(143, True, False), (1, True, False), (0, True, True), (143, False, True)]
)
def test_one_of_several_processes_ends_at_once_after_a_signal(code, launched, taken_apart) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"RANK": "0", "WORLD_SIZE": "2"} if launched else {}
    words = [sys.executable, "-c", SCRIPT, str(code)]
    proc = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert proc.returncode == code, proc.stderr
    assert proc.stdout.split() == ["said", *(["taken", "apart"] if taken_apart else [])]
