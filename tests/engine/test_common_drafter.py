"""The drafter that every rank of a cut target drafts with: it passes everything on."""

import pytest
import torch
from tiny_models import ScriptedDrafter

from hf_specdec.common_call import CommonDrafter
from hf_specdec.drafters import Drafter
from hf_specdec.proposals import Proposals
from hf_specdec.ranks import Ranks

# Asked of the drafter behind it, before the call begins.
_ASKED_BEFORE = {
    "check_config",
    "compile_with",
    "default_draft_tokens",
    "device_for",
    "drafts_trees",
    "get_candidates",
    "max_candidate_nodes",
    "max_children",
    "method",
    "model_kwargs_overrides",
    "requires_model_outputs",
}


def common(drafter: Drafter) -> CommonDrafter:
    return CommonDrafter(drafter, Ranks(), stops_early=False)


def test_every_part_of_a_drafter_that_a_call_uses_is_passed_on() -> None:
    parts = {name for name in vars(Drafter) if not name.startswith("_")}
    assert parts - _ASKED_BEFORE <= set(vars(CommonDrafter))


def test_the_end_of_a_call_reaches_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[ScriptedDrafter] = []
    monkeypatch.setattr(ScriptedDrafter, "finish", lambda self: ended.append(self), raising=False)
    drafter = ScriptedDrafter.__new__(ScriptedDrafter)
    common(drafter).finish()
    assert ended == [drafter]


def test_ids_of_a_drafter_of_ones_own_are_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ScriptedDrafter.__new__(ScriptedDrafter)
    monkeypatch.setattr(
        ScriptedDrafter, "propose", lambda *_: torch.tensor([[-5, 3, 99]]), raising=False
    )
    draft_ids, _ = Proposals(common(drafter), 10).chain(torch.tensor([1]), 3)
    assert draft_ids.tolist() == [[0, 3, 9]]
    monkeypatch.setattr(ScriptedDrafter, "propose", lambda *_: torch.tensor([1.0]), raising=False)
    with pytest.raises(ValueError, match="assistant_model ScriptedDrafter: propose returned"):
        Proposals(common(drafter), 10).chain(torch.tensor([1]), 3)
