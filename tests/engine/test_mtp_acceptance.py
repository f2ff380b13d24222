"""Trained MTP modules are accepted, and a wrong feed is seen in the acceptance rate.

Three ways to be fed: GLM-4.5's (the state behind the final norm; what is recycled is not normed),
EXAONE 4.5's (behind the norm, the normed output is recycled, a window, norms and projection for all
modules) and Step-3.7's (the state before the norm, three modules with heads of their own).
"""

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from mtp_checkpoints import FAMILIES, config_of
from mtp_training import rate, train_together
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hf_specdec.drafters import MTPDrafter
from hf_specdec.modeling.mtp import MTPModel, family_of

SIZES = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.06}
NAMES = ["glm4_moe", "exaone4_5", "step3p7"]


@functools.cache
def trained(name: str) -> tuple[Any, MTPModel]:
    published = FAMILIES[name]
    fields = {**published.fields, **SIZES}
    config = config_of(replace(published, fields=fields))
    family = family_of(config)
    assert family is not None
    with torch.random.fork_rng():
        torch.manual_seed(1)
        auto = AutoModelForCausalLM if published.outer is None else AutoModelForImageTextToText
        target: Any = auto.from_config(config)
        network = MTPModel(target, family, published.modules)
        _initialize(network)
        train_together(target, network, steps=260, spread=1.8)
    target.generation_config.eos_token_id = None
    return target.eval(), network.eval()


def _initialize(network: torch.nn.Module) -> None:
    """What loading a checkpoint would fill: experts and routers are made of empty memory."""
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.06)
    for buffer in network.buffers():
        buffer.data.zero_()


@pytest.mark.parametrize("name", NAMES)
class TestAcceptance:
    def test_trained_modules_are_accepted(self, name):
        target, network = trained(name)
        assert rate(target, network)[0] > 0.5
        first, second, third = rate(target, network, k=3)
        assert first > 0.5 and first > second >= third and second > 0

    @pytest.mark.parametrize("wrong", ["feed", "hidden_first", "token_shift"])
    def test_a_wrong_feed_is_seen(self, name, wrong):
        target, network = trained(name)
        feeds = {"pre_norm": "post_norm", "post_norm": "pre_norm"}
        change = {"feed": feeds[network.feed], "hidden_first": True, "token_shift": 0}[wrong]
        right = rate(target, network)[0]
        assert rate(target, network.with_switches(**{wrong: change}))[0] < right - 0.1


class RunsTheFirstAgain(MTPDrafter):
    """The first module makes every step."""

    def _cycle(self, *args, **kwargs):
        self._modules = 1
        return super()._cycle(*args, **kwargs)


def test_modules_in_turn_draft_better_than_the_first_alone():
    target, network = trained("step3p7")
    assert rate(target, network, k=3)[1] > rate(target, RunsTheFirstAgain(network), k=3)[1] + 0.1


def test_a_wrong_state_handed_on_is_seen():
    target, network = trained("step3p7")
    wrong = copy.copy(network)
    # The modules of this family hand on what their final norm reads, not what it says.
    wrong.family = replace(network.family, recycles="normed")
    right = rate(target, network, k=3)
    changed = rate(target, wrong, k=3)
    assert abs(changed[0] - right[0]) < 0.1 and changed[1] < right[1] - 0.1
