"""Existing models on our ops: `accelerate` and its report, conversion from and to transformers' models."""

from fastformer.functional import activate as activate
from fastformer.functional import deactivate as deactivate
from fastformer.integrations.acceleration import Report as Report
from fastformer.integrations.acceleration import accelerate as accelerate
from fastformer.integrations.acceleration import report as report
from fastformer.integrations.acceleration import restore as restore
from fastformer.integrations.conversion import from_huggingface as from_huggingface
from fastformer.integrations.conversion import to_huggingface as to_huggingface
