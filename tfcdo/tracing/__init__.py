"""Reads the copies of an all-reduce, edge by edge, from TensorFlow's profiler.

`recording` runs the profiler; `profile` makes events of what it wrote; `edges` finds tfcdo's ops
among them by their names; `summary` and `chrome` say it in words and as a Chrome trace.
"""
