"""Commands on configs, data, checkpoints and runs."""
