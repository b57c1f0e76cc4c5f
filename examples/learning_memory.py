# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Calls with a drafter that learns, on a small random target: prints the memory of the process, the texts in the buffer,
and the live tensors.

    python examples/learning_memory.py --calls 2000

Hardware: 1 CPU core
Minutes: 2
Expected: nothing grows once the buffer is full
"""

import argparse
import gc
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hf_falcon import FalconDraftConfig, FalconDraftModel, Learner, LearningOptions


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--every", type=int, default=250, help="calls between two lines")
    parser.add_argument("--memory", type=float, default=0.5, help="megabytes of texts that the buffer may have")
    arguments = parser.parse_args()
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=256, eos_token_id=None, pad_token_id=0, **sizes)
    target = LlamaForCausalLM(config).eval()
    drafter = FalconDraftModel(FalconDraftConfig.from_target(target, block_size=1, num_lstm_layers=0)).eval()
    options = LearningOptions(memory=arguments.memory, idle_share=0.0, step_tokens=64)
    rows: list[dict[str, float]] = []
    print("calls  steps  texts in MB  tensors  their MB  process in MB")
    with Learner(drafter, target, options) as learner:
        for done in range(arguments.calls + 1):
            if done % arguments.every == 0:
                rows.append({"calls": done, "steps": learner.statistics.steps, **memory(learner)})
                print("{:5}  {:5}  {:11.2f}  {:7}  {:8.2f}  {:13.0f}".format(*rows[-1].values()), flush=True)
            if done < arguments.calls:
                prompt = torch.randint(1, 64, (1, int(torch.randint(4, 60, ()))))
                target.generate(prompt, assistant_model=drafter, max_new_tokens=16, do_sample=False)
    return rows


def memory(learner: Learner) -> dict[str, float]:
    """Megabytes of the buffer's texts, live tensors and their megabytes, and, on Linux, those of the process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    resident = [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")]
    return {
        "texts": learner.statistics.memory / 2**20,
        "tensors": len(tensors),
        "tensor_megabytes": sum(each.nbytes for each in tensors) / 2**20,
        "resident": resident[0] if resident else float("nan"),
    }


if __name__ == "__main__":
    main()
