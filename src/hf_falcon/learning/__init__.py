# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Learning while serving: a drafter is trained on what its target computes in ordinary calls.

`recorder.py` takes the features of a call, `replay_buffer.py` keeps them, `student.py` trains a copy of the drafter
with the losses of `training/`, `gate.py` decides whether the copy drafts better, `serving_weights.py` gives its
weights to the drafter, `budget.py` limits the time, `state.py` keeps it on disk, and `learner.py` ties them together.
"""
