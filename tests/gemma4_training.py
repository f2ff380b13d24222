"""Training a tiny Gemma 4 target, then an assistant for it, on a text of this repository."""

import functools
from typing import Any

import torch
from gemma4_models import ALTERNATING, BASE, assistant_config, without_eos
from mtp_training import text
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from hf_specdec.modeling.mtp import final_norm

LENGTH, ROWS, STEPS_AHEAD, NEW = 64, 16, 2, 50
WINDOW = 16
# All of a head turns, and fast: one position more or less is seen.
ROPE = {name: {"rope_type": "default", "rope_theta": 30.0} for name in ALTERNATING}


@functools.cache
def trained_pair() -> tuple[Any, Any]:
    """A target that says the license, and an assistant; the target knew nothing of it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        # Both types of layers have keys of one size, so that they can be taken for each other.
        sizes: dict[str, Any] = {
            **BASE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
            "layer_types": ALTERNATING * 2, "head_dim": 16, "global_head_dim": 16,
            "sliding_window": WINDOW, "initializer_range": 0.06, "hidden_size_per_layer_input": 0,
            "rope_parameters": ROPE,
        }  # fmt: skip
        target: Any = Gemma4ForCausalLM(Gemma4TextConfig(**sizes))
        # Both sides of a norm whose weights are all alike would be worth the same.
        norm: Any = final_norm(target)
        norm.weight.data = torch.randn_like(norm.weight).mul_(1.8).exp_()
        _train(target.parameters(), 260, lambda ids: _target_loss(target, ids))
        config = assistant_config(
            target.config, hidden_size=64, intermediate_size=128, initializer_range=0.06,
            rope_parameters=ROPE,
        )  # fmt: skip
        assistant: Any = Gemma4AssistantForCausalLM(config)
        target.requires_grad_(False)
        _train(assistant.parameters(), 260, lambda ids: _assistant_loss(target, assistant, ids))
    return without_eos(target.eval()), assistant.eval()


def _train(parameters: Any, steps: int, loss_of: Any) -> None:
    optimizer = torch.optim.AdamW(list(parameters), lr=4e-3)
    data = text()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, 2 * (1 - step / steps))
        start = torch.randint(0, len(data) - LENGTH - STEPS_AHEAD - 1, (ROWS,))
        loss = loss_of(data[start[:, None] + torch.arange(LENGTH + STEPS_AHEAD + 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _target_loss(target: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = target(input_ids=ids[:, :LENGTH], use_cache=False).logits
    return _loss(logits, ids[:, 1 : LENGTH + 1])


def _assistant_loss(target: Any, assistant: Any, ids: torch.Tensor) -> torch.Tensor:
    """Every entry i stands at position i, sees the keys 0 .. i, and drafts what follows i + 1."""
    output = target(
        input_ids=ids[:, :LENGTH], output_hidden_states=True, return_shared_kv_states=True
    )
    index = torch.arange(LENGTH)
    past = index[:, None] - index
    seen = {
        "full_attention": past >= 0,
        "sliding_attention": (past >= 0) & (past < WINDOW),
    }
    masks = {
        name: torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~visible, torch.finfo().min)
        for name, visible in seen.items()
    }
    states, loss = output.hidden_states[-1], torch.zeros(())
    for step in range(1, STEPS_AHEAD + 1):
        embeds = target.get_input_embeddings()(ids[:, step : step + LENGTH])
        inner = assistant.model(
            inputs_embeds=assistant.pre_projection(torch.cat([embeds, states], dim=-1)),
            attention_mask=masks,
            position_ids=index[None],
            shared_kv_states=dict(output.shared_kv_states),
            use_cache=False,
            logits_to_keep=None,
        ).last_hidden_state
        loss = loss + _loss(assistant.lm_head(inner), ids[:, step + 1 : step + 1 + LENGTH])
        states = assistant.post_projection(inner)
    return loss


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@functools.cache
def _texts() -> tuple[torch.Tensor, torch.Tensor]:
    """24 passages, and how the target goes on."""
    target, _ = trained_pair()
    data = text()
    ids = torch.stack([data[start : start + 30] for start in range(100, 9700, 400)])
    mask = torch.ones_like(ids)
    plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    return ids, plain


def acceptance(drafter: Any, k: int = 3) -> list[float]:
    """Acceptance per position over 24 passages; the texts are the target's own."""
    ids, plain = _texts()
    output = trained_pair()[0].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        assistant_model=drafter,
        num_assistant_tokens=k,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, plain)
    return output.speculation.per_position
