"""Measures all-reduce implementations side by side: `tfcdo bench` without its output.

A *workload* is a list of shapes. Each *implementation*, tfcdo's and TensorFlow's, becomes a *step*
that all-reduces the same values; *measure* times the steps interleaved, so that whatever else the
machine does hits all of them alike.
"""
