"""Logical reasoning with options: questions, prompts, the answer parser, and the cleaning of solutions."""
