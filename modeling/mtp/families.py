"""The families of MTP layers: where their weights are, what they are called, how they are fed.

A row says what sets a family apart; `MTPModel` builds any of them around the decoder layers that
transformers has for the target. Sources: the published checkpoints' key names and configs, and how
vLLM (its ``*_mtp`` models) feeds and recycles them; docs/mtp.md names what is disputed.

Boundary: facts as data; no tensor is made here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_specdec.modeling.checkpoint_headers import shown

from .switches import MTPSwitches

Overrides = Callable[[Any, int], dict[str, Any]]
"""From the target's text config and the number of modules to fields of the MTP layers' config."""


@dataclass(frozen=True)
class MTPFamily:
    r"""One family.

    A *module* drafts one token: norms, projection, one or more decoder layers, final norm.

    Attributes:
        method: vLLM's name.
        model_types: of the target's text config.
        where: regular expression on a checkpoint's keys. If it has a group ``layer``, that is a
            decoder layer's number, and the MTP modules follow the last layer of the target; group
            ``rest`` is the name within the family's part.
        names: (regular expression on ``rest``, name in `MTPModel`), the first match wins; ``None``
            for weights that are the target's own. ``\1`` is the module's number.
        n_predict: config fields that may say how many modules there are; the checkpoint's keys
            decide where none does.
        overrides: config fields of the MTP layers.
        switches: how the layers are fed.
        recycles: what takes the place of the next state: ``"normed"``, the final norm's output, or
            ``"block"``, its input.
        shared_parts: norms and projection exist once for all modules.
        final_norm: whether there is one at all.
        own_heads: every module has an output head of its own.
    """

    method: str
    model_types: tuple[str, ...]
    where: str
    names: tuple[tuple[str, str | None], ...]
    n_predict: tuple[str, ...] = ("num_nextn_predict_layers",)
    overrides: Overrides = field(default=lambda config, n: {})
    switches: MTPSwitches = MTPSwitches()
    recycles: Literal["normed", "block"] = "normed"
    shared_parts: bool = False
    final_norm: bool = True
    own_heads: bool = False

    def locate(self, key: str, num_hidden_layers: int) -> str | None:
        """The part of a checkpoint's key that `names` is about, ``None`` if it isn't MTP's."""
        match = re.match(self.where, key)
        if match is None:
            return None
        groups = match.groupdict()
        if "layer" not in groups:
            return groups["rest"]
        index = int(groups["layer"]) - num_hidden_layers
        return None if index < 0 else f"layers.{index}.{groups['rest']}"

    def rename(self, rest: str) -> str | None:
        """The name in `MTPModel`; ``None`` for what the target has itself."""
        for pattern, name in self.names:
            match = re.match(pattern, rest)
            if match is not None:
                return None if name is None else match.expand(name) + rest[match.end() :]
        return rest

    def published(self, name: str, key: str, num_hidden_layers: int) -> str:
        """The key under which a checkpoint has what `MTPModel` calls ``name``; for messages.

        Args:
            name: in `MTPModel`.
            key: another key of the checkpoint's MTP part, for what stands before the names.
            num_hidden_layers: of the target.
        """
        rest = name
        for pattern, ours in self.names:
            match = ours and re.match(re.escape(ours).replace(r"\\1", r"(\d+)"), name)
            if match:
                head = re.sub(r"\(\?:[^)]*\)\?", "", pattern.removeprefix("^"))
                head = re.sub(r"\(\?:([^|)]*)[^)]*\)", r"\1", head).replace(r"\.", ".")
                rest = head.replace(r"(\d+)", match[1] if match.groups() else "0")
                rest = rest.replace(r"\d+", "0") + name[match.end() :]
                break
        known = self.locate(key, num_hidden_layers)
        if "<layer>" not in self.where:
            return key.removesuffix(known or "") + rest
        module, _, inner = rest.removeprefix("layers.").partition(".")
        return f"{key.split('layers.')[0]}layers.{num_hidden_layers + int(module)}.{inner}"

    def declared_modules(self, *configs: Any) -> int | None:
        """How many modules the configs declare; ``None`` if they don't say.

        Raises:
            ValueError: naming a field that is no number.
        """
        for config in configs:
            for name in self.n_predict:
                value = getattr(config, name, None)
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ValueError(
                        f"{name} must be an integer, the number of MTP modules, got {shown(value)}"
                    )
                return value
        return None


_PREFIX = r"^(?:model\.|language_model\.|llm\.)*"
# MTP modules stored as decoder layers behind the last one, and those under a name of their own.
_APPENDED = _PREFIX + r"layers\.(?P<layer>\d+)\.(?P<rest>.+)$"
_UNDER_MTP = _PREFIX + r"mtp\.(?P<rest>.+)$"

_TARGETS_OWN = (r"^layers\.\d+\.(?:embed_tokens|shared_head\.head)\.", None)


