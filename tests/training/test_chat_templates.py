# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompts and responses by the target's chat template: texts as they should be, and what is the assistant's."""

import json
from pathlib import Path

import pytest
import torch
from chat_templates import QWEN_CODER, SMOLLM2, TEMPLATES, THINKING, character_tokenizer
from record_forms import FORMS, TOOL_DIALOGUE, WEATHER
from tiny_models import new_target, tiny_tokenizer

from hf_falcon.training.chat_templates import ChatTemplate, chat_inputs, other_variables, template_variables
from hf_falcon.training.prepare import PrepareArguments, prepare
from hf_falcon.training.records import RecordError, read_record

# Read by eye, once. Those of the first two templates were also compared with the targets' own.
GOLDEN = json.loads((Path(__file__).parent / "golden_renderings.json").read_text())


def target(template):
    tokenizer = character_tokenizer(template)
    eos = tokenizer.eos_token_id
    return new_target(vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=eos), tokenizer


@pytest.fixture
def samples(tmp_path):
    def make(records, template, **options):
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
        defaults = {"responses": "data", "turns": "all", "max_prompt_tokens": 2000, "max_new_tokens": 500}
        output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        data, output = str(tmp_path / "data.jsonl"), str(output)
        model, tokenizer = target(template)
        file = prepare(PrepareArguments(**{**defaults, "data": data, "output": output, **options}), model, tokenizer)
        texts = [
            ["".join(tokenizer.convert_ids_to_tokens(part.tolist())) for part in (ids[:length], ids[length:])]
            for ids, length in map(file.sample, range(len(file)))
        ]
        return texts, file

    return make


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*TEMPLATES, "thinking without thinking"])
def test_golden_renderings(samples, form, name):
    template = TEMPLATES[name.removesuffix(" without thinking")]
    variables = {"enable_thinking": False} if "without" in name else None
    expected = GOLDEN[form][name]
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            samples([FORMS[form]], template, chat_template_kwargs=variables, max_bad_share=1)
    else:
        assert samples([FORMS[form]], template, chat_template_kwargs=variables)[0] == expected


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("record", "answers"),
    [
        (FORMS["sharegpt"], ["Blue.", "Green."]),
        (FORMS["prompt and completion of messages"], ["Blue."]),
        (
            {"messages": [{"role": role, "content": f"{role}."} for role in ("user", "assistant") * 3]},
            ["assistant."] * 3,
        ),
    ],
)
def test_the_assistant_s_tokens_are_those_of_trl(samples, record, answers):
    """
    `assistant_only_loss` of trl's SFTTrainer (1.16) asks transformers for `return_assistant_tokens_mask`, and learns
    the tokens whose mask is 1: all answers of a dialogue together.
    """
    messages = read_record(record, "").messages
    tokenizer = character_tokenizer(MARKED)
    whole = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    labels = [token if mask else -100 for token, mask in zip(whole["input_ids"], whole["assistant_masks"])]
    _, file = samples([record], MARKED)
    found = [-100] * len(labels)
    for index in range(len(file)):
        ids, length = file.sample(index)
        assert ids.tolist() == whole["input_ids"][: len(ids)]
        found[length : len(ids)] = ids[length:].tolist()
    assert found == labels
    # Each answer, and the marker behind it.
    learnt = tokenizer.convert_ids_to_tokens([token for token in labels if token != -100])
    assert "".join(learnt) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_marks_decide_where_the_prompt_is_not_the_beginning():
    """A template whose generation prompt has a word that a past answer has not."""
    template = MARKED.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n(thinks){% endif %}")
    messages = [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]
    found = ChatTemplate(character_tokenizer(template)).response(messages, None, "")
    assert found == ("<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n", "Blue.<|im_end|>")
    # Without marks, the text and EOS, behind the prompt of `generate`.
    template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    found = ChatTemplate(character_tokenizer(template)).response(messages, None, "")
    assert found == ("<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n(thinks)", "Blue.<|im_end|>")
    # What only the template can write is not guessed.
    messages[1]["tool_calls"] = []
    assert ChatTemplate(character_tokenizer(template)).response(messages, None, "") is None


def test_what_the_prompt_has_of_a_marked_answer_is_not_the_response():
    template = THINKING.replace("{%- if loop.last %}", "{%- generation %}{%- if loop.last %}").replace(
        "+ called(message) + '<|im_end|>\\n' }}", "+ called(message) + '<|im_end|>\\n' }}{%- endgeneration %}"
    )
    messages = [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]
    thought = "<think>\n\n</think>\n\n"
    for variables, prompt, response in (({}, "", thought), ({"enable_thinking": False}, thought, "")):
        found = ChatTemplate(character_tokenizer(template), None, variables).response(messages, None, "")
        begin = "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
        assert found == (begin + prompt, f"{response}Blue.<|im_end|>\n")


