"""The benchmark of serving writes a row for each installed server and each number of clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.servers import OURS, requests
from benchmarks.serving import main
from tests.benchmarks.running import checked_rows
from tests.generation.small import needs_cpp


def test_requests_are_mixed_and_the_same_in_each_run() -> None:
    mixed = requests(500, lengths=range(3, 9), new_tokens=lambda length: 2 * length)
    assert mixed == requests(500, lengths=range(3, 9), new_tokens=lambda length: 2 * length)
    assert {len(request.words) for request in mixed} == set(range(3, 9))
    assert all(request.new_tokens == 2 * len(request.words) for request in mixed)
    assert all(3 <= word < 500 for request in mixed for word in request.words)


@pytest.mark.slow  # proves that servers start, answer in full and give lines of the schema; each takes seconds to start
@needs_cpp
@pytest.mark.parametrize("case", ["tiny", "llama-tiny"])
def test_every_server_writes_its_rows(case: str, tmp_path: Path) -> None:
    out = tmp_path / "serving.jsonl"
    sizes = ["--clients", "1", "3", "--rounds", "2", "--seconds", "1", "--warm_up", "0.3", "--threads", "1"]
    assert main(["--case", case, *sizes, "--out", str(out)]) == 0
    rows = checked_rows(out)
    ours = {(row["precision"], row["shape"]["clients"]): row for row in rows if row["provider"] == OURS}
    assert ours.keys() == {(precision, clients) for precision in ("int8", "fp32") for clients in (1, 3)}
    assert all(row["requests_s"] > 0 and row["ms_p50"] <= row["ms_p99"] for row in ours.values())
    others = [row for row in rows if row["provider"] != OURS]
    assert others and all("missing" in row or row["ours"] > 0 for row in others)
