"""MTP layers that draft from a part of the vocabulary: cheaper drafts, the same text."""

from typing import Any

import pytest
import torch
from tiny_models import new_tokens, row_by_row

from hf_specdec.drafters import MTPDrafter
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM, MiMoMTP

NEW = 20
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
IDS = list(range(0, 64, 3))


@pytest.fixture
def target() -> MiMoForCausalLM:
    config = MiMoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, mtp_draft_token_ids=IDS,
    )  # fmt: skip
    torch.manual_seed(7)
    return MiMoForCausalLM(config).eval()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_same_text(target, batch, prompts):
    inputs = prompts(batch)
    expected = row_by_row(target, inputs, **GREEDY)
    output = target.generate(**inputs, **GREEDY, assistant_model=MiMoMTP(target))
    assert new_tokens(output, inputs, [NEW] * batch) == expected
    common = {"do_sample": True, "max_new_tokens": NEW, "row_seeds": list(range(batch))}
    slow, fast = (
        target.generate(**inputs, **common, assistant_model=MiMoMTP(target), num_assistant_tokens=k)
        for k in (0, 3)
    )
    assert slow.tolist() == fast.tolist()


@pytest.mark.parametrize("sampled", [False, True])
def test_only_these_ids_are_drafted(target, sampled, prompts):
    drafts = []

    class Notes(MTPDrafter):
        def propose(self, *args, **kwargs):
            drafts.append(super().propose(*args, **kwargs))
            return drafts[-1]

    target.generate(
        **prompts(3),
        assistant_model=Notes(MiMoMTP(target)),
        num_assistant_tokens=2,
        max_new_tokens=NEW,
        do_sample=sampled,
    )
    drafted = torch.cat([draft.flatten() for draft in drafts])
    assert len(drafted.unique()) > 5
    assert torch.isin(drafted, torch.tensor(IDS)).all()


@torch.no_grad()
def test_logits_are_those_of_the_head(target):
    network, state = MiMoMTP(target), torch.randn(2, 32)
    assert network.draft_token_ids is not None
    assert network.draft_token_ids.tolist() == IDS
    torch.testing.assert_close(network.logits(state), target.lm_head(state)[:, IDS])
    # Whatever happens to the head or to the ids.
    target.lm_head.weight.mul_(2)
    torch.testing.assert_close(network.logits(state), target.lm_head(state)[:, IDS])
    target.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32))
    torch.testing.assert_close(network.logits(state), target.lm_head(state)[:, IDS])
    target.config.mtp_draft_token_ids = [5, 9]
    assert network.head_weight.shape == (2, 32)
    target.double()
    assert network.logits(state.double()).dtype == torch.float64
    target.config.mtp_draft_token_ids = None
    assert network.logits(state.double()).shape == (2, 64) and network.draft_token_ids is None
    assert network.head_weight is target.lm_head.weight
    with torch.inference_mode():
        target.config.mtp_draft_token_ids = [5, 9]
        target.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32), requires_grad=False)
        torch.testing.assert_close(network.logits(state), target.lm_head(state)[:, [5, 9]])


def test_a_checkpoint_keeps_the_ids(target, tmp_path):
    target.save_pretrained(tmp_path)
    assert MiMoForCausalLM.from_pretrained(tmp_path).config.mtp_draft_token_ids == IDS


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [-1, 2], [60, 64]])
def test_ids_that_are_none(target, ids):
    match = rf"mtp_draft_token_ids \({len(ids)} ids.*0 to 63"
    with pytest.raises(ValueError, match=match):
        MiMoConfig(vocab_size=64, mtp_draft_token_ids=ids)
    target.config.mtp_draft_token_ids = ids
    with pytest.raises(ValueError, match=match):
        MiMoMTP(target).logits(torch.randn(1, 32))
