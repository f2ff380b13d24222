"""Training tiny targets together with their MTP modules; how many of their drafts are accepted."""

from pathlib import Path
from typing import Any

import torch


def text() -> torch.Tensor:
    """A text of 64 kinds of characters: the license, in lower case."""
    raw = (Path(__file__).parents[1] / "LICENSE").read_bytes().lower()
    return torch.tensor([b - 32 if 32 <= b < 96 else 3 + b % 60 for b in raw])


def rate(target, drafter, k=1, **kwargs) -> list[float]:
    """Acceptance per position over a ragged batch of passages."""
    data = text()
    rows = [data[s : s + n] for s, n in ((900, 40), (3000, 25), (5200, 33), (7000, 18))]
    width = max(len(r) for r in rows)
    ids = torch.full((len(rows), width), 1)
    mask = torch.zeros_like(ids)
    for row, passage in enumerate(rows):
        ids[row, width - len(passage) :] = passage
        mask[row, width - len(passage) :] = 1
    common = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 60, "pad_token_id": 1}
    output = target.generate(
        ids,
        **common,
        assistant_model=drafter,
        num_assistant_tokens=k,
        return_dict_in_generate=True,
        **kwargs,
    )
    assert output.sequences.tolist() == target.generate(ids, **common).tolist()
    return output.speculation.per_position


def train_together(
    target: Any,
    network: Any,
    steps: int = 220,
    length: int = 64,
    rows: int = 24,
    spread: float = 1.2,
) -> None:
    """Train a target to say the license, and each of its modules to draft one token further.

    Args:
        target: made anew; all its parameters are trained.
        network: its modules, an `MTPModel` or a `MiMoMTP`.
        steps: updates.
        length: entries of a window.
        rows: windows of an update.
        spread: of the logarithms of the final norm's first weights.
    """
    from hf_specdec.modeling.mtp import final_norm

    parameters = list(target.parameters())
    if isinstance(network, torch.nn.Module):
        parameters += list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=4e-3)
    data = text()
    states: list[torch.Tensor] = []
    norm: Any = final_norm(target)
    # Both sides of a norm whose weights are all alike would be worth the same to a module.
    norm.weight.data = torch.randn_like(norm.weight).mul_(spread).exp_()
    for own in getattr(network, "final_norm", []):
        own.weight.data = torch.randn_like(own.weight).mul_(spread).exp_()
    if network.feed == "pre_norm":
        handle = norm.register_forward_pre_hook(lambda _m, args: states.append(args[0]))
    else:
        handle = norm.register_forward_hook(lambda _m, _args, out: states.append(out))
    positions = torch.arange(length)[None].expand(rows, -1)
    causal = torch.full((length, length), torch.finfo().min).triu(1)[None, None]
    masks = dict.fromkeys(network.layer_types, causal)
    ahead = network.num_modules + 1
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, 2 * (1 - step / steps))
        start = torch.randint(0, len(data) - length - ahead, (rows,))
        ids = data[start[:, None] + torch.arange(length + ahead)]
        states.clear()
        logits = target(input_ids=ids[:, :length]).logits
        loss = _loss(logits, ids[:, 1 : length + 1])
        hidden = states[0]
        for module in range(network.num_modules):
            embeds = network.embed(ids[:, module + 1 : module + 1 + length], positions)
            hidden = network(hidden, embeds, positions, masks, module=module)
            labels = ids[:, module + 2 : module + 2 + length]
            loss = loss + _loss(network.logits(hidden, module), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    handle.remove()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
