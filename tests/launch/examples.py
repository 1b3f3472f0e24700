"""The examples in deploy/examples/: a model of train_configs/ and machines on which its TOML file
fits as it is.
"""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    """One job."""

    config: str
    nodes: int
    instance: str

    def flags(self) -> list[str]:
        """Return the flags of `titanlite launch` without a folder."""
        return [
            f"--job.config_file={self.config}",
            f"--launch.nodes={self.nodes}",
            f"--launch.instance_type={self.instance}",
        ]


#: By name of the job's file. The memory that each needs is in the head of its TOML file.
EXAMPLES = {
    "llama2_7b": Example("llama2_7b.toml", 2, "p4d.24xlarge"),
    "llama2_13b": Example("llama2_13b.toml", 2, "g6e.48xlarge"),
    "llama2_70b": Example("llama2_70b.toml", 4, "p5.48xlarge"),
    "llama3_1_8b": Example("llama3_1_8b.toml", 2, "p5.48xlarge"),
    "llama3_1_70b": Example("llama3_1_70b.toml", 4, "p5en.48xlarge"),
    "llama3_2_1b": Example("llama3_2_1b.toml", 2, "g6e.4xlarge"),
    "llama3_2_3b": Example("llama3_2_3b.toml", 2, "g6e.24xlarge"),
    "mixtral_8x7b": Example("mixtral_8x7b.toml", 2, "p4de.24xlarge"),
    "mathstral_7b": Example("mathstral_7b.toml", 1, "p4de.24xlarge"),
}
