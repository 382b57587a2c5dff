"""Models that somebody else wrote, on our ops: swapped modules, and PyTorch's attention function led to ours."""

from fastformer.integrations.acceleration import Report as Report
from fastformer.integrations.acceleration import accelerate as accelerate
from fastformer.integrations.acceleration import restore as restore
from fastformer.integrations.sdpa import activate as activate
from fastformer.integrations.sdpa import deactivate as deactivate
