"""The trainer: schedules, loop, checkpoints."""
