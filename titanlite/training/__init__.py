"""What accompanies the loop: validation, bad steps, generation, callbacks of every run."""
