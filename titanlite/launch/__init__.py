"""`titanlite launch`: jobs for Slurm, Kubernetes and local machines."""