def _module_names(final_norm: str) -> tuple[tuple[str, str | None], ...]:
    """Names of modules that are a decoder layer with norms and projection beside it."""
    norms = rf"(?:{final_norm}|shared_head\.norm|final_layernorm|post_norm)"
    return (
        _TARGETS_OWN,
        (r"^layers\.(\d+)\.enorm\.", r"embedding_norm.\1."),
        (r"^layers\.(\d+)\.hnorm\.", r"hidden_norm.\1."),
        (r"^layers\.(\d+)\.eh_proj\.", r"projection.\1."),
        (rf"^layers\.(\d+)\.{norms}\.", r"final_norm.\1."),
        (r"^layers\.(\d+)\.", r"blocks.\1.0."),
    )


_DEEPSEEK_NAMES = _module_names(r"shared_head\.norm")
_FINAL_LAYERNORM_NAMES = _module_names("final_layernorm")
_QWEN_NAMES = (
    (r"^pre_fc_norm_embedding\.", "embedding_norm.0."),
    (r"^pre_fc_norm_hidden\.", "hidden_norm.0."),
    (r"^fc\.", "projection.0."),
    (r"^norm\.", "final_norm.0."),
    (r"^(?:embed_tokens|lm_head)\.", None),
    (r"^layers\.(\d+)\.", r"blocks.\1.0."),
)
_MASKED = MTPSwitches(mask_position_0=True)


def _full_attention(config: Any, n: int) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * n}


def _all_sparse(config: Any, n: int) -> dict[str, Any]:
    return {"mlp_layer_types": ["sparse"] * n}


def _indexed(config: Any, n: int) -> dict[str, Any]:
    # Every module chooses what it reads; none takes over the choice of the layer before it.
    types = {"layer_types": ["indexed_attention"] * n, "indexer_types": ["full"] * n}
    return {**types, **_all_sparse(config, n)}


def _qwen3_next(config: Any, n: int) -> dict[str, Any]:
    return {**_full_attention(config, n), "mlp_only_layers": [], "decoder_sparse_step": 1}


def _mimo_v2(config: Any, n: int) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention"] * n, "mlp_layer_types": ["dense"] * n}


