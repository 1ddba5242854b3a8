"""Evaluation, comparison and studies: results with intervals. Importing this package is fast."""
