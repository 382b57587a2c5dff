"""Learning rates: functions of the update's number alone, so that resuming needs nothing but the number."""

from __future__ import annotations

import math

FLOOR = 0.02  # of the peak, where the linear and cosine schedules end


def learning_rate(step: int, *, schedule: str, lr: float, warmup: int, steps: int, d_model: int) -> float:
    """The learning rate of an update.

    Args:
        step: the update, from 1.
        schedule: noam: lr * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, section 5.3);
            t2t: the same as tensor2tensor has it, lr * min(1, step / warmup) * max(step, warmup)^-0.5 * d_model^-0.5,
            where lr is 2 for its `transformer_base`; linear, cosine: to FLOOR of the peak at the last step; constant.
        lr: the peak, or the factor of noam and t2t.
        warmup: updates of linear growth.
        steps: updates in all.
        d_model: width of the model.
    """
    warmup = max(warmup, 1)
    if schedule in ("noam", "t2t"):
        return float(lr * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5))
    if step <= warmup:
        return lr * step / warmup
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup) / max(steps - warmup, 1))
    if schedule == "cosine":
        return lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
    return lr * (1 - (1 - FLOOR) * progress)
