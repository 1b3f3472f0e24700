"""`titanlite launch`: jobs for Slurm, Kubernetes, SageMaker and local machines."""
