"""The examples in deploy/examples/: a model of train_configs/, and machines that its TOML file
fits.
"""

from __future__ import annotations

#: Name of the job's file → flags of `titanlite launch` without a folder.
EXAMPLES = {
    name: [
        f"--job.config_file={name}.toml",
        f"--launch.nodes={nodes}",
        f"--launch.instance_type={instance}",
    ]
    for name, nodes, instance in (
        ("llama3_1_8b", 2, "p5.48xlarge"),
        ("llama3_1_70b", 4, "p5en.48xlarge"),
    )
}
