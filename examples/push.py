# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Pushes a drafter with its code to the Hub, and loads it from there.

    python examples/push.py runs/example/drafter user/my-drafter

Hardware: any; needs `hf auth login`, or the token in HF_TOKEN.
Minutes: under one, plus the upload of the weights.
Expected: the address of the commit and "loaded from the Hub". The repository is private: publish it in its settings.

`hf-falcon push FOLDER NAME` does the same, and also writes the model card.
"""

import sys

import torch

from hf_falcon import FalconDraftModel


def main() -> None:
    folder, name = sys.argv[1:]
    drafter = FalconDraftModel.from_pretrained(folder)
    print(drafter.push_to_hub(name, private=True))
    loaded = FalconDraftModel.from_pretrained(name).state_dict()
    assert all(torch.equal(loaded[weight], value) for weight, value in drafter.state_dict().items())
    print("loaded from the Hub")


if __name__ == "__main__":
    main()
