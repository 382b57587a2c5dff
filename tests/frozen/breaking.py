"""Lists changes of public names since a tag that can break a user's code, as griffe reads both sources.

    python -m tests.frozen.breaking            # since the last tag
    python -m tests.frozen.breaking v0.1.0     # since any revision of git

Exit status: 0 nothing, 1 something. Modules and names outside of the reference may change in any version, so changes
there are left out. Unlike `test_public_names.py`, which compares with files that a change may write anew, this compares
with what was released.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from griffe import Breakage, find_breaking_changes, load, load_git

ROOT = Path(__file__).parents[2]
NAMES = Path(__file__).parent / "public_names.json"


def main(arguments: list[str]) -> int:
    """Prints a line for each change."""
    revision = arguments[0] if arguments else _last_tag()
    found = [str(each.explain()) for each in breaking(revision)]
    print("\n".join(found) if found else f"nothing public has changed since {revision}")
    return 1 if found else 0


def breaking(revision: str) -> Iterator[Breakage]:
    """Returns the changes of public names since `revision`."""
    before = load_git("fastformer", ref=revision, repo=ROOT, allow_inspection=False)
    now = load("fastformer", search_paths=[str(ROOT)], allow_inspection=False)
    defined = set()
    for module, names in json.loads(NAMES.read_text(encoding="utf-8")).items():
        for name in names:
            place = f"{module}.{name}".removeprefix("fastformer.")
            try:
                defined.add(before[place].final_target.path if before[place].is_alias else before[place].path)
            except (KeyError, AttributeError):  # new since then, or made at run time
                continue
    for each in find_breaking_changes(before, now):
        path = each.obj.path
        if any(path == place or path.startswith(f"{place}.") for place in defined):
            yield each


def _last_tag() -> str:
    found = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise SystemExit("expected a tag, got a repository without one: name a revision, `breaking REVISION`")
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
