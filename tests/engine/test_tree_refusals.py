"""Trees that can't be drafted or verified are refused, with the argument's name and a way out."""

import pytest
from tiny_models import ScriptedDrafter
from transformers import AutoModelForCausalLM, Lfm2Config

import hf_specdec


@pytest.fixture
def refused(target, make_speculator, prompts):
    """``refused(match, **kwargs)``: generate raises, and no forward has run."""

    def check(match, model=target, **kwargs):
        forwards = []
        handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
        kwargs.setdefault("assistant_model", make_speculator())
        try:
            with pytest.raises(ValueError, match=match):
                model.generate(**{"max_new_tokens": 5, **prompts(1), **kwargs})
        finally:
            handle.remove()
        assert not forwards

    return check


@pytest.fixture
def recurrent():
    config = Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_drafter_of_chains(refused):
    drafter = ScriptedDrafter([[3] * 9])
    refused(
        "num_tree_nodes=4: ScriptedDrafter drafts chains only; trees come from MLP speculators. "
        "Leave it out",
        assistant_model=drafter,
        num_tree_nodes=4,
    )


def test_a_recurrent_target(refused, recurrent):
    refused("num_tree_nodes=4: the target Lfm2ForCausalLM has recurrent layers", recurrent,
            num_tree_nodes=4)  # fmt: skip


def test_a_tree_deeper_than_the_speculator(refused):
    tree = "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]"
    refused(
        r"speculative_token_tree='.*' is 5 tokens deep, but this assistant_model can draft 4",
        speculative_token_tree=tree,
    )


def test_more_children_than_tokens(refused, make_speculator):
    drafter = make_speculator(draft_vocab_size=6)
    refused(
        r"speculative_token_tree=.* has a node with 7 children, but this assistant_model knows 6",
        assistant_model=drafter,
        speculative_token_tree=[(k,) for k in range(7)],
    )


def test_a_confidence_threshold(refused):
    refused(
        "num_tree_nodes=4 and assistant_confidence_threshold=0.3 don't go together",
        num_tree_nodes=4,
        assistant_confidence_threshold=0.3,
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_tree_nodes": -2}, "num_tree_nodes=-2 must be an integer from 0 to 256"),
        ({"speculative_token_tree": "best"}, "speculative_token_tree='best' must be a list"),
        (
            {"num_tree_nodes": 3, "speculative_token_tree": "checkpoint"},
            "speculative_token_tree='checkpoint' and num_tree_nodes=3 both say",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_words_that_mean_nothing(arguments, match, refused):
    refused(match, **arguments)
    refused(match, speculative_config=arguments)


def test_attach_refuses_what_a_call_would(target, make_speculator, recurrent):
    config = {"model": make_speculator(), "num_tree_nodes": 6}
    with pytest.raises(ValueError, match="recurrent layers"):
        hf_specdec.attach(recurrent, config)
    drafter = ScriptedDrafter([[3] * 9])
    with pytest.raises(ValueError, match="drafts chains only"):
        hf_specdec.attach(target, {"model": drafter, "speculative_token_tree": "[(0,), (1,)]"})


def test_an_attached_tree_is_drafted(target, make_speculator, prompts):
    config = {"model": make_speculator(), "speculative-token-tree": "[(0,), (1,), (0, 0)]"}
    hf_specdec.attach(target, config)
    try:
        arguments = {"max_new_tokens": 8, "return_dict_in_generate": True, "do_sample": False}
        stats = target.generate(**prompts(1), **arguments).speculation
        assert 2 * stats.num_drafts < stats.num_tree_nodes <= 3 * stats.num_drafts
        chains = target.generate(**prompts(1), **arguments, num_tree_nodes=0).speculation
        assert chains.num_tree_nodes == 0
        other = target.generate(**prompts(1), **arguments, num_tree_nodes=9).speculation
        assert other.num_tree_nodes > 8 * other.num_drafts
    finally:
        hf_specdec.detach(target)
