"""The goodput of a planned run on nodes that fail: `titanlite plan --mtbf`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite.config.errors import ConfigError, Problem, bad_flag
from titanlite.plan.goodput import (
    Failures,
    Save,
    Shares,
    Tier,
    best_intervals,
    daly,
    share_without_saves,
    shares,
    young,
)
from titanlite.plan.plan import Plan, checkpoint_disk
from titanlite.runs.mtbf import CONFIDENCE, Observed, nodes_by, observed
from titanlite.runs.provenance import config_values
from titanlite.runs.read import Run, read_run
from titanlite.tools.plan.failure_options import SaveTime
from titanlite.utils import Style, counted

#: Of asynchronous saves: how many times as long steps take meanwhile, and the share of a save in
#: which no step goes on. The largest that benchmarks/results/checkpoint_saves.md measured.
SLOWDOWN = 1.60
VISIBLE = 0.025
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1}


@dataclass(frozen=True)
class Seen:
    """A run that tells of its failures."""

    folder: Path
    observed: Observed
    #: It trained the planned model on as many ranks, so its saves and restarts are those planned.
    is_alike: bool


@dataclass(frozen=True)
class Forecast:
    """What failures cost a planned run."""

    plan: Plan
    #: Mean seconds between failures of one node; the least and the most, where it was observed.
    mtbf: float
    mtbf_range: tuple[float, float]
    seen: Seen | None
    notice: float
    restart: float
    #: The most frequent first; the last is `checkpoint.folder`.
    tiers: tuple[Tier, ...]
    #: Seconds of training between two saves of each tier as the config has it; None: none there.
    intervals: tuple[float | None, ...]
    assumptions: tuple[str, ...]

    @property
    def failures(self) -> Failures:
        """Of the whole job."""
        return self.failures_at(self.mtbf)

    def failures_at(self, mtbf: float) -> Failures:
        """Return the failures of the whole job at another mean of a node."""
        return Failures(mtbf / self.plan.cluster.nodes, self.notice, self.restart)

    @property
    def best(self) -> list[float]:
        """Seconds of training between two saves of each tier."""
        return best_intervals(self.tiers, self.failures, self.step)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.plan.speed.step_seconds

    @property
    def best_shares(self) -> Shares:
        """Where the time goes with the best intervals."""
        return shares(self.tiers, self.best, self.failures)

    @property
    def best_alone(self) -> float | None:
        """The best share of useful time without the local tier; None: there is none."""
        if len(self.tiers) == 1:
            return None
        alone = [self._shared]
        return shares(alone, best_intervals(alone, self.failures, self.step), self.failures).useful

    @property
    def interval(self) -> float | None:
        """Seconds between two shared saves of the config; None: it saves nothing."""
        return self.intervals[-1]

    @property
    def _shared(self) -> Tier:
        """The last tier, as if it were the only one."""
        return Tier(self.tiers[-1].name, self.tiers[-1].save)

    @property
    def present(self) -> Shares | None:
        """Where the time goes as the config saves; None: it never does, and has no end."""
        return self.present_at(self.mtbf)

    def present_at(self, mtbf: float) -> Shares | None:
        """Return `present` at another mean of a node."""
        failures = self.failures_at(mtbf)
        every = [interval for interval in self.intervals if interval is not None]
        if self.interval is not None:
            tiers = self.tiers if len(every) == len(self.tiers) else [self._shared]
            return shares(tiers, every[-len(tiers) :], failures)
        if self.plan.seconds is None:
            return None
        useful = share_without_saves(self.plan.seconds, failures)
        return Shares(useful, 0.0, failures.paused, max(1 - useful - failures.paused, 0.0))

    @property
    def share_range(self) -> list[float] | None:
        """Share of useful time at both limits of an observed mean; None: it was told."""
        if self.seen is None:
            return None
        found = [self.present_at(value) for value in self.mtbf_range]
        return [one.useful for one in found if one is not None] or None

    def wall(self, found: Shares | None) -> float | None:
        """Return the seconds of the whole run; None: they are not known, or without an end."""
        if found is None or not found.useful or self.plan.seconds is None:
            return None
        return self.plan.seconds / found.useful

    def costs(self, found: Shares | None) -> dict[str, float | None]:
        """Return what the run needs, and loses, with such shares; None: it is not known."""
        wall = self.wall(found)
        if wall is None or found is None or self.plan.seconds is None:
            return dict.fromkeys(("hours", "failures", "lost_gpu_hours", "lost_steps", "lost_cost"))
        lost = wall - self.plan.seconds
        return {
            "hours": wall / 3600,
            "failures": wall / self.failures.mean,
            "lost_gpu_hours": lost * self.plan.run.mesh.world_size / 3600,
            "lost_steps": found.lost * wall / self.step * found.in_steps,
            "lost_cost": self.plan.price_of(lost),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as JSON has it; docs/goodput.md explains the names."""
        present = self.present
        best = self.best
        return {
            "share": present and present.useful,
            "share_range": self.share_range,
            "parts": present and asdict(present),
            **self.costs(present),
            "best": {
                "share": self.best_shares.useful,
                "share_without_local": self.best_alone,
                "parts": asdict(self.best_shares),
                **self.costs(self.best_shares),
            },
            "tiers": [self._tier(place, best[place]) for place in range(len(self.tiers))],
            "mtbf_hours": self.mtbf / 3600,
            "mtbf_hours_range": self.seen and [value / 3600 for value in self.mtbf_range],
            "job_mtbf_hours": self.failures.mean / 3600,
            "observed_failures": self.seen and self.seen.observed.failures,
            "notice_seconds": self.notice,
            "restart_seconds": self.restart,
            "assumptions": list(self.assumptions),
        }

    def _tier(self, place: int, best: float) -> dict[str, Any]:
        tier = self.tiers[place]
        interval = self.intervals[place]
        mean = self.failures.mean / tier.share
        return {
            "name": tier.name,
            "failures": tier.share,
            "save_seconds": tier.save.seconds,
            "save_visible_seconds": tier.save.visible,
            "save_cost_seconds": tier.save.cost,
            "interval_seconds": interval,
            "interval_steps": interval and interval / self.step,
            "best_seconds": best,
            "best_steps": max(round(best / self.step), 1),
            "young_seconds": young(tier.save.cost, mean),
            "daly_seconds": daly(tier.save.cost, mean),
        }


