"""Objectives: losses as sums and counts. A method imports the ones that it uses."""
