"""When rows end for other reasons than EOS: functions of the caller's, called as Hugging Face's are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastformer.generation.config import StoppingCriterion
from fastformer.generation.search import Stop


def make_stop(
    criteria: StoppingCriterion | Sequence[StoppingCriterion], prompt: Sequence[int], device: torch.device
) -> Stop | None:
    """What asks the caller's criteria about rows of new tokens; None where there are no criteria.

    A criterion is called as Hugging Face's are: `criterion(input_ids, scores)` with the ids of some rows of one
    request, (rows, length), the start token or the prompt and the latest token included. The scores are None. It says
    of each row whether it ends here, as (rows,) booleans, or of all rows at once as one boolean. A row ends where any
    criterion says so. A beam that ends there counts as one that ends in EOS.

    Args:
        criteria: see above.
        prompt: the ids that stand before the first new one.
        device: of what they get.
    """
    functions = [criteria] if callable(criteria) else criteria
    if not functions:
        return None
    before = list(prompt)

    def stop(rows: Sequence[Sequence[int]]) -> list[bool]:
        input_ids = torch.tensor([[*before, *row] for row in rows], dtype=torch.long, device=device)
        ends = [False] * len(rows)
        for criterion in functions:
            found = _checked(criterion(input_ids, None), len(rows), criterion)
            ends = [one or other for one, other in zip(ends, found, strict=True)]
        return ends

    return stop


def any_of(*stops: Stop | None) -> Stop | None:
    """Ends rows where any of some does; None where none is one."""
    given = [stop for stop in stops if stop is not None]
    if len(given) < 2:
        return given[0] if given else None
    return lambda rows: [any(ends) for ends in zip(*(stop(rows) for stop in given), strict=True)]


def _checked(found: Any, count: int, criterion: object) -> list[bool]:
    if isinstance(found, bool):
        return [found] * count
    values = found.tolist() if isinstance(found, Tensor) or hasattr(found, "tolist") else found
    if isinstance(values, bool):
        return [values] * count
    if isinstance(values, list) and len(values) == count and all(isinstance(value, bool) for value in values):
        return values
    name = getattr(criterion, "__name__", type(criterion).__name__)
    raise ValueError(
        f"expected a stopping criterion to give a boolean, or {count} of them, got {found!r:.60} from {name}"
    )
