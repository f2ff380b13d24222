"""Words of vLLM's speculative config that mean nothing here, and what to say instead.

A table and its messages: a config written for vLLM is either understood or refused with a way out.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# vLLM, too, takes each of these for "mtp" and calls it deprecated.
_MTP_FAMILIES = (
    "bailing_hybrid", "bailing_hybrid_v3", "deepseek", "dots3_note", "ernie", "exaone4_5",
    "exaone_moe", "gemma4", "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_ocr", "hy_v3", "hy_v4",
    "inkling", "kimi_k3", "longcat_flash", "mimo", "mimo_v2", "minimax_m3", "nemotron_h",
    "pangu_ultra_moe", "qwen3_5", "qwen3_next", "qwen4_exp", "step3p5", "step5",
)  # fmt: skip
MTP_METHODS = frozenset(f"{family}_mtp" for family in _MTP_FAMILIES)
"""Deprecated spellings of ``method="mtp"``."""

NGRAM_MODELS = ("ngram", "[ngram]")
"""Names of a model by which vLLM means ``method="ngram"``."""
_NGRAM = "method='ngram' looks drafts up in the text itself, on every device"
_NOT_HERE = "no drafter for it is here or in transformers"
METHODS = {
    "custom_class": "make your drafter a subclass of hf_specdec.Drafter and pass it as model, "
    "without a method",
    "dflash": _NOT_HERE,
    "draft_model": "transformers drafts with a plain smaller model itself: load it and call "
    "generate(assistant_model=...)",
    "dspark": _NOT_HERE,
    "eagle": _NOT_HERE,
    "eagle3": _NOT_HERE,
    "extract_hidden_states": "generate(output_hidden_states=True, return_dict_in_generate=True) "
    "returns them",
    "medusa": _NOT_HERE,
    "ngram_gpu": _NGRAM,
    "suffix": _NOT_HERE + "; the nearest is method='ngram'",
}
"""By method of vLLM that is none of ours: what to do."""

_LOADED = "a drafter named by a string is loaded in the target's dtype; load it as you like and "
_LOADED += "pass the loaded model as model"
_KERNELS = "vLLM's engine alone has it, and it changes no token; leave it out"
_VERIFICATION = "drafts are verified by verification='match' (the default) or 'rejection'"
_SUFFIX = "of method='suffix', which hf_specdec doesn't have"
_OF_ENGINE = "vLLM's engine fills it in; leave it out"
_TO_THE_END = "drafts go on until the call's max_length; leave it out"
_BATCH_SIZE = "use num_speculative_tokens_per_batch_size, such as [[1, 7, 3], [8, 8, 0]] to stop "
_BATCH_SIZE += "drafting from 8 rows on"
FIELDS = {
    "tensor_parallel_size": "use draft_tensor_parallel_size (1, or the target's), as in vLLM",
    "quantization": _LOADED,
    "draft_load_config": _LOADED,
    "draft_lm_head_quantization": _LOADED,
    "code_revision": "no remote code is run; revision chooses the weights",
    "max_model_len": _TO_THE_END,
    "enforce_eager": "nothing is compiled unless cache_implementation='static' asks for it; leave "
    "it out",
    "moe_backend": _KERNELS,
    "attention_backend": "load the drafter or target with attn_implementation=... instead",
    "kv_cache_dtype": _KERNELS,
    "disable_padded_drafter_batch": _KERNELS,
    "disable_eagle_block_drop": _KERNELS,
    "disable_lookahead_block_hashes": _KERNELS,
    "use_local_argmax_reduction": _KERNELS,
    "index_share_for_mtp_iteration": _KERNELS,
    "xpress_topc": _KERNELS,
    "use_heterogeneous_vocab": "of method='draft_model'. With transformers: "
    "generate(assistant_model=..., tokenizer=..., assistant_tokenizer=...)",
    "parallel_drafting": "the drafter's kind decides how it drafts; leave it out",
    "suffix_decoding_max_tree_depth": _SUFFIX,
    "suffix_decoding_max_cached_requests": _SUFFIX,
    "suffix_decoding_max_spec_factor": _SUFFIX,
    "suffix_decoding_min_token_prob": _SUFFIX,
    "rejection_sample_method": _VERIFICATION,
    "draft_sample_method": _VERIFICATION,
    "synthetic_acceptance_rates": _VERIFICATION + "; acceptance is never made up",
    "synthetic_acceptance_length": _VERIFICATION + "; acceptance is never made up",
    "enable_adaptive_verification": "of method='dspark', which hf_specdec doesn't have",
    "dspark_draft_topk": "of method='dspark', which hf_specdec doesn't have",
    "target_model_config": _OF_ENGINE,
    "target_parallel_config": _OF_ENGINE,
    "draft_model_config": _OF_ENGINE,
    "draft_parallel_config": _OF_ENGINE,
    # vLLM before its engine V1.
    "acceptance_method": _VERIFICATION,
    "posterior_threshold": _VERIFICATION + "; typical acceptance would change the output",
    "posterior_alpha": _VERIFICATION + "; typical acceptance would change the output",
    "disable_by_batch_size": _BATCH_SIZE,
    "disable_logprobs": "generate(output_scores=True) returns scores; leave it out",
    "disable_mqa_scorer": _KERNELS,
}
"""By field of vLLM that is none of ours: why, or what to do."""


def check_method(method: object, ours: Iterable[str]) -> None:
    """Raise ValueError unless ``method`` is one of ``ours``; says where else it might be found."""
    ours = list(ours)
    if method in ours:
        return
    if isinstance(method, str) and method in METHODS:
        raise ValueError(
            f"method={method!r} is vLLM's, and not one of {ours}, which hf_specdec has: "
            f"{METHODS[method]}"
        )
    nearest = get_close_matches(str(method), [*ours, *METHODS, *MTP_METHODS], n=1)
    hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"method={method!r} is not known; choose from {ours}{hint}")


def check_fields(names: Iterable[str], ours: Iterable[str]) -> None:
    """Raise ValueError unless all ``names`` are among ``ours``; says what to do about vLLM's."""
    ours = list(ours)
    unknown = sorted(set(names) - set(ours))
    if not unknown:
        return
    sentences = [f"speculative_config has keys {unknown}; its fields are {ours}."]
    for name in unknown:
        if name in FIELDS:
            sentences.append(f"{name} is vLLM's: {FIELDS[name]}.")
        elif nearest := get_close_matches(name, ours, n=1):
            sentences.append(f"Did you mean {nearest[0]!r} by {name!r}?")
    raise ValueError(" ".join(sentences))
