"""The host's part of launches: the current device, and functions of the C++ extension. It does not import Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capability_of(device: int) -> int:
    """Returns a device's compute capability, 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


class Device:
    """The current device according to PyTorch. Triton's driver is not used, because it needs a C compiler."""

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_current_stream(self, device: int) -> int:
        return int(torch._C._cuda_getCurrentRawStream(device))

    get_capability = staticmethod(capability_of)


# Tests and reports replace it to pretend that another device is present.
active: Any = Device()


def _no_function(name: str) -> Callable[..., Any] | None:
    return None


# (name) -> a function of the C++ extension, None if it lacks the function; see `use_extension`.
extension_function: Callable[[str], Callable[..., Any] | None] = _no_function


def use_extension(function: Callable[[str], Callable[..., Any] | None]) -> None:
    """Sets `extension_function`; `fastformer.ops` calls this when it is imported."""
    global extension_function
    extension_function = function
