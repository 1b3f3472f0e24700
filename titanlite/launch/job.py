"""A job: a run and its machines, and the templates of `deploy/` that become its files."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict

from titanlite import exit_codes
from titanlite.config.errors import ConfigError, Problem, refuse
from titanlite.config.loaded import LoadedConfig
from titanlite.config.run_sections import Launch
from titanlite.config.toml import loads, quote
from titanlite.plan.hardware import Instance, find_instance
from titanlite.run.config import RunConfig
from titanlite.runs.provenance import config_text
from titanlite.utils import control_characters, escape_name

_TEMPLATES = Path(__file__).parents[1] / "deploy"
CONFIG = "config.toml"
#: The first line of that file begins with it. A config itself cannot name its files.
_FILES = "# job.config_file = "


class LaunchError(Exception):
    """The scheduler did not take the job."""

    exit_code = exit_codes.ERROR


class Job(NamedTuple):
    """A run and the machines that it gets."""

    run: RunConfig
    #: None: no instance type is named.
    instance: Instance | None
    #: Ranks of each machine.
    ranks: int
    #: Folder of the job's files.
    folder: Path
    #: The config files that the run is from.
    files: list[str]

    @property
    def launch(self) -> Launch:
        return self.run.launch

    @property
    def config(self) -> str:
        """The resolved config, without secrets."""
        return config_text(self.run.toml)

    @property
    def config_with_files(self) -> str:
        """The config, after a line from which `files_of_job` reads its files."""
        return f"{_FILES}{quote(self.files)}\n{self.config}"

    @property
    def name(self) -> str:
        """The name of the run folder, with characters that every scheduler takes."""
        # Many configs share the default folder.
        name = self.folder.parent.name
        if name == "outputs" and self.files:
            name = Path(self.files[0]).stem
        return re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-.") or "run"


def files_of_job(folder: Path) -> list[str] | None:
    """Return the config files of the job in a folder; None: no job there tells them."""
    with suppress(OSError, ValueError):
        line = (folder / CONFIG).read_text("utf-8").partition("\n")[0]
        if line.startswith(_FILES):
            files: list[str] = loads(line.removeprefix("# "))["job"]["config_file"]
            return files
    return None


def machine_of(config: LoadedConfig) -> tuple[Instance | None, int]:
    """Return the instance type of section [launch], and the ranks of a machine; 0: it names none.

    Raises ConfigError for an unknown type, and for one with fewer GPUs.
    """
    launch = config.sections.launch
    instance = None
    if launch.instance_type:
        instance = find_instance(launch.instance_type, config.place("launch.instance_type"))
    ranks = launch.gpus_per_node or (instance.gpus if instance else 0)
    if instance and ranks > instance.gpus and not launch.cpu:
        key = "launch.gpus_per_node"
        message = (
            f"{ranks}, but {launch.instance_type} has {instance.gpus} GPU(s): a GPU has one rank "
            "at most"
        )
        raise ConfigError([Problem("does-not-fit", key, message, where=config.place(key))])
    if instance and not launch.efa:
        instance = instance._replace(efa=0, rdma=False)
    return instance, ranks


def render(template: str, job: Job, values: Mapping[str, Any]) -> str:
    """Return a file of `deploy/` with its variables filled in; an unknown one is an error.

    Raises ConfigError for a control character: a new line would begin a statement.
    """
    # The config itself is TOML, which has its own escapes.
    given = {
        "job.dump_folder": job.run.job.dump_folder,
        "launch": asdict(job.launch),
        "the working folder": os.getcwd(),
    }
    hint = "a job has none: a new line in a value would begin a statement of the job"
    problems = []
    for place, text in _texts(given):
        if found := control_characters(text):
            message = f"has the control character {', '.join(found)}"
            problems.append(Problem("does-not-fit", escape_name(place), message, hint))
    refuse(problems)
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # YAML joins no surrogate pairs.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters |= {
        "quote": shlex.quote,
        # Slurm reads a backslash in an `#SBATCH` line as an escape also within quotes.
        "sbatch": lambda text: shlex.quote(text).replace("\\", r"\\"),
        # Kubernetes replaces `$(NAME)`; two dollars are one for it.
        "literal": lambda text: text.replace("$", "$$"),
    }
    return environment.get_template(template).render(values)


def _texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text with its place, names of entries too."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{place}.{name}" if place else str(name)
            yield inner, str(name)
            yield from _texts(item, inner)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, place)


def limit_seconds(time_limit: str) -> int | None:
    """Return the seconds of `launch.time_limit`; None: there is no limit."""
    if not time_limit:
        return None
    days, _, clock = time_limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = [0, *parts][-3:]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
