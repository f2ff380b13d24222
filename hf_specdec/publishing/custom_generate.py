"""Speculative ``generate`` with the drafter of this repository.

    model.generate(**inputs, custom_generate="REPOSITORY", trust_remote_code=True)

With hf_specdec installed its loop runs: batches, every option of ``generate``, statistics. Without
it the loop below does, for one prompt: transformers' preparation, then draft, verify, accept, roll
back. Tokens are chosen one by one from the target's own processed logits, a draft only saves
forwards, and sampling draws from torch's generator once a token, as plain generation does. So the
text is the one of plain ``generate`` under the same seed.

Published as ``custom_generate/generate.py``, and therefore one file that imports nothing of
hf_specdec.
"""

import importlib
import importlib.util
import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AutoModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import StopStringCriteria

_INSTALL = "pip install hf-specdec"
# Arguments of `generate` that say where to read a repository; the drafter is read from there too.
_HUB_ARGUMENTS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "token",
)  # fmt: skip
_NEEDS_HF_SPECDEC = (
    "num_speculative_tokens_per_batch_size", "num_tree_nodes", "row_seeds", "speculative_config",
    "speculative_token_tree", "verification", "cache", "inputs_embeds",
)  # fmt: skip
_NOT_RETURNED = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
# Drafters that were loaded, by target: a second call reads nothing.
_loaded: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def generate(model: Any, assistant_model: Any = None, **arguments: Any) -> Any:
    """``model.generate``, with this repository's drafter.

    Args:
        model: the target.
        assistant_model: the drafter, if it is loaded already.
        arguments: those of ``generate``. ``num_assistant_tokens`` is the number of tokens drafted a
            step, by default one for each head of the drafter.

    Raises:
        ValueError: something that needs hf_specdec, where that is not installed, or a drafter that
            belongs to another target.
    """
    hub = {name: arguments.pop(name) for name in _HUB_ARGUMENTS if name in arguments}
    is_installed = importlib.util.find_spec("hf_specdec") is not None
    if is_installed:
        # Its classes are preferred to the ones in this repository from here on.
        importlib.import_module("hf_specdec")
    drafter = _load(model, hub) if assistant_model is None else assistant_model
    # Not model.generate, which a repository may have replaced by its own function.
    plain_generate = type(model).generate
    if is_installed:
        return plain_generate(model, **arguments, assistant_model=drafter)
    streamer = arguments.get("streamer")
    num_draft_tokens = _num_draft_tokens(drafter, arguments.pop("num_assistant_tokens", None))
    _check(model, drafter, arguments)
    _read_stop_strings(arguments)

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        _check_prepared(input_ids, generation_config, model_kwargs)
        sequences = _decode(
            model, drafter, input_ids, logits_processor, stopping_criteria, generation_config,
            num_draft_tokens, streamer, model_kwargs,
        )  # fmt: skip
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    return plain_generate(model, **arguments, custom_generate=decode)


def _decode(
    model: Any,
    drafter: Any,
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    num_draft_tokens: int,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Tensor:
    """Prompt ``[1, T]`` to prompt and new tokens ``[1, L]``."""
    model_kwargs["cache"].activate_past_recording()
    draft, is_prefill, stopped = input_ids[:, :0], True, False
    while not stopped:
        width, start = draft.shape[1], input_ids.shape[1]
        outputs = _forward(model, torch.cat([input_ids, draft], 1), width, is_prefill, model_kwargs)
        if is_prefill and not outputs.cache.is_croppable:
            raise ValueError(
                f"{type(model).__name__} has layers whose state can't be rolled back, which needs "
                f"hf_specdec: {_INSTALL}"
            )
        # A copy: processors may write to it.
        logits = outputs.logits[:, -width - 1 :].to(input_ids.device, torch.float32, copy=True)
        for i in range(width + 1):
            scores = processors(input_ids, logits[:, i])
            if config.do_sample:
                token = torch.multinomial(scores.softmax(-1), num_samples=1)
            else:
                token = scores.argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, token], 1)
            stopped = bool(criteria(input_ids, None).all())
            if stopped or i == width or int(token) != int(draft[0, i]):
                break
        if streamer is not None:
            streamer.put(input_ids[0, start:].cpu())
        if stopped:
            break
        outputs.cache.crop(-(width - i))
        # The state behind the last right token; the newest token was not run yet.
        state = outputs.hidden_states[-1][:, -width - 1 + i]
        room = config.max_length - input_ids.shape[1] - 1
        draft = _propose(model, drafter, state, token[:, 0], min(num_draft_tokens, room))
        draft, is_prefill = draft.to(input_ids.device), False
    if streamer is not None:
        streamer.end()
    return input_ids


