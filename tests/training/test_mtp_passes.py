"""What a layer is trained on is what it reads when it drafts."""

import pytest
import torch

from hf_specdec.drafters import MTPDrafter, VerifiedStep
from hf_specdec.modeling.mimo import MiMoConfig, MiMoForCausalLM, MiMoMTP
from hf_specdec.training.mtp_passes import run_passes

LENGTH, DRAFTS = 11, 3


def network(**fields) -> MiMoMTP:
    config = MiMoConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4, **fields,
    )  # fmt: skip
    return MiMoMTP(MiMoForCausalLM(config).eval())


class Dictates:
    """Picks the tokens of a text, and keeps the logits."""

    done = False

    def __init__(self, tokens):
        self.tokens, self.logits = tokens, []

    def __call__(self, k, logits, token_ids):
        self.logits.append(logits[0])
        return self.tokens[k : k + 1]


@pytest.mark.parametrize("masked", [True, False])
@torch.no_grad()
def test_passes_are_what_the_drafter_runs(masked):
    """At every place of a text, for every draft: the logits of the engine's own drafter."""
    layers = network(mtp_mask_position_0=masked)
    text = torch.randint(64, (LENGTH + DRAFTS + 1,))
    hidden = torch.randn(1, LENGTH, 32)
    reads = torch.arange(LENGTH)[:, None] + 1 + torch.arange(DRAFTS)
    places = torch.arange(LENGTH)[None]
    passes = run_passes(layers, hidden, text[reads][None], places, torch.zeros_like(places))
    logits = torch.stack([layers.logits(state)[0] for state in passes], dim=1)
    for last in range(LENGTH):
        drafter = MTPDrafter(layers)
        drafter.start(layers.target)
        # A step that verified all of the text so far, and one that was run in vain.
        tokens = torch.cat([text[: last + 1], torch.tensor([7])])[None]
        states = torch.cat([hidden[:, : last + 1], torch.randn(1, 1, 32)], dim=1)
        drafter.observe(VerifiedStep(tokens, states, torch.tensor([last]), [last]))
        pick = Dictates(text[last + 2 :])
        drafter.propose(text[last + 1 : last + 2], DRAFTS, pick)
        torch.testing.assert_close(torch.stack(pick.logits), logits[last], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_documents_do_not_see_each_other():
    layers = network()
    hidden, tokens = torch.randn(1, 9, 32), torch.randint(64, (1, 9, 2))
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    document = torch.tensor([[0] * 4 + [1] * 5])
    together = list(run_passes(layers, hidden, tokens, places, document))
    for part in (slice(0, 4), slice(4, 9)):
        alone = run_passes(
            layers, hidden[:, part], tokens[:, part], places[:, part], document[:, part]
        )
        for k, state in enumerate(alone):
            torch.testing.assert_close(state, together[k][:, part])
