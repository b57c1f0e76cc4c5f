# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon doctor`: each cause is provoked and found, and a drafter that knows its texts has none."""

import copy
import math

import pytest
import torch
from eagle3_models import REFERENCES, new_eagle3, right_eagle3
from fitted_drafters import ANSWER, PREFIX, answered, deep_target, fitted, prompts
from oracle import FreeDrafting
from tiny_models import new_drafter, new_target, prompt, tiny_drafter, tiny_target
from transformers import GenerationConfig

import hf_falcon
from hf_falcon.bench import acceptance, diagnosis
from hf_falcon.bench.acceptance import Acceptance, FirstChoices, Text, decode, first_choices
from hf_falcon.bench.diagnosis import Case, Reference, Template, diagnose
from hf_falcon.core.candidate_generator import FalconCandidateGenerator
from hf_falcon.core.target_parts import CACHE_NAME, FeatureTap


def text_of(*tokens) -> Text:
    return Text(torch.tensor([[1, 2, *tokens]]), 2)


def test_acceptance_in_numbers():
    one = Acceptance([(4, 6)], 10, 16, [3, 2, 1], [text_of(3)])
    other = Acceptance([(2, 0)], 2, 8, [], [text_of(4)])
    found = Acceptance.total([one, other])
    assert (found.rounds, found.accepted_tokens, found.new_tokens, found.drafted_tokens) == (6, 6, 12, 24)
    assert found.tau == 1.0 and found.alpha == 0.5 and len(found.texts) == 2
    # 3 of 6 rounds accepted depth 1, 2 of these depth 2, 1 of these depth 3.
    assert found.acceptance_by_depth == [3 / 6, 2 / 3, 1 / 2]
    # Rounds accepted 3, 2, 1, 0, 0, 0 tokens: a variance of 14 / 6 - 1. Prompts: residuals 6 - 4 and 0 - 2.
    of_rounds, of_prompts = math.sqrt((14 / 6 - 1) / 6), math.sqrt(2 * (2**2 + 2**2)) / 6
    assert found.standard_error == pytest.approx(max(of_rounds, of_prompts)) and of_prompts > of_rounds
    assert one.standard_error == pytest.approx(math.sqrt((14 / 4 - 1.5**2) / 4))
    assert Acceptance().tau == Acceptance().standard_error == Acceptance.total([]).alpha == 0.0


def chain_of(drafter, target, input_ids: torch.Tensor, start: int) -> list[int]:
    """The chain that the candidate generator drafts behind a text, of which `start` tokens are the prompt."""
    with FeatureTap(target, drafter.config.feature_layers) as tap:
        target(input_ids)
    features, generator = tap.take(), FalconCandidateGenerator(drafter, target)
    generator.commit(features[:, :start], input_ids[:, 1 : start + 1])
    for place in range(start + 1, input_ids.shape[1]):
        generator.commit(features[:, place - 1 : place], input_ids[:, place : place + 1])
    return generator.propose(input_ids, 3).token_ids[1:].tolist()


CHAINS = {
    "linear": {"block_size": 1, "num_lstm_layers": 0},
    "blocks of two": {"block_size": 2, "feature_layers": [1, 0]},
    "conditional": {"block_size": 3, "conditioning_size": 8},
    # One pass, and each token depends on the one before.
    "dspark": None,
}


@pytest.mark.parametrize("kind", CHAINS)
@torch.no_grad()
def test_first_choices_are_the_candidate_generators(kind, monkeypatch):
    if kind == "dspark":
        drafter = hf_falcon.AutoDrafter.from_pretrained(REFERENCES / "dspark")
        sizes = {"vocab_size": drafter.config.vocab_size, "hidden_size": drafter.config.target_hidden_size}
        target = new_target(**sizes, num_hidden_layers=8)
    else:
        target = tiny_target()
        drafter = new_drafter(target, **CHAINS[kind])
    start = 6
    options = {
        "draft_top_k": 1,
        "num_assistant_tokens": 3,
        "num_draft_passes": 3,
        "assistant_confidence_threshold": 0.0,
    }
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    # A text that the drafter guesses right, but for the first token of every chain.
    input_ids = prompt(start + 1) % 40
    for _ in range(3):
        input_ids = torch.cat((input_ids, torch.tensor([chain_of(drafter, target, input_ids, start) + [7]])), dim=1)
    text, read = input_ids[0].tolist(), acceptance._read
    # A target that agrees with the text.
    monkeypatch.setattr(acceptance, "_read", lambda *arguments: (read(*arguments)[0], text[1:]))
    right = []
    for place in range(start + 1, len(text)):
        chain = chain_of(drafter, target, input_ids[:, :place], start)
        pairs = list(zip(chain, text[place:]))
        right.append(next((depth for depth, (one, other) in enumerate(pairs) if one != other), len(pairs)))
    found = first_choices(target, drafter, [Text(input_ids, start)], "", depth=3)
    assert found.hits == [count > 0 for count in right] and right.count(3) >= 3
    lengths = [min(3, len(text) - place) for place in range(start + 1, len(text))]
    for depth in range(3):
        tried = [count for count, length in zip(right, lengths) if count >= depth and length > depth]
        assert found.by_depth[depth] == (sum(count > depth for count in tried), len(tried))
    assert found.accuracy == found.accuracy_by_depth[0] == sum(found.hits) / len(found.hits)