def forecast(plan: Plan, arguments: argparse.Namespace) -> Forecast:
    """Return what failures cost a plan. Raises ConfigError for numbers that are missing."""
    seen = None
    mtbf = arguments.mtbf
    limits = mtbf, mtbf
    if isinstance(mtbf, Path):
        seen = _seen(plan, mtbf)
        found = seen.observed
        limits = found.least, found.most
        mtbf = found.mtbf
    run = plan.run
    known = seen.observed if seen is not None and seen.is_alike else None
    restart: float | None = arguments.restart_time
    if restart is None and known is not None:
        restart = known.restart
    save = _save(plan, arguments, known)
    needed: dict[str, tuple[object, str]] = {
        "--restart-time": (restart, "the time from the notice of a failure to the first step"),
        "--save-time": (save, "the time of a save"),
    }
    if _saves_locally(plan):
        meaning = "the time of a save to checkpoint.local_folder"
        needed["--local-save-time"] = (arguments.local_save_time, meaning)
    _require(needed, seen)
    assert restart is not None and save is not None
    notice = arguments.notice_time or float(run.comm.train_timeout_seconds)
    tiers = _tiers(plan, arguments, save)
    return Forecast(
        plan=plan,
        mtbf=mtbf,
        mtbf_range=limits,
        seen=seen,
        notice=notice,
        restart=restart,
        tiers=tiers,
        intervals=tuple(_intervals(plan, tiers)),
        assumptions=tuple(_assumptions(arguments, tiers, notice, known)),
    )


def _seen(plan: Plan, folder: Path) -> Seen:
    """Read the run that tells of failures."""
    run = read_run(folder, partial=True)
    if not run.attempts:
        raise bad_flag("--mtbf", f"{folder} has no attempts.jsonl, so no failure is recorded")
    found = observed(run, nodes_by(plan.cluster.gpus_per_node))
    if found.mtbf is None:
        hours = found.node_seconds / 3600
        message = (
            f"{folder} saw no failure in {hours:,.3g} node hours: the mean time between failures "
            f"of a node is {found.least / 3600:,.3g} hours or more ({CONFIDENCE:.0%} sure)"
        )
        raise bad_flag("--mtbf", message, f"give a time, as {found.least / 3600:.3g}h at worst")
    return Seen(folder, found, _is_alike(plan, run))


