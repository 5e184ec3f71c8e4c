"""Examines a machine for `tfcdo doctor`: devices, available all-reduces, tests of both.

All that needs TensorFlow runs in a process of its own (`probe`, `self_test`), which can be given up
if it hangs or crashes; this side (`examination`) asks it one thing at a time, and makes `findings`
of its `answers`.
"""
