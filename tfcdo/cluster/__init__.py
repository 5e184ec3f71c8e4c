"""The hosts of a cluster: who they are, and whether they do the same."""
