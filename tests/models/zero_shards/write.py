"""Writes the checkpoints in this folder with DeepSpeed itself, in two processes on CPU. It needs its own environment:

    python -m venv ds && ds/bin/pip install torch deepspeed==0.19.8 transformers safetensors numpy
    ds/bin/python tests/models/zero_shards/write.py tests/models/zero_shards

The model is a small Llama with what is hard to put together again: two names for one matrix (tied embeddings), a matrix
that is not trained, a buffer (zero2), five numbers for two processes (the biases), and two groups of weights.
Beside each checkpoint lie its config, and the weights as they were in memory, gathered from both processes.
"""

import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def model(name):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=320, hidden_size=4, intermediate_size=5, mlp_bias=True, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    made = LlamaForCausalLM(shape)
    made.model.layers[0].self_attn.k_proj.weight.requires_grad = False
    if name == "zero2":
        made.model.register_buffer("scale", torch.tensor([0.5, 2.0, 4.0]))
    return made


def work(rank, port, name, out):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # fmt: skip
    import deepspeed
    from safetensors.torch import save_file

    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    stage = STAGES[name]
    config = {
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    made = model(name)
    if rank == 0:
        made.config.save_pretrained(out)
    trained = [p for p in made.parameters() if p.requires_grad]
    groups = [{"params": trained[:1], "lr": 0.1}, {"params": trained[1:], "lr": 0.2}]
    engine, *_ = deepspeed.initialize(model=made, optimizer=torch.optim.AdamW(groups), config=config)
    for k in range(2):
        ids = torch.tensor([[k + rank, 3, 5], [1, 2, 6 - k]])
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(out), tag="global_step2", client_state={"consumed_samples": 8})
    truth = {}
    for key, p in made.named_parameters():
        if p.requires_grad:
            truth[key] = deepspeed.utils.safe_get_full_fp32_param(p).clone()
        elif stage == 3:
            with deepspeed.zero.GatheredParameters([p]):
                truth[key] = p.detach().float().clone()
        else:
            truth[key] = p.detach().float().clone()
    if name == "zero2":
        truth["model.scale"] = made.model.scale.detach().float().clone()
    if rank == 0:
        save_file(truth, out / "truth.safetensors")
        for program in out.glob("zero_to_*.py"):  # DeepSpeed puts a copy of its own converter there
            program.unlink()


if __name__ == "__main__":
    here = Path(sys.argv[1])
    for number, name in enumerate(STAGES):
        place = here / name
        place.mkdir(parents=True, exist_ok=True)
        mp.spawn(work, (29650 + number, name, place), nprocs=2)
