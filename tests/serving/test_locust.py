"""Runs the locust scenario against a server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.servers import running


@pytest.mark.slow  # proves that the scenario works against a server, and that errors end with an exit code
@pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="not installed: pip install locust")
def test_the_scenario_for_locust_runs(translator_folder: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    texts = tmp_path / "lines.txt"
    texts.write_text("two birds\n\nthe dog reads\n")

    def locust(url: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable, "-m", "locust", "-f", str(root / "benchmarks" / "locustfile.py"), "Translate",
            "StreamTranslation", "--host", url, "--headless", "-u", "4", "-r", "4", "-t", "3s", "--only-summary",
            "--exit-code-on-error", "3", "--json", "--texts", str(texts),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)

    with running(translator_folder, keys=("a-key",)) as server:
        done = locust(server.url, FASTFORMER_API_KEY="a-key")
        assert done.returncode == 0, done.stderr[-2000:]
        (found,) = json.loads(done.stdout)
        assert found["num_requests"] >= 10 and found["num_failures"] == 0
        assert locust(server.url).returncode == 3  # without the key
