"""Examines a machine for `tfcdo doctor`: what it has, what can run there, and whether it is right.

All that needs TensorFlow runs in a process of its own (`probe`, `self_test`), which can be given up
if it hangs or crashes; this side (`examination`) asks it one thing at a time, and makes `findings`
of its `answers`.
"""
