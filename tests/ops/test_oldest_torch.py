"""A PyTorch that is too old is refused by its version, not by the first name that it lacks."""

from __future__ import annotations

import pytest

from fastformer.ops._oldest_torch import check


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.11.0a0+git12ab", "3.0", "unknown"])
def test_a_version_that_is_new_enough_or_unknown_is_accepted(version: str) -> None:
    check(version)


@pytest.mark.parametrize("version", ["2.10.0+cu128", "2.9.1", "1.13.1"])
def test_an_older_version_is_refused_by_its_number(version: str) -> None:
    with pytest.raises(ImportError) as refused:
        check(version)
    assert version in str(refused.value) and "2.11" in str(refused.value)
