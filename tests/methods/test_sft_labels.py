"""Fine-tuning trains on responses, whatever else is in the batch. (The reference masked prompts as if padding stood on
the right, and put it on the left: shorter rows of a batch were trained on their prompts.)"""

import json

import numpy as np
import pytest

from trailmark.config import LearnerConfig, ModelConfig
from trailmark.learn.learner import Learner, Update
from trailmark.methods.sft import conversation_samples
from trailmark.models.load import load_model
from trailmark.objectives.sft import Sft

ROWS = [("1+1=?\n", "#### 2"), ("12+30-7+5=? Say it step by step.\n", "12+30=42\n42-7=35\n35+5=40\n#### 40")]


@pytest.fixture
def lm():
    return load_model(ModelConfig(name="tiny", shape={"layers": 1, "width": 32, "heads": 2, "context": 128}))


def test_labels_are_the_response_and_its_end(tmp_path, lm):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in ROWS))
    found = conversation_samples(lm.tokenizer, str(path), False, 128)
    for (sample,), (prompt, response) in zip(found, ROWS):
        trained = sample.tokens[sample.streams["weight"] != 0]
        assert lm.tokenizer.decode(trained[:-1]) == response and trained[-1] == lm.tokenizer.eos_token_id
        assert lm.tokenizer.decode(sample.tokens[sample.streams["weight"] == 0]) == prompt


def test_a_short_row_beside_a_long_one_is_trained_as_if_alone(tmp_path, lm):
    """The loss of a padded batch is the mean over response tokens, and equals that of each row by itself."""
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in ROWS))
    samples = [s for row in conversation_samples(lm.tokenizer, str(path), False, 128) for s in row]
    loss = lambda part: Learner(
        {"policy": lm}, LearnerConfig.model_validate({"layout": "rows", "optim": {"lr": 0.0}}), total=1
    ).update(Update(part, Sft()))["nll"]
    counts = [s.mass["weight"] for s in samples]
    alone = [loss([s]) for s in samples]
    assert loss(samples) == pytest.approx(np.average(alone, weights=counts), rel=1e-5)
    assert alone[0] != pytest.approx(alone[1], rel=1e-3)