def _forward(
    model: Any, token_ids: Tensor, width: int, is_prefill: bool, model_kwargs: dict[str, Any]
) -> Any:
    """The target on the tokens it has not seen: the prompt, or the last token and the draft."""
    kwargs = dict(model_kwargs)
    for name in ("attention_mask", "position_ids", "token_type_ids"):
        given = kwargs.get(name)
        if given is None or (missing := token_ids.shape[1] - given.shape[-1]) <= 0:
            continue
        more = given[..., -1:].expand(*given.shape[:-1], missing)
        if name == "position_ids":
            more = more + torch.arange(1, missing + 1, device=given.device)
        kwargs[name] = torch.cat([given, more], -1)
    inputs = model.prepare_inputs_for_generation(
        token_ids,
        next_sequence_length=None if is_prefill else width + 1,
        is_first_iteration=is_prefill,
        **kwargs,
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = width + 1
    # -1: of all hidden states the last ones alone.
    return model(**{**inputs, "output_hidden_states": -1, "return_dict": True})


def _propose(
    model: Any, drafter: Any, state: Tensor, token: Tensor, num_draft_tokens: int
) -> Tensor:
    """A draft ``[1, K]`` from a state ``[1, d]`` and the token ``[1]`` that was chosen there."""
    if num_draft_tokens < 1:
        return token.new_empty(1, 0)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if drafter.config.share_target_weights:
        drafter.bind_target(embeddings, head)
    # Either vocabulary may be padded by rows that no tokenizer produces.
    token = token.to(drafter.device).clamp(max=drafter.config.vocab_size - 1)
    draft = drafter.propose(state.to(drafter.device, drafter.dtype), token, num_draft_tokens)
    return draft.clamp(max=embeddings.shape[0] - 1)


def _load(model: Any, hub: dict[str, Any]) -> Any:
    """The drafter of the repository that this file was called from."""
    device = _device(model.get_output_embeddings())
    key = (_repository(), hub.get("revision"), model.dtype, device)
    if model not in _loaded or _loaded[model][0] != key:
        # trust_remote_code: it was given, or this function would not run.
        drafter = AutoModel.from_pretrained(
            key[0], dtype=model.dtype, trust_remote_code=True, **hub
        )
        _loaded[model] = (key, drafter.to(device).eval())
    return _loaded[model][1]


def _device(module: Any) -> torch.device:
    """Where a layer computes: accelerate knows, where its weight comes from memory or a disk."""
    hook = getattr(module, "_hf_hook", None)
    for part in reversed(getattr(hook, "hooks", (hook,))):
        if getattr(part, "execution_device", None) is not None:
            return torch.device(part.execution_device)
    return module.weight.device


def _repository() -> str:
    """What the caller gave as ``custom_generate``, the one argument that isn't handed on."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(name, str):
            return name
        frame = frame.f_back
    raise ValueError(
        "the repository of the drafter is not known, as generate was not called with "
        "custom_generate='REPOSITORY'. Load the drafter with AutoModel.from_pretrained(REPOSITORY, "
        "trust_remote_code=True) and pass it as assistant_model"
    )


def _num_draft_tokens(drafter: Any, wish: Any) -> int:
    most = drafter.config.n_predict
    if wish is None:
        return most
    if wish == "auto":
        raise ValueError(f"num_assistant_tokens='auto' needs hf_specdec: {_INSTALL}")
    if isinstance(wish, bool) or not isinstance(wish, int) or not 0 <= wish <= most:
        raise ValueError(
            f"num_assistant_tokens={wish!r} must be 0 to {most}: this drafter has n_predict={most} "
            "heads"
        )
    return wish


def _check(model: Any, drafter: Any, arguments: dict[str, Any]) -> None:
    """Refuse what only hf_specdec can do, and a drafter of another target."""
    width = model.config.get_text_config().hidden_size
    if drafter.config.emb_dim != width:
        raise ValueError(
            f"this drafter reads hidden states of width emb_dim={drafter.config.emb_dim}, but "
            f"{type(model).__name__} has hidden_size={width}: it was trained for another target"
        )
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if drafter.config.share_target_weights and any(
        end.weight.device != drafter.device for end in ends
    ):
        raise ValueError(
            f"this drafter reads the embedding and the head of {type(model).__name__}, which is "
            f"offloaded or spread over devices (device_map): needs hf_specdec ({_INSTALL})"
        )
    if given := [name for name in _NEEDS_HF_SPECDEC if arguments.get(name) is not None]:
        raise ValueError(f"{', '.join(given)}: needs hf_specdec ({_INSTALL})")


def _check_prepared(input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse what only hf_specdec can do, once the call's settings are complete."""
    if input_ids.shape[0] != 1 or config.num_beams != 1:
        raise ValueError(
            f"{input_ids.shape[0]} rows, num_beams={config.num_beams}: without hf_specdec this "
            f"drafter serves one row without beams. Install it for batches: {_INSTALL}"
        )
    if returned := [name for name in _NOT_RETURNED if getattr(config, name, False)]:
        raise ValueError(f"{', '.join(returned)}: needs hf_specdec ({_INSTALL})")
    if model_kwargs.get("cache") is None:
        raise ValueError("use_cache=False: speculation needs the target's cache; leave it on")


def _read_stop_strings(arguments: dict[str, Any]) -> None:
    """Make criteria of stop strings here, as callables are not handed the tokenizer."""
    tokenizer, strings = arguments.pop("tokenizer", None), arguments.pop("stop_strings", None)
    if strings is None:
        return
    if tokenizer is None:
        raise ValueError("stop_strings needs the target's tokenizer: pass tokenizer=... as well")
    given = arguments.get("stopping_criteria") or []
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    arguments["stopping_criteria"] = StoppingCriteriaList([*given, criterion])
