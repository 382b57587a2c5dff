"""Models that somebody else wrote, on our ops: `accelerate` and `restore`."""

from fastformer.integrations.acceleration import Report as Report
from fastformer.integrations.acceleration import accelerate as accelerate
from fastformer.integrations.acceleration import restore as restore
