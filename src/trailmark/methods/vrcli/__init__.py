"""VR-CLI: a reward that needs no verifier, the likelihood of a gold text. Read `method.py` first."""
