"""Measures all-reduce implementations side by side: `tfcdo bench` without its output."""
