"""Draws pictures: copy trees, transfers over time, and the bench's results."""
