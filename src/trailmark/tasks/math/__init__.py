"""Mathematics with checked answers: GSM8K, MATH, SVAMP, ASDiv (`source.py`), and the answer checker (`check.py`)."""
