"""Proofs that runs are exact and models right."""
