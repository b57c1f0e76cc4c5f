# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The model card, and the commands `push`, `info`, `generate` and `chat`."""

import builtins
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from eagle3_models import REFERENCES, new_eagle3, write_original
from hub_server import TOKEN, USER, running_hub
from huggingface_hub import ModelCard
from tiny_models import hooks_of, tiny_drafter, tiny_target, tiny_tokenizer
from utilities import edit

import hf_falcon
from hf_falcon.commands import chat, generate
from hf_falcon.commands import main as entry
from hf_falcon.commands.card import MARK, render_card, write_card
from hf_falcon.cpu.packing import is_packed

SOURCE = Path(hf_falcon.__file__).parent
SHIPPED = SOURCE.parents[1] / "hub_cards"
PROVENANCE = {
    "versions": {"hf_falcon": "0.1.0", "transformers": "5.23.0", "torch": "2.13.0"},
    "target": {"name_or_path": "user/target", "fingerprint": "0123456789abcdef"},
    "data": {"tokens_sha256": "ab" * 32, "tokens": 1234567, "samples": 5396, "sources": ["user/data", "a.json"]},
    "steps": 2800,
    "tokens_seen": 7654321,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a tiny target with a tokenizer for chats, and of its drafter."""
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target("llama")
    target.save_pretrained(folder / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    tiny_drafter(target, num_assistant_tokens=9).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def trained(tmp_path):
    """What a training leaves in its folder, the weights apart."""
    (tmp_path / "provenance.json").write_text(json.dumps(PROVENANCE))
    log = [{"loss": 1.0, "step": 1}, {"final_tau": 1.2345, "final_alpha": 0.5, "step": 2}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return tmp_path


def config(**changes):
    return hf_falcon.FalconDraftConfig(**{"target_name_or_path": "user/target", "draft_vocab_size": 8192, **changes})


def test_card_of_a_trained_drafter(trained):
    rendered = render_card(config(), trained, "me/my-drafter", license="apache-2.0")
    rendered.save(trained / "README.md")
    card = ModelCard.load(trained / "README.md")
    data = card.data
    assert (data.library_name, data.license, data.base_model) == ("transformers", "apache-2.0", "user/target")
    assert data.base_model_relation == "adapter" and "speculative-decoding" in data.tags
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found == {"tau": 1.2345, "alpha": 0.5} and data.model_name == "my-drafter"
    # The Hub links data sets, and knows nothing of files.
    assert data.datasets == ["user/data"] and "from user/data, a.json" in card.text
    for text in (
        "2.23 tokens a round",
        "(tau 1.23:",
        "50.0 %",
        "2,800 steps",
        "1,234,567 tokens",
        "8,192 tokens",
        "2 LSTM layers",
    ):
        assert text in card.text, text
    assert 'custom_generate="me/my-drafter"' in card.text and 'assistant_model="me/my-drafter"' in card.text
    assert "{{" not in card.content and "{%" not in card.content
    assert "\n# my-drafter\n" in card.text


def test_card_of_an_untrained_drafter(tmp_path):
    card = render_card(config(target_name_or_path=str(tmp_path), num_lstm_layers=0), tmp_path, "drafter")
    # A folder is no repository that the Hub could link.
    assert {"base_model", "base_model_relation", "model-index", "license"}.isdisjoint(card.data.to_dict())
    assert "\n# drafter\n" in card.text and "Not measured yet." in card.text and "linear fusion" in card.text
    assert str(ModelCard(str(card))) == str(card)


def test_a_card_of_ones_own_stays(trained):
    assert write_card(config(), trained) and write_card(config(), trained)
    file = trained / "README.md"
    assert MARK in file.read_text()
    file.write_text("# mine")
    assert not write_card(config(), trained) and file.read_text() == "# mine"
    # In an encoding of its own.
    file.write_bytes(b"# m\xefne")
    assert not write_card(config(), trained) and file.read_bytes() == b"# m\xefne"


@pytest.mark.parametrize("folder", sorted(SHIPPED.glob("falcon-*")), ids=lambda folder: folder.name)
def test_shipped_cards_are_valid(folder):
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and card.data.base_model and card.data.license
    # The metadata says what the text says.
    for result in card.data.eval_results or ():
        row = next(line for line in card.text.splitlines() if line.startswith(f"| {result.dataset_name} |"))
        _, tau, alpha = (cell.strip(" %") for cell in row.strip("|").split("|")[:3])
        assert result.metric_value == (float(tau) if result.metric_type == "tau" else round(float(alpha) / 100, 3))


def test_info_of_a_folder(saved, capsys):
    assert entry.main(["info", str(saved / "drafter"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    drafter = hf_falcon.FalconDraftModel.from_pretrained(saved / "drafter")
    assert found["parameters"] == drafter.num_parameters() and found["k"] == 2 and found["vocab_size"] == 64
    assert found["bytes"] == (saved / "drafter" / "model.safetensors").stat().st_size
    assert found["tau"] is None and found["license"] is None
    assert entry.main(["info", str(saved / "drafter")]) == 0
    assert "drafts all of 64 tokens" in capsys.readouterr().out
    assert entry.main(["info", str(saved / "target")]) == 0
    printed = capsys.readouterr().out
    assert "language model" in printed and "the text alone" in printed and "drafts all of 64 tokens" in printed
    edit(saved / "target" / "config.json", architectures=["LlamaForSequenceClassification"])
    assert entry.main(["info", str(saved / "target")]) == 1
    assert "['LlamaForSequenceClassification'], which is no drafter of a known" in capsys.readouterr().err


INFO = {
    "eagle3_llama": ("speculators", "a-user/a-target", 20, [1, 3, 4]),
    "eagle3_full_vocabulary": ("speculators", "a-user/a-target", None, [1, 3, 4]),
    "eagle3_two_layers": ("speculators", "a-user/a-target", 20, [1, 3, 4]),
    "eagle3_original": ("original", None, 20, None),
    "eagle3_original_eagle_config": ("original", None, 20, [1, 3, 4]),
    "eagle3_original_binary": ("original", None, 20, None),
}


@pytest.mark.parametrize("case", INFO)
def test_info_of_an_eagle3_drafter(case, capsys, monkeypatch):
    """From its configuration and the headers of its files: no weights are read."""
    drafter = hf_falcon.AutoDrafter.from_pretrained(REFERENCES / case)
    for name in ("safetensors.torch.load_file", "torch.load", "hf_falcon.drafters.checkpoints.load_file"):
        monkeypatch.setattr(name, None)
    assert entry.main(["info", str(REFERENCES / case), "--json"]) == 0
    found, (layout, target, draft_vocab_size, layers) = json.loads(capsys.readouterr().out), INFO[case]
    assert (found["method"], found["layout"], found["k"], found["vocab_size"]) == ("EAGLE-3", layout, 1, 48)
    assert (found["target"], found["draft_vocab_size"], found["feature_layers"]) == (target, draft_vocab_size, layers)
    assert found["target_model_type"] == ("LlamaForCausalLM" if target else None)
    is_binary = case.endswith("binary")
    assert found["parameters"] == (None if is_binary else drafter.num_parameters())
    file = REFERENCES / case / ("pytorch_model.bin" if is_binary else "model.safetensors")
    # The reference's own tensors are in the folder, too.
    assert found["bytes"] == file.stat().st_size
    assert entry.main(["info", str(REFERENCES / case)]) == 0
    printed = capsys.readouterr().out
    assert "EAGLE-3" in printed and f"drafts {'all' if draft_vocab_size is None else 20} of 48 tokens" in printed
    assert ("the outputs of layers 1, 3, 4" in printed) is (layers is not None)


def test_info_of_a_damaged_file(tmp_path, capsys):
    folder = write_original(new_eagle3(tiny_target("llama")), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    assert entry.main(["info", str(folder)]) == 1
    assert "`model.safetensors` in" in capsys.readouterr().err


def test_info_of_an_empty_folder(tmp_path, capsys):
    # A push that fails leaves such a repository.
    assert entry.main(["info", str(tmp_path)]) == 1
    assert f"`{tmp_path}` has no `config.json`" in capsys.readouterr().err


def test_info_of_a_folder_that_is_not_there(tmp_path, capsys):
    assert entry.main(["info", str(tmp_path / "none")]) == 1
    assert f"`{tmp_path / 'none'}` is no folder that is there" in capsys.readouterr().err


COMMANDS = """
import sys
from hf_falcon.commands.main import main
assert main(["push", sys.argv[1], "tester/tiny", "--license", "mit"]) == 0
assert main(["info", "tester/tiny"]) == 0
assert main(["push", sys.argv[1] + "/none", "tester/tiny"]) == 1
assert main(["push", sys.argv[2], "tester/eagle3"]) == 0
assert main(["info", "tester/eagle3"]) == 0
assert main(["push", sys.argv[2], "tester/eagle3", "--license", "mit"]) == 1
"""


def test_push_and_info(saved, trained, tmp_path):
    drafter = hf_falcon.FalconDraftModel.from_pretrained(saved / "drafter")
    drafter.save_pretrained(trained)
    other = write_original(new_eagle3(tiny_target("llama"), draft_vocab_size=40), tmp_path / "eagle3")
    (other / "README.md").write_text("# mine")
    with running_hub() as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        environment |= {"PYTHONPATH": str(SOURCE.parent), "PATH": os.environ["PATH"], "HF_HUB_DISABLE_XET": "1"}
        result = subprocess.run(
            [sys.executable, "-c", COMMANDS, str(trained), str(other)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert result.returncode == 0, result.stderr[-4000:]
    # The Hub is asked whether the card is one.
    assert ("POST", "/api/validate-yaml") in hub.requests
    files = hub.repositories[f"{USER}/tiny"].files()
    assert {"README.md", "provenance.json", "model.safetensors", "decoding.py", "custom_generate/generate.py"} <= set(
        files
    )
    assert "trainer_state.json" not in files
    card = ModelCard(files["README.md"].decode())
    assert card.data.license == "mit" and 'custom_generate="tester/tiny"' in card.text
    assert f"{hub.endpoint}/tester/tiny/commit/" in result.stdout
    first, second = result.stdout.split(f"{hub.endpoint}/tester/eagle3/commit/")
    rows = {line.split()[0]: line for line in first.splitlines()}
    assert "1.2345 (held-out prompts" in rows["tau"] and "mit" in rows["license"] and "weights" in rows["size"]
    assert "is not a folder" in result.stderr
    # A drafter of another method is pushed in the layout of the package, without code. Only headers are read of it.
    files = hub.repositories[f"{USER}/eagle3"].files()
    assert set(files) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert files["README.md"] == b"# mine" and b"Eagle3Speculator" in files["config.json"]
    assert "EAGLE-3, layout of the package speculators" in second and "drafts 40 of 64 tokens" in second
    weights = [asked for asked in hub.requests if asked == ("GET", "/tester/eagle3/resolve/main/model.safetensors")]
    assert not weights and "`license` is 'mit', and this command writes no card" in result.stderr


def test_generate_is_plain_decoding(saved, capsys, monkeypatch):
    common = ["generate", "--target", str(saved / "target"), "--dtype", "float32", "--max_new_tokens", "20"]
    texts = []
    for words in (["--plain"], ["--drafter", str(saved / "drafter")]):
        assert entry.main([*common, "--prompt", "abcd", *words]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert "20 tokens, " in captured.err and ("tokens a round" in captured.err) == (words != ["--plain"])
    assert texts[0] == texts[1] and texts[0]
    monkeypatch.setattr(sys.stdin, "read", lambda: " \n", raising=False)
    assert entry.main(common) == 1
    assert "`prompt` is empty" in capsys.readouterr().err


def test_chat(saved, capsys, monkeypatch):
    """History goes along; Ctrl-C stops a reply or forgets a line, and the chat goes on."""
    lines = iter(["abc", KeyboardInterrupt(), "def", "ghi", EOFError()])

    def read(prompt):
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    put, puts = generate._Writer.put, []

    def put_or_stop(self, value):
        puts.append(len(seen))
        # In the middle of the second reply; the prompt comes first.
        if puts.count(2) == 4 and puts[-1] == 2:
            raise KeyboardInterrupt
        put(self, value)

    seen = []
    arguments = chat.ChatArguments(
        target=str(saved / "target"), drafter=str(saved / "drafter"), dtype="float32", max_new_tokens=12, system="s"
    )
    target, tokenizer, drafter = arguments.load()
    apply = tokenizer.apply_chat_template

    def spy(messages, **kwargs):
        seen.append([dict(message) for message in messages])
        return apply(messages, **kwargs)

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(generate._Writer, "put", put_or_stop)
    monkeypatch.setattr(tokenizer, "apply_chat_template", spy)
    messages = chat.converse(target, tokenizer, drafter, arguments)
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 3]
    assert [message["content"] for message in messages[1::2]] == ["abc", "def", "ghi"]
    # Each reply saw the whole conversation, the part of the stopped reply included.
    assert [len(conversation) for conversation in seen] == [2, 4, 6] and seen[2] == messages[:6]
    replies = [message["content"] for message in messages[2::2]]
    assert 0 < len(replies[1]) < 12 and all(replies)
    captured = capsys.readouterr()
    assert captured.err.count(" tokens a round, ") == 3 and captured.err.count("[stopped: 2 tokens, ") == 1
    # Where stdout is kept, it gets the text and nothing else.
    assert captured.out.split() == replies
    # No hook of the stopped reply is left in the target.
    assert hooks_of(target) == 0

    plain = generate.Reply(target, None, tokenizer, lambda text: None)
    plain.run(
        dict(apply(messages[:2], add_generation_prompt=True, return_dict=True, return_tensors="pt")),
        arguments.options(),
    )
    assert plain.text.strip() == replies[0]


def test_packed_and_compiled_models(saved, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "hf_falcon.cpu.compiling.compile_rounds", lambda target, drafter: asked.append((target, drafter))
    )
    models = {"target": str(saved / "target"), "drafter": str(saved / "drafter"), "dtype": "float32"}
    target, _, drafter = generate.GenerateArguments(**models).load()
    assert not is_packed(target) and not is_packed(drafter) and not asked
    target, _, drafter = generate.GenerateArguments(**models, pack=True, compile=True).load()
    assert is_packed(target) and is_packed(drafter) and asked == [(target, drafter)]
    target, _, drafter = generate.GenerateArguments(**models, pack=True, plain=True).load()
    assert is_packed(target) and drafter is None
    with pytest.raises(ValueError, match="`compile` is for rounds, and with `plain` there are none"):
        generate.GenerateArguments(**models, compile=True, plain=True)


def test_chat_needs_a_template(saved, capsys, monkeypatch):
    arguments = chat.ChatArguments(target=str(saved / "target"), plain=True, dtype="float32")
    target, tokenizer, drafter = arguments.load()
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        chat.converse(target, tokenizer, drafter, arguments)


class Screen(io.StringIO):
    """A terminal of some lines and columns that knows what text and the status line need."""

    def __init__(self, lines, columns):
        super().__init__()
        self.lines, self.columns = lines, columns
        self.rows = [[" "] * columns for _ in range(lines)]
        self.row, self.column, self.top, self.bottom = lines - 3, 0, 0, lines - 1
        self.saved = None
        self.gone = ""

    def isatty(self):
        return True

    def fileno(self):
        return 1

    def write(self, written):
        for sequence, code, character in re.findall(r"\x1b([78]|\[[\d;]*([A-Za-z]))|([^\x1b])", written):
            if character:
                self.put(character)
            elif sequence == "7":
                self.saved = self.row, self.column
            elif sequence == "8":
                self.row, self.column = self.saved
            else:
                numbers = [int(number) for number in sequence[1:-1].split(";") if number]
                if code == "r":
                    first, last = numbers or (1, self.lines)
                    self.top, self.bottom, self.row, self.column = first - 1, last - 1, 0, 0
                elif code == "H":
                    self.row, self.column = (number - 1 for number in numbers)
                elif code == "A":
                    self.row -= numbers[0]
                else:
                    assert sequence == "[2K"
                    self.rows[self.row] = [" "] * self.columns

    def put(self, character):
        # The cursor waits behind the last column until something follows.
        if character == "\n" or self.column == self.columns:
            self.column = 0
            if self.row == self.bottom:
                self.rows.insert(self.bottom + 1, [" "] * self.columns)
                self.gone += "".join(self.rows.pop(self.top))
            else:
                self.row = min(self.row + 1, self.lines - 1)
        if character != "\n":
            self.rows[self.row][self.column] = character
            self.column += 1

    def shown(self):
        return ["".join(row).rstrip() for row in self.rows]


def test_chat_on_a_terminal(saved, monkeypatch):
    """While a reply scrolls by, the last line says what was gained so far; then the text is there alone."""
    screen, errors, lasts = Screen(lines=6, columns=70), io.StringIO(), []
    clock, typed = itertools.count(), iter(["abc", "/exit"])
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "get_terminal_size", lambda fileno: (screen.columns, screen.lines))
    monkeypatch.setattr(chat.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(builtins, "input", lambda prompt: next(typed))
    put = generate._Writer.put

    def put_and_look(self, value):
        put(self, value)
        lasts.append(screen.shown()[-1])

    monkeypatch.setattr(generate._Writer, "put", put_and_look)
    arguments = chat.ChatArguments(
        target=str(saved / "target"), drafter=str(saved / "drafter"), dtype="float32", max_new_tokens=190
    )
    target, tokenizer, drafter = arguments.load()
    decode = tokenizer.decode
    # A streamer waits for spaces.
    words = {letter: " " if letter < "h" else "\n" for letter in "abcdefghi"}
    monkeypatch.setattr(tokenizer, "decode", lambda *a, **k: decode(*a, **k).translate(str.maketrans(words)))
    messages = chat.converse(target, tokenizer, drafter, arguments)
    assert len(lasts) == 191 and not lasts[0]
    status = re.compile(r"(\d+) tokens, [\d.]+ tokens/s, \d+\.\d\d tokens a round, ")
    counts = [int(status.match(line)[1]) for line in lasts[1:]]
    assert counts == list(range(1, 191))
    assert (screen.top, screen.bottom) == (0, screen.lines - 1) and not any(map(status.match, screen.shown()))
    found = "".join((screen.gone + "".join(screen.shown())).split())
    assert found.endswith("".join(messages[-1]["content"].split()))
    # It scrolled while the status was shown.
    assert any(lasts) and len(messages[-1]["content"].split()) > screen.lines
    # What was counted on the way is what decoding says in the end.
    words = re.fullmatch(r"\[190 tokens, .* (\d\.\d\d tokens a round, \d+ % drafted)\]\n", errors.getvalue())[1]
    assert lasts[-1].endswith(words) and "1.00 tokens" not in words


@pytest.mark.parametrize("layout", ["speculators", "original"])
def test_commands_take_drafters_of_other_methods(saved, tmp_path, capsys, monkeypatch, layout):
    """Packed and compiled, too; and in a chat."""
    drafter = new_eagle3(tiny_target("llama"))
    drafter.save_pretrained(tmp_path) if layout == "speculators" else write_original(drafter, tmp_path)
    compiled = []
    monkeypatch.setattr("hf_falcon.cpu.compiling.compile_rounds", lambda target, drafter: compiled.append(drafter))
    common = ["generate", "--target", str(saved / "target"), "--dtype", "float32", "--max_new_tokens", "20"]
    texts = []
    for words in (["--plain"], ["--drafter", str(tmp_path)], ["--drafter", str(tmp_path), "--pack", "--compile"]):
        assert entry.main([*common, "--prompt", "abcd", *words]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert ("tokens a round" in captured.err) == (words != ["--plain"])
    assert texts[0] == texts[1] == texts[2] and texts[0]
    assert [type(each) for each in compiled] == [type(drafter)] and is_packed(compiled[0])
    lines = iter(["abc", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    words = ["--target", str(saved / "target"), "--drafter", str(tmp_path), "--dtype", "float32"]
    assert entry.main(["chat", *words, "--max_new_tokens", "8"]) == 0
    assert " tokens a round, " in capsys.readouterr().err
