"""The sections about the run around the training; `titanlite.config.sections` has the rest.

A class is one `[section]` of a TOML file. Only there stand a key's type, limits, default and
meaning. The text under a field is its documentation: `titanlite config explain KEY` prints it.
"""

from typing import Annotated, Literal

from msgspec import Meta, field

from titanlite.config.value_types import (
    HOME,
    Amount,
    Count,
    Duration,
    Location,
    Name,
    Natural,
    NonNegative,
    Positive,
    Section,
)


class Job(Section, frozen=True):
    """What this run is and where it writes."""

    config_file: list[str] = []
    """The TOML files, later ones over earlier ones. Bare names are also looked up in
    train_configs/.
    """
    extends: list[str] = []
    """Files this one builds on, in order; paths are relative to the file that names them."""
    dialect: Literal["2024", "2026"] = "2024"
    """Whose defaults and models a file expects. "2026": those of torchtitan 0.2.x. A file that uses
    a later name of an older key implies "2026". Only a file can set this, not the command line.
    """
    dump_folder: Location = "./outputs"
    """Root of everything a run writes."""
    description: str = ""
    """Logged when the run starts."""
    print_config: bool = False
    """Print the whole resolved config when the run starts."""
    save_config_file: Location | None = None
    """Write the whole resolved config as TOML to this file, below job.dump_folder unless absolute.
    """
    callbacks: list[str] = []
    """Callbacks to add to a run, as "package.module:Name" or "./file.py:Name", relative to the file
    that names them.
    """


class Profiling(Section, frozen=True):
    """Traces of time and memory."""

    enable_profiling: bool = False
    """torch.profiler traces, one per rank."""
    save_traces_folder: Location = "profile_traces"
    """Trace folder, below job.dump_folder."""
    profile_freq: Count = 10
    """Steps of a cycle: wait, profiler_warmup, profiler_active."""
    profiler_warmup: Natural = 3
    """Steps of a cycle in which the profiler runs without recording."""
    profiler_active: Count = 1
    """Steps recorded at the end of a cycle, in one trace."""
    enable_memory_snapshot: bool = False
    """CUDA allocator history. It is also dumped when memory runs out; the error is raised again."""
    save_memory_snapshot_folder: Location = "memory_snapshot"
    """Snapshot folder, below job.dump_folder."""


class Metrics(Section, frozen=True):
    """What a run logs and shows."""

    log_freq: Count = 10
    """Log every log_freq steps, and the first step of every start and the last one."""
    log_style: Literal["titan", "aws_fsdp"] = "titan"
    """Step line. "titan": step, loss, memory, tps, mfu. "aws_fsdp": Batch N Loss: …, Speed: …, as
    the AWS FSDP samples print it, for HyperPod's monitors.
    """
    enable_color_printing: bool | None = None
    """Colours. None: on a terminal only."""
    enable_tensorboard: bool = False
    """Write TensorBoard events."""
    save_tb_folder: Location = "tb"
    """TensorBoard folder, below job.dump_folder; a dated subfolder is added."""
    enable_wandb: bool = False
    """As trackers = ["wandb"]."""
    trackers: list[Name] = []
    """Services that get the metrics too, from rank 0: wandb, mlflow, comet, trackio, or one of
    another package. Each needs its client and reads its own environment variables. A resumed run
    continues there.
    """
    layer_norms: Natural = 0
    """With every layer_norms-th log, log the gradient norm of each block, the embedding and the
    head; 0: never.
    """
    rank_0_only: bool = True
    """Only rank 0 writes TensorBoard events; false: every rank, each in its own folder. Only rank 0
    writes metrics.jsonl in any case.
    """
    peak_tflops: Positive | None = None
    """Peak TFLOPS of one device, for the MFU. None: known devices only, others show no MFU."""

    @property
    def tracker_names(self) -> list[str]:
        """The services that get the metrics, each once."""
        first = ["wandb"] if self.enable_wandb else []
        return list(dict.fromkeys([*first, *self.trackers]))


class Eval(Section, frozen=True):
    """Tasks that measure the model while it trains."""

    tasks: list[str] = []
    """Tasks, groups and tags of lm-evaluation-harness by name (package lm-eval). None: off."""
    freq: Count = 1000
    """Run the tasks every freq steps."""
    at_end: bool = True
    """Run them after the last step too."""
    limit: Count | None = None
    """Only the first documents of each task. None: all."""
    batch_size: Count | None = None
    """Sequences at once per data-parallel rank. None: validation.batch_size."""
    ema: bool = False
    """Measure the average of the weights (optimizer.ema_decay)."""
    num_fewshot: Natural | None = None
    """Examples before each question. None: the task's own number."""
    include_path: Location | None = None
    """Folder with task files (YAML) of your own. The code that they name runs."""


class Debug(Section, frozen=True):
    """Reproducibility."""

    deterministic: bool = False
    """Deterministic algorithms only: a run repeats to the bit."""
    deterministic_warn_only: bool = False
    """With debug.deterministic: warn where an operation has no deterministic form, do not stop."""


class Comm(Section, frozen=True):
    """Collectives and their timeouts."""

    init_timeout_seconds: Count = 300
    """Timeout of collectives until step 1 is done, in seconds."""
    train_timeout_seconds: Count = 100
    """Timeout of collectives after step 1, in seconds."""
    trace_buf_size: Natural = 20000
    """Collectives that the flight recorder keeps; 0: off."""


