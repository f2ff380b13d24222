"""PEFT adapters on a target: which of them a verifying forward can run, and which it can't.

An adapter inside a layer (LoRA and its kin) does to each token what it does to it alone, so several
tokens may be verified at once. Those that add tokens of their own, or look at what else is in the
forward, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from hf_specdec.targets.wrappers import is_peft_model

# What a layer computes depends on more than the token: on all the tokens of the forward, or on
# arguments that plain generation passes at every step.
_NOT_PER_TOKEN = ("ADAPTION_PROMPT", "POLY", "XLORA")


def check_adapters(target: Any) -> None:
    """Raise ValueError if the target's adapters don't work on several tokens at a time.

    Args:
        target: a PEFT model, or the model that holds the adapters.
    """
    wrapper = target if is_peft_model(target) else _wrapper_of_call(target)
    if wrapper is not None:
        config = getattr(wrapper, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"The target has a PEFT adapter of type {_kind(config)}, which puts virtual tokens "
                "in front of the prompt; speculation needs the place of every token. Call "
                "generate() without assistant_model, or use an adapter inside the layers (LoRA)."
            )
    for name, config in _active_configs(target):
        if _kind(config) in _NOT_PER_TOKEN:
            raise ValueError(
                f"The target's PEFT adapter {name!r} is of type {_kind(config)}, which doesn't "
                "treat each token by itself, so several can't be verified at once. Call generate() "
                "without assistant_model."
            )
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise ValueError(
                f"The target's PEFT adapter {name!r} is an activated LoRA "
                "(alora_invocation_tokens), which counts the tokens that it applies to from the "
                "end of a forward. Call generate() without assistant_model, or use a plain LoRA."
            )


def check_rows(target: Any, num_rows: int) -> None:
    """Raise ValueError if every row has an adapter of its own (PEFT's ``adapter_names``)."""
    if num_rows == 1 or not getattr(target, "peft_config", None):
        return
    hooks = [
        (module, key)
        for module in target.modules()
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, partial) and hook.keywords.get("adapter_names") is not None
    ]
    if not hooks:
        return
    # PEFT takes them away behind calls that return only; later ones would fail.
    for module, key in hooks:
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    raise ValueError(
        f"adapter_names with a batch of {num_rows} doesn't combine with assistant_model: rows that "
        "finish leave the batch, and PEFT would give theirs to others. Call model.set_adapter(...) "
        "and generate the rows of one adapter together."
    )


def _wrapper_of_call(target: Any) -> Any:
    """The PEFT model of prompt learning that is running ``target.generate``, or ``None``."""
    method = target.__dict__.get("prepare_inputs_for_generation")
    wrapper = getattr(method, "__self__", None)
    return wrapper if is_peft_model(wrapper) else None


def _active_configs(target: Any) -> Iterator[tuple[str, Any]]:
    """Names and configs of the adapters inside the layers that are in use."""
    configs = getattr(target, "peft_config", None)
    if not isinstance(configs, dict):
        return
    # transformers' models have a method of that name, PEFT's layers a list.
    found = (getattr(module, "active_adapters", None) for module in target.modules())
    active = next((names for names in found if isinstance(names, list)), list(configs))
    for name in active:
        if name in configs:
            yield name, configs[name]


def _kind(config: Any) -> str:
    kind = getattr(config, "peft_type", None)
    return str(getattr(kind, "value", kind))