def choices(hits: str) -> FirstChoices:
    return FirstChoices([hit == "1" for hit in hits])


def test_a_difference_must_be_more_than_chance():
    # 5 against 1: a difference of 4, and two standard errors are 2 * sqrt(6).
    assert not diagnosis.is_clearly_better(choices("11111" + "0" + "1" * 20), choices("00000" + "1" + "1" * 20))
    assert diagnosis.is_clearly_better(choices("11111" + "1" * 20), choices("00000" + "1" * 20))
    # Of many positions, 5 are too few to matter.
    assert not diagnosis.is_clearly_better(choices("11111" + "1" * 200), choices("00000" + "1" * 200))
    high, low = Acceptance([(50, 100)], by_depth=[50, 50]), Acceptance([(50, 50)], by_depth=[50])
    assert diagnosis.is_clearly_higher(high, low) and not diagnosis.is_clearly_higher(low, high)
    assert not diagnosis.is_clearly_higher(high, low, relative=0.6)
    # Prompts that differ among themselves.
    mixed = Acceptance([(50, 0), (50, 200)], by_depth=[50, 50, 50, 50])
    assert not diagnosis.is_clearly_higher(mixed, low)


def test_repetition():
    assert diagnosis.repetition([text_of(3, 4, 5, 6, 3, 4, 5, 6)]) == 1 / 5
    assert diagnosis.repetition([text_of(3, 4)]) == 0.0


@pytest.fixture(scope="module")
def texts():
    """The texts that the drafters know."""
    return [answered(deep_target(), prompts())]


@pytest.fixture(scope="module")
def eagle3(texts):
    return fitted("eagle3", texts)


@pytest.fixture(scope="module")
def falcon(texts):
    return fitted("falcon", texts, noise=0.5)


def case_of(drafter, target=None, inputs=None, **fields) -> Case:
    sets = {"known": inputs or prompts()}
    return Case(target or deep_target(), drafter, sets, max_new_tokens=ANSWER, adapt="adapt it", **fields)


@pytest.fixture(scope="module")
def healthy(eagle3):
    """A case whose measurements tests share."""
    return case_of(eagle3)


@pytest.fixture(scope="module")
def healthy_falcon(falcon):
    return case_of(falcon)


@pytest.mark.parametrize("kind", ["falcon", "eagle3"])
def test_nothing_is_found_where_nothing_is_wrong(kind, request):
    case = request.getfixturevalue("healthy" if kind == "eagle3" else "healthy_falcon")
    plain = Template("the text alone", prompts(seed=3), is_suspected=False)
    reference = Reference(case.total.tau, "after its training")
    found = diagnose(case, everyday_prompts=prompts(), templates=[plain], reference=reference)
    assert found.findings == [] and found.notes == []
    assert found.accuracy_by_depth[0] > 0.95 and found.total.tau > 0.8
    object = found.to_dict()
    assert (
        object["findings"] == [] and object["acceptance"]["tau"] == found.total.tau == object["data"]["known"]["tau"]
    )
    assert object["first_choice_accuracy_by_depth"] == found.accuracy_by_depth


def only(findings, cause: str) -> diagnosis.Finding:
    """The one finding, which has evidence and a remedy."""
    [finding] = findings if isinstance(findings, list) else [findings]
    assert finding.cause == cause and finding.summary and finding.evidence and finding.remedy
    return finding


@pytest.fixture(scope="module")
def scaled():
    """A target whose weights were changed a little."""
    target = copy.deepcopy(deep_target())
    with torch.no_grad():
        target.model.layers[0].mlp.down_proj.weight *= 1.2
    return target