def _is_alike(plan: Plan, run: Run) -> bool:
    """Return whether a run trained the planned model on as many ranks, and saved as planned."""
    if run.config is None or run.attempts[-1].get("ranks") != plan.run.mesh.world_size:
        return False

    def matters(config: Mapping[str, Any]) -> dict[str, Any]:
        kept = ("model.", "optimizer.name", "checkpoint.async_mode", "lora.rank")
        left_out = ("model.tokenizer_path", "model.vocab_size")
        return {
            key: value
            for key, value in config.items()
            if key.startswith(kept) and key not in left_out
        }

    return matters(run.config) == matters(config_values(plan.run.toml))


def _save(plan: Plan, arguments: argparse.Namespace, known: Observed | None) -> Save | None:
    """Return what a save costs; None: it is not known."""
    section = plan.run.checkpoint
    is_async = section.async_mode != "disabled"
    slowdown = arguments.save_slowdown or SLOWDOWN
    told: SaveTime | None = arguments.save_time
    if told is None:
        if known is None or known.save_seconds is None or known.save_visible is None:
            return None
        visible = known.save_visible
        return Save(visible, known.save_seconds - visible, slowdown if is_async else 1.0)
    seconds = told.of(checkpoint_disk(plan.run, plan.speed.step_seconds).checkpoint)
    return _written(seconds, is_async, slowdown)


def _written(seconds: float, is_async: bool, slowdown: float) -> Save:
    """Return a save that takes so many seconds in all."""
    if not is_async:
        return Save(seconds)
    return Save(VISIBLE * seconds, (1 - VISIBLE) * seconds, slowdown)


def _tiers(plan: Plan, arguments: argparse.Namespace, save: Save) -> tuple[Tier, ...]:
    """Return the tiers, the most frequent first."""
    told: SaveTime | None = arguments.local_save_time
    if told is None:
        if arguments.lost_nodes is not None:
            raise bad_flag("--lost-nodes", "is for a local tier", "give --local-save-time, too")
        return (Tier("shared", save),)
    lost: float | None = arguments.lost_nodes
    if lost is None:
        message = "is needed with --local-save-time: the share of failures that lose a node"
        hint = "after the others the processes start again on the same nodes, from local saves"
        raise bad_flag("--lost-nodes", message, hint)
    size = checkpoint_disk(plan.run, plan.speed.step_seconds).checkpoint / plan.cluster.nodes
    # Saves of both kinds are made the same way.
    is_async = plan.run.checkpoint.async_mode != "disabled"
    local = _written(told.of(size), is_async, arguments.save_slowdown or SLOWDOWN)
    return Tier("local", local, 1 - lost), Tier("shared", save, lost)


def _saves_locally(plan: Plan) -> bool:
    section = plan.run.checkpoint
    return section.enable_checkpoint and section.local_folder is not None


def _intervals(plan: Plan, tiers: Sequence[Tier]) -> Iterator[float | None]:
    """Yield the seconds of training between two saves of each tier; None: the config has none."""
    section = plan.run.checkpoint
    step = plan.speed.step_seconds
    if len(tiers) > 1:
        yield section.local_interval * step if _saves_locally(plan) else None
    if not section.enable_checkpoint:
        yield None
    elif section.interval_type == "steps":
        yield section.interval * step
    else:
        yield float(section.interval)


def _require(needed: Mapping[str, tuple[object, str]], seen: Seen | None) -> None:
    """Raise ConfigError for numbers that nobody gave."""
    problems: list[Problem] = []
    for option, (value, meaning) in needed.items():
        if value is not None:
            continue
        hint = "no plan can know it: measure it, or give --mtbf the folder of a run that has it"
        if seen is not None and not seen.is_alike:
            hint = f"{seen.folder} trained another model, or on other ranks, so its own is not used"
        elif seen is not None:
            hint = f"{seen.folder} does not tell it"
        problems += bad_flag(option, f"is needed with --mtbf: {meaning}", hint).problems
    if problems:
        raise ConfigError(problems)


