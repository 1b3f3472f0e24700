"""Metric definitions: what SageMaker's curves read of the log."""

#: Name of the curve → pattern. SageMaker reads no number with a comma, so mfu stands for the speed.
METRICS = {
    "step": r"step: +([0-9]+) ",
    "loss": r"step: .* loss: +([0-9.]+(?:e[-+]?[0-9]+)?)",
    "grad_norm": r"grad_norm: +([0-9.]+(?:e[-+]?[0-9]+)?)",
    "learning_rate": r" lr: +([0-9.]+(?:e[-+]?[0-9]+)?)",
    "mfu": r"mfu: +([0-9.]+)%",
    "memory_gib": r"memory: +([0-9.]+)GiB",
}