def _nemotron_h(config: Any, n: int) -> dict[str, Any]:
    types = list(config.mtp_layers_block_type)
    return {"layer_types": types * (n // len(types))}


def _ernie(config: Any, n: int) -> dict[str, Any]:
    # Dense layers: the experts begin behind the last one.
    return {"moe_layer_start_index": n, "moe_layer_end_index": n}


def _exaone_moe(config: Any, n: int) -> dict[str, Any]:
    types = _cycle(getattr(config, "mtp_layer_types", None) or ["full_attention"], n)
    windows = getattr(config, "mtp_sliding_windows", None) or [config.sliding_window]
    # transformers leaves rotary positions out where a config has windows and a layer none; MTP
    # layers have them either way.
    window = int(windows[0] or 0) if "sliding_attention" in types else None
    return {"layer_types": types, "mlp_layer_types": ["dense"] * n, "sliding_window": window}


def _exaone4(config: Any, n: int) -> dict[str, Any]:
    types = getattr(config, "mtp_layer_types", None) or config.layer_types
    return {"layer_types": _cycle(types, n)}


def _step(config: Any, n: int) -> dict[str, Any]:
    types = _cycle(getattr(config, "mtp_layer_types", None) or ["full_attention"], n)
    heads = {"num_attention_heads": config.num_sliding_attention_heads}
    return {
        "layer_types": types,
        "mlp_layer_types": _cycle(getattr(config, "mtp_mlp_layer_types", None) or ["dense"], n),
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
        "per_layer_config": {i: heads for i, t in enumerate(types) if t == "sliding_attention"},
    }


def _bailing(config: Any, n: int) -> dict[str, Any]:
    return {**_full_attention(config, n), **_all_sparse(config, n)}


def _cycle(values: list[str], n: int) -> list[str]:
    return [values[i % len(values)] for i in range(n)]


_ROWS = (
    MTPFamily(
        "deepseek_mtp",
        ("deepseek_v3",),
        _APPENDED,
        _DEEPSEEK_NAMES,
        overrides=lambda config, n: {"first_k_dense_replace": 0},
        switches=_MASKED,
    ),
    MTPFamily(
        "deepseek_mtp",
        ("deepseek_v32", "glm_moe_dsa"),
        _APPENDED,
        _DEEPSEEK_NAMES,
        overrides=_indexed,
        switches=_MASKED,
    ),
    MTPFamily(
        "glm4_moe_mtp",
        ("glm4_moe",),
        _APPENDED,
        _DEEPSEEK_NAMES,
        overrides=lambda config, n: {"first_k_dense_replace": 0},
        switches=_MASKED,
        recycles="block",
    ),
    MTPFamily(
        "glm4_moe_lite_mtp",
        ("glm4_moe_lite",),
        _APPENDED,
        _DEEPSEEK_NAMES,
        overrides=_all_sparse,
        switches=_MASKED,
        recycles="block",
    ),
    MTPFamily(
        "glm_ocr_mtp",
        ("glm_ocr_text",),
        _APPENDED,
        _DEEPSEEK_NAMES,
        switches=_MASKED,
        recycles="block",
    ),
    MTPFamily(
        "qwen3_next_mtp",
        ("qwen3_next",),
        _UNDER_MTP,
        _QWEN_NAMES,
        overrides=_qwen3_next,
        shared_parts=True,
    ),
    MTPFamily(
        "qwen3_5_mtp",
        ("qwen3_5_text", "qwen3_5_moe_text"),
        _UNDER_MTP,
        _QWEN_NAMES,
        n_predict=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        overrides=_full_attention,
        shared_parts=True,
    ),
    # All modules of the checkpoint in turn; vLLM uses the first alone.
    MTPFamily(
        "mimo_v2_mtp",
        ("mimo_v2_flash",),
        _UNDER_MTP,
        (
            (r"^layers\.(\d+)\.pre_mlp_layernorm\.", r"blocks.\1.0.post_attention_layernorm."),
            *_FINAL_LAYERNORM_NAMES,
        ),
        overrides=_mimo_v2,
    ),
    # A module is several layers (mtp_layers_block_type), and there is one.
    MTPFamily(
        "nemotron_h_mtp",
        ("nemotron_h",),
        _UNDER_MTP,
        (
            (r"^layers\.\d+\.enorm\.", "embedding_norm.0."),
            (r"^layers\.\d+\.hnorm\.", "hidden_norm.0."),
            (r"^layers\.\d+\.eh_proj\.", "projection.0."),
            (r"^layers\.\d+\.final_layernorm\.", "final_norm.0."),
            (r"^layers\.(\d+)\.", r"blocks.0.\1."),
        ),
        overrides=_nemotron_h,
    ),
    MTPFamily(
        "ernie_mtp",
        ("ernie4_5_moe",),
        r"^model\.(?P<rest>mtp_.+)$",
        (
            (r"^mtp_emb_norm\.(\d+)\.", r"embedding_norm.\1."),
            (r"^mtp_hidden_norm\.(\d+)\.", r"hidden_norm.\1."),
            (r"^mtp_linear_proj\.(\d+)\.", r"projection.\1."),
            (r"^mtp_block\.(\d+)\.", r"blocks.\1.0."),
        ),
        overrides=_ernie,
        switches=_MASKED,
        recycles="block",
        final_norm=False,
    ),
    MTPFamily(
        "exaone_moe_mtp",
        ("exaone_moe",),
        _UNDER_MTP,
        _QWEN_NAMES,
        overrides=_exaone_moe,
        shared_parts=True,
    ),
    MTPFamily(
        "exaone4_5_mtp",
        ("exaone4",),
        _UNDER_MTP,
        _QWEN_NAMES,
        overrides=_exaone4,
        shared_parts=True,
    ),
    # A dense layer with one attention, unlike the target's: see `longcat_mtp`.
    MTPFamily(
        "longcat_flash_mtp",
        ("longcat_flash",),
        _UNDER_MTP,
        (
            (r"^layers\.(\d+)\.enorm\.m\.", r"embedding_norm.\1."),
            (r"^layers\.(\d+)\.hnorm\.m\.", r"hidden_norm.\1."),
            (r"^layers\.(\d+)\.transformer_layer\.", r"blocks.\1.0."),
            (r"^norm\.", "final_norm.0."),
            (r"^embed_tokens\.", None),
            *_DEEPSEEK_NAMES,
        ),
    ),
    MTPFamily(
        "hy_v3_mtp",
        ("hy_v3",),
        _APPENDED,
        _FINAL_LAYERNORM_NAMES,
        overrides=_all_sparse,
        switches=_MASKED,
    ),
    MTPFamily(
        "step3p5_mtp",
        ("step3p5",),
        _APPENDED,
        (
            (r"^layers\.(\d+)\.(?:transformer\.)?shared_head\.output\.", r"heads.\1."),
            (r"^layers\.(\d+)\.(?:transformer\.)?shared_head\.norm\.", r"final_norm.\1."),
            (r"^layers\.(\d+)\.transformer\.", r"blocks.\1.0."),
            *_DEEPSEEK_NAMES,
        ),
        overrides=_step,
        switches=MTPSwitches(feed="pre_norm"),
        recycles="block",
        own_heads=True,
    ),
    MTPFamily(
        "bailing_hybrid_mtp",
        ("bailing_hybrid",),
        _APPENDED,
        _FINAL_LAYERNORM_NAMES,
        overrides=_bailing,
        switches=_MASKED,
    ),
)

FAMILIES: dict[str, MTPFamily] = {
    model_type: family for family in _ROWS for model_type in family.model_types
}
"""By the ``model_type`` of the target's text config."""


def family_of(config: Any) -> MTPFamily | None:
    """The family of a target's config, ``None`` if it has none here."""
    return FAMILIES.get(config.get_text_config(decoder=True).model_type)