def _assumptions(
    arguments: argparse.Namespace,
    tiers: Sequence[Tier],
    notice: float,
    known: Observed | None,
) -> Iterator[str]:
    """Yield a sentence for each number that nobody gave."""
    yield "failures come at any time alike; each ends all ranks; a spare node is there"
    if arguments.notice_time is None:
        yield f"a failure is noticed after {_time(notice)}: comm.train_timeout_seconds"
    save = tiers[-1].save
    if known is not None and arguments.restart_time is None:
        yield "the restart takes the median time of the run's own restarts"
    if known is not None and arguments.save_time is None:
        yield "a save takes the mean time of the run's own saves"
    elif save.hidden:
        yield f"no step goes on in {VISIBLE:.1%} of a save, measured on CPUs"
    if save.slowdown > 1 and arguments.save_slowdown is None:
        yield f"other steps take {SLOWDOWN:g} times as long while it is written, measured on CPUs"


# Text


def forecast_text(found: Forecast, style: Style) -> str:
    """Return the forecast for a terminal."""
    lines = [f"  {label:<12} {text}" for label, text in _rows(found)]
    lines.append(style.dim("  assumed of failures:"))
    lines += [style.dim(f"  - {text}") for text in found.assumptions]
    return "\n".join(lines)


def _rows(found: Forecast) -> Iterator[tuple[str, str]]:
    present = found.present
    yield "goodput", _goodput(found, present)
    yield "failures", _failures(found)
    best = found.best
    for place, tier in enumerate(found.tiers):
        yield f"{tier.name} saves", _saves(tier.save)
        interval = found.intervals[place]
        if interval is not None:
            every = max(round(interval / found.step), 1)
            yield "  now", f"every {counted(every, 'steps')} ({_time(interval)})"
        yield "  best", _best(found, tier, best[place])
    yield "best", _best_shares(found)
    costs = found.costs(present)
    if costs["hours"] is not None:
        yield "lost", _lost(costs, found.costs(found.best_shares))


def _goodput(found: Forecast, present: Shares | None) -> str:
    if present is None:
        return "checkpoints are off, and the run has no known length: no share can be told"
    text = _shares(present)
    if found.share_range is not None:
        low, high = found.share_range
        text += f"; {low:.1%} to {high:.1%} by so few failures"
    if found.interval is None:
        text += "; checkpoints are off, so each failure loses all steps"
    return text


def _shares(found: Shares) -> str:
    rest = f"saves {found.saves:.1%}, restarts {found.restarts:.1%}, lost steps {found.lost:.1%}"
    return f"{found.useful:.1%} of the time in steps that are kept; {rest}"


def _failures(found: Forecast) -> str:
    nodes = counted(found.plan.cluster.nodes, "nodes")
    text = f"one in {_time(found.failures.mean)}: one in {_time(found.mtbf)} for each of {nodes}"
    if found.seen is not None:
        low, high = map(_time, found.mtbf_range)
        failures = counted(found.seen.observed.failures, "failures")
        text += f" ({low} to {high}, {CONFIDENCE:.0%} sure, from {failures} of {found.seen.folder})"
    return text


def _saves(save: Save) -> str:
    if not save.hidden:
        return f"{_time(save.seconds)} each, without a step"
    return f"{_time(save.seconds)} each, which cost {_time(save.cost)} of steps"


def _best(found: Forecast, tier: Tier, best: float) -> str:
    """Return the best interval of a tier, with the estimates of the papers."""
    mean = found.failures.mean / tier.share
    steps = counted(max(round(best / found.step), 1), "steps")
    first = _time(young(tier.save.cost, mean))
    higher = _time(daly(tier.save.cost, mean))
    return f"every {steps} ({_time(best)}; by Young {first}, by Daly {higher})"


def _best_shares(found: Forecast) -> str:
    text = _shares(found.best_shares)
    if found.best_alone is not None:
        text += f"; without local saves {found.best_alone:.1%}"
    return text


def _lost(costs: Mapping[str, float | None], best: Mapping[str, float | None]) -> str:
    hours = costs["lost_gpu_hours"] or 0.0
    text = f"{hours:,.0f} GPU hours"
    if costs["lost_cost"] is not None:
        text += f", {costs['lost_cost']:,.0f} of cost"
    text += f", {costs['lost_steps'] or 0:,.0f} steps trained again"
    text += f", {costs['failures'] or 0:,.1f} failures in {_time(3600 * (costs['hours'] or 0))}"
    least = best["lost_gpu_hours"]
    if least is not None and least < hours:
        text += f"; at best {least:,.0f} GPU hours"
    return text


def _time(seconds: float) -> str:
    """Return a time in the largest unit of which it has two, to three digits."""
    unit = next((unit for unit, size in _UNITS.items() if seconds >= 2 * size), "s")
    number = seconds / _UNITS[unit]
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
