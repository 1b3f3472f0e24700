"""The checkpoint section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from titanlite.config.sections.base import Location, Section


class Checkpoint(Section):
    """What is saved, when, and what a run starts from."""

    enable_checkpoint: bool = Field(
        default=False, description="Save checkpoints, and resume from the newest valid one."
    )
    folder: Location = Field(
        default="checkpoint",
        min_length=1,
        description="job.dump_folder/folder/step-N, unless absolute; or a URL of an object store: s3://bucket/folder.",
    )
    interval_type: Literal["steps", "seconds"] = Field(default="steps", description="Unit of interval.")
    interval: int = Field(default=500, ge=1, description="Save every so many steps (or seconds), and at the end.")
    milestones: Literal["powers_of_two"] | list[int] = Field(
        default=[],
        description="Save after these steps too, and keep them for good. powers_of_two: 1, 2, 4, 8, …; or a list.",
    )
    start: Literal["resume-or-fresh", "resume", "fresh", "from"] = Field(
        default="resume-or-fresh",
        description="resume-or-fresh: the newest valid checkpoint if there is one; resume: there must be one; "
        "fresh: there must be none; from: as resume-or-fresh, and initial_load_path must be given.",
    )
    load_step: int = Field(default=-1, ge=-1, description="Load this step. -1: the newest valid one.")
    exclude_from_loading: list[str] = Field(
        default=[],
        description="Parts that are not loaded: model, optimizer, lr_scheduler, dataloader, rng, or patterns of tensor "
        "names. What a run has saved since is loaded whole.",
    )
    allow_missing: list[str] = Field(
        default=[],
        description="Patterns of tensors of the model that a checkpoint may lack; they keep their initial values.",
    )
    allow_changes: list[Literal["model", "tokenizer", "data", "global_batch"]] = Field(
        default=[], description="What may differ from the run that wrote the checkpoint; otherwise it is refused."
    )
    initial_load_path: Location | None = Field(
        default=None,
        min_length=1,
        description="Checkpoint (step-N, or a folder or run with some: the newest good one) of any run, to start from "
        "while this one has none of its own. A folder or a URL.",
    )
    initial_load_model_only: bool = Field(
        default=True,
        description="Take only the weights from it and begin at step 0; false: go on at its step with all it holds.",
    )
    initial_load_in_hf: bool = Field(default=False, description="initial_load_path holds Hugging Face weights.")
    model_weights_only: bool = Field(
        default=False,
        description="The last save holds weights only: for use elsewhere. No run can go on from it.",
    )
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Precision of that last save."
    )
    last_save_in_hf: bool = Field(default=False, description="That last save is in Hugging Face's format.")
    create_seed_checkpoint: bool = Field(default=False, description="Save step 0 on one process, then exit.")
    enable_first_step_checkpoint: bool = Field(default=False, description="Save after step 1 too, to test the storage.")
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = Field(
        default="disabled",
        description="Write while training goes on, from a copy in host memory; with_pinned_mem: copied beside the "
        "next step's forward and backward pass, on GPUs into page-locked memory.",
    )
    keep_latest_k: int = Field(
        default=0, ge=0, description="Keep the newest k checkpoints; 0: all. Pinned ones (a file KEEP inside) stay."
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        description="With keep_latest_k, also keep each checkpoint whose step is a multiple of this; 0: none.",
    )
    keep_best: int = Field(
        default=0,
        ge=0,
        description="Save when the validation loss is among the lowest so many so far, and keep those; 0: none.",
    )
    verify: Literal["size", "hash"] = Field(
        default="hash",
        description="What is checked before a checkpoint is loaded. hash: every byte is as it was written; size: every "
        "file is there and as long as it was.",
    )
    verify_saves: bool = Field(
        default=True,
        description="Read each checkpoint back and compare it with its hashes before it gets its name and older ones "
        "go; without it, its files' lengths are compared.",
    )
