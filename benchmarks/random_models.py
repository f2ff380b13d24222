"""Models of real shapes with random weights: what they cost is right, what they say is noise."""

import torch
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.initialization import no_init_weights

from hf_specdec.modeling.mlp_speculator import MLPSpeculatorConfig, MLPSpeculatorPreTrainedModel

_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
# By name: the sizes above, in their order.
SHAPES = {
    "smollm2-135m": (49152, 576, 1536, 30, 9, 3),
    "llama-1b": (128256, 2048, 8192, 16, 32, 8),
    "tiny": (512, 32, 64, 2, 4, 2),
}
_SEED = 7


def random_llama(shape, dtype, max_positions=8192):
    """A Llama of one of the `SHAPES`, in evaluation mode, that never ends by itself."""
    config = LlamaConfig(
        **dict(zip(_SHAPE, SHAPES[shape], strict=True)),
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    model = _without_init(lambda: LlamaForCausalLM(config), dtype)
    _fill(model, std=0.02)
    model.generation_config.pad_token_id = 0
    return model.eval()


def random_speculator(target, heads, inner):
    """An MLP speculator for a target; all heads share their weights, as in the larger ones."""
    config = MLPSpeculatorConfig(
        vocab_size=target.config.vocab_size,
        emb_dim=target.config.hidden_size,
        inner_dim=inner,
        n_predict=heads,
        tie_weights=True,
        scale_input=True,
    )
    model = _without_init(lambda: MLPSpeculatorPreTrainedModel(config), target.dtype)
    _fill(model, std=0.02)
    return model.eval()


def random_cache(target, rows, length):
    """Keys and values of a context of that length, as transformers keeps them.

    Random numbers are as good as a random model's own, and save running the context.
    """
    config = target.config
    dim = config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(_SEED)
    shape = (rows, config.num_key_value_heads, length, dim)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(shape, generator=generator).to(target.dtype)
        values = torch.randn(shape, generator=generator).to(target.dtype)
        cache.update(keys, values, layer)
    return cache


def gemma4_pair(dtype, layers, hidden, vocabulary, noise):
    """A Gemma 4 target, and an assistant that guesses a part of what it says.

    The target's embeddings lie in a small space, where its output head reads them in another
    order: without its layers every token has one successor, which the assistant knows. The layers
    add random states, ``noise`` times as large as a norm's output, so that the target follows its
    tokens' successors only at times: the more noise, the less often.

    Returns:
        Target and assistant, in evaluation mode.
    """
    narrow = hidden // 4
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        target = Gemma4ForCausalLM(_gemma4_config(hidden, layers, vocabulary))
        config = Gemma4AssistantConfig(
            text_config=_gemma4_config(narrow, 4, vocabulary, num_kv_shared_layers=4),
            backbone_hidden_size=hidden,
        )
        assistant = Gemma4AssistantForCausalLM(config)
        codes, basis, successors = _successors(vocabulary, narrow, hidden)
    with torch.no_grad():
        target.model.embed_tokens.weight.copy_(codes @ basis.T)
        target.lm_head.weight.copy_(successors @ basis.T)
        assistant.lm_head.weight.copy_(successors)
        assistant.pre_projection.weight.zero_()
        assistant.pre_projection.weight[:, :hidden].copy_(basis.T)
        for model, scale in ((target, noise), (assistant, 0.02)):
            for layer in model.model.layers:
                layer.post_attention_layernorm.weight.fill_(scale)
                layer.post_feedforward_layernorm.weight.fill_(scale)
    for model in (target, assistant):
        model.to(dtype).eval()
    target.generation_config.pad_token_id = 0
    return target, assistant


def llama_pair(dtype, layers, hidden, vocabulary, noise):
    """The same for Llamas: a target, and a draft model of two narrow layers."""
    narrow = hidden // 4
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        target, draft = (
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=vocabulary,
                    hidden_size=width,
                    intermediate_size=4 * width,
                    num_hidden_layers=depth,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=4096,
                    tie_word_embeddings=False,
                    eos_token_id=None,
                    bos_token_id=None,
                    pad_token_id=0,
                )
            )
            for width, depth in ((hidden, layers), (narrow, 2))
        )
        codes, basis, successors = _successors(vocabulary, narrow, hidden)
        for model, width, scale in ((target, hidden, noise), (draft, narrow, 0.02)):
            for layer in model.model.layers:
                attention, mlp = layer.self_attn, layer.mlp
                for linear in (attention.v_proj, mlp.gate_proj, mlp.up_proj):
                    torch.nn.init.normal_(linear.weight, std=width**-0.5)
                torch.nn.init.normal_(attention.o_proj.weight, std=scale * width**-0.5)
                torch.nn.init.normal_(mlp.down_proj.weight, std=scale * (4 * width) ** -0.5)
    with torch.no_grad():
        # As long as a vector of ones.
        target.model.embed_tokens.weight.copy_(hidden**0.5 * codes @ basis.T)
        target.lm_head.weight.copy_(successors @ basis.T)
        draft.model.embed_tokens.weight.copy_(narrow**0.5 * codes)
        draft.lm_head.weight.copy_(successors)
    for model in (target, draft):
        model.to(dtype).eval()
        model.generation_config.pad_token_id = 0
    return target, draft


def _successors(vocabulary, narrow, hidden):
    """Unit codes ``[V, n]`` of all tokens, a basis ``[d, n]``, and the codes by successor."""
    codes = torch.nn.functional.normalize(torch.randn(vocabulary, narrow), dim=1)
    basis = torch.linalg.qr(torch.randn(hidden, narrow)).Q
    return codes, basis, codes[torch.randperm(vocabulary)]


def _gemma4_config(hidden, layers, vocabulary, **fields):
    """A decoder with sliding and full layers, whose keys have the same sizes in both models."""
    return Gemma4TextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        sliding_window=64,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        **fields,
    )


def _without_init(make, dtype):
    """A model whose weights are still to be filled; transformers' own way takes a minute for 1B."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            return make()
    finally:
        torch.set_default_dtype(default)


def _fill(model, std):
    """Random matrices, ones for the norms."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(_SEED)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
            else:
                parameter.fill_(1.0)
