"""Reads from TensorFlow's profiler what an all-reduce really did, edge by edge.

`recording` runs the profiler; `profile` makes events of what it wrote; `edges` finds tfcdo's ops
among them by their names; `summary` and `chrome` say it in words and as a Chrome trace.
"""