def test_templates_for_tools_and_for_all_else():
    tokenizer = character_tokenizer(SMOLLM2)
    tokenizer.chat_template = {"default": SMOLLM2, "tool_use": QWEN_CODER}
    template = ChatTemplate(tokenizer)
    assert template.ignores("tool_calls") and not template.ignores("tool_calls", [WEATHER])
    messages = read_record({"messages": TOOL_DIALOGUE}, "").messages
    assert '<tool_call>\n{"name": "weather"' in template.prompt(messages, [WEATHER], "")


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ messages[0].content + 1 }}", "{{ messages[7].x.y }}", "{% if %}"]
)
def test_a_template_that_refuses(source):
    with pytest.raises(
        RecordError, match=r"file, record 3: The chat template refuses messages of the roles \['user'\]"
    ):
        ChatTemplate(character_tokenizer(source)).prompt([{"role": "user", "content": "a"}], None, "file, record 3")


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="The prompt '' has no tokens: leave it out, or write one"):
        chat_inputs(tiny_tokenizer(), [{"role": "user", "content": ""}], torch.device("cpu"))


@pytest.mark.parametrize(
    "given", ["{", "[1]", "5", '{"tools": []}', {"chat_template": "x"}, {"messages": []}, "[" * 99]
)
def test_variables_that_are_none(given):
    with pytest.raises(ValueError, match="`chat_template_kwargs` is"):
        template_variables(given)


def test_variables():
    assert template_variables(None) == {}
    assert template_variables('{"enable_thinking": false}') == {"enable_thinking": False}
    assert other_variables(None, {"a": 1}) is None and other_variables({"a": 1}, {"a": 1}) is None
    assert '`chat_template_kwargs` {"a": 1}, and this call has {}' in other_variables({"a": 1}, {})
    # Of a stranger's drafter.
    assert len(other_variables({"a": "x" * 10_000}, {})) < 300


def test_variables_are_kept_in_the_token_file(samples):
    _, file = samples([FORMS["alpaca"]], THINKING, chat_template_kwargs='{"enable_thinking": false}')
    assert file.metadata["chat_template_kwargs"] == {"enable_thinking": False}
    assert samples([FORMS["alpaca"]], THINKING)[1].metadata["chat_template_kwargs"] == {}


def test_what_a_template_leaves_out_is_said(samples, caplog):
    records = [FORMS["messages with reasoning"], {**FORMS["alpaca"], "tools": [WEATHER]}]
    samples(records, SMOLLM2)
    assert "1 dialogues have `reasoning_content`, which the chat template does not read" in caplog.text
    assert "1 dialogues have `tools`, which the chat template does not read" in caplog.text
    caplog.clear()
    samples(records, THINKING)
    assert "does not read" not in caplog.text


def prompts(samples, records, template, **options):
    return [prompt for prompt, _ in samples(records, template, responses="target", max_new_tokens=4, **options)[0]]


def test_calls_and_results_before_the_target_s_answer(samples):
    """The target writes a call of its own, and then an answer to the result of the data's call."""
    expected = [prompt for prompt, _ in GOLDEN["messages with calls"]["qwen_coder"]]
    for turns in ("first", "all"):
        for history in ("data", "target"):
            record = FORMS["messages with calls"]
            assert prompts(samples, [record], QWEN_CODER, turns=turns, history=history) == expected
    assert prompts(samples, [FORMS["messages with calls"]], QWEN_CODER, history="none") == expected[:1]


def test_history_of_the_data(samples):
    expected = [prompt for prompt, _ in GOLDEN["sharegpt"]["smollm2"]]
    assert prompts(samples, [FORMS["sharegpt"]], SMOLLM2) == expected


def test_history_of_the_target(samples):
    """Each later prompt has what the target answered to the prompts before it, not what the data has."""
    first = [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]
    later = [*TOOL_DIALOGUE, {"role": "user", "content": "Snow?"}, {"role": "assistant", "content": "No."}]
    records = [
        {"messages": first + later, "tools": [WEATHER]},
        {"messages": first + [first[0]]},
        {"turns": ["a", "b"]},
    ]
    texts, file = samples(
        records, QWEN_CODER, responses="target", history="target", temperatures=[0.0], max_new_tokens=5, batch_size=2
    )
    answers = dict(texts)

    def answer(prompt):
        return answers[prompt].replace("<|im_end|>", "").replace("<|im_start|>", "").replace("<unk>", "")

    tools = "\n\n<tools>\n" + json.dumps(WEATHER) + "\n</tools>"
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    call = f"<|im_start|>assistant\n{call}<|im_end|>\n"
    result = "<|im_start|>user\n<tool_response>\nno\n</tool_response><|im_end|>\n"
    end, asks = "<|im_start|>assistant\n", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nYou are Qwen{}<|im_end|>\n"

    expected, then = [], []
    for given, turns in ((tools, ["Sky?", "Rain in Oslo?", "Snow?"]), ("", ["Sky?", "Sky?"]), ("", ["a", "b"])):
        prompt, rounds = system.format(given), []
        for number, turn in enumerate(turns):
            prompt += asks.format(turn)
            rounds.append([prompt])
            if turn == "Rain in Oslo?":
                prompt = prompt.removesuffix(end) + call + result + end
                rounds[-1].append(prompt)
            if number + 1 < len(turns):
                prompt += f"{answer(prompt)}<|im_end|>\n"
        then.append(rounds)
    for number in range(3):
        expected += [prompt for rounds in then for prompt in (rounds[number] if number < len(rounds) else [])]
    assert [prompt for prompt, _ in texts] == expected
    assert file.metadata["plan"]["history"] == "target" and file.metadata["dropped"] == {}