def test_other_weights(eagle3, scaled):
    case = case_of(eagle3, scaled)
    finding = only([each for each in diagnose(case).findings if each.cause == "weights"], "weights")
    assert eagle3.config.target_fingerprint in finding.evidence and "a fine-tune" in finding.evidence
    assert finding.loss is None and finding.remedy.endswith("adapt the drafter to these: `adapt it`.")
    # The acceptance after the training says how much it costs.
    tau = case.total.tau
    finding = diagnosis.check_weights(case, Reference(tau + 0.5, "on held-out prompts"))
    assert finding.loss == pytest.approx(0.5) and "on held-out prompts" in finding.evidence
    assert diagnosis.check_weights(case, Reference(tau - 0.1, "on held-out prompts")).loss == 0.0
    assert diagnosis.check_weights(case, Reference(tau - 0.1, "card", is_lower_bound=True)).loss is None


def test_a_copy_of_the_same_name(eagle3, scaled, monkeypatch):
    monkeypatch.setattr(scaled, "name_or_path", "folder/My-Target")
    monkeypatch.setitem(eagle3.config.speculators_config, "verifier", {"name_or_path": "user/my-target"})
    case = case_of(eagle3, scaled)
    assert "another copy of the same name" in diagnosis.check_weights(case).evidence
    monkeypatch.setattr(scaled.config, "quantization_config", {"quant_method": "awq"}, raising=False)
    assert "a quantised copy (awq)" in diagnosis.check_weights(case).evidence
    monkeypatch.setattr(eagle3.config, "target_embedding_fingerprint", "0" * 16, raising=False)
    assert "another model, quantised (awq)" in diagnosis.check_weights(case).evidence


def test_weights_that_are_not_known(falcon, monkeypatch):
    target = copy.deepcopy(deep_target())
    case = case_of(falcon, target)
    assert diagnosis.unknown_weights(case) is None
    target.to(torch.float16)
    assert diagnosis.check_weights(case) is None and "--dtype bfloat16" in diagnosis.unknown_weights(case)
    monkeypatch.setattr(falcon.config, "target_fingerprint", None)
    monkeypatch.setattr(falcon.config, "target_name_or_path", "user/trained")
    target.config.quantization_config = {"quant_method": "gptq"}
    note = diagnosis.unknown_weights(case)
    assert diagnosis.check_weights(case) is None and "user/trained" in note and "quantised (gptq)" in note


def test_another_target(falcon):
    found = diagnose(case_of(falcon, tiny_target("qwen2")))
    finding = only(found.findings, "target")
    assert "`target_model_type` is 'llama', but the target has 'qwen2'" in finding.evidence
    assert found.acceptance == {} and found.to_dict()["acceptance"] is None


def test_layers_that_the_target_does_not_have():
    drafter = new_drafter(deep_target(), feature_layers=[0, 5])
    finding = only(diagnose(case_of(drafter, tiny_target())).findings, "target")
    assert "`feature_layers` is [0, 5]" in finding.evidence


@pytest.mark.parametrize(
    "name, reason",
    [
        ("bert", "encoder"),
        ("openai-gpt", f"takes no `{CACHE_NAME}`"),
        ("mamba", "otherwise than one by one"),
    ],
)
def test_a_target_that_is_decoded_plainly(name, reason):
    target = tiny_target(name)
    found = diagnose(case_of(tiny_drafter(target), target))
    assert reason in only(found.findings, "plain_decoding").evidence and found.acceptance == {}


@pytest.mark.parametrize("target", ["llama", "mistral-window", "gemma2", "gpt2", "llama-dynamic", "bloom", "gpt-neo"])
def test_other_targets_are_not_an_obstacle(target):
    target = tiny_target(target)
    assert diagnosis.find_obstacle(case_of(tiny_drafter(target), target)) is None


@pytest.mark.parametrize("shift", [-1, 1])
def test_eagle3_with_wrong_layers(eagle3, texts, tmp_path, shift):
    eagle3.save_pretrained(tmp_path)
    wrong = [number + shift for number in eagle3.config.eagle_aux_hidden_state_layer_ids]
    drafter = hf_falcon.AutoDrafter.from_pretrained(tmp_path, layer_ids=wrong)
    found = diagnose(case_of(drafter))
    finding = only(found.findings, "layers")
    assert finding.loss > 0.2 and "With layers [1, 2, 3] 100% are right" in finding.evidence
    # The remedy works.
    assert f'AutoDrafter.from_pretrained("{tmp_path}", layer_ids=[2, 3, 4])' in finding.remedy
    right = hf_falcon.AutoDrafter.from_pretrained(tmp_path, layer_ids=[2, 3, 4])
    assert diagnosis.check_layers(case_of(right)) is None


