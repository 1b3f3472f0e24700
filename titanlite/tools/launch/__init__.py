"""`titanlite launch`: jobs for Slurm, Kubernetes, SageMaker, remote and local machines."""
