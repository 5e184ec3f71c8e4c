"""Training: a step is summed once, and then each replica works alone."""
