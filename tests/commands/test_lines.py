"""The lines that a command reads."""

from __future__ import annotations

import os
import select
import time

from fastformer.commands._lines import PipeLines


def test_a_long_line_of_a_pipe_takes_time_in_proportion(monkeypatch) -> None:
    left = [b"x" * (1 << 16)] * 1200 + [b"\nend"]
    monkeypatch.setattr(select, "select", lambda readers, *_: (readers, [], []))
    monkeypatch.setattr(os, "read", lambda descriptor, size: left.pop(0) if left else b"")
    lines = PipeLines(7)
    began = time.process_time()
    assert lines.get(wait=True) == b"x" * (1200 << 16)
    assert time.process_time() - began < 2  # about 0.1; copying the line for each piece takes over 10
    assert lines.get(wait=True) == b"end"
