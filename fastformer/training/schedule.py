"""Learning rates: functions of the update's number alone, so that resuming needs nothing but the number."""

from __future__ import annotations

import math

from fastformer.training.config import TrainConfig

FLOOR = 0.02  # the final rate of the linear and cosine schedules, as a fraction of the peak
_JUMP = 2.0  # the factor, up or down, from which a change of the rate in a run that resumes is a surprise


def rate_of(config: TrainConfig, step: int, d_model: int) -> float:
    """Computes the learning rate of an update.

    Args:
        config: the settings. Its schedule is one of these. noam: lr * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)
            (Vaswani et al. 2017, section 5.3); t2t: the same as tensor2tensor has it, lr * min(1, step / warmup) *
            max(step, warmup)^-0.5 * d_model^-0.5, where lr is 2 for its `transformer_base`; linear, cosine: to FLOOR of
            the peak lr at the last step; constant.
        step: the update, from 1.
        d_model: width of the model.
    """
    schedule, lr, warmup = config.schedule, config.lr, max(config.warmup, 1)
    if schedule in ("noam", "t2t"):
        return float(lr * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5))
    if step <= warmup:
        return lr * step / warmup
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup) / max(config.steps - warmup, 1))
    if schedule == "cosine":
        return lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
    return lr * (1 - (1 - FLOOR) * progress)


def surprises(config: TrainConfig, d_model: int, done: int = 0, last_rate: float = 0.0) -> list[str]:
    """Describes surprises in the learning rates of a run, each with a better setting.

    Args:
        config: the settings.
        d_model: width of the model.
        done: the number of updates before this start.
        last_rate: the learning rate of the last of them.
    """
    sentences = []
    if config.warmup >= config.steps > 1 and config.lr:
        reached, peak = (rate_of(config, step, d_model) for step in (config.steps, config.warmup))
        sentences.append(
            f"the warmup of {config.warmup} updates is not over when the run ends, after {config.steps}: its rate ends "
            f"at {reached:.2e}, {100 * reached / peak:.0f} % of the peak; give --warmup {config.steps // 10}, or more "
            "steps"
        )
    if 0 < done < config.steps and last_rate:
        # The rate of the last update by these settings: a change from one update to the next is no surprise.
        before, after = rate_of(config, done, d_model), rate_of(config, done + 1, d_model)
        ratio = before / last_rate
        if not 1 / _JUMP <= ratio <= _JUMP:
            sentences.append(
                f"the rate goes from {last_rate:.2e} at update {done} to {after:.2e} at the next one, by a factor of "
                f"{after / last_rate:.3g}: schedule {config.schedule} depends on steps ({config.steps}), warmup "
                f"({config.warmup}) and lr ({config.lr:g}); to keep the rate, give --schedule constant --warmup 0 --lr "
                f"{last_rate:.3g}"
            )
    return sentences
