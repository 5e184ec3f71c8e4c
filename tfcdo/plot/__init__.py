"""Draws pictures: copy trees, and transfers over time."""
