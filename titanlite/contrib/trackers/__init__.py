"""Services that track runs, beside Weights & Biases."""
