# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Faster execution on CPUs. Nothing here changes the algorithm, and nothing here travels with a drafter to the Hub: the
core runs without it, and `backend.py` plugs it into `core/interfaces.py`.

On request: `packing.py` and `packed_layouts.py` (`pack_weights`: weights in an order for products of a few rows);
`compiling.py`, `compiled_rounds.py`, `compiled_passes.py` and `compiled_code.py` (`compile_rounds`: the target's
forwards and the drafter's passes by `torch.compile`), with `lent_weights.py`, `compact_weights.py` (weights in fewer
bytes), `joined_weights.py` (weights side by side) and `tile_blocks.py` (products in the program itself, with AMX) for
compiled code; `programs.py`, `kept_programs.py`, `kept_rounds.py` and `code_digest.py` (compiled code on disk, for
later processes), and `background_builds.py` with its child process `build_kept.py` (which build that between calls).

Also on request, for exactness and not for speed, and on other devices, too: `row_invariant.py` (`row_invariant`:
forwards whose rows do not depend on their number, so that texts in 16 bits are plain decoding's), with
`uncompiled_sums.py` for compiled code.

By itself, during rounds: `skinny_gemm.py` (products of a few rows), `grouped_attention.py` (attention without copies
of keys and values, for targets with grouped-query attention), `huge_pages.py` (the memory of weights) and
`busy_cores.py` (threads that wait without computing, beside other processes).

`processor.py` says which processor it is and what it can do, `guessed_costs.py` what rounds may cost where it lacks
instructions.
"""
