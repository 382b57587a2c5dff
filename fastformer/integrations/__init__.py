"""Models that somebody else wrote, on our ops: swapped modules, PyTorch's attention led to ours, conversion."""

from fastformer.integrations.acceleration import Report as Report
from fastformer.integrations.acceleration import accelerate as accelerate
from fastformer.integrations.acceleration import report as report
from fastformer.integrations.acceleration import restore as restore
from fastformer.integrations.conversion import from_huggingface as from_huggingface
from fastformer.integrations.conversion import to_huggingface as to_huggingface
from fastformer.integrations.sdpa import activate as activate
from fastformer.integrations.sdpa import deactivate as deactivate
