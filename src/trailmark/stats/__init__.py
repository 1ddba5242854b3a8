"""Intervals, tests and distributions."""