def test_falcon_with_wrong_layers(falcon, tmp_path):
    falcon.save_pretrained(tmp_path)
    drafter = hf_falcon.FalconDraftModel.from_pretrained(tmp_path, feature_layers=[0, 2])
    finding = only(diagnosis.check_layers(case_of(drafter)), "layers")
    assert "of layers [0, 2], counted from 0" in finding.evidence
    assert f'FalconDraftModel.from_pretrained("{tmp_path}", feature_layers=[1, 3])' in finding.remedy
    right = hf_falcon.FalconDraftModel.from_pretrained(tmp_path, feature_layers=[1, 3])
    assert right.config.feature_layers == [1, 3] and diagnosis.check_layers(case_of(right)) is None


def test_layers_to_try():
    target = new_target(num_hidden_layers=8)
    assert diagnosis.other_layers(target, new_drafter(target)) == []
    # A Falcon drafter cannot read the input of the first layer.
    assert diagnosis.other_layers(target, new_drafter(target, feature_layers=[0])) == [[1]]
    # One down, one up, and the layers that EAGLE-3 reads by default, by both ways to count.
    drafter = new_eagle3(target, eagle_aux_hidden_state_layer_ids=[1, 3, 7])
    assert drafter.config.feature_layers == [0, 2, 6]
    expected = [[-1, 1, 5], [1, 3, 7], [1, 3, 4], [2, 4, 5]]
    assert diagnosis.other_layers(target, drafter) == expected
    drafter = new_eagle3(target, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    assert diagnosis.other_layers(target, drafter) == [[0, 2, 3], [2, 4, 5]]


def test_a_drafter_of_the_hidden_state_before_the_norm(texts):
    drafter = fitted("falcon", texts, before_norm=True, feature_layers=[])
    found = diagnose(case_of(drafter))
    assert "With the hidden state before the norm 100%" in only(found.findings, "final_norm").evidence


@pytest.fixture(scope="module")
def with_prefix():
    """A case without the prefix that the drafter was trained with."""
    target, inputs = deep_target(), prompts(prefix=PREFIX)
    # Also the answers without the prefix, behind it.
    answers = answered(target, prompts())[:, inputs[0]["input_ids"].shape[1] - PREFIX.shape[1] :]
    others = torch.cat((torch.cat([each["input_ids"] for each in inputs]), answers), dim=1)
    return case_of(fitted("falcon", [answered(target, inputs), others]))


@pytest.mark.parametrize("is_suspected", [True, False])
def test_a_missing_template(with_prefix, is_suspected):
    case, inputs = with_prefix, prompts(prefix=PREFIX)
    templates = [Template("another prefix", prompts(seed=9), False), Template("a prefix", inputs, is_suspected)]
    found = diagnose(case, templates=templates)
    finding = only(found.findings, "chat_template")
    assert found.notes == [] and "another prefix" not in finding.evidence
    assert "With a prefix: " in finding.evidence and "trained with, probably a prefix. Or adapt" in finding.remedy
    assert finding.loss == pytest.approx(decode(case.target, case.drafter, inputs, ANSWER, "").tau - case.total.tau)
    assert finding.loss > 0.5


def test_other_templates_that_are_no_better(with_prefix):
    found = diagnose(with_prefix, templates=[Template("another prefix", prompts(seed=9))])
    assert found.findings == []
    assert "The chat template explains no loss." in found.notes[0] and "With another prefix: " in found.notes[0]


def test_easy_answers_of_another_template_are_no_evidence(healthy, monkeypatch):
    easy = {"other": Acceptance([(10, 30), (10, 30)], by_depth=[20, 20, 20], texts=[text_of(*[3, 4] * 12)])}
    assert diagnosis.check_templates(healthy, easy) is None
    monkeypatch.setattr(diagnosis, "_MORE_REPETITION", 1.0)
    assert only(diagnosis.check_templates(healthy, easy), "chat_template").loss > 0


def test_a_template_that_is_known_to_be_another(healthy, with_prefix):
    finding = only(diagnose(healthy, has_other_template=True).findings, "chat_template")
    assert "provenance.json" in finding.evidence and "cannot be measured" in finding.evidence and finding.loss is None
    measured = diagnosis.measure_templates(with_prefix, [Template("a prefix", prompts(prefix=PREFIX))])
    finding = diagnosis.check_templates(with_prefix, measured, has_other_template=True)
    assert "trained with, a prefix." in finding.remedy and finding.loss > 0.5


def test_a_small_draft_vocabulary():
    target, drafter = right_eagle3(draft_vocab_size=40)
    case = case_of(drafter, target, decode_token=lambda token: f"<{token}>")
    found = diagnose(case)
    finding = only(found.findings, "draft_vocabulary")
    answers = torch.cat([text.answer[0] for text in case.total.texts])
    missing = answers[~torch.isin(answers, drafter.draft_vocab_ids)]
    assert f"misses {len(missing) / len(answers):.1%}" in finding.summary and "40 of 64 tokens" in finding.evidence
    most = missing.bincount().argmax()
    assert f"'<{most}>' {missing.bincount().max()}" in finding.evidence and finding.loss > 0.1
    # The drafter is right wherever it can be.
    assert case.choices.accuracy <= 1 - len(missing) / len(answers) + 0.05


def test_sampling():
    target, drafter = right_eagle3()
    case = case_of(drafter, target)
    finding = only(diagnose(case, temperature=5.0).findings, "sampling")
    assert "temperature 5" in finding.summary and finding.loss > 0.3 and "verification=" in finding.remedy
    assert "--temperatures 5" in finding.remedy
    # Almost greedy.
    assert diagnosis.check_sampling(case, 0.01) is None


def test_another_kind_of_text(eagle3):
    case = Case(deep_target(), eagle3, {"known": prompts(), "law": prompts(seed=8)}, max_new_tokens=ANSWER)
    found = diagnose(case, everyday_prompts=prompts())
    finding = only(found.findings, "text")
    assert "The texts of law are unlike" in finding.summary and finding.loss > 0.4
    assert found.total.rounds == sum(each.rounds for each in found.acceptance.values())


def test_less_than_after_the_training(eagle3):
    case = case_of(eagle3, inputs=prompts(seed=8))
    finding = only(diagnose(case, reference=Reference(1.5, "after its training")).findings, "text")
    assert "after its training" in finding.evidence and finding.loss == pytest.approx(1.5 - case.total.tau)
    assert diagnosis.check_reference(case, Reference(case.total.tau + 0.01, "after its training")) is None


class Expensive(FreeDrafting):
    """A draft pass takes as long as ten steps of the target."""

    commit = draft_pass = 10.0


@pytest.mark.parametrize("costs, causes", [(FreeDrafting, []), (Expensive, ["cost"])])
def test_drafting_that_does_not_pay(eagle3, healthy, monkeypatch, costs, causes):
    monkeypatch.setattr("hf_falcon.core.costs.Costs", costs)
    monkeypatch.setattr(eagle3, "generation_config", GenerationConfig(num_assistant_tokens=4, num_draft_passes=2))
    found = diagnose(healthy)
    assert [each.cause for each in found.findings] == causes
    if causes:
        assert "hf-falcon tune" in only(found.findings, "cost").remedy and found.findings[0].loss == 0.0


def test_the_largest_cause_is_first(healthy, monkeypatch):
    losses = {"check_weights": 0.1, "check_layers": 0.7, "check_final_norm": None, "check_vocabulary": 0.3}
    for name, loss in losses.items():
        finding = diagnosis.Finding(name, "", "", "", loss)
        monkeypatch.setattr(diagnosis, name, lambda *arguments, finding=finding: finding)
    found = [each.cause for each in diagnose(healthy).findings]
    assert found == ["check_final_norm", "check_layers", "check_vocabulary", "check_weights"]


def test_few_rounds(eagle3):
    case = Case(deep_target(), eagle3, {"one": prompts(1)}, max_new_tokens=3)
    assert "too few for a judgement" in diagnose(case).notes[0]


def test_an_answer_of_one_token(eagle3):
    case = Case(deep_target(), eagle3, {"one": prompts(1)}, max_new_tokens=1)
    found = diagnose(case, everyday_prompts=prompts(1), templates=[Template("other", prompts(1))], temperature=1.0)
    assert found.findings == [] and len(found.notes) == 1 and found.accuracy_by_depth == []


def test_a_language_model_reads_a_text_from_its_beginning():
    """A copy of the target is always right."""
    target = tiny_target("llama")
    drafter = hf_falcon.CausalLMDrafter(new_target("llama"))
    input_ids = target.generate(prompt(6), max_new_tokens=12, do_sample=False)
    found = first_choices(target, drafter, [Text(input_ids, 6)], "", depth=2)
    assert all(found.hits) and found.accuracy_by_depth == [1.0, 1.0]
