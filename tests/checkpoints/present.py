"""What the installed version of transformers has: the classes of families, and the mistakes of older versions."""

from __future__ import annotations

import pytest
import transformers

from fastformer.checkpoints.hf import ENCODER_FORMS, FAMILIES

VERSION = tuple(int(number) for number in transformers.__version__.split(".")[:2])
PRESENT = [kind for kind, family in FAMILIES.items() if hasattr(transformers, family.config_class)]
ENCODERS = [kind for kind in ENCODER_FORMS if kind in PRESENT]


def skip_before(major: int, minor: int, why: str) -> None:
    """Skips the test that calls it if transformers is older, because that one can't compute the expected values.

    Args:
        major, minor: the first version that can.
        why: what the versions before do.
    """
    if (major, minor) > VERSION:
        pytest.skip(f"transformers before {major}.{minor} {why}")
