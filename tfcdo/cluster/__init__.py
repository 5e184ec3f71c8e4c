"""What the hosts of a cluster know of each other: who they are, and whether they do the same."""
