"""The hosts of a cluster, and the rules by which they decide together."""
