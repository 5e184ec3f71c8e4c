"""Draws pictures: copy trees, transfers over time, and what the bench measured."""