class Guard(Section, frozen=True):
    """What to do about a loss or gradient that is not finite, or a spike."""

    policy: Literal["stop", "skip", "rollback"] = "stop"
    """stop: end the run, weights untouched. skip: make no update in that step. rollback: go back to
    the newest checkpoint, and continue with the text after the bad step.
    """
    max_skips: Natural = 10
    """Skipped steps or rollbacks within the last window steps that a run survives; one more ends
    it.
    """
    spike_sigmas: NonNegative = 0.0
    """A loss this many standard deviations above the mean of the last window good ones counts as
    bad; 0: off.
    """
    window: Annotated[int, Meta(ge=2)] = 100
    """Steps of history for max_skips and spike_sigmas."""


class Sdc(Section, frozen=True):
    """Find silent data corruption: devices, links or memory that compute wrong without an error."""

    freq: Natural = 0
    """Run the forward and backward pass of every freq-th step twice, and of the first of a start.
    Bits that differ end the run, or take it back (guard.policy = "rollback"). 0: never.
    """


class Stall(Section, frozen=True):
    """A watchdog over ranks that stop making progress."""

    deadline_seconds: NonNegative | None = None
    """Report where every rank is after so long without progress; less than
    comm.train_timeout_seconds. None: 0.6 of that; 0: only when a rank has ended. Where phases of a
    step are slow it is three times the longest so far. Start, compilation, saves and validation
    have 0.6 of comm.init_timeout_seconds, or this if it is more.
    """
    heartbeat_seconds: Positive = 2.0
    """How often a rank reports its position, the last sign of one that dies; at least twice in the
    deadline.
    """


class Launch(Section, frozen=True):
    """The job that `titanlite launch` writes for a cluster. A run itself reads only `preflight`."""

    system: Literal["", "slurm", "kubernetes"] = ""
    """Where `titanlite train` submits the job. Empty: it trains on this machine."""
    nodes: Count = 1
    """Machines."""
    spare_nodes: Natural = 0
    """Slurm: machines beyond `nodes` that replace lost ones in the same job."""
    gpus_per_node: Count | None = None
    """Ranks of each machine, one per GPU. None: those of instance_type."""
    cpu: bool = False
    """The machines have no GPUs; gpus_per_node is the number of ranks."""
    instance_type: str = ""
    """Kind of machine on AWS, as p5.48xlarge; it sets the GPUs and the variables of the network."""
    efa: bool = True
    """Use the EFA devices of instance_type."""
    image: str = ""
    """Container image. Empty: the environment of Python that launches."""
    shared_dir: Annotated[str, HOME] = ""
    """Folder that all machines see; a container mounts it. Empty: the working directory."""
    time_limit: Duration = ""
    """Longest run, as hours:minutes:seconds or days-hours. Empty: that of the queue."""
    notice_seconds: Count = 120
    """Time before the limit in which the run saves and ends."""
    max_restarts: Natural = 50
    """Starts after the first one, by time limits, preemption and lost machines."""
    queue: str = ""
    """Queue or partition. Empty: the default one."""
    environment: dict[str, str] = {}
    """Table of environment variables for every process."""
    kind: Literal["PyTorchJob", "TrainJob"] = "PyTorchJob"
    """Kubernetes: the resource, of Kubeflow's training operator or of its trainer."""
    namespace: str = ""
    """Kubernetes: namespace of the job. Empty: that of kubectl."""
    volumes: dict[str, str] = {}
    """Kubernetes: table of persistent volume claims, or paths of the nodes, and the folders at
    which pods mount them. A claim must hold job.dump_folder.
    """
    cpu_request: Annotated[str, Meta(pattern=r"^(\d+(\.\d+)?|\d+m)?$")] = ""
    """Kubernetes: CPUs that each pod asks for, as 90 or 500m. Empty: two for each rank, or one
    without GPUs. 0: none, so other pods may take them.
    """
    memory_request: Amount = ""
    """Kubernetes: memory that each pod asks for, /dev/shm included, as 1000Gi. Empty: none; such
    pods are the first to be evicted.
    """
    shm_size: Amount = ""
    """Kubernetes: largest size of /dev/shm, as 16Gi. Empty: all memory of the node."""
    labels: dict[str, str] = {}
    """Kubernetes: table of labels for the job and its pods, as "kueue.x-k8s.io/priority-class"."""
    annotations: dict[str, str] = {}
    """Kubernetes: table of annotations for the job, its job set and its pods, as those of JobSet
    and of Kueue's topologies.
    """
    token_secret: str = ""
    """Kubernetes: secret whose key `token` is the token of Hugging Face's hub."""
    preflight: bool = True
    """Compare and try the ranks before the first step: versions, code, config, dataset, devices,
    shared folder.
    """


class Ladder(Section, frozen=True):
    """Small models whose losses `titanlite ladder` fits a scaling law to. A run reads none of
    it.
    """

    sizes: list[Count] = []
    """Parameters of each model without its embedding, as [20_000_000, 40_000_000]. The nearest
    model of this file's proportions is trained. Empty: five, whose blocks have an eighth of the
    parameters of this file's, half of that, and so on.
    """
    tokens_per_parameter: Annotated[list[Positive], Meta(min_length=1)] = field(
        default_factory=lambda: [5.0, 10.0, 20.0]
    )
    """Horizons of each model, in tokens for each of those parameters. One run at a constant rate
    serves all: each horizon is a short decay from it.
    """
    decay_ratio: Annotated[float, Meta(gt=0, le=0.8)] = 0.2
    """Share of a horizon in which the learning rate falls."""
    lr_exponent: NonNegative = 1 / 3
    """Learning rate of a model of n parameters: optimizer.lr * (N / n) ** lr_exponent, N this
    file's. 0, and with mup.base_dim: the same rate.
    """
    batch_exponent: NonNegative = 2 / 3
    """Sequences of a step: those of this file * (n / N) ** batch_exponent. 0: the same."""
    seeds: Count = 1
    """Runs of each model, with training.seed and the next numbers."""
