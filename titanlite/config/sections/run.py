"""Sections about the run around the training: where it writes, what it shows, how it is watched and launched."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from titanlite.config.sections.base import Location, Section


class Job(Section):
    """What this run is and where it writes."""

    config_file: Location | None = Field(
        default=None,
        description="The TOML file. A bare name that is not in the working directory is looked up in train_configs/.",
    )
    extends: list[str] = Field(
        default=[], description="Files this one builds on, in order; paths are relative to the file that names them."
    )
    dialect: Literal["2024", "2026"] = Field(
        default="2024",
        description='Whose defaults and models a file expects: "2026" gives it those of torchtitan 0.2.x. A file that '
        "uses a later name of an older key says so by that. Only a file can say it, not the command line.",
    )
    dump_folder: Location = Field(default="./outputs", min_length=1, description="Root of everything a run writes.")
    description: str = Field(default="", description="Logged when the run starts.")
    print_config: bool = Field(default=False, description="Print the whole resolved config when the run starts.")
    save_config_file: Location | None = Field(
        default=None,
        min_length=1,
        description="Write the whole resolved config as TOML to this file, below job.dump_folder unless absolute.",
    )
    callbacks: list[str] = Field(
        default=[],
        description='Your own callbacks, as "package.module:Name" or "./file.py:Name". A file is looked up beside the '
        "TOML file that names it, then in the working directory.",
    )
    use_for_integration_test: bool = Field(
        default=False, description="Accepted without effect; a mark for test suites."
    )


class Profiling(Section):
    """Traces of time and memory."""

    enable_profiling: bool = Field(default=False, description="torch.profiler traces, one per rank.")
    save_traces_folder: Location = Field(
        default="profile_traces", min_length=1, description="Trace folder, below job.dump_folder."
    )
    profile_freq: int = Field(
        default=10, ge=1, description="Length of a cycle in steps: wait, profiler_warmup, profiler_active."
    )
    profiler_warmup: int = Field(
        default=3, ge=0, description="Steps of a cycle in which the profiler runs without recording."
    )
    profiler_active: int = Field(default=1, ge=1, description="Steps recorded at the end of a cycle, in one trace.")
    enable_memory_snapshot: bool = Field(
        default=False,
        description="CUDA allocator history, also dumped when memory runs out; the error is raised again.",
    )
    save_memory_snapshot_folder: Location = Field(
        default="memory_snapshot", min_length=1, description="Snapshot folder, below job.dump_folder."
    )


class Metrics(Section):
    """What a person and other tools see while the run goes on."""

    log_freq: int = Field(
        default=10, ge=1, description="Log the first step of every start, the last one, and every so many."
    )
    log_style: Literal["titan", "fsdp"] = Field(
        default="titan",
        description='Step line: "titan" (step, loss, memory, tps, mfu) or "fsdp" (Batch N Loss: …, Speed: …).',
    )
    enable_color_printing: bool | None = Field(default=None, description="Colours. None: on a terminal only.")
    enable_progress: bool = Field(
        default=True,
        description="On a terminal, a table of the last steps and a progress line in place of step lines. Files and "
        'pipes get plain lines either way, and so does log_style = "fsdp".',
    )
    enable_tensorboard: bool = Field(default=False, description="Write TensorBoard events.")
    save_tb_folder: Location = Field(
        default="tb", min_length=1, description="TensorBoard folder, below job.dump_folder; a dated subfolder is added."
    )
    enable_wandb: bool = Field(
        default=False,
        description="Send what TensorBoard shows to Weights & Biases too, from rank 0; needs the package wandb. Its "
        "WANDB_* environment variables hold.",
    )
    layer_norms: int = Field(
        default=0,
        ge=0,
        description="With every so many logs, the gradient norm of each block, the embedding and the head; 0: never.",
    )
    rank_0_only: bool = Field(
        default=True,
        description="Only rank 0 writes TensorBoard events; false: every rank, each in a folder of its own. "
        "metrics.jsonl is written by rank 0 either way.",
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="Peak TFLOPS of one device, for the MFU. None: known devices only, others show no MFU.",
    )


class Debug(Section):
    """Reproducibility."""

    deterministic: bool = Field(default=False, description="Deterministic algorithms only; slower.")
    deterministic_warn_only: bool = Field(
        default=False,
        description="With debug.deterministic: warn where an operation has no deterministic form, do not stop.",
    )


class Comm(Section):
    """Collectives and their timeouts."""

    init_timeout_seconds: int = Field(
        default=300, ge=1, description="Timeout of collectives until step 1 is done, in seconds."
    )
    train_timeout_seconds: int = Field(
        default=100, ge=1, description="Timeout of collectives after step 1, in seconds."
    )
    trace_buf_size: int = Field(default=20000, ge=0, description="Collectives the flight recorder keeps; 0: off.")


class MemoryEstimation(Section):
    """An estimate of memory instead of a run."""

    enabled: bool = Field(default=False, description="Estimate the memory of the run and exit.")
    disable_fake_mode: bool = Field(default=False, description="Estimate with real tensors.")


class Guard(Section):
    """What to do about a loss or gradient that is not finite, or a spike."""

    policy: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="stop: end the run, weights untouched; skip: leave that step's update out; rollback: go back to "
        "the newest checkpoint, and on with the text after the bad step.",
    )
    max_skips: int = Field(
        default=10,
        ge=0,
        description="Steps skipped, or rollbacks, within the last window steps; one more ends the run.",
    )
    spike_sigmas: float = Field(
        default=0.0,
        ge=0,
        description="A loss so many standard deviations above the mean of the last window good ones counts as bad; 0: "
        "off.",
    )
    window: int = Field(default=100, ge=2, description="Steps of history that max_skips and spike_sigmas look at.")


class Stall(Section):
    """A watchdog over ranks that stop making progress."""

    deadline_seconds: float | None = Field(
        default=None,
        ge=0,
        description="Report where every rank is after so long without progress, less than comm.train_timeout_seconds. "
        "None: 0.6 of that; 0: only when a rank has ended. Where steps are slow it is three times the longest so far, "
        "at most 0.8 of comm.train_timeout_seconds on several ranks. Start, compilation, saves and validation have 0.6 "
        "of comm.init_timeout_seconds, or this if it is more.",
    )
    heartbeat_seconds: float = Field(
        default=2.0,
        gt=0,
        description="How often a rank says where it is, which is what is known of one that dies; at least twice in the "
        "deadline.",
    )


class Launch(Section):
    """How a job is started on a cluster."""

    nodes: int = Field(default=1, ge=1, description="Machines.")
    gpus_per_node: int | None = Field(
        default=None, ge=1, description="Accelerators of each machine. None: all of them."
    )
    instance_type: str = Field(default="", description="Kind of machine, as the cluster calls it.")
    image: str = Field(default="", description="Container image.")
    shared_dir: Location = Field(default="", description="Folder that all machines see.")
    time_limit: str = Field(default="", description="Longest run, as hours:minutes:seconds.")
    queue: str = Field(default="", description="Queue or partition.")
    environment: dict[str, str] = Field(default={}, description="Table of environment variables for every process.")
