"""The device that a command or a training runs on."""

from __future__ import annotations

import torch


def choose_device(name: str, precision: str | None = None) -> torch.device:
    """Returns the device of a name. "auto" is the GPU if there is one, but the CPU for precision "int8" or "int4".

    Raises:
        ValueError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if precision not in ("int8", "int4") and torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).cpu()  # "meta" can be allocated on and holds nothing
    except (RuntimeError, AssertionError) as error:  # a build without CUDA raises an AssertionError
        raise ValueError(f"expected a device that this PyTorch can use, got {name!r}: give cpu or auto") from error
    return torch.device(name)
