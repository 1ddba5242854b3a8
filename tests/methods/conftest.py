import json
import random

import pytest


@pytest.fixture
def data(tmp_path):
    """A file of 48 scored sums: 12 prompts, each with two right answers and two wrong ones."""
    draw, rows = random.Random(0), []
    for a in range(4):
        for b in range(3):
            for k in range(4):
                c = a + b if k % 2 else draw.randrange(8, 10)
                rows.append({"prompt": f"{a}+{b}=", "response": f"so\n{c}", "reward": int(c == a + b)})
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)
