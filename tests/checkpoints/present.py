"""The families of which the installed version of transformers has the classes."""

from __future__ import annotations

import transformers

from fastformer.checkpoints.hf import ENCODER_FORMS, FAMILIES

PRESENT = [kind for kind, family in FAMILIES.items() if hasattr(transformers, family.config_class)]
ENCODERS = [kind for kind in ENCODER_FORMS if kind in PRESENT]
