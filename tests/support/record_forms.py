# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Records in every form that is read."""

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL_DIALOGUE = [
    {"role": "user", "content": "Rain in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "no"},
    {"role": "assistant", "content": "It is dry."},
]
FORMS = {
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Sky?"},
            {"from": "gpt", "value": "Blue."},
            {"from": "human", "value": "Sea?"},
            {"from": "gpt", "value": "Green."},
        ]
    },
    "sharegpt with calls": {
        "conversations": [
            {"from": "human", "value": "Rain in Oslo?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
            {"from": "observation", "value": "no"},
            {"from": "gpt", "value": "It is dry."},
        ],
        "tools": '[{"name": "weather", "parameters": {}}]',
    },
    "messages of parts": {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Sky?"}, {"type": "text", "text": "Now."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]},
        ]
    },
    "messages with calls": {"messages": TOOL_DIALOGUE, "tools": [WEATHER]},
    "messages with reasoning": {
        "messages": [
            {"role": "user", "content": "Sky?"},
            {"role": "assistant", "content": "Blue.", "reasoning_content": "By day."},
            {"role": "user", "content": "Sea?"},
            {"role": "assistant", "content": "Green.", "reasoning_content": "Or not."},
        ]
    },
    "prompt and completion": {"prompt": "Sky?", "completion": "Blue."},
    "prompt and completion of messages": {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sky?"}],
        "completion": [{"role": "assistant", "content": "Blue."}],
    },
    "prompt and response": {"prompt": "Sky?", "response": "Blue."},
    "alpaca": {"instruction": "Translate.", "input": "Himmel", "output": "Sky."},
    "text": {"text": "The sky is blue."},
}
