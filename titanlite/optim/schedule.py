"""The learning rate as a pure function of the step: nothing to save, nothing to drift on resume.

Three conventions. "titan" (torchtitan, autumn 2024): with n = step - 1 steps done, the warm-up is
(n + 1) / (W + 1) and the decay reaches its floor at the schedule's end. "titan-0.2" (torchtitan 0.2.x,
components/lr_scheduler.py): the same decay after a warm-up of (n + 1) / W. "fsdp" (AWS FSDP samples): with n = step,
the warm-up is n / W, and W may be a fraction. The decay's progress is (n - W) / T, which stands still for the last W
steps, or (n - W - P) / (T - W - P) after a plateau of P steps.
"""

from __future__ import annotations

import math

from titanlite.config.plans import SchedulePlan


class ScheduleError(ValueError):
    """The schedule's numbers contradict each other."""


def _decay(kind: str, progress: float, floor: float) -> float:
    """Factor in [floor, 1] at `progress` in [0, 1] of the decay."""
    if kind == "constant":
        return 1.0
    if kind == "exponential":
        # With a floor it runs geometrically down to it; without one it halves (as the AWS samples do).
        return (floor if floor > 0 else 0.5) ** progress
    shape = {
        "linear": 1.0 - progress,
        "sqrt": 1.0 - math.sqrt(progress),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[kind]
    return floor + (1.0 - floor) * shape


def lr_factor(plan: SchedulePlan, step: int) -> float:
    """Share of the peak learning rate that step `step` (counted from 1) takes."""
    if plan.total_steps is None:
        raise ScheduleError("the schedule's length is not known yet: resolve the plans with total_sequences")
    total, warmup = plan.total_steps, plan.warmup_steps
    if plan.style == "fsdp":
        if step <= warmup:
            return step / warmup
        if plan.plateau_steps is None:
            progress = max(min(step, total - warmup) - warmup, 0) / total
        else:
            start = warmup + plan.plateau_steps
            progress = max(step - start, 0) / max(total - start, 1e-9)
        if plan.decay_type == "exponential" and not plan.min_lr_factor:
            return math.exp(-0.693 * progress)  # their 1/2 at the end, to three digits
        return _decay(plan.decay_type, min(progress, 1.0), plan.min_lr_factor)
    done = step - 1
    if done < warmup:
        return step / warmup if plan.style == "titan-0.2" else step / (warmup + 1)
    decay_steps = plan.decay_steps if plan.decay_steps is not None else total - warmup - (plan.plateau_steps or 0)
    start = total - decay_steps
    if done < start or decay_steps <= 0:
        return 1.0 if done < total else _decay(plan.decay_type, 1.0, plan.min_lr_factor)
    return _decay(plan.decay_type, min((done - start) / decay_steps, 1.0), plan.min_lr_factor)


def learning_rate(plan: SchedulePlan, peak: float, step: int) -> float:
    """Learning rate of step `step` (counted from 1); after the warm-up never below `plan.min_lr`."""
    rate = peak * lr_factor(plan, step)
    in_warmup = step <= plan.warmup_steps
    if plan.min_lr is not None and not in_warmup:
        return max(rate, plan.min_lr)
    return rate
