"""The `tfcdo` command: click, rich and the like are imported here and nowhere else."""
